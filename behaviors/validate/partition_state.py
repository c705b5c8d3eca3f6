"""The state of one partition during a validation: a tally of each check, and the columns that the checks need. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distop.protocol.frozen import frozen
from distop.tables.reading.file_facts import VOID, folded, split_path
from distop_behaviors.validate.partition_result import CheckResult, Result, Sample, Verdict, error_text, worst

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distop.behavior import PartitionPlan
    from distop.tables.reading.file_facts import FileFacts, SparkType
    from distop_behaviors.validate.validate_argument import Argument


WHERE = -1
"""The number of ``where`` among the numbers of checks."""


@frozen
class Names:
    """The column names in the argument: of each check, and of ``where``.

    The names in an expression are known only after it was parsed. ``failed``: errors of expressions that could not be
    parsed, by check or :data:`WHERE`.
    """

    checks: tuple[tuple[str, ...], ...]
    where: tuple[str, ...] = ()
    failed: Mapping[int, str] = field(default_factory=dict)

    def wanted(self) -> frozenset[str]:
        """The top-level columns whose statistics may decide a check, in one case by ``file_facts.folded``."""
        first = {split_path(name)[0] for names in self.checks for name in names}
        return frozenset(folded(n) for n in first | {name for names in self.checks for name in names})


@dataclass(slots=True)
class CheckColumn:
    """The path and type of a check's column in this partition; empty for a ``check`` expression."""

    path: tuple[str, ...] = ()
    kind: SparkType = VOID


@dataclass(slots=True)
class Tally:
    """The state of one check in one partition. ``pending``: files that only a scan can decide."""

    violations: int = 0
    exact: bool = True
    at_least: int = 0
    """Violations that statistics prove in the pending files. A scan finds the exact number."""
    unreadable: bool = False
    """Whether a pending file cannot be read. ``error`` has the cause; proved violations still count."""
    by_statistics: int = 0
    scanned: int = 0
    pending: set[str] = field(default_factory=set)
    for_precise_facts: set[str] = field(default_factory=set)
    """Pending files that precise facts may decide."""
    error: str | None = None
    unknown: bool = False
    missing: list[str] = field(default_factory=list)
    target: CheckColumn = field(default_factory=CheckColumn)
    files: dict[str, int] = field(default_factory=dict)
    """Violations by file, for samples."""
    samples: list[Sample] = field(default_factory=list)

    def fail(self, text: str) -> None:
        """Give the check the verdict ``error``, with its first reason."""
        self.unreadable = False
        self.error = self.error or error_text(text)
        self.pending.clear()

    def mark_unreadable(self, text: str) -> None:
        """Mark a pending file as unreadable. Violations that statistics prove still count."""
        if self.error is None:
            self.fail(text)
            self.unreadable, self.exact = True, False
            self.violations += self.at_least

    def result(self) -> CheckResult:
        """The result of the check."""
        erred = self.error is not None and not (self.unreadable and self.violations)
        verdict: Verdict
        if erred:
            verdict = "error"
        elif self.violations:
            verdict = "violated"
        else:
            verdict = "unknown" if self.unknown else "valid"
        return CheckResult(
            verdict=verdict,
            violations=0 if erred else self.violations,
            exact=self.exact and not erred and not self.unknown,
            samples=[] if erred else self.samples,
            files_statistics=self.by_statistics,
            files_scanned=self.scanned,
            error=self.error,
            missing=self.missing,
        )


@dataclass(slots=True, eq=False)
class Part:
    """The state of one partition during a validation.

    ``columns``: the needed columns with their types, merged over all files. ``absent``: columns in expressions that no
    file has. ``missing``: such columns in ``where``; None if the files could not be read. ``rows``: None until they are
    counted (rows of ``where``, or of files whose facts have no row count). ``path_columns``: the types of the partition
    columns; string if the value does not have the declared type.
    """

    plan: PartitionPlan
    facts: list[FileFacts]
    tallies: list[Tally]
    columns: dict[str, SparkType] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    missing: list[str] | None = field(default_factory=list)
    rows: int | None = 0
    path_columns: Mapping[str, str] = field(default_factory=dict)
    unreadable: set[str] = field(default_factory=set)
    """Files that cannot be read."""

    def fail(self, text: str) -> None:
        """Give all checks of this partition the verdict ``error``."""
        self.rows = 0
        for tally in self.tallies:
            tally.fail(text)

    def mark_unreadable(self, path: str, text: str) -> None:
        """Mark one file as unreadable. Checks that statistics have decided for it keep their verdicts."""
        self.unreadable.add(path)
        for tally in self.tallies:
            if path in tally.pending:
                tally.mark_unreadable(text)
        if self.erred:
            self.rows = 0

    @property
    def erred(self) -> bool:
        """Whether all checks have the verdict ``error`` for this partition."""
        return all(t.error is not None and not (t.unreadable and t.violations) for t in self.tallies)

    @property
    def settled(self) -> bool:
        """Whether no scan is needed: no file is pending, and the number of rows is known or cannot be found."""
        erred = all(t.error is not None for t in self.tallies)
        return erred or not (any(t.pending for t in self.tallies) or (self.rows is None and not self.unreadable))

    def result(self) -> Result:
        """The result of the partition."""
        checks = [t.result() for t in self.tallies]
        verdict = worst(c.verdict for c in checks)
        return Result(verdict=verdict, rows=self.rows, checks=checks, missing=self.missing)


def row_count(facts: Sequence[FileFacts], found: Mapping[str, int]) -> int | None:
    """The number of rows in these files; None if unknown. ``found``: rows by file that a scan has counted."""
    rows = [f.live_rows if f.live_rows is not None else found.get(f.path) for f in facts]
    return None if None in rows else sum(n or 0 for n in rows)


def needs_precise_facts(part: Part, argument: Argument) -> set[str]:
    """The files whose precise facts may avoid a scan, or with ``only`` decide more.

    Without files that are scanned in any case.
    """
    if argument.statistics == "never" or (argument.statistics == "auto" and argument.where is not None):
        return set()
    undecided = {path for tally in part.tallies if tally.error is None for path in tally.for_precise_facts}
    if argument.statistics == "auto":
        undecided -= {facts.path for facts in part.facts if facts.live_rows is None}
        for tally in part.tallies:
            undecided -= tally.pending - tally.for_precise_facts
    # Files of a column that a scan cannot read: only facts can decide them.
    return undecided.union(*(tally.for_precise_facts for tally in part.tallies if tally.error is not None))
