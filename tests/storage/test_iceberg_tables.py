"""Iceberg tables by folder in object stores: planning and verdicts from statistics, without Spark."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from distop.behavior import TableRecord, load
from distop.errors import InvalidArgument, TableBusy, TableRefused, TableUnavailable
from distop.storage import storage_options
from distop.storage.opened_stores import open_store
from distop.tables import check_table, plan_table
from tests.storage.conftest import S3
from tests.storage.iceberg_tables import table_in
from tests.support.context import FakeContext, run_operation

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.storage.faulty_http import FaultyProxy, Seen
    from tests.storage.servers import Served

pytestmark = [pytest.mark.timeout(300), pytest.mark.parametrize("served", S3, indirect=True)]


def test_a_table_is_registered_planned_and_judged_by_its_statistics(
    served: Served, proxy: FaultyProxy, tmp_path: Path
) -> None:
    store = open_store(f"{served.url}/{uuid.uuid4().hex}")
    table_in(store, served.port, {"a": [1, 2], "b": [1, None]}, {"a": [3], "b": [4]})
    table = TableRecord("t", "iceberg", store.location)
    assert check_table(table) == table
    proxy.seen.clear()
    [plan] = plan_table(table).partitions
    assert plan.source == f"{store.location}/metadata/v3.metadata.json"
    assert len(plan.files) == 2
    # The listing, the metadata file, the manifest list, and two manifests.
    assert len(proxy.seen) == 5
    argument = {"checks": [{"not_null": "a"}, {"not_null": "b"}], "statistics": "only"}
    report = run_operation(load("validate"), table, argument, lambda one: FakeContext(tmp_path, one)).report
    assert [(check["verdict"], check["violations"]) for check in report["checks"]] == [("valid", 0), ("violated", 1)]
    assert all(".parquet" not in one.target for one in proxy.seen)


def test_a_folder_without_a_table_is_refused(served: Served, proxy: FaultyProxy) -> None:
    store = open_store(f"{served.url}/{uuid.uuid4().hex}")
    store.put_new("a.parquet", b"data")
    with pytest.raises(InvalidArgument, match="has no Iceberg table"):
        check_table(TableRecord("t", "iceberg", store.location))


@pytest.mark.parametrize(
    ("answer", "error"), [("403 Forbidden", TableRefused), ("503 Slow Down", TableBusy), ("404 Not Found", None)]
)
def test_a_store_that_refuses_a_manifest_says_for_how_long(
    served: Served, proxy: FaultyProxy, answer: str, error: type[TableUnavailable] | None
) -> None:
    store = open_store(f"{served.url}/{uuid.uuid4().hex}")
    table_in(store, served.port, {"a": [1], "b": [1]})
    options = {prefix: replace(one, time_limit=0.2) for prefix, one in storage_options.configuration().items()}
    storage_options.configure(options)

    def refuse(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes | None:
        if ".avro" not in seen.target:
            return forward(seen.whole)
        return f"HTTP/1.1 {answer}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode()

    proxy.fault = refuse
    with pytest.raises(TableUnavailable, match="cannot read the snapshot .*snap-") as raised:
        plan_table(TableRecord("t", "iceberg", store.location))
    assert type(raised.value) is (error or TableUnavailable)
