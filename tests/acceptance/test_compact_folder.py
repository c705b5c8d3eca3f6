"""``compact`` on folders of Parquet files: in S3, and by Spark."""

from __future__ import annotations

import io
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.behavior import TableRecord, select
from distop.storage.places import shared_below
from distop.storage.remote_store import RemoteStore
from distop.tables import plan_table
from distop.tables.parquet.folder_swap import FolderSwaps
from distop.testing import MemoryProgress
from distop_behaviors.compact import Compact
from distop_behaviors.compact.compact_argument import CompactArgument
from tests.support.context import FakeContext, Ran, complete, run_jobs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from distop.storage.object_store import ObjectStore

pytestmark = [pytest.mark.timeout(240), pytest.mark.rotating]

SMALL = {"target_bytes": 1 << 20, "min_input_files": 2, "swap": "hive"}
NEIGHBOURS = ("day=d0/_SUCCESS", "day=d0/.hidden", "_metadata")


class Killed(BaseException):
    """The process ends here."""


class Bucket:
    """A folder in S3 with two partitions of three files each, and operations on it."""

    def __init__(
        self, place: ObjectStore, work: Path, name: str = "t", spark: SparkSession | None = None, *, days: int = 2
    ) -> None:
        from distop.storage.opened_stores import open_store

        self.store = open_store(f"{place.location}/{name}")
        self.record = TableRecord("t", "parquet", self.store.location)
        self.work = work
        self.spark = spark
        self.number = 0
        for day in range(days):
            for n in range(3):
                self.write(f"day=d{day}/part-{n}.parquet", 100 * day + 10 * n)
        for key in NEIGHBOURS:
            self.store.put(key, key.encode())

    def write(self, key: str, first: int, count: int = 10) -> None:
        data = io.BytesIO()
        pq.write_table(pa.table({"id": range(first, first + count)}), data)
        self.store.put(key, data.getvalue())

    @property
    def files(self) -> list[str]:
        return [one.key for one in self.store.list() if one.key.endswith(".parquet") and one.key[0] != "_"]

    @property
    def rows(self) -> Counter[tuple[str, int]]:
        found: Counter[tuple[str, int]] = Counter()
        for key in self.files:
            table = pq.read_table(io.BytesIO(self.store.get(key, limit=1 << 20).data))
            found.update((key.partition("/")[0], one) for one in table["id"].to_pylist())
        return found

    def hidden(self) -> list[str]:
        found = (one.key for one in self.store.list() if one.key.startswith("_distop/"))
        return [key for key in found if not key.startswith("_distop/swap/")]

    def context(self) -> FakeContext:
        ctx = FakeContext(self.work, self.record, self.spark)
        ctx.operation, ctx.progress = f"t/compact/{self.number}", MemoryProgress()
        ctx.shared = shared_below(self.record.location, ctx.space)  # as without --shared-dir
        return ctx

    def compact(self, **arg: Any) -> Ran:
        self.number += 1
        argument, ctx = CompactArgument.model_validate({**SMALL, **arg}), self.context()
        planned = Compact().partitions(self.record, argument, ctx)
        plans = select(Compact().jobs(argument, planned.partitions, None, ctx), None)
        for attempt in range(1, 9):
            with suppress(Killed):
                ctx = self.context()
                ctx.fence = attempt
                rows = run_jobs(Compact(), argument, plans, ctx)
                return complete(Compact(), argument, self.record, rows, plans, self.context(), version="")
            for plan in plans:  # as executors do before another attempt
                ctx.partition = plan
                Compact().cancel_job_and_cleanup(argument, plan, ctx)
        raise AssertionError("it is killed again and again")


@pytest.fixture
def bucket(s3_place: ObjectStore, tmp_path: Path) -> Bucket:
    return Bucket(s3_place, tmp_path)


def at_swap(patch: pytest.MonkeyPatch, act: Callable[[], Any]) -> None:
    original, calls = FolderSwaps.swap, [0]

    def wrapped(self: FolderSwaps, *args: Any) -> str:
        calls[0] += 1
        if calls[0] == 1:
            act()
        return original(self, *args)

    patch.setattr(FolderSwaps, "swap", wrapped)


