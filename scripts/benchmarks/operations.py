"""Whole operations a second: many of one job each, started by several clients at once, until the last has its history
record; beside what a bare loop makes of as many writes to the same etcd in the same run.
"""

from __future__ import annotations

import asyncio
import time
from urllib.request import urlopen

import distop
from benchmarks import celerytasks, coordination
from benchmarks.common import Cluster, Look, Result, Row, cluster, median, say
from distop.protocol import keys as K
from distop.protocol.keys import Keys

CALLERS = 64
"""Starts that each client has under way."""
LOOK_EVERY = 0.05
"""Seconds between two counts of the history: etcd goes through all of its keys for each."""
RAW_JOBS = 10_000
WRITES_PER_RAW_JOB = 4
CELERY_TASKS = 2_000


def run(operations: int = 10_000, clients: int = 4, executors: int = 2, runs: int = 3) -> Result:
    """Alternate raw and distop ``runs`` times; the medians. Then no-op tasks of Celery with Redis, where installed."""
    rates: list[float] = []
    accepted: list[float] = []
    raws: list[float] = []
    writes: list[float] = []
    with cluster(executors) as bench:
        settings = {"operations": operations, "clients": clients, "executors": executors, "runs": runs}
        result = Result("operations", {**settings, "etcd": Look(bench.endpoint).version()})
        asyncio.run(_measure(bench, operations // 10, clients))
        bench.quiet()
        for n in range(runs):
            raws.append(asyncio.run(coordination._raw(bench.endpoint, RAW_JOBS)) * WRITES_PER_RAW_JOB)
            before = _written(bench.endpoint)
            started, ended = asyncio.run(_measure(bench, operations, clients))
            bench.quiet()
            writes.append((_written(bench.endpoint) - before) / operations)
            accepted.append(operations / started)
            rates.append(operations / ended)
            say(f"operations {n + 1}/{runs}: started {accepted[-1]:,.0f}, ended {rates[-1]:,.0f} a second")
    limit = median(raws) / median(writes)
    result.samples = {"ended": rates, "started": accepted, "raw_writes": raws, "writes": writes}
    result.rows = [
        Row("operations, first start to last history record", median(rates), "ops/s", 1_000, at_most=False),
        Row("their starts alone", median(accepted), "ops/s"),
        Row("writes to etcd for each", median(writes), "keys"),
        Row("as many writes by a bare loop", limit, "ops/s"),
        Row("of that limit", median(rates) / limit, "×"),
    ]
    _add_celery(result, clients, executors)
    return result


def _add_celery(result: Result, clients: int, processes: int) -> None:
    absent = celerytasks.missing()
    if absent:
        say(f"operations: no figure of Celery with Redis beside it, because {absent} is not installed")
        return
    rate = celerytasks.rate(CELERY_TASKS, clients, processes)
    result.samples["celery"] = [rate]
    result.rows.append(Row("no-op tasks of Celery with Redis, sent to last result", rate, "tasks/s"))


def _written(endpoint: str) -> float:
    """Keys put or deleted so far, as etcd counts them."""
    with urlopen(f"http://{endpoint}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    names = (
        "etcd_debugging_mvcc_put_total ",
        "etcd_debugging_mvcc_delete_total ",
        "etcd_mvcc_put_total ",
        "etcd_mvcc_delete_total ",
    )
    found = {
        line.split(" ")[0].replace("_debugging", ""): float(line.split(" ")[1])
        for line in lines
        if line.startswith(names)
    }
    return sum(found.values())


async def _measure(bench: Cluster, operations: int, clients: int) -> tuple[float, float]:
    """Seconds until all are started, and until all have ended."""
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
            await asyncio.sleep(LOOK_EVERY)
        ended = time.perf_counter() - began
    finally:
        for client in connected:
            await client.close()
    return started, ended
