"""The replacement of files of a folder: killed, overtaken and interrupted at each of its steps."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distop.errors import InvalidArgument, TableUnavailable
from distop.storage.deletion import Place
from distop.storage.folder_store import FolderStore
from distop.storage.location import Location
from distop.storage.object_store import is_scratch
from distop.tables.commits import Conflict
from distop.tables.parquet import folder_swap
from distop.tables.parquet.folder_swap import BACK, FORWARD, STAGED, SWAP, FolderSwaps, SwapEntry, SwappedFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ROWS = {"a": "1", "b": "2", "new-a": "9", "c": "3", "x": "1", "y": "2", "z": "12", "w": "12"}
"""The rows of each file by its content."""


CALLS = ("put_new", "get", "head", "list_folder", "delete_many", "remove_listed", "move_listed")
"""The calls of a store."""


class Killed(BaseException):
    """The process ends here."""


class Bench:
    """A folder with two files, ``a`` and ``b``, and the entries that replace them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("a")
        self.write("b")

    def write(self, name: str, content: str = "", folder: str = "p=1") -> None:
        path = self.root / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content or name)

    @property
    def swaps(self) -> FolderSwaps:
        return FolderSwaps(str(self.root), lambda: None)

    def entry(self, old: str, new: str, folder: str = "stage", group: int = 0) -> SwapEntry:
        """An entry that replaces some files of one letter by others, which it stages."""
        source = f"{STAGED}/{folder}"
        for name in new:
            self.write(name, folder=source)
        store = self.swaps.table
        removed = [store.head(f"p=1/{name}") for name in old]
        added = [store.head(f"{source}/{name}") for name in new]
        return SwapEntry(
            operation="t/compact/1",
            identity="0" * 24,
            fence="1",
            group=group,
            digest=hashlib.blake2b(new.encode(), digest_size=8).hexdigest(),
            folder="p=1",
            source=source,
            removed=tuple(SwappedFile(name, one.size, one.stamp) for name, one in zip(old, removed, strict=True)),
            added=tuple(
                SwappedFile(name, one.size, one.stamp, hashlib.sha256(name.encode()).hexdigest())
                for name, one in zip(new, added, strict=True)
            ),
        )

    def next(self) -> int:
        return self.swaps.settle().top + 1

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in (self.root / "p=1").iterdir())

    @property
    def rows(self) -> str:
        """The rows that readers find, sorted; a row that is there twice is twice in it."""
        return "".join(sorted("".join(ROWS[path.read_text()] for path in (self.root / "p=1").iterdir())))

    @property
    def hidden(self) -> list[str]:
        """What is left in the hidden folders, without files that a killed process had not completed."""
        found = (path.name for path in (self.root / "_distop").rglob("*") if path.is_file())
        return sorted(name for name in found if not is_scratch(name))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "t")


