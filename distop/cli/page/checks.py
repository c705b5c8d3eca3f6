"""The table of a report's checks, with their verdicts and the violating rows. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distop.cli.operation_text import checks_of, violations_of
from distop.cli.page.value_tree import Scalar, leaf, phrase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_COLUMNS = 12
_NAMES = 3
MARKS = {"valid": "✓", "violated": "✕", "error": "!", "unknown": "?"}
_TONES = {"valid": "good", "violated": "bad", "error": "bad"}


@dataclass(frozen=True, slots=True)
class Samples:
    """Violating rows: each the partition, the file, the row's index in it, and the values of ``columns``."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, str, str, tuple[Scalar, ...]], ...]


@dataclass(frozen=True, slots=True)
class CheckSummary:
    """One check. ``what``: its condition, in one line. ``violations``: the exact number, ``at least N``, or "-"."""

    name: str
    what: str
    verdict: str
    tone: str
    mark: str
    violations: str
    by_statistics: str
    by_scan: str
    error: str
    samples: Samples | None


@dataclass(frozen=True, slots=True)
class Checks:
    """All checks of a report. ``sentence``: their result. ``rows``: how many rows were checked, or ""."""

    sentence: str
    rows: str
    checks: tuple[CheckSummary, ...]

    @property
    def valid(self) -> bool:
        """Whether all checks hold."""
        return all(check.verdict == "valid" for check in self.checks)


def checks(report: Mapping[str, Any], location: str = "") -> Checks:
    """The checks of a report. ``location``: of the table; file names are shown relative to it."""
    found = checks_of(report)
    rows = report.get("rows")
    number = f"{rows:,}" if isinstance(rows, int) else ""
    since = report.get("since")
    where = f"in every row of the files that are new since {since}" if since else "in every row"
    return Checks(_sentence(found, number, where), number, tuple(_check(check, location) for check in found))


def _sentence(found: Sequence[Mapping[str, Any]], rows: str, where: str) -> str:
    of: dict[str, list[Mapping[str, Any]]] = {}
    for check in found:
        of.setdefault(str(check.get("verdict")), []).append(check)
    looked = f" ({rows} rows were checked)" if rows else ""
    if set(of) == {"valid"}:
        return (f"The check holds {where}{looked}" if len(found) == 1 else
                f"All {len(found)} checks hold {where}{looked}")  # fmt: skip
    parts = []
    if violated := of.get("violated"):
        parts.append(f"{_number(violated, found)} violated: {_named(violated, counts=True)}")
    if erred := of.get("error"):
        parts.append(f"{_number(erred, found)} not decided because of an error: {_named(erred)}")
    if unknown := of.get("unknown"):
        parts.append(f"{_number(unknown, found)} not decided: {_named(unknown)}")
    if not parts:
        return f"The report has {len(found)} checks"
    return "; ".join(parts)


def _number(some: Sequence[Any], found: Sequence[Any]) -> str:
    if len(found) == 1:
        return "The check is"
    return f"{len(some)} of {len(found)} checks {'is' if len(some) == 1 else 'are'}"


def _named(some: Sequence[Mapping[str, Any]], *, counts: bool = False) -> str:
    texts = []
    for check in some[:_NAMES]:
        found = violations_of(check)
        rows = f" ({found} row{'' if found == '1' else 's'})" if counts and found not in ("", "-") else ""
        texts.append(f"{check.get('name')}{rows}")
    left = len(some) - _NAMES
    return ", ".join(texts) + (f" and {left} more" if left > 0 else "")


def _check(check: Mapping[str, Any], location: str) -> CheckSummary:
    verdict = str(check.get("verdict"))
    asked, evidence = check.get("check"), check.get("evidence")
    files: Mapping[str, Any] = evidence if isinstance(evidence, dict) else {}
    return CheckSummary(
        str(check.get("name") or ""),
        phrase(asked) if isinstance(asked, dict) else str(asked or ""),
        verdict,
        _TONES.get(verdict, "odd"),
        MARKS.get(verdict, "?"),
        violations_of(check),
        _count(files.get("files_statistics")),
        _count(files.get("files_scanned")),
        str(check.get("error") or "").strip(),
        _samples(check.get("samples"), location),
    )


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else ""


def _samples(samples: Any, location: str) -> Samples | None:
    found = [one for one in samples if isinstance(one, dict)] if isinstance(samples, list) else []
    if not found:
        return None
    values = [one["values"] if isinstance(one.get("values"), dict) else {} for one in found]
    names = tuple(dict.fromkeys(str(name) for row in values for name in row))
    # A table of very many columns is not readable: all values of a row are then in one column.
    wide = len(names) > _COLUMNS
    rows = []
    for one, row in zip(found, values, strict=True):
        cells = (leaf(row),) if wide else tuple(leaf(row[name]) if name in row else Scalar("") for name in names)
        index = one.get("row_index")
        place = str(one.get("partition") or ""), _near(str(one.get("file") or ""), location)
        rows.append((*place, "" if index is None else str(index), cells))
    return Samples(("values",) if wide else names, tuple(rows))


def _near(file: str, location: str) -> str:
    """The file's path relative to the table's location."""
    folder = location.rstrip("/") + "/"
    return file.removeprefix(folder) if location else file
