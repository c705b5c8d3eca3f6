"""Decides checks of a file by its statistics, as far as they prove something. Pure.

PASS: no row violates the check. VIOLATED: exactly, or at least, this many rows violate it. UNKNOWN: the file must be
scanned. Any bounds can prove that all rows pass, or that all fail. Only tight bounds, which are values of the column,
can prove that some row fails; bounds of texts (many writers truncate them) and rounded bounds are not tight.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop.protocol.frozen import frozen
from distop.tables.reading.file_facts import Ambiguous, Chunk, decimal_of, resolve
from distop_behaviors.validate.typed_bounds import Unfit, bound_for, canonical, family, limits, set_member

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distop.tables.reading.file_facts import FileFacts, Leaf
    from distop_behaviors.validate.validate_argument import Check


@frozen
class StatisticsDecision:
    """A decision by statistics.

    ``verdict``: pass, violated or unknown. ``violations``: the number, or a lower bound if not ``exact``.
    """

    verdict: str
    violations: int = 0
    exact: bool = True


PASS = StatisticsDecision("pass")
UNKNOWN = StatisticsDecision("unknown")

_CALENDAR_CHANGED = -141_427
"""1582-10-15 in days. Old releases of Spark wrote earlier dates in the Julian calendar; they read as other days."""
_ZONES_SETTLED = -2_208_988_800
"""1900-01-01 in seconds. Earlier timestamps of old releases read as other times, depending on the time zone."""

_DOUBLE_WHOLE = {"float": 1 << 24, "double": 1 << 53}
"""Up to this limit, the type holds every whole number exactly."""


def decide(check: Check, facts: FileFacts, path: tuple[str, ...] | None = ()) -> StatisticsDecision:
    """Decide a check of one column, without ``where``, by the statistics of one file.

    ``path``: the path of the column in the file, if known.
    """
    if facts.contradiction or facts.rows is None:
        return UNKNOWN
    if facts.live_rows == 0:
        return PASS
    decision = _decide(check, facts, path)
    if facts.precise is not None and not is_final(decision):
        precise = _decide(check, facts.precise, path)
        if is_final(precise) or precise.violations > decision.violations:
            decision = precise
    # The violating rows may be deleted rows.
    return decision if facts.deleted == 0 else for_some_rows(decision)


def merged_facts(files: Sequence[FileFacts]) -> FileFacts:
    """The facts of one imaginary file with the rows of all these files, which share a schema.

    If it passes a check, each of the files passes it. The reverse does not hold, and its violations prove nothing.
    """
    chunks = {}
    for path in files[0].chunks:
        found = [facts.chunks.get(path) for facts in files]
        if None not in found:
            chunks[path] = (_around([chunk for of_file in found if of_file is not None for chunk in of_file]),)
    rows = sum(facts.rows or 0 for facts in files)
    return replace(files[0], path="", rows=rows, chunks=chunks, deleted=0, precise=None)


def _around(chunks: Sequence[Chunk]) -> Chunk:
    """One chunk with all rows of these. It has bounds only if each chunk with a value has them in order (no NaN)."""
    rows = sum(chunk.rows for chunk in chunks)
    nulls, nans = _sum(chunk.nulls for chunk in chunks), _sum(chunk.nans for chunk in chunks)
    valued = [chunk for chunk in chunks if chunk.nulls != chunk.rows]
    if not valued or not all(c.low is not None and c.high is not None and c.low <= c.high for c in valued):
        return Chunk(rows, nulls, nans=nans)
    return Chunk(rows, nulls, min(c.low for c in valued), max(c.high for c in valued), nans)


def _sum(numbers: Iterable[int | None]) -> int | None:
    total = 0
    for number in numbers:
        if number is None:
            return None
        total += number
    return total


def is_final(decision: StatisticsDecision) -> bool:
    """Whether the decision is final: the file needs no scan."""
    return decision.verdict == "pass" or (decision.verdict == "violated" and decision.exact)


def precise_facts_may_decide(check: Check, facts: FileFacts, path: tuple[str, ...]) -> bool:
    """Whether precise facts, which have tight bounds and all columns of the file, may decide the check."""
    if check.kind == "check" or not path:
        return False
    return check.kind not in ("length", "matches") or path not in facts.chunks


def _decide(check: Check, facts: FileFacts, path: tuple[str, ...] | None) -> StatisticsDecision:
    if facts.rows == 0:
        return PASS
    if check.kind == "check":
        return UNKNOWN
    try:
        path = path or resolve(check.column, facts.columns)
    except Ambiguous:
        return UNKNOWN
    if path is None:
        return missing(check, facts)
    leaf, chunks = facts.leaves.get(path), facts.chunks.get(path)
    if leaf is None or chunks is None:
        return UNKNOWN
    if check.kind == "not_null":
        return PASS if not leaf.optional else combined([_not_null(c, leaf) for c in chunks])
    if all(c.nulls == c.rows for c in chunks) and leaf.type:
        return PASS
    if not leaf.type or check.kind in ("length", "matches"):
        return UNKNOWN
    try:
        if check.in_set is not None:
            return combined([_in_set(check.in_set.values, leaf, c) for c in chunks])
        interval = _interval(check, leaf)
    except Unfit:
        return UNKNOWN
    return UNKNOWN if interval is None else combined([_within(c, leaf, *interval) for c in chunks])


def missing(check: Check, facts: FileFacts) -> StatisticsDecision:
    """The decision for a column that the file does not have: it is NULL in all rows."""
    return StatisticsDecision("violated", facts.rows) if check.kind == "not_null" and facts.rows else PASS


def for_some_rows(decision: StatisticsDecision) -> StatisticsDecision:
    """The decision for some of the rows (``where``, deletes). Only a pass for all rows remains proved."""
    return decision if decision.verdict == "pass" else UNKNOWN


def combined(decisions: Sequence[StatisticsDecision]) -> StatisticsDecision:
    """The decision for several row groups together. An unknown one makes the sum a lower bound."""
    if all(d is PASS for d in decisions):
        return PASS
    violations = sum(d.violations for d in decisions)
    exact = all(d.exact and d.verdict != "unknown" for d in decisions)
    if violations:
        return StatisticsDecision("violated", violations, exact)
    return PASS if exact else UNKNOWN


def _not_null(chunk: Chunk, leaf: Leaf) -> StatisticsDecision:
    nulls = _nulls(chunk, leaf)
    if nulls is None:
        return UNKNOWN
    return StatisticsDecision("violated", nulls) if nulls else PASS


def _nulls(chunk: Chunk, leaf: Leaf) -> int | None:
    """The number of NULLs; None in structs, because writers count a NULL of the struct differently."""
    return chunk.nulls if len(leaf.path) == 1 or not leaf.optional else None


def _interval(check: Check, leaf: Leaf) -> tuple[Any, Any] | None:
    """The allowed interval in the unit of the statistics (None at an end: unbounded). None if undecidable."""
    if check.range is not None:
        low = None if check.range.min is None else _unit(check.range.min, leaf, up=True)
        high = None if check.range.max is None else _unit(check.range.max, leaf, up=False)
        return low, high
    if check.fits is None:
        return None
    return _narrowing(leaf, canonical(check.fits.type))


def _unit(value: Any, leaf: Leaf, *, up: bool) -> Any:
    bound = bound_for(value, leaf.type, up=up).value
    if leaf.kind == "timestamp" and leaf.scale == 3:
        return -(-bound // 1000) if up else bound // 1000
    return bound.encode() if leaf.kind == "string" else bound


def _narrowing(leaf: Leaf, target: str) -> tuple[Any, Any] | None:
    if target == leaf.type and leaf.kind in ("int", "bool", "date", "string", "binary", "timestamp"):
        return None, None
    if leaf.kind not in ("int", "uint", "decimal"):
        return None
    bounds = limits(target)
    if family(target) == "float" and leaf.kind == "int":
        # Beyond the limit some whole numbers fit and some do not, so _within proves nothing there.
        return _Soft(-_DOUBLE_WHOLE[target]), _Soft(_DOUBLE_WHOLE[target])
    if bounds is None:
        return None
    scale = decimal_of(target)[1] if family(target) == "decimal" else 0
    if scale < leaf.scale:
        return None
    shift = 10 ** (scale - leaf.scale)
    return -(-bounds[0] // shift), bounds[1] // shift


class _Soft(int):
    """A bound within which every value passes, and beyond which nothing is known."""


def _within(chunk: Chunk, leaf: Leaf, low: Any, high: Any) -> StatisticsDecision:
    if chunk.nulls == chunk.rows:
        return PASS
    if low is None and high is None:
        return PASS
    if not has_bounds(chunk, leaf):
        return UNKNOWN
    # NaN is greater than every bound, and the bounds of statistics leave it out.
    nans = chunk.nans if leaf.kind == "float" else 0
    above_low = low is None or chunk.low >= low
    below_high = high is None or chunk.high <= high
    if above_low and below_high:
        if high is None or nans == 0:
            return PASS
        return UNKNOWN if nans is None else StatisticsDecision("violated", nans)
    if isinstance(low, _Soft) or isinstance(high, _Soft):
        return UNKNOWN
    all_below = low is not None and chunk.high < low
    all_above = high is not None and chunk.low > high
    nulls = _nulls(chunk, leaf)
    passing = nans if high is None else 0
    if (all_below or all_above) and nulls is not None and passing is not None:
        return StatisticsDecision("violated", chunk.rows - nulls - passing)
    if leaf.kind in ("string", "binary") or not chunk.tight:
        return UNKNOWN
    return StatisticsDecision("violated", 1, exact=False)


def _in_set(values: Sequence[Any], leaf: Leaf, chunk: Chunk) -> StatisticsDecision:
    if chunk.nulls == chunk.rows:
        return PASS
    if leaf.kind not in ("int", "uint", "bool", "decimal", "date") or not has_bounds(chunk, leaf):
        return UNKNOWN
    members = {b.value for b in (set_member(v, leaf.type) for v in values) if b is not None}
    if chunk.low == chunk.high and chunk.low in members:
        return PASS
    disjoint = not any(chunk.low <= m <= chunk.high for m in members)
    nulls = _nulls(chunk, leaf)
    if disjoint and nulls is not None:
        return StatisticsDecision("violated", chunk.rows - nulls)
    if chunk.tight and (chunk.low not in members or chunk.high not in members):
        return StatisticsDecision("violated", 1, exact=False)
    return UNKNOWN


def has_bounds(chunk: Chunk, leaf: Leaf) -> bool:
    """Whether the chunk has bounds, in order (a NaN is not), that mean the values a reader returns."""
    if leaf.kind == "other" or chunk.low is None or chunk.high is None:
        return False
    if leaf.kind == "date" and chunk.low < _CALENDAR_CHANGED:
        return False
    if leaf.kind == "timestamp" and chunk.low < _ZONES_SETTLED * 10**leaf.scale:
        return False
    ends = _limits(leaf)
    if ends is not None and not (ends[0] <= chunk.low and chunk.high <= ends[1]):
        return False
    return bool(chunk.low <= chunk.high)


def _limits(leaf: Leaf) -> tuple[int, int] | None:
    """The smallest and the largest value of the file's type. Readers change values beyond them."""
    if leaf.kind == "uint":
        return 0, (1 << leaf.bits) - 1
    return limits(leaf.type) if leaf.kind in ("int", "decimal") else None
