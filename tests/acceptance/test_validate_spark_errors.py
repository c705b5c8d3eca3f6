"""Files that pyarrow can read and Spark cannot: a common cause gives no verdict."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.behavior import TableRecord, TableUnavailable, select
from distop.tables.reading import store_refusals
from distop_behaviors.validate import Validate
from tests.support.refusing_store import RefusingStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.rotating]

FILES = 365
HADOOP = "org.apache.hadoop"


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Iterator[TableRecord]:
    """A table of 365 partitions in a store that pyarrow may read."""
    data = io.BytesIO()
    pq.write_table(pa.table({"a": [1, 2]}), data)
    files: dict[str, bytes | None] = {f"whole/day={n}/a.parquet": data.getvalue() for n in range(FILES)}
    with RefusingStore(files=files) as store:
        store.serve(monkeypatch)
        yield TableRecord("t", "parquet", "s3://bucket/whole")


@pytest.mark.parametrize(
    "checks", [[{"not_null": "a"}, {"check": "a > 0"}], [{"unique": "a"}]], ids=["of rows", "of keys"]
)
@pytest.mark.parametrize(
    ("implementation", "cause"),
    [(None, store_refusals.NO_FILE_SYSTEM), (f"{HADOOP}.hdfs.web.WebHdfsFileSystem", store_refusals.UNKNOWN_HOST)],
    ids=["no file system", "an unknown host"],
)
def test_a_store_that_spark_cannot_read_gives_no_verdict(
    spark: SparkSession,
    context: Any,
    refused: TableRecord,
    implementation: str | None,
    cause: str,
    checks: list[dict[str, str]],
) -> None:
    configuration: Any = spark.sparkContext._jsc.hadoopConfiguration()
    configuration.set("fs.s3.impl.disable.cache", "true")
    if implementation is not None:
        configuration.set("fs.s3.impl", implementation)
    try:
        ctx = context(refused)
        arg = Validate.Arg.model_validate({"checks": checks, "statistics": "never"})
        planned = Validate().partitions(refused, arg, ctx)
        assert len(planned.partitions) == FILES
        plans = list(select(Validate().jobs(arg, planned.partitions, None, ctx), None))
        plans = [plan for plan in plans if (plan.name == "@table") == ("unique" in checks[0])]
        with pytest.raises(TableUnavailable, match=f"Spark on this executor cannot read any of {FILES} files: {cause}"):
            list(Validate().run_batch(arg, plans, ctx))
    finally:
        configuration.unset("fs.s3.impl")
        configuration.unset("fs.s3.impl.disable.cache")


class JavaError(Exception):
    """A Java exception as py4j raises it."""

    def __init__(self, thrown: Any) -> None:
        super().__init__(str(thrown))
        self.java_exception = thrown


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("java.nio.file.AccessDeniedException", store_refusals.DENIED),
        (f"{HADOOP}.security.AccessControlException", store_refusals.DENIED),
        (f"{HADOOP}.security.authentication.client.AuthenticationException", store_refusals.CREDENTIALS),
        ("java.net.ConnectException", store_refusals.NOT_CONNECTED),
        (f"{HADOOP}.net.ConnectTimeoutException", store_refusals.NO_ANSWER),
        ("java.net.UnknownHostException", store_refusals.UNKNOWN_HOST),
        ("java.io.FileNotFoundException", None),
        ("java.io.EOFException", None),
    ],
)
def test_a_cause_is_found_by_the_class_of_javas_exception(spark: SparkSession, name: str, cause: str | None) -> None:
    jvm: Any = spark.sparkContext._jvm
    kind = jvm
    for part in name.split("."):
        kind = getattr(kind, part)
    thrown = kind("s3a://bucket/a.parquet")
    assert store_refusals.cause_of_spark_error(JavaError(thrown)) == cause
    assert store_refusals.cause_of_spark_error(JavaError(jvm.java.io.IOException("cannot be read", thrown))) == cause
    quoted = jvm.java.io.IOException(f"the value '{name}: no' cannot be cast")
    assert store_refusals.cause_of_spark_error(JavaError(quoted)) is None
