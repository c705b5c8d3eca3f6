"""Files that an index build or a drop removes and publishes depend on no result and no link."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from distop.behavior import OutcomeRow
from distop.errors import InvalidArgument, UnsafePath
from distop.storage.files import TooLarge
from distop_behaviors.index import DropIndex, covered_files, postings, segments
from distop_behaviors.index import index_folder as folder
from distop_behaviors.index.covered_files import file_list
from distop_behaviors.index.generation import Generation, Named
from distop_behaviors.index.index_folder import Folder
from distop_behaviors.index.key_lookup import find
from tests.support.index_runs import Indexes, Operation, data_of, root_of
from tests.unit.behaviors.test_index_build import add, clean, holds, indexes, named

if TYPE_CHECKING:
    from distop_behaviors.index.index_argument import BuildReport

__all__ = ["indexes"]


def returned(operation: Operation, ordinal: int, **result: Any) -> None:
    """Replace a job's outcome as an actor of ``own_jobs`` can: any result, and no stage."""
    row = operation.outcomes[ordinal]
    values = {**row.result, **result}
    operation.outcomes[ordinal] = OutcomeRow(row.partition, row.name, row.success, values, row.error)


def precious(home: Path) -> Path:
    """A foreign folder with the names of stages of operations."""
    for n in range(3):
        (home / "precious" / str(n) / "000000" / "1-x").mkdir(parents=True)
        (home / "precious" / str(n) / "000000" / "1-x" / "journal.jsonl").write_text("mine")
    return home / "precious"


def test_hole_3_a_result_that_names_a_folder_removes_nothing_there(indexes: Indexes, tmp_path: Path) -> None:
    """build-index removed all folders of digits three levels above the journal that a result named."""
    target = precious(tmp_path)
    operation = indexes.plan(columns=["k"]).run_all()
    returned(operation, 0, journal=str(target / "1" / "000000" / "1-x" / "journal.jsonl"))
    try:
        report = operation.complete()
    finally:
        assert sorted(p.name for p in target.iterdir()) == ["0", "1", "2"]
    assert report.files == 3, "the completion did the missing job"
    holds(indexes)
    clean(indexes)


def test_hole_3_a_result_that_names_a_folder_removes_nothing_if_the_build_is_cancelled(
    indexes: Indexes, tmp_path: Path
) -> None:
    target = precious(tmp_path)
    operation = indexes.plan(columns=["k"]).run_all()
    returned(operation, 0, journal=str(target / "1" / "000000" / "1-x" / "journal.jsonl"))
    operation.complete("cancelled")
    assert sorted(p.name for p in target.iterdir()) == ["0", "1", "2"]
    assert indexes.staged_files() == []


def test_a_result_cannot_add_a_foreign_segment_to_an_index(indexes: Indexes, tmp_path: Path) -> None:
    """A foreign journal of a segment that has other keys for a file."""
    other = Indexes(tmp_path / "forged", tmp_path / "forged-stage", group_files=1)
    add(tmp_path / "forged", 9)
    forged = other.plan(columns=["k"]).run_all().outcomes[0].result
    operation = indexes.plan(columns=["k"]).run_all()
    returned(operation, 0, **forged)
    operation.complete()
    holds(indexes)
    assert named(indexes, 907) == []


def test_the_stage_of_another_operation_is_not_published(indexes: Indexes, tmp_path: Path) -> None:
    """A result about another stage does not match its own stage."""
    other = indexes.plan(columns=["k"], refresh="full").run_all()
    operation = indexes.plan(columns=["k"], refresh="full").run_all()
    row = operation.outcomes[0]
    operation.outcomes[0] = replace(row, result={**other.outcomes[1].result})
    operation.complete()
    holds(indexes)


