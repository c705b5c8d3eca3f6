"""A local Spark session in this process, for tests that run behaviors without an executor."""

from __future__ import annotations

from typing import Any

FRUGAL = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options for a short-lived JVM: optimizing compilation would take longer than it saves."""


def local_spark(master: str, name: str) -> Any:
    """The builder of a session: on the loopback, without web page and progress bars."""
    from pyspark.sql import SparkSession

    return (
        SparkSession.builder.master(master)
        .appName(name)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
    )