class Steps:
    """Counts the steps that change a disk, and acts before or after one of them.

    ``calls``: instead of these steps, count calls of a store, between which another process can act: a folder is locked
    while files in it are removed.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *, calls: bool = False) -> None:
        self.count = 0
        self._calls = calls
        self._at: tuple[int, str] | None = None
        self._act: Callable[[], None] = lambda: None
        for name in CALLS if calls else ("link", "unlink"):
            owner = FolderStore if calls else os
            patch.setattr(owner, name, self._wrapped(getattr(owner, name)))

    def at(self, number: int, moment: str, act: Callable[[], None]) -> None:
        self.count, self._at, self._act = 0, (number, moment), act

    def _wrapped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **given: Any) -> Any:
            if self._at is None or not (self._calls or given.keys() & {"dir_fd", "src_dir_fd"}):
                return original(*args, **given)
            self.count += 1
            number, moment = self._at
            if self.count != number:
                return original(*args, **given)
            act, self._at = self._act, None
            if moment == "before":
                act()
            found = original(*args, **given)
            if moment == "after":
                act()
            return found

        return wrapped


def kill() -> None:
    raise Killed


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch, calls=True)


def each_step(tmp_path: Path) -> Iterable[tuple[int, str, Bench]]:
    """A new bench for each moment; the caller stops when its steps are over."""
    for number in range(1, 100):
        for moment in ("before", "after"):
            yield number, moment, Bench(tmp_path / f"{number}-{moment}")


def test_files_are_replaced(bench: Bench) -> None:
    assert bench.swaps.swap(1, bench.entry("ab", "xy")) == FORWARD
    assert (bench.files, bench.rows) == (["x", "y"], "12")
    state = bench.swaps.state()
    assert (state.top, state.unfinished, [one.way for one in state.finished]) == (1, None, [FORWARD])
    # Of all hidden files, the mark alone is left.
    assert [name.endswith(".done") for name in bench.hidden] == [True]


def test_a_killed_process_loses_nothing_and_the_next_one_finishes(tmp_path: Path, steps: Steps) -> None:
    seen = 0
    for number, moment, bench in each_step(tmp_path):
        entry, first = bench.entry("ab", "xy"), bench.next()
        steps.at(number, moment, kill)
        try:
            bench.swaps.swap(first, entry)
            break
        except Killed:
            pass
        seen += 1
        steps.at(0, "", kill)
        assert set("12") <= set(bench.rows), (number, moment, bench.files)
        state = bench.swaps.settle()
        assert state.unfinished is None
        assert bench.rows == "12", (number, moment, bench.files)
        assert bench.files in (["a", "b"], ["x", "y"])
        if state.top == 0:  # the entry was not written yet
            assert bench.swaps.swap(1, entry) == FORWARD
        assert bench.files == ["x", "y"]
        bench.swaps.forget(lambda _: True)
        assert [name.endswith(".done") for name in bench.hidden] == [True], (number, moment, bench.hidden)
    assert seen > 20


@pytest.mark.parametrize("change", ["remove", "replace"])
def test_a_writer_that_changes_a_file_meanwhile_loses_nothing(tmp_path: Path, calls: Steps, change: str) -> None:
    """Before the decision, the replacement is taken back; after it, the writer's file stays."""
    ways = set()
    for number, moment, bench in each_step(tmp_path):
        entry, path = bench.entry("ab", "xy"), bench.root / "p=1" / "a"
        existed: list[bool] = []

        def write(path: Path = path, existed: list[bool] = existed) -> None:
            existed.append(path.exists())
            path.unlink(missing_ok=True)
            if change == "replace":
                path.write_text("new-a")

        calls.at(number, moment, write)
        ways.add(bench.swaps.swap(1, entry))
        if not existed:
            break
        calls.at(0, "", write)
        assert bench.rows.count("2") == 1, (number, moment, bench.files)
        assert bench.rows.count("9") == (change == "replace"), (number, moment, bench.files)
        assert bench.rows.count("1") <= 1, (number, moment, bench.files)
        assert bench.swaps.state().unfinished is None
    assert ways == {FORWARD, BACK}


def test_a_file_that_a_writer_adds_meanwhile_stays(tmp_path: Path, calls: Steps) -> None:
    for number, moment, bench in each_step(tmp_path):
        entry, added = bench.entry("ab", "xy"), []

        def write(bench: Bench = bench, added: list[bool] = added) -> None:
            added.append(True)
            bench.write("c")

        calls.at(number, moment, write)
        assert bench.swaps.swap(1, entry) == FORWARD
        if not added:
            break
        assert bench.rows == "123", (number, moment, bench.files)


def test_a_slow_process_changes_nothing_that_others_have_done_since(tmp_path: Path, calls: Steps) -> None:
    """Another process finishes the entry, the new files are replaced again, and the marks are cleaned up."""
    seen = 0
    for number, moment, bench in each_step(tmp_path):
        entry, first, acted = bench.entry("ab", "xy"), bench.next(), []

        def overtake(bench: Bench = bench, acted: list[bool] = acted) -> None:
            acted.append(True)
            bench.swaps.settle()
            if "x" not in bench.files:  # the entry was not there yet: another attempt at the group is first
                assert bench.swaps.swap(bench.next(), bench.entry("ab", "w", "other")) == FORWARD
            old = "".join(bench.files)
            assert bench.swaps.swap(bench.next(), bench.entry(old, "z", "later")) == FORWARD
            bench.swaps.forget(lambda _: True)

        calls.at(number, moment, overtake)
        with suppress(Conflict):
            bench.swaps.swap(first, entry)
        if not acted:
            break
        seen += 1
        calls.at(0, "", kill)
        bench.swaps.settle()
        assert (bench.files, bench.rows) == (["z"], "12"), (number, moment, bench.files)
    assert seen > 15


