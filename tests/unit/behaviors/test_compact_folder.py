"""``compact`` on folders of Parquet files, without a JVM: rows stay the same, whatever writers and crashes do."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from distop.behavior import JobFailed, Summary, TableRecord, select
from distop.errors import InvalidArgument, TableUnavailable, UnsafePath
from distop.storage.folder_store import FolderStore
from distop.storage.location import Location
from distop.storage.object_store import is_scratch
from distop.tables import plan_table
from distop.tables.commits import GroupStatus
from distop.tables.parquet.folder_swap import FolderSwaps
from distop.testing import MemoryProgress
from distop_behaviors.compact import Compact, CompactTableJob
from distop_behaviors.compact.compact_argument import CompactArgument
from distop_behaviors.compact.group_committer import REASONS
from distop_behaviors.export import Export
from distop_behaviors.validate import Validate
from tests.support.context import FakeContext, Ran, complete, run_jobs, run_operation

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from distop.behavior import OutcomeRow, PartitionPlan

SMALL = {"target_bytes": 1 << 20, "min_input_files": 2, "swap": "hive"}


def table_of(first: int, count: int = 10, **more: Any) -> pa.Table:
    ids = range(first, first + count)
    return pa.table({"id": list(ids), "c": [None if i % 7 == 0 else f"text {i}" for i in ids], **more})


class Bench:
    """A folder of small Parquet files, and operations on it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.path = folder / "t"
        self.path.mkdir()
        self.work = folder / "work"
        self.work.mkdir()
        self.record = TableRecord("t", "parquet", str(self.path), options)
        self.number = 0

    def write(self, name: str, rows: pa.Table, **given: Any) -> Path:
        path = self.path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        pq.write_table(rows, path, **given)
        return path

    @property
    def files(self) -> list[str]:
        """The files that readers find."""
        found = (path.relative_to(self.path) for path in self.path.rglob("*") if path.is_file())
        return sorted(str(one) for one in found if not any(part[0] in "._" for part in one.parts))

    @property
    def rows(self) -> Counter[str]:
        """The rows as pyarrow reads them, as a multiset."""
        schema = pa.unify_schemas([pq.read_schema(self.path / name) for name in self.files])
        names = {part.partition("=")[0] for name in self.files for part in name.split("/")[:-1]}
        for name in sorted(names):
            schema = schema.append(pa.field(name, pa.string()))
        partitioning = ds.partitioning(pa.schema([pa.field(n, pa.string()) for n in sorted(names)]), flavor="hive")
        found = ds.dataset(self.path, schema, format="parquet", partitioning=partitioning).to_table().to_pylist()
        return Counter(repr(sorted(row.items())) for row in found)

    def hidden(self) -> list[str]:
        """The files of distop, without those that a killed process had not completed."""
        found = (path for path in (self.path / "_distop").rglob("*") if path.is_file() and not is_scratch(path.name))
        return sorted(str(one.relative_to(self.path / "_distop")) for one in found)

    def context(self) -> FakeContext:
        ctx = FakeContext(self.work, self.record)
        ctx.operation = f"t/compact/{self.number}"
        ctx.progress = MemoryProgress()
        return ctx

    def compact(self, **arg: Any) -> Ran:
        self.number += 1
        return run_operation(Compact(), self.record, {**SMALL, **arg}, lambda _: self.context())

    def plan(self, **arg: Any) -> tuple[CompactArgument, list[PartitionPlan]]:
        self.number += 1
        argument, ctx = CompactArgument.model_validate({**SMALL, **arg}), self.context()
        planned = Compact().partitions(self.record, argument, ctx)
        return argument, select(Compact().jobs(argument, planned.partitions, None, ctx), None)

    def run(self, argument: CompactArgument, plans: list[PartitionPlan]) -> list[OutcomeRow]:
        return run_jobs(Compact(), argument, plans, self.context())

    def complete(self, argument: CompactArgument, plans: list[PartitionPlan], rows: list[OutcomeRow]) -> Ran:
        return complete(Compact(), argument, self.record, rows, plans, self.context(), version="")


def groups_of(ran: Ran) -> dict[str, int]:
    """The numbers of groups in a report that are not 0."""
    return {name: count for name, count in ran.report["groups"].items() if count}


class Killed(BaseException):
    """The process ends here."""


CALLS = ("put_new", "delete_many", "remove_listed", "move_listed", "delete_folder")


