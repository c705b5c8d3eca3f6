"""Partitions of very different sizes: one large partition among thousands of tiny ones, and a table of equal ones.

Compares validate with a hand-written statement in an executor's session, and two executors on this machine's cores with
one executor. One of the two executors is drained for the runs with one, alternately, so that both JVMs are equally
warm.

The time of the statement is that of its query, the time of validate is from the call to the report. One job per
partition has coordination costs, which the statement does not have. So an operation that plans the same table and has
as many jobs, but reads no file, is timed in turn with the others on one executor. Its time is subtracted from that of
validate before the comparison with the statement.

Also reported: the share of the machine's processor time that each side used, and the processor time of the executors,
on which other work on the machine has less influence.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import many, validate
from benchmarks.common import (
    CACHE,
    Cluster,
    EtcdProbe,
    Result,
    Row,
    cluster,
    install,
    median,
    peak_memory,
    report_progress,
)
from benchmarks.coordination_only import CoordinationOnly
from benchmarks.statement import VIEW, Statement
from distop.protocol.executor_nodes import NodeState
from distop.protocol.records import TableRecord

REST = 0.2
"""Seconds of rest before each measurement: after a query a JVM still compiles in the background."""
WARM = 30
"""Warm-up rounds."""
TWO_EXECUTORS_TARGET = 1.25
"""Target of the time with two executors on two cores, relative to one executor."""
CORES = len(os.sched_getaffinity(0))

CHECKS: Sequence[validate.Pair] = (
    ({"not_null": "id"}, "id IS NULL"),
    ({"range": {"column": "amount", "min": 0, "max": 1}}, "NOT (amount BETWEEN 0 AND 1)"),
    ({"check": "id % 7 < 7 OR amount < 0"}, "NOT (id % 7 < 7 OR amount < 0)"),
    ({"length": {"column": "code", "min": 8, "max": 8}}, "NOT (length(code) BETWEEN 8 AND 8)"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison. ``target``: of the time relative to the statement."""

    name: str
    table: str
    checks: Sequence[validate.Pair]
    statistics: str
    target: float | None

    def arg(self) -> dict[str, Any]:
        """Validate's argument. No samples: the statement gives none."""
        return {"checks": [check for check, _ in self.checks], "statistics": self.statistics, "sample": 0}

    def statement(self) -> str:
        """Hand-written SQL for the same checks, with exact counts."""
        return f"SELECT {', '.join(f'count_if({wrong})' for _, wrong in self.checks)} FROM {VIEW}"


CASES = (
    Case("one large among tiny ones, full scan", "skewed", CHECKS, "never", 1.15),
    Case("one large among tiny ones, from statistics", "skewed", many.CHECKS, "auto", None),
    Case("equal partitions, full scan", "even", validate.SIMPLE, "never", None),
    Case("equal partitions, from statistics", "even", validate.SIMPLE, "auto", None),
)


@dataclass(slots=True)
class Timings:
    """Per round: seconds, seconds of processor time, and the share of all cores' time."""

    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    used: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{median(self.seconds):.3f} s ({median(self.used):.0%} of {CORES} cores)"


def run(megabytes: int = 300, tiny: int = 2_000, runs: int = 7) -> Result:
    """Each case ``runs`` times, in turn: the statement, coordination, validate by one executor and by two."""
    result = Result("skew", {"megabytes": megabytes, "tiny": tiny, "runs": runs})
    tables = {"skewed": skewed(megabytes, tiny), "even": validate.table(1)}
    with (
        tempfile.TemporaryDirectory(prefix="distop-statement-") as site,
        cluster(2, env=install(Path(site), Statement, CoordinationOnly)) as bench,
    ):
        result.settings["etcd"] = EtcdProbe(bench.endpoint).version()
        for name, location in tables.items():
            bench.client.add_table(TableRecord(name, "parquet", str(location)))
        for case in CASES:
            _measure(result, bench, case, tables[case.table], runs)
        result.rows.append(Row("peak memory of the larger child, statements included", peak_memory(bench), "MB"))
    return result


