"""Starts per second of one type on one table, while no operation ends.

By one caller, by callers of one client (which share transactions), by callers with separate transactions that race, and
by clients that race.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

import distop
from benchmarks.common import EtcdProbe, Result, Row, median, report_progress
from distop.protocol.behavior_declaration import Declaration
from distop.protocol.records import TableRecord
from distop.protocol.txn import Put, Txn
from distop.services.submission.start_options import StartOptions
from distop.services.submission.start_request import request
from distop.services.submission.submit import submit
from distop.store.embedded import EmbeddedEtcd

CALLERS = 16
CLIENTS = 4
TYPE = "noop"

Start = Callable[[str], Awaitable[object]]
"""Starts an operation on the table of this name."""

_tables = itertools.count()


def run(starts: int = 800, runs: int = 5) -> Result:
    """Alternate all kinds of callers ``runs`` times, each time on a new table; the medians and their ratios."""
    with EmbeddedEtcd() as etcd:
        settings = {"starts": starts, "runs": runs, "etcd": EtcdProbe(etcd.endpoint).version()}
        samples = asyncio.run(_measure(etcd.endpoint, starts, runs))
    one, shared, raced, clients = (median(samples[name]) for name in ("one", "shared", "raced", "clients"))
    rows = [
        Row("one caller", one, "starts/s"),
        Row(f"{CALLERS} concurrent callers of one client", shared, "starts/s"),
        Row("the same, relative to one caller", shared / one, "×"),
        Row(
            f"{CALLERS} racing callers, separate transactions",
            raced,
            "starts/s",
            note=f"like {CALLERS} clients of one caller",
        ),
        Row("the same, relative to one caller", raced / one, "×"),
        Row(f"{CLIENTS} racing clients with {CALLERS} callers each", clients, "starts/s"),
        Row("the same, relative to one caller", clients / one, "×"),
    ]
    return Result("starts", settings, rows, samples)


async def _measure(endpoint: str, starts: int, runs: int) -> dict[str, list[float]]:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(distop.aio.connect(endpoint)) for _ in range(CLIENTS)]
        first = clients[0]
        await first.etcd.commit(Txn((), (Put(first.keys.behavior(TYPE), Declaration(TYPE).encode()),)))

        def start_by(client: distop.aio.Client) -> Start:
            return lambda table: client.start_operation(TYPE, table, {})

        async def start_separately(table: str) -> object:
            start_request = request(TYPE, table, b"{}", StartOptions(), "bench")
            return await submit(first.etcd, first.keys, start_request)

        kinds: dict[str, Sequence[Start]] = {
            "one": [start_by(first)],
            "shared": [start_by(first)] * CALLERS,
            "raced": [start_separately] * CALLERS,
            "clients": [start_by(client) for client in clients for _ in range(CALLERS)],
        }
        samples: dict[str, list[float]] = {name: [] for name in kinds}
        for n in range(-1, runs):  # round -1 is a warm-up
            for name, callers in kinds.items():
                measured = await _run(first, callers, starts)
                if n >= 0:
                    samples[name].append(measured)
            if n >= 0:
                rates = ", ".join(f"{name} {values[-1]:,.0f}" for name, values in samples.items())
                report_progress(f"starts {n + 1}/{runs}: {rates} per second")
        return samples


async def _run(client: distop.aio.Client, callers: Sequence[Start], starts: int) -> float:
    """Starts per second of these callers, which make ``starts`` starts altogether."""
    table = f"bench.starts.{next(_tables)}"
    await client.add_table(TableRecord(table, "parquet", "/nowhere"), check=False)
    each = starts // len(callers)

    async def call(start: Start) -> None:
        for _ in range(each):
            await start(table)

    began = time.perf_counter()
    await asyncio.gather(*map(call, callers))
    seconds = time.perf_counter() - began
    following = await client.etcd.get(client.keys.next_instance(table, TYPE))
    if following is None or int(following.value) != each * len(callers) + 1:
        raise RuntimeError(f"Not every operation on {table} was started exactly once")
    return each * len(callers) / seconds
