"""expire-partitions removes partitions by value: never by file time, never more than its fraction."""

from __future__ import annotations

import json
import os
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import DayTransform, IdentityTransform, MonthTransform
from pyiceberg.types import DateType, LongType, NestedField, TimestamptzType

from distop import clock, testing
from distop.behavior import PartitionPlan, Summary, WorkDone
from distop.errors import InvalidArgument
from distop.protocol.records import TableRecord
from distop.tables import partition_removal_of
from distop.tables.commits import CommitUnknown, Conflict
from distop.tables.delta.log_publisher import LogPublisher
from distop.tables.iceberg.iceberg_partition_removal import IcebergPartitionRemoval
from distop.tables.partition_removal import DAY, HOUR, MONTH, VALUE, YEAR, ValuedPartition
from distop_behaviors.expire import ExpirePartitions
from distop_behaviors.expire.partition_argument import ExpirePartitionsArgument
from distop_behaviors.expire.partition_decision import DECISION
from distop_behaviors.expire.partition_periods import end_of
from tests.support.context import FakeContext
from tests.support.lake import Folder

if TYPE_CHECKING:
    from pyiceberg.table import Table

    from distop.testing import OperationRun

TODAY = datetime.now(UTC).date()
BERLIN = ZoneInfo("Europe/Berlin")


class Killed(BaseException):
    """The process ends here."""


def days_ago(*days: int) -> list[date]:
    return [TODAY - timedelta(days=number) for number in days]


def delta(path: Path, *days: date | None, **configuration: str) -> TableRecord:
    """A table with a partition for each day."""
    for n, day in enumerate(days):
        rows = pa.table({"id": pa.array([n], pa.int64()), "day": pa.array([day], pa.date32())})
        write_deltalake(path, rows, mode="append", partition_by=["day"], configuration=configuration or None)
    return TableRecord("t", "delta", str(path))


def run(table: TableRecord, folder: Path, **arg: Any) -> OperationRun:
    argument = {"column": "day", "older_than": "90d", **arg}
    return testing.run_operation(ExpirePartitions, argument, table=table, folder=folder)


def left(path: Path) -> set[Any]:
    return set(DeltaTable(path).to_pyarrow_table()["day"].to_pylist())


def end(value: Any, pattern: str | None = None, unit: str = VALUE, zone: Any = UTC, *, utc: bool = False) -> Any:
    return end_of(ValuedPartition(PartitionPlan(0, "x"), value, unit, utc), pattern, zone)


def utc(*parts: int) -> datetime:
    return datetime(*parts, tzinfo=UTC)  # type: ignore[misc, arg-type]


@pytest.mark.parametrize(
    ("value", "pattern", "unit", "expected"),
    [
        (date(2024, 2, 28), None, VALUE, utc(2024, 2, 29)),
        ("2024-02-29", None, VALUE, utc(2024, 3, 1)),
        ("2024-12", None, VALUE, utc(2025, 1, 1)),
        (2024, None, VALUE, utc(2025, 1, 1)),
        (20240131, "%Y%m%d", VALUE, utc(2024, 2, 1)),
        ("2024-01-31 10", "%Y-%m-%d %H", VALUE, utc(2024, 1, 31, 11)),
        ("2024-01-31 10:59", "%Y-%m-%d %H:%M", VALUE, utc(2024, 1, 31, 11)),
        ("2024-01-31 23:59:59", "%Y-%m-%d %H:%M:%S", VALUE, utc(2024, 2, 1)),
        ("%H 2024-01-31", "%%H %Y-%m-%d", VALUE, utc(2024, 2, 1)),
        ("2024-01-31T10:00:00+02:00", None, VALUE, utc(2024, 1, 31, 8)),
        (datetime(2024, 1, 31, 10), None, VALUE, utc(2024, 1, 31, 10)),  # noqa: DTZ001
        (0, None, HOUR, utc(1970, 1, 1, 1)),
        (-1, None, DAY, utc(1970, 1, 1)),
        (11, None, MONTH, utc(1971, 1, 1)),
        (-1, None, MONTH, utc(1970, 1, 1)),
        (54, None, YEAR, utc(2025, 1, 1)),
    ],
)
def test_the_end_of_a_partition_s_period(value: Any, pattern: str | None, unit: str, expected: datetime) -> None:
    assert end(value, pattern, unit) == expected


