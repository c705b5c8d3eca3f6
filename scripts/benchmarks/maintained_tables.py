"""Tables that need maintenance, written once and copied for each measurement.

The metadata of an Iceberg table have absolute paths. They are written without compression, and a copy gets a location
of the same length, which replaces the original's in all of them.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import iceberg, validate

YEAR = "ship_year"
COMMITS = 40
"""Appends to a table with small files: each has a file in each of the seven years."""
DAYS_AGO = 3 * 86_400
"""The age of orphan files in seconds: Iceberg's procedure accepts no time within the last day."""
METADATA = (".json", ".avro")


class Copies:
    """Copies of a table ``original``, in folders beside it whose names have the same length."""

    def __init__(self, original: Path) -> None:
        self._original = original
        self._numbers = count(1)

    def new(self) -> Path:
        """The location of a new copy."""
        name = self._original.name
        number = str(next(self._numbers))
        target = self._original.with_name(name[: -len(number)] + number)
        shutil.copytree(self._original, target)
        if (target / "metadata").exists():
            ours, theirs = os.fsencode(target), os.fsencode(self._original)
            for file in (target / "metadata").iterdir():
                if file.suffix in METADATA:
                    file.write_bytes(file.read_bytes().replace(theirs, ours))
        return target


def data_bytes(location: Path) -> int:
    """The bytes of all Parquet files in a folder."""
    return sum(path.stat().st_size for path in location.rglob("*.parquet"))


def small_files(location: Path, form: str, scale: float) -> Path:
    """TPC-H lineitem by year, in small files: 280 at most."""
    commits = list(_slices(validate.table(scale)))
    if form == "delta":
        from deltalake import write_deltalake

        for rows in commits:
            write_deltalake(location, rows, mode="append", partition_by=[YEAR])
    else:
        table = iceberg.create(location, commits[0].schema, YEAR, **_PROPERTIES)
        for rows in commits:
            table.append(rows)
    return location


_PROPERTIES = {"write.avro.compression-codec": "null"}


def _slices(source: Path) -> Iterator[pa.Table]:
    """Lineitem in COMMITS tables, each with rows of all years."""
    years: dict[str, list[pa.Table]] = {}
    for folder in sorted(source.glob("*=*")):
        (path,) = folder.glob("*.parquet")
        years.setdefault(folder.name.partition("=")[2][:4], []).append(pq.read_table(path, partitioning=None))
    whole = {year: pa.concat_tables(months) for year, months in years.items()}
    for n in range(COMMITS):
        parts = []
        for year, rows in whole.items():
            first, last = len(rows) * n // COMMITS, len(rows) * (n + 1) // COMMITS
            part = rows.slice(first, last - first)
            parts.append(part.append_column(YEAR, pa.array([year] * len(part))))
        yield pa.concat_tables(parts)


def old_snapshots(location: Path, commits: int) -> Path:
    """An Iceberg table, each commit of which replaces ten files: only the last ones are needed."""
    rows = pa.table({"part": [n % 10 for n in range(1_000)], "k": list(range(1_000))})
    table = iceberg.create(location, rows.schema, "part", **_PROPERTIES)
    table.append(rows)
    for _ in range(commits):
        table.overwrite(rows)
    return location


def orphans(location: Path, files: int) -> Path:
    """An Iceberg table of a hundred files, with ``files`` more that no metadata name."""
    rows = pa.table({"part": [n % 10 for n in range(1_000)], "k": list(range(1_000))})
    table = iceberg.create(location, rows.schema, "part", **_PROPERTIES)
    for _ in range(10):
        table.append(rows)
    example = next((location / "data").rglob("*.parquet")).read_bytes()
    for n in range(files):
        (location / "data" / f"part={n % 10}" / f"orphan-{n}.parquet").write_bytes(example)
    return location


def make_older(location: Path) -> None:
    """Set the times of all files back."""
    then = time.time() - DAYS_AGO
    for path in location.rglob("*"):
        os.utime(path, (then, then))


def large_folder(location: Path, scale: float, copies: int = 10) -> Path:
    """A folder of Parquet files: ``copies`` times lineitem, in its 84 monthly partitions."""
    for folder in sorted(validate.table(scale).glob("*=*")):
        (path,) = folder.glob("*.parquet")
        (location / folder.name).mkdir(parents=True)
        for n in range(copies):
            shutil.copy(path, location / folder.name / f"{n}.parquet")
    return location
