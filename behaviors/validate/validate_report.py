"""The result of a partition's job, and the report of all jobs (a contract).

Pure except for pydantic.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field, RootModel, model_serializer, model_validator

from distop.behavior import is_wide
from distop.protocol.texts import plural
from distop.runtime import secret_settings
from distop_behaviors.validate.certificate import Certificate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from distop_behaviors.validate.validate_argument import Argument

Verdict = Literal["valid", "violated", "unknown", "error"]
WORST_FIRST: tuple[Verdict, ...] = ("violated", "error", "unknown", "valid")

MAX_TEXT = 256
MAX_ERROR = 600
RESULT_BYTES = 48 * 1024
"""Maximum bytes of a result with its samples. The job's error message also needs a part of the 64 KiB."""
RESULT_ERROR_BYTES = 12 * 1024
RESULT_SAMPLE_BYTES = 40 * 1024
REPORT_ERROR_BYTES = 64 * 1024
REPORT_SAMPLE_BYTES = 256 * 1024
NOTHING = "the table has no partition, so there is nothing to check"
NO_JOB = "no job has checked the whole table"
_NAMES = 5


class Sample(BaseModel):
    """One violating row: its location and the checked values."""

    partition: str
    file: str
    row_index: int
    values: dict[str, Any]


class Evidence(BaseModel):
    """The numbers of files that were decided by statistics, and by a scan."""

    files_statistics: int = 0
    files_scanned: int = 0


class CheckReport(BaseModel):
    """One check over all partitions.

    ``exact`` false: there are at least ``violations``. ``scope``, for a check of the whole table: ``table``, or
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
    def _without_what_is_not_said(self, dump: Callable[[CheckReport], dict[str, Any]]) -> dict[str, Any]:
        return {k: v for k, v in dump(self).items() if v is not None or k not in ("scope", "against")}


class Report(BaseModel):
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


@dataclass(slots=True)
class CheckResult:
    """The result of one check in one partition.

    ``missing``: columns that none of its files has.
    """

    verdict: Verdict = "valid"
    violations: int = 0
    exact: bool = True
    samples: list[Sample] = field(default_factory=list)
    files_statistics: int = 0
    files_scanned: int = 0
    error: str | None = None
    missing: list[str] = field(default_factory=list)
    scope: Literal["table", "chosen"] | None = None
    against: dict[str, str] | None = None

    def compact(self) -> dict[str, Any]:
        """The result as JSON, without default values, error and samples."""
        data: dict[str, Any] = {"verdict": self.verdict}
        if self.violations:
            data["violations"] = self.violations
        if not self.exact:
            data["exact"] = False
        if self.files_statistics:
            data["files_statistics"] = self.files_statistics
        if self.files_scanned:
            data["files_scanned"] = self.files_scanned
        if self.missing:
            data["missing"] = self.missing
        if self.scope is not None:
            data["scope"] = self.scope
        if self.against is not None:
            data["against"] = self.against
        return data


@dataclass(slots=True)
class Result:
    """The result of one partition: its checks in the order of the argument.

    ``missing``: columns that ``where`` names but none of the partition's files has; null if the files could not be
    read, and so no missing column of any check is known.

    A plain value, because a large table has many of them; :class:`Answer` is its stored form.
    """

    verdict: Verdict
    rows: int | None
    checks: list[CheckResult]
    missing: list[str] | None = field(default_factory=list)

    def compact(self) -> dict[str, Any]:
        """The result as JSON without default values, well below 64 KiB.

        Each error is stored once, in ``reasons``, which is bounded; checks have its index as ``reason``. Samples that
        do not fit are left out.
        """
        reasons = list(dict.fromkeys(c.error for c in self.checks if c.error is not None))
        checks = [check.compact() for check in self.checks]
        whole: dict[str, Any] = {"verdict": self.verdict, "rows": self.rows, "checks": checks}
        if reasons:
            number = {reason: n for n, reason in enumerate(reasons)}
            for check, data in zip(self.checks, checks, strict=True):
                if check.error is not None:
                    data["reason"] = number[check.error]
            whole["reasons"] = bounded(reasons, RESULT_ERROR_BYTES)
        if self.missing != []:
            whole["missing"] = self.missing
        left = min(RESULT_SAMPLE_BYTES, RESULT_BYTES - _size(whole)) if any(c.samples for c in self.checks) else 0
        for check, data in zip(self.checks, checks, strict=True):
            if check.samples:
                data["samples"], left = within([s.model_dump(mode="json") for s in check.samples], left)
        return whole


class Answer(RootModel[Result]):
    """The stored result of a partition's job."""

    @model_validator(mode="before")
    @classmethod
    def _with_reasons(cls, data: Any) -> Any:
        """The reverse of :meth:`Result.compact`."""
        if not isinstance(data, dict) or "reasons" not in data:
            return data
        reasons = data["reasons"]
        checks = [{**c, "error": reasons[c["reason"]]} if "reason" in c else c for c in data["checks"]]
        return {**data, "checks": checks}

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """The stored form: JSON without default values. pydantic's own method would validate each value again."""
        return self.root.compact()


def _size(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace"))


def bounded(texts: Sequence[str], budget: int) -> list[str]:
    """The texts, with the longest ones cut so that all together have at most ``budget`` bytes."""
    left = budget
    sizes = sorted(len(text.encode(errors="backslashreplace")) for text in texts)
    for n, size in enumerate(sizes):
        share = left // (len(sizes) - n)
        if size > share:
            return [_cut(text, share) for text in texts]
        left -= size
    return list(texts)


def _cut(text: str, limit: int) -> str:
    data = text.encode(errors="backslashreplace")
    return text if len(data) <= limit else data[: max(limit - 3, 0)].decode(errors="ignore") + "…"


def within(samples: list[dict[str, Any]], budget: int) -> tuple[list[dict[str, Any]], int]:
    """The first samples that fit in ``budget`` bytes of JSON, and the bytes left."""
    kept: list[dict[str, Any]] = []
    for sample in samples:
        size = _size(sample)
        if size > budget:
            return kept, 0
        kept.append(sample)
        budget -= size
    return kept, budget


def worst(verdicts: Iterable[str]) -> Verdict:
    """The worst verdict: violated, error, unknown, then valid.

    No verdict at all is valid.
    """
    found = set(verdicts)
    return next((v for v in WORST_FIRST if v in found), "valid")


def shorten(text: str, limit: int = MAX_ERROR) -> str:
    """The text, cut to at most ``limit`` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def error_text(text: str) -> str:
    """The text of a check's error, shortened and without secrets."""
    return shorten(secret_settings.redact(text))


def combine(argument: Argument, results: Iterable[tuple[str, Result | str]], *, complete: bool) -> Report:
    """The report of all partitions, from their names and results, or the error of a job without a result.

    Not ``complete``: some jobs have no outcome, so a check that is valid so far becomes unknown. If it is complete but
    there is no partition, each check is an error: otherwise a check of a misspelled column would be valid.
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

    def report(self, *, complete: bool) -> Report:
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
        return Report(verdict=worst(c.verdict for c in checks), rows=rows, checks=checks, since=argument.since)


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
        """The check's report.

        ``missing``: the error that no file has a column or that there is no file, or "".
        """
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
    """The columns that none of the partitions so far has.

    None: no partition has been read yet.
    """

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
    """One sentence on all checks that are not valid.

    For example ``tailnum_not_null: 2512 violations; sane_delay: error: …``.

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
