"""Operations per second: many one-job operations, started by several clients at once.

From the first start to the last history record, relative to a bare loop that makes as many writes to the same etcd in
the same run.
"""

from __future__ import annotations

import asyncio
import time
from urllib.request import urlopen

import distop
from benchmarks import coordination
from benchmarks.common import Cluster, EtcdProbe, Result, Row, cluster, median, report_progress
from distop.protocol import keys as K
from distop.protocol.keys import Keys

CALLERS = 64
"""Concurrent starts per client."""
COUNT_INTERVAL = 0.05
"""Seconds between two counts of the history; for each count etcd reads all of its keys."""
RAW_JOBS = 10_000
WRITES_PER_RAW_JOB = 4


def run(operations: int = 10_000, clients: int = 4, executors: int = 2, runs: int = 3) -> Result:
    """Alternate raw and distop ``runs`` times; the medians."""
    rates: list[float] = []
    accepted: list[float] = []
    raws: list[float] = []
    writes: list[float] = []
    with cluster(executors) as bench:
        settings = {"operations": operations, "clients": clients, "executors": executors, "runs": runs}
        result = Result("operations", {**settings, "etcd": EtcdProbe(bench.endpoint).version()})
        asyncio.run(_measure(bench, operations // 10, clients))
        bench.wait_for_cleanup()
        for n in range(runs):
            raws.append(asyncio.run(coordination._raw(bench.endpoint, RAW_JOBS)) * WRITES_PER_RAW_JOB)
            before = _written(bench.endpoint)
            started, ended = asyncio.run(_measure(bench, operations, clients))
            bench.wait_for_cleanup()
            writes.append((_written(bench.endpoint) - before) / operations)
            accepted.append(operations / started)
            rates.append(operations / ended)
            report_progress(
                f"operations {n + 1}/{runs}: started {accepted[-1]:,.0f}, ended {rates[-1]:,.0f} per second"
            )
    limit = median(raws) / median(writes)
    result.samples = {"ended": rates, "started": accepted, "raw_writes": raws, "writes": writes}
    result.rows = [
        Row("operations, first start to last history record", median(rates), "ops/s", 1_000, at_most=False),
        Row("starts", median(accepted), "ops/s"),
        Row("writes to etcd per operation", median(writes), "keys"),
        Row("bare loop of as many writes", limit, "ops/s"),
        Row("distop relative to the bare loop", median(rates) / limit, "×"),
    ]
    return result


def _written(endpoint: str) -> float:
    """The number of puts and deletes so far, from etcd's metrics."""
    with urlopen(f"http://{endpoint}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    names = (
        "etcd_debugging_mvcc_put_total ",
        "etcd_debugging_mvcc_delete_total ",
        "etcd_mvcc_put_total ",
        "etcd_mvcc_delete_total ",
    )
    counters = {
        line.split(" ")[0].replace("_debugging", ""): float(line.split(" ")[1])
        for line in lines
        if line.startswith(names)
    }
    return sum(counters.values())


async def _measure(bench: Cluster, operations: int, clients: int) -> tuple[float, float]:
    """Seconds until all operations are started, and until all have ended."""
    connected = [await distop.aio.connect(bench.endpoint).__aenter__() for _ in range(clients)]
    first = connected[0]
    history = Keys().family(K.HISTORY)
    try:
        before = await first.etcd.count(*history)
        left = iter(range(operations))

        async def caller(client: distop.aio.Client) -> None:
            for _ in left:
                await client.start_operation("noop", "@cluster", {})

        began = time.perf_counter()
        await asyncio.gather(*(caller(client) for client in connected for _ in range(CALLERS)))
        started = time.perf_counter() - began
        while await first.etcd.count(*history) < before + operations:  # noqa: ASYNC110
            await asyncio.sleep(COUNT_INTERVAL)
        ended = time.perf_counter() - began
    finally:
        for client in connected:
            await client.close()
    return started, ended