@pytest.mark.parametrize(
    ("value", "pattern"),
    [
        *((value, None) for value in (None, True, "", "eu", "20240131", 20240131, "2024-13-01", "9999", 1.5, "-5")),
        ("2024-01-31", "%Y%m%d"),
    ],
)
def test_a_value_that_names_no_time_has_no_end(value: Any, pattern: str | None) -> None:
    assert end(value, pattern) is None


def test_amoro_3617_the_zone_counts_for_values_without_one() -> None:
    assert end(date(2024, 7, 1), zone=BERLIN) == utc(2024, 7, 1, 22)
    assert end(date(2024, 3, 31), zone=BERLIN) == utc(2024, 3, 31, 22)
    assert end(0, unit=DAY, zone=BERLIN) == utc(1970, 1, 1, 23)
    assert end(0, unit=DAY, zone=BERLIN, utc=True) == utc(1970, 1, 2)
    assert end("2024-07-01T00:00:00Z", zone=BERLIN) == utc(2024, 7, 1)
    assert end("2024-07-01-0800", "%Y-%m-%d%z", zone=BERLIN) == utc(2024, 7, 2, 8)


def test_a_time_that_clocks_have_twice_or_never_is_the_later_one() -> None:
    assert end("2024-10-27T02:30:00", zone=BERLIN).astimezone(UTC) == utc(2024, 10, 27, 1, 30)
    assert end("2024-03-31T02:30:00", zone=BERLIN).astimezone(UTC) == utc(2024, 3, 31, 1, 30)


@pytest.mark.parametrize("pattern", ["%m%d", "%d.%m.", "%H:%M", "%%Y-%m"])
def test_a_format_without_a_year_is_refused(pattern: str) -> None:
    """All values would be in the year 1900, and so all partitions would be removed."""
    with pytest.raises(ValueError, match="format must have a year"):
        ExpirePartitionsArgument(column="day", older_than=1, format=pattern)


def test_a_wrong_clock_of_the_planning_node_expires_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = delta(tmp_path / "t", *days_ago(1, 50, 89, 91))
    true = clock.time.time
    monkeypatch.setattr(clock.time, "time", staticmethod(lambda: true() + 60 * 86400))
    argument = ExpirePartitionsArgument(column="day", older_than="90d", max_fraction=1)  # type: ignore[arg-type]
    planned = ExpirePartitions().partitions(table, argument, FakeContext(tmp_path, table)).partitions
    assert [one.name for one in planned] == [DECISION, f"day={days_ago(91)[0]}"]


def test_old_partitions_go_by_value_whatever_the_times_of_their_files(tmp_path: Path) -> None:
    """All files are as old as 1970, or in the future: only the values of partitions count."""
    days = days_ago(1, 50, 89, 91, 92, 400)
    table = delta(tmp_path / "t", *days)
    for n, file in enumerate(sorted((tmp_path / "t").rglob("*.parquet"))):
        os.utime(file, (0, 0) if n % 2 else (4e9, 4e9))
    before = sorted((tmp_path / "t").rglob("*.parquet"))
    done = run(table, tmp_path / "work")
    assert (done.state, list(done.errors)) == ("success", [])
    assert left(tmp_path / "t") == set(days[:3])
    report = done.report
    assert (report["partitions"], report["removed"], report["files"]["files"], report["left"]) == (6, 3, 3, 0)
    assert report["sample"] == sorted(f"day={day}" for day in days[3:])
    assert report["seconds"] > 0
    assert sorted((tmp_path / "t").rglob("*.parquet")) == before
    assert DeltaTable(tmp_path / "t").version() == 6


