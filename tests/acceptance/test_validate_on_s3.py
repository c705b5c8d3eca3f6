"""validate with Spark on tables in an object store, with distop's one configuration."""

from __future__ import annotations

import io
import urllib.error
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.behavior import TableRecord
from distop.errors import TableRefused
from distop.protocol.executor_nodes import WAITS_FOR_STORE
from distop.storage import storage_options
from distop.storage.opened_stores import open_store
from distop.tables import plan_table
from distop_behaviors.index import lookup
from distop_behaviors.validate import Validate
from distop_behaviors.validate.partition_result import Answer
from tests.storage import servers
from tests.storage.delta_tables import upload
from tests.storage.iceberg_tables import table_in
from tests.support import delta, s3_spark
from tests.support.context import run_operation
from tests.support.index_runs import Indexes
from tests.support.lake import MAVEN, jar
from tests.support.needs import need
from tests.unit.support.running import Child

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from distop.storage.object_store import ObjectStore
    from tests.storage.faulty_http import FaultyProxy, Seen
    from tests.storage.servers import Served
    from tests.support.context import FakeContext, Ran

pytestmark = pytest.mark.rotating

CHECKS = ({"not_null": "a"}, {"check": "a < 100"}, {"range": {"column": "b", "max": 1.0}})


@pytest.fixture
def flaky(
    s3_store: ObjectStore,
    s3_server: Served,
    s3_proxy: FaultyProxy,
    spark: SparkSession,
    short_store_waits: None,
) -> Iterator[ObjectStore]:
    """A place in a bucket whose failed requests Spark's connector does not repeat, as if its own waits had passed."""
    bucket = "flaky"
    with suppress(urllib.error.HTTPError):  # it exists
        servers.request(f"http://127.0.0.1:{s3_server.port}/{bucket}", "PUT")
    storage_options.configure({f"s3://{bucket}": next(iter(s3_server.options(s3_proxy.port).values()))})
    once = {"attempts.maximum": "1", "retry.limit": "0", "retry.throttle.limit": "0"}
    with s3_spark.configured(spark, f"s3://{bucket}", servers.KEY, servers.SECRET, once):
        yield open_store(f"s3://{bucket}/{uuid.uuid4().hex}")


def parquet(**columns: Any) -> bytes:
    data = io.BytesIO()
    pq.write_table(pa.table(columns), data)
    return data.getvalue()


def validate(store: ObjectStore, context: Callable[[TableRecord], FakeContext], **arg: Any) -> Ran:
    table = TableRecord("t", "parquet", store.location)
    return run_operation(Validate(), table, {"checks": list(CHECKS), **arg}, context)


def test_a_scan_of_objects_finds_the_rows_that_statistics_do_not_decide(
    s3_store: ObjectStore, context: Callable[[TableRecord], FakeContext]
) -> None:
    s3_store.put_new("day=1/a.parquet", parquet(a=[1, 2, None], b=[0.5, 1.0, 2.0]))
    s3_store.put_new("day=a%3A b/c d+é.parquet", parquet(a=[1, 200], b=[0.0, 0.0]))
    for statistics in ("auto", "never"):
        report = validate(s3_store, context, statistics=statistics, sample=1).report
        assert [(c["verdict"], c["violations"]) for c in report["checks"]] == [("violated", 1)] * 3
        assert [(c["samples"][0]["file"], c["samples"][0]["row_index"]) for c in report["checks"]] == [
            (f"{s3_store.location}/day=1/a.parquet", 2),
            (f"{s3_store.location}/day=a%3A b/c d+é.parquet", 1),
            (f"{s3_store.location}/day=1/a.parquet", 2),
        ]


def test_an_object_that_is_replaced_while_spark_reads_it_gets_no_verdict(
    s3_store: ObjectStore, context: Callable[[TableRecord], FakeContext]
) -> None:
    """Its size is the same, and so is its time in seconds."""
    old, new = parquet(a=[1, 2], b=[0.5, 0.5]), parquet(a=[1, 200], b=[0.5, 0.5])
    assert len(old) == len(new)
    s3_store.put_new("day=1/a.parquet", old)
    s3_store.put_new("day=2/a.parquet", old)
    table = TableRecord("t", "parquet", s3_store.location)
    plans = plan_table(table).partitions
    s3_store.replace_if("day=2/a.parquet", new, s3_store.head("day=2/a.parquet").version)
    arg = {"checks": list(CHECKS), "statistics": "never"}
    ran = run_operation(Validate(), table, arg, context, partitions=plans)
    text = f"the file {s3_store.location}/day=2/a.parquet has changed since the operation was planned"
    verdicts = {name: row.result["verdict"] for name, row in ran.by_name.items()}
    assert verdicts == {"day=1": "valid", "day=2": "error"}
    assert text in str(ran.report)


