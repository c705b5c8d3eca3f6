"""``validate`` beside one hand-written Spark SQL statement that makes the same checks and counts exactly.

TPC-H lineitem in 84 monthly partitions. The hand-written statement runs in the executor's own session, so as warm and
with the same settings, and is timed there; its DataFrame is made outside the timing. What distop takes is timed from
the call to the report.
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

from benchmarks.common import CACHE, Cluster, Look, Result, Row, cluster, install, median, peak, say
from benchmarks.statement import VIEW, Statement
from distop.protocol.records import TableRecord

TABLE = "tpch.lineitem"
REST = 0.2
"""Seconds before each timing: a JVM goes on compiling for a while after a query, on the cores of what comes next."""
WARM = 40
"""Rounds before those that count: a JVM goes on compiling a query for about forty runs of it, on both sides alike."""
Pair = tuple[Mapping[str, Any], str]
"""A check, and the SQL condition of the rows that violate it."""
Pairs = Sequence[Pair]

SIMPLE: Sequence[Pair] = (
    ({"not_null": "l_orderkey"}, "l_orderkey IS NULL"),
    ({"not_null": "l_shipdate"}, "l_shipdate IS NULL"),
    ({"range": {"column": "l_quantity", "min": 1, "max": 50}}, "NOT (l_quantity BETWEEN 1 AND 50)"),
    ({"range": {"column": "l_linenumber", "min": 1, "max": 7}}, "NOT (l_linenumber BETWEEN 1 AND 7)"),
)
"""Footers can decide all of these."""

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
    """What is compared: the checks, whether statistics may decide, and the ratio to reach."""

    name: str
    checks: Sequence[Pair]
    statistics: str
    target: float
    sql: str = ""
    """The whole statement, where it is not made of the conditions."""
    others: Mapping[str, Path] = field(default_factory=dict)
    """More tables, which have their names in the statement as well."""

    def arg(self) -> dict[str, Any]:
        """Validate's argument. No samples: the statement gives none."""
        return {"checks": [check for check, _ in self.checks], "statistics": self.statistics, "sample": 0}

    def statement(self) -> str:
        """The same checks with exact counts, as a person writes them."""
        if self.sql:
            return self.sql
        counts = ", ".join(f"count_if({wrong})" for _, wrong in self.checks)
        return f"SELECT {counts} FROM {VIEW}"


CASES = (
    Case("full scan", SIMPLE, "never", 1.15),
    Case("ten checks, full scan", TEN, "never", 1.15),
    Case("decided from statistics", SIMPLE, "auto", 0.1),
)


@dataclass(frozen=True, slots=True)
class Subject:
    """The table: what its record says, how it becomes one that was not seen before, and its executor's options."""

    format: str
    location: Path
    renew: Callable[[Path], None]
    options: Sequence[str] = ()


def run(scale: float = 1, runs: int = 7, lives: int = 3) -> Result:
    """Each case ``runs`` times, alternating, in each of ``lives`` of an executor that did nothing before: what a JVM
    makes of a query is decided anew in each. The ratio is that of the medians, and of those of the lives the median.
    """
    result = Result("validate", {"scale": scale, "runs": runs, "lives": lives})
    return measure(result, lineitem(scale), CASES)


def lineitem(scale: float) -> Subject:
    """TPC-H lineitem as a folder of Parquet files."""
    return Subject("parquet", table(scale), _touch)


def measure(result: Result, subject: Subject, cases: Sequence[Case], *, warm: int = WARM) -> Result:
    """The cases on one table, as :func:`run` has them; ``warm``: rounds before those that count."""
    for case in cases:
        _conclude(result, case, [_life(result, subject, case, n + 1, warm) for n in range(result.settings["lives"])])
    return result


@dataclass(frozen=True, slots=True)
class Medians:
    """Of one life, in seconds."""

    ours: float
    hand: float
    listing: float
    fresh: float | None
    """Ours, of files that were not seen before."""
    memory: float
    """MB of the executor's child at its peak; what the statement took is in it."""


def _life(result: Result, subject: Subject, case: Case, life: int, warm: int) -> Medians:
    with (
        tempfile.TemporaryDirectory(prefix="distop-statement-") as site,
        cluster(1, *subject.options, env=install(Path(site), Statement)) as bench,
    ):
        result.settings["etcd"] = Look(bench.endpoint).version()
        bench.client.add_table(TableRecord(TABLE, subject.format, str(subject.location)))
        for name, place in case.others.items():
            bench.client.add_table(TableRecord(name, "parquet", str(place)))
        return _compare(result, bench, subject, case, life, warm)