def at_call(patch: pytest.MonkeyPatch, number: int, moment: str, act: Callable[[], None]) -> list[int]:
    """Act before or after this call that changes a store; the list counts the calls."""
    calls = [0]

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **given: Any) -> Any:
            calls[0] += 1
            if calls[0] != number:
                return original(*args, **given)
            if moment == "before":
                act()
            found = original(*args, **given)
            if moment == "after":
                act()
            return found

        return wrapped

    for name in CALLS:
        patch.setattr(FolderStore, name, wrap(getattr(FolderStore, name)))
    return calls


def at_swap(patch: pytest.MonkeyPatch, act: Callable[[], Any], number: int = 1) -> None:
    """Act as another writer just before a group is replaced, after its files were compared."""
    original, calls = FolderSwaps.swap, [0]

    def wrapped(self: FolderSwaps, *args: Any) -> str:
        calls[0] += 1
        if calls[0] == number:
            act()
        return original(self, *args)

    patch.setattr(FolderSwaps, "swap", wrapped)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A folder of four files without partitions."""
    made = Bench(tmp_path)
    for n in range(4):
        made.write(f"part-{n}.parquet", table_of(10 * n))
    return made


@pytest.fixture
def days(tmp_path: Path) -> Bench:
    """A folder of three partitions with three files each."""
    made = Bench(tmp_path)
    for day in range(3):
        for n in range(3):
            made.write(f"day=d{day}/part-{n}.parquet", table_of(100 * day + 10 * n))
    return made


def test_small_files_become_one_file_with_the_same_rows(bench: Bench) -> None:
    rows = bench.rows
    ran = bench.compact()
    assert ran.report["verdict"] == "compacted", ran.message
    assert groups_of(ran) == {"planned": 1, "committed": 1}
    assert (ran.report["before"]["files"], ran.report["after"]["files"], ran.report["left_bytes"]) == (4, 1, 0)
    assert ran.report["before"]["rows"] == ran.report["after"]["rows"] == 40
    assert (bench.rows, len(bench.files)) == (rows, 1)
    assert [name.startswith("swap/000000001.forward.") for name in bench.hidden()] == [True], bench.hidden()
    assert not list(bench.work.rglob("staged.json"))


def test_each_partition_is_replaced_in_its_folder(days: Bench) -> None:
    rows = days.rows
    ran = days.compact(commit_every=2)
    assert (ran.report["verdict"], ran.report["commits"]) == ("compacted", 3), ran.message
    assert [name.partition("/")[0] for name in days.files] == ["day=d0", "day=d1", "day=d2"]
    assert days.rows == rows


def test_a_second_run_does_nothing(days: Bench) -> None:
    days.compact()
    files, rows = days.files, days.rows
    assert days.compact().report["verdict"] == "nothing to do"
    assert (days.files, days.rows) == (files, rows)
    # The marks of the first one are gone, but the highest.
    assert len([name for name in days.hidden() if name.endswith(".done")]) == 1


def test_a_condition_and_names_choose_partitions(days: Bench) -> None:
    rows = days.rows
    assert groups_of(days.compact(where="day > 'd0'", commit_every=None)) == {"planned": 2, "committed": 2}
    assert (len(days.files), days.rows) == (5, rows)
    with pytest.raises(InvalidArgument, match="where names 'id', which is not a partition column"):
        days.compact(where="id = 1")


def test_types_of_partition_columns_decide_how_values_are_compared(tmp_path: Path) -> None:
    bench = Bench(tmp_path, partition_types={"n": "int"})
    for n in (2, 10):
        for part in range(2):
            bench.write(f"n={n}/{part}.parquet", table_of(n))
    ran = bench.compact(where="n < 10")
    assert groups_of(ran) == {"planned": 1, "committed": 1}
    assert sorted(name.partition("/")[0] for name in bench.files) == ["n=10", "n=10", "n=2"]


def test_a_dry_run_changes_nothing(days: Bench) -> None:
    found = sorted(days.path.rglob("*"))
    ran = days.compact(dry_run=True)
    assert (ran.report["verdict"], groups_of(ran), ran.report["before"]["files"]) == ("planned", {"planned": 3}, 9)
    assert sorted(days.path.rglob("*")) == found


def test_files_without_a_column_get_null_for_it(bench: Bench) -> None:
    bench.write("part-9.parquet", table_of(900, extra=list(range(10))))
    rows = bench.rows
    assert bench.compact().report["verdict"] == "compacted"
    assert (bench.rows, len(bench.files)) == (rows, 1)


def test_files_without_rows_become_one_file_with_the_columns(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for n in range(3):
        bench.write(f"{n}.parquet", table_of(1).slice(0, 0))
    assert bench.compact().report["verdict"] == "compacted"
    (name,) = bench.files
    assert pq.read_table(bench.path / name).column_names == ["id", "c"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"id": pa.array([1], pa.int32())}, "the column 'id' is stored as int64 in .*, but as int32 in"),
        ({"ID": pa.array([1], pa.int64())}, "the column 'id' of .* is called 'ID' in"),
    ],
)
def test_columns_that_files_store_differently_are_refused_by_name(
    bench: Bench, other: dict[str, Any], message: str
) -> None:
    bench.write("part-9.parquet", pa.table(other))
    files = bench.files
    with pytest.raises(JobFailed, match=message):
        argument, plans = bench.plan()
        ctx = bench.context()
        ctx.partition = plans[0]
        Compact().start_or_resume_job(argument, plans[0], ctx)
    assert bench.files == files


def test_the_codec_is_kept_or_chosen(bench: Bench) -> None:
    bench.compact(codec="zstd")
    metadata = pq.read_metadata(bench.path / bench.files[0])
    assert metadata.row_group(0).column(0).compression == "ZSTD"
    bench.write("b.parquet", table_of(500), compression="gzip")
    bench.write("a.parquet", table_of(600), compression="gzip")
    bench.compact()
    assert pq.read_metadata(bench.path / bench.files[0]).row_group(0).column(0).compression == "GZIP"


def test_an_unsorted_group_keeps_the_order_of_its_rows(tmp_path: Path) -> None:
    bench, chance = Bench(tmp_path), random.Random(3)
    for n in range(4):
        bench.write(f"part-{n}.parquet", pa.table({"id": chance.sample(range(1000), 50)}), row_group_size=20)

    def ids(path: str) -> list[int]:
        return [int(str(one)) for one in pq.read_table(path)["id"].to_pylist()]

    argument, plans = bench.plan()
    expected = [one for path, _, _ in plans[0].files for one in ids(path)]
    bench.complete(argument, plans, bench.run(argument, plans))
    (new,) = bench.files
    assert ids(str(bench.path / new)) == expected


# ---------------------------------------------------------------------- refusals


def test_a_folder_is_refused_without_a_swap(bench: Bench) -> None:
    with pytest.raises(InvalidArgument, match='"swap": "hive" replaces them in several steps, during which readers'):
        bench.compact(swap=None)


@pytest.mark.parametrize("form", ["delta", "iceberg", "spark"])
def test_formats_with_commits_refuse_a_swap(bench: Bench, form: str) -> None:
    bench.record = TableRecord("t", form, "db.t" if form == "spark" else str(bench.path))
    with pytest.raises(InvalidArgument, match="not replaced by a swap, because"):
        bench.compact()


def test_a_table_of_sparks_catalog_is_refused(bench: Bench) -> None:
    bench.record = TableRecord("t", "spark", "db.t")
    with pytest.raises(InvalidArgument, match="through Spark's catalog"):
        bench.compact(swap=None)


def test_another_table_in_the_folder_is_refused(days: Bench) -> None:
    ctx = days.context()
    ctx.tables = {"u": TableRecord("u", "parquet", str(days.path / "day=d0"))}
    with pytest.raises(UnsafePath, match="another table's folder"):
        Compact().partitions(days.record, CompactArgument.model_validate(SMALL), ctx)


def test_an_unknown_column_to_sort_by_is_refused(bench: Bench) -> None:
    with pytest.raises(InvalidArgument, match=r"sort_by names 'ids' \(did you mean 'id'\?\)"):
        bench.compact(sort_by=["ids"])


def test_a_folder_that_others_can_change_is_refused(bench: Bench) -> None:
    bench.path.chmod(0o777)
    with pytest.raises(UnsafePath, match="others could change the new ones"):
        bench.compact()


@pytest.mark.parametrize("behavior", [Compact, CompactTableJob])
def test_no_export_runs_beside_a_compaction(behavior: type[Compact]) -> None:
    """A swap deletes files that the export has planned."""
    assert behavior.type_name in Export.conflicts_with


# ---------------------------------------------------------------------- other writers


def remove(bench: Bench) -> None:
    (bench.path / "day=d1" / "part-1.parquet").unlink(missing_ok=True)


def change(bench: Bench) -> None:
    bench.write("day=d1/part-1.parquet", table_of(5000, 3))


def add(bench: Bench) -> None:
    bench.write("day=d1/part-9.parquet", table_of(6000, 3))


def overwrite(bench: Bench) -> None:
    for path in (bench.path / "day=d1").glob("*.parquet"):
        path.unlink()
    bench.write("day=d1/other.parquet", table_of(7000, 3))


@pytest.mark.parametrize("writer", [remove, change, add, overwrite])
@pytest.mark.parametrize("moment", ["before the job", "before the replacement"])
def test_a_concurrent_writer_loses_nothing(
    days: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: Callable[[Bench], None], moment: str
) -> None:
    """The rows are those that the other writer alone would have left."""
    argument, plans = days.plan()
    if moment == "before the job":
        writer(days)
        expected = [days.rows]
    else:
        expected = []
        at_swap(monkeypatch, lambda: (writer(days), expected.append(days.rows)), number=2)
    ran = days.complete(argument, plans, days.run(argument, plans))
    assert days.rows == expected[0], ran.message
    assert ran.report["groups"]["committed"] == (2 if writer is overwrite else 3), (ran.message, ran.report)
    assert ran.report["groups"]["redone"] == (1 if writer in (remove, change) else 0)
    assert [name for name in days.hidden() if not name.startswith("swap")] == []


def test_a_group_that_writers_always_change_is_left_out_with_the_reason(
    days: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, expected = FolderSwaps.swap, Counter[str]()

    def swap(self: FolderSwaps, number: int, entry: Any) -> str:
        if entry.group == 1:
            days.write(f"day=d1/{entry.removed[0].name}", table_of(number, 3))
            expected.clear()
            expected.update(days.rows)
        return original(self, number, entry)

    monkeypatch.setattr(FolderSwaps, "swap", swap)
    ran = days.compact()
    assert (ran.report["verdict"], groups_of(ran)) == ("partial", {"planned": 3, "committed": 2, "conflicted": 1})
    assert ran.report["left_out"][0]["group"] == "day=d1#0"
    assert days.rows == expected


def test_zero_replacements_are_no_success(bench: Bench) -> None:
    """iceberg#9611: a rewrite whose commits all failed was reported as success."""
    argument, plans = bench.plan()
    outcomes = bench.run(argument, plans)
    ran = bench.complete(argument, plans, outcomes)
    assert ran.report["verdict"] == "compacted"
    bench.write("a.parquet", table_of(0))
    bench.write("b.parquet", table_of(0))
    argument, plans = bench.plan(commit_every=None)
    outcomes = bench.run(argument, plans)
    for name in bench.files:
        (bench.path / name).unlink()
    bench.write("c.parquet", table_of(7))
    ran = bench.complete(argument, plans, outcomes)
    assert "nothing was committed" in ran.message
    assert (ran.report["verdict"], ran.report["commits"], ran.report["left_bytes"]) == ("failed", 0, 0)
    assert (bench.files, [name for name in bench.hidden() if not name.startswith("swap")]) == (["c.parquet"], [])


