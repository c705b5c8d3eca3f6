"""The Spark session that checks run in: the worker's Spark context, with settings of its own."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS = {
    # What a check means must not depend on how the worker was started.
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.caseSensitive": "false",
    # Else the parser replaces ${env:NAME} and the like by variables and settings of the JVM, also inside of texts.
    "spark.sql.variable.substitute": "false",
    "spark.sql.parquet.binaryAsString": "false",
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
    # Above this many paths Spark lists with a job of its own, which costs more than the listing.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "1000000",
    # A row per file that has violations is all that is shuffled.
    "spark.sql.shuffle.partitions": "4",
}

_made: list[tuple[Any, bool, SparkSession]] = []
"""The sessions of checks in the last context, and whether they push filters down."""


def session_of(spark: SparkSession, *, pushdown: bool = True) -> SparkSession:
    """The session for checks in the context of ``spark``: made once for each context.

    ``pushdown``: whether Parquet's reader may skip rows by the statistics, dictionaries and Bloom filters of a file.
    Only a session can be told so. Iceberg's reader never does, for files that it is told to read.
    """
    context = spark.sparkContext
    for of, pushes, kept in _made:
        if of is context and pushes == pushdown:
            return kept
    # PySpark logs what Spark refuses with its whole stack; the sentence is in the report.
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    session = spark.newSession()
    for name, value in SETTINGS.items():
        session.conf.set(name, value)
    session.conf.set("spark.sql.parquet.filterPushdown", str(pushdown).lower())
    _made[:] = [*(one for one in _made if one[0] is context), (context, pushdown, session)]
    return session
