"""What is known of a file without a scan, as plain values: types, row counts, and the statistics of leaves.

Types are strings (Spark's names) or tuples: ``("struct", ((name, type), …))``, ``("array", type)``,
``("map", key, value)``, and ``("unreadable", reason)`` for what Spark cannot read.
"""

from __future__ import annotations

import re
from dataclasses import field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.frozen import frozen
from distop.protocol.texts import shown

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

SparkType = Any
"""str or tuple, as the module's text says."""

PlannedFile = tuple[str, int, int]
"""Path, size in bytes, modification time in ns (0: the format never changes a file that it has written)."""

VOID = "void"
"""The type of a column that no file of a partition has."""

_PLAIN_TYPE = re.compile(r"[A-Za-z][A-Za-z_ ]*(\(\s*\d+\s*(,\s*\d+\s*)?\))?")

_WHOLE = ("tinyint", "smallint", "int", "bigint")


@frozen
class Leaf:
    """A column that holds single values. ``kind`` says how its physical values are to be read."""

    path: tuple[str, ...]
    kind: str
    """int, uint, bool, float, decimal, date, timestamp, string, binary, or other (never decided by bounds)."""
    type: str
    """Spark's type."""
    bits: int = 64
    scale: int = 0
    """Decimal places; for timestamps, the digits after the second."""
    optional: bool = True
    """Some level of its path may be null."""


@frozen
class Chunk:
    """The statistics of one leaf in one row group, or in a whole file. Bounds are physical values, or None where there
    are none; NaN is outside of them.
    """

    rows: int
    nulls: int | None
    low: Any = None
    high: Any = None
    nans: int | None = None
    tight: bool = True
    """The bounds are values of the column."""


@frozen
class FileFacts:
    """One file. ``columns`` holds its top-level columns, ``leaves`` those single values outside of lists that were
    asked for, ``chunks`` their statistics, one for each row group that has rows (none: nothing is known).
    """

    path: str
    rows: int | None
    """None: nothing but a scan tells how many there are."""
    columns: Mapping[str, SparkType] = field(default_factory=dict)
    leaves: Mapping[tuple[str, ...], Leaf] = field(default_factory=dict)
    chunks: Mapping[tuple[str, ...], tuple[Chunk, ...]] = field(default_factory=dict)
    deleted: int | None = 0
    """So many of its rows are no longer the table's (None: some may be). Statistics speak of them as well."""
    closer: FileFacts | None = None
    """What the file itself says, where another source was asked first; with the same columns and paths."""
    ids: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """The paths of its fields outside of lists by Iceberg's ids, where it has them."""
    contradiction: str = ""
    """How its footer contradicts itself. Then only the columns and the rows of its row groups are taken from it."""
    missing: int = 0
    """Rows that its footer counts beyond those of its row groups: nobody can read them."""

    @property
    def left(self) -> int | None:
        """How many rows the table has of it; None where they must be counted."""
        if self.rows is None or self.deleted is None or self.contradiction:
            return None
        return self.rows - self.deleted


class Unreadable(Exception):
    """A file cannot be read, is not what was planned, or does not fit the others; the text names it."""


class Gone(Unreadable):
    """What the plan was made of is no longer there."""


class Ambiguous(Exception):
    """A name stands for several columns that differ in case alone, or Spark finds the column in some places only."""


def folded(text: str) -> str:
    """A text without its case: two have the same one if and only if ``equalsIgnoreCase`` of Java calls them equal. Each
    character stands for one, so that what is found in a text is found in this one.
    """
    return text.lower() if text.isascii() else "".join(map(_folded, text))


@lru_cache(maxsize=4096)
def _folded(char: str) -> str:
    """``Character.toLowerCase(Character.toUpperCase(c))``: of each by the mappings to a single character."""
    upper = next((one for one in (char.upper(), char.title()) if len(one) == 1), char)
    return "i" if upper == "\u0130" else upper.lower()


