"""The jars with which Spark reads Delta tables."""

from __future__ import annotations

from typing import Any

from distop.behavior import FatalError
from distop.tables.reading.format_jars import FormatJars

VERSION = "4.4.0"
"""The Delta release of the tests."""
_JARS = FormatJars(
    "Delta Lake",
    "io.delta",
    "delta-spark_",
    VERSION,
    "io/delta/sql/DeltaSparkSessionExtension.class",
    (f"io.delta:delta-storage:{VERSION}",),
)
misfits, missing = _JARS.misfits, _JARS.missing


def check_installed(jvm: Any) -> None:
    """Raises FatalError if this JVM has no Delta, or one for another Spark."""
    if why := _JARS.problem_of(jvm, jvm.org.apache.spark.sql.delta.DummySnapshot, jvm.io.delta.storage.LogStore):
        raise FatalError(why)