def test_two_attempts_at_a_group_are_not_both_in_the_table(tmp_path: Path, calls: Steps) -> None:
    for number, moment, bench in each_step(tmp_path):
        one, first, acted = bench.entry("ab", "xy"), bench.next(), []
        other = bench.entry("ab", "w", "other")

        def also(bench: Bench = bench, other: SwapEntry = other, acted: list[bool] = acted) -> None:
            acted.append(True)
            bench.swaps.swap(bench.next(), other)

        calls.at(number, moment, also)
        with suppress(Conflict):
            bench.swaps.swap(first, one)
        if not acted:
            break
        calls.at(0, "", kill)
        bench.swaps.settle()
        assert bench.rows == "12", (number, moment, bench.files)


def test_only_files_in_one_folder_of_the_table_are_replaced(bench: Bench) -> None:
    entry = bench.entry("ab", "xy")
    outside = SwappedFile("../../t2/a", 1, "x")
    for forged in (
        {"removed": [list(outside)]},
        {"added": [list(outside)]},
        {"source": "p=1"},
        {"source": f"{STAGED}/../.."},
        {"folder": "_distop/index"},
        {"folder": ".."},
    ):
        with pytest.raises(InvalidArgument):
            SwapEntry.from_json({**entry.to_json(), **forged}, folder_swap.DeletionScope(str(bench.root)))
        store = FolderStore(Place(str(bench.root), SWAP))
        store.put_new("000000001.entry", json.dumps({**entry.to_json(), **forged}).encode())
        with pytest.raises(InvalidArgument):
            bench.swaps.settle()
        store.delete_many(["000000001.entry"])
    assert (bench.files, bench.rows) == (["a", "b"], "12")


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"group": 1}', b"\xff"])
def test_a_damaged_entry_is_an_error(bench: Bench, text: bytes) -> None:
    FolderStore(Place(str(bench.root), SWAP)).put_new("000000001.entry", text)
    with pytest.raises(InvalidArgument, match="of an interrupted compaction cannot be read"):
        bench.swaps.settle()


def test_files_that_cannot_be_moved_leave_the_old_ones(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    entry, original = bench.entry("ab", "xy"), os.link

    def link(source: str, target: str, **given: Any) -> None:
        if target == "y":
            raise OSError(1, "Operation not permitted")
        original(source, target, **given)

    monkeypatch.setattr(os, "link", link)
    assert bench.swaps.swap(1, entry) == BACK
    assert (bench.files, bench.rows) == (["a", "b"], "12")


def test_a_file_of_a_writer_with_the_name_of_a_new_one_stays(bench: Bench) -> None:
    entry = bench.entry("ab", "xy")
    bench.write("y", "c")
    assert bench.swaps.swap(1, entry) == BACK
    assert (bench.files, bench.rows) == (["a", "b", "y"], "123")


def test_a_forged_entry_deletes_no_file_as_a_new_one(bench: Bench) -> None:
    entry, a = bench.entry("b", "x").to_json(), bench.swaps.table.head("p=1/a")
    for forged in (["a", a.size, "", "0" * 64], ["a", a.size + 1, a.stamp, "0" * 64]):
        FolderStore(Place(str(bench.root), SWAP)).put_new(
            f"{bench.next():09}.entry", json.dumps({**entry, "added": [forged]}).encode()
        )
        assert bench.swaps.settle().unfinished is None
        assert (bench.files, bench.rows) == (["a", "b"], "12")


def test_a_new_file_that_cannot_be_removed_stops_the_table_until_it_can(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, original = bench.entry("ab", "x"), os.unlink
    bench.write("a", "new-a")

    def unlink(name: str, **given: Any) -> None:
        if name == "x" and Path(f"/proc/self/fd/{given['dir_fd']}").readlink().name == "p=1":
            raise PermissionError(1, "Operation not permitted")
        original(name, **given)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        with pytest.raises(TableUnavailable, match="cannot remove the new file .*/x, whose rows are in old files too"):
            bench.swaps.swap(1, entry)
    assert bench.swaps.settle().unfinished is None
    assert (bench.files, bench.rows) == (["a", "b"], "29")


def test_old_files_that_cannot_be_deleted_stop_the_table_until_they_can(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, original = bench.entry("ab", "xy"), os.unlink

    def unlink(name: str, **given: Any) -> None:
        if name == "b":
            raise PermissionError(1, "Operation not permitted")
        original(name, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        with pytest.raises(TableUnavailable, match="cannot delete the old file .*/b, whose rows are in new files now"):
            bench.swaps.swap(1, entry)
        with pytest.raises(TableUnavailable, match="is replacing files of"):
            folder_swap.check_settled(folder_swap.state_at(Location.of(str(bench.root))), "t")
    assert bench.swaps.settle().unfinished is None
    assert (bench.files, bench.rows) == (["x", "y"], "12")
