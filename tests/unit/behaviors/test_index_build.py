"""Building, refreshing and dropping an index: killed at each commit point, concurrently, on bad files."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import resource
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, TimeType, UUIDType

from distop.behavior import TableRecord, TableUnavailable
from distop.errors import InvalidArgument, NotFound
from distop.storage import deletion
from distop_behaviors.index import DropIndex, file_summaries, generation_build, index_folder, postings, segments
from distop_behaviors.index.index_folder import Folder, Superseded
from distop_behaviors.index.key_lookup import find
from tests.support.footers import with_rows_of_groups, with_values
from tests.support.index_runs import Indexes, Operation, data_of, is_cancelled, root_of
from tests.support.lake import Folder as Lake

if TYPE_CHECKING:
    from collections.abc import Callable


class Killed(BaseException):
    """The process was killed."""


class Killer:
    """Kills the process at the moment number ``at``, counted before and after each call of some functions.

    From then on none of these functions has an effect, so that no clean-up code changes a file.
    """

    def __init__(self, patch: pytest.MonkeyPatch, points: Iterable[tuple[Any, str]]) -> None:
        self.at = -1
        self.dead = False
        self._count = 0
        for owner, name in points:
            patch.setattr(owner, name, self._wrapped(getattr(owner, name)))

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._moment()
            result = function(*args, **kwargs)
            self._moment()
            return result

        return call

    def _moment(self) -> None:
        if self._count == self.at:
            self.dead = True
        if self.dead:
            raise Killed
        self._count += 1

    def strike(self, at: int, run: Callable[[], object]) -> bool:
        """Run it until the moment ``at``; return whether that was reached."""
        self.at, self._count = at, 0
        try:
            run()
        except Killed:
            pass
        finally:
            died, self.at, self.dead = self.dead, -1, False
        return died


ROWS = 40


def add(table: Path, number: int, rows: int = ROWS, **options: Any) -> Path:
    """Write a file with the keys ``number * 100 + 0 … rows - 1``, the key -1 and a NULL."""
    table.mkdir(exist_ok=True)
    keys = [*(number * 100 + i for i in range(rows)), -1, None]
    path = table / f"{number}.parquet"
    pq.write_table(pa.table({"k": pa.array(keys, pa.int64()), "t": pa.array([str(k) for k in keys])}), path, **options)
    return path


@pytest.fixture
def indexes(tmp_path: Path) -> Indexes:
    """Indexes of a table of three files, each in its own partition."""
    table = tmp_path / "t"
    for n in range(3):
        add(table, n)
    return Indexes(table, tmp_path / "shared", group_files=1)


def named(indexes: Indexes, key: Any, name: str = "i") -> list[str]:
    found = find(indexes.record, name, [key])
    assert not found.uncovered
    return sorted(Path(f[0]).stem for f in found.named)


def holds(indexes: Indexes, name: str = "i", files: tuple[str, ...] = ("0", "1", "2")) -> None:
    """Assert that the index covers these files and no others, and finds their keys."""
    everywhere = sorted(files)
    assert named(indexes, -1, name) == everywhere
    assert named(indexes, None, name) == everywhere
    for n in files:
        assert named(indexes, int(n) * 100 + 7, name) == [n]
    assert named(indexes, 99, name) == []
    current = indexes.folder(name).current()
    assert current is not None
    if current.kind == "posting":
        assert sum(run.rows for run in current.runs) == len(files) * (ROWS + 1), "each row once"


def clean(indexes: Indexes, name: str = "i") -> None:
    """Assert that there are only files that the kept generations name."""
    assert indexes.orphan_files(name) == []


@pytest.mark.parametrize("kind", ["posting", "skip"])
def test_a_repeated_build_changes_nothing(kind: str, indexes: Indexes) -> None:
    first = indexes.build(kind=kind, columns=["k"])
    assert (first.generation, first.files, first.rows, first.indexed) == (1, 3, 3 * (ROWS + 2), 3)
    before = {path: path.read_bytes() for path in root_of(indexes.folder()).rglob("*") if path.is_file()}
    again = indexes.build(kind=kind, columns=["k"])
    assert (again.generation, again.indexed, again.removed, again.files) == (1, 0, 0, 3)
    assert {path: path.read_bytes() for path in root_of(indexes.folder()).rglob("*") if path.is_file()} == before
    holds(indexes)
    assert indexes.build(kind=kind, columns=["k"], refresh="full").generation == 2
    holds(indexes)
    clean(indexes)


@pytest.mark.parametrize("kind", ["posting", "skip"])
def test_a_refresh_adds_new_files_and_drops_removed_ones(kind: str, indexes: Indexes) -> None:
    indexes.build(kind=kind, columns=["k"])
    table = Path(indexes.record.location)
    (table / "0.parquet").unlink()
    add(table, 1, rows=ROWS - 1)
    add(table, 5)
    found = find(indexes.record, "i", [107])
    assert ([Path(f[0]).stem for f in found.named], {Path(f[0]).stem for f in found.uncovered}) == ([], {"1", "5"})
    operation = indexes.plan(kind=kind, columns=["k"])
    assert [Path(f[0]).stem for p in operation.planned.partitions for f in p.files] == ["1", "5"]
    report = operation.run_all().complete()
    assert (report.generation, report.indexed, report.removed, report.files) == (2, 2, 2, 3)
    for key, where in ((7, []), (139, []), (107, ["1"]), (207, ["2"]), (507, ["5"]), (-1, ["1", "2", "5"])):
        assert named(indexes, key) == where


def test_many_refreshes_keep_few_runs(indexes: Indexes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_build, "LEVELS", 3)
    table = Path(indexes.record.location)
    for n in range(3, 9):
        indexes.build(columns=["k"])
        add(table, n)
    indexes.build(columns=["k"])
    current = indexes.folder().current()
    assert current is not None
    assert len({run.level for run in current.runs}) <= 3
    holds(indexes, files=tuple(map(str, range(9))))
    for n in range(6):
        (table / f"{n}.parquet").unlink()
    add(table, 9)
    indexes.build(columns=["k"])
    holds(indexes, files=("6", "7", "8", "9"))


def test_a_refresh_with_other_settings_is_refused(indexes: Indexes) -> None:
    indexes.build(columns=["k"])
    for arg in ({"columns": ["t"]}, {"columns": ["k"], "kind": "skip"}):
        with pytest.raises(InvalidArgument, match="drop it, or use 'refresh': 'full'"):
            indexes.plan(**arg)
    holds(indexes)
    assert indexes.build(columns=["t"], refresh="full").columns == ["t"]
    assert named(indexes, "7") == ["0"]


# ------------------------------------------------------------------ crashes

POINTS = [
    (os, "link"),
    (shutil, "rmtree"),
    (deletion, "_delete_local"),
    (postings, "write"),
    (file_summaries, "write"),
    (segments.SegmentWriter, "_write"),
    (index_folder, "write_parquet"),
    (generation_build, "write_parquet"),
]
"""Functions that change files which another attempt or a reader could see."""


@pytest.mark.parametrize("kind", ["posting", "skip"])
def test_a_build_that_is_killed_at_any_commit_point_is_repeated(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refresh is killed at each moment in turn, and another attempt completes it from checkpoints and outcomes.

    All keys are found at every moment; in the end each row is there once, without left-over files.
    """
    monkeypatch.setattr(segments, "SEGMENT_FILES", 1)
    killer = Killer(monkeypatch, POINTS)
    made = Indexes(tmp_path / "made" / "t", tmp_path / "made" / "shared")
    (tmp_path / "made").mkdir()
    for n in range(2):
        add(tmp_path / "made" / "t", n)
    made.build(kind=kind, columns=["k"])
    for n in range(2, 4):
        add(tmp_path / "made" / "t", n)
    at, died = 0, True
    while died:
        home = tmp_path / str(at)
        shutil.copytree(tmp_path / "made", home)
        indexes = Indexes(home / "t", home / "shared")
        indexes.instances = made.instances
        operation = indexes.plan(kind=kind, columns=["k"])
        died = killer.strike(at, lambda: operation.run_all().complete())  # noqa: B023
        found = find(indexes.record, "i", [-1, 307])
        assert sorted(Path(f[0]).stem for f in found.files) == ["0", "1", "2", "3"], at
        for partition in operation.planned.partitions:
            if partition.partition not in operation.outcomes:
                operation.run(partition, operation.attempt(partition, fence=2))
        report = operation.complete()
        assert (report.generation, report.files, report.indexed) == (2, 4, 2), at
        assert operation.complete() == report
        holds(indexes, files=("0", "1", "2", "3"))
        indexes.build(kind=kind, columns=["k"])
        clean(indexes)
        shutil.rmtree(home)
        at += 1
    assert at > 20, "too few moments"


