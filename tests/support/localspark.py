"""A Spark in this process, for what drives behaviors without an executor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FRUGAL = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options of a JVM for a Spark that soon ends: making its best code would take longer than running what it has."""

CALL_SITES = "spark.python.sql.dataFrameDebugging.enabled"
"""Whether PySpark looks up and sends the line of Python for each part of an expression: four calls of the JVM more."""
LOOKED_UP = (
    "PythonUtils",
    "functions",
    "org.apache.spark.sql.functions",
    "org.apache.spark.sql.classic.SparkSession",
)
"""The Java classes that PySpark looks up for nearly every part of an expression."""


def local_spark(master: str, name: str) -> Any:
    """Its builder: on the loopback, without a page, and silent."""
    from pyspark.sql import SparkSession

    return (
        SparkSession.builder.master(master)
        .appName(name)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
    )


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