def _compare(result: Result, bench: Cluster, subject: Subject, case: Case, life: int, warm: int) -> Medians:
    runs: int = result.settings["runs"]
    hand: list[float] = []
    ours: list[float] = []
    for n in range(warm + runs):
        time.sleep(REST)
        expected, plain = by_hand(bench, case, subject)
        time.sleep(REST)
        found, seconds = by_distop(bench, case)
        if found != expected:
            raise RuntimeError(f"{case.name}: distop counts {found}, the statement {expected}")
        if n >= warm:
            hand.append(plain)
            ours.append(seconds)
    listing = [by_hand(bench, case, subject, listing=True)[1] for _ in range(runs)]
    fresh = [_unseen(bench, subject, case) for _ in range(runs)] if case.statistics == "auto" else []
    say(f"{result.benchmark}, {case.name}, life {life}: distop {median(ours):.3f} s, by hand {median(hand):.3f} s")
    key = f"{case.name}, life {life}"
    result.samples |= {f"{key}: distop": ours, f"{key}: by hand": hand, f"{key}: listing": listing}
    return Medians(median(ours), median(hand), median(listing), median(fresh) if fresh else None, peak(bench))


def _unseen(bench: Cluster, subject: Subject, case: Case) -> float:
    """Seconds where nothing of the table is remembered."""
    subject.renew(subject.location)
    time.sleep(REST)
    return by_distop(bench, case)[1]


def _touch(location: Path) -> None:
    """Each file counts as another one once it is touched."""
    for file in location.rglob("*.parquet"):
        os.utime(file)


def _conclude(result: Result, case: Case, lives: Sequence[Medians]) -> None:
    ratios = [one.ours / one.hand for one in lives]
    times = ", ".join(f"{one.ours:.3f} : {one.hand:.3f} s" for one in lives)
    result.rows.append(Row(case.name, median(ratios), "×", case.target, note=times))
    if fresh := [one.fresh / one.listing for one in lives if one.fresh is not None]:
        times = ", ".join(f"{one.fresh:.3f} s" for one in lives if one.fresh is not None)
        result.rows.append(
            Row(f"{case.name}, files not seen before, the listing on both sides", median(fresh), "×", note=times)
        )
    both = [one.ours / one.listing for one in lives]
    listing = ", ".join(f"{one.listing:.3f} s" for one in lives)
    note = f"by hand, with the listing: {listing}"
    result.rows.append(Row(f"{case.name}, the listing on both sides", median(both), "×", note=note))
    name = f"{case.name}, the child's memory at its peak, the statement's included"
    result.rows.append(Row(name, max(one.memory for one in lives), "MB"))


def by_hand(bench: Cluster, case: Case, subject: Subject, *, listing: bool = False) -> tuple[list[int], float]:
    """The statement's counts and seconds; ``listing``: making its DataFrame is inside."""
    arg = {
        "location": str(subject.location),
        "format": subject.format,
        "sql": case.statement(),
        "listing": listing,
        "others": {name: str(place) for name, place in case.others.items()},
    }
    done = bench.client.start_operation("statement", TABLE, arg).wait(600)
    if done.report is None:
        raise RuntimeError(f"the statement ended as {done.state}: {str(done.errors)[:1_000]}")
    bench.quiet()
    return done.report["row"], done.report["seconds"]


def by_distop(bench: Cluster, case: Case) -> tuple[list[int], float]:
    """The report's counts, and the seconds from the call to the report."""
    began = time.perf_counter()
    done = bench.client.start_operation("validate", TABLE, case.arg()).wait(600)
    seconds = time.perf_counter() - began
    if done.report is None or any(not check["exact"] for check in done.report["checks"]):
        why = str(done.errors[0] if done.errors else done.report)[:1_000]
        raise RuntimeError(f"validate ended as {done.state}, without exact counts: {why}")
    bench.quiet()
    return [check["violations"] for check in done.report["checks"]], seconds


def table(scale: float) -> Path:
    """The laid-out table, made once for each scale: written beside and renamed, so that none is left half made."""
    target = CACHE / f"lineitem-{scale:g}"
    if not target.exists():
        say(f"validate: making lineitem at scale {scale:g} in 84 monthly partitions")
        CACHE.mkdir(exist_ok=True)
        (CACHE / ".gitignore").write_text("*\n")
        scratch = Path(tempfile.mkdtemp(dir=CACHE))
        try:
            _lay_out_lineitem(_generated_lineitem(scratch / "source", scale), scratch / "table").rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _generated_lineitem(directory: Path, scale: float = 1, parts: int = 4) -> Path:
    """TPC-H lineitem as ``tpchgen-cli`` writes it: ``parts`` files under ``directory``."""
    tool = Path(sys.executable).with_name("tpchgen-cli")
    command = [str(tool), "parquet", "-s", str(scale), "--tables=lineitem", f"--parts={parts}"]
    subprocess.run([*command, f"--output-dir={directory}"], check=True, capture_output=True)
    return directory


def _lay_out_lineitem(source: Path, directory: Path) -> Path:
    """Lineitem as 84 partitions ``ship_month=1992-01`` … ``ship_month=1998-12`` by l_shipdate, a file in each."""
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