def test_a_drop_that_is_killed_at_any_commit_point_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drop is killed at each moment in turn, including each removal of a file: the index is complete or gone.

    Another attempt completes the drop, frees all space, and reports that there was an index; a new one can be built.
    """
    made = Indexes(tmp_path / "made" / "t", tmp_path / "made" / "shared", group_files=1)
    (tmp_path / "made").mkdir()
    for n in range(2):
        add(tmp_path / "made" / "t", n, rows=7)
    for _ in range(2):
        made.build(columns=["k"], refresh="full")
    abandoned = made.plan(columns=["k"], refresh="full")
    abandoned.run(abandoned.planned.partitions[0])
    abandoned.complete("cancelled")
    killer = Killer(monkeypatch, [*POINTS, (os, "unlink"), (os, "rmdir")])
    seen: set[bool] = set()
    at, died = 0, True
    while died:
        home = tmp_path / str(at)
        shutil.copytree(tmp_path / "made", home)
        indexes = Indexes(home / "t", home / "shared", group_files=1)
        indexes.instances = made.instances
        operation = Operation(indexes, DropIndex(), {"name": "i"})
        (partition,) = operation.planned.partitions
        died = killer.strike(at, lambda: operation.run(partition))  # noqa: B023
        whole = indexes.folder().current() is not None
        seen.add(whole)
        if whole:
            assert named(indexes, -1) == ["0", "1"], at
            assert sorted(Path(f[0]).stem for f in find(indexes.record, "i", [3]).named) == ["0"], at
        else:
            with pytest.raises(NotFound, match="has no index 'i'"):
                find(indexes.record, "i", [3])
        if died:
            operation.run(partition, operation.attempt(partition, fence=2))
        assert operation.complete() == {"name": "i", "dropped": True}, at
        assert [p.name for p in root_of(indexes.folder()).rglob("*") if p.is_file()] == ["000003.json"], at
        assert indexes.orphan_files() == [], at
        at += 1
    assert indexes.build(columns=["k"]).generation == 4
    assert named(indexes, -1) == ["0", "1"]
    assert seen == {True, False}
    assert at > 20, "too few moments"


def test_an_attempt_continues_from_the_checkpoint_of_another(
    indexes: Indexes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the former attempt is cleaned up meanwhile, or its files are damaged."""
    monkeypatch.setattr(segments, "SEGMENT_FILES", 1)
    one = Indexes(Path(indexes.record.location), tmp_path / "shared")
    opened: list[str] = []
    real = segments.open_file
    monkeypatch.setattr(segments, "open_file", lambda file, *a: (opened.append(Path(file[0]).stem), real(file, *a))[1])
    for case in ("whole", "cleaned up", "damaged"):
        operation = one.plan(columns=["k"], refresh="full")
        (partition,) = operation.planned.partitions
        first = operation.attempt(partition)
        first.stop_after = 2
        assert is_cancelled(lambda: operation.run(partition, first))  # noqa: B023
        assert opened == ["0", "1"]
        if case == "damaged":
            (Path(first.stage) / "000001.parquet").write_bytes(b"PAR1")
        opened.clear()
        second = operation.attempt(partition, fence=2)
        second.stop_after = 0
        assert is_cancelled(lambda: operation.run(partition, second))  # noqa: B023
        if case == "cleaned up":
            first.superseded = True
            operation.behavior.cancel_job_and_cleanup(operation.arg, partition, first)
        operation.run(partition, operation.attempt(partition, fence=3))
        assert opened == {"damaged": ["1", "2"]}.get(case, ["2"])
        opened.clear()
        operation.complete()
        holds(one)
        clean(one)


