"""``compact`` beside Iceberg's ``rewrite_data_files`` and Delta's ``OPTIMIZE``: whole runs, and after SIGKILL half way.

A statement that is killed has committed nothing, so it starts again from the beginning. distop goes on with the groups
that are left. In both cases the executor is started again at once, with a new JVM.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import maintained_tables, maintenance
from benchmarks.common import Executor, Result, Row, median, report_progress

FORMS = ("iceberg", "delta")
FILES_OF_A_TARGET = 8
"""Small files of one year in a file of the target size, so that a year becomes about five files."""
KILLED_SCALE = 5
"""The table whose compaction is killed has this many times more rows."""
SHARE, KILLED = 0.9, 0.6
"""Aims: of files near the target, and of the time after the kill."""
_LIMIT = 900.0


@dataclass(frozen=True, slots=True)
class Lake:
    """A table of small files, and how its peer compacts it. ``settings``: of the peer's session."""

    form: str
    original: Path
    files: int
    target: int

    @classmethod
    def written(cls, form: str, folder: Path, scale: float) -> Lake:
        """Write the table."""
        report_progress(f"maintenance: writing small files of {form}")
        original = maintained_tables.small_files(folder / form / "db" / "t000000", form, scale)
        files = len(list(original.rglob("*.parquet")))
        return cls(form, original, files, FILES_OF_A_TARGET * maintained_tables.data_bytes(original) // files)

    @property
    def peer(self) -> str:
        return "OPTIMIZE" if self.form == "delta" else "rewrite_data_files"

    @property
    def sql(self) -> str:
        """The peer's statement."""
        if self.form == "delta":
            return "OPTIMIZE {t}"
        options = f"map('target-file-size-bytes', '{self.target}', 'max-file-group-size-bytes', '{8 * self.target}')"
        return f"CALL lake.system.rewrite_data_files(table => {{t}}, options => {options})"

    @property
    def settings(self) -> Mapping[str, str]:
        """Of the peer's session."""
        limits = {"maxFileSize": self.target, "minFileSize": self.target * 3 // 4}
        return {f"spark.databricks.delta.optimize.{name}": str(value) for name, value in limits.items()}

    @property
    def argument(self) -> Mapping[str, Any]:
        """Of ``compact``."""
        return {"target_bytes": self.target}

    @property
    def note(self) -> str:
        size = maintained_tables.data_bytes(self.original)
        return f"{size / 1e6:,.0f} MB in {self.files} files, target {self.target / 1e6:.1f} MB"

    @contextmanager
    def sides(self) -> Iterator[maintenance._Sides]:
        """An executor for distop, and one for the peer."""
        with maintenance._sides(self.form, "compact", self.original.parent.parent, self.settings) as sides:
            yield sides


def measure(result: Result, folder: Path, scale: float, runs: int) -> None:
    """Whole runs of both formats, the sizes of the new files, and the memory."""
    for form in FORMS:
        lake, shares = Lake.written(form, folder, scale), list[float]()
        with lake.sides() as sides:

            def by_distop(
                location: Path, lake: Lake = lake, sides: maintenance._Sides = sides, shares: list[float] = shares
            ) -> float:
                seconds, report = sides.distop("compact", location, lake.argument)
                shares.append(_share(report))
                return seconds

            def by_statement(location: Path, lake: Lake = lake, sides: maintenance._Sides = sides) -> float:
                return sides.statement(lake.sql, location)

            what = f"compact of {form}, relative to {lake.peer}"
            maintenance._alternate(result, what, lake.original, by_distop, by_statement, runs, 1.0, lake.note)
            note = "75 to 180 % of the target; default commit_every"
            result.rows.append(
                Row(f"compact of {form}, files near the target", min(shares), target=SHARE, at_most=False, note=note)
            )
            maintenance._add_memory(result, sides, f"compact of {form}", lake.peer)


def measure_killed(result: Result, folder: Path, scale: float, runs: int) -> None:
    """Runs of both formats whose executor is killed half way."""
    for form in FORMS:
        lake = Lake.written(form, folder, KILLED_SCALE * scale)
        with lake.sides() as sides:
            copies = maintained_tables.Copies(lake.original)
            types = {"distop": ("compact", lake.argument), "peer": ("procedure", None)}
            executors = {"distop": sides.ours, "peer": sides.theirs}
            whole: dict[str, list[float]] = {name: [] for name in types}
            rest: dict[str, list[float]] = {name: [] for name in types}
            done = list[str]()
            for n in range(runs):
                for name, executor in executors.items():
                    run = _Run(lake, sides, copies)
                    # The JVM of the killed executor was new: the first run only starts it.
                    for measured in (False, True):
                        seconds = run.whole(name)
                        if measured:
                            whole[name].append(seconds)
                    rest[name].append(run.killed(name, executor, median(whole[name]) / 2, n))
                    done += filter(None, [run.done])
            what = f"compact of {form} after SIGKILL at half time, relative to {lake.peer} from the start"
            times = (rest["distop"], rest["peer"])
            note = f"{lake.note}; whole runs {median(whole['distop']):.1f} : {median(whole['peer']):.1f} s; {done[-1]}"
            maintenance._add_ratio(result, what, times, KILLED, note)


class _Run:
    """Whole and killed runs on copies of a table."""

    def __init__(self, lake: Lake, sides: maintenance._Sides, copies: maintained_tables.Copies) -> None:
        self._lake = lake
        self._sides = sides
        self._copies = copies
        self.done = ""
        """What was done before the kill."""

    def whole(self, name: str) -> float:
        """The seconds of a run that nobody disturbs."""
        with self._copy() as location:
            if name == "distop":
                return self._sides.distop("compact", location, self._lake.argument)[0]
            return self._sides.statement(self._lake.sql, location)

    def killed(self, name: str, executor: Executor, after: float, number: int) -> float:
        """The seconds from the kill of an executor until the table is compacted."""
        client = self._sides.bench.client
        with self._copy() as location, self._copy() as again:
            table = self._sides._register(location)
            kind, arg = (
                ("compact", self._lake.argument) if name == "distop" else ("procedure", self._statement(location))
            )
            operation = client.start_operation(kind, table, arg)
            _wait_until(time.monotonic() + after)
            status = operation.status()
            executor.kill()
            began = time.perf_counter()
            maintenance._require(status.state == "running", f"{kind} at half time", status.state)
            if name != "distop":
                operation.cancel()
            executor.start()
            if name == "distop":
                done = operation.wait(_LIMIT)
                seconds = time.perf_counter() - began
                maintenance._require(done.state == "success", kind, done.errors or done.report)
                self.done = f"{status.jobs['success']} of {status.jobs['total']} groups were done"
            else:
                # Nothing is left of the killed statement: it runs on an equal table.
                seconds = self._from_start(again, began)
                operation.wait(_LIMIT)
            self._sides._forget(table)
            return seconds

    def _from_start(self, location: Path, began: float) -> float:
        client, table = self._sides.bench.client, self._sides._register(location)
        done = client.start_operation("procedure", table, self._statement(location)).wait(_LIMIT)
        seconds = time.perf_counter() - began
        maintenance._require(done.state == "success", self._lake.peer, done.errors)
        return seconds

    def _statement(self, location: Path) -> Mapping[str, str]:
        path = f"delta.`{location}`" if self._lake.form == "delta" else f"'db.{location.name}'"
        return {"sql": self._lake.sql.format(t=path)}

    @contextmanager
    def _copy(self) -> Iterator[Path]:
        location = self._copies.new()
        os.sync()
        try:
            yield location
        finally:
            shutil.rmtree(location, ignore_errors=True)


def _wait_until(deadline: float) -> None:
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(left)


def _share(report: Mapping[str, Any]) -> float:
    """The share of the new files whose size is near the target, of a compaction that has replaced all groups."""
    maintenance._require(report["verdict"] == "compacted", "compact", report)
    after = report["after"]
    return float(after["sizes"]["around_target"] / after["files"])
