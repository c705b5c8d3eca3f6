"""``build-index`` and ``lookup``, relative to hand-written Spark code in a warm session.

TPC-H lineitem in 84 monthly partitions, as Parquet files, an Iceberg and a Delta table, by its order key. The keys in
each month span the whole range: statistics do not help to find a key. The hand-written code runs in the benchmark's own
session on all cores. An executor builds the index, timed from the call to the report. Nothing else runs during a
measurement.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import delta, iceberg
from benchmarks.common import Cluster, Result, Row, cluster, median, peak_memory, report_progress
from benchmarks.validate import table
from distop.protocol.records import TableRecord
from distop_behaviors.index import lookup

FORMATS = ("parquet", "iceberg", "delta")
LAKES = {"iceberg": iceberg.FORMAT, "delta": delta.FORMAT}
POSITIONS = {
    "parquet": ("_metadata.file_path", "_metadata.row_index"),
    "iceberg": ("_file", "_pos"),
    "delta": ("_metadata.file_path",),
}
TABLE = "tpch.lineitem"
COLUMN = "l_orderkey"
TEXTS = "l_comment"
"""A text column with mostly different values, which the index stores as hashes."""
WARM = 40
"""Warm-up rounds of lookups (see benchmarks.validate); builds have three."""
LARGEST = 6_000_000
"""The largest order key at scale 1. Of 32 consecutive numbers the first 8 are keys."""


def run(scale: float = 1, runs: int = 7, formats: Sequence[str] = FORMATS) -> Result:
    """Builds; then lookups of existing keys, of missing keys, and with an index that covers no current file."""
    result = Result("index", {"scale": scale, "runs": runs, "column": COLUMN})
    lakes = [LAKES[name] for name in formats if name in LAKES]
    with (
        tempfile.TemporaryDirectory(prefix="distop-index-") as folder,
        session([one.spark() for one in lakes]) as spark,
    ):
        for name in formats:
            options = LAKES[name].options() if name in LAKES else ()
            with _indexed(name, scale, Path(folder), spark) as source, cluster(1, *options) as bench:
                bench.client.add_table(source.record)
                _builds(result, bench, source, Path(folder) / "by-hand", runs)
                peak = peak_memory(bench)
                result.rows.append(Row(source.row("build, peak memory of the child"), peak, "MB"))
                _lookups(result, source, scale, runs)
    return result


@contextmanager
def session(settings: Iterable[Mapping[str, str]]) -> Iterator[Any]:
    """A warm session on all cores, with the jars and the other settings of several formats."""
    from tests.support.localspark import local_spark

    builder, jars = local_spark("local[*]", "distop bench").config("spark.driver.memory", "2g"), list[str]()
    for one in settings:
        for name, value in one.items():
            if name == "spark.jars":
                jars += value.split(",")
            else:
                builder = builder.config(name, value)
    if jars:
        builder = builder.config("spark.jars", ",".join(dict.fromkeys(jars)))
    found = builder.getOrCreate()
    found.sparkContext.setLogLevel("ERROR")
    try:
        yield found
    finally:
        found.stop()


@dataclass(frozen=True, slots=True)
class _Source:
    """A table, and the session of the hand-written code."""

    record: TableRecord
    spark: Any

    def row(self, name: str) -> str:
        """The name of a row: those of Parquet have no prefix."""
        return name if self.record.format == "parquet" else f"{self.record.format}: {name}"

    @property
    def location(self) -> Path:
        return Path(self.record.location)

    def read(self) -> Any:
        """The table as a new frame, whose files are listed."""
        return self.spark.read.format(self.record.format).load(self.record.location)

    def positions(self) -> Any:
        """The key, file and position of all rows. Delta's rows have no position."""
        return self.read().select(COLUMN, *POSITIONS[self.record.format])

    def look_up(self, key: int) -> Any:
        return lookup(self.spark, self.record, "orders", [key])


@contextmanager
def _indexed(name: str, scale: float, folder: Path, spark: Any) -> Iterator[_Source]:
    """The table without an index. A table with metadata stays at its place, because these have absolute paths."""
    if name not in LAKES:
        location = Path(shutil.copytree(table(scale), folder / "lineitem"))
        yield _Source(TableRecord(TABLE, name, str(location)), spark)
        return
    location = LAKES[name].table(scale)
    shutil.rmtree(location / "_distop", ignore_errors=True)
    try:
        yield _Source(TableRecord(TABLE, name, str(location)), spark)
    finally:
        shutil.rmtree(location / "_distop", ignore_errors=True)