def match(name: str, names: Collection[str]) -> str | None:
    """The column of this name: exactly, else ignoring case as Spark does.

    Spark compares names by ``equalsIgnoreCase``, and those of a table's columns and a file's also in lower case, which
    for some letters is another rule (``ſ`` and ``s``). Raises Ambiguous where they differ, and for several columns.
    """
    if name in names:
        return name
    found = None
    wanted, lower, plain = folded(name), name.lower(), name.isascii()
    for candidate in names:
        # In lower case, what is like an ASCII name is so by the other rule as well.
        if folded(candidate) == wanted or (not plain and candidate.lower() == lower):
            if found is not None:
                raise Ambiguous(f"the name {name!r} stands for both {found!r} and {candidate!r}")
            found = candidate
    if found is not None and (folded(found) != wanted or found.lower() != lower):
        raise Ambiguous(
            f"the name {name!r} may or may not stand for {found!r}, by the case of a letter that Spark compares in two "
            f"ways: write {found!r}"
        )
    return found


def may_match(name: str, names: Collection[str]) -> bool:
    """Whether one of these columns may be meant."""
    try:
        return match(name, names) is not None
    except Ambiguous:
        return True


def split_path(text: str) -> tuple[str, ...]:
    """``a.b`` → ``("a", "b")``; dots between backticks belong to the name, and a doubled backtick is one."""
    parts: list[str] = []
    part, quoted, i = "", False, 0
    while i < len(text):
        c = text[i]
        if c == "`":
            if quoted and text[i + 1 : i + 2] == "`":
                part += "`"
                i += 1
            else:
                quoted = not quoted
        elif c == "." and not quoted:
            parts.append(part)
            part = ""
        else:
            part += c
        i += 1
    return (*parts, part)


def resolve(text: str, columns: Mapping[str, SparkType]) -> tuple[str, ...] | None:
    """The path of a column named in a check: a top-level column of just this name first, then a path into structs.

    None: the file has no such column. Raises Ambiguous.
    """
    whole = match(text, columns)
    if whole is not None:
        return (whole,)
    path: list[str] = []
    level: Mapping[str, SparkType] = columns
    for part in split_path(text):
        name = match(part, level)
        if name is None:
            return None
        path.append(name)
        inner = level[name]
        level = dict(inner[1]) if isinstance(inner, tuple) and inner[0] == "struct" else {}
    return tuple(path)


def type_at(path: tuple[str, ...], columns: Mapping[str, SparkType]) -> SparkType:
    """The type at a path that :func:`resolve` gave."""
    found: SparkType = ("struct", tuple(columns.items()))
    for name in path:
        found = dict(found[1])[name]
    return found


def ddl(kind: SparkType) -> str:
    """The type in Spark's DDL. Raises ValueError for a text that is no type: it comes from plans and files, and SQL is
    made of it.
    """
    if isinstance(kind, str):
        if not _PLAIN_TYPE.fullmatch(kind):
            raise ValueError(f"{kind!r} is no type of Spark")
        return kind
    if kind[0] == "struct":
        return "struct<" + ",".join(f"{quote(n)}:{ddl(t)}" for n, t in kind[1]) + ">"
    if kind[0] == "array":
        return f"array<{ddl(kind[1])}>"
    return f"map<{ddl(kind[1])},{ddl(kind[2])}>"


def quote(name: str) -> str:
    """The name as Spark SQL reads it literally."""
    return "`" + name.replace("`", "``") + "`"


def widest(a: SparkType, b: SparkType) -> SparkType | None:
    """The type that holds the values of both as Spark's Parquet reader widens them; None where there is none."""
    if a == b:
        return a
    if isinstance(a, tuple) and isinstance(b, tuple):
        return _widest_nested(a, b)
    if not (isinstance(a, str) and isinstance(b, str)):
        return None
    if a in _WHOLE and b in _WHOLE:
        return max(a, b, key=_WHOLE.index)
    pair = {a, b}
    if pair == {"float", "double"}:
        return "double"
    if "double" in pair and pair & set(_WHOLE[:3]):
        return "double"
    if a.startswith("decimal") and b.startswith("decimal"):
        (p1, s1), (p2, s2) = decimal_of(a), decimal_of(b)
        scale = max(s1, s2)
        precision = max(p1 - s1, p2 - s2) + scale
        return f"decimal({precision},{scale})" if precision <= 38 else None
    return None


