"""``validate`` of a table of thousands of partitions, each a small file, beside one hand-written statement over it.

A job for each partition costs what coordination costs, which the statement has not: so operations that plan the same
table and have as many jobs with as long answers, but look at no file, are timed in the same run, in turn with both.
What is held to the statement is what validate takes beyond them.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import validate
from benchmarks.common import CACHE, Cluster, Look, Result, Row, cluster, install, median, peak, say
from benchmarks.planned import Planned
from benchmarks.statement import Statement
from benchmarks.validate import REST, TABLE, Case, Subject
from distop.protocol.records import TableRecord

WARM = 15
"""Rounds before those that count."""
CHECKS: validate.Pairs = (
    ({"not_null": "id"}, "id IS NULL"),
    # Not of the floats: statistics leave NaN out, and it is in no range.
    ({"range": {"column": "id", "min": 0, "max": 2**62}}, f"NOT (id BETWEEN 0 AND {2**62})"),
)


def run(partitions: int = 10_000, runs: int = 7) -> Result:
    """The statement, jobs that look at nothing, and validate from statistics, ``runs`` times in turn."""
    result = Result("many", {"partitions": partitions, "runs": runs})
    subject = Subject("parquet", table(partitions), lambda _: None)
    case = Case(f"{partitions:,} partitions, decided from statistics", CHECKS, "auto", 0.1)
    times: dict[str, list[float]] = {"by hand": [], "coordination": [], "distop": []}
    with (
        tempfile.TemporaryDirectory(prefix="distop-statement-") as site,
        cluster(1, env=install(Path(site), Statement, Planned)) as bench,
    ):
        result.settings["etcd"] = Look(bench.endpoint).version()
        bench.client.add_table(TableRecord(TABLE, subject.format, str(subject.location)))
        for n in range(WARM + runs):
            time.sleep(REST)
            expected, hand = validate.by_hand(bench, case, subject)
            time.sleep(REST)
            idle = coordination(bench, TABLE, len(CHECKS), partitions)
            time.sleep(REST)
            found, ours = validate.by_distop(bench, case)
            if found != expected:
                raise RuntimeError(f"{case.name}: distop counts {found}, the statement {expected}")
            if n >= WARM:
                for name, seconds in zip(times, (hand, idle, ours), strict=True):
                    times[name].append(seconds)
        memory = peak(bench)
    result.samples |= times
    hand, idle, ours = (median(seconds) for seconds in times.values())
    say(f"many: distop {ours:.3f} s, its coordination {idle:.3f} s, by hand {hand:.3f} s")
    # Of each round: the machine's pace changes in the minutes between the first and the last.
    differences = [mine - other for mine, other in zip(times["distop"], times["coordination"], strict=True)]
    beyond = median(differences) / hand
    spread = f"{min(differences):.2f} to {max(differences):.2f} s"
    note = f"{ours:.3f} s, less {idle:.3f} s of coordination ({spread}) : {hand:.3f} s"
    result.rows.append(Row(f"{case.name}, beyond coordination", beyond, "×", case.target, note=note))
    result.rows.append(Row("the same, coordination included", ours / hand, "×", note=f"{ours:.3f} : {hand:.3f} s"))
    result.rows.append(Row("its child's memory at its peak", memory, "MB"))
    return result


def coordination(bench: Cluster, table: str, checks: int, jobs: int) -> float:
    """Seconds from the call to the report, of an operation that plans the table and has so many jobs, and looks at
    nothing.
    """
    began = time.perf_counter()
    done = bench.client.start_operation(Planned.type_name, table, {"checks": checks}).wait(600)
    seconds = time.perf_counter() - began
    if done.state != "success" or done.jobs["success"] != jobs:
        raise RuntimeError(f"the operation that looks at nothing ended as {done.state}: {done.jobs}, {done.errors}")
    bench.quiet()
    return seconds


def table(partitions: int) -> Path:
    """The table, made once; beside, and renamed."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    target = CACHE / f"many-{partitions}"
    if target.exists():
        return target
    say(f"many: making a table of {partitions} partitions")
    CACHE.mkdir(exist_ok=True)
    (CACHE / ".gitignore").write_text("*\n")
    chance = np.random.default_rng(1)
    scratch = Path(tempfile.mkdtemp(dir=CACHE))
    try:
        for n in range(partitions):
            rows: dict[str, Any] = {"id": chance.integers(0, 2**62, 20), "amount": chance.random(20)}
            (scratch / f"part={n:06d}").mkdir()
            pq.write_table(pa.table(rows), scratch / f"part={n:06d}" / "rows.parquet")
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target