def test_twice_equals_once_and_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    table = delta(tmp_path / "t", *days_ago(1, 2, 100))
    planned = run(table, tmp_path / "dry", dry_run=True).report
    assert (planned["removed"], planned["files"]["files"]) == (1, 1)
    assert DeltaTable(tmp_path / "t").version() == 2
    assert run(table, tmp_path / "one").report["removed"] == 1
    again = run(table, tmp_path / "two")
    assert (again.state, again.report["removed"], again.report["files"]["files"]) == ("success", 0, 0)
    assert DeltaTable(tmp_path / "t").version() == 3


def test_amoro_2555_an_old_table_does_not_lose_all_its_partitions(tmp_path: Path) -> None:
    """Nothing was written for long, so all partitions are old: the breaker refuses."""
    days = days_ago(300, 301, 302)
    done = run(delta(tmp_path / "t", *days), tmp_path / "work")
    assert done.state == "failed"
    assert "100% of the partitions" in str(done.errors)
    assert left(tmp_path / "t") == set(days)


def test_held_null_and_unknown_partitions_stay(tmp_path: Path) -> None:
    days = days_ago(1, 2, 3, 100, 101)
    table = delta(tmp_path / "t", *days, None)
    report = run(table, tmp_path / "work", hold=[str(days[3])], max_fraction=1).report
    assert (report["removed"], report["held"], report["unknown"]) == (1, 1, 1)
    assert left(tmp_path / "t") == {*days[:4], None}


@pytest.mark.parametrize(("fraction", "state"), [(0.5, "failed"), (0.8, "success"), (1.0, "success")])
def test_the_breaker_refuses_more_than_its_fraction(tmp_path: Path, fraction: float, state: str) -> None:
    days = days_ago(1, 100, 101, 102)
    table = delta(tmp_path / "t", *days)
    done = run(table, tmp_path / "work", max_fraction=fraction)
    assert done.state == state
    assert left(tmp_path / "t") == set(days if state == "failed" else days[:1])
    if state == "failed":
        assert "75% of the partitions" in str(done.errors)


def test_rows_that_come_meanwhile_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer adds a file to an expired partition after the decision: it was not planned, so it is not removed."""
    days = days_ago(1, 2, 100)
    table = delta(tmp_path / "t", *days)
    commit = LogPublisher.commit

    def late(self: LogPublisher, snapshot: Any, data: bytes) -> None:
        monkeypatch.setattr(LogPublisher, "commit", commit)
        delta(tmp_path / "t", days[2])
        commit(self, snapshot, data)

    monkeypatch.setattr(LogPublisher, "commit", late)
    done = run(table, tmp_path / "work")
    assert (done.state, done.report["files"]["files"]) == ("success", 1)
    assert left(tmp_path / "t") == set(days)
    assert DeltaTable(tmp_path / "t").to_pyarrow_table().num_rows == 3


@pytest.mark.parametrize("lands", [False, True])
@pytest.mark.parametrize("error", [CommitUnknown("no answer"), Conflict("another writer")])
def test_an_unknown_commit_is_settled_by_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, lands: bool
) -> None:
    table = delta(tmp_path / "t", *days_ago(1, 2, 100))
    commit, lost = LogPublisher.commit, list[int]()

    def lose(self: LogPublisher, snapshot: Any, data: bytes) -> None:
        if not lost:
            lost.append(1)
            if lands:
                commit(self, snapshot, data)
            raise error
        commit(self, snapshot, data)

    monkeypatch.setattr(LogPublisher, "commit", lose)
    done = run(table, tmp_path / "work")
    assert lost
    assert (done.state, done.report["files"]["files"]) == ("success", 1)
    assert DeltaTable(tmp_path / "t").version() == 3
    parameters = DeltaTable(tmp_path / "t").history(1)[0]["operationParameters"]
    assert (parameters["distop.operation"], parameters["distop.fence"]) == ("t/expire-partitions/1", "completion")


@pytest.mark.parametrize("moment", ["crash", "lost answer"])
def test_a_removal_that_somebody_has_undone_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The table was restored between the commit and the repetition: the report is that of the commit."""
    days = days_ago(1, 2, 100)
    table = delta(tmp_path / "t", *days)
    commit = LogPublisher.commit

    def undone(self: LogPublisher, snapshot: Any, data: bytes) -> None:
        commit(self, snapshot, data)
        DeltaTable(tmp_path / "t").restore(snapshot.version)
        raise Killed if moment == "crash" else CommitUnknown("no answer")

    monkeypatch.setattr(LogPublisher, "commit", undone)
    context = FakeContext(tmp_path, table)
    context.operation = "t/expire-partitions/1"
    argument = ExpirePartitionsArgument.model_validate({"column": "day", "older_than": "90d"})
    planned = ExpirePartitions().partitions(table, argument, context).partitions
    summary = Summary("success", len(planned), len(planned), 0, lambda: iter(()), plan=lambda: iter(planned))
    if moment == "crash":
        with pytest.raises(Killed):
            ExpirePartitions().complete_operation(argument, table, summary, context)
    report: Any = ExpirePartitions().complete_operation(argument, table, summary, context)
    assert (report.files.files, report.left, report.version) == (1, 0, "3")
    assert left(tmp_path / "t") == set(days)
    assert DeltaTable(tmp_path / "t").version() == 4


