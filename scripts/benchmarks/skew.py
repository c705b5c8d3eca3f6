"""Partitions of very different sizes: one large one among thousands of tiny ones, beside a table of even ones.

Validate is compared with a statement that a person wrote, in one executor's own session; and two executors on this
machine's cores with one of them. It is the same two, of which one is drained in between, the one and the other in turn:
so both JVMs are equally warm.
The statement is timed where it runs, validate from the call to the report. A job for each partition costs what
coordination costs, which the statement has not: an operation that plans the same table, has as many jobs and looks at
nothing is timed in one executor, in turn with the others, and what is held to the statement is what validate takes
beyond it.
Told beside the times: the share of the machine's core time that was used from the call to the report, on both sides,
and the processor time of executors, which other work on the machine changes less.
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
from benchmarks.common import CACHE, Cluster, Look, Result, Row, cluster, install, median, peak, say
from benchmarks.planned import Planned
from benchmarks.statement import VIEW, Statement
from distop.protocol.executor_nodes import NodeState
from distop.protocol.records import TableRecord

REST = 0.2
"""Seconds before each timing: a JVM goes on compiling for a while after a query."""
WARM = 30
"""Rounds before those that count."""
MORE = 1.25
"""With two executors on two cores nothing is to take longer than with one by more than this."""
CORES = len(os.sched_getaffinity(0))

CHECKS: Sequence[validate.Pair] = (
    ({"not_null": "id"}, "id IS NULL"),
    ({"range": {"column": "amount", "min": 0, "max": 1}}, "NOT (amount BETWEEN 0 AND 1)"),
    ({"check": "id % 7 < 7 OR amount < 0"}, "NOT (id % 7 < 7 OR amount < 0)"),
    ({"length": {"column": "code", "min": 8, "max": 8}}, "NOT (length(code) BETWEEN 8 AND 8)"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """What is timed. ``target``: of the ratio to the statement."""

    name: str
    table: str
    checks: Sequence[validate.Pair]
    statistics: str
    target: float | None

    def arg(self) -> dict[str, Any]:
        """Validate's argument. No samples: the statement gives none."""
        return {"checks": [check for check, _ in self.checks], "statistics": self.statistics, "sample": 0}

    def statement(self) -> str:
        """The same checks with exact counts, as a person writes them."""
        return f"SELECT {', '.join(f'count_if({wrong})' for _, wrong in self.checks)} FROM {VIEW}"


CASES = (
    Case("one large among tiny ones, full scan", "skewed", CHECKS, "never", 1.15),
    Case("one large among tiny ones, from statistics", "skewed", many.CHECKS, "auto", None),
    Case("even ones, full scan", "even", validate.SIMPLE, "never", None),
    Case("even ones, from statistics", "even", validate.SIMPLE, "auto", None),
)


@dataclass(slots=True)
class Timings:
    """Of each round: seconds, seconds of processor time, and the share of the cores' time that this is."""

    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    used: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{median(self.seconds):.3f} s ({median(self.used):.0%} of {CORES} cores)"


def run(megabytes: int = 300, tiny: int = 2_000, runs: int = 7) -> Result:
    """Each case ``runs`` times, in turn: the statement, coordination alone, validate by one executor and by two."""
    result = Result("skew", {"megabytes": megabytes, "tiny": tiny, "runs": runs})
    tables = {"skewed": skewed(megabytes, tiny), "even": validate.table(1)}
    with (
        tempfile.TemporaryDirectory(prefix="distop-statement-") as site,
        cluster(2, env=install(Path(site), Statement, Planned)) as bench,
    ):
        result.settings["etcd"] = Look(bench.endpoint).version()
        for name, location in tables.items():
            bench.client.add_table(TableRecord(name, "parquet", str(location)))
        for case in CASES:
            _measure(result, bench, case, tables[case.table], runs)
        result.rows.append(Row("the larger child's memory at its peak, the statements' included", peak(bench), "MB"))
    return result


