"""The conditions of policies: a small language of comparisons over the statistics of a table.

``small_files > 50 or (delete_ratio > 0.1 and not hours_since.compact < 6)``. There are comparisons (``< <= > >= = !=``)
with ``and``, ``or``, ``not`` and parentheses; numbers, sizes (``512MiB``) and durations (``90s``, ``36h``, ``5d``). A
condition is data: it is parsed here and never executed as code. Pure.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from distop.errors import InvalidArgument
from distop.protocol.frozen import frozen
from distop.protocol.texts import did_you_mean, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LONGEST = 2_000
"""Maximum characters of a condition."""
DEEPEST = 40
"""Maximum depth of parentheses and of ``not``."""

COUNT, BYTES, RATIO, DURATION, HOURS = "a count", "bytes", "a ratio", "a duration", "hours"
STATISTICS: Mapping[str, str] = {
    "files": COUNT,
    "small_files": COUNT,
    "bytes": BYTES,
    "delete_ratio": RATIO,
    "snapshots": COUNT,
    "oldest_snapshot": DURATION,
    "new_partitions": COUNT,
}
"""Statistics of a table, each with its dimension."""
SINCE = "hours_since."
"""Prefix of the hours since the last successful end of an operation of a type."""

_UNITS = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}
_SIZES = {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)(?P<unit>[A-Za-z]*)|(?P<name>[A-Za-z_][\w.-]*)"
    r"|(?P<sign><=|>=|!=|==|[<>=()]))"
)
_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "=": lambda a, b: a == b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}


class _Lexeme(NamedTuple):
    """``kind``: ``number``, ``name``, ``sign`` or ``end``."""

    kind: str
    text: str
    unit: str = ""


@frozen
class Operand:
    """One side of a comparison: a statistic (``name``), or a value in its base unit: seconds, bytes, or plain."""

    name: str = ""
    value: float = 0.0


@frozen
class Condition:
    """A condition. ``kind``: ``and``, ``or``, ``not``, or the sign of a comparison between ``left`` and ``right``."""

    kind: str
    parts: tuple[Condition, ...] = ()
    left: Operand = Operand()
    right: Operand = Operand()

    def holds(self, values: Mapping[str, float]) -> bool:
        """Whether the condition holds. ``values``: each name that it uses. Durations and hours are in seconds."""
        if self.kind == "and":
            return all(part.holds(values) for part in self.parts)
        if self.kind == "or":
            return any(part.holds(values) for part in self.parts)
        if self.kind == "not":
            return not self.parts[0].holds(values)
        left, right = (values[one.name] if one.name else one.value for one in (self.left, self.right))
        return _COMPARE[self.kind](left, right)

    def names(self) -> frozenset[str]:
        """The statistics that the condition uses."""
        own = {one.name for one in (self.left, self.right) if one.name}
        return frozenset(own.union(*(part.names() for part in self.parts)))


def parse(text: str) -> Condition:
    """A condition from its text. Raises InvalidArgument, which names the wrong place."""
    if len(text) > LONGEST:
        raise InvalidArgument(f"the condition has {len(text)} characters: at most {LONGEST} are allowed")
    return _Parser(text).whole()


def dimension(name: str) -> str:
    """The dimension of a statistic. Raises InvalidArgument for an unknown name."""
    if name.startswith(SINCE) and len(name) > len(SINCE):
        return HOURS
    if name not in STATISTICS:
        known = (*STATISTICS, f"{SINCE}TYPE")
        raise InvalidArgument(f"the condition names {shown(name)}{did_you_mean(name, known, 'its statistics')}")
    return STATISTICS[name]


class _Side(NamedTuple):
    """One side of a comparison as written: a name with its dimension, or a number with its unit."""

    token: _Lexeme
    dimension: str


class _Parser:
    """Parses by recursive descent."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _tokens(text)
        self._at = 0
        self._depth = 0

    def whole(self) -> Condition:
        found = self._any()
        if self._next.kind != "end":
            raise self._wrong("the end, `and` or `or`")
        return found

    @property
    def _next(self) -> _Lexeme:
        return self._tokens[self._at]

    def _take(self) -> _Lexeme:
        self._at += 1
        return self._tokens[self._at - 1]

    def _word(self, word: str) -> bool:
        """Take this word, if it comes next."""
        if self._next.kind == "name" and self._next.text.lower() == word:
            self._at += 1
            return True
        return False

    def _any(self) -> Condition:
        parts = [self._every()]
        while self._word("or"):
            parts.append(self._every())
        return parts[0] if len(parts) == 1 else Condition("or", tuple(parts))

    def _every(self) -> Condition:
        parts = [self._one()]
        while self._word("and"):
            parts.append(self._one())
        return parts[0] if len(parts) == 1 else Condition("and", tuple(parts))

    def _one(self) -> Condition:
        self._depth += 1
        if self._depth > DEEPEST:
            raise InvalidArgument(f"the condition is nested more than {DEEPEST} times: simplify it")
        try:
            if self._word("not"):
                return Condition("not", (self._one(),))
            if self._next == _Lexeme("sign", "("):
                self._take()
                found = self._any()
                if self._take() != _Lexeme("sign", ")"):
                    self._at -= 1
                    raise self._wrong("`)`")
                return found
            return self._comparison()
        finally:
            self._depth -= 1

    def _comparison(self) -> Condition:
        left = self._side()
        if self._next.kind != "sign" or self._next.text not in _COMPARE:
            raise self._wrong("a comparison: < <= > >= = !=")
        sign = self._take().text
        right = self._side()
        if not (left.dimension or right.dimension):
            raise InvalidArgument(f"a comparison of two numbers: {shown(self._text)} must name a statistic on one side")
        if left.dimension and right.dimension and left.dimension != right.dimension:
            raise InvalidArgument(
                f"{left.token.text} is {left.dimension} and {right.token.text} is {right.dimension}: they cannot be "
                "compared"
            )
        return Condition(sign, (), _operand(left, right), _operand(right, left))

    def _side(self) -> _Side:
        token = self._next
        if token.kind == "number":
            return _Side(self._take(), "")
        if token.kind == "name" and token.text.lower() not in ("and", "or", "not"):
            return _Side(self._take(), dimension(token.text))
        raise self._wrong("a statistic or a number")

    def _wrong(self, wanted: str) -> InvalidArgument:
        found = "it ends" if self._next.kind == "end" else f"it has {shown(self._next.text + self._next.unit)}"
        return InvalidArgument(f"the condition {shown(self._text)} cannot be read: {found}, where {wanted} is expected")


