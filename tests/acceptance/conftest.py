"""One Spark session for all acceptance tests of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from distop.worker.child_side.spark_session import FATAL_DEPTH, ignore_checksum_files
from distop_behaviors.reading.check_session import session_of
from tests.acceptance.checked import Table
from tests.support.context import FakeContext
from tests.support.lake import jar
from tests.support.localspark import FRUGAL, local_spark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from distop.behavior import TableRecord


ROOM = "-XX:ReservedCodeCacheSize=240m -Xmn300m"
"""Options of its JVM: of hundreds of tiny queries, making room again and again for code and for objects that are soon
forgotten costs more than running them.
"""
INTERPRETED = {
    "spark.sql.codegen.wholeStage": ("false", "true"),
    "spark.sql.codegen.factoryMode": ("NO_CODEGEN", "FALLBACK"),
    "spark.sql.adaptive.enabled": ("false", "true"),
}
"""Settings of Spark by which it compiles nothing and plans each query once, and those of production, by which it
compiles Java for each query and plans it again after each stage: a third of all processor time where each query meets a
few rows.
"""


CALL_SITES = "spark.python.sql.dataFrameDebugging.enabled"
"""Whether PySpark looks up and sends the line of Python for each part of an expression: four calls of the JVM more."""
LOOKED_UP = (
    "PythonUtils",
    "functions",
    "org.apache.spark.sql.functions",
    "org.apache.spark.sql.classic.SparkSession",
)
"""The Java classes that PySpark looks up for nearly every part of an expression."""


def remember_classes(session: SparkSession) -> None:
    """Look up often used Java classes once: py4j remembers none, and searches all jars for a name without a package."""
    from py4j.java_gateway import JavaClass, JavaMember

    class Remembered(JavaClass):
        def __getattr__(self, name: str) -> Any:
            found = super().__getattr__(name)
            if isinstance(found, JavaMember):
                self.__dict__[name] = found
            return found

    jvm: Any = session.sparkContext._jvm
    for name in LOOKED_UP:
        found = getattr(jvm, name)
        setattr(jvm, name, Remembered(found._fqn, found._gateway_client))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Two threads, and a zone that is not UTC: what a check means must not depend on it. With Iceberg, where its jar
    can be had, and a metastore, which is made when a table of Spark's catalog is first met: a process has one Spark for
    all of its tests.
    """
    metastore = tmp_path_factory.mktemp("metastore")
    builder = (
        local_spark("local[2]", "distop tests")
        .config("spark.driver.extraJavaOptions", f"{FRUGAL} {ROOM} -Dderby.system.home={metastore}")
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
    iceberg = jar()
    if iceberg is not None:
        builder = builder.config("spark.jars", str(iceberg))
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    ignore_checksum_files(session)  # as in executors
    remember_classes(session)
    yield session
    session.stop()


@pytest.fixture
def generated_code(spark: SparkSession) -> Iterator[None]:
    """Spark compiles what it runs and plans it again, as it does in production: in all sessions."""
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
    """Makes the JobContext in which a behavior runs on a table."""
    work = tmp_path / "work"
    work.mkdir()
    return lambda table: FakeContext(work, table, spark)


@pytest.fixture
def table(tmp_path: Path, context: Callable[[TableRecord], FakeContext]) -> Table:
    """An empty folder for the files of a table."""
    return Table(tmp_path / "table", context)
