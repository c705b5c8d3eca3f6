"""Has Spark start in half the time: writes an archive of the classes that it loads (class data sharing of the JVM).

    python scripts/spark_archive.py ARCHIVE

A JVM that is given it (``-XX:SharedArchiveFile``) maps it instead of reading and checking ten thousand classes;
one to which it does not apply goes on without it. The tests start Spark some sixty times.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession


def use(folder: Path, jvm: str) -> None:
    """A session that does some of what jobs do; returns when its JVM has exited, with what it writes on its way out."""
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