def kill_after(patch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Raise Killed after this call that writes; the list counts the calls."""
    calls = [0]

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **given: Any) -> Any:
            calls[0] += 1
            found = original(*args, **given)
            if calls[0] == number:
                raise Killed
            return found

        return wrapped

    for name in ("put_new", "copy_new", "delete_many"):
        patch.setattr(RemoteStore, name, wrap(getattr(RemoteStore, name)))
    return calls


def test_files_in_a_bucket_are_replaced(bucket: Bucket) -> None:
    rows = bucket.rows
    ran = bucket.compact()
    assert (ran.report["verdict"], ran.report["commits"], ran.report["left_bytes"]) == ("compacted", 2, 0), ran.message
    assert (bucket.rows, len(bucket.files), bucket.hidden()) == (rows, 2, [])
    assert [bucket.store.get(key, limit=100).data.decode() for key in NEIGHBOURS] == list(NEIGHBOURS)
    assert bucket.compact().report["verdict"] == "nothing to do"
    assert [len(one.files) for one in plan_table(bucket.record).partitions] == [1, 1]


@pytest.mark.parametrize("writer", ["add", "remove", "replace", "same"])
def test_a_writer_in_the_bucket_loses_nothing(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, writer: str) -> None:
    expected: list[Counter[tuple[str, int]]] = []

    def act() -> None:
        if writer == "add":
            bucket.write("day=d0/part-9.parquet", 5000)
        elif writer == "remove":
            bucket.store.delete_many(["day=d0/part-1.parquet"])
        else:
            bucket.write("day=d0/part-1.parquet", 10 if writer == "same" else 6000)
        expected.append(bucket.rows)

    at_swap(monkeypatch, act)
    ran = bucket.compact()
    assert (ran.report["verdict"], bucket.rows) == ("compacted", expected[0]), ran.message
    assert ran.report["groups"]["redone"] == (1 if writer in ("remove", "replace") else 0)
    assert bucket.hidden() == []


def test_a_process_that_is_killed_after_any_request_that_writes_loses_nothing(
    s3_place: ObjectStore, tmp_path: Path
) -> None:
    """Each call of the store, and within moves and removals each of their requests."""
    number = 0
    while True:
        number += 1
        bucket = Bucket(s3_place, tmp_path, f"t{number}", days=1)
        rows = bucket.rows

        with pytest.MonkeyPatch.context() as patch:
            calls = kill_after(patch, number)
            # The first calls plan; a planning that is killed is repeated.
            try:
                ran = bucket.compact(commit_every=1)
            except Killed:
                ran = bucket.compact(commit_every=1)
        assert (ran.report["verdict"], bucket.rows) == ("compacted", rows), (number, ran.message)
        assert (len(bucket.files), bucket.hidden()) == (1, []), number
        if calls[0] < number:
            break
    assert number > 10


# ---------------------------------------------------------------------- by Spark


@pytest.mark.spark
def test_groups_in_a_bucket_are_sorted(
    s3_store: ObjectStore, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket(s3_store, tmp_path, spark=spark)
    bucket.write("day=d1/part-0.parquet", 900)
    rows = bucket.rows
    ran = bucket.compact(sort_by=["id"], codec="zstd")
    assert (ran.report["verdict"], bucket.rows) == ("compacted", rows), ran.message
    for key in bucket.files:
        ids = pq.read_table(io.BytesIO(bucket.store.get(key, limit=1 << 20).data))["id"].to_pylist()
        assert ids == sorted(ids)
    assert (len(bucket.files), bucket.hidden()) == (2, [])


class Folder:
    """A local folder that Spark writes and reads."""

    def __init__(self, root: Path, spark: SparkSession) -> None:
        self.path = root / "t"
        self.work = root / "work"
        self.work.mkdir()
        self.spark = spark
        self.record = TableRecord("t", "parquet", str(self.path))
        self.number = 0

    def compact(self, **arg: Any) -> Ran:
        from tests.support.context import run_operation

        self.number += 1

        def context(_: Any) -> FakeContext:
            ctx = FakeContext(self.work, self.record, self.spark)
            ctx.operation, ctx.progress = f"t/compact/{self.number}", MemoryProgress()
            return ctx

        return run_operation(Compact(), self.record, {**SMALL, **arg}, context)

    def rows(self) -> Counter[str]:
        return Counter(
            repr(row) for row in self.spark.read.option("mergeSchema", "true").parquet(str(self.path)).collect()
        )


@pytest.fixture
def folder(tmp_path: Path, spark: SparkSession) -> Folder:
    """Five files in each of three partitions, of which the last ones have one more column."""
    made = Folder(tmp_path, spark.newSession())
    made.spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    select_ = (
        "select id, concat('v', id) c, cast(id / 4 as decimal(12,2)) d, timestamp_micros(id * 987654321) at, "
        "map('k', cast(id as int)) m, named_struct('a', 1, 'b', array('x')) s, cast(id % 3 as int) day "
    )
    for n in range(5):
        more = ", cast(id as float) more " if n == 4 else ""
        frame = made.spark.sql(f"{select_} {more} from range({n * 60}, {n * 60 + 60}, 1, 1)")
        frame.write.mode("append").partitionBy("day").parquet(str(made.path))
    return made


@pytest.mark.spark
@pytest.mark.parametrize("sort_by", [[], ["c"]], ids=["unsorted", "sorted"])
def test_spark_finds_the_same_rows(folder: Folder, sort_by: list[str]) -> None:
    before = folder.rows()
    ran = folder.compact(sort_by=sort_by)
    assert ran.report["verdict"] == "compacted", ran.message
    assert folder.rows() == before
    files = list(folder.path.rglob("day=*/*.parquet"))
    assert len(files) == 3
    if sort_by:
        for file in files:
            found = pq.read_table(file)["c"].to_pylist()
            assert found == sorted(found)


@pytest.mark.spark
def test_times_of_96_bits_are_not_changed(tmp_path: Path, spark: SparkSession) -> None:
    """Spark would write them with 64 bits, which old readers may not know."""
    folder = Folder(tmp_path, spark)
    for n in range(2):
        frame = spark.sql(f"select timestamp_micros({n}) at")
        frame.write.mode("append").parquet(str(folder.path))
    before = folder.rows()
    ran = folder.compact()
    assert "the column 'at' is stored as timestamp[ns], which Spark would store in another way" in ran.message
    assert folder.rows() == before


@pytest.mark.spark
def test_a_column_that_spark_stores_differently_fails_its_group_by_name(tmp_path: Path, spark: SparkSession) -> None:
    folder = Folder(tmp_path, spark)
    folder.path.mkdir()
    for n in range(3):
        pq.write_table(pa.table({"id": pa.array(range(3), pa.uint32())}), folder.path / f"{n}.parquet")
    files = sorted(folder.path.iterdir())
    ran = folder.compact()
    assert "the column 'id' is stored as uint32, which Spark would store in another way" in ran.message
    assert [path for path in sorted(folder.path.iterdir()) if path.name != "_distop"] == files
