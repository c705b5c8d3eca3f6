"""Starts a second of one type on one table, where nothing ends meanwhile: by one caller, by callers of one client that
share transactions, by callers that race, and by clients that race.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

import distop
from benchmarks.common import Look, Result, Row, median, say
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
    """Alternate all of them ``runs`` times, each on a table of its own; the medians and their ratios."""
    with EmbeddedEtcd() as etcd:
        settings = {"starts": starts, "runs": runs, "etcd": Look(etcd.endpoint).version()}
        samples = asyncio.run(_measure(etcd.endpoint, starts, runs))
    one, shared, raced, clients = (median(samples[name]) for name in ("one", "shared", "raced", "clients"))
    rows = [
        Row("one caller, one after the other", one, "starts/s"),
        Row(f"{CALLERS} callers of one client at once", shared, "starts/s"),
        Row("of one caller", shared / one, "×"),
        Row(f"{CALLERS} callers that share nothing, and race", raced, "starts/s", note="as many clients of one caller"),
        Row("of one caller", raced / one, "×"),
        Row(f"{CLIENTS} clients of {CALLERS} callers each, that race", clients, "starts/s"),
        Row("of one caller", clients / one, "×"),
    ]
    return Result("starts", settings, rows, samples)


async def _measure(endpoint: str, starts: int, runs: int) -> dict[str, list[float]]:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(distop.aio.connect(endpoint)) for _ in range(CLIENTS)]
        first = clients[0]
        await first.etcd.commit(Txn((), (Put(first.keys.behavior(TYPE), Declaration(TYPE).encode()),)))

        def of(client: distop.aio.Client) -> Start:
            return lambda table: client.start_operation(TYPE, table, {})

        async def alone(table: str) -> object:
            wanted = request(TYPE, table, b"{}", StartOptions(), "bench")
            return await submit(first.etcd, first.keys, wanted)

        kinds: dict[str, Sequence[Start]] = {
            "one": [of(first)],
            "shared": [of(first)] * CALLERS,
            "raced": [alone] * CALLERS,
            "clients": [of(client) for client in clients for _ in range(CALLERS)],
        }
        samples: dict[str, list[float]] = {name: [] for name in kinds}
        for n in range(-1, runs):  # the first round warms
            for name, callers in kinds.items():
                measured = await _run(first, callers, starts)
                if n >= 0:
                    samples[name].append(measured)
            if n >= 0:
                told = ", ".join(f"{name} {values[-1]:,.0f}" for name, values in samples.items())
                say(f"starts {n + 1}/{runs}: {told} a second")
        return samples


async def _run(client: distop.aio.Client, callers: Sequence[Start], starts: int) -> float:
    """Starts a second of these callers, who have so many to make between them."""
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
        raise RuntimeError(f"not all of the operations on {table} were started, or one of them twice")
    return each * len(callers) / seconds