def test_a_completion_that_is_repeated_has_the_same_report(tmp_path: Path) -> None:
    table = delta(tmp_path / "t", *days_ago(1, 2, 100))
    context = FakeContext(tmp_path, table)
    argument = ExpirePartitionsArgument.model_validate({"column": "day", "older_than": "90d"})
    planned = ExpirePartitions().partitions(table, argument, context).partitions
    summary = Summary("success", len(planned), len(planned), 0, lambda: iter(()), plan=lambda: iter(planned))
    first: Any = ExpirePartitions().complete_operation(argument, table, summary, context)
    delta(tmp_path / "t", *days_ago(3))
    again: Any = ExpirePartitions().complete_operation(argument, table, summary, context)
    assert again.model_copy(update={"seconds": first.seconds}) == first
    assert DeltaTable(tmp_path / "t").version() == 4


@pytest.mark.parametrize("others", [1, 2])
def test_partitions_that_others_have_removed_are_not_in_the_report(tmp_path: Path, others: int) -> None:
    """Two partitions are planned; before the completion, others remove one or both of them."""
    days = days_ago(1, 2, 3, 100, 101)
    table = delta(tmp_path / "t", *days)
    context = FakeContext(tmp_path, table)
    argument = ExpirePartitionsArgument.model_validate({"column": "day", "older_than": "90d"})
    planned = ExpirePartitions().partitions(table, argument, context).partitions
    size = {one.name: one.bytes for one in planned}
    for day in days[3 : 3 + others]:
        DeltaTable(tmp_path / "t").delete(f"day = '{day}'")
    version = DeltaTable(tmp_path / "t").version()
    summary = Summary("success", len(planned), len(planned), 0, lambda: iter(()), plan=lambda: iter(planned))
    report: Any = ExpirePartitions().complete_operation(argument, table, summary, context)
    own = [f"day={day}" for day in days[3 + others :]]
    removed = sum(size[name] for name in own)
    assert (report.removed, report.sample, report.left) == (len(own), own, others)
    assert (report.files.files, report.files.bytes) == (len(own), removed)
    assert report.work == WorkDone(2, sum(size.values()), 2, sum(size.values()), len(own), len(own), removed)
    assert DeltaTable(tmp_path / "t").version() == int(report.version) == version + len(own)
    assert left(tmp_path / "t") == set(days[:3])


def test_text_partitions_and_a_second_column(tmp_path: Path) -> None:
    rows = pa.table(
        {"id": [1, 2, 3, 4], "d": ["20130101", "20130102", "x", f"{TODAY:%Y%m%d}"], "k": ["a", "b/ü %", "c", "d"]}
    )
    write_deltalake(tmp_path / "t", rows, partition_by=["d", "k"])
    done = run(TableRecord("t", "delta", str(tmp_path / "t")), tmp_path / "work", column="d", format="%Y%m%d")
    assert (done.state, list(done.errors)) == ("success", [])
    assert done.report["unknown"] == 1
    assert sorted(DeltaTable(tmp_path / "t").to_pyarrow_table()["id"].to_pylist()) == [3, 4]


