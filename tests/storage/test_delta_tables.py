"""Delta tables in object stores: planning and verdicts from the log, without Spark."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from distop.behavior import TableRecord, load
from distop.errors import InvalidArgument
from distop.storage.opened_stores import open_store
from distop.tables import check_table, plan_table
from tests.storage.conftest import S3
from tests.storage.delta_tables import append
from tests.storage.iceberg_tables import table_in
from tests.support.context import FakeContext, run_operation

if TYPE_CHECKING:
    from pathlib import Path

    from tests.storage.faulty_http import FaultyProxy
    from tests.storage.servers import Served

pytestmark = [pytest.mark.timeout(300), pytest.mark.parametrize("served", S3, indirect=True)]

CHECKS = ({"not_null": "a"}, {"not_null": "b"})


@pytest.fixture
def table(served: Served) -> TableRecord:
    """The record of a table with two partitions in a new folder of the bucket."""
    location = f"{served.url}/{uuid.uuid4().hex}"
    for rows in ({"a": [1, 2], "b": [1, None], "k": [0, 0]}, {"a": [3], "b": [4], "k": [1]}):
        append(location, served.port, pa.table(rows), partition_by=["k"])
    return TableRecord("t", "delta", location)


def test_a_table_is_registered_planned_and_judged_by_its_log(
    served: Served, table: TableRecord, proxy: FaultyProxy, tmp_path: Path
) -> None:
    assert check_table(table) == table
    plans = plan_table(table).partitions
    assert [(plan.name, len(plan.files)) for plan in plans] == [("k=0", 1), ("k=1", 1)]
    assert {plan.source for plan in plans} == {f"{table.location}/_delta_log/{1:020}.json"}
    argument = {"checks": list(CHECKS), "statistics": "only"}
    report = run_operation(load("validate"), table, argument, lambda one: FakeContext(tmp_path, one)).report
    assert [(check["verdict"], check["violations"]) for check in report["checks"]] == [("valid", 0), ("violated", 1)]
    assert proxy.seen
    assert all(".parquet" not in one.target for one in proxy.seen)


def test_files_since_a_certificate_are_validated(
    served: Served, table: TableRecord, proxy: FaultyProxy, tmp_path: Path
) -> None:
    def report(**argument: object) -> dict[str, object]:
        given = {"checks": [CHECKS[0]], "statistics": "only", **argument}
        return dict(run_operation(load("validate"), table, given, lambda one: FakeContext(tmp_path, one)).report)

    first = report()
    append(table.location, served.port, pa.table({"a": [4, 5], "b": [1, 2], "k": [1, 1]}), partition_by=["k"])
    again = report(since=first["certificate"])
    assert (first["rows"], again["rows"]) == (3, 2)


def test_a_folder_without_a_table_is_refused(served: Served, proxy: FaultyProxy) -> None:
    store = open_store(f"{served.url}/{uuid.uuid4().hex}")
    store.put_new("a.parquet", b"data")
    with pytest.raises(InvalidArgument, match="has no Delta table"):
        check_table(TableRecord("t", "delta", store.location))
    other = open_store(f"{served.url}/{uuid.uuid4().hex}")
    table_in(other, served.port, {"a": [1], "b": [1]})
    with pytest.raises(InvalidArgument, match="it is an Iceberg table, so register it with --format iceberg"):
        check_table(TableRecord("t", "delta", other.location))


def test_a_table_is_refused_as_parquet(served: Served, table: TableRecord) -> None:
    for location in (table.location, f"{table.location}/k=0"):
        with pytest.raises(InvalidArgument, match="a Delta table: as Parquet files, its removed rows would count"):
            check_table(TableRecord("t", "parquet", location))
