"""What each store promises, on each kind of store."""

from __future__ import annotations

import os
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from distop.errors import UnsafePath
from distop.storage import remote_store
from distop.storage.files import TooLarge
from distop.storage.folder_store import FolderStore
from distop.storage.object_store import PART, Listed, Version, scratch_name
from distop.storage.store_errors import ObjectChanged, ObjectExists, ObjectMissing
from tests.storage.conftest import ALL

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.storage.object_store import ObjectStore

THREADS = 16
LARGE = 2 * PART + 12345
LIMIT = 1 << 20

pytestmark = [
    pytest.mark.parametrize("store", ALL, indirect=True),
    pytest.mark.timeout(300),  # Azurite starts slowly on a busy machine
]


def write(store: ObjectStore, *keys: str) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda key: store.put_new(key, key.encode()), keys))


def keys(store: ObjectStore, folder: str = "", after: str = "") -> list[str]:
    return [found.key for found in store.list(folder, after=after)]


def winners(attempt: Callable[[int], object], refusal: type[Exception]) -> list[int]:
    """The numbers of the threads whose attempt succeeds, of many at the same time."""
    barrier = threading.Barrier(THREADS)

    def wins(n: int) -> bool:
        barrier.wait()
        try:
            attempt(n)
        except refusal:
            return False
        return True

    with ThreadPoolExecutor(THREADS) as pool:
        return [n for n, won in enumerate(pool.map(wins, range(THREADS))) if won]


def test_the_end_of_an_object_is_read_with_its_size_and_version(store: ObjectStore) -> None:
    version = store.put_new("a/b", b"content")
    for count, data in ((4, b"tent"), (7, b"content"), (100, b"content")):
        found = store.get_end("a/b", count)
        assert (found.data, found.stored) == (data, store.head("a/b"))
        assert found.stored.version == version
    store.put_new("a/empty", b"")
    assert store.get_end("a/empty", 4).data == b""
    with pytest.raises(ObjectMissing):
        store.get_end("a/c", 4)


def test_an_object_is_read_as_it_was_written(store: ObjectStore) -> None:
    version = store.put_new("a/b", b"content")
    found = store.get("a/b", limit=LIMIT)
    assert (found.data, found.stored.key, found.stored.size) == (b"content", "a/b", 7)
    assert found.stored.version == version == store.head("a/b").version


def test_an_empty_object(store: ObjectStore) -> None:
    store.put_new("empty", b"")
    assert store.get("empty", limit=0).data == b""
    assert store.get_ranges("empty", [(0, 10)]) == [b""]


def test_exactly_one_of_many_writers_creates_an_object(store: ObjectStore) -> None:
    won = winners(lambda n: store.put_new("race", b"%d" % n), ObjectExists)
    assert len(won) == 1
    assert store.get("race", limit=LIMIT).data == b"%d" % won[0]


def test_an_existing_object_is_not_overwritten_even_by_the_same_content(store: ObjectStore) -> None:
    store.put_new("a", b"first")
    for data in (b"second", b"first"):
        with pytest.raises(ObjectExists):
            store.put_new("a", data)
    assert store.get("a", limit=LIMIT).data == b"first"


def test_an_object_is_replaced_only_in_its_known_version(store: ObjectStore) -> None:
    first = store.put_new("a", b"1")
    second = store.replace_if("a", b"2", first)
    assert second != first
    with pytest.raises(ObjectChanged):
        store.replace_if("a", b"3", first)
    store.replace_if("a", b"4", second)
    assert store.get("a", limit=LIMIT).data == b"4"


def test_exactly_one_of_many_writers_replaces_a_version(store: ObjectStore) -> None:
    first = store.put_new("a", b"first")
    won = winners(lambda n: store.replace_if("a", b"%d" % n, first), ObjectChanged)
    assert len(won) == 1
    assert store.get("a", limit=LIMIT).data == b"%d" % won[0]


def test_a_missing_object_is_not_replaced(store: ObjectStore) -> None:
    version = store.put_new("a", b"1")
    store.delete_many(["a"])
    with pytest.raises(ObjectChanged):
        store.replace_if("a", b"2", version)
    assert keys(store) == []


