"""Spark's catalog for daemons: an embedded Hive metastore, filled by another Spark application."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.support.localspark import FRUGAL

if TYPE_CHECKING:
    from pathlib import Path

_RUN = """
import json, sys
from pyspark.sql import SparkSession

builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
for name, value in json.loads(sys.argv[1]).items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
for text in sys.argv[2:]:
    spark.sql(text)
"""


class Metastore:
    """A metastore in a folder. Only one process at a time can use it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        url = f"jdbc:derby:;databaseName={folder}/metastore_db;create=true"
        self._settings = {
            # Faster for a short-lived JVM and a new database: little compilation, no syncing.
            "spark.driver.extraJavaOptions": f"{FRUGAL} -Dderby.system.durability=test",
            "spark.sql.catalogImplementation": "hive",
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            "spark.hadoop.javax.jdo.option.ConnectionURL": url,
        }

    @property
    def options(self) -> tuple[str, ...]:
        """The options of a daemon that uses this catalog."""
        return tuple(word for name, value in self._settings.items() for word in ("--spark-conf", f"{name}={value}"))

    def run(self, *statements: str) -> None:
        """Run SQL statements in a new Spark application."""
        command = [sys.executable, "-c", _RUN, json.dumps(self._settings), *statements]
        subprocess.run(command, cwd=self._folder, check=True, capture_output=True, timeout=200)
