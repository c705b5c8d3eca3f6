"""The files of a plan must lie in the folders that the catalog gives for the table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from distop.behavior import Behavior
from distop.errors import InvalidArgument, TableUnavailable
from distop.protocol.plan import PartitionPlan, Pinned
from distop.protocol.records import TableRecord
from distop.tables import plan_table
from distop.tables.spark import spark_catalog
from distop.tables.spark.spark_catalog import CatalogPartition, Described
from distop.worker.child_side.call_handlers import Call
from distop.worker.child_side.job_context import ChildContext, JobScope
from distop.worker.child_side.table_folders import TableFolders
from tests.support.icebergrest import configure, sql_catalog
from tests.unit.support.running import Child, NoArg

if TYPE_CHECKING:
    from pathlib import Path

    from distop.behavior import JobContext

SCHEMA = Schema(NestedField(1, "id", LongType(), required=False))
ROWS = pa.table({"id": [1, 2, 3]})


class _Child:
    """The attributes of a child that :class:`ChildContext` uses here."""

    executor, shared_dir, space, started = "e", "", "", True
    outbox: Any = None

    def __init__(self) -> None:
        self.table_folders = TableFolders()
        self.spark = self

    def session(self, *_: str) -> _Child:
        return self


def opened(partition: PartitionPlan, table: TableRecord, child: Any = None) -> PartitionPlan:
    """Open the partition as a job does: of its own table, and beside that of another table."""
    child = child or _Child()
    found = ChildContext(child, JobScope("t/noop/1", table, partition=partition)).with_files(partition)
    beside = Pinned(table, "v", partition.files, source=partition.source)
    other = PartitionPlan(0, "p", beside=(beside,))
    ChildContext(child, JobScope("u/noop/1", None, partition=other)).with_files(other)
    return found


def test_hole_2_a_forged_plan_with_metadata_of_another_table_of_a_catalog_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sql_catalog(tmp_path / "lake") as catalog:
        catalog.create_namespace("sales")
        for name in ("sales.orders", "sales.people"):
            catalog.create_table(name, SCHEMA).append(ROWS)
        configure(monkeypatch, type="sql", uri=f"sqlite:///{tmp_path}/lake/catalog.db")
        orders, people = (TableRecord("t", "iceberg", f"sales.{n}", {"catalog": "prod"}) for n in ("orders", "people"))
        (mine,), (theirs,) = plan_table(orders).partitions, plan_table(people).partitions
        assert opened(mine, orders) is mine
        catalog.load_table("sales.orders").append(ROWS)
        assert opened(mine, orders) is mine, "a plan of an older snapshot"
        with pytest.raises(InvalidArgument, match=r"people/metadata/.*' lies outside of its table '.*/orders'"):
            opened(theirs, orders)


def test_hole_2_a_forged_plan_with_files_of_another_table_of_spark_s_catalog_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bool] = []
    gone: list[Exception] = [TableUnavailable("it does not answer")]
    partitions = [CatalogPartition({"k": "1"}, "/w/t/k=1"), CatalogPartition({"k": "2"}, "/elsewhere/k=2")]

    def describe(session: Any, name: str, *, partitions: bool = True) -> Described:
        if gone:
            raise gone.pop()
        asked.append(partitions)
        return Described("parquet", "/w/t", (), ("k",), ours if partitions else None)

    ours = partitions
    monkeypatch.setattr(spark_catalog, "describe", describe)
    table, child = TableRecord("t", "spark", "db.t"), _Child()

    def of(path: str) -> PartitionPlan:
        return PartitionPlan(0, "p", files=((path, 1, 1),))

    with pytest.raises(TableUnavailable):
        opened(of("/w/t/k=1/a.parquet"), table, child)
    for n in range(3):
        opened(of(f"/w/t/k=1/{n}.parquet"), table, child)
    assert asked == [False, False], "once for each of the two operations"
    for n in range(3):
        opened(of(f"/elsewhere/k=2/{n}.parquet"), table, child)
    assert asked == [False, False, True, True]
    for path in ("/w/u/a.parquet", "/elsewhere/k=3/a.parquet", "/w/t2/a.parquet"):
        with pytest.raises(InvalidArgument, match="lies outside of its table '/w/t'"):
            opened(of(path), table, child)


def test_hole_2_a_folder_that_becomes_a_link_between_two_jobs_is_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, elsewhere, other = (tmp_path / name for name in ("t", "elsewhere", "other"))
    for folder in (place, elsewhere / "d", other):
        folder.mkdir(parents=True)
        (folder / "a.parquet").touch()
    ours = [CatalogPartition({"k": "1"}, str(elsewhere))]

    def describe(*_: Any, partitions: bool = True) -> Described:
        return Described("parquet", str(place), (), ("k",), ours if partitions else None)

    monkeypatch.setattr(spark_catalog, "describe", describe)
    table, child = TableRecord("t", "spark", "db.t"), _Child()
    plan = PartitionPlan(0, "p", files=((str(elsewhere / "d" / "a.parquet"), 1, 1),))

    def job(number: int) -> None:
        made = ChildContext(child, JobScope("t/noop/1", table, partition=plan, opened=7, run=number))  # type: ignore[arg-type]
        made.with_files(plan)

    job(1)
    (elsewhere / "d").rename(elsewhere / "was")
    (elsewhere / "d").symlink_to(other)
    with pytest.raises(InvalidArgument, match="lies outside of its table"):
        job(2)


def test_hole_2_the_folder_of_a_table_is_read_again_for_a_reused_operation_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The table has moved in the catalog since the earlier operation with this number."""
    places = ["/w/former"]
    monkeypatch.setattr(spark_catalog, "describe", lambda *_, **__: Described("parquet", places[0]))
    table, child = TableRecord("t", "spark", "db.t"), _Child()
    plan = PartitionPlan(0, "p", files=(("/w/former/a.parquet", 1, 1),))

    def context(**fields: Any) -> ChildContext:
        call = fields.pop("call", "")
        made = ChildContext(child, JobScope("t/noop/1", table, partition=plan, **fields))  # type: ignore[arg-type]
        made.call = call
        return made

    context(opened=7, run=1).with_files(plan)
    context(call="complete2").with_files(plan)
    places[0] = "/w/t"
    context(opened=7, run=3).with_files(plan)  # a later job of the same operation
    for other in (context(opened=9, run=4), context(call="complete5"), context(run=6)):
        with pytest.raises(InvalidArgument, match="lies outside of its table '/w/t'"):
            other.with_files(plan)


