"""``validate``, relative to one hand-written Spark SQL statement that makes the same checks with exact counts.

TPC-H lineitem in 84 monthly partitions. The statement runs in the executor's Spark session, equally warm and with the
same settings; its time does not include creating the DataFrame. The time of distop is from the call to the report.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from benchmarks.statement import VIEW, Statement
from distop.protocol.records import TableRecord

TABLE = "tpch.lineitem"
REST = 0.2
"""Seconds of rest before each measurement: after a query a JVM still compiles in the background."""
WARM = 40
"""Warm-up rounds: a JVM compiles a query further for about forty runs, on both sides."""
Pair = tuple[Mapping[str, Any], str]
"""A check, and the SQL condition for the rows that violate it."""
Pairs = Sequence[Pair]

SIMPLE: Sequence[Pair] = (
    ({"not_null": "l_orderkey"}, "l_orderkey IS NULL"),
    ({"not_null": "l_shipdate"}, "l_shipdate IS NULL"),
    ({"range": {"column": "l_quantity", "min": 1, "max": 50}}, "NOT (l_quantity BETWEEN 1 AND 50)"),
    ({"range": {"column": "l_linenumber", "min": 1, "max": 7}}, "NOT (l_linenumber BETWEEN 1 AND 7)"),
)
"""Checks that footers can decide."""

TEN: Sequence[Pair] = (
    *SIMPLE,
    ({"check": "l_shipdate <= l_receiptdate"}, "NOT (l_shipdate <= l_receiptdate)"),
    ({"check": "l_extendedprice * (1 - l_discount) > 0"}, "NOT (l_extendedprice * (1 - l_discount) > 0)"),
    ({"check": "l_quantity < 50 OR l_tax > 0", "name": "taxed"}, "NOT (l_quantity < 50 OR l_tax > 0)"),
    ({"in_set": {"column": "l_returnflag", "values": ["A", "N", "R"]}}, "NOT (l_returnflag IN ('A', 'N', 'R'))"),
    ({"length": {"column": "l_shipmode", "min": 3, "max": 7}}, "NOT (length(l_shipmode) BETWEEN 3 AND 7)"),
    ({"matches": {"column": "l_shipinstruct", "pattern": "^[A-Z ]+$"}}, "NOT (l_shipinstruct RLIKE '^[A-Z ]+$')"),
)
"""``taxed`` is violated, the others hold."""


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison: the checks, whether statistics may decide, and the target ratio."""

    name: str
    checks: Sequence[Pair]
    statistics: str
    target: float
    sql: str = ""
    """The whole statement; if empty, it is made from the conditions."""
    others: Mapping[str, Path] = field(default_factory=dict)
    """Further tables that the statement reads, by name."""

    def arg(self) -> dict[str, Any]:
        """Validate's argument. No samples: the statement gives none."""
        return {"checks": [check for check, _ in self.checks], "statistics": self.statistics, "sample": 0}

    def statement(self) -> str:
        """Hand-written SQL for the same checks, with exact counts."""
        if self.sql:
            return self.sql
        counts = ", ".join(f"count_if({wrong})" for _, wrong in self.checks)
        return f"SELECT {counts} FROM {VIEW}"


CASE_NAMES = ("scan", "ten", "statistics")


def chosen(names: Sequence[str], statistics: str = "statistics") -> list[Case]:
    """The cases of these names. ``statistics``: where the statistics of the table are."""
    cases = {
        "scan": Case("full scan", SIMPLE, "never", 1.15),
        "ten": Case("ten checks, full scan", TEN, "never", 1.15),
        "statistics": Case(f"decided from {statistics}", SIMPLE, "auto", 0.1),
    }
    return [case for name, case in cases.items() if name in names]


@dataclass(frozen=True, slots=True)
class Subject:
    """The table: format, location, how to make its files count as new (``renew``), and the executor's options."""

    format: str
    location: Path
    renew: Callable[[Path], None]
    options: Sequence[str] = ()


