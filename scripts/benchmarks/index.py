"""``build-index`` and ``lookup``, relative to hand-written Spark code in a warm session.

TPC-H lineitem in 84 monthly partitions, by its order key, whose values in each month span the whole range: statistics
do not help to find a key. The hand-written code runs in the benchmark's own session on all cores. An executor builds
the index, timed from the call to the report. Nothing else runs during a measurement.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import Cluster, Result, Row, cluster, median, peak_memory, report_progress
from benchmarks.validate import table
from distop.protocol.records import TableRecord
from distop_behaviors.index import lookup

TABLE = "tpch.lineitem"
COLUMN = "l_orderkey"
TEXTS = "l_comment"
"""A text column with mostly different values, which the index stores as hashes."""
WARM = 40
"""Warm-up rounds of lookups (see benchmarks.validate); builds have three."""
LARGEST = 6_000_000
"""The largest order key at scale 1. Of 32 consecutive numbers the first 8 are keys."""


def run(scale: float = 1, runs: int = 7) -> Result:
    """Builds; then lookups of existing keys, of missing keys, and with an index that covers no current file."""
    result = Result("index", {"scale": scale, "runs": runs, "column": COLUMN})
    with tempfile.TemporaryDirectory(prefix="distop-index-") as folder, _session() as spark, cluster(1) as bench:
        location = Path(shutil.copytree(table(scale), Path(folder) / "lineitem"))
        bench.client.add_table(TableRecord(TABLE, "parquet", str(location)))
        _builds(result, bench, spark, location, runs)
        result.rows.append(Row("build, peak memory of the child", peak_memory(bench), "MB"))
        _lookups(result, spark, location, scale, runs)
    return result


@contextmanager
def _session() -> Iterator[Any]:
    from tests.support.localspark import local_spark

    session = local_spark("local[*]", "distop bench").config("spark.driver.memory", "2g").getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        session.stop()


def _builds(result: Result, bench: Cluster, spark: Any, location: Path, runs: int) -> None:
    written = location.parent / "by-hand"

    def by_hand() -> None:
        rows = spark.read.parquet(str(location)).select(COLUMN, "_metadata.file_path", "_metadata.row_index")
        rows.sort(COLUMN).write.mode("overwrite").parquet(str(written))

    def by_distop() -> None:
        arg = {"name": "orders", "columns": [COLUMN], "refresh": "full"}
        done = bench.client.start_operation("build-index", TABLE, arg).wait(600)
        if done.state != "success" or done.report["not_indexed_files"]:
            raise RuntimeError(f"build-index ended as {done.state}: {str(done.errors or done.report)[:1_000]}")

    ours, hand = _alternate(by_distop, by_hand, 3, runs, bench.wait_for_cleanup)
    result.samples |= {"build: distop": ours, "build: by hand": hand}
    note = f"{median(ours):.2f} : {median(hand):.2f} s"
    ratio = median(ours) / median(hand)
    result.rows.append(Row("build, relative to sorting and writing by hand", ratio, "×", 1.3, note=note))
    source = sum(path.stat().st_size for path in location.rglob("*.parquet") if "_distop" not in path.parts)
    (last, *_) = bench.client.history(TABLE)
    size = last.report["bytes"]
    hand_size = sum(path.stat().st_size for path in written.glob("*.parquet"))
    note = f"{size / 1e6:.1f} of {source / 1e6:.1f} MB; by hand {hand_size / 1e6:.1f} MB"
    result.rows.append(Row("size, relative to the table", 100 * size / source, "%", 10, note=note))
    done = bench.client.start_operation("build-index", TABLE, {"name": "texts", "columns": [TEXTS]}).wait(600)
    size = done.report["bytes"]
    note = f"{size / 1e6:.1f} of {source / 1e6:.1f} MB"
    result.rows.append(Row("size of an index of texts, relative to the table", 100 * size / source, "%", 10, note=note))


def _lookups(result: Result, spark: Any, location: Path, scale: float, runs: int) -> None:
    chance = random.Random(1)

    def existing_key() -> int:
        return chance.randrange(int(LARGEST * scale) // 32) * 32 + chance.randrange(1, 8)

    def missing_key() -> int:
        return chance.randrange(int(LARGEST * scale) // 32) * 32 + chance.randrange(8, 32)

    frame = spark.read.parquet(str(location))

    def scan(key: int) -> None:
        frame.where(frame[COLUMN] == key).collect()

    def list_and_scan(key: int) -> None:
        rows = spark.read.parquet(str(location))
        rows.where(rows[COLUMN] == key).collect()

    def look_up(key: int) -> None:
        lookup(spark, str(location), "orders", [key]).collect()

    if sorted(lookup(spark, str(location), "orders", [7]).collect()) != sorted(frame.where("l_orderkey = 7").collect()):
        raise RuntimeError("The lookup and the filter return different rows")
    ours, hand = _alternate(lambda: look_up(existing_key()), lambda: list_and_scan(existing_key()), WARM, 3 * runs)
    missed, listed = _alternate(lambda: look_up(missing_key()), lambda: scan(existing_key()), 3, 3 * runs)
    result.samples |= {"lookup: distop": ours, "lookup: by hand": hand, "lookup of a missing key": missed}
    result.samples |= {"by hand, listed before": listed}
    note = f"{1000 * median(hand):.0f} : {1000 * median(ours):.0f} ms, both with file listing"
    ratio = median(hand) / median(ours)
    result.rows.append(Row("lookup of a key, relative to a filter", ratio, "× faster", 10, at_most=False, note=note))
    note = f"{1000 * median(listed):.0f} : {1000 * median(ours):.0f} ms"
    ratio = median(listed) / median(ours)
    result.rows.append(Row("the same, the filter's files listed before", ratio, "× faster", note=note))
    ratio = median(missed) / median(ours)
    note = f"{1000 * median(missed):.0f} : {1000 * median(ours):.0f} ms"
    result.rows.append(Row("lookup of a missing key, relative to an existing one", ratio, "×", 1.1, note=note))
    for file in location.rglob("*.parquet"):
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
