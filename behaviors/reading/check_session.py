"""The Spark session for checks, which shares the worker's Spark context and has its own settings."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS = {
    # The meaning of a check must not depend on the settings of the executor.
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.caseSensitive": "false",
    # Otherwise the parser replaces ${env:NAME} by variables and settings of the JVM, also inside string literals.
    "spark.sql.variable.substitute": "false",
    "spark.sql.parquet.binaryAsString": "false",
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
    # Above this many paths, Spark lists files in a separate job, which costs more than the listing.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "1000000",
    # The scan shuffles only one row for each file with violations.
    "spark.sql.shuffle.partitions": "4",
}

_made: list[tuple[Any, bool, SparkSession]] = []
"""The sessions for checks in the current context: (context, pushdown, session)."""


def session_of(spark: SparkSession, *, pushdown: bool = True) -> SparkSession:
    """The session for checks in the context of ``spark``, created once for each context.

    ``pushdown``: the Parquet reader may skip rows by the statistics, dictionaries and Bloom filters of a file. This is
    a setting of a session. It does not affect a format with a data source of its own.
    """
    context = spark.sparkContext
    for of, pushes, kept in _made:
        if of is context and pushes == pushdown:
            return kept
    # PySpark logs an expression that Spark refuses with its whole stack; the report has the message.
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    session = spark.newSession()
    for name, value in SETTINGS.items():
        session.conf.set(name, value)
    session.conf.set("spark.sql.parquet.filterPushdown", str(pushdown).lower())
    _made[:] = [*(one for one in _made if one[0] is context), (context, pushdown, session)]
    return session