@pytest.mark.parametrize("what", ["000001.json", "000000.parquet"])
def test_a_link_in_a_stage_is_not_published(indexes: Indexes, tmp_path: Path, what: str) -> None:
    operation = indexes.plan(columns=["k"]).run_all()
    (path, *_) = [p for p in indexes.staged_files() if p.name == what]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    opened: list[Any] = []
    real = segments.open_file
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "open_file", lambda *a: (opened.append(a), real(*a))[1])
        operation.complete()
    assert len(opened) == 1, "its file was indexed again"
    holds(indexes)
    assert (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("name", ["../../2/000000/1-inc", "/etc", "..", "1-inc/..", ""])
def test_a_checkpoint_cannot_name_a_stage_of_another_job(indexes: Indexes, name: str) -> None:
    operation = indexes.plan(columns=["k"])
    partition = operation.planned.partitions[0]
    ctx = operation.attempt(partition, fence=2)
    ctx.progress.save({"stage": name, "bytes": 100})
    assert operation.run(partition, ctx).files == 1


@pytest.mark.parametrize("level", ["_distop", "_distop/index", "_distop/index/i", "_distop/index/i/data"])
def test_hole_3_a_drop_removes_nothing_through_a_link(indexes: Indexes, tmp_path: Path, level: str) -> None:
    """drop-index emptied the target of a link called ``data``."""
    indexes.build(columns=["k"])
    linked = Path(indexes.record.location) / level
    outside = tmp_path / "outside"
    linked.rename(outside)
    linked.symlink_to(outside)
    (outside / "mine").write_text("mine")
    before = sorted(str(p) for p in outside.rglob("*"))
    with pytest.raises(InvalidArgument, match="is a symbolic link, which is not followed"):
        indexes.drop()
    with pytest.raises(UnsafePath):
        indexes.plan(columns=["k"], refresh="full")
    assert sorted(str(p) for p in outside.rglob("*")) == before


def test_a_link_created_after_planning_is_not_followed(indexes: Indexes, tmp_path: Path) -> None:
    indexes.build(columns=["k"])
    operation = Operation(indexes, DropIndex(), {"name": "i"})
    outside = tmp_path / "outside"
    data_of(indexes.folder()).rename(outside)
    data_of(indexes.folder()).symlink_to(outside)
    before = sorted(outside.iterdir())
    with pytest.raises(UnsafePath):
        operation.run_all()
    assert sorted(outside.iterdir()) == before


def test_a_generation_that_names_a_file_elsewhere_is_not_read(indexes: Indexes) -> None:
    indexes.build(columns=["k"])
    (path,) = (root_of(indexes.folder()) / "generations").iterdir()
    text = path.read_text()
    current = indexes.folder().current()
    assert current is not None
    assert current.files is not None
    path.write_text(text.replace(current.files.name, "../../../0.parquet"))
    with pytest.raises(InvalidArgument, match="is not a file name"):
        indexes.folder().current()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["0000007.json", "\u0660\u0660\u0660\u0660\u0660\u0667.json", "1" * 30 + ".json"])
def test_files_with_other_names_are_not_generations(indexes: Indexes, name: str) -> None:
    """It counted as number 7, which does not exist and was looked for without end."""
    indexes.build(columns=["k"])
    (root_of(indexes.folder()) / "generations" / name).write_text("{}")
    current = indexes.folder().current()
    assert current is not None
    assert current.number == 1


@pytest.mark.timeout(20)
def test_a_generation_of_another_number_than_its_name_is_not_read(indexes: Indexes) -> None:
    """A drop tried to add the generation after it forever."""
    indexes.build(columns=["k"])
    folder = indexes.folder()
    text = (root_of(folder) / "generations" / "000001.json").read_text()
    (root_of(folder) / "generations" / "000005.json").write_text(text)
    for ask in (folder.current, lambda: folder.drop("9-drop", 5, 5)):
        with pytest.raises(InvalidArgument, match="000005.json: it has the generation 1"):
            ask()


@pytest.mark.timeout(20)
def test_a_generation_that_keeps_vanishing_is_an_error(indexes: Indexes, monkeypatch: pytest.MonkeyPatch) -> None:
    indexes.build(columns=["k"])
    monkeypatch.setattr(Folder, "_numbers", lambda _: [7])
    with pytest.raises(
        InvalidArgument, match="cannot read the index file .*000007.json: the folder lists it, but it does not exist"
    ):
        indexes.folder().current()


# ------------------------------------------------------------------ two namespaces, one index


@pytest.fixture
def two(indexes: Indexes, monkeypatch: pytest.MonkeyPatch) -> tuple[Indexes, Indexes]:
    """The same table in two namespaces, each of which counts its operations from 1."""
    other = Indexes(Path(indexes.record.location), indexes.shared.with_name("shared-2"), group_files=1)
    other.space = "c0ffee2"
    return indexes, other


def test_two_namespaces_take_turns_with_one_index(two: tuple[Indexes, Indexes]) -> None:
    one, other = two
    assert one.build(columns=["k"]).generation == 1
    add(Path(one.record.location), 3)
    report: BuildReport = other.build(columns=["k"])
    assert (report.generation, report.indexed, report.files) == (2, 1, 4)
    holds(one, files=("0", "1", "2", "3"))
    holds(other, files=("0", "1", "2", "3"))
    assert one.drop()
    assert [p.name for p in root_of(one.folder()).rglob("*") if p.is_file()] == ["000003.json"]


