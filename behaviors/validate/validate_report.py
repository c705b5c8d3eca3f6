"""What a partition's job answers, and how the answers become the report (a contract). Pure but for pydantic."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field, RootModel, model_serializer, model_validator

from distop.behavior import is_wide
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
"""Of a result and its samples; the sentence that goes with it needs some of the 64 KiB too."""
RESULT_ERROR_BYTES = 12 * 1024
RESULT_SAMPLE_BYTES = 40 * 1024
REPORT_ERROR_BYTES = 64 * 1024
REPORT_SAMPLE_BYTES = 256 * 1024
NOTHING = "there was no partition to check"
NO_JOB = "no job looked at the table as a whole"
_NAMES = 5


class Sample(BaseModel):
    """One violating row: where it is, and the values looked at."""

    partition: str
    file: str
    row_index: int
    values: dict[str, Any]


class Evidence(BaseModel):
    """How many files were decided by their statistics, and how many by a scan."""

    files_statistics: int = 0
    files_scanned: int = 0


class CheckReport(BaseModel):
    """One check over all partitions. ``exact`` false: at least ``violations``. ``scope``, of a check that one job
    decides: ``table``, or ``chosen`` where it was over the partitions that the start named. ``against``: the table that
    was looked into, and its version.
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
    """``rows``: the rows that were to be checked; with ``where``, those that it picks (null: not counted); with
    ``since``, the operation whose certificate was gone on from, those of what was new. ``certificate``: of what is
    valid for the whole table; else ``uncertified`` says why there is none.
    """

    verdict: Verdict
    rows: int | None
    checks: list[CheckReport]
    since: str | None = None
    certificate: Certificate | None = None
    uncertified: str | None = None


@dataclass(slots=True)
class CheckResult:
    """One check in one partition. ``missing``: columns that none of the partition's files has."""

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
        """As JSON without defaults, and without error and samples."""
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
    """One partition: its checks in the argument's order. ``missing``: columns that ``where`` names and none of the
    partition's files has; null where the files could not be read, and no missing column is known of any check.

    A plain value, since a large table makes many of them; :class:`Answer` is what is stored of it.
    """

    verdict: Verdict
    rows: int | None
    checks: list[CheckResult]
    missing: list[str] | None = field(default_factory=list)

    def compact(self) -> dict[str, Any]:
        """As JSON without defaults, well below 64 KiB. An error stands once among ``reasons``, whose length in all is
        bounded, and checks have its number there as ``reason``; samples beyond what is left are left out.
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
    """What a partition's job answers."""

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
        """As it is stored: JSON values without defaults. pydantic's own way looks at each of them once more."""
        return self.root.compact()


def _size(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace"))


def bounded(texts: Sequence[str], budget: int) -> list[str]:
    """The texts, the longest of them cut so that all together have at most so many bytes."""
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
    """As many samples as fit in so many bytes of JSON, and the bytes left."""
    kept: list[dict[str, Any]] = []
    for sample in samples:
        size = _size(sample)
        if size > budget:
            return kept, 0
        kept.append(sample)
        budget -= size
    return kept, budget


def worst(verdicts: Iterable[str]) -> Verdict:
    """Violated before error before unknown before valid; valid where there is none."""
    found = set(verdicts)
    return next((v for v in WORST_FIRST if v in found), "valid")


def shorten(text: str, limit: int = MAX_ERROR) -> str:
    """At most ``limit`` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def error_text(text: str) -> str:
    """The error of a check, without secret values."""
    return shorten(secret_settings.redact(text))


def combine(argument: Argument, results: Iterable[tuple[str, Result | str]], *, complete: bool) -> Report:
    """The report of all partitions: their names with their results, or with the error of a job that gave none.

    Not ``complete``: jobs are missing, so what is valid so far is unknown. Complete without any partition, each check
    is an error: over nothing, what is said of a column that never existed would hold.
    """
    sums = [_Sum() for _ in argument.checks]
    nowhere_of_where = _Nowhere()
    rows: int | None = 0
    rows_of_wide: list[int | None] = []
    narrow = unread = False
    nothing = NOTHING
    budget = REPORT_SAMPLE_BYTES
    for partition, result in results:
        nothing = ""
        wide = is_wide(partition)
        narrow = narrow or not wide
        looked_at = [check.wide == wide for check in argument.checks]
        if isinstance(result, str):
            rows, unread = None, True
            for total in itertools.compress(sums, looked_at):
                total.verdicts.add("error")
                total.err(shorten(f"{'' if wide else 'partition '}{partition}: {result}"))
            continue
        if wide:
            rows_of_wide.append(result.rows)
        else:
            rows = None if rows is None or result.rows is None else rows + result.rows
        unread = unread or result.missing is None
        nowhere_of_where.add(result.missing)
        pairs = zip(sums, result.checks, strict=True)
        for total, part in itertools.compress(pairs, looked_at):
            total.add(part, readable=result.missing is not None)
            room = argument.sample - len(total.samples)
            if room > 0 and part.samples and budget > 0:
                kept, budget = within([s.model_dump(mode="json") for s in part.samples[:room]], budget)
                total.samples.extend(part.samples[: len(kept)])
    # What a certificate was issued for was somewhere: in the new files it may be nowhere.
    told = argument.since is None
    elsewhere = (nothing or nowhere_of_where.sentence("where: ", unread)) if told else ""
    nowhere = [elsewhere or (total.nowhere.sentence("", unread) if told else "") for total in sums]
    checks = [
        total.report(name, check.as_given(), where, argument, complete)
        for name, check, total, where in zip(argument.names(), argument.checks, sums, nowhere, strict=True)
        # A rerun may be of the job over all partitions alone, and then no other check is looked at.
        if total.verdicts or check.wide or nothing or not complete
    ]
    for check, error in zip(checks, bounded([c.error or "" for c in checks], REPORT_ERROR_BYTES), strict=True):
        check.error = error or None
    if not narrow and rows_of_wide:
        rows = None if rows is None else rows_of_wide[0]
    if complete and told and nowhere_of_where.columns:
        rows = None
    return Report(verdict=worst(c.verdict for c in checks), rows=rows, checks=checks, since=argument.since)


@dataclass(slots=True)
class _Sum:
    """One check over the partitions so far."""

    verdicts: set[str] = field(default_factory=set)
    violations: int = 0
    exact: bool = True
    files_statistics: int = 0
    files_scanned: int = 0
    error: str | None = None
    """The first one."""
    others: int = 0
    """How many partitions had another one."""
    samples: list[Sample] = field(default_factory=list)
    nowhere: _Nowhere = field(default_factory=lambda: _Nowhere())
    scope: Literal["table", "chosen"] | None = None
    against: dict[str, str] | None = None

    def add(self, part: CheckResult, *, readable: bool) -> None:
        """One more partition, but for its samples."""
        self.verdicts.add(part.verdict)
        self.violations += part.violations
        self.exact = self.exact and part.exact
        self.files_statistics += part.files_statistics
        self.files_scanned += part.files_scanned
        if part.error is not None:
            self.err(part.error)
        self.nowhere.add(part.missing if readable else None)
        self.scope, self.against = part.scope, part.against

    def err(self, error: str) -> None:
        """One more partition in which the check had an error."""
        self.error = self.error or error
        self.others += error != self.error

    def report(self, name: str, check: dict[str, Any], nowhere: str, argument: Argument, complete: bool) -> CheckReport:
        """What it comes to. ``nowhere``: that a column is in none of the files, that there were none, or ""."""
        verdict, violations, samples, error = worst(self.verdicts), self.violations, self.samples, self._errors()
        if not self.verdicts and complete and not nowhere and argument.since is None:
            verdict, error = "error", NO_JOB
        evidence = Evidence(files_statistics=self.files_statistics, files_scanned=self.files_scanned)
        if nowhere and complete:
            verdict, violations, samples, evidence = "error", 0, [], Evidence()
            error = shorten(f"{nowhere}; {error}" if error else nowhere)
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
        more = f"; and another error in {self.others} more partition{'s' if self.others != 1 else ''}"
        return shorten(self.error, MAX_ERROR - len(more)) + more


class _Nowhere:
    """The columns that none of the partitions so far has (None: none has been read)."""

    def __init__(self) -> None:
        self.columns: list[str] | None = None

    def add(self, missing: list[str] | None) -> None:
        """One more partition, with the columns that it has not; None: it could not be read."""
        if missing is not None:
            self.columns = missing if self.columns is None else [c for c in self.columns if c in missing]

    def sentence(self, whose: str, unread: bool) -> str:
        """ "" where every column is somewhere."""
        if not self.columns:
            return ""
        files = "the files that could be read" if unread else "the table's files"
        return f"{whose}the column {self.columns[0]!r} is in none of {files}"


def counted(n: int, word: str) -> str:
    """``1 row``, ``2 rows``."""
    return f"{n} {word}{'' if n == 1 else 's'}"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES])
    return shown if len(names) <= _NAMES else f"{shown} and {len(names) - _NAMES} more"


def sentence(names: Sequence[str], checks: Sequence[CheckReport | CheckResult]) -> str:
    """``tailnum_not_null: 2512 violations; sane_delay: error: …`` for what is not valid. What is wrong with ``where``
    is no check's fault, and is said once; so is a reason that several checks share.
    """
    parts = list(dict.fromkeys(c.error for c in checks if c.error is not None and c.error.startswith("where: ")))
    sharing: dict[str | None, list[str]] = {}
    for name, check in zip(names, checks, strict=True):
        if check.verdict == "error" and check.error not in parts:
            sharing.setdefault(check.error, []).append(name)
    for name, check in zip(names, checks, strict=True):
        if check.verdict == "violated":
            count = counted(check.violations, "violation")
            parts.append(f"{name}: {count if check.exact else 'at least ' + count}")
        elif check.verdict == "error" and check.error in sharing:
            parts.append(f"{_some(sharing.pop(check.error))}: error: {check.error}")
        elif check.verdict == "unknown":
            parts.append(f"{name}: unknown")
    return shorten("; ".join(parts), 2_000)
