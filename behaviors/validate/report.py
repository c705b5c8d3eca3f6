"""What a partition's job answers, and how the answers become the report (a contract). Pure but for pydantic."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distop_behaviors.validate.argument import Argument

Verdict = Literal["valid", "violated", "unknown", "error"]
WORST_FIRST: tuple[Verdict, ...] = ("violated", "error", "unknown", "valid")

MAX_TEXT = 256
MAX_ERROR = 600
RESULT_SAMPLE_BYTES = 40 * 1024
REPORT_SAMPLE_BYTES = 256 * 1024


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
    """One check over all partitions. ``exact`` false: at least ``violations``."""

    name: str
    check: dict[str, Any]
    verdict: Verdict
    violations: int = 0
    exact: bool = True
    samples: list[Sample] = Field(default_factory=list)
    evidence: Evidence = Field(default_factory=Evidence)
    error: str | None = None


class Report(BaseModel):
    """``rows``: the rows that were to be checked; with ``where``, those that it picks (null: not counted)."""

    verdict: Verdict
    rows: int | None
    checks: list[CheckReport]


class CheckResult(BaseModel):
    """One check in one partition. ``missing``: columns that none of the partition's files has."""

    verdict: Verdict = "valid"
    violations: int = 0
    exact: bool = True
    samples: list[Sample] = Field(default_factory=list)
    files_statistics: int = 0
    files_scanned: int = 0
    error: str | None = None
    missing: list[str] = Field(default_factory=list)


class Result(BaseModel):
    """One partition: its checks in the argument's order. ``missing``: columns that ``where`` names and none of the
    partition's files has; null where the files could not be read, and no missing column is known of any check.
    """

    verdict: Verdict
    rows: int | None
    checks: list[CheckResult]
    missing: list[str] | None = Field(default_factory=list)

    def compact(self) -> dict[str, Any]:
        """As JSON without defaults, well below 64 KiB: samples beyond a budget are left out."""
        left = RESULT_SAMPLE_BYTES
        checks = []
        for check in self.checks:
            data = check.model_dump(mode="json", exclude_defaults=True)
            data["verdict"] = check.verdict
            if check.samples:
                data["samples"], left = within(data["samples"], left)
            checks.append(data)
        missing = {} if self.missing == [] else {"missing": self.missing}
        return {"verdict": self.verdict, "rows": self.rows, "checks": checks, **missing}


def within(samples: list[dict[str, Any]], budget: int) -> tuple[list[dict[str, Any]], int]:
    """As many samples as fit in so many bytes of JSON, and the bytes left."""
    kept: list[dict[str, Any]] = []
    for sample in samples:
        size = len(json.dumps(sample, ensure_ascii=False).encode())
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


def empty(argument: Argument) -> Report:
    """The report before any partition is added: valid, of no rows."""
    checks = [
        CheckReport(name=name, check=check.as_given(), verdict="valid")
        for name, check in zip(argument.names(), argument.checks, strict=True)
    ]
    return Report(verdict="valid", rows=0, checks=checks)


def combine(argument: Argument, results: Iterable[tuple[str, Result | str]], *, complete: bool) -> Report:
    """The report of all partitions: their names with their results, or with the error of a job that gave none.

    Not ``complete``: jobs are missing, so what is valid so far is unknown.
    """
    report = empty(argument)
    verdicts: list[set[str]] = [set() for _ in report.checks]
    nowhere = [_Nowhere() for _ in report.checks]
    nowhere_of_where = _Nowhere()
    unread = False
    budget = REPORT_SAMPLE_BYTES
    for partition, result in results:
        if isinstance(result, str):
            report.rows, unread = None, True
            for n, check in enumerate(report.checks):
                verdicts[n].add("error")
                check.error = check.error or shorten(f"partition {partition}: {result}")
            continue
        report.rows = None if report.rows is None or result.rows is None else report.rows + result.rows
        unread = unread or result.missing is None
        nowhere_of_where.add(result.missing)
        for n, (check, part) in enumerate(zip(report.checks, result.checks, strict=True)):
            verdicts[n].add(part.verdict)
            check.violations += part.violations
            check.exact = check.exact and part.exact
            check.evidence.files_statistics += part.files_statistics
            check.evidence.files_scanned += part.files_scanned
            check.error = check.error or part.error
            nowhere[n].add(None if result.missing is None else part.missing)
            room = argument.sample - len(check.samples)
            if room > 0 and part.samples and budget > 0:
                kept, budget = within([s.model_dump(mode="json") for s in part.samples[:room]], budget)
                check.samples.extend(part.samples[: len(kept)])
    for n, check in enumerate(report.checks):
        check.verdict = worst(verdicts[n])
        why = nowhere_of_where.sentence("where: ", unread) or nowhere[n].sentence("", unread)
        if why and complete:
            check.verdict, check.violations, check.samples, check.evidence = "error", 0, [], Evidence()
            check.error = shorten(f"{why}; {check.error}" if check.error else why)
        elif check.verdict == "valid" and not complete:
            check.verdict = "unknown"
        check.exact = check.exact and check.verdict in ("valid", "violated") and not verdicts[n] & {"error", "unknown"}
        limit = argument.max_violations
        if limit is not None and check.violations >= limit:
            check.violations, check.exact = limit, False
    if complete and nowhere_of_where.columns:
        report.rows = None
    report.verdict = worst(c.verdict for c in report.checks)
    return report


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


def sentence(names: Sequence[str], checks: Sequence[CheckReport | CheckResult]) -> str:
    """``tailnum_not_null: 2512 violations; sane_delay: error: …`` for what is not valid. What is wrong with ``where``
    is no check's fault, and is said once.
    """
    parts = list(dict.fromkeys(c.error for c in checks if c.error is not None and c.error.startswith("where: ")))
    for name, check in zip(names, checks, strict=True):
        if check.verdict == "violated":
            count = counted(check.violations, "violation")
            parts.append(f"{name}: {count if check.exact else 'at least ' + count}")
        elif check.verdict == "error" and check.error not in parts:
            parts.append(f"{name}: error: {check.error}")
        elif check.verdict == "unknown":
            parts.append(f"{name}: unknown")
    return shorten("; ".join(parts), 2_000)