def test_refusals(tmp_path: Path) -> None:
    table = delta(tmp_path / "t", *days_ago(1, 100))
    context = FakeContext(tmp_path, table)

    def refused(table: TableRecord, match: str, **arg: Any) -> None:
        argument = ExpirePartitionsArgument.model_validate({"column": "day", "older_than": "90d", **arg})
        with pytest.raises(InvalidArgument, match=match):
            ExpirePartitions().partitions(table, argument, context)

    refused(table, "'id' is not a partition column", column="id")
    with pytest.raises(ValueError, match="time zone"):
        ExpirePartitionsArgument(column="day", older_than=1, zone="Mars/Base")
    append_only = delta(tmp_path / "a", *days_ago(1, 2, 100), **{"delta.appendOnly": "true"})
    refused(append_only, r"delta\.appendOnly")
    refused(TableRecord("t", "spark", "lake.db.t"), "ALTER TABLE … DROP PARTITION")
    with pytest.raises(InvalidArgument, match="by value"):
        ExpirePartitions().jobs(None, (), ["day=1"], context)


# ----------------------------------------------------------------- Iceberg

SCHEMA = Schema(
    NestedField(1, "id", LongType()), NestedField(2, "day", DateType()), NestedField(3, "ts", TimestamptzType())
)


def iceberg(path: Path, *fields: PartitionField) -> TableRecord:
    iceberg_table(path, *fields)
    return TableRecord("t", "iceberg", str(path))


def iceberg_table(path: Path, *fields: PartitionField) -> Table:
    table = Folder(path).new(SCHEMA, PartitionSpec(*fields))
    days = [date(2013, 1, 31), date(2013, 2, 1), TODAY, None]
    times = [None if day is None else utc(day.year, day.month, day.day, 23) for day in days]
    table.append(pa.table({"id": [1, 2, 3, 4], "day": days, "ts": pa.array(times, pa.timestamp("us", "UTC"))}))
    return table


def test_partitions_of_an_iceberg_table_expire_by_value(tmp_path: Path) -> None:
    table = iceberg(tmp_path / "t", PartitionField(2, 1000, IdentityTransform(), "day"))
    argument = ExpirePartitionsArgument(column="day", older_than="90d", max_fraction=1)  # type: ignore[arg-type]
    planned = ExpirePartitions().partitions(table, argument, FakeContext(tmp_path, table)).partitions
    assert [one.name for one in planned] == [DECISION, "day=2013-01-31", "day=2013-02-01"]
    found = list(partition_removal_of(table, FakeContext(tmp_path, table)).partitions("day"))
    assert {f for one in planned for f in one.files} < {f for one in found for f in one.plan.files}
    assert {one.value for one in found} == {date(2013, 1, 31), date(2013, 2, 1), TODAY, None}


def with_files(monkeypatch: pytest.MonkeyPatch, folder: Path, *partitions: list[Any]) -> None:
    """Let an Iceberg table have a file in each of these partitions: pyiceberg cannot write transforms here."""
    files = [
        (0, SimpleNamespace(partition=values, file_path=f"{folder}/data/{n}.parquet", file_size_in_bytes=1))
        for n, values in enumerate(partitions)
    ]
    monkeypatch.setattr(IcebergPartitionRemoval, "_files", lambda *_: iter(files))


