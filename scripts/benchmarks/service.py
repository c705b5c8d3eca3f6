"""The same calls through a service and directly: latency, starts per second, and many concurrent waits and watches.

The service, etcd, one executor and the clients run on this machine. gRPC without TLS and identities. A gRPC service
without content is the base line (``bare_grpc``).
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

import distop
from benchmarks import bare_grpc
from benchmarks.common import PROGRAM, STOP_SECONDS, Result, Row, cluster, median, percentile, report_progress
from benchmarks.page import page_rows
from distop.protocol.records import TableRecord

CALLERS = 16
WARM = 20
WATCHES = 1_000
HOLD = 10.0
"""Seconds for which the watched operation lasts, so that all watches stand when it ends."""


def run(runs: int = 200, starts: int = 800, rounds: int = 5) -> Result:
    """Operations in turn by both clients, then starts by both, then the watches."""
    with cluster(1) as bench, _service(bench.endpoint) as (url, pid), bare_grpc.bare_service() as address:
        measured = asyncio.run(_measure(bench.endpoint, url, pid, runs, starts, rounds))
        bare, bare_rate, bare_answers = asyncio.run(_measure_bare(address, runs, starts))
    direct, through, rates, waits, watches, memory = measured
    ratio = median([ours / theirs for theirs, ours in rates])
    added = 1000 * (percentile(through, 0.5) - percentile(direct, 0.5))
    rows = [
        Row("operation through the service, p50", 1000 * percentile(through, 0.5), "ms"),
        Row("the same, more than directly", added, "ms", 1.5, note=f"directly {1000 * percentile(direct, 0.5):.1f} ms"),
        Row(
            f"starts of {CALLERS} callers, relative to the direct client",
            ratio,
            "×",
            0.7,
            at_most=False,
            note=", ".join(f"{ours:,.0f} : {theirs:,.0f}/s" for theirs, ours in rates),
        ),
        Row(f"{WATCHES} waits: after a direct one, p99", 1000 * percentile(waits, 0.99), "ms", 100),
        Row(f"{WATCHES} watches: after a direct wait, p99", 1000 * percentile(watches, 0.99), "ms", 100),
        Row(f"{WATCHES} watches: memory of the service", memory / 1e6, "MB", 200),
        Row("base line: a gRPC call without content, p50", 1000 * percentile(bare, 0.5), "ms"),
        Row(f"base line: such calls of {CALLERS} callers", bare_rate, "calls/s"),
        Row(f"base line: {WATCHES} such calls end at one event, p99", 1000 * percentile(bare_answers, 0.99), "ms"),
    ]
    rows += page_rows()
    samples = {"direct": direct, "through": through, "waits": waits, "watches": watches, "bare": bare}
    return Result("service", {"runs": runs, "starts": starts, "rounds": rounds, "watches": WATCHES}, rows, samples)


async def _measure_bare(address: str, calls: int, many: int) -> tuple[list[float], float, list[float]]:
    async with grpc.aio.insecure_channel(address) as channel:
        await bare_grpc.call_times(channel, WARM)
        times = await bare_grpc.call_times(channel, calls)
        rate = await bare_grpc.calls_per_second(channel, CALLERS, many)
        return times, rate, await bare_grpc.answer_times(channel, WATCHES)


@contextmanager
def _service(endpoint: str) -> Iterator[tuple[str, int]]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*PROGRAM, "serve", "--etcd", endpoint, "--listen", "127.0.0.1:0"], stdout=out, stderr=out
            )
        try:
            while not (found := re.search(r"Serving gRPC on (\S+)", log.read_text())):
                if process.poll() is not None:
                    raise RuntimeError(log.read_text())
                time.sleep(0.05)
            yield f"grpc://{found[1]}", process.pid
        finally:
            process.terminate()
            process.wait(STOP_SECONDS)


async def _measure(
    endpoint: str, url: str, pid: int, runs: int, starts: int, rounds: int
) -> tuple[list[float], list[float], list[tuple[float, float]], list[float], list[float], float]:
    async with distop.aio.connect(endpoint) as direct, distop.aio.connect(url) as remote:
        times: tuple[list[float], list[float]] = ([], [])
        for n in range(WARM + runs):
            for client, kept in zip((direct, remote), times, strict=True):
                began = time.perf_counter()
                await (await client.start_operation("noop", "@cluster", {})).wait(60)
                if n >= WARM:
                    kept.append(time.perf_counter() - began)
                await asyncio.sleep(0.02)  # let its cleanup finish
        report_progress(f"service: {median(times[0]):.4f} s directly, {median(times[1]):.4f} s through the service")
        rates = []
        for n in range(-1, rounds):  # round -1 is a warm-up
            pair = [
                await _starts(direct, client, starts, f"bench.{n}.{i}") for i, client in enumerate((direct, remote))
            ]
            if n >= 0:
                rates.append((pair[0], pair[1]))
                report_progress(f"service: starts per second: directly {pair[0]:,.0f}, through it {pair[1]:,.0f}")
        waits = await _watch(direct, remote, _wait)
        watches = await _watch(direct, remote, _follow)
        return *times, rates, waits, watches, _resident(pid)


async def _starts(direct: distop.aio.Client, client: distop.aio.Client, starts: int, table: str) -> float:
    """Starts per second of operations that do not begin within this benchmark."""
    await direct.add_table(TableRecord(table, "parquet", "/nowhere"), check=False)

    async def call() -> None:
        for _ in range(starts // CALLERS):
            await client.start_operation("noop", table, {}, delay=86_400.0)

    began = time.perf_counter()
    await asyncio.gather(*(call() for _ in range(CALLERS)))
    return starts / (time.perf_counter() - began)


async def _wait(handle: distop.aio.Operation) -> None:
    await handle.wait(HOLD + 60)


async def _follow(handle: distop.aio.Operation) -> None:
    async for _ in handle.watch():
        pass


async def _watch(
    direct: distop.aio.Client, remote: distop.aio.Client, call: Callable[[distop.aio.Operation], Awaitable[None]]
) -> list[float]:
    """Seconds by which the calls through the service end after a direct wait."""
    op = await direct.start_operation("noop", "@cluster", {"sleep": HOLD})

    async def ended(handle: distop.aio.Operation, call: Callable[[distop.aio.Operation], Awaitable[None]]) -> float:
        await call(handle)
        return time.perf_counter()

    others = (ended(remote.operation(op.ref), call) for _ in range(WATCHES))
    first, *found = await asyncio.gather(ended(op, _wait), *others)
    return [one - first for one in found]


def _resident(pid: int) -> float:
    """The resident memory of a process in bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return float(pages * os.sysconf("SC_PAGE_SIZE"))
