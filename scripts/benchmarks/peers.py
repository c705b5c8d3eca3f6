"""distop beside other systems: no-op jobs (Celery, Temporal, Dagster) and validation (Great Expectations).

Each system has a Python environment of its own, because their dependencies differ from distop's: ``ENVIRONMENTS/NAME``
with its packages (docs/benchmarks.md has the commands). A system that is not installed there is left out. Both sides of
a ratio are measured in one run, one after the other.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from benchmarks import coordination, operations
from benchmarks.common import Cluster, Result, Row, cluster, median, report_progress
from benchmarks.validate import TABLE as LINEITEM
from benchmarks.validate import TEN, Case, Subject, lineitem, run_validate
from distop.protocol.records import TableRecord

ENVIRONMENTS = "~/.cache/distop/peers"
"""The folder of the environments."""
CASES = ("celery", "temporal", "dagster", "gx")
SECONDS = 900
"""Time limit of a peer's program."""
CLIENTS = 4
WARM = 20
"""Warm-up rounds of validation on both sides."""
_PROGRAMS = Path(__file__).with_name("peer_programs")


def run(
    environments: str = ENVIRONMENTS,
    jobs: int = 2_000,
    runs: int = 3,
    scale: float = 1.0,
    cases: tuple[str, ...] = CASES,
) -> Result:
    """Each installed system of ``cases``, ``runs`` times in turn with distop; the medians and their ratios."""
    folder = Path(environments).expanduser()
    result = Result("peers", {"jobs": jobs, "runs": runs, "scale": scale})
    installed = []
    for name in cases:
        if why := missing(folder, name):
            report_progress(f"peers: {name} is left out: {why}")
        else:
            installed.append(name)
    if some := [name for name in installed if name != "gx"]:
        _compare_jobs(result, folder, some, jobs, runs)
    if "gx" in installed:
        _compare_validation(result, folder, scale, runs)
    return result


def missing(folder: Path, name: str) -> str:
    """What a system lacks, or ""."""
    if not (folder / name / "bin/python").exists():
        return f"there is no {folder / name}/bin/python"
    program = {"celery": "redis-server", "temporal": "temporal"}.get(name)
    if program is not None and shutil.which(program, path=_path(folder, name)) is None:
        return f"there is no program {program}"
    return ""


def _path(folder: Path, name: str) -> str:
    return os.pathsep.join([str(folder / name / "bin"), os.environ.get("PATH", "")])


def measure(folder: Path, name: str, **options: Any) -> dict[str, Any]:
    """What the program of a system prints, as JSON. Raises RuntimeError."""
    program = _PROGRAMS / f"{name}_peer.py"
    words = [str(folder / name / "bin/python"), str(program), json.dumps(options)]
    own = {"PATH": _path(folder, name), "PYTHONPATH": "", "VIRTUAL_ENV": ""}
    ran = subprocess.run(words, env={**os.environ, **own}, capture_output=True, text=True, timeout=SECONDS, check=False)
    if ran.returncode != 0:
        raise RuntimeError(f"{name} ended with {ran.returncode}: {ran.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


# ------------------------------------------------------------------- jobs


def _compare_jobs(result: Result, folder: Path, names: list[str], jobs: int, runs: int) -> None:
    """The rates of no-op jobs. distop's are both operations of one job, and one operation of many jobs."""
    single: list[float] = []
    split: list[float] = []
    rates: dict[str, list[float]] = {}
    with cluster(2) as bench:
        bench.client.add_table(TableRecord(coordination.TABLE, "parquet", "/nowhere"), check=False)
        coordination._distop(bench, jobs)
        for n in range(runs):
            split.append(coordination._distop(bench, jobs))
            single.append(_operations(bench, jobs))
            for name in names:
                for what, rate in measure(folder, name, jobs=jobs, clients=CLIENTS, processes=2).items():
                    rates.setdefault(f"{name}: {what}", []).append(rate)
            report_progress(f"peers {n + 1}/{runs}: {single[-1]:,.0f} operations, {split[-1]:,.0f} jobs per second")
    result.samples |= {"distop: operations": single, "distop: jobs": split, **rates}
    result.rows += [
        Row("distop: operations of one no-op job", median(single), "ops/s"),
        Row("distop: no-op jobs of one operation", median(split), "jobs/s"),
    ]
    for what, found in rates.items():
        ours = split if "of one" in what else single
        result.rows.append(Row(what, median(found), "a second"))
        result.rows.append(Row("  distop relative to it", median(ours) / median(found), "×"))


def _operations(bench: Cluster, count: int) -> float:
    _, ended = asyncio.run(operations._measure(bench, count, CLIENTS))
    bench.wait_for_cleanup()
    return count / ended


# -------------------------------------------------------------- validation


def _compare_validation(result: Result, folder: Path, scale: float, runs: int) -> None:
    """The ten checks of ``validate`` on the same table. Each side has its own Spark with the same cores."""
    subject: Subject = lineitem(scale)
    case = Case("ten checks", TEN, "never", 1.15)
    found = measure(folder, "gx", location=str(subject.location), statement=case.statement(), runs=runs, warm=WARM)
    ours: list[float] = []
    with cluster(1, *subject.options) as bench:
        bench.client.add_table(TableRecord(LINEITEM, subject.format, str(subject.location)))
        for n in range(WARM + runs):
            counts, seconds = run_validate(bench, case)
            if n >= WARM:
                ours.append(seconds)
    if counts != found["counts"]:
        raise RuntimeError(f"distop counts {counts} violations, Great Expectations {found['counts']}")
    result.samples |= {"distop: validate": ours, "gx: validate": found["seconds"], "gx: statement": found["by_hand"]}
    theirs = median(found["seconds"])
    times = f"{median(ours):.3f} : {theirs:.3f} s"
    result.rows += [
        Row("Great Expectations, ten checks, relative to a statement by hand", theirs / median(found["by_hand"]), "×"),
        Row("distop, ten checks, relative to Great Expectations", median(ours) / theirs, "×", note=times),
    ]
