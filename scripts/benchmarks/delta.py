"""``validate`` on a Delta table (see ``benchmarks.table_formats``)."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from benchmarks.table_formats import MONTH, TableFormat

LOG = "_delta_log"


def _jars() -> Sequence[Path] | str:
    from tests.support.delta import MAVEN, jars

    return jars() or MAVEN


def _write(target: Path, months: Iterator[pa.Table]) -> None:
    from deltalake import write_deltalake

    for month in months:
        write_deltalake(target, month, mode="append", partition_by=[MONTH])


def _next_version(location: Path) -> None:
    """Commit a version with the same files: a version is cached by the content of its commit."""
    version = max(int(path.stem) for path in (location / LOG).glob("*.json") if path.stem.isdigit())
    action = {"commitInfo": {"operation": "MANUAL UPDATE", "txnId": str(uuid.uuid4())}}
    (location / LOG / f"{version + 1:020}.json").write_text(json.dumps(action) + "\n")


FORMAT = TableFormat(
    "delta",
    "the log",
    _jars,
    _write,
    _next_version,
    # For the statement: the session has no catalog and no extension of Delta.
    {"spark.databricks.delta.requiredSparkConfsCheck.enabled": "false"},
)
