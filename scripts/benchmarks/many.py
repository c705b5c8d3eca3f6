"""``validate`` on thousands of partitions with one small file each, relative to one hand-written statement.

One job per partition has coordination costs, which the statement does not have. So the run also times operations that
plan the same table and have as many jobs with results of the same size, but read no file. Their time is subtracted from
that of validate before the comparison with the statement.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import validate
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
from benchmarks.statement import Statement
from benchmarks.validate import REST, TABLE, Case, Subject
from distop.protocol.records import TableRecord

WARM = 15
"""Warm-up rounds."""
CHECKS: validate.Pairs = (
    ({"not_null": "id"}, "id IS NULL"),
    # Not on the float column: its statistics ignore NaN, which violates a range.
    ({"range": {"column": "id", "min": 0, "max": 2**62}}, f"NOT (id BETWEEN 0 AND {2**62})"),
)


def run(partitions: int = 10_000, runs: int = 7) -> Result:
    """The statement, jobs that read no file, and validate from statistics, ``runs`` times in turn."""
    result = Result("many", {"partitions": partitions, "runs": runs})
    subject = Subject("parquet", table(partitions), lambda _: None)
    case = Case(f"{partitions:,} partitions, decided from statistics", CHECKS, "auto", 0.1)
    times: dict[str, list[float]] = {"by hand": [], "coordination": [], "distop": []}
    with (
        tempfile.TemporaryDirectory(prefix="distop-statement-") as site,
        cluster(1, env=install(Path(site), Statement, CoordinationOnly)) as bench,
    ):
        result.settings["etcd"] = EtcdProbe(bench.endpoint).version()
        bench.client.add_table(TableRecord(TABLE, subject.format, str(subject.location)))
        for n in range(WARM + runs):
            time.sleep(REST)
            expected, hand = validate.run_statement(bench, case, subject)
            time.sleep(REST)
            idle = coordination(bench, TABLE, len(CHECKS), partitions)
            time.sleep(REST)
            counts, ours = validate.run_validate(bench, case)
            if counts != expected:
                raise RuntimeError(f"{case.name}: distop counts {counts}, the statement {expected}")
            if n >= WARM:
                for name, seconds in zip(times, (hand, idle, ours), strict=True):
                    times[name].append(seconds)
        memory = peak_memory(bench)
    result.samples |= times
    hand, idle, ours = (median(seconds) for seconds in times.values())
    report_progress(f"many: distop {ours:.3f} s, coordination {idle:.3f} s, by hand {hand:.3f} s")
    # Differences within each round, because the machine's speed changes during the run.
    differences = [total - overhead for total, overhead in zip(times["distop"], times["coordination"], strict=True)]
    ratio = median(differences) / hand
    spread = f"{min(differences):.2f} to {max(differences):.2f} s"
    note = f"({ours:.3f} s - {idle:.3f} s; differences {spread}) : {hand:.3f} s"
    result.rows.append(Row(f"{case.name}, without coordination", ratio, "×", case.target, note=note))
    result.rows.append(Row("the same, with coordination", ours / hand, "×", note=f"{ours:.3f} : {hand:.3f} s"))
    result.rows.append(Row("peak memory of the child", memory, "MB"))
    return result


def coordination(bench: Cluster, table: str, checks: int, jobs: int) -> float:
    """Seconds from the call to the report of an operation that plans the table but whose jobs read no file."""
    began = time.perf_counter()
    done = bench.client.start_operation(CoordinationOnly.type_name, table, {"checks": checks}).wait(600)
    seconds = time.perf_counter() - began
    if done.state != "success" or done.jobs["success"] != jobs:
        raise RuntimeError(f"The operation that reads no file ended as {done.state}: {done.jobs}, {done.errors}")
    bench.wait_for_cleanup()
    return seconds


def table(partitions: int) -> Path:
    """The table, generated once: in a temporary folder that is then renamed."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    target = CACHE / f"many-{partitions}"
    if target.exists():
        return target
    report_progress(f"many: generating a table of {partitions} partitions")
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