class _Leaving(Behavior):
    """Has no cleanup."""

    type_name = "leaving"
    Arg = NoArg

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        raise NotImplementedError


class _Cleaning(_Leaving):
    """Records the partitions that it cleans up."""

    type_name = "cleaning"

    def __init__(self) -> None:
        self.cleaned: list[str] = []

    def cancel_job_and_cleanup(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> None:
        self.cleaned.append(partition.name)


def test_hole_2_the_cleanup_of_a_job_checks_its_files_as_the_job_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def describe(*_: Any, partitions: bool = True) -> Described:
        asked.append(partitions)
        return Described("parquet", "/w/t", partitions=() if partitions else None)

    monkeypatch.setattr(spark_catalog, "describe", describe)
    behavior, record = _Cleaning(), TableRecord("t", "spark", "db.t")
    child = Child(behavior, tmp_path)
    monkeypatch.setattr(child.env.spark, "session", lambda *_: None)
    plans = [PartitionPlan(n, f, files=((f"/w/{f}/a.parquet", 1, 1),)) for n, f in enumerate(("t", "u", "t/k=1"))]
    items = [(plan.to_json(), 1, 5, None) for plan in plans]
    message = {"t": "cleanup", "call": 2, "op": "t/cleaning/1", "type": "cleaning", "arg": {}, "incarnation": "i"}
    Call(child.env, {**message, "table": record.to_json(), "items": items}, child.deaths.append).run()
    assert behavior.cleaned == ["t", "t/k=1"]
    assert asked == [False, True], "once for all of them"
    (failed,) = child.sent.messages
    assert "/w/u/a.parquet' lies outside of its table '/w/t'" in failed["message"]


def test_no_catalog_is_asked_for_a_type_without_a_cleanup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_catalog, "describe", lambda *_, **__: pytest.fail("the catalog was asked"))
    child = Child(_Leaving(), tmp_path)
    record = TableRecord("t", "spark", "db.t")
    items = [(PartitionPlan(0, "t", files=(("/w/t/a.parquet", 1, 1),)).to_json(), 1, 5, None)]
    message = {"t": "cleanup", "call": 2, "op": "t/leaving/1", "type": "leaving", "arg": {}, "incarnation": "i"}
    Call(child.env, {**message, "table": record.to_json(), "items": items}, child.deaths.append).run()
    (ended,) = child.sent.messages
    assert ended["t"] == "result"
