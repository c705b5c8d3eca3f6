"""Maintenance of tables, relative to the procedures of Iceberg and Delta, and to ``cp -r``.

Each side has its own executor, so its own JVM with equal settings, and its own copy of the table for each run. The runs
alternate. The time of distop is from the call to the report. The time of a procedure is that of its statement alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import bucket_export, compaction, delta, iceberg, idle_policies, maintained_tables, purging
from benchmarks.common import (
    Cluster,
    Executor,
    Result,
    Row,
    child_memory,
    cluster,
    install,
    median,
    report_progress,
)
from benchmarks.procedure import Procedure
from distop.protocol.records import TableRecord

CASES = ("compact", "kill", "expire", "orphans", "purge", "export", "bucket", "policies")
WARM = 2
"""Rounds before the measurement."""
OLD_COMMITS = 60
ORPHANS = 5_000
DELTA_SESSION = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}
SHORT_AGE = {"older_than": 0, "allow_recent": True}


def run(scale: float = 0.2, runs: int = 3, tables: int = 10_000, cases: Sequence[str] = CASES) -> Result:
    """Each case beside its peer."""
    result = Result("maintenance", {"scale": scale, "runs": runs, "tables": tables})
    measure: Mapping[str, Callable[[Path], None]] = {
        "compact": lambda folder: compaction.measure(result, folder, scale, runs),
        "kill": lambda folder: compaction.measure_killed(result, folder, scale, runs),
        "expire": lambda folder: _expire(result, folder, runs),
        "orphans": lambda folder: _orphans(result, folder, runs),
        "purge": lambda folder: purging.measure(result, folder, runs),
        "export": lambda folder: _export(result, folder, scale, runs),
        "bucket": lambda folder: bucket_export.measure(result, folder, runs),
        "policies": lambda folder: idle_policies.measure(result, folder, tables),
    }
    for case in CASES:
        if case in cases:
            with tempfile.TemporaryDirectory(prefix="distop-maintenance-") as folder:
                measure[case](Path(folder))
    return result


@dataclass(frozen=True, slots=True)
class _Sides:
    """An executor with distop's types, and one that runs statements of the format in an equal session."""

    bench: Cluster
    form: str
    ours: Executor
    theirs: Executor

    def distop(self, kind: str, location: Path, arg: Mapping[str, Any]) -> tuple[float, Any]:
        """The seconds from the call to the report, and the report."""
        name = self._register(location)
        began = time.perf_counter()
        done = self.bench.client.start_operation(kind, name, arg).wait(600)
        seconds = time.perf_counter() - began
        if done.state != "success":
            raise RuntimeError(f"{kind} ended as {done.state}: {str(done.errors or done.report)[:1_000]}")
        self._forget(name)
        return seconds, done.report

    def statement(self, sql: str, location: Path) -> float:
        """The seconds of a statement, in which ``{t}`` is the table."""
        name = self._register(location)
        path = f"delta.`{location}`" if self.form == "delta" else f"'db.{location.name}'"
        done = self.bench.client.start_operation("procedure", name, {"sql": sql.format(t=path)}).wait(600)
        if done.report is None:
            raise RuntimeError(f"The statement ended as {done.state}: {str(done.errors)[:1_000]}")
        self._forget(name)
        return float(done.report["seconds"])

    def _register(self, location: Path) -> str:
        name = f"bench.{location.name}"
        self.bench.client.add_table(TableRecord(name, self.form, str(location)))
        return name

    def _forget(self, name: str) -> None:
        self.bench.wait_for_cleanup()
        self.bench.client.remove_table(name)


@contextmanager
def _sides(form: str, kind: str, warehouse: Path, more: Mapping[str, str] | None = None) -> Iterator[_Sides]:
    """Two executors. ``more``: further settings of the statements' session."""
    lake = {"delta": delta.FORMAT, "iceberg": iceberg.FORMAT}[form]
    catalog = {"": "org.apache.iceberg.spark.SparkCatalog", ".type": "hadoop", ".warehouse": str(warehouse)}
    named = {f"spark.sql.catalog.lake{name}": value for name, value in catalog.items()}
    settings = {**(DELTA_SESSION if form == "delta" else named), **(more or {})}
    given = [part for name, value in settings.items() for part in ("--spark-conf", f"{name}={value}")]
    with tempfile.TemporaryDirectory(prefix="distop-procedure-") as site, cluster(0) as bench:
        env = install(Path(site), Procedure)
        ours = ("distop", "--types", kind, *lake.options())
        theirs = ("statements", "--types", Procedure.type_name, *lake.options(), *given)
        for name, *options in (ours, theirs):
            bench.executors.append(Executor(bench.endpoint, bench.folder, name, *options, env=env))
        bench.wait_for(lambda: len(bench.client.nodes()) == len(bench.executors), "both executors")
        yield _Sides(bench, form, *bench.executors)


