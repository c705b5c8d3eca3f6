"""Writes an archive of the classes that Spark loads (class data sharing of the JVM), which halves its start time.

    python scripts/spark_archive.py ARCHIVE

A JVM with ``-XX:SharedArchiveFile`` maps the archive instead of reading and verifying ten thousand classes; if the
archive does not fit, the JVM ignores it. The tests start Spark some sixty times.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession


def use(folder: Path, jvm: str) -> None:
    """Run typical work of jobs in a Spark session, and wait until its JVM has written the archive and exited."""
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.extraJavaOptions", jvm)
        .getOrCreate()
    )
    table = str(folder / "table")
    spark.range(1000).selectExpr("id % 7 AS k", "CAST(id AS STRING) AS v").write.partitionBy("k").parquet(table)
    spark.read.parquet(table).groupBy("k").agg({"v": "max"}).filter("k > 3").collect()
    gateway = spark.sparkContext._gateway
    spark.stop()
    gateway.proc.stdin.close()
    gateway.proc.wait(120)


def main() -> None:
    archive = Path(sys.argv[1])
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        made = Path(folder) / archive.name
        use(Path(folder), f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable -XX:ArchiveClassesAtExit={made}")
        made.replace(archive)


if __name__ == "__main__":
    main()