def attempted(operation: Any, partition: Any, reader: str) -> Any:
    """An attempt that has ended, for the completion, or was stopped, for the next attempt."""
    first = operation.attempt(partition)
    if reader == "completion":
        operation.run(partition, first)
    else:
        first.stop_after = 2
        assert is_cancelled(lambda: operation.run(partition, first))
    return first


@pytest.mark.parametrize("reader", ["completion", "next attempt"])
def test_hole_3_a_stage_that_another_user_may_have_written_is_not_read(
    indexes: Indexes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    """Its name comes from an outcome or a checkpoint, which a submitter may write."""
    monkeypatch.setattr(segments, "SEGMENT_FILES", 1)
    one, read = Indexes(Path(indexes.record.location), tmp_path / "shared"), list[str]()
    operation = one.plan(columns=["k"])
    (partition,) = operation.planned.partitions
    first = attempted(operation, partition, reader)
    Path(first.stage).chmod(0o777)
    real = segments.journal_of
    for module in (generation_build, segments):
        monkeypatch.setattr(module, "journal_of", lambda stage, *a: (read.append(stage.location), real(stage, *a))[1])
    if reader == "next attempt":
        operation.run(partition, operation.attempt(partition, fence=2))
    operation.complete()
    assert first.stage not in read
    holds(one)


CHANGES = [{"columns": ["t"]}, {"kind": "skip"}, {"kind": "skip", "distinct": 1}, {"refresh": "full"}]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("reader", ["completion", "next attempt"])
def test_hole_8_segments_of_another_argument_are_not_published(
    indexes: Indexes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str, change: dict[str, Any]
) -> None:
    """A submitter may overwrite the argument while jobs run: keys of one column counted for another."""
    monkeypatch.setattr(segments, "SEGMENT_FILES", 1)
    one = Indexes(Path(indexes.record.location), tmp_path / "shared")
    operation = one.plan(columns=["k"])
    (partition,) = operation.planned.partitions
    attempted(operation, partition, reader)
    operation.arg = operation.arg.model_copy(update=change)
    with pytest.raises(InvalidArgument, match="the argument was changed after planning; start a new operation"):
        if reader == "completion":
            operation.complete()
        else:
            operation.run(partition, operation.attempt(partition, fence=2))
    assert one.folder().newest() is None


def test_hole_8_an_argument_cannot_name_another_index_than_the_operation(indexes: Indexes) -> None:
    operation = indexes.plan(columns=["k"])
    operation.arg = operation.arg.model_copy(update={"name": "other"})
    for run in (operation.run_all, operation.complete):
        with pytest.raises(InvalidArgument, match="belongs to the index 'i', but its argument names 'other'"):
            run()


def test_of_two_simultaneous_attempts_one_result_remains(indexes: Indexes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A former holder continues beside the present one and ends later; the outcome decides."""
    operation = indexes.plan(columns=["k"])
    partition, *others = operation.planned.partitions
    real, beside = segments.SegmentWriter._close, []

    def close(job: Any) -> None:
        if not beside:
            beside.append(job)
            operation.run(partition, operation.attempt(partition, fence=2))
        real(job)

    monkeypatch.setattr(segments.SegmentWriter, "_close", close)
    late = operation.attempt(partition, fence=1)
    operation.behavior.start_or_resume_job(operation.arg, partition, late)
    for other in others:
        operation.run(other)
    assert operation.complete().indexed == 3
    holds(indexes)
    clean(indexes)


# ------------------------------------------------------------------ concurrent completions


def during_publish(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object]) -> None:
    """Call this once, just before a generation is published."""
    real = Folder.publish

    def publish(self: Folder, generation: Any) -> None:
        monkeypatch.setattr(Folder, "publish", real)
        meanwhile()
        real(self, generation)

    monkeypatch.setattr(Folder, "publish", publish)


def test_two_simultaneous_completions_publish_once(indexes: Indexes, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = indexes.plan(columns=["k"]).run_all()
    reports: list[Any] = []
    during_publish(monkeypatch, lambda: reports.append(operation.complete()))
    reports.append(operation.complete())
    assert reports[0] == reports[1]
    assert [path.name for path in (root_of(indexes.folder()) / "generations").iterdir()] == ["000001.json"]
    holds(indexes)
    indexes.build(columns=["k"])
    clean(indexes)


def test_a_late_attempt_changes_nothing(indexes: Indexes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that was suspended before it published continues after a successor, a refresh, or a drop."""
    table = Path(indexes.record.location)
    operation = indexes.plan(columns=["k"]).run_all()

    def later() -> None:
        operation.complete()
        add(table, 7)
        indexes.build(columns=["k"])

    during_publish(monkeypatch, later)
    with pytest.raises(Superseded):
        operation.complete()
    holds(indexes, files=("0", "1", "2", "7"))
    add(table, 8)
    late = indexes.plan(columns=["k"]).run_all()
    during_publish(monkeypatch, lambda: indexes.drop())
    with pytest.raises(Superseded):
        late.complete()
    assert indexes.folder().current() is None
    with pytest.raises(NotFound):
        find(indexes.record, "i", [1])
    assert indexes.build(columns=["k"]).files == 5
    holds(indexes, files=("0", "1", "2", "7", "8"))
    clean(indexes)


def test_files_added_during_a_build_are_indexed_or_read_by_lookups(
    indexes: Indexes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are added after the plan and just before the publication, and one is replaced while it is read."""
    table = Path(indexes.record.location)
    operation = indexes.plan(columns=["k"])
    add(table, 3)
    real = segments.pieces

    def pieces(source: Any) -> Any:
        yield from real(source)
        if source.path.endswith("/1.parquet"):
            monkeypatch.setattr(segments, "pieces", real)
            add(table, 1, rows=ROWS - 1)

    monkeypatch.setattr(segments, "pieces", pieces)
    operation.run_all()
    during_publish(monkeypatch, lambda: add(table, 4))
    report = operation.complete()
    assert (report.files, report.not_indexed_files) == (4, 0)
    found = find(indexes.record, "i", [-1])
    assert sorted(Path(f[0]).stem for f in found.named) == ["0", "1", "2", "3"]
    assert [Path(f[0]).stem for f in found.uncovered] == ["4"]
    monkeypatch.setattr(generation_build, "CATCH_UP_BYTES", 10)
    full = indexes.plan(columns=["k"], refresh="full")
    add(table, 5)
    report = full.run_all().complete()
    assert [(f.file, f.why) for f in report.not_indexed] == [("5.parquet", "it was added while the index was built")]
    assert [Path(f[0]).stem for f in find(indexes.record, "i", [-1]).uncovered] == ["5"]


def test_lost_segments_are_written_again(indexes: Indexes) -> None:
    """A machine that lost power may have lost files, although etcd has their outcome."""
    operation = indexes.plan(columns=["k"]).run_all()
    parquet = [path for path in indexes.staged_files() if path.suffix == ".parquet"]
    parquet[0].write_bytes(b"")
    parquet[1].unlink()
    assert operation.complete().files == 3
    holds(indexes)
    clean(indexes)


# ------------------------------------------------------------------ cancel, drop, sweep


def test_a_cancel_leaves_the_index_unchanged_and_no_other_files(indexes: Indexes) -> None:
    indexes.build(columns=["k"])
    add(Path(indexes.record.location), 3)
    add(Path(indexes.record.location), 4)
    operation = indexes.plan(columns=["k"])
    done, running = operation.planned.partitions
    operation.run(done)
    ctx = operation.attempt(running)
    ctx.stop_after = 0
    assert is_cancelled(lambda: operation.run(running, ctx))
    for _ in range(2):
        operation.behavior.cancel_job_and_cleanup(operation.arg, running, ctx)
    assert operation.complete("cancelled") is None
    found = find(indexes.record, "i", [-1])
    assert sorted(Path(f[0]).stem for f in found.uncovered) == ["3", "4"]
    assert sorted(Path(f[0]).stem for f in found.named) == ["0", "1", "2"]
    clean(indexes)


def test_a_drop_removes_the_index_and_is_idempotent(indexes: Indexes) -> None:
    indexes.build("other", columns=["t"])
    assert not indexes.drop()
    indexes.build(columns=["k"])
    abandoned = indexes.plan(columns=["k"], refresh="full")
    abandoned.run(abandoned.planned.partitions[0])
    assert indexes.staged_files()
    assert indexes.drop()
    assert not indexes.drop()
    left = [p.name for p in root_of(indexes.folder()).rglob("*") if p.is_file()]
    assert left == ["000002.json"]
    abandoned.complete("cancelled")
    assert indexes.staged_files() == []
    with pytest.raises(NotFound, match="has no index 'i'"):
        find(indexes.record, "i", [1])
    assert named(indexes, "7", "other") == ["0"]
    assert indexes.build(columns=["k"]).generation == 3
    holds(indexes)


def test_files_of_a_superseded_generation_are_kept_for_readers(
    indexes: Indexes, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexes.build(columns=["k"])
    former = indexes.folder().current()
    assert former is not None
    indexes.build(columns=["k"], refresh="full")
    assert all((data_of(indexes.folder()) / one.name).exists() for one in former.named())
    monkeypatch.setattr(Folder.sweep, "__kwdefaults__", {"grace": -1.0, "own": False})
    real = postings.find

    def swept(*arguments: Any) -> Any:
        monkeypatch.setattr(postings, "find", real)
        indexes.build(columns=["k"], refresh="full")
        return real(*arguments)

    monkeypatch.setattr(postings, "find", swept)
    assert named(indexes, 107) == ["1"], "after a sweep the reader reads the newer files"
    assert len(list((root_of(indexes.folder()) / "generations").iterdir())) == 1
    clean(indexes)


# ------------------------------------------------------------------ failures


def test_a_full_disk_fails_the_attempt_and_leaves_nothing(indexes: Indexes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes really fail, by the limit on the size of files: in a job, then in the completion."""
    indexes.build(columns=["k"])
    table = Path(indexes.record.location)
    keys = random.Random(1).sample(range(10_000, 10**9), 20_000)
    big = pa.table({"k": pa.array(keys, pa.int64()), "t": pa.array(["x"] * len(keys))})
    pq.write_table(big, table / "3.parquet")
    operation = indexes.plan(columns=["k"])
    (partition,) = operation.planned.partitions

    def limited(run: Callable[[], object]) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            with pytest.raises(OSError, match=r"File too large"):
                run()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    limited(lambda: operation.run(partition))
    assert [path.name for path in indexes.staged_files()] == ["000000.json"]
    operation.run(partition, operation.attempt(partition, fence=2))
    limited(operation.complete)
    current = indexes.folder().current()
    assert current is not None
    assert {path.name for path in data_of(indexes.folder()).iterdir()} == {one.name for one in current.named()}
    assert [Path(f[0]).stem for f in find(indexes.record, "i", [107]).files] == ["1", "3"]
    assert operation.complete().files == 4
    assert named(indexes, keys[7]) == ["3"]
    clean(indexes)


def test_planning_refuses_a_folder_that_cannot_be_written(indexes: Indexes) -> None:
    """A file replaces the folder, because no folder is read-only for root."""
    (Path(indexes.record.location) / "_distop").write_text("")
    with pytest.raises(
        InvalidArgument, match=r"cannot write into .*/_distop/index/i .*: an index is stored beside its table"
    ):
        indexes.plan(columns=["k"])


def test_a_folder_that_becomes_read_only_fails_the_attempt_and_leaves_nothing(
    indexes: Indexes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the build has begun: in the stage of a job, then beside the table.

    No folder is read-only for root, so the call that creates files is made to fail.
    """
    indexes.build(columns=["k"])
    add(Path(indexes.record.location), 3)
    operation = indexes.plan(columns=["k"])
    (partition,) = operation.planned.partitions
    former = pq.write_table

    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    def fails(run: Callable[[], object]) -> None:
        monkeypatch.setattr(pq, "write_table", refused)
        with pytest.raises(OSError, match="Read-only file system"):
            run()
        monkeypatch.setattr(pq, "write_table", former)
        current = indexes.folder().current()
        assert current is not None
        assert {path.name for path in data_of(indexes.folder()).iterdir()} == {one.name for one in current.named()}
        assert [Path(f[0]).stem for f in find(indexes.record, "i", [107]).files] == ["1", "3"]

    fails(lambda: operation.run(partition))
    operation.run(partition, operation.attempt(partition, fence=2))
    fails(operation.complete)
    assert operation.complete().files == 4
    holds(indexes, files=("0", "1", "2", "3"))
    clean(indexes)


def test_files_that_cannot_be_read_are_named_and_left_to_lookups(indexes: Indexes) -> None:
    table = Path(indexes.record.location)
    (table / "3.parquet").write_bytes(b"")
    (table / "4.parquet").write_bytes((table / "1.parquet").read_bytes()[:300])
    data = bytearray((table / "2.parquet").read_bytes())
    data[4:60] = bytes(56)
    (table / "2.parquet").write_bytes(data)
    report = indexes.build(columns=["k"])
    assert (report.files, report.not_indexed_files) == (2, 3)
    assert [f.file for f in report.not_indexed] == ["2.parquet", "3.parquet", "4.parquet"]
    assert "is not a readable Parquet file" in report.not_indexed[1].why
    assert "2.parquet cannot be read" in report.not_indexed[0].why
    found = find(indexes.record, "i", [7])
    assert ([Path(f[0]).stem for f in found.named], len(found.uncovered)) == (["0"], 3)


@pytest.mark.parametrize("kind", ["posting", "skip"])
def test_a_file_with_fewer_rows_than_its_footer_counts_is_left_to_lookups(kind: str, indexes: Indexes) -> None:
    """pyarrow reads the existing rows and raises no error."""
    path = Path(indexes.record.location) / "2.parquet"
    with_rows_of_groups(path, ROWS + 3)
    with_values(path, ROWS + 3)
    report = indexes.build(kind=kind, columns=["k"])
    assert [f.file for f in report.not_indexed] == ["2.parquet"]
    assert f"a row group has {ROWS + 2} rows, but its footer says {ROWS + 3}" in report.not_indexed[0].why
    assert [Path(f[0]).stem for f in find(indexes.record, "i", [7]).uncovered] == ["2"]


def test_a_damaged_index_is_ignored_by_lookups_and_rebuilt(indexes: Indexes) -> None:
    indexes.build(columns=["k"])
    for pattern in ("*-00.parquet", "*-files-*.parquet"):
        (path,) = [p for p in data_of(indexes.folder()).glob(pattern) if ("files" in p.name) == ("files" in pattern)]
        path.write_bytes(path.read_bytes()[:-20])
        found = find(indexes.record, "i", [7])
        assert (len(found.named), len(found.uncovered)) == (0, 3)
    assert indexes.build(columns=["k"]).indexed == 3
    holds(indexes)
    current = indexes.folder().current()
    assert current is not None
    (data_of(indexes.folder()) / current.runs[0].name).unlink()
    assert len(find(indexes.record, "i", [7]).uncovered) == 3
    assert indexes.build(columns=["k"]).indexed == 3
    holds(indexes)


def test_a_file_whose_name_is_not_utf8_is_named_and_left_to_lookups(indexes: Indexes) -> None:
    table = Path(indexes.record.location)
    os.rename(add(table, 3), os.fsencode(table) + b"/\xff.parquet")  # noqa: PTH104 -- bytes are no path
    for report in (indexes.build(columns=["k"]), indexes.build(columns=["k"])):
        assert (report.generation, report.files, report.not_indexed_files) == (1, 3, 1)
        assert [(f.file, f.why) for f in report.not_indexed] == [("\\udcff.parquet", "its path is not UTF-8")]
    found = find(indexes.record, "i", [7])
    assert [Path(f[0]).stem for f in found.named] == ["0"]
    assert [os.fsencode(Path(f[0]).name) for f in found.uncovered] == [b"\xff.parquet"]
    add(table, 4)
    operation = indexes.plan(columns=["k"])
    os.rename(add(table, 5), os.fsencode(table) + b"/\xfe.parquet")  # noqa: PTH104
    report = operation.run_all().complete()
    assert (report.files, report.not_indexed_files) == (4, 2), "including the file added during the build"


def test_operations_of_the_same_name_in_other_namespaces_are_distinguished(indexes: Indexes) -> None:
    """Instance numbers start at 1 again with a new etcd, or in another namespace."""
    table = Path(indexes.record.location)
    assert indexes.build(columns=["k"]).generation == 1
    indexes.instances = 0
    add(table, 3)
    report = indexes.build(columns=["k"])
    assert (report.generation, report.indexed, report.files) == (2, 1, 4)
    indexes.instances = 0
    operation = indexes.plan(columns=["k"], refresh="full").run_all()
    assert operation.complete() == operation.complete(), "repeated by the same operation"
    holds(indexes, files=("0", "1", "2", "3"))
    indexes.instances = 0
    assert indexes.drop()
    indexes.instances = 0
    assert not indexes.drop(), "that was another drop"


def test_a_drop_whose_outcome_was_lost_reports_that_there_was_an_index(indexes: Indexes) -> None:
    indexes.build(columns=["k"])
    operation = Operation(indexes, DropIndex(), {"name": "i"})
    (partition,) = operation.planned.partitions
    operation.run(partition)
    assert operation.run(partition, operation.attempt(partition, fence=2)).dropped


@pytest.mark.parametrize("moment", ["publish", "_numbers", "_empty"])
def test_a_late_drop_does_not_touch_a_newer_build(
    indexes: Indexes, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The drop is suspended before it publishes, removes generations, or removes files.

    Meanwhile another attempt completes it, the index is built again, and a refresh is in progress.
    """
    indexes.build(columns=["k"])
    operation = Operation(indexes, DropIndex(), {"name": "i"})
    (partition,) = operation.planned.partitions
    real, under_way = getattr(Folder, moment), []

    def late(self: Folder, *args: Any) -> Any:
        monkeypatch.setattr(Folder, moment, real)
        operation.run(partition, operation.attempt(partition, fence=2))
        assert operation.complete() == {"name": "i", "dropped": True}
        indexes.build(columns=["k"])
        add(Path(indexes.record.location), 7)
        next_one = indexes.plan(columns=["k"]).run_all()
        under_way.append(next_one)
        return real(self, *args)

    calls = []

    def counted(self: Folder, *args: Any) -> Any:
        calls.append(args)
        # The same list is read before, to find out whether there is an index.
        return late(self, *args) if moment != "_numbers" or len(calls) == 3 else real(self, *args)

    monkeypatch.setattr(Folder, moment, counted)
    with contextlib.suppress(Superseded):
        operation.run(partition)
    assert under_way
    found = find(indexes.record, "i", [-1])
    assert sorted(Path(f[0]).stem for f in found.named) == ["0", "1", "2"]
    under_way[0].complete()
    holds(indexes, files=("0", "1", "2", "7"))


def test_a_build_on_a_dropped_table_raises_table_unavailable(indexes: Indexes) -> None:
    operation = indexes.plan(columns=["k"])
    partition, other, _ = operation.planned.partitions
    operation.run(partition)
    shutil.rmtree(indexes.record.location)
    ctx = operation.attempt(other)
    with pytest.raises(TableUnavailable, match="does not exist"):
        operation.run(other, ctx)
    with pytest.raises(TableUnavailable, match="does not exist"):
        operation.complete()
    operation.behavior.cancel_job_and_cleanup(operation.arg, other, ctx)
    operation.complete("cancelled")
    assert not Path(indexes.record.location).exists()
    assert indexes.staged_files() == []


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        (["nowhere"], r"the table has no column 'nowhere' \(its columns: k, s, l, at\)"),
        (
            ["s"],
            "the column 's' cannot be indexed: only columns of single values can be indexed, not struct<`x`:bigint>",
        ),
        (["l"], "not array<bigint>"),
        (["at"], "the column 'at' cannot be indexed: Spark does not read times in microseconds"),
        (["p"], "the column 'p' is a partition column"),
    ],
)
def test_columns_that_cannot_be_indexed_are_refused(columns: list[str], sentence: str, tmp_path: Path) -> None:
    columns_of = {"k": [1], "s": [{"x": 1}], "l": [[1]], "at": pa.array([1], pa.time64("us"))}
    (tmp_path / "t" / "p=1").mkdir(parents=True)
    pq.write_table(pa.table(columns_of), tmp_path / "t" / "p=1" / "0.parquet")
    with pytest.raises(InvalidArgument, match=sentence):
        Indexes(tmp_path / "t", tmp_path / "shared").plan(columns=columns)
    assert not (tmp_path / "t" / "_distop").exists(), "nothing was changed"


def test_columns_of_an_iceberg_table_that_cannot_be_indexed_are_refused(tmp_path: Path) -> None:
    Lake(tmp_path / "t").new(Schema(NestedField(1, "u", UUIDType()), NestedField(2, "at", TimeType())))
    indexes = Indexes(tmp_path / "t", tmp_path / "shared")
    indexes.record = TableRecord("t", "iceberg", str(tmp_path / "t"))
    for column, why in (("u", "its type is uuid"), ("at", "does not read the type time"), ("x", "has no column 'x'")):
        with pytest.raises(InvalidArgument, match=why):
            indexes.plan(columns=[column])


@pytest.mark.parametrize("kind", ["posting", "skip"])
def test_an_index_of_an_iceberg_table_survives_renamed_columns(kind: str, tmp_path: Path) -> None:
    """Entries of a former column do not count for a new column with its name."""
    lake = Lake(tmp_path / "t")
    table = lake.new(Schema(NestedField(1, "k", LongType()), NestedField(2, "b", LongType())))
    table.append(pa.table({"k": [1, 2], "b": [7, 8]}))
    indexes = Indexes(tmp_path / "t", tmp_path / "shared")
    indexes.record = TableRecord("t", "iceberg", str(tmp_path / "t"))

    def rename(*names: tuple[str, str]) -> None:
        for old, new in names:
            with table.update_schema() as update:
                update.rename_column(old, new)

    def read(key: int | None) -> tuple[int, int]:
        found = find(indexes.record, "i", [key])
        return len(found.named), len(found.uncovered)

    assert indexes.build(kind=kind, columns=["k"]).generation == 1
    assert (read(1), read(7)) == ((1, 0), (0, 0))
    rename(("k", "was"), ("b", "k"))
    assert (read(1), read(7)) == ((0, 1), (0, 1))
    report = indexes.build(kind=kind, columns=["k"])
    assert (report.generation, report.indexed, report.files) == (2, 1, 1)
    assert (read(1), read(7)) == ((0, 0), (1, 0))
    operation = indexes.plan(kind=kind, columns=["k"], refresh="full").run_all()
    rename(("k", "b"), ("was", "k"))
    assert operation.complete().files == 1
    assert (read(1), read(7)) == ((1, 0), (0, 0)), "renamed while the index was built"
    path = max((root_of(indexes.folder()) / "generations").iterdir())
    generation = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in generation.items() if name != "ids"}))
    assert read(1) == (0, 1), "a generation without ids of columns"
    operation = indexes.plan(kind=kind, columns=["k"], refresh="full").run_all()
    with table.update_schema() as update:
        update.delete_column("k")
    report = operation.complete()
    assert (report.files, report.not_indexed_files) == (0, 1)
    with pytest.raises(InvalidArgument, match="no longer has a column 'k' of single values"):
        read(1)
    with table.update_schema() as update:
        update.add_column("k", LongType())
    assert read(None) == (0, 1)