def _expire(result: Result, folder: Path, runs: int) -> None:
    report_progress("maintenance: writing old snapshots")
    original = maintained_tables.old_snapshots(folder / "db" / "t000000", OLD_COMMITS)
    files = len(list(original.rglob("*.parquet")))
    with _sides("iceberg", "expire-snapshots", folder) as sides:

        def by_distop(location: Path) -> float:
            seconds, report = sides.distop("expire-snapshots", location, SHORT_AGE)
            _require(_files(location) == 10, "expire-snapshots", report)
            return seconds

        def by_statement(location: Path) -> float:
            seconds = sides.statement(
                "CALL lake.system.expire_snapshots(table => {t}, older_than => timestamp '2100-01-01')", location
            )
            _require(_files(location) == 10, "expire_snapshots", "")
            return seconds

        what = "expire-snapshots, relative to expire_snapshots"
        _alternate(result, what, original, by_distop, by_statement, runs, None, f"{files} files, 10 remain")
        _add_memory(result, sides, "expire-snapshots", "expire_snapshots")


def _orphans(result: Result, folder: Path, runs: int) -> None:
    report_progress("maintenance: writing orphan files")
    original = maintained_tables.orphans(folder / "db" / "t000000", ORPHANS)
    maintained_tables.make_older(original)
    with _sides("iceberg", "remove-orphans", folder) as sides:

        def by_distop(location: Path) -> float:
            seconds, report = sides.distop("remove-orphans", location, SHORT_AGE)
            _require(_files(location) == 100, "remove-orphans", report)
            return seconds

        def by_statement(location: Path) -> float:
            before = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(time.time() - 2 * 86_400))
            sql = f"CALL lake.system.remove_orphan_files(table => {{t}}, older_than => timestamp '{before}Z')"
            seconds = sides.statement(sql, location)
            _require(_files(location) == 100, "remove_orphan_files", "")
            return seconds

        what = "remove-orphans, relative to remove_orphan_files"
        _alternate(result, what, original, by_distop, by_statement, runs, None, f"{ORPHANS} orphans, 100 others")
        _add_memory(result, sides, "remove-orphans", "remove_orphan_files")


def _export(result: Result, folder: Path, scale: float, runs: int) -> None:
    report_progress("maintenance: writing a folder to export")
    original = maintained_tables.large_folder(folder / "lineitem", scale)
    size = maintained_tables.data_bytes(original)
    exports = folder / "exports"
    exports.mkdir()
    exported, copied, flushed = list[float](), list[float](), list[float]()
    with cluster(1, "--export-to", str(exports)) as bench:
        bench.client.add_table(TableRecord("bench.lineitem", "parquet", str(original)))
        for n in range(WARM + runs):
            ours, theirs = exports / f"distop-{n}", exports / f"cp-{n}"
            os.sync()
            began = time.perf_counter()
            done = bench.client.start_operation("export", "bench.lineitem", {"to": str(ours)}).wait(600)
            seconds = time.perf_counter() - began
            complete = done.report is not None and done.report["complete"]
            _require(complete and maintained_tables.data_bytes(ours) == size, "export", done.report or done.errors)
            bench.wait_for_cleanup()
            shutil.rmtree(ours)
            os.sync()
            began = time.perf_counter()
            subprocess.run(["cp", "-r", str(original), str(theirs)], check=True)
            copy_seconds = time.perf_counter() - began
            os.sync()
            flush_seconds = time.perf_counter() - began
            shutil.rmtree(theirs)
            if n >= WARM:
                exported.append(seconds)
                copied.append(copy_seconds)
                flushed.append(flush_seconds)
        note = f"{size / 1e6:,.0f} MB in {_files(original)} files"
        _add_ratio(result, "export, relative to cp -r", (exported, copied), 1.15, note)
        # An export flushes each file to the disk before its manifest names it; cp does not.
        _add_ratio(result, "export, relative to cp -r and sync", (exported, flushed), None, note)
        memory = child_memory(bench.executors[0])
        result.rows.append(Row("export, peak memory of the child", memory, "MB"))


def _files(location: Path) -> int:
    return sum(1 for _ in location.rglob("*.parquet"))


def _require(condition: bool, what: str, found: object) -> None:
    if not condition:
        raise RuntimeError(f"{what} has another result than expected: {str(found)[:1_000]}")


def _alternate(
    result: Result,
    what: str,
    original: Path,
    ours: Callable[[Path], float],
    theirs: Callable[[Path], float],
    runs: int,
    target: float | None,
    note: str,
) -> None:
    """Run both in turn, each time on a new copy of the table, and add the ratio of the medians."""
    copies = maintained_tables.Copies(original)
    times: tuple[list[float], list[float]] = ([], [])
    for n in range(WARM + runs):
        for seconds, work in zip(times, (ours, theirs), strict=True):
            location = copies.new()
            os.sync()
            took = work(location)
            shutil.rmtree(location)
            if n >= WARM:
                seconds.append(took)
    _add_ratio(result, what, times, target, note)


def _add_ratio(
    result: Result, what: str, times: tuple[list[float], list[float]], target: float | None, conditions: str
) -> None:
    ours, theirs = map(median, times)
    note = f"{ours:.3f} : {theirs:.3f} s; {conditions}"
    report_progress(f"maintenance: {what}: {note}")
    subject, _, peer = what.partition(", relative to ")
    result.samples |= {f"{subject}: distop": times[0], f"{subject}: {peer}": times[1]}
    result.rows.append(Row(what, ours / theirs, "×", target, note=note))


def _add_memory(result: Result, sides: _Sides, subject: str, peer: str) -> None:
    """The peak memory of both children."""
    for name, executor in ((f"{subject}, peak memory of the child", sides.ours), (f"the same, {peer}", sides.theirs)):
        result.rows.append(Row(name, child_memory(executor), "MB"))
