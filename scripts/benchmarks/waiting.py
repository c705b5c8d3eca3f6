"""Very many operations that wait for their time: what they cost the daemons, and how late one of them begins."""

from __future__ import annotations

import asyncio
import os
import time
from datetime import UTC, datetime
from pathlib import Path

import distop
from benchmarks.common import Cluster, Look, Result, Row, cluster, percentile, say
from distop import Start
from distop.protocol import keys as K
from distop.store.watch import Batch, Feed

AHEAD = 3_600.0
"""Seconds until the time of those that only wait."""
AT_ONCE = 10_000
"""Of those, so many are started by one call."""
SETTLED = 10.0
"""Seconds for which the daemons are left alone before they are measured."""
FIRST_DUE, APART = 5.0, 0.1
"""Seconds until the first one that is due, and from one to the next."""
TICKS = os.sysconf("SC_CLK_TCK")


def run(waiting: int = 100_000, probes: int = 100, seconds: float = 30.0, executors: int = 2) -> Result:
    """Memory and processor time of the daemons while so many wait; then when those begin whose time comes."""
    with cluster(executors) as bench:
        settings = {"waiting": waiting, "probes": probes, "seconds": seconds, "executors": executors}
        result = Result("waiting", {**settings, "etcd": Look(bench.endpoint).version()})
        bench.client.start_operation("noop", "@cluster", {}).wait(60)
        bench.quiet()
        time.sleep(SETTLED)
        before = _memory(bench)
        idle = _busy(bench, seconds)
        began = time.perf_counter()
        for n in range(0, waiting, AT_ONCE):
            some = range(n, min(n + AT_ONCE, waiting))
            bench.client.start_operations([Start("noop", "@cluster", {}, options={"delay": AHEAD}) for _ in some])
        inserted = time.perf_counter() - began
        say(f"waiting: {waiting:,} inserted after {inserted:.1f} s")
        time.sleep(SETTLED)
        busy = _busy(bench, seconds)
        taken = _memory(bench) - before
        late = asyncio.run(_late(bench, probes))
    late_ms = [1000 * one for one in late]
    result.samples = {"late": late, "idle_before": idle, "idle": busy}
    result.rows = [
        Row(f"{waiting:,} that wait, in all daemons together", taken, "MB", 100, note=f"inserted in {inserted:.1f} s"),
        Row("processor time of the busiest daemon meanwhile", 100 * max(busy), "%", 1),
        Row("the same before they were there", 100 * max(idle), "%"),
        Row("one that is due begins after: p50", percentile(late_ms, 0.50), "ms"),
        Row("p99", percentile(late_ms, 0.99), "ms", 100),
        Row("the earliest", min(late_ms), "ms", 0, at_most=False, note="never before its time"),
    ]
    return result


def _memory(bench: Cluster) -> float:
    """MB that the daemons have resident now."""
    return sum(executor.memory("VmRSS") for executor in bench.executors)


def _busy(bench: Cluster, seconds: float) -> list[float]:
    """The share of one processor that each daemon takes, its child aside."""
    first = [_processor_time(executor.pid) for executor in bench.executors]
    time.sleep(seconds)
    return [(_processor_time(one.pid) - then) / seconds for one, then in zip(bench.executors, first, strict=True)]


def _processor_time(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def _late(bench: Cluster, probes: int) -> list[float]:
    """Seconds from the time of each to its gate, as a watch of the gates shows it."""
    opened: dict[str, float] = {}
    done = asyncio.Event()
    async with distop.aio.connect(bench.endpoint) as client:

        def apply(batch: Batch) -> None:
            now = time.time()
            for event in batch.events:
                ref = client.keys.parse(event.kv.key).ref
                if ref is not None and not event.deleted:
                    opened.setdefault(str(ref), now)
            done.set()

        feed = Feed(client.etcd, *client.keys.family(K.OPEN), apply, name="gates")
        await feed.start()
        try:
            due: dict[str, float] = {}
            first = time.time() + FIRST_DUE + 0.02 * probes
            for n in range(probes):
                moment = datetime.fromtimestamp(round(first + APART * n, 3), UTC)
                operation = await client.start_operation("noop", "@cluster", {}, not_before=moment)
                due[operation.ref] = moment.timestamp()
            if time.time() > first:
                raise RuntimeError("the first one was due before the last one was there")
            async with asyncio.timeout(60 + APART * probes):
                while not due.keys() <= opened.keys():
                    done.clear()
                    await done.wait()
        finally:
            await feed.close()
    return [opened[ref] - moment for ref, moment in due.items()]
