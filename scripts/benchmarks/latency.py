"""The time of a one-job no-op operation, from the call to its result, on an otherwise idle machine."""

from __future__ import annotations

import asyncio
import time

import distop
from benchmarks.common import EtcdProbe, Result, Row, cluster, median, percentile, report_progress
from distop.protocol.records import TableRecord
from distop.protocol.txn import Put, Txn

WARM = 20
"""Warm-up operations."""
TABLE = "bench.one"


def run(runs: int = 200) -> Result:
    """One operation after the other, each followed by one raw commit.

    First on the cluster, where the job needs no planning, then on a table of one file.
    """
    with cluster(1) as bench:
        etcd = EtcdProbe(bench.endpoint).version()
        ours, raw = asyncio.run(_measure(bench.endpoint, runs, "@cluster"))
        location = bench.folder / "one"
        location.mkdir()
        (location / "one.parquet").write_bytes(b"PAR1....PAR1")
        bench.client.add_table(TableRecord(TABLE, "parquet", str(location)))
        planned, _ = asyncio.run(_measure(bench.endpoint, runs, TABLE))
        bench.wait_for_cleanup()
    ours_ms, raw_ms, planned_ms = ([1000 * s for s in seconds] for seconds in (ours, raw, planned))
    rows = [
        Row("p50, call to result", percentile(ours_ms, 0.50), "ms", 10),
        Row("p95", percentile(ours_ms, 0.95), "ms"),
        Row("p99", percentile(ours_ms, 0.99), "ms", 40),
        Row("one raw commit, median", median(raw_ms), "ms"),
        Row("one raw commit, slowest (depends on the disk)", max(raw_ms), "ms"),
        Row("p50 relative to a raw commit", percentile(ours_ms, 0.50) / median(raw_ms), "×"),
        Row("p50 on a table, including planning", percentile(planned_ms, 0.50), "ms"),
        Row("p99 on a table, including planning", percentile(planned_ms, 0.99), "ms"),
    ]
    return Result("latency", {"runs": runs, "etcd": etcd}, rows, {"distop": ours, "raw": raw, "planned": planned})


async def _measure(endpoint: str, runs: int, table: str) -> tuple[list[float], list[float]]:
    ours: list[float] = []
    raw: list[float] = []
    async with distop.aio.connect(endpoint) as client:
        for n in range(WARM + runs):
            began = time.perf_counter()
            operation = await client.start_operation("noop", table, {})
            result = await operation.wait(60)
            ended = time.perf_counter()
            if result.state != "success":
                raise RuntimeError(f"The no-op operation ended as {result.state}: {result.errors}")
            await asyncio.sleep(0.02)  # let its cleanup finish
            before = time.perf_counter()
            await client.etcd.commit(Txn((), (Put("raw.single", b"x" * 100),)))
            if n >= WARM:
                ours.append(ended - began)
                raw.append(time.perf_counter() - before)
            if n % 100 == 99:
                report_progress(f"latency on {table} {n + 1 - WARM}/{runs}")
    return ours, raw
