"""``build-index`` and ``lookup`` beside what a person writes by hand in a warm Spark session.

TPC-H lineitem in 84 monthly partitions, by its order key, which every month has over its whole range: no statistics
help to find a key. The session is the benchmark's own, on all cores; the index is built by an executor, timed from the
call to the report. Each side has the machine to itself while it is timed.
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

from benchmarks.common import Cluster, Result, Row, cluster, median, peak, say
from benchmarks.validate import table
from distop.protocol.records import TableRecord
from distop_behaviors.index import lookup

TABLE = "tpch.lineitem"
COLUMN = "l_orderkey"
TEXTS = "l_comment"
"""Mostly unique, and hashed."""
WARM = 40
"""Rounds before those that count, of queries: see benchmarks.validate. Builds have three."""
LARGEST = 6_000_000
"""The largest order key at scale 1; of each 32 numbers the first 8 are keys."""


def run(scale: float = 1, runs: int = 7) -> Result:
    """Builds, then lookups of keys that are there, of keys that are nowhere, and with an index that covers nothing."""
    result = Result("index", {"scale": scale, "runs": runs, "column": COLUMN})
    with tempfile.TemporaryDirectory(prefix="distop-index-") as folder, _session() as spark, cluster(1) as bench:
        location = Path(shutil.copytree(table(scale), Path(folder) / "lineitem"))
        bench.client.add_table(TableRecord(TABLE, "parquet", str(location)))
        _builds(result, bench, spark, location, runs)
        result.rows.append(Row("build, the child's memory at its peak", peak(bench), "MB"))
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

    ours, hand = _alternating(by_distop, by_hand, 3, runs, bench.quiet)
    result.samples |= {"build: distop": ours, "build: by hand": hand}
    note = f"{median(ours):.2f} : {median(hand):.2f} s"
    result.rows.append(Row("build, beside sort and write by hand", median(ours) / median(hand), "×", 1.3, note=note))
    source = sum(path.stat().st_size for path in location.rglob("*.parquet") if "_distop" not in path.parts)
    (last, *_) = bench.client.history(TABLE)
    size = last.report["bytes"]
    hand_size = sum(path.stat().st_size for path in written.glob("*.parquet"))
    note = f"{size / 1e6:.1f} of {source / 1e6:.1f} MB; by hand {hand_size / 1e6:.1f} MB"
    result.rows.append(Row("size, of the table's", 100 * size / source, "%", 10, note=note))
    done = bench.client.start_operation("build-index", TABLE, {"name": "texts", "columns": [TEXTS]}).wait(600)
    size = done.report["bytes"]
    note = f"{size / 1e6:.1f} of {source / 1e6:.1f} MB"
    result.rows.append(Row("size of an index of texts, of the table's", 100 * size / source, "%", 10, note=note))


def _lookups(result: Result, spark: Any, location: Path, scale: float, runs: int) -> None:
    chance = random.Random(1)

    def there() -> int:
        return chance.randrange(int(LARGEST * scale) // 32) * 32 + chance.randrange(1, 8)

    def nowhere() -> int:
        return chance.randrange(int(LARGEST * scale) // 32) * 32 + chance.randrange(8, 32)

    frame = spark.read.parquet(str(location))

    def scan(key: int) -> None:
        frame.where(frame[COLUMN] == key).collect()

    def scan_and_list(key: int) -> None:
        rows = spark.read.parquet(str(location))
        rows.where(rows[COLUMN] == key).collect()

    def look(key: int) -> None:
        lookup(spark, str(location), "orders", [key]).collect()

    if sorted(lookup(spark, str(location), "orders", [7]).collect()) != sorted(frame.where("l_orderkey = 7").collect()):
        raise RuntimeError("the lookup and the filter differ")
    ours, hand = _alternating(lambda: look(there()), lambda: scan_and_list(there()), WARM, 3 * runs)
    missed, listed = _alternating(lambda: look(nowhere()), lambda: scan(there()), 3, 3 * runs)
    result.samples |= {"lookup: distop": ours, "lookup: by hand": hand, "lookup of a key that is nowhere": missed}
    result.samples |= {"by hand, of a frame that was made before": listed}
    note = f"{1000 * median(hand):.0f} : {1000 * median(ours):.0f} ms, the listing on both sides"
    ratio = median(hand) / median(ours)
    result.rows.append(Row("lookup of a key, beside a filter", ratio, "× faster", 10, at_most=False, note=note))
    note = f"{1000 * median(listed):.0f} : {1000 * median(ours):.0f} ms"
    ratio = median(listed) / median(ours)
    result.rows.append(Row("the same, beside a filter on what was listed before", ratio, "× faster", note=note))
    ratio = median(missed) / median(ours)
    note = f"{1000 * median(missed):.0f} : {1000 * median(ours):.0f} ms"
    result.rows.append(Row("a key that is nowhere, beside one that is there", ratio, "×", 1.1, note=note))
    for file in location.rglob("*.parquet"):
        os.utime(file)  # each counts as another one
    stale, hand = _alternating(lambda: look(there()), lambda: scan_and_list(there()), 3, runs)
    result.samples |= {"index that covers nothing: distop": stale, "index that covers nothing: by hand": hand}
    note = f"{1000 * median(stale):.0f} : {1000 * median(hand):.0f} ms, the listing on both sides"
    ratio = median(stale) / median(hand)
    result.rows.append(Row("where the index covers nothing, beside a filter", ratio, "×", 1.1, note=note))


def _alternating(
    ours: Callable[[], object],
    hand: Callable[[], object],
    warm: int,
    runs: int,
    after: Callable[[], object] = lambda: None,
) -> tuple[list[float], list[float]]:
    """Seconds of both, of the rounds that count."""
    found: tuple[list[float], list[float]] = ([], [])
    for n in range(warm + runs):
        for times, what in zip(found, (ours, hand), strict=True):
            began = time.perf_counter()
            what()
            if n >= warm:
                times.append(time.perf_counter() - began)
            after()
    say(f"index: distop {median(found[0]):.3f} s, by hand {median(found[1]):.3f} s")
    return found
