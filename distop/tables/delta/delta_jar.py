"""Checks that this executor's Spark has Delta's jars of a fitting version."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from distop.behavior import FatalError

if TYPE_CHECKING:
    from typing import Any

VERSION = "4.4.0"
"""The Delta release of the tests."""
_SCALA = "2.13"
"""PySpark's Scala version."""


def check_installed(jvm: Any) -> None:
    """Raises FatalError if this JVM has no Delta, or one for another Spark."""
    from py4j.java_gateway import JavaPackage
    from pyspark import __version__

    # A class compiled for another Spark cannot be linked, and looks like a missing one. So look for the file of a
    # class that does not use Spark.
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    where = loader.getResource("io/delta/sql/DeltaSparkSessionExtension.class")
    jar = str(where.toString()).removeprefix("jar:").partition("!")[0] if where is not None else None
    delta = jvm.org.apache.spark.sql.delta
    linked = not any(isinstance(one, JavaPackage) for one in (delta.DummySnapshot, jvm.io.delta.storage.LogStore))
    if jar is None or not linked or misfits(jar, __version__):
        raise FatalError(missing(__version__, jar))


def misfits(jar: str, spark: str) -> bool:
    """Whether the jar's name has another version of Spark or Scala, so that reading would end in linkage errors."""
    made_for = re.search(r"delta-spark_(\d+\.\d+)_(\d+\.\d+)", jar)
    return made_for is not None and made_for.groups() != (_minor(spark), _SCALA)


def missing(spark: str, jar: str | None) -> str:
    """The error text if Spark has no Delta, or one that does not fit."""
    what = "Spark has no Delta Lake" if jar is None else f"the Delta Lake of {jar} does not fit Spark {spark}"
    return (
        f"{what}: start the executors with --spark-conf spark.jars=FILES, where FILES are the jars "
        f"io.delta:delta-spark_{_minor(spark)}_{_SCALA}:{VERSION} and io.delta:delta-storage:{VERSION}, with a comma "
        "between them"
    )


def _minor(spark: str) -> str:
    return ".".join(spark.split(".")[:2])