def test_plans_of_other_operations_wait_for_a_replacement(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing during a replacement would have rows twice."""
    original, refused = FolderStore.remove_listed, []

    def remove_listed(self: FolderStore, objects: Any) -> Any:
        with pytest.raises(TableUnavailable, match="is replacing files of .*, so some rows are there twice"):
            plan_table(bench.record)
        refused.append(True)
        return original(self, objects)

    monkeypatch.setattr(FolderStore, "remove_listed", remove_listed)
    bench.compact()
    assert refused == [True]
    assert len(plan_table(bench.record).partitions[0].files) == 1


def test_a_listing_during_which_files_were_replaced_is_repeated(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could have neither the old nor the new files."""
    original, calls = Location.walk, [0]

    def walk(self: Location, **given: Any) -> Any:
        calls[0] += 1
        first = calls[0] == 1
        for entry in original(self, **given):
            yield entry
            if first:
                first = False
                bench.compact()

    monkeypatch.setattr(Location, "walk", walk)
    planned = plan_table(bench.record)
    assert [path.rpartition("/")[2] for path, _, _ in planned.partitions[0].files] == bench.files


def test_a_certificate_does_not_cover_the_new_files(days: Bench) -> None:
    def validate(**more: Any) -> Any:
        ran = run_operation(Validate(), days.record, {"checks": [{"not_null": "id"}], **more}, lambda _: days.context())
        return ran.report

    days.number = 1
    certificate = validate()["certificate"]
    assert validate(since=certificate)["rows"] == 0
    days.compact(where="day = 'd1'")
    again = validate(since=certificate)
    assert (again["verdict"], again["rows"]) == ("valid", 30)


# ---------------------------------------------------------------------- crashes


def run_until_done(bench: Bench, argument: CompactArgument, plans: list[PartitionPlan]) -> Ran:
    """Run jobs and completion again after each crash, as executors do."""
    for attempt in range(1, 9):
        with suppress(Killed):
            ctx = bench.context()
            ctx.fence = attempt
            return bench.complete(argument, plans, run_jobs(Compact(), argument, plans, ctx))
    raise AssertionError("it is killed again and again")


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_process_that_is_killed_at_any_call_loses_nothing(tmp_path: Path, moment: str) -> None:
    """Each call that changes a store, of the jobs and of the completion."""
    number = 0
    while True:
        number += 1
        folder = tmp_path / str(number)
        folder.mkdir()
        bench = Bench(folder)
        for n in range(2):
            for day in range(2):
                bench.write(f"day=d{day}/part-{n}.parquet", table_of(100 * day + 10 * n))
        rows = bench.rows
        argument, plans = bench.plan(commit_every=1)

        def kill() -> None:
            raise Killed

        with pytest.MonkeyPatch.context() as patch:
            calls = at_call(patch, number, moment, kill)
            ran = run_until_done(bench, argument, plans)
        assert ran.report["verdict"] == "compacted", (number, ran.message, ran.report)
        assert bench.rows == rows, number
        assert len(bench.files) == 2, (number, bench.files)
        assert [name for name in bench.hidden() if not name.startswith("swap")] == [], number
        assert bench.compact().report["verdict"] == "nothing to do"
        if calls[0] < number:
            break
    assert number > 20


@pytest.mark.parametrize("number", range(1, 12))
def test_the_next_compaction_finishes_what_an_operation_left_that_never_ran_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    rows = bench.rows
    argument, plans = bench.plan(commit_every=1)

    def kill() -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        # The first calls stage the new files.
        at_call(patch, number, "after", kill)
        with suppress(Killed):
            bench.run(argument, plans)
    assert set(rows) <= set(bench.rows)
    with suppress(InvalidArgument):  # an interrupted replacement is not finished by a dry run
        bench.compact(dry_run=True)
    ran = bench.compact()
    assert ran.report["verdict"] in ("compacted", "nothing to do"), ran.message
    assert (bench.rows, len(bench.files)) == (rows, 1)
    assert [name for name in bench.hidden() if not name.startswith("swap")] == []


def test_a_cancelled_operation_keeps_what_was_replaced(days: Bench) -> None:
    rows = days.rows
    argument, plans = days.plan(commit_every=1)
    outcomes = days.run(argument, plans[:2])
    summary = Summary("cancelled", 3, 2, 0, lambda: iter(outcomes), plan=lambda: iter(plans))
    report = Compact().complete_operation(argument, days.record, summary, days.context())
    assert (report.verdict, report.groups.committed, report.groups.unfinished) == ("cancelled", 2, 1)
    assert (days.rows, len(days.files), report.left_bytes) == (rows, 5, 0)


def test_offered_files_that_were_removed_are_never_replaced_with(days: Bench) -> None:
    """A paused process commits after the completion has removed the staged files."""
    rows = days.rows
    argument, plans = days.plan(commit_every=None)
    days.run(argument, plans)
    for path in (days.path / "_distop" / "distop-staged").rglob("*.parquet"):
        path.unlink()
    ran = days.complete(argument, plans, days.run(argument, plans))
    assert groups_of(ran) == {"planned": 3, "committed": 3, "redone": 3}
    assert (days.rows, len(days.files)) == (rows, 3)


def test_neighbours_keep_their_bytes(days: Bench) -> None:
    for name in ("day=d1/_SUCCESS", "day=d1/.part-0.parquet.crc", "_common_metadata", "_distop/index/i/a.parquet"):
        (days.path / name).parent.mkdir(parents=True, exist_ok=True)
        (days.path / name).write_bytes(name.encode())
    other = days.path.parent / "t2"
    other.mkdir()
    (other / "part-0.parquet").write_bytes(b"x")

    def digests() -> dict[str, str]:
        new = days.files
        return {
            str(path): hashlib.sha256(path.read_bytes()).hexdigest()
            for folder in (days.path, other)
            for path in folder.rglob("*")
            if path.is_file() and str(path.relative_to(folder)) not in new and "swap" not in path.parts
        }

    before = digests()
    assert days.compact().report["verdict"] == "compacted"
    after = digests()
    assert not (days.path / "day=d1/.part-0.parquet.crc").exists()  # Hadoop's, of a file that is gone
    assert {path: digest for path, digest in before.items() if "crc" not in path}.items() <= after.items()


# ---------------------------------------------------------------------- generated tables


TYPES: dict[str, Any] = {
    "int64": lambda n: n * 7919,
    "int32": lambda n: n - 500,
    "float64": lambda n: n / 3,
    "string": lambda n: "é" * (n % 40) if n % 5 else None,
    "bool_": lambda n: n % 2 == 0,
    "date32": lambda n: n,
    "binary": lambda n: bytes([n % 256]),
}


@pytest.mark.parametrize("seed", range(8))
def test_generated_tables_keep_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Random types, partitions and new columns, with a random writer at a random replacement."""
    chance = random.Random(seed)
    bench, columns, first = Bench(tmp_path), {"c0": chance.choice(sorted(TYPES))}, 0
    partitions = chance.choice([[""], ["p=a/", "p=b/", "p=__HIVE_DEFAULT_PARTITION__/", "p=x%2Fy/"]])

    def write(name: str = "") -> None:
        nonlocal first
        count = chance.randint(0, 40)
        numbers = range(first, first + count)
        first += count
        found = {
            name: pa.array([TYPES[kind](n) for n in numbers], getattr(pa, kind)()) for name, kind in columns.items()
        }
        path = name or f"{chance.choice(partitions)}f{first}-{chance.randint(0, 9)}.parquet"
        bench.write(path, pa.table({"id": pa.array(numbers, pa.int64()), **found}))

    for step in range(chance.randint(4, 14)):
        write()
        if chance.random() < 0.3:
            columns = columns | {f"d{step}": chance.choice(sorted(TYPES))}

    def delete() -> None:
        (bench.path / chance.choice(bench.files)).unlink()

    def replace() -> None:
        write(chance.choice(bench.files))

    expected: list[Counter[str]] = [bench.rows]
    argument, plans = bench.plan(commit_every=chance.choice([None, 1, 2]), target_bytes=chance.choice([4096, 1 << 20]))
    writer = chance.choice([write, delete, replace])

    def act() -> None:
        writer()
        expected.append(bench.rows)

    at_swap(monkeypatch, act, chance.randint(1, 2))
    if plans[0].files:
        ran = bench.complete(argument, plans, bench.run(argument, plans))
        assert ran.report is not None, ran.message
    assert bench.rows == expected[-1]


def test_the_statuses_have_reasons() -> None:
    assert set(REASONS) == set(GroupStatus) - {GroupStatus.PENDING, GroupStatus.COMMITTED}


def test_a_partition_whose_name_looks_like_that_of_a_group_is_compacted_itself(tmp_path: Path) -> None:
    """``day=x#3`` was taken for a group of ``day=x``, which was compacted instead."""
    bench = Bench(tmp_path)
    for day in ("x", "x#3", "x#3#1"):
        for n in range(3):
            bench.write(f"day={day}/{n}.parquet", table_of(n))
    bench.number = 1
    argument, ctx = CompactArgument.model_validate(SMALL), bench.context()
    planned = Compact().partitions(bench.record, argument, ctx).partitions

    def named(*names: str) -> list[str]:
        return [one.name for one in Compact().jobs(argument, planned, names, ctx)]

    for day in ("x", "x#3", "x#3#1"):
        assert named(f"day={day}") == named(f"day={day}#0") == [f"day={day}#0"]
    with pytest.raises(InvalidArgument, match="no partition 'day=y'"):
        named("day=y#3")
