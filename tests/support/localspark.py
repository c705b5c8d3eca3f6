"""A Spark in this process, for what drives behaviors without an executor."""

from __future__ import annotations

from typing import Any

FRUGAL = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options of a JVM for a Spark that soon ends: making its best code would take longer than running what it has."""


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
