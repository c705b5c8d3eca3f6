"""The cost of very many policies for one daemon when nothing is due."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

import distop
from benchmarks.common import Cluster, EtcdProbe, Result, Row, child_processes, cluster, report_progress
from distop.protocol.policy import SeenPolicy, set_policies
from distop.protocol.records import TableRecord
from distop.protocol.txn import Get

AT_ONCE = 16
"""Tables that are registered concurrently. Policies are made one table at a time: their transactions conflict."""
SECONDS = 30.0
"""How long the processor time is measured."""
SETTLED = 10.0
"""Seconds of rest before the daemon is measured."""
NEW = SeenPolicy(None, 0)
EVALUATED_SECONDS = 1_800.0
TICKS = os.sysconf("SC_CLK_TCK")


def measure(result: Result, folder: Path, tables: int) -> None:
    """One executor with ``tables`` Delta tables: by version, by clock, and by event."""
    locations = _tables(folder, tables)
    with cluster(1) as bench:
        bench.client.start_operation("noop", "@cluster", {}).wait(60)
        bench.wait_for_cleanup()
        time.sleep(SETTLED)
        (daemon,) = bench.executors
        before, without = daemon.memory("VmRSS"), _busy(bench)
        began = time.perf_counter()
        asyncio.run(_register(bench.endpoint, locations))
        report_progress(f"maintenance: {tables:,} tables registered after {time.perf_counter() - began:.0f} s")
        began = time.perf_counter()
        bench.wait_for(lambda: _evaluated(bench, 2 * tables), "the first evaluations", EVALUATED_SECONDS)
        evaluated = time.perf_counter() - began
        report_progress(f"maintenance: all evaluated after {evaluated:.0f} s")
        time.sleep(SETTLED)
        busy, after, peak = _busy(bench), daemon.memory("VmRSS"), daemon.memory("VmHWM")
        size = EtcdProbe(bench.endpoint).db_size() / 1e6
    what = f"{3 * tables:,} policies of {tables:,} tables"
    note = f"{before:.0f} MB before, {after:.0f} MB after, {peak:.0f} MB at its peak"
    result.rows += [
        Row(f"{what}, memory of the daemon", after - before, "MB", 100, note=note),
        Row("the same, processor time of the daemon", 100 * busy[0], "%", 2, note=f"{100 * without[0]:.2f} % without"),
        Row("the same, processor time of its child", 100 * busy[1], "%", note=f"{100 * without[1]:.2f} % without"),
        Row("the same, until all were evaluated", evaluated, "s"),
        Row("the same, etcd's file", size, "MB"),
    ]


def _tables(folder: Path, tables: int) -> list[Path]:
    from deltalake import write_deltalake

    write_deltalake(folder / "original", pa.table({"k": [1]}))
    return [Path(shutil.copytree(folder / "original", folder / f"t{n}")) for n in range(tables)]


async def _register(endpoint: str, locations: list[Path]) -> None:
    """Register the tables with three policies each, none of which starts an operation.

    The first table's policies are made by the client, which checks them. The others are copies.
    """
    left = list(enumerate(locations))
    mods: dict[str, int] = {}
    async with distop.aio.connect(endpoint) as client:
        etcd, keys = client.etcd, client.keys

        async def some() -> None:
            while left:
                n, location = left.pop()
                name = f"idle.t{n}"
                await client.add_table(TableRecord(name, "delta", str(location)), check=False)
                (record,) = await etcd.read(Get(keys.table(name)))
                assert record.kv is not None
                mods[name] = record.kv.mod_revision

        await asyncio.gather(*(some() for _ in range(AT_ONCE)))
        (first, *others) = mods
        await client.set_policy(
            "compact", first, "compact", on="version", when="small_files > 50 or delete_ratio > 0.1"
        )
        when = "snapshots > 10 and oldest_snapshot > 5d"
        await client.set_policy("expire", first, "expire-snapshots", every="1d", when=when)
        await client.set_policy("check", first, "validate", {"checks": [{"not_null": "k"}]}, on="event:loaded")
        made = {one.name: one.policy for one in await client.policies(first) if one.policy is not None}
        (found,) = await etcd.read(Get(keys.policy_mark()))
        assert found.kv is not None
        mark = found.kv.mod_revision
        for name in others:
            new = {one: (replace(policy, uid=uuid.uuid4().hex), NEW) for one, policy in made.items()}
            result = await etcd.commit(set_policies(keys, name, new, mark, mods[name]))
            if not result.succeeded:
                raise RuntimeError(f"The policies of {name} were not made: another client makes policies")
            mark = result.revision


def _evaluated(bench: Cluster, count: int) -> bool:
    """Whether this many policies have an evaluation. A listing of all policies is expensive, so it rests between."""
    time.sleep(5)
    return sum(bool(one.state.kept) for one in bench.client.policies()) >= count


def _busy(bench: Cluster) -> tuple[float, float]:
    """The shares of one processor that the daemon and its child use."""
    (daemon,) = bench.executors
    child = child_processes(daemon)
    before = _processor_time(daemon.pid), sum(map(_processor_time, child))
    time.sleep(SECONDS)
    after = _processor_time(daemon.pid), sum(map(_processor_time, child))
    return (after[0] - before[0]) / SECONDS, (after[1] - before[1]) / SECONDS


def _processor_time(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS
