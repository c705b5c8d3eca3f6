"""The oracle of ``compact`` and ``export``: rows read by the format's own reader, before and after, as a multiset.

Another writer acts at a random moment: between plan and jobs, during a job, before, between and after commits.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from distop.behavior import select
from distop.errors import InvalidArgument
from distop.storage import export_targets
from distop.tables.staged_files import FOLDER, StagedFiles
from distop.testing import MemoryProgress
from distop_behaviors.compact import NOTHING, Compact
from distop_behaviors.compact.compact_argument import CompactArgument
from distop_behaviors.compact.completion import CompactCompletion
from distop_behaviors.compact.group_rewrite import GroupRewrite
from tests.support.context import FakeContext, complete, run_jobs
from tests.support.export_runs import ExportRun

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable

    import pyarrow as pa
    from pyspark.sql import DataFrame

    from distop.behavior import PartitionPlan
    from distop.protocol.records import TableRecord
    from tests.support.context import Ran

Rows = Counter[str]
"""Rows as a multiset, each as text."""
WRITERS = ("append", "delete", "overwrite", "schema", "compaction")
"""The kinds of other writers."""
REMOVING = ("delete", "overwrite", "compaction")
"""Writers that can remove all files of a group."""
NONE = "nobody"
ENOUGH = 0.9
"""The least share of new files that are near the target, of tables with enough rows."""


class Subject(Protocol):
    """A table that is compacted and exported.

    ``replacer``: the class that distop replaces its files with. ``heavy``: there are enough bytes for several files.
    ``groups``: the maximum number of groups to compact.
    """

    record: TableRecord
    replacer: type
    heavy: bool
    groups: int
    history: list[str]

    def read(self, version: Any = None) -> Rows:
        """All rows, as another reader than distop's reads them. ``version``: an element of :meth:`versions`."""

    def versions(self) -> list[Any]:
        """The versions of the table, oldest first."""

    def state(self) -> Any:
        """What only a change of the table itself changes: schemas, partition specs, properties."""

    def files(self) -> dict[str, int]:
        """The live data files by path, with sizes in bytes."""

    def write(self, kind: str) -> None:
        """Change the table as another writer (:data:`WRITERS`)."""

    def spark(self) -> Any:
        """The Spark session of the jobs; None: they must not use one."""

    def needs(self) -> bool:
        """Whether the rows are not those of the data files alone."""

    def exported(self, target: str, version: Any) -> tuple[Rows, Rows]:
        """The rows of a version's exported data files, read with the table's metadata; and the version's own rows."""

    def registers(self) -> bool:
        """Whether an export with ``register`` is possible, and can be read."""

    def registered(self, target: str) -> Rows:
        """The rows of the table that an export with ``register`` has made, read without the original's metadata."""


@dataclass
class Done:
    """What happened to a table. ``sizes``: new files as shares of the target, of a table with enough rows."""

    verdict: str = ""
    groups: dict[str, int] = field(default_factory=dict)
    commits: int = 0
    moment: str = ""
    sizes: list[float] = field(default_factory=list)
    exports: list[str] = field(default_factory=list)


def rows_of(table: pa.Table) -> Rows:
    """The rows as a multiset of exact values: NaN equals itself, -0.0 differs from 0.0, types count."""
    kinds = [f"{field.name}: {field.type}" for field in table.schema]
    return _rows(kinds, table.column_names, zip(*(column.to_pylist() for column in table.columns), strict=True))


def spark_rows(frame: DataFrame) -> Rows:
    """The same for rows that Spark reads."""
    kinds = [f"{name}: {kind}" for name, kind in frame.dtypes]
    return _rows(kinds, frame.columns, frame.collect())


def _rows(kinds: list[str], names: list[str], rows: Iterable[Iterable[Any]]) -> Rows:
    order = sorted(range(len(names)), key=lambda n: names[n])
    found = Counter("|".join(_exact(list(row)[n]) for n in order) for row in rows)
    return found + Counter([f"types: {sorted(kinds)}"])


def _exact(value: Any) -> str:
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    return repr(value)


def compact_and_compare(subject: Subject, chance: random.Random, writer: str, work: Path, **arg: Any) -> Done:
    """Compact the table, with a writer at a random moment, and compare its rows. Raises AssertionError."""
    done = Done()
    expected, state, before = subject.read(), subject.state(), subject.files()
    versions = subject.versions()
    sample = dict.fromkeys([versions[-1], *chance.sample(versions, 1)])
    earlier = {one: subject.read(one) for one in sample}
    argument = _argument(subject, chance, before, arg)
    names: list[str] = []
    every = False

    def context(number: int) -> FakeContext:
        ctx = FakeContext(work, subject.record, subject.spark())
        ctx.operation, ctx.progress = f"{subject.record.name}/compact/{number}", MemoryProgress()
        return ctx

    def planned(number: int) -> list[PartitionPlan]:
        found = Compact().partitions(subject.record, argument, context(number)).partitions
        nonlocal every
        if number == 1:
            groups = [one for one in found if one.files]
            some = sorted(groups, key=lambda one: one.bytes)[-1:] if subject.heavy else groups
            names.extend(one.name for one in chance.sample(some, min(len(some), subject.groups)))
            every = len(names) == len(groups)
        chosen = names if names and not every else None
        return select(Compact().jobs(argument, found, chosen, context(number)), None)

    def act() -> None:
        nonlocal expected, state
        assert subject.read() == expected, "before the other writer"
        subject.write(writer)
        expected, state = subject.read(), subject.state()

    plans = planned(1)
    with pytest.MonkeyPatch.context() as patch:
        moment = Moment.drawn(chance, subject.replacer, len(plans), argument.commit_every)
        if writer != NONE:
            moment.watch(patch, act)
        if writer != NONE and moment.name == "plan":
            moment.happen(act)
        outcomes = run_jobs(Compact(), argument, plans, context(1))
        if writer != NONE and not moment.happened and (moment.of_jobs or plans[0].name == NOTHING):
            moment.happen(act)
            done.moment = "after the jobs instead of "
        ran = complete(Compact(), argument, subject.record, outcomes, plans, context(1), version="")
    done.moment += f"{moment}" if moment.happened else "never"
    assert subject.read() == expected, (ran.message, ran.report)
    now = subject.state()
    assert now == state, {name: (state.get(name), now.get(name)) for name in state if state.get(name) != now.get(name)}
    for version, rows in earlier.items():
        assert subject.read(version) == rows, f"version {version}"
    _check_report(ran, writer)
    if subject.heavy and writer not in REMOVING:
        new = [size for path, size in subject.files().items() if path not in before and f"/{FOLDER}/" in path]
        done.sizes = [size / argument.target_bytes for size in new]
    done.verdict, done.commits = str(ran.report["verdict"]), int(ran.report["commits"])
    done.groups = {name: count for name, count in ran.report["groups"].items() if count}
    if writer == NONE and every and argument.target_bytes > sum(before.values()):
        # With other targets, new files can be smaller than planned: then another run merges them again.
        assert [one.name for one in planned(2)] == [NOTHING]
    return done


def _argument(
    subject: Subject, chance: random.Random, before: dict[str, int], given: dict[str, Any]
) -> CompactArgument:
    total = sum(before.values())
    target = total // 4 if subject.heavy else chance.choice([4096, 1 << 20])
    drawn = {
        "target_bytes": target,
        "min_input_files": 2,
        "commit_every": chance.choice([None, 1, 1, 2, 3]),
        "deletes_at_least": chance.choice([None, 1, 1]),
        **({"max_group_bytes": 2 * total} if subject.heavy else {}),
    }
    return CompactArgument.model_validate({**drawn, **given})


def _check_report(ran: Ran, writer: str) -> None:
    groups = ran.report["groups"]
    expected = ["compacted", "nothing to do"]
    if writer in REMOVING:
        expected += ["partial", "failed"]
        assert ran.report["verdict"] != "failed" or (not groups["committed"] and not groups["failed"]), ran.report
    assert ran.report["verdict"] in expected, (ran.message, ran.report)
    before, after = ran.report["before"], ran.report["after"]
    if ran.report["commits"] and before["rows"] is not None:
        assert before["rows"] == after["rows"] + ran.report["deleted_rows"]


def near_the_target(sizes: list[float]) -> bool:
    """Whether enough of these new files, as shares of the target, are near it; one may be a remainder."""
    return sum(0.75 <= size <= 1.8 for size in sizes) >= min(ENOUGH * len(sizes), len(sizes) - 1)


def export_and_compare(subject: Subject, writer: str, target: Path, work: Path) -> str:
    """Export the table's version, with a writer between plan and copy, and compare; returns what happened.

    Where the rows are not those of the data files alone, the table is exported with its metadata.
    """
    export_targets.configure([str(target)])
    try:
        run = ExportRun(subject.record, str(target), work)
        version, arg, rows = subject.versions()[-1], dict[str, Any](), Rows()
        if subject.needs():
            with pytest.raises(InvalidArgument, match="would be read as other rows"):
                run.plan()
            assert not target.exists()
            if not subject.registers():
                return "refused"
            arg, rows = {"register": {"name": "copy"}}, subject.read()
        plans, planned = run.plan(**arg)
        if writer != NONE:
            subject.write(writer)
        ran = run.complete(run.jobs(plans, **arg), plans, planned, **arg)
        assert ran.report["complete"], (ran.message, ran.report)
        copies = sum(ran.report[how]["files"] for how in ("copied", "reused", "unchanged"))
        assert copies == ran.report["files"]["files"]
        if arg:
            assert ran.report["registered"] == "copy"
            assert subject.registered(str(target)) == rows
            return "registered"
        found, expected = subject.exported(str(target), version)
        assert found == expected
        return "exported"
    finally:
        export_targets.configure(())


class Moment:
    """A moment in a compaction: before or after the n-th call of a method."""

    def __init__(self, name: str, owner: Any, method: str, number: int, when: str) -> None:
        self.name, self._owner, self._method, self._number, self._when = name, owner, method, number, when
        self.happened = False

    @property
    def of_jobs(self) -> bool:
        """Whether it never happens after the jobs."""
        return self.name in ("job", "rewrite", "offer")

    def __str__(self) -> str:
        return self.name if self._owner is None else f"{self._when} {self.name} {self._number}"

    @classmethod
    def drawn(cls, chance: random.Random, replacer: type, groups: int, commit_every: int | None) -> Moment:
        """A random moment of a compaction of this many groups."""
        commits = math.ceil(groups / (commit_every or groups))
        name, owner, method, most = chance.choice(
            [
                ("plan", None, "", 1),
                ("job", GroupRewrite, "run", groups),
                ("rewrite", replacer, "rewrite", groups),
                ("offer", StagedFiles, "offer", groups),
                ("commit", replacer, "commit", commits),
                ("commit", replacer, "commit", commits),
                ("completion", CompactCompletion, "run", 1),
            ]
        )
        when = "before" if name == "completion" else chance.choice(["before", "after"])
        return cls(name, owner, method, chance.randint(1, most), when)

    def watch(self, patch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
        """Act at this moment."""
        if self._owner is None:
            return
        original, calls = getattr(self._owner, self._method), [0]

        def wrapped(*args: Any, **given: Any) -> Any:
            calls[0] += 1
            mine = calls[0] == self._number and not self.happened
            if mine and self._when == "before":
                self.happen(act)
            result = original(*args, **given)
            if mine and self._when == "after":
                self.happen(act)
            return result

        patch.setattr(self._owner, self._method, wrapped)

    def happen(self, act: Callable[[], None]) -> None:
        """Act now, once."""
        self.happened = True
        act()


def check_table(subject: Subject, chance: random.Random, seed: int, folder: Path) -> Done:
    """Compact and export a table, with the writer of the seed; returns what happened. Raises AssertionError.

    A table is exported before its compaction, while another writer changes it, or after it.
    """
    writer, work = (*WRITERS, NONE)[seed % (len(WRITERS) + 1)], folder / "work"
    work.mkdir()
    try:
        first = chance.random() < 0.4
        exported = [export_and_compare(subject, writer, folder / "out", work)] if first else []
        done = compact_and_compare(subject, chance, writer, work)
        if not first:
            exported.append(export_and_compare(subject, NONE, folder / "out", work))
    except BaseException as error:
        error.add_note(f"seed {seed}, writer: {writer}, the table: {subject.history}")
        raise
    done.exports = exported
    assert near_the_target(done.sizes), done
    return done
