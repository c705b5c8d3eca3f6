"""Delta tables for tests with Spark: Delta's jars, and a session that writes by Delta's SQL."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from distop.behavior import TableRecord
from distop.protocol.frozen import frozen
from scripts import spark_jars

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

MAVEN = (
    f"Delta's jars: run scripts/delta-jars with access to Maven Central, for {' and '.join(map(str, spark_jars.DELTA))}"
)
SETTINGS = {
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.sql.session.timeZone": "Asia/Kathmandu",
    "spark.sql.shuffle.partitions": "2",
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.databricks.delta.requiredSparkConfsCheck.enabled": "false",
}


@functools.cache
def jars() -> list[Path] | None:
    """Delta's jars from the user's cache; None if one is not there and cannot be downloaded. Raises Unverified."""
    found = [spark_jars.find(jar) for jar in spark_jars.DELTA]
    return None if None in found else [jar for jar in found if jar is not None]


def writing_session(spark: SparkSession) -> SparkSession:
    """A session in the context of ``spark`` with Delta's extension and catalog, which executors do not need."""
    from pyspark.sql import SparkSession as Session

    jvm: Any = spark._jvm
    extensions = jvm.org.apache.spark.sql.SparkSessionExtensions()
    jvm.io.delta.sql.DeltaSparkSessionExtension().apply(extensions)
    scala_map = jvm.org.apache.spark.api.python.PythonUtils.toScalaMap
    options, none = scala_map(SETTINGS), jvm.scala.Option.empty()
    shared = jvm.scala.Some(spark._jsparkSession.sharedState())
    made = jvm.org.apache.spark.sql.classic.SparkSession(
        spark._jsparkSession.sparkContext(), shared, none, extensions, options, scala_map({})
    )
    return Session(spark.sparkContext, made)


@frozen
class DeltaLake:
    """Delta tables in folders below ``root``."""

    session: Any
    root: Path

    def sql(self, statement: str, name: str) -> None:
        """Run a statement of Delta, in which ``{t}`` is the table."""
        from distop.runtime.java import active

        with active(self.session):
            self.session.sql(statement.format(t=f"delta.`{self.root / name}`")).collect()

    def create(self, name: str, columns: str, rest: str = "", **properties: str) -> TableRecord:
        """Create a table. ``rest``: such as ``partitioned by (k)``."""
        given = ", ".join(f"'{key}' = '{value}'" for key, value in properties.items())
        tail = f" tblproperties ({given})" if given else ""
        self.sql(f"create table {{t}} ({columns}) using delta {rest}{tail}", name)
        return TableRecord("t", "delta", str(self.root / name))

    def read(self, name: str) -> DataFrame:
        """The rows, as Delta reads them by itself."""
        from distop.runtime.java import active

        with active(self.session):
            frame: DataFrame = self.session.read.format("delta").load(str(self.root / name))
            return frame

    def version(self, name: str) -> int:
        """The newest version, from the names of commits."""
        return max(
            int(path.stem) for path in (self.root / name / "_delta_log").glob("[0-9]*.json") if path.stem.isdigit()
        )
