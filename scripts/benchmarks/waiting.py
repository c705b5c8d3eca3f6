"""Very many operations that wait for a scheduled time: their cost for the daemons, and how late a due one starts."""

from __future__ import annotations

import asyncio
import os
import time
from datetime import UTC, datetime
from pathlib import Path

import distop
from benchmarks.common import Cluster, EtcdProbe, Result, Row, cluster, percentile, report_progress
from distop import Start
from distop.protocol import keys as K
from distop.store.watch import Batch, Feed

AHEAD = 3_600.0
"""Delay in seconds of the waiting operations: none becomes due during the measurement."""
AT_ONCE = 10_000
"""Waiting operations started by one call."""
SETTLED = 10.0
"""Seconds of rest before the daemons are measured."""
FIRST_DUE, APART = 5.0, 0.1
"""Seconds until the first due operation, and between two of them."""
TICKS = os.sysconf("SC_CLK_TCK")


def run(waiting: int = 100_000, probes: int = 100, seconds: float = 30.0, executors: int = 2) -> Result:
    """The daemons' memory and processor time with ``waiting`` operations; then the lateness of ``probes`` due ones."""
    with cluster(executors) as bench:
        settings = {"waiting": waiting, "probes": probes, "seconds": seconds, "executors": executors}
        result = Result("waiting", {**settings, "etcd": EtcdProbe(bench.endpoint).version()})
        bench.client.start_operation("noop", "@cluster", {}).wait(60)
        bench.wait_for_cleanup()
        time.sleep(SETTLED)
        before = _memory(bench)
        idle = _busy(bench, seconds)
        began = time.perf_counter()
        for n in range(0, waiting, AT_ONCE):
            group = range(n, min(n + AT_ONCE, waiting))
            bench.client.start_operations([Start("noop", "@cluster", {}, options={"delay": AHEAD}) for _ in group])
        inserted = time.perf_counter() - began
        report_progress(f"waiting: {waiting:,} inserted after {inserted:.1f} s")
        time.sleep(SETTLED)
        busy = _busy(bench, seconds)
        memory = _memory(bench) - before
        late = asyncio.run(_late(bench, probes))
    late_ms = [1000 * one for one in late]
    result.samples = {"late": late, "idle_before": idle, "idle": busy}
    result.rows = [
        Row(f"memory of {waiting:,} in all daemons", memory, "MB", 100, note=f"inserted in {inserted:.1f} s"),
        Row("processor time of the busiest daemon", 100 * max(busy), "%", 1),
        Row("the same without waiting operations", 100 * max(idle), "%"),
        Row("lateness of a due operation, p50", percentile(late_ms, 0.50), "ms"),
        Row("the same, p99", percentile(late_ms, 0.99), "ms", 100),
        Row("the same, smallest", min(late_ms), "ms", 0, at_most=False, note="never before its time"),
    ]
    return result


def _memory(bench: Cluster) -> float:
    """The daemons' resident memory in MB."""
    return sum(executor.memory("VmRSS") for executor in bench.executors)


def _busy(bench: Cluster, seconds: float) -> list[float]:
    """The share of one processor that each daemon uses, without its child."""
    before = [_processor_time(executor.pid) for executor in bench.executors]
    time.sleep(seconds)
    return [(_processor_time(one.pid) - then) / seconds for one, then in zip(bench.executors, before, strict=True)]


def _processor_time(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def _late(bench: Cluster, probes: int) -> list[float]:
    """Seconds from each probe's due time until a watch shows its gate."""
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
                raise RuntimeError("The first probe was due before the last one was started")
            async with asyncio.timeout(60 + APART * probes):
                while not due.keys() <= opened.keys():
                    done.clear()
                    await done.wait()
        finally:
            await feed.close()
    return [opened[ref] - moment for ref, moment in due.items()]
