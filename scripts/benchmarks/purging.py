"""``purge``, relative to ``DROP TABLE … PURGE`` by Spark with Iceberg's catalog.

Both delete all files that the table's snapshots reach. distop also writes a list of them first, which is durable.
"""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow as pa

from benchmarks import iceberg, maintenance
from benchmarks.common import Result, report_progress
from distop.protocol.records import TableRecord

COMMITS, PARTS = 50, 100
FILES = COMMITS * PARTS
TARGET = 1.2


def many_files(location: Path) -> Path:
    """An Iceberg table of :data:`FILES` data files, with a manifest for each commit."""
    rows = pa.table({"part": list(range(PARTS)), "k": list(range(PARTS))})
    table = iceberg.create(location, rows.schema, "part", **{"write.avro.compression-codec": "null"})
    for _ in range(COMMITS):
        table.append(rows)
    return location


def measure(result: Result, folder: Path, runs: int) -> None:
    """Add the ratio, and the memory of both children."""
    report_progress("maintenance: writing a table to purge")
    original = many_files(folder / "db" / "t000000")
    with maintenance._sides("iceberg", "purge", folder) as sides:
        client = sides.bench.client

        def by_distop(location: Path) -> float:
            name = f"bench.{location.name}"
            client.add_table(TableRecord(name, "iceberg", str(location)))
            began = time.perf_counter()
            done = client.start_operation("purge", name, {}).wait(600)
            seconds = time.perf_counter() - began
            report = done.report or {}
            gone = sum(kind["files"] for kind in report.get("deleted", {}).values())
            complete = report.get("complete") and gone > FILES and not maintenance._files(location)
            maintenance._require(bool(complete), "purge", report or done.errors)
            sides.bench.wait_for_cleanup()
            return seconds

        def by_statement(location: Path) -> float:
            seconds = sides.statement(f"DROP TABLE lake.db.{location.name} PURGE", location)
            maintenance._require(not maintenance._files(location), "DROP TABLE … PURGE", "")
            location.mkdir(exist_ok=True)  # which the measurement removes
            return seconds

        what, note = "purge, relative to DROP TABLE … PURGE", f"{FILES} data files, {COMMITS} snapshots"
        maintenance._alternate(result, what, original, by_distop, by_statement, runs, TARGET, note)
        maintenance._add_memory(result, sides, "purge", "DROP TABLE … PURGE")