def test_what_is_missing(store: ObjectStore) -> None:
    with pytest.raises(ObjectMissing):
        store.get("none", limit=LIMIT)
    with pytest.raises(ObjectMissing):
        store.head("none/of/these")
    with pytest.raises(ObjectMissing):
        store.get_ranges("none", [(0, 1)])
    with pytest.raises(ObjectMissing):
        store.copy_new("none", "target")
    store.put_new("a/b", b"")
    with pytest.raises(ObjectMissing):  # a folder is no object
        store.get("a", limit=LIMIT)
    assert keys(store) == ["a/b"]
    assert keys(store, "none") == []


def test_an_object_over_the_limit_is_not_read(store: ObjectStore) -> None:
    store.put_new("a", b"12345")
    assert store.get("a", limit=5).data == b"12345"
    with pytest.raises(TooLarge, match="more than 4 bytes"):
        store.get("a", limit=4)


def test_ranges(store: ObjectStore) -> None:
    data = bytes(range(256)) * 20_000
    store.put_new("a", data)
    size = len(data)
    asked = [(size - 4, size), (0, 4), (2, 6), (3_000_000, 3_000_100), (7, 7), (size - 2, size + 100), (size, size + 5)]
    assert store.get_ranges("a", asked) == [data[start:end] for start, end in asked]
    assert store.get_ranges("a", [(size + 10, size + 20)]) == [b""]
    assert store.get_ranges("a", []) == []


def test_ranges_of_another_version_are_not_read(store: ObjectStore) -> None:
    first = store.put_new("a", b"x" * (3 << 20))
    asked = [(0, 1), (2 << 20, (2 << 20) + 1)]
    assert store.get_ranges("a", asked, version=first) == [b"x", b"x"]
    store.replace_if("a", b"y" * (3 << 20), first)
    for some in (asked, asked[:1]):
        with pytest.raises(ObjectChanged):
            store.get_ranges("a", some, version=first)


def test_a_listing_shows_what_was_written_and_removed_before(store: ObjectStore) -> None:
    for n in range(20):
        store.put_new(f"a/{n:02d}", b"")
        assert keys(store, "a")[-1] == f"a/{n:02d}"
    store.delete_many([f"a/{n:02d}" for n in range(19)] + ["a/none"])
    assert keys(store) == ["a/19"]


def test_a_listing_is_sorted_by_key(store: ObjectStore) -> None:
    names = ["a/b", "a.txt", "a0", "a/b/c", "a/b-c", "ab", "a", "Z", "é", "a/b.d"]
    # A disk has either a file or a folder of a name.
    wanted = [name for name in names if name not in ("a", "a/b")]
    write(store, *wanted)
    assert keys(store) == sorted(wanted)
    assert keys(store, "a") == ["a/b-c", "a/b.d", "a/b/c"]
    for after in ("a/b.d", "a/b/", "a/b/c", "a0", "a/c", "zz"):
        assert keys(store, after=after) == [key for key in sorted(wanted) if key > after], after


@pytest.mark.rotating
def test_a_listing_has_several_pages(store: ObjectStore) -> None:
    # A folder has no pages, and flushes each file. A page of Azure has 5,000 objects.
    count = 50 if isinstance(store, FolderStore) or store.location.startswith("abfss:") else 1100
    wanted = [f"many/{n:05d}" for n in range(count)]
    write(store, *wanted)
    assert keys(store, "many") == wanted
    assert keys(store, "many", f"many/{count - 20:05d}") == wanted[count - 19 :]
    store.delete_many(wanted)
    assert keys(store) == []


def test_a_folder_is_listed_alone(store: ObjectStore) -> None:
    write(store, "a/1", "a/2", "a/b/3", "a/c/d/4", "e")
    found = store.list_folder("a")
    assert (list(found.folders), [one.key for one in found.objects]) == (["b", "c"], ["a/1", "a/2"])
    top = store.list_folder()
    assert (list(top.folders), [one.key for one in top.objects]) == (["a"], ["e"])
    none = store.list_folder("none")
    assert (list(none.folders), list(none.objects)) == ([], [])


def test_a_listing_has_size_version_and_time(store: ObjectStore) -> None:
    version = store.put_new("a/b", b"123")
    [found] = store.list("a")
    assert found == store.head("a/b")
    assert (found.size, found.version) == (3, version)
    assert found.modified > 1e9
    store.replace_if("a/b", b"4567", found.version)
    with pytest.raises(ObjectChanged):
        store.replace_if("a/b", b"8", found.version)


