"""The result of a partition's job, bounded in size (a contract). Pure except for pydantic."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, RootModel, model_validator

from distop.runtime import secret_settings

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Verdict = Literal["valid", "violated", "unknown", "error"]
WORST_FIRST: tuple[Verdict, ...] = ("violated", "error", "unknown", "valid")

MAX_TEXT = 256
MAX_ERROR = 600
RESULT_BYTES = 48 * 1024
"""Maximum bytes of a result with its samples. The job's error message also needs a part of the 64 KiB."""
RESULT_ERROR_BYTES = 12 * 1024
RESULT_SAMPLE_BYTES = 40 * 1024


class Sample(BaseModel):
    """One violating row: its location and the checked values."""

    partition: str
    file: str
    row_index: int
    values: dict[str, Any]


@dataclass(slots=True)
class CheckResult:
    """The result of one check in one partition. ``missing``: columns that none of its files has."""

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

    ``missing``: columns in ``where`` that none of the partition's files has; null if the files could not be read, so
    that no missing column of any check is known.

    A plain value, because a large table has many of them; :class:`Answer` is its stored form.
    """

    verdict: Verdict
    rows: int | None
    checks: list[CheckResult]
    missing: list[str] | None = field(default_factory=list)

    def compact(self) -> dict[str, Any]:
        """The result as JSON without default values, well below 64 KiB.

        Each error is stored once, in ``reasons``, whose size is bounded; checks have its index as ``reason``. Samples
        that exceed the limit are left out.
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
        """The stored form: JSON without default values. (pydantic's own method would validate each value again.)"""
        return self.root.compact()


def _size(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace"))


def bounded(texts: Sequence[str], budget: int) -> list[str]:
    """The texts, with the longest ones truncated so that they have at most ``budget`` bytes in total."""
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
    """The worst verdict: violated, error, unknown, then valid. Without any verdict: valid."""
    found = set(verdicts)
    return next((v for v in WORST_FIRST if v in found), "valid")


def shorten(text: str, limit: int = MAX_ERROR) -> str:
    """The text, truncated to at most ``limit`` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def error_text(text: str) -> str:
    """The text of a check's error, shortened and without secrets."""
    return shorten(secret_settings.redact(text))