def _tokens(text: str) -> list[_Lexeme]:
    found, at, end = [], 0, len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            raise InvalidArgument(f"the condition {shown(text)} cannot be read at {shown(text[at:].lstrip()[:20])}")
        kind = match.lastgroup if match.lastgroup != "unit" else "number"
        found.append(_Lexeme(str(kind), match[str(kind)], match["unit"] or ""))
        at = match.end()
    return [*found, _Lexeme("end", "")]


def _operand(side: _Side, other: _Side) -> Operand:
    """One side of a comparison, a number in the base unit of the statistic on the other side."""
    token = side.token
    if side.dimension:
        return Operand(token.text)
    value, wanted = float(token.text), other.dimension
    if token.unit in _UNITS:
        if wanted not in (DURATION, HOURS):
            raise InvalidArgument(f"{other.token.text} is {wanted}, not a duration such as {token.text}{token.unit}")
        return Operand("", value * _UNITS[token.unit])
    if token.unit in _SIZES:
        if wanted != BYTES:
            raise InvalidArgument(f"{other.token.text} is {wanted}, not a size such as {token.text}{token.unit}")
        return Operand("", value * _SIZES[token.unit])
    if token.unit:
        known = ", ".join((*_UNITS, *_SIZES))
        raise InvalidArgument(f"{token.text}{token.unit} has an unknown unit: use one of {known}, or none")
    if wanted == DURATION:
        raise InvalidArgument(f"{other.token.text} is a duration: write {token.text}h or {token.text}d")
    return Operand("", value * (_UNITS["h"] if wanted == HOURS else 1.0))