def run(scale: float = 1, runs: int = 7, lives: int = 3, cases: Sequence[str] = CASE_NAMES) -> Result:
    """Each case ``runs`` times on both sides in turn, on each of ``lives`` new executors.

    New executors, because the speed of a query differs between JVMs. The result is the median over the executors of the
    ratio of the two medians.
    """
    result = Result("validate", {"scale": scale, "runs": runs, "lives": lives})
    return measure(result, lineitem(scale), chosen(cases))


def lineitem(scale: float) -> Subject:
    """TPC-H lineitem as a folder of Parquet files."""
    return Subject("parquet", table(scale), _touch)


def measure(result: Result, subject: Subject, cases: Sequence[Case], *, warm: int = WARM) -> Result:
    """The cases on one table, like :func:`run`; ``warm``: the number of warm-up rounds."""
    for case in cases:
        executors = range(1, result.settings["lives"] + 1)
        _add_rows(result, case, [_on_new_executor(result, subject, case, n, warm) for n in executors])
    return result


@dataclass(frozen=True, slots=True)
class Medians:
    """The medians on one executor, in seconds."""

    ours: float
    hand: float
    listing: float
    """By hand, including the listing of the files."""
    fresh: float | None
    """Ours on new files, whose footers are not cached."""
    memory: float
    """Peak MB of the executor's child, which also ran the statement."""


def _on_new_executor(result: Result, subject: Subject, case: Case, executor: int, warm: int) -> Medians:
    with (
        tempfile.TemporaryDirectory(prefix="distop-statement-") as site,
        cluster(1, *subject.options, env=install(Path(site), Statement)) as bench,
    ):
        result.settings["etcd"] = EtcdProbe(bench.endpoint).version()
        bench.client.add_table(TableRecord(TABLE, subject.format, str(subject.location)))
        for name, location in case.others.items():
            bench.client.add_table(TableRecord(name, "parquet", str(location)))
        return _compare(result, bench, subject, case, executor, warm)


def _compare(result: Result, bench: Cluster, subject: Subject, case: Case, executor: int, warm: int) -> Medians:
    runs: int = result.settings["runs"]
    hand: list[float] = []
    ours: list[float] = []
    for n in range(warm + runs):
        time.sleep(REST)
        expected, statement_seconds = run_statement(bench, case, subject)
        time.sleep(REST)
        counts, seconds = run_validate(bench, case)
        if counts != expected:
            raise RuntimeError(f"{case.name}: distop counts {counts}, the statement {expected}")
        if n >= warm:
            hand.append(statement_seconds)
            ours.append(seconds)
    listing = [run_statement(bench, case, subject, listing=True)[1] for _ in range(runs)]
    fresh = [_run_uncached(bench, subject, case) for _ in range(runs)] if case.statistics == "auto" else []
    key = f"{case.name}, executor {executor}"
    report_progress(f"{result.benchmark}, {key}: distop {median(ours):.3f} s, by hand {median(hand):.3f} s")
    result.samples |= {f"{key}: distop": ours, f"{key}: by hand": hand, f"{key}: listing": listing}
    return Medians(median(ours), median(hand), median(listing), median(fresh) if fresh else None, peak_memory(bench))


def _run_uncached(bench: Cluster, subject: Subject, case: Case) -> float:
    """Seconds of validate when nothing of the table is cached."""
    subject.renew(subject.location)
    time.sleep(REST)
    return run_validate(bench, case)[1]


def _touch(location: Path) -> None:
    """Touch all files: a touched file counts as new."""
    for file in location.rglob("*.parquet"):
        os.utime(file)