def _widest_nested(a: tuple[Any, ...], b: tuple[Any, ...]) -> SparkType | None:
    if a[0] != b[0] or a[0] == "unreadable":
        return None
    if a[0] == "struct":
        merged = dict(a[1])
        for name, kind in b[1]:
            try:
                mine = match(name, merged)
            except Ambiguous:
                return None
            both = kind if mine is None else widest(merged[mine], kind)
            if both is None:
                return None
            merged[mine or name] = both
        return ("struct", tuple(merged.items()))
    parts = [widest(x, y) for x, y in zip(a[1:], b[1:], strict=True)]
    return None if None in parts else (a[0], *parts)


_MOST_DIGITS = 38
"""Of a decimal in Spark."""


def decimal_of(kind: str) -> tuple[int, int]:
    """Precision and scale of ``decimal(p,s)``; Spark's defaults where they are left out.

    Raises InvalidArgument for what Spark has not: anybody may write a schema, and arithmetic with a scale of a billion
    places would take hours.
    """
    inside = kind.partition("(")[2].rstrip(") ")
    precision, _, scale = inside.partition(",")
    found = int(precision or 10), int(scale or 0)
    if not 0 <= found[1] <= found[0] <= _MOST_DIGITS:
        raise InvalidArgument(f"there is no type {shown(kind)} in Spark")
    return found


def holds(wide: SparkType, narrow: SparkType) -> bool:
    """Spark reads values of ``narrow`` as ones of ``wide``, which may leave out fields of its structs. Raises
    Ambiguous.
    """
    if isinstance(wide, tuple) and isinstance(narrow, tuple):
        if wide[0] != narrow[0] or wide[0] == "unreadable":
            return False
        if wide[0] == "struct":
            inner = dict(narrow[1])
            return all((mine := match(n, inner)) is None or holds(kind, inner[mine]) for n, kind in wide[1])
        return all(holds(w, n) for w, n in zip(wide[1:], narrow[1:], strict=True))
    return bool(widest(wide, narrow) == wide)


def of_json(kind: Any) -> SparkType:
    """A type that went through JSON, which has lists where it had tuples."""
    return tuple(map(of_json, kind)) if isinstance(kind, list) else kind


def follow(path: tuple[str, ...], columns: Mapping[str, SparkType]) -> tuple[str, ...] | None:
    """A path of other columns than these, in these; None where they have none like it. Raises Ambiguous."""
    found: list[str] = []
    level: Mapping[str, SparkType] = columns
    for part in path:
        name = match(part, level)
        if name is None:
            return None
        found.append(name)
        inner = level[name]
        level = dict(inner[1]) if isinstance(inner, tuple) and inner[0] == "struct" else {}
    return tuple(found)


def problem(kind: SparkType) -> str | None:
    """Why Spark cannot read a column of this type, or None."""
    if not isinstance(kind, tuple):
        return None
    if kind[0] == "unreadable":
        return str(kind[1])
    inner = [t for _, t in kind[1]] if kind[0] == "struct" else list(kind[1:])
    return next((p for p in map(problem, inner) if p), None)


def widened(schemas: Iterable[Iterable[tuple[str, SparkType]]]) -> dict[str, SparkType]:
    """All columns of some files, in the order in which they come up. Where types do not go together the first stays,
    and Spark says what is wrong when it reads the others.
    """
    found: dict[str, SparkType] = {}
    for schema in schemas:
        for name, kind in schema:
            try:
                mine = match(name, found)
            except Ambiguous:
                mine = name if name in found else None
            if mine is None:
                found[name] = kind
            elif found[mine] != kind:
                found[mine] = widest(found[mine], kind) or found[mine]
    return found