def test_a_sweep_keeps_unpublished_files_of_another_namespace(
    two: tuple[Indexes, Indexes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep removed unpublished files of builds with lower numbers, of any namespace."""
    one, other = two
    for _ in range(3):
        one.build(columns=["k"], refresh="full")
    operation = other.plan(columns=["k"], refresh="full").run_all()
    real = Folder.is_whole

    def meanwhile(self: Folder, generation: Any) -> bool:
        monkeypatch.setattr(Folder, "is_whole", real)
        one.folder().sweep(100, grace=-1.0)
        return real(self, generation)

    monkeypatch.setattr(Folder, "is_whole", meanwhile)
    assert operation.complete().generation == 4
    holds(one)


def test_superseded_files_of_another_namespace_are_removed(
    two: tuple[Indexes, Indexes], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    other.build(columns=["k"])
    monkeypatch.setattr(Folder.sweep, "__kwdefaults__", {"grace": -1.0, "own": False})
    one.build(columns=["k"], refresh="full")
    one.build(columns=["k"], refresh="full")
    assert {path.name.partition(".")[0] for path in data_of(one.folder()).iterdir()} == {"c0ffee"}
    assert folder.GRACE > 0
    assert len(find(one.record, "i", [-1]).named) == 3


def test_a_drop_keeps_unpublished_files_of_another_namespace(two: tuple[Indexes, Indexes]) -> None:
    one, other = two
    one.build(columns=["k"])
    written = data_of(other.folder()) / other.folder().own("1-0000-abc-00.parquet")
    written.touch()
    assert one.drop()
    assert [path.name for path in data_of(one.folder()).iterdir()] == [written.name]


def test_only_outcomes_of_executors_have_a_stage() -> None:
    assert OutcomeRow(0, "p", True, {}, "").stage is None


@pytest.mark.parametrize("planted", ["pipe", "link"])
@pytest.mark.parametrize("which", ["files", "runs", "generation"])
def test_hole_3_an_index_is_read_from_regular_files_only(
    indexes: Indexes, tmp_path: Path, which: str, planted: str
) -> None:
    """A pipe would block a plan or a lookup forever."""
    indexes.build(columns=["k"])
    found = indexes.folder()
    current = found.current()
    assert current is not None
    name = {"files": current.files, "runs": current.runs[0]}.get(which)
    path = data_of(found) / name.name if name is not None else max((data_of(found).parent / "generations").iterdir())
    kept = tmp_path / "kept"
    path.rename(kept)
    if planted == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(kept)
    assert not found.is_whole(current) or which == "generation"
    readers: list[Any] = {
        "files": [lambda: file_list(found, current)],
        "runs": [
            lambda: postings.find(found.store, f"data/{path.name}", np.array([1], np.int64), 9),
            lambda: list(postings._groups(found.store, f"data/{path.name}", None, None)),
            lambda: folder.digest_of(found.store, f"data/{path.name}"),
        ],
        "generation": [found.current],
    }[which]
    for read in readers:
        with pytest.raises(UnsafePath, match="is not a regular file"):
            within(read)


def within(read: Any) -> None:
    """Raises the error of the read, or AssertionError if it does not end."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            read()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive(), "it waits for a writer of the pipe"
    if raised:
        raise raised[0]


def test_hole_3_a_list_of_files_is_bounded(indexes: Indexes, monkeypatch: pytest.MonkeyPatch) -> None:
    indexes.build(columns=["k"])
    found = indexes.folder()
    current = found.current()
    assert current is not None
    assert file_list(found, current).num_rows == 3
    monkeypatch.setattr(covered_files, "LIST_BYTES", 10)
    with pytest.raises(TooLarge, match=r"the list of files .*\.parquet is larger than the maximum of 10 bytes"):
        file_list(found, current)


@pytest.mark.parametrize("number", [700_000_000, -1, 1.5, "7"])
def test_hole_9_the_number_of_files_of_a_generation_is_bounded(number: object) -> None:
    """A build took four bytes for each file that a generation claims to have."""
    fields = json.loads(Generation(number=1, table_version="1").to_json())
    assert Generation.from_json(json.dumps({**fields, "next_file": 7})).next_file == 7
    with pytest.raises(ValueError, match="at most 50000000"):
        Generation.from_json(json.dumps({**fields, "next_file": number}))


@pytest.mark.parametrize("rows", [10**18, -1, 1.5, "7", None])
def test_hole_9_the_number_of_postings_of_a_generation_is_bounded(rows: object) -> None:
    """A completion counted through all runs that this many postings make."""

    def read(*of_runs: object) -> Generation:
        runs = tuple(Named(f"{n}.parquet", 1, "d", cast("int", of_run)) for n, of_run in enumerate(of_runs))
        return Generation.from_json(Generation(number=1, runs=runs).to_json())

    assert [one.rows for one in read(0, 1 << 40).runs] == [0, 1 << 40]
    with pytest.raises(ValueError, match="at most 10000000000000 are allowed"):
        read(7, rows)
    with pytest.raises(ValueError, match="at most 10000000000000 are allowed"):
        read(*[6 * 10**12] * 2)