def test_names_of_any_kind(store: ObjectStore) -> None:
    names = ["k/a%b c#d=1", "k/%2E%2F?x&y+z", "k/ü", "k/.hidden", "k/~x*[]", "k/a:b", "k/'\"<>|", "k/\U0001f600"]
    write(store, *names)
    assert keys(store, "k") == sorted(names)
    for name in names:
        assert store.get(name, limit=LIMIT).data == name.encode()
    store.delete_many(names)
    assert keys(store) == []


@pytest.mark.parametrize("key", ["", "/a", "a//b", "a/", "../a", "a/./b", "a\nb", "a\0b", "\ud800", "k" * 1025])
def test_a_key_that_is_no_path_below_a_folder_is_refused(store: ObjectStore, key: str) -> None:
    for call in (
        lambda: store.put_new(key, b""),
        lambda: store.get(key, limit=LIMIT),
        lambda: store.put_large(key, [b""]),
        lambda: store.copy_new("a", key),
        lambda: store.delete_many([key]),
    ):
        with pytest.raises(UnsafePath):
            call()


def test_a_large_object(store: ObjectStore) -> None:
    content = uuid.uuid4().bytes * (LARGE // 16)
    pieces = [content[n : n + 1_000_000] for n in range(0, len(content), 1_000_000)]
    version = store.put_large("a/large", iter(pieces))
    found = store.get("a/large", limit=LARGE)
    assert found.data == content
    assert found.stored.version == version
    assert keys(store) == ["a/large"]


def test_a_large_object_does_not_replace_another_one(store: ObjectStore) -> None:
    store.put_new("a", b"first")
    for size in (10, LARGE):
        with pytest.raises(ObjectExists):
            store.put_large("a", iter([b"x" * size]))
    assert store.get("a", limit=LIMIT).data == b"first"
    assert keys(store) == ["a"]


def test_a_large_object_that_fails_leaves_nothing(store: ObjectStore) -> None:
    def pieces():  # type: ignore[no-untyped-def]
        yield b"x" * LARGE
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        store.put_large("a", pieces())
    assert keys(store) == []


def test_a_copy_does_not_replace_another_object(store: ObjectStore) -> None:
    store.put_new("a", b"content")
    version = store.copy_new("a", "b/c")
    assert store.get("b/c", limit=LIMIT).stored.version == version
    assert store.get("b/c", limit=LIMIT).data == b"content"
    store.put_new("d", b"other")
    with pytest.raises(ObjectExists):
        store.copy_new("a", "d")
    assert store.get("d", limit=LIMIT).data == b"other"


def test_removing_ignores_missing_files(store: ObjectStore) -> None:
    write(store, "a/1", "a/2", "b")
    store.delete_many(["none", "a/1", "none/either", "b"])
    assert keys(store) == ["a/2"]
    store.delete_many([])
    store.delete_many(["a/2", "a/2"])
    assert keys(store) == []


def test_a_version_is_no_other_objects(store: ObjectStore) -> None:
    store.put_new("a", b"1")
    other = Version('"0123456789abcdef"', "1234567")
    with pytest.raises(ObjectChanged):
        store.replace_if("a", b"2", other)
    assert store.get("a", limit=LIMIT).data == b"1"


def test_an_object_is_replaced_by_the_last_writer(store: ObjectStore) -> None:
    store.put("a", b"1")
    version = store.put("a", b"2")
    found = store.get("a", limit=LIMIT)
    assert (found.data, found.stored.version) == (b"2", version)
    contents = [b"%d" % n for n in range(THREADS)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda data: store.put("b", data), contents))
    assert store.get("b", limit=LIMIT).data in contents


def test_a_folder_is_removed_with_everything_in_it(store: ObjectStore) -> None:
    write(store, "a/b/1", "a/b/c/2", "a/bc/3", "a/b.4", f"a/b/{scratch_name()}")
    for _ in range(2):
        store.delete_folder("a/b")
        assert keys(store) == ["a/b.4", "a/bc/3"]
    write(store, "a/b")
    with pytest.raises(UnsafePath):
        store.delete_folder("")


def test_an_object_larger_than_one_request_is_read_whole(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_store, "ONE_READ", PART - 1)
    content = uuid.uuid4().bytes * (LARGE // 16)
    version = store.put_large("a", [content])
    found = store.get("a", limit=LARGE)
    assert (found.data == content, found.stored.version) == (True, version)


def test_an_open_object_is_read_in_parts(store: ObjectStore) -> None:
    content = bytes(range(256)) * 4096
    version = store.put_new("a", content)
    with store.open("a") as found:
        assert (found.stored.size, found.stored.version) == (len(content), version)
        assert found.file.seek(-4, os.SEEK_END) == len(content) - 4
        assert found.file.read() == content[-4:]
        found.file.seek(300_000)
        assert found.file.read(600_000) == content[300_000:900_000]
        assert found.file.tell() == 900_000
    with pytest.raises(ObjectMissing), store.open("b"):
        pass


def test_objects_that_killed_processes_left_incomplete_are_removed(store: ObjectStore) -> None:
    left = [f"{folder}{scratch_name()}" for folder in ("", "a/", "a/b/")]
    write(store, *left, "a/c", "d")

    def there() -> list[str]:
        found = []
        for key in left:
            with suppress(ObjectMissing):
                found.append(store.head(key).key)
        return found

    store.delete_incomplete("a", older_than=3600.0)
    assert there() == left, "they may be written now"
    store.delete_incomplete("a")
    assert there() == [left[0], left[2]]
    store.delete_incomplete()
    store.delete_incomplete("missing")
    assert there() == [left[2]]
    assert keys(store) == ["a/c", "d"]


def listed(store: ObjectStore, *only: str) -> list[Listed]:
    return [Listed(one.key, one.size, one.stamp) for one in store.list() if not only or one.key in only]


def test_only_listed_objects_that_have_not_changed_are_removed(store: ObjectStore) -> None:
    write(store, "a/1", "a/2", "a/3", "b/1")
    wanted = listed(store, "a/1", "a/2", "a/3")
    store.delete_many(["a/2"])
    store.replace_if("a/3", b"new content", store.head("a/3").version)
    found = store.remove_listed(wanted)
    assert (found.removed, found.missing, found.changed, found.failed) == (["a/1"], ["a/2"], ["a/3"], {})
    assert keys(store) == ["a/3", "b/1"]
    assert store.remove_listed([]).removed == []


def test_listed_objects_are_moved_once(store: ObjectStore) -> None:
    write(store, "a/1", "a/2", "a/3", "b/1")
    wanted = {one: f"q/x/{one.key}" for one in listed(store, "a/1", "a/2", "a/3")}
    store.copy_new("a/1", "q/x/a/1")  # a move was interrupted
    store.replace_if("a/2", b"new content", store.head("a/2").version)
    found = store.move_listed(wanted)
    assert (found.missing, found.changed) == ([], ["a/2"])
    # On a disk, only the same file counts as moved; in an object store, an object of the same content.
    moved, failed = (["a/1", "a/3"], []) if not isinstance(store, FolderStore) else (["a/3"], ["a/1"])
    assert (found.removed, list(found.failed)) == (moved, failed)
    assert store.get("q/x/a/3", limit=LIMIT).data == b"a/3"
    again = store.move_listed(wanted)
    assert (again.removed, again.changed) == ([], ["a/2"])
    assert keys(store) == [*failed, "a/2", "b/1", "q/x/a/1", "q/x/a/3"]


def test_an_object_of_other_content_is_not_overwritten_by_a_move(store: ObjectStore) -> None:
    write(store, "a/1")
    store.put_new("q/1", b"other")
    found = store.move_listed({listed(store, "a/1")[0]: "q/1"})
    assert (found.removed, list(found.failed)) == ([], ["a/1"])
    assert store.get("a/1", limit=LIMIT).data == b"a/1"
    assert store.get("q/1", limit=LIMIT).data == b"other"


def test_the_time_of_a_store_is_that_of_its_objects(store: ObjectStore) -> None:
    write(store, "a/1")
    before = store.head("a/1").modified
    assert store.time("own") >= before
    write(store, "a/2")
    assert store.time("own") >= store.head("a/2").modified
    assert keys(store) == ["a/1", "a/2"]
