"""The report of a validation, combined from the results of its jobs (a contract). Pure except for pydantic."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field, model_serializer

from distop.behavior import is_wide
from distop.protocol.texts import plural
from distop_behaviors.validate.certificate import Certificate
from distop_behaviors.validate.partition_result import MAX_ERROR, Sample, Verdict, bounded, shorten, within, worst

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from distop_behaviors.validate.partition_result import CheckResult, Result
    from distop_behaviors.validate.validate_argument import Argument

REPORT_ERROR_BYTES = 64 * 1024
REPORT_SAMPLE_BYTES = 256 * 1024
NOTHING = "the table has no partition, so there is nothing to check"
NO_JOB = "no job has checked the whole table"
_NAMES = 5


class Evidence(BaseModel):
    """The numbers of files that were decided by statistics, and by a scan."""

    files_statistics: int = 0
    files_scanned: int = 0


class CheckReport(BaseModel):
    """One check over all partitions.

    ``exact``: false if there may be more ``violations``. ``scope``: for a check of the whole table, ``table``, or
    ``chosen`` if the start named partitions. ``against``: the referenced table and its version.
    """

    name: str
    check: dict[str, Any]
    verdict: Verdict
    violations: int = 0
    exact: bool = True
    samples: list[Sample] = Field(default_factory=list)
    evidence: Evidence = Field(default_factory=Evidence)
    error: str | None = None
    scope: Literal["table", "chosen"] | None = None
    against: dict[str, str] | None = None

    @model_serializer(mode="wrap")
    def _without_unset_fields(self, dump: Callable[[CheckReport], dict[str, Any]]) -> dict[str, Any]:
        return {k: v for k, v in dump(self).items() if v is not None or k not in ("scope", "against")}


class ValidateReport(BaseModel):
    """The report of a validation.

    ``rows``: the number of checked rows: with ``where`` the rows it selects, with ``since`` the new rows; null if they
    were not counted. ``since``: the validation whose certificate this one continues. ``certificate``: for a valid
    table; otherwise ``uncertified`` may say why there is none.
    """

    verdict: Verdict
    rows: int | None
    checks: list[CheckReport]
    since: str | None = None
    certificate: Certificate | None = None
    uncertified: str | None = None


def combine(argument: Argument, results: Iterable[tuple[str, Result | str]], *, complete: bool) -> ValidateReport:
    """The report of all partitions, from their names and results, or the error of a job without a result.

    ``complete``: whether all jobs have an outcome; otherwise a check that is valid so far becomes unknown. If there is
    no partition, each check is an error: otherwise a check of a misspelled column would be valid.
    """
    totals = _Totals(argument)
    for partition, result in results:
        totals.add(partition, result)
    return totals.report(complete=complete)


class _Totals:
    """The sums of all checks over the partitions so far."""

    def __init__(self, argument: Argument) -> None:
        self._argument = argument
        self._sums = [_Sum() for _ in argument.checks]
        self._where_missing = _MissingColumns()
        self._rows: int | None = 0
        self._rows_of_wide: list[int | None] = []
        self._empty = True
        self._narrow = self._unread = False
        self._budget = REPORT_SAMPLE_BYTES

    def add(self, partition: str, result: Result | str) -> None:
        """Add the result of one job, or the error of a job without a result."""
        self._empty = False
        wide = is_wide(partition)
        self._narrow = self._narrow or not wide
        checked = [check.wide == wide for check in self._argument.checks]
        if isinstance(result, str):
            self._rows, self._unread = None, True
            for total in itertools.compress(self._sums, checked):
                total.verdicts.add("error")
                total.add_error(shorten(f"{'' if wide else 'partition '}{partition}: {result}"))
            return
        if wide:
            self._rows_of_wide.append(result.rows)
        else:
            self._rows = None if self._rows is None or result.rows is None else self._rows + result.rows
        self._unread = self._unread or result.missing is None
        self._where_missing.add(result.missing)
        pairs = zip(self._sums, result.checks, strict=True)
        for total, part in itertools.compress(pairs, checked):
            total.add(part, readable=result.missing is not None)
            self._add_samples(total, part)

    def _add_samples(self, total: _Sum, part: CheckResult) -> None:
        room = self._argument.sample - len(total.samples)
        if room > 0 and part.samples and self._budget > 0:
            kept, self._budget = within([s.model_dump(mode="json") for s in part.samples[:room]], self._budget)
            total.samples.extend(part.samples[: len(kept)])

    def report(self, *, complete: bool) -> ValidateReport:
        """The report of all partitions."""
        argument = self._argument
        # The certificate of ``since`` proves that the columns exist; the new files need not have them.
        must_exist = argument.since is None
        shared, errors = "", [""] * len(self._sums)
        if must_exist:
            shared = NOTHING if self._empty else self._where_missing.sentence("where: ", self._unread)
            errors = [shared or total.missing.sentence("", self._unread) for total in self._sums]
        checks = [
            total.report(name, check.as_given(), error, argument, complete)
            for name, check, total, error in zip(argument.names(), argument.checks, self._sums, errors, strict=True)
            # A rerun may run only the job of the whole table: then checks of rows are not in the report.
            if total.verdicts or check.wide or self._empty or not complete
        ]
        for check, text in zip(checks, bounded([c.error or "" for c in checks], REPORT_ERROR_BYTES), strict=True):
            check.error = text or None
        rows = self._rows
        if not self._narrow and self._rows_of_wide:
            rows = None if rows is None else self._rows_of_wide[0]
        if complete and must_exist and self._where_missing.columns:
            rows = None
        return ValidateReport(verdict=worst(c.verdict for c in checks), rows=rows, checks=checks, since=argument.since)


@dataclass(slots=True)
class _Sum:
    """The sum of one check's results over the partitions so far."""

    verdicts: set[str] = field(default_factory=set)
    violations: int = 0
    exact: bool = True
    files_statistics: int = 0
    files_scanned: int = 0
    error: str | None = None
    """The first error."""
    others: int = 0
    """The number of partitions with another error."""
    samples: list[Sample] = field(default_factory=list)
    missing: _MissingColumns = field(default_factory=lambda: _MissingColumns())
    scope: Literal["table", "chosen"] | None = None
    against: dict[str, str] | None = None

    def add(self, part: CheckResult, *, readable: bool) -> None:
        """Add the result of one more partition, without its samples."""
        self.verdicts.add(part.verdict)
        self.violations += part.violations
        self.exact = self.exact and part.exact
        self.files_statistics += part.files_statistics
        self.files_scanned += part.files_scanned
        if part.error is not None:
            self.add_error(part.error)
        self.missing.add(part.missing if readable else None)
        self.scope, self.against = part.scope, part.against

    def add_error(self, error: str) -> None:
        """Add the error of one more partition."""
        self.error = self.error or error
        self.others += error != self.error

    def report(self, name: str, check: dict[str, Any], missing: str, argument: Argument, complete: bool) -> CheckReport:
        """The check's report. ``missing``: the error that no file has a column, or that there is no file; or ""."""
        verdict, violations, samples, error = worst(self.verdicts), self.violations, self.samples, self._errors()
        if not self.verdicts and complete and not missing and argument.since is None:
            verdict, error = "error", NO_JOB
        evidence = Evidence(files_statistics=self.files_statistics, files_scanned=self.files_scanned)
        if missing and complete:
            verdict, violations, samples, evidence = "error", 0, [], Evidence()
            error = shorten(f"{missing}; {error}" if error else missing)
        elif verdict == "valid" and not complete:
            verdict = "unknown"
        exact = self.exact and verdict in ("valid", "violated") and not self.verdicts & {"error", "unknown"}
        limit = argument.max_violations
        if limit is not None and violations >= limit:
            violations, exact = limit, False
        return CheckReport(
            name=name,
            check=check,
            verdict=verdict,
            violations=violations,
            exact=exact,
            samples=samples,
            evidence=evidence,
            error=error,
            scope=self.scope,
            against=self.against,
        )

    def _errors(self) -> str | None:
        if self.error is None or not self.others:
            return self.error
        more = f"; and another error in {plural(self.others, 'more partition')}"
        return shorten(self.error, MAX_ERROR - len(more)) + more


