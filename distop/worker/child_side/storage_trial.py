"""Reads a bucket through Spark, with a session of its own (``distop doctor --storage``)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop.errors import TableUnavailable
from distop.runtime import secret_settings
from distop.storage import storage_options
from distop.storage.storage_access import storage_access_for
from distop.worker.child_side import spark_submit

if TYPE_CHECKING:
    from collections.abc import Mapping

_NO_CONNECTOR = "ClassNotFoundException: Class org.apache.hadoop.fs.s3a.S3AFileSystem not found"
_OWN = {
    "spark.app.name": "distop-doctor",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # A refusal is final, and must not be retried for minutes.
    "spark.hadoop.fs.s3a.attempts.maximum": "2",
    "spark.hadoop.fs.s3a.retry.limit": "2",
}


def read(request: Mapping[str, Any]) -> int:
    """The bytes of the text file ``key`` below ``url``. Raises TableUnavailable, and InvalidArgument.

    ``options``: the configuration, as in the settings file. ``spark_conf``: further settings of Spark, which win.
    """
    from pyspark.sql import SparkSession

    storage_options.configure(storage_options.read_settings(request["options"]))
    settings = {
        **_OWN,
        **storage_access_for(request["url"]).spark(),
        **request["spark_conf"],
        "spark.master": "local[1]",
    }
    secret_settings.hide_settings(settings)
    url = "s3a://" + request["url"].partition("://")[2].rstrip("/")
    try:
        with tempfile.TemporaryDirectory(prefix="distop-doctor-") as folder:
            spark_submit.launch(settings, Path(folder))
            session = SparkSession.builder.getOrCreate()
            rows = session.read.text(f"{url}/{request['key']}").collect()
        return sum(len(row.value) for row in rows)
    except Exception as error:  # of Java, by Py4J
        raise TableUnavailable(_cause(str(error))) from None


def _cause(text: str) -> str:
    """The error's own line, without Java's stack."""
    if _NO_CONNECTOR in text:
        return (
            "Spark has no connector for S3: add org.apache.hadoop:hadoop-aws:3.4.2 to spark.jars.packages in spark-conf"
        )
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("at ")]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    first = next((line for line in lines if "Exception" in line), lines[0] if lines else "no cause given")
    return secret_settings.shortened((causes or [first])[-1], 500)
