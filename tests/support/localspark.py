"""A Spark in this process, for what drives behaviors without an executor."""

from __future__ import annotations

from typing import Any


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
