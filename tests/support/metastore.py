"""Spark's catalog for daemons: an embedded metastore, which another Spark application has filled and left."""

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
    """A data base in a folder. It lets in one process at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        url = f"jdbc:derby:;databaseName={folder}/metastore_db;create=true"
        self._settings = {
            # Starts of Spark, and a new data base: nothing here is worth compiling well, or syncing.
            "spark.driver.extraJavaOptions": f"{FRUGAL} -Dderby.system.durability=test",
            "spark.sql.catalogImplementation": "hive",
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            "spark.hadoop.javax.jdo.option.ConnectionURL": url,
        }

    @property
    def options(self) -> tuple[str, ...]:
        """Of a daemon that is to have this catalog."""
        return tuple(word for name, value in self._settings.items() for word in ("--spark-conf", f"{name}={value}"))

    def run(self, *statements: str) -> None:
        """Run them in an application of their own."""
        command = [sys.executable, "-c", _RUN, json.dumps(self._settings), *statements]
        subprocess.run(command, cwd=self._folder, check=True, capture_output=True, timeout=200)