def _builds(result: Result, bench: Cluster, source: _Source, written: Path, runs: int) -> None:
    def by_hand() -> None:
        source.positions().sort(COLUMN).write.mode("overwrite").parquet(str(written))

    def by_distop() -> None:
        arg = {"name": "orders", "columns": [COLUMN], "refresh": "full"}
        done = bench.client.start_operation("build-index", TABLE, arg).wait(600)
        if done.state != "success" or done.report["not_indexed_files"]:
            raise RuntimeError(f"build-index ended as {done.state}: {str(done.errors or done.report)[:1_000]}")

    ours, hand = _alternate(by_distop, by_hand, 3, runs, bench.wait_for_cleanup)
    result.samples |= {source.row("build: distop"): ours, source.row("build: by hand"): hand}
    note = f"{median(ours):.2f} : {median(hand):.2f} s"
    ratio = median(ours) / median(hand)
    name = source.row("build, relative to sorting and writing by hand")
    result.rows.append(Row(name, ratio, "×", 1.3, note=note))
    data = sum(path.stat().st_size for path in source.location.rglob("*.parquet") if "_distop" not in path.parts)
    (last, *_) = bench.client.history(TABLE)
    size = last.report["bytes"]
    hand_size = sum(path.stat().st_size for path in written.glob("*.parquet"))
    note = f"{size / 1e6:.1f} of {data / 1e6:.1f} MB; by hand {hand_size / 1e6:.1f} MB"
    result.rows.append(Row(source.row("size, relative to the table"), 100 * size / data, "%", 10, note=note))
    done = bench.client.start_operation("build-index", TABLE, {"name": "texts", "columns": [TEXTS]}).wait(600)
    size = done.report["bytes"]
    note = f"{size / 1e6:.1f} of {data / 1e6:.1f} MB"
    name = source.row("size of an index of texts, relative to the table")
    result.rows.append(Row(name, 100 * size / data, "%", 10, note=note))


def _lookups(result: Result, source: _Source, scale: float, runs: int) -> None:
    chance = random.Random(1)

    def existing_key() -> int:
        return chance.randrange(int(LARGEST * scale) // 32) * 32 + chance.randrange(1, 8)

    def missing_key() -> int:
        return chance.randrange(int(LARGEST * scale) // 32) * 32 + chance.randrange(8, 32)

    frame = source.read()

    def scan(key: int) -> None:
        frame.where(frame[COLUMN] == key).collect()

    def list_and_scan(key: int) -> None:
        rows = source.read()
        rows.where(rows[COLUMN] == key).collect()

    def look_up(key: int) -> None:
        source.look_up(key).collect()

    found = source.look_up(7).select(*frame.columns)
    if sorted(found.collect()) != sorted(frame.where(f"{COLUMN} = 7").collect()):
        raise RuntimeError("The lookup and the filter return different rows")
    ours, hand = _alternate(lambda: look_up(existing_key()), lambda: list_and_scan(existing_key()), WARM, 3 * runs)
    missed, listed = _alternate(lambda: look_up(missing_key()), lambda: scan(existing_key()), 3, 3 * runs)
    samples = {"lookup: distop": ours, "lookup: by hand": hand, "lookup of a missing key": missed}
    samples |= {"by hand, listed before": listed}
    result.samples |= {source.row(name): seconds for name, seconds in samples.items()}
    note = f"{1000 * median(hand):.0f} : {1000 * median(ours):.0f} ms, both with file listing"
    ratio = median(hand) / median(ours)
    name = source.row("lookup of a key, relative to a filter")
    result.rows.append(Row(name, ratio, "× faster", 10, at_most=False, note=note))
    note = f"{1000 * median(listed):.0f} : {1000 * median(ours):.0f} ms"
    ratio = median(listed) / median(ours)
    result.rows.append(Row(source.row("the same, the filter's files listed before"), ratio, "× faster", note=note))
    ratio = median(missed) / median(ours)
    note = f"{1000 * median(missed):.0f} : {1000 * median(ours):.0f} ms"
    name = source.row("lookup of a missing key, relative to an existing one")
    result.rows.append(Row(name, ratio, "×", 1.1, note=note))
    if source.record.format != "parquet":
        return  # files with metadata do not become new
    for file in source.location.rglob("*.parquet"):
        os.utime(file)  # a touched file counts as new
    stale, hand = _alternate(lambda: look_up(existing_key()), lambda: list_and_scan(existing_key()), 3, runs)
    result.samples |= {"index that covers no file: distop": stale, "index that covers no file: by hand": hand}
    note = f"{1000 * median(stale):.0f} : {1000 * median(hand):.0f} ms, both with file listing"
    ratio = median(stale) / median(hand)
    result.rows.append(Row("index that covers no file, relative to a filter", ratio, "×", 1.1, note=note))


def _alternate(
    ours: Callable[[], object],
    hand: Callable[[], object],
    warm: int,
    runs: int,
    after: Callable[[], object] = lambda: None,
) -> tuple[list[float], list[float]]:
    """Run both in turn; returns the seconds of both without the ``warm`` first rounds."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for n in range(warm + runs):
        for times, work in zip(seconds, (ours, hand), strict=True):
            began = time.perf_counter()
            work()
            if n >= warm:
                times.append(time.perf_counter() - began)
            after()
    report_progress(f"index: distop {median(seconds[0]):.3f} s, by hand {median(seconds[1]):.3f} s")
    return seconds