def _add_rows(result: Result, case: Case, executors: Sequence[Medians]) -> None:
    ratios = [one.ours / one.hand for one in executors]
    times = ", ".join(f"{one.ours:.3f} : {one.hand:.3f} s" for one in executors)
    result.rows.append(Row(case.name, median(ratios), "×", case.target, note=times))
    if fresh := [one.fresh / one.listing for one in executors if one.fresh is not None]:
        times = ", ".join(f"{one.fresh:.3f} s" for one in executors if one.fresh is not None)
        result.rows.append(
            Row(f"{case.name}, new files, both with file listing", median(fresh), "×", note=f"distop {times}")
        )
    both = [one.ours / one.listing for one in executors]
    listing = ", ".join(f"{one.listing:.3f} s" for one in executors)
    note = f"by hand with file listing: {listing}"
    result.rows.append(Row(f"{case.name}, both with file listing", median(both), "×", note=note))
    name = f"{case.name}, peak memory of the child, statement included"
    result.rows.append(Row(name, max(one.memory for one in executors), "MB"))


def run_statement(bench: Cluster, case: Case, subject: Subject, *, listing: bool = False) -> tuple[list[int], float]:
    """The counts and the seconds of the statement; ``listing``: including the listing of the files."""
    arg = {
        "location": str(subject.location),
        "format": subject.format,
        "sql": case.statement(),
        "listing": listing,
        "others": {name: str(location) for name, location in case.others.items()},
    }
    done = bench.client.start_operation("statement", TABLE, arg).wait(600)
    if done.report is None:
        raise RuntimeError(f"The statement ended as {done.state}: {str(done.errors)[:1_000]}")
    bench.wait_for_cleanup()
    return done.report["row"], done.report["seconds"]


def run_validate(bench: Cluster, case: Case) -> tuple[list[int], float]:
    """The counts of the report, and the seconds from the call to the report."""
    began = time.perf_counter()
    done = bench.client.start_operation("validate", TABLE, case.arg()).wait(600)
    seconds = time.perf_counter() - began
    if done.report is None or any(not check["exact"] for check in done.report["checks"]):
        why = str(done.errors[0] if done.errors else done.report)[:1_000]
        raise RuntimeError(f"validate ended as {done.state}, without exact counts: {why}")
    bench.wait_for_cleanup()
    return [check["violations"] for check in done.report["checks"]], seconds


def table(scale: float) -> Path:
    """The partitioned table, generated once per scale: in a temporary folder that is renamed when it is complete."""
    target = CACHE / f"lineitem-{scale:g}"
    if not target.exists():
        report_progress(f"validate: generating lineitem at scale {scale:g} in 84 monthly partitions")
        CACHE.mkdir(exist_ok=True)
        (CACHE / ".gitignore").write_text("*\n")
        scratch = Path(tempfile.mkdtemp(dir=CACHE))
        try:
            _partition_lineitem(_generate_lineitem(scratch / "source", scale), scratch / "table").rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _generate_lineitem(directory: Path, scale: float = 1, parts: int = 4) -> Path:
    """TPC-H lineitem, written by ``tpchgen-cli`` as ``parts`` files under ``directory``."""
    tool = Path(sys.executable).with_name("tpchgen-cli")
    command = [str(tool), "parquet", "-s", str(scale), "--tables=lineitem", f"--parts={parts}"]
    subprocess.run([*command, f"--output-dir={directory}"], check=True, capture_output=True)
    return directory


def _partition_lineitem(source: Path, directory: Path) -> Path:
    """Lineitem in 84 partitions ``ship_month=1992-01`` … ``ship_month=1998-12`` by l_shipdate, with one file each."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.dataset as ds

    from tests.support.tables import write_partitions

    table = ds.dataset(sorted(str(p) for p in source.rglob("*.parquet")), format="parquet").to_table()
    plain = [f.with_type(pa.string()) if f.type == pa.string_view() else f for f in table.schema]
    table = table.cast(pa.schema(plain))
    table = table.append_column("ship_month", pc.strftime(table["l_shipdate"], format="%Y-%m"))
    return write_partitions(
        table, directory, ["ship_month"], store_decimal_as_integer=True, use_dictionary=True, compression="snappy"
    )