class _MissingColumns:
    """The columns that no partition so far has; None if no partition has been read yet."""

    def __init__(self) -> None:
        self.columns: list[str] | None = None

    def add(self, missing: list[str] | None) -> None:
        """Add one more partition with its missing columns; None: it could not be read."""
        if missing is not None:
            self.columns = missing if self.columns is None else [c for c in self.columns if c in missing]

    def sentence(self, whose: str, unread: bool) -> str:
        """The error that no file has the first missing column, or "" if no column is missing."""
        if not self.columns:
            return ""
        files = "the files that could be read" if unread else "the table's files"
        return f"{whose}none of {files} has the column {self.columns[0]!r}"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES])
    return shown if len(names) <= _NAMES else f"{shown} and {len(names) - _NAMES} more"


def sentence(names: Sequence[str], checks: Sequence[CheckReport | CheckResult]) -> str:
    """One sentence on all checks that are not valid: ``tailnum_not_null: 2512 violations; sane_delay: error: …``.

    An error of ``where``, and an error that several checks share, is in it once.
    """
    parts = list(dict.fromkeys(c.error for c in checks if c.error is not None and c.error.startswith("where: ")))
    sharing: dict[str | None, list[str]] = {}
    for name, check in zip(names, checks, strict=True):
        if check.verdict == "error" and check.error not in parts:
            sharing.setdefault(check.error, []).append(name)
    for name, check in zip(names, checks, strict=True):
        if check.verdict == "violated":
            count = plural(check.violations, "violation")
            parts.append(f"{name}: {count if check.exact else 'at least ' + count}")
        elif check.verdict == "error" and check.error in sharing:
            parts.append(f"{_some(sharing.pop(check.error))}: error: {check.error}")
        elif check.verdict == "unknown":
            parts.append(f"{name}: unknown")
    return shorten("; ".join(parts), 2_000)