@pytest.mark.parametrize("hold", ["2013-01-31", "ts_day=2013-01-31", "ts_day=2013-01-31/id=1"])
def test_a_held_day_of_a_transform_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hold: str) -> None:
    """Manifests have such a day as a number since 1970, which nobody writes into a legal hold."""
    fields = PartitionField(3, 1000, DayTransform(), "ts_day"), PartitionField(1, 1001, IdentityTransform(), "id")
    Folder(tmp_path / "t").new(SCHEMA, PartitionSpec(*fields))
    with_files(monkeypatch, tmp_path / "t", [15736, 1], [15737, 2], [None, 3])
    table = TableRecord("t", "iceberg", str(tmp_path / "t"))
    argument = ExpirePartitionsArgument(column="ts", older_than=1, max_fraction=1, hold=[hold])
    planned = ExpirePartitions().partitions(table, argument, FakeContext(tmp_path, table)).partitions
    assert [one.name for one in planned] == [DECISION, "ts_day=2013-02-01/id=2"]


def test_days_of_nanoseconds_with_a_zone_are_counted_in_utc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Folder(tmp_path / "t").new(SCHEMA, PartitionSpec(PartitionField(3, 1000, DayTransform(), "ts_day")))
    file = tmp_path / "t" / "metadata" / "v1.metadata.json"
    text = file.read_text().replace('"timestamptz"', '"timestamptz_ns"')
    file.write_text(json.dumps({**json.loads(text), "format-version": 3, "next-row-id": 0}))
    with_files(monkeypatch, tmp_path / "t", [0])
    removal = partition_removal_of(TableRecord("t", "iceberg", str(tmp_path / "t")), FakeContext(tmp_path, None))
    assert [(one.unit, one.utc) for one in removal.partitions("ts")] == [(DAY, True)]


def test_iceberg_columns_without_times_are_refused(tmp_path: Path) -> None:
    Folder(tmp_path / "t").new(SCHEMA, PartitionSpec(PartitionField(2, 1000, MonthTransform(), "m")))
    table = TableRecord("t", "iceberg", str(tmp_path / "t"))
    with pytest.raises(InvalidArgument, match=r"not partitioned by 'id'.*partition fields: m"):
        list(partition_removal_of(table, FakeContext(tmp_path, table)).partitions("id"))


def test_files_of_specs_without_the_column_stay(tmp_path: Path) -> None:
    table = Folder(tmp_path / "t").new(SCHEMA)
    rows = pa.table({"id": [1], "day": [date(2013, 1, 1)], "ts": pa.array([None], pa.timestamp("us", "UTC"))})
    table.append(rows)
    with table.update_spec() as update:
        update.add_field("day", IdentityTransform(), "day")
    table.append(rows)
    removal = partition_removal_of(TableRecord("t", "iceberg", str(tmp_path / "t")), FakeContext(tmp_path, None))
    found = list(removal.partitions("day"))
    assert [one.value for one in found] == [date(2013, 1, 1)]
    assert removal.unpartitioned == 1


@pytest.mark.parametrize("undone", [False, True])
def test_a_snapshot_of_this_operation_settles_a_removal_of_iceberg(tmp_path: Path, undone: bool) -> None:
    """Also if somebody has rolled it back since: the partitions are not removed again. No JVM is needed to see it."""
    written = iceberg_table(tmp_path / "t", PartitionField(2, 1000, IdentityTransform(), "day"))
    table = TableRecord("t", "iceberg", str(tmp_path / "t"))
    context = FakeContext(tmp_path, table)
    context.operation = "t/expire-partitions/1"
    argument = ExpirePartitionsArgument.model_validate({"column": "day", "older_than": "90d", "max_fraction": 1})
    planned = ExpirePartitions().partitions(table, argument, context).partitions
    files = {path for one in planned for path, _, _ in one.files}
    before = written.metadata.current_snapshot_id
    assert before is not None
    written.delete("day < '2020-01-01'", snapshot_properties={"distop.operation": context.operation})
    version = written.metadata.current_snapshot_id
    if undone:
        written.manage_snapshots().rollback_to_snapshot(before).commit()
    done = partition_removal_of(table, context, context.check_cancelled).remove(files, planned[1])
    assert (done.paths, done.version) == (files, str(version))
    assert len(written.scan().to_arrow()) == (4 if undone else 2)
