"""One Spark session for all acceptance tests of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.checked import Table
from tests.support.context import FakeContext
from tests.support.lake import jar
from tests.support.localspark import local_spark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from distop.behavior import TableRecord


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Two threads, and a zone that is not UTC: what a check means must not depend on it. With Iceberg, where its jar
    can be had, and a metastore, which is made when a table of Spark's catalog is first met: a process has one Spark for
    all of its tests.
    """
    metastore = tmp_path_factory.mktemp("metastore")
    builder = (
        local_spark("local[2]", "distop tests")
        # Hundreds of tiny queries: compiling them well costs more than running them.
        .config(
            "spark.driver.extraJavaOptions", f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Dderby.system.home={metastore}"
        )
        .config("spark.sql.catalogImplementation", "hive")
        .config("spark.sql.warehouse.dir", str(metastore / "warehouse"))
        .config("spark.hadoop.javax.jdo.option.ConnectionURL", "jdbc:derby:memory:metastore;create=true")
        .config("spark.sql.session.timeZone", "Asia/Kathmandu")
    )
    iceberg = jar()
    if iceberg is not None:
        builder = builder.config("spark.jars", str(iceberg))
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


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