def _measure(result: Result, bench: Cluster, case: Case, location: Path, runs: int) -> None:
    hand, idle, one, two = Timings(), Timings(), Timings(), Timings()
    by_hand = {"location": str(location), "sql": case.statement(), "listing": False}
    jobs = sum(1 for _ in location.glob("*=*"))
    for n in range(WARM + runs):
        resting = f"bench-{n % 2}"
        bench.client.drain(resting, wait=True, timeout=60)
        plain = _timed(bench, hand, lambda: _report(bench, "statement", case.table, by_hand))
        hand.seconds[-1] = plain["seconds"]
        _timed(bench, idle, lambda: many.coordination(bench, case.table, len(case.checks), jobs))
        found = [_timed(bench, one, lambda: _counts(bench, case))]
        _together(bench, resting)
        found.append(_timed(bench, two, lambda: _counts(bench, case)))
        if any(counts != plain["row"] for counts in found):
            raise RuntimeError(f"{case.name}: distop counts {found}, the statement {plain['row']}")
        if n == WARM - 1:
            hand, idle, one, two = Timings(), Timings(), Timings(), Timings()
    say(f"skew, {case.name}: by hand {hand}, coordination {idle}, one executor {one}, two {two}")
    # Of each round: the machine's pace changes in the minutes between the first and the last.
    beyond = median([mine - other for mine, other in zip(one.seconds, idle.seconds, strict=True)])
    note = f"{beyond:.3f} s beyond {median(idle.seconds):.3f} s of coordination ({one} in all) : by hand {hand}"
    result.rows.append(Row(case.name, beyond / median(hand.seconds), "×", case.target, note=note))
    ratio = median(one.seconds) / median(hand.seconds)
    result.rows.append(Row(f"{case.name}, coordination included", ratio, "×"))
    ratio = median(two.seconds) / median(one.seconds)
    result.rows.append(Row(f"{case.name}, two executors to one", ratio, "×", MORE, note=str(two)))
    spent = [median(timings.processor) for timings in (hand, one, two)]
    note = f"by hand {spent[0]:.2f} s, one executor {spent[1]:.2f} s, two {spent[2]:.2f} s"
    ratio = spent[1] / max(spent[0], 0.01)
    result.rows.append(Row(f"{case.name}, processor time of one executor", ratio, "×", note=note))
    for who, timings in (("by hand", hand), ("coordination", idle), ("one executor", one), ("two executors", two)):
        result.samples |= {f"{case.name}: {who}": timings.seconds, f"{case.name}: {who}, cores": timings.used}


def _together(bench: Cluster, resting: str) -> None:
    bench.client.undrain(resting)
    nodes = bench.client.nodes
    bench.await_that(lambda: all(node.state is NodeState.ACTIVE for node in nodes().values()), "both at work")


def _timed(bench: Cluster, timings: Timings, work: Callable[[], Any]) -> Any:
    """What the work gives, from the call to the report."""
    time.sleep(REST)
    pids = _processes(bench)
    used, began = sum(map(_cpu, pids)), time.perf_counter()
    found = work()
    seconds = time.perf_counter() - began
    processor = sum(map(_cpu, pids)) - used
    timings.seconds.append(seconds)
    timings.processor.append(processor)
    timings.used.append(processor / (seconds * CORES))
    bench.quiet()
    return found


def _processes(bench: Cluster) -> list[int]:
    from tests.support.processes import machine

    return [pid for executor in bench.executors for pid in machine(executor.pid)]


def _cpu(pid: int) -> float:
    """Seconds of processor time that a process has had."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _counts(bench: Cluster, case: Case) -> list[int]:
    report = _report(bench, "validate", case.table, case.arg())
    if any(not check["exact"] for check in report["checks"]):
        raise RuntimeError(f"validate has no exact counts: {str(report)[:1_000]}")
    return [check["violations"] for check in report["checks"]]


def _report(bench: Cluster, type_name: str, table: str, arg: Mapping[str, Any]) -> Any:
    done = bench.client.start_operation(type_name, table, arg).wait(600)
    if done.report is None:
        raise RuntimeError(f"{type_name} ended as {done.state}: {str(done.errors)[:1_000]}")
    return done.report


def skewed(megabytes: int, tiny: int) -> Path:
    """A table with a partition of so many megabytes, and so many of a few kilobytes; made once."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    target = CACHE / f"skewed-{megabytes}-{tiny}"
    if target.exists():
        return target
    say(f"skew: making a table with a partition of {megabytes} MB and {tiny} tiny ones")
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
        some = rows(1_000_000)
        with pq.ParquetWriter(file, some.schema, use_dictionary=False) as writer:
            while not file.stat().st_size > megabytes * 10**6:
                writer.write_table(rows(1_000_000))
        for n in range(tiny):
            (scratch / f"part={n:05d}").mkdir()
            pq.write_table(rows(20), scratch / f"part={n:05d}" / "rows.parquet")
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target
