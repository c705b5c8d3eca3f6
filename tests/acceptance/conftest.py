"""Fixtures for acceptance tests, which share one Spark session in each process."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import pytest

from distop.storage import storage_options
from distop.storage.opened_stores import open_store
from distop.worker.child_side.spark_session import FATAL_DEPTH, ignore_checksum_files
from distop_behaviors.reading.check_session import session_of
from tests.acceptance.checked import Table
from tests.storage import servers
from tests.storage.faulty_http import FaultyProxy
from tests.support import s3_spark
from tests.support.context import FakeContext
from tests.support.delta import jars
from tests.support.lake import jar
from tests.support.localspark import FRUGAL, local_spark
from tests.support.needs import need

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from distop.behavior import TableRecord
    from distop.storage.object_store import ObjectStore
    from tests.storage.servers import Served


JVM_OPTIONS = "-XX:ReservedCodeCacheSize=240m -Xmn300m -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
"""Options of the session's JVM: with hundreds of tiny queries, small code caches and heaps cost more time than queries,
and so does the verification of classes.
"""
INTERPRETED = {
    "spark.sql.codegen.wholeStage": ("false", "true"),
    "spark.sql.codegen.factoryMode": ("NO_CODEGEN", "FALLBACK"),
    "spark.sql.adaptive.enabled": ("false", "true"),
}
"""Setting → its value for tests, which avoids code generation and adaptive planning, and its value in production.

Code generation and adaptive planning take a third of all processor time in queries of few rows.
"""


CALL_SITES = "spark.python.sql.dataFrameDebugging.enabled"
"""Whether PySpark sends the Python line for each part of an expression, which takes four more calls of the JVM."""
OFTEN_USED_CLASSES = (
    "PythonUtils",
    "functions",
    "org.apache.spark.sql.functions",
    "org.apache.spark.sql.classic.SparkSession",
)
"""The Java classes that PySpark looks up for most parts of an expression."""


def cache_java_classes(session: SparkSession) -> None:
    """Cache often used Java classes: py4j caches none, and searches all jars for names without a package."""
    from py4j.java_gateway import JavaClass, JavaMember

    class CachedJavaClass(JavaClass):
        def __getattr__(self, name: str) -> Any:
            found = super().__getattr__(name)
            if isinstance(found, JavaMember):
                self.__dict__[name] = found
            return found

    jvm: Any = session.sparkContext._jvm
    for name in OFTEN_USED_CLASSES:
        found = getattr(jvm, name)
        setattr(jvm, name, CachedJavaClass(found._fqn, found._gateway_client))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session with two threads, Iceberg, Delta and S3 (if their jars are available) and a metastore, for all tests.

    Its time zone is not UTC, because the meaning of a check must not depend on it.
    """
    metastore = tmp_path_factory.mktemp("metastore")
    builder = (
        local_spark("local[2]", "distop tests")
        .config("spark.driver.extraJavaOptions", f"{FRUGAL} {JVM_OPTIONS} -Dderby.system.home={metastore}")
        .config("spark.sql.shuffle.partitions", "4")
        .config(FATAL_DEPTH, "0")  # as in executors
        .config(CALL_SITES, "false")
        .config("spark.sql.catalogImplementation", "hive")
        .config("spark.sql.warehouse.dir", str(metastore / "warehouse"))
        .config("spark.hadoop.javax.jdo.option.ConnectionURL", "jdbc:derby:memory:metastore;create=true")
        .config("spark.sql.session.timeZone", "Asia/Kathmandu")
    )
    for setting, (value, _) in INTERPRETED.items():
        builder = builder.config(setting, value)
    found = [file for file in (jar(), *(jars() or ()), *(s3_spark.jars() or ())) if file is not None]
    if found:
        builder = builder.config("spark.jars", ",".join(map(str, found)))
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    ignore_checksum_files(session)  # as in executors
    cache_java_classes(session)
    yield session
    session.stop()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Served]:
    """A server of S3, the same for all tests: Hadoop caches its connection to a bucket."""
    with servers.moto() as found:
        yield found


@pytest.fixture(scope="session")
def s3_proxy(s3_server: Served) -> Iterator[FaultyProxy]:
    """A proxy in front of the server of S3, through which distop and Spark reach it."""
    with FaultyProxy(s3_server.port) as found:
        yield found


@pytest.fixture
def s3_place(s3_server: Served, s3_proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """A new place in the server of S3, for which distop is configured, but not Spark."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    storage_options.configure(s3_server.options(s3_proxy.port))
    s3_proxy.fault = lambda seen, forward: forward(seen.whole)
    s3_proxy.seen.clear()
    yield open_store(f"{s3_server.url}/{uuid.uuid4().hex}")
    storage_options.configure({})


@pytest.fixture
def s3_store(s3_place: ObjectStore, spark: SparkSession) -> Iterator[ObjectStore]:
    """A new place in the server of S3, for which distop and Spark are configured."""
    need(s3_spark.jars(), s3_spark.MAVEN)
    with s3_spark.configured(spark, s3_place.location, servers.KEY, servers.SECRET):
        yield s3_place


@pytest.fixture
def generated_code(spark: SparkSession) -> Iterator[None]:
    """Use code generation and adaptive planning in all sessions, as in production."""
    sessions = (spark, session_of(spark), session_of(spark, pushdown=False))
    for session in sessions:
        for setting, (_, value) in INTERPRETED.items():
            session.conf.set(setting, value)
    yield
    for session in sessions:
        for setting, (value, _) in INTERPRETED.items():
            session.conf.set(setting, value)


@pytest.fixture
def context(spark: SparkSession, tmp_path: Path) -> Callable[[TableRecord], FakeContext]:
    """Creates the JobContext of a behavior for a table."""
    work = tmp_path / "work"
    work.mkdir()
    return lambda table: FakeContext(work, table, spark)


@pytest.fixture
def table(tmp_path: Path, context: Callable[[TableRecord], FakeContext]) -> Table:
    """An empty folder for the files of a table."""
    return Table(tmp_path / "table", context)