@pytest.mark.parametrize("files", [1, 4])
@pytest.mark.parametrize("fault", ["closed", "500 Internal Server Error", "503 Slow Down"])
def test_a_store_that_fails_for_a_file_while_spark_reads_it_is_waited_for(
    flaky: ObjectStore, s3_proxy: FaultyProxy, spark: SparkSession, tmp_path: Path, fault: str, files: int
) -> None:
    """The file had the verdict error, although the store said nothing about it. Throttling fails for all files."""
    failing = "day%3D" if fault.startswith("503") else "day%3D0"
    for n in range(files):
        flaky.put_new(f"day={n}/a.parquet", parquet(a=[1, None], b=[0.5, 0.5]))
    table = TableRecord("t", "parquet", flaky.location)
    argument = {"checks": list(CHECKS), "statistics": "never", "sample": 0}
    child = Child(Validate(), tmp_path, argument, op="t/validate/1", table=table, spark=spark)

    def waits() -> bool:
        return any(one["t"] == "status" and one["text"].startswith(WAITS_FOR_STORE) for one in child.sent.messages)

    def fail(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes | None:
        if b"aws-sdk-java" not in seen.whole or failing not in seen.target or waits():
            return forward(seen.whole)
        if fault == "closed":
            return None
        return f"HTTP/1.1 {fault}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode()

    plans = plan_table(table).partitions
    s3_proxy.fault = fail
    ends = child.ends(plans)
    assert waits()
    assert {end.kind for end in ends.values()} == {"verdict"}
    for end in ends.values():
        checks = Answer.model_validate(end.result).root.checks
        assert [(c.verdict, c.violations, c.error) for c in checks] == [
            ("violated", 1, None),
            ("valid", 0, None),
            ("valid", 0, None),
        ]


def test_an_iceberg_table_is_scanned(
    s3_store: ObjectStore, s3_server: Served, context: Callable[[TableRecord], FakeContext]
) -> None:
    need(jar(), MAVEN)
    table_in(s3_store, s3_server.port, {"a": [1, 2, 3], "b": [1, None, 3]}, {"a": [4, None], "b": [5, 6]})
    table = TableRecord("t", "iceberg", s3_store.location)
    checks = [{"not_null": "a"}, {"check": "b < 6"}]
    for statistics in ("auto", "never"):
        report = run_operation(Validate(), table, {"checks": checks, "statistics": statistics}, context).report
        assert [(c["verdict"], c["violations"]) for c in report["checks"]] == [("violated", 1)] * 2


@pytest.mark.parametrize("mode", ["none", "name"])
def test_a_delta_table_is_scanned_and_looked_up(
    mode: str, s3_store: ObjectStore, spark: SparkSession, context: Callable[[TableRecord], FakeContext], tmp_path: Path
) -> None:
    """With deletion vectors, and partition values that are escaped in paths and in the log."""
    need(delta.jars(), delta.MAVEN)
    lake = delta.DeltaLake(delta.writing_session(spark), tmp_path)
    properties = {"delta.enableDeletionVectors": "true", "delta.columnMapping.mode": mode}
    lake.create("t", "a bigint, b bigint, k string", "partitioned by (k)", **properties)
    lake.sql(
        "insert into {t} values (1, 1, 'd+é %:'), (2, null, 'd+é %:'), (3, 7, 'e'), (4, 5, 'e'), (null, 2, 'e')", "t"
    )
    lake.sql("delete from {t} where a = 3", "t")
    upload(tmp_path / "t", s3_store)
    table = TableRecord("t", "delta", s3_store.location)

    def report(**arg: Any) -> Any:
        given = {"checks": [{"not_null": "a"}, {"check": "b < 6"}], **arg}
        return run_operation(Validate(), table, given, context).report

    for statistics in ("auto", "never"):
        found = report(statistics=statistics)
        assert [(c["verdict"], c["violations"]) for c in found["checks"]] == [("violated", 1), ("valid", 0)]
        assert found["rows"] == 4
    certificate = report(checks=[{"check": "b < 6"}])["certificate"]
    lake.sql("insert into {t} values (5, 9, 'e'), (6, 8, 'f')", "t")
    upload(tmp_path / "t", s3_store)
    again = report(checks=[{"check": "b < 6"}], since=certificate)
    assert (again["rows"], again["checks"][0]["violations"]) == (2, 2)

    indexes = Indexes(tmp_path / "t", tmp_path / "shared")
    indexes.record = table
    assert indexes.build(columns=["a"]).files == 4
    assert sorted(lookup(spark, table, "i", [1, 3, 4, 6]).select("a", "k").collect()) == [
        (1, "d+é %:"),
        (4, "e"),
        (6, "f"),
    ]


def test_the_one_cause_is_reported_if_spark_may_not_read_the_objects(
    s3_store: ObjectStore, s3_proxy: FaultyProxy, context: Callable[[TableRecord], FakeContext]
) -> None:
    """Its batch was divided file by file, which took minutes."""
    for n in range(40):
        s3_store.put_new(f"day={n}/a.parquet", parquet(a=[1], b=[0.5]))
    table = TableRecord("t", "parquet", s3_store.location)
    plans = plan_table(table).partitions
    argument = {"checks": [{"check": "a < 100"}], "statistics": "never"}
    run_operation(Validate(), table, argument, context, partitions=plans[:1])
    denied = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>no</Message></Error>"
    head = f"HTTP/1.1 403 Forbidden\r\ncontent-length: {len(denied)}\r\nconnection: close\r\n\r\n".encode()

    def only_footers(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes:
        of_spark = b"hadoop" in seen.whole.lower() or b"aws-sdk-java" in seen.whole.lower()
        return head + denied if of_spark else forward(seen.whole)

    s3_proxy.fault = only_footers
    s3_proxy.seen.clear()
    with pytest.raises(TableRefused, match=r"Spark on this executor cannot read any of 40 files: access is denied"):
        run_operation(Validate(), table, argument, context, partitions=plans)
    assert sum(b"aws-sdk-java" in seen.whole for seen in s3_proxy.seen) < 80
