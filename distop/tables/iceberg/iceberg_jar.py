"""The jar with which Spark reads Iceberg tables."""

from __future__ import annotations

from typing import Any

from distop.behavior import FatalError
from distop.tables.reading.format_jars import FormatJars

VERSION = "1.11.0"
"""The Iceberg release of the tests."""
_JARS = FormatJars("Iceberg", "org.apache.iceberg", "iceberg-spark-runtime-", VERSION, "org/apache/iceberg/Table.class")
misfits, missing = _JARS.misfits, _JARS.missing


def check_installed(jvm: Any) -> None:
    """Raises FatalError if this JVM has no Iceberg, or one for another Spark."""
    if why := _JARS.problem_of(jvm, jvm.org.apache.iceberg.spark.SparkRewriteTableCatalog):
        raise FatalError(why)