def test_hole_1_a_completion_indexes_no_file_that_became_a_link(tmp_path: Path) -> None:
    """It indexes files that no job has indexed, by a cached plan whose files were checked before."""
    table = Lake(tmp_path / "t").new(Schema(NestedField(1, "k", LongType())))
    table.append(pa.table({"k": [1, 2]}))
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"k": pa.array([7, 8])}), other)
    indexes = Indexes(tmp_path / "t", tmp_path / "shared")
    indexes.record = TableRecord("t", "iceberg", str(tmp_path / "t"))
    operation = indexes.plan(kind="skip", columns=["k"])
    (path,) = (tmp_path / "t" / "data").rglob("*.parquet")
    path.unlink()
    path.symlink_to(other)
    with pytest.raises(InvalidArgument, match="lies outside of its table"):
        operation.complete()


def test_invalid_arguments_are_refused(indexes: Indexes) -> None:
    for arg in (
        {"columns": []},
        {"columns": ["k", "K"]},
        {"columns": ["k"], "kind": "tree"},
        {"columns": ["k"], "x": 1},
    ):
        with pytest.raises(ValueError, match="validation error"):
            indexes.plan(**arg)
    with pytest.raises(ValueError, match="should match pattern"):
        indexes.plan("../i", columns=["k"])
