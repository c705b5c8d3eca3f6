"""``validate`` on a Delta table, relative to one hand-written Spark SQL statement (see ``benchmarks.validate``).

TPC-H lineitem with one partition per month and one file per partition.
"""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path

import pyarrow as pa

from benchmarks import validate
from benchmarks.common import CACHE, Result, report_progress
from benchmarks.validate import SIMPLE, TEN, Case, Subject

MONTH = "ship_month"
LOG = "_delta_log"

CASES = (
    Case("decided from the log", SIMPLE, "auto", 0.1),
    Case("full scan", SIMPLE, "never", 1.15),
    Case("ten checks, full scan", TEN, "never", 1.15),
)


def run(scale: float = 1, runs: int = 7, lives: int = 3) -> Result:
    """Like ``benchmarks.validate.run``. Raises RuntimeError if Delta's jars are not available."""
    from tests.support.delta import MAVEN, jars

    found = jars()
    if found is None:
        raise RuntimeError(MAVEN)
    options = (
        *("--spark-conf", f"spark.jars={','.join(map(str, found))}"),
        # For the statement: the session has no catalog and no extension of Delta.
        *("--spark-conf", "spark.databricks.delta.requiredSparkConfsCheck.enabled=false"),
    )
    result = Result("delta", {"scale": scale, "runs": runs, "lives": lives})
    return validate.measure(result, Subject("delta", table(scale), _next_version, options), CASES)


def _next_version(location: Path) -> None:
    """Commit a version with the same files: a version is cached by the content of its commit."""
    version = max(int(path.stem) for path in (location / LOG).glob("*.json") if path.stem.isdigit())
    action = {"commitInfo": {"operation": "MANUAL UPDATE", "txnId": str(uuid.uuid4())}}
    (location / LOG / f"{version + 1:020}.json").write_text(json.dumps(action) + "\n")


def table(scale: float) -> Path:
    """The table, generated once per scale. A marker file, written last, shows that the table is complete."""
    import pyarrow.parquet as pq
    from deltalake import write_deltalake

    source, target = validate.table(scale), CACHE / f"delta-lineitem-{scale:g}"
    complete = target / "whole"
    if not complete.exists():
        report_progress(f"delta: generating lineitem at scale {scale:g} in 84 monthly partitions")
        shutil.rmtree(target, ignore_errors=True)
        for folder in sorted(source.glob("*=*")):  # excludes the folder with operations' own files
            (path,) = folder.glob("*.parquet")
            month = pq.read_table(path, partitioning=None)
            month = month.append_column(MONTH, pa.array([folder.name.partition("=")[2]] * len(month)))
            write_deltalake(target, month, mode="append", partition_by=[MONTH])
        complete.touch()
    return target