def _measure(result: Result, bench: Cluster, case: Case, location: Path, runs: int) -> None:
    hand, idle, one, two = Timings(), Timings(), Timings(), Timings()
    by_hand = {"location": str(location), "sql": case.statement(), "listing": False}
    jobs = sum(1 for _ in location.glob("*=*"))
    for n in range(WARM + runs):
        drained = f"bench-{n % 2}"
        bench.client.drain(drained, wait=True, timeout=60)
        answer = _timed(bench, hand, lambda: _report(bench, "statement", case.table, by_hand))
        hand.seconds[-1] = answer["seconds"]
        _timed(bench, idle, lambda: many.coordination(bench, case.table, len(case.checks), jobs))
        all_counts = [_timed(bench, one, lambda: _counts(bench, case))]
        _undrain(bench, drained)
        all_counts.append(_timed(bench, two, lambda: _counts(bench, case)))
        if any(counts != answer["row"] for counts in all_counts):
            raise RuntimeError(f"{case.name}: distop counts {all_counts}, the statement {answer['row']}")
        if n == WARM - 1:
            hand, idle, one, two = Timings(), Timings(), Timings(), Timings()
    report_progress(f"skew, {case.name}: by hand {hand}, coordination {idle}, one executor {one}, two {two}")
    # Differences within each round, because the machine's speed changes during the run.
    work = median([total - overhead for total, overhead in zip(one.seconds, idle.seconds, strict=True)])
    note = f"{work:.3f} s without {median(idle.seconds):.3f} s of coordination (in all {one}) : by hand {hand}"
    result.rows.append(
        Row(f"{case.name}, without coordination", work / median(hand.seconds), "×", case.target, note=note)
    )
    ratio = median(one.seconds) / median(hand.seconds)
    result.rows.append(Row(f"{case.name}, with coordination", ratio, "×"))
    ratio = median(two.seconds) / median(one.seconds)
    result.rows.append(
        Row(f"{case.name}, two executors relative to one", ratio, "×", TWO_EXECUTORS_TARGET, note=str(two))
    )
    spent = [median(timings.processor) for timings in (hand, one, two)]
    note = f"by hand {spent[0]:.2f} s, one executor {spent[1]:.2f} s, two {spent[2]:.2f} s"
    ratio = spent[1] / max(spent[0], 0.01)
    result.rows.append(Row(f"{case.name}, processor time of one executor", ratio, "×", note=note))
    for side, timings in (("by hand", hand), ("coordination", idle), ("one executor", one), ("two executors", two)):
        result.samples |= {f"{case.name}: {side}": timings.seconds, f"{case.name}: {side}, cores": timings.used}


def _undrain(bench: Cluster, drained: str) -> None:
    bench.client.undrain(drained)
    nodes = bench.client.nodes
    bench.wait_for(lambda: all(node.state is NodeState.ACTIVE for node in nodes().values()), "both executors")


def _timed(bench: Cluster, timings: Timings, work: Callable[[], Any]) -> Any:
    """Run ``work`` and add its time to ``timings``; returns its result."""
    time.sleep(REST)
    pids = _processes(bench)
    used, began = sum(map(_cpu, pids)), time.perf_counter()
    returned = work()
    seconds = time.perf_counter() - began
    processor = sum(map(_cpu, pids)) - used
    timings.seconds.append(seconds)
    timings.processor.append(processor)
    timings.used.append(processor / (seconds * CORES))
    bench.wait_for_cleanup()
    return returned


def _processes(bench: Cluster) -> list[int]:
    from tests.support.processes import machine

    return [pid for executor in bench.executors for pid in machine(executor.pid)]


def _cpu(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _counts(bench: Cluster, case: Case) -> list[int]:
    report = _report(bench, "validate", case.table, case.arg())
    if any(not check["exact"] for check in report["checks"]):
        raise RuntimeError(f"The report of validate has no exact counts: {str(report)[:1_000]}")
    return [check["violations"] for check in report["checks"]]


def _report(bench: Cluster, type_name: str, table: str, arg: Mapping[str, Any]) -> Any:
    done = bench.client.start_operation(type_name, table, arg).wait(600)
    if done.report is None:
        raise RuntimeError(f"{type_name} ended as {done.state}: {str(done.errors)[:1_000]}")
    return done.report


def skewed(megabytes: int, tiny: int) -> Path:
    """A table with one partition of ``megabytes`` and ``tiny`` partitions of a few kilobytes; generated once."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    target = CACHE / f"skewed-{megabytes}-{tiny}"
    if target.exists():
        return target
    report_progress(f"skew: generating a table with a partition of {megabytes} MB and {tiny} tiny ones")
    CACHE.mkdir(exist_ok=True)
    (CACHE / ".gitignore").write_text("*\n")
    chance = np.random.default_rng(1)

    def rows(count: int) -> pa.Table:
        numbers = chance.integers(0, 10**8, count)
        codes = pa.array(np.char.zfill(numbers.astype("U8"), 8))
        return pa.table({"id": chance.integers(0, 2**62, count), "amount": chance.random(count), "code": codes})

    scratch = Path(tempfile.mkdtemp(dir=CACHE))
    try:
        (scratch / "part=large").mkdir()
        file = scratch / "part=large" / "rows.parquet"
        with pq.ParquetWriter(file, rows(1_000_000).schema, use_dictionary=False) as writer:
            while not file.stat().st_size > megabytes * 10**6:
                writer.write_table(rows(1_000_000))
        for n in range(tiny):
            (scratch / f"part={n:05d}").mkdir()
            pq.write_table(rows(20), scratch / f"part={n:05d}" / "rows.parquet")
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target
