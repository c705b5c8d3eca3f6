"""The removal of listed objects of a bucket, some of which the store refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import obstore
import pytest
from obstore.exceptions import PermissionDeniedError

from distop.storage import listed_removal
from distop.storage.object_store import LARGEST, Listed, Version
from distop.storage.opened_stores import memory_store
from distop.storage.store_errors import Denied, StoreUnavailable, UnknownWrite

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.storage.object_store import ObjectStore, StoredObject


@pytest.fixture
def store() -> ObjectStore:
    found = memory_store()
    for n in range(5):
        found.put_new(f"a/{n}", b"content")
    return found


def listed(store: ObjectStore) -> list[Listed]:
    return [Listed(one.key, one.size, one.stamp) for one in store.list("a")]


def keys(store: ObjectStore) -> list[str]:
    return [one.key for one in store.list()]


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, refused: str) -> None:
    """Let a function of obstore refuse calls that name this object."""
    real = getattr(obstore, name)

    def refusing(of: Any, paths: str | Sequence[str], *others: Any, **options: Any) -> Any:
        if refused in ([paths] if isinstance(paths, str) else paths):
            raise PermissionDeniedError("refused")
        return real(of, paths, *others, **options)

    monkeypatch.setattr(obstore, name, refusing)


def test_a_denied_object_is_a_failure_and_the_others_are_removed(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = listed(store)
    refuse(monkeypatch, "delete", "a/2")
    found = store.remove_listed([*wanted, Listed("a/none", 1, "x")])
    assert (list(found.removed), list(found.missing)) == (["a/0", "a/1", "a/3", "a/4"], ["a/none"])
    assert list(found.failed) == ["a/2"]
    assert keys(store) == ["a/2"]


def test_an_object_that_cannot_be_examined_stays(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, head = listed(store), type(store).head

    def refusing(own: ObjectStore, key: str) -> StoredObject:
        if key == "a/2":
            raise Denied("refused")
        return head(own, key)

    monkeypatch.setattr(type(store), "head", refusing)
    found = store.remove_listed(wanted)
    assert (len(found.removed), found.failed) == (4, {"a/2": "refused"})
    assert keys(store) == ["a/2"]


def test_an_object_that_cannot_be_copied_stays(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = listed(store)
    refuse(monkeypatch, "copy", "a/2")
    found = store.move_listed({one: f"q/{one.key}" for one in wanted})
    assert (len(found.removed), list(found.failed)) == (4, ["a/2"])
    assert keys(store) == ["a/2", "q/a/0", "q/a/1", "q/a/3", "q/a/4"]


def test_an_object_that_cannot_be_removed_after_its_copy_is_a_failure(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = listed(store)
    refuse(monkeypatch, "delete", "a/2")
    found = store.move_listed({one: f"q/{one.key}" for one in wanted})
    assert (len(found.removed), list(found.failed)) == (4, ["a/2"])
    assert {"a/2", "q/a/2"} <= set(keys(store))


def test_an_object_that_one_copy_cannot_hold_stays(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listed_removal, "LARGEST", 6)
    assert LARGEST > 6
    found = store.move_listed({one: f"q/{one.key}" for one in listed(store)})
    assert (found.removed, len(found.failed)) == ([], 5)
    assert len(keys(store)) == 5


def test_a_busy_store_is_no_failure_of_an_object(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = listed(store)

    def busy(*_: Any) -> None:
        raise StoreUnavailable("later")

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "delete_many", busy)
        with pytest.raises(StoreUnavailable):
            store.remove_listed(wanted)
    assert len(store.remove_listed(wanted).removed) == 5


def test_the_name_of_a_new_key_may_be_too_long(store: ObjectStore) -> None:
    found = store.move_listed({one: f"{'q' * 1100}/{one.key}" for one in listed(store)})
    assert (found.removed, len(found.failed)) == ([], 5)


def test_neighbours_are_examined_by_a_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are gone, replaced, or beside others that stay."""
    store, heads = memory_store(), list[str]()
    for n in range(60):
        store.put_new(f"a/b/k={n // 10}/caf\u00e9 {n:02}%20", b"content")
        store.put_new(f"a/b/k={n // 10}/other {n:02}", b"stays")
    wanted = [Listed(one.key, one.size, one.stamp) for one in store.list() if "caf" in one.key]
    replaced, gone = wanted[7].key, wanted[8].key
    store.replace_if(replaced, b"other content", store.head(replaced).version)
    store.delete_many([gone])
    store.put_new("a/b2", b"stays")
    store.put_new("a/b/k=0/a", b"stays")
    head = type(store).head
    monkeypatch.setattr(type(store), "head", lambda own, key: heads.append(key) or head(own, key))
    found = store.remove_listed([*reversed(wanted), Listed("a/b/k=9/none", 1, "x")])
    assert (len(found.removed), list(found.changed), set(found.missing)) == (58, [replaced], {gone, "a/b/k=9/none"})
    assert set(heads) == {wanted[0].key, gone, "a/b/k=9/none"}, "a listing starts after a key"
    assert len(keys(store)) == 60 + 3
    assert store.get(replaced, limit=100).data == b"other content"


def test_objects_that_are_far_apart_are_examined_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listed_removal, "MOST_NEIGHBOURS", 2)
    store, heads = memory_store(), list[str]()
    for n in range(200):
        store.put_new(f"{n:03}", b"content")
    wanted = [Listed(one.key, one.size, one.stamp) for one in list(store.list())[::5]]
    head = type(store).head
    monkeypatch.setattr(type(store), "head", lambda own, key: heads.append(key) or head(own, key))
    assert len(store.remove_listed(wanted).removed) == 40
    assert {one.key for one in wanted[20:]} <= set(heads)
    assert len(keys(store)) == 160


def test_a_wrong_listing_does_not_show_that_objects_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    store = memory_store()
    for n in range(50):
        store.put_new(f"a/{n}", b"content")
    wanted = listed(store)
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "list", lambda *_, **__: iter(()))
        found = store.remove_listed(wanted)
    assert (len(found.removed), found.missing) == (50, [])
    assert keys(store) == []


def test_without_the_right_to_list_objects_are_examined_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    store = memory_store()
    for n in range(50):
        store.put_new(f"a/{n}", b"content")
    wanted = listed(store)

    def refused(*_: Any, **__: Any) -> None:
        raise Denied("no listing")

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "list", refused)
        assert len(store.remove_listed(wanted).removed) == 50
    assert keys(store) == []


def test_a_copy_of_which_it_is_unknown_whether_it_was_made_is_no_failure(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost answer was a failure of the file, so that the move was never tried again."""
    wanted, copy_new = listed(store), type(store).copy_new

    def unknown(own: ObjectStore, source: str, target: str) -> Version:
        version = copy_new(own, source, target)
        if source == "a/2":
            raise UnknownWrite("no answer")
        return version

    monkeypatch.setattr(type(store), "copy_new", unknown)
    moves = {one: f"q/{one.key}" for one in wanted}
    with pytest.raises(StoreUnavailable, match="no answer"):
        store.move_listed(moves)
    assert {one for one in keys(store) if one.startswith("a/")} == {f"a/{n}" for n in range(5)}
    monkeypatch.setattr(type(store), "copy_new", copy_new)
    found = store.move_listed(moves)
    assert (len(found.removed), found.failed) == (5, {})
    assert keys(store) == [f"q/a/{n}" for n in range(5)]
