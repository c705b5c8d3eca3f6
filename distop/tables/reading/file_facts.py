"""The facts of a file that need no scan, as plain values: types, row counts, and statistics of leaves.

Types are strings (Spark's names) or tuples: ``("struct", ((name, type), …))``, ``("array", type)``,
``("map", key, value)``, and ``("unreadable", reason)`` for types that Spark cannot read.
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
"""str or tuple, see above."""

PlannedFile = tuple[str, int, int | str]
"""Path, size in bytes, and stamp, which changes when the file is replaced.

The stamp is the modification time in ns, or an object's version (0: the format never changes its files).
"""

Path = tuple[str, ...]
"""A column as the names on the way to it: structs, lists and maps have several."""
VOID = "void"
"""The type of a column that all files of a partition lack."""

_PLAIN_TYPE = re.compile(r"[A-Za-z][A-Za-z_ ]*(\(\s*\d+\s*(,\s*\d+\s*)?\))?")

_WHOLE = ("tinyint", "smallint", "int", "bigint")


@frozen
class Leaf:
    """A column of single values. ``kind``: the interpretation of its physical values."""

    path: tuple[str, ...]
    kind: str
    """int, uint, bool, float, decimal, date, timestamp, string, binary, or other (bounds have no meaning)."""
    type: str
    """Spark's type."""
    bits: int = 64
    scale: int = 0
    """Decimal places; for timestamps, the digits after the second."""
    optional: bool = True
    """Whether some level of its path may be null."""


@frozen
class Chunk:
    """The statistics of one leaf in one row group, or in a whole file.

    Bounds are physical values, without NaN. None: not known.
    """

    rows: int
    nulls: int | None
    low: Any = None
    high: Any = None
    nans: int | None = None
    tight: bool = True
    """Whether the bounds are values of the column; otherwise they may be outside of its values."""


@frozen
class FileFacts:
    """The facts of one file.

    ``columns``: its top-level columns; ``leaves``: the requested leaves outside of lists; ``chunks``: their statistics,
    one per row group with rows. A leaf without chunks has no statistics.
    """

    path: str
    rows: int | None
    """None: only a scan can count the rows."""
    columns: Mapping[str, SparkType] = field(default_factory=dict)
    leaves: Mapping[tuple[str, ...], Leaf] = field(default_factory=dict)
    chunks: Mapping[tuple[str, ...], tuple[Chunk, ...]] = field(default_factory=dict)
    deleted: int | None = 0
    """Number of its rows that are deleted from the table; None: not known. Statistics include deleted rows."""
    precise: FileFacts | None = None
    """More precise facts from the file itself, if these facts have another source; with the same columns and paths."""
    ids: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """The paths of its fields outside of lists by Iceberg's field ids; empty if it has none."""
    contradiction: str = ""
    """The contradiction in its footer, or "". With one, the facts have only columns and the rows of its row groups."""
    missing: int = 0
    """Rows that its footer counts in addition to those of its row groups: they cannot be read."""

    @property
    def live_rows(self) -> int | None:
        """The number of its rows that the table has; None if only a scan can count them."""
        if self.rows is None or self.deleted is None or self.contradiction:
            return None
        return self.rows - self.deleted


class Unreadable(Exception):
    """A file cannot be read, differs from the plan, or does not fit the other files; the text names it."""


class Gone(Unreadable):
    """A planned file or the planned metadata no longer exist."""


class Ambiguous(Exception):
    """A name matches several columns that differ only in case, or matches in some of Spark's comparisons only."""


def folded(text: str) -> str:
    """A text in one case: equal for two texts if and only if Java's ``equalsIgnoreCase`` is true for them.

    Each character is replaced by one character, so positions stay the same.
    """
    return text.lower() if text.isascii() else "".join(map(_folded, text))


@lru_cache(maxsize=4096)
def _folded(char: str) -> str:
    """Java's ``Character.toLowerCase(Character.toUpperCase(c))``, which only maps to single characters."""
    upper = next((one for one in (char.upper(), char.title()) if len(one) == 1), char)
    return "i" if upper == "\u0130" else upper.lower()


def match(name: str, names: Collection[str]) -> str | None:
    """The column with this name: exactly, or else ignoring case like Spark; None if there is none.

    Spark compares names by ``equalsIgnoreCase``, and the names of a table's and a file's columns also in lower case.
    The two rules differ for some letters, such as ``ſ`` and ``s``. Raises Ambiguous if their results differ, and for
    several columns.
    """
    if name in names:
        return name
    found = None
    wanted, lower, plain = folded(name), name.lower(), name.isascii()
    for candidate in names:
        # A name that equals an ASCII name in lower case is also equal by folded().
        if folded(candidate) == wanted or (not plain and candidate.lower() == lower):
            if found is not None:
                raise Ambiguous(f"the name {name!r} matches both {found!r} and {candidate!r}")
            found = candidate
    if found is not None and (folded(found) != wanted or found.lower() != lower):
        raise Ambiguous(
            f"the name {name!r} may or may not match {found!r}, because Spark compares the case of a letter in two "
            f"ways: write {found!r}"
        )
    return found


def may_match(name: str, names: Collection[str]) -> bool:
    """Whether the name matches one of these columns, or may match it (Ambiguous)."""
    try:
        return match(name, names) is not None
    except Ambiguous:
        return True


def split_path(text: str) -> tuple[str, ...]:
    """``a.b`` → ``("a", "b")``; dots between backticks are part of the name, and a doubled backtick is a backtick."""
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
    """The path of a column: first a top-level column with exactly this name, then a path into structs.

    None if there is no such column. Raises Ambiguous.
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
    """The type at a path from :func:`resolve`."""
    found: SparkType = ("struct", tuple(columns.items()))
    for name in path:
        found = dict(found[1])[name]
    return found


def ddl(kind: SparkType) -> str:
    """The type in Spark's DDL. Raises ValueError for other texts: types come from plans and files, and go into SQL."""
    if isinstance(kind, str):
        if not _PLAIN_TYPE.fullmatch(kind):
            raise ValueError(f"{kind!r} is not a Spark type")
        return kind
    if kind[0] == "struct":
        return "struct<" + ",".join(f"{quote(n)}:{ddl(t)}" for n, t in kind[1]) + ">"
    if kind[0] == "array":
        return f"array<{ddl(kind[1])}>"
    return f"map<{ddl(kind[1])},{ddl(kind[2])}>"


def quote(name: str) -> str:
    """The name, quoted for Spark SQL."""
    return "`" + name.replace("`", "``") + "`"


def widest(a: SparkType, b: SparkType) -> SparkType | None:
    """The type to which Spark's Parquet reader widens both types; None if there is none."""
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
"""Maximum digits of a decimal in Spark."""


def decimal_of(kind: str) -> tuple[int, int]:
    """Precision and scale of ``decimal(p,s)``, with Spark's defaults.

    Raises InvalidArgument for a decimal that Spark does not have: schemas are not trusted, and arithmetic with a scale
    of a billion digits would take hours.
    """
    inside = kind.partition("(")[2].rstrip(") ")
    precision, _, scale = inside.partition(",")
    found = int(precision or 10), int(scale or 0)
    if not 0 <= found[1] <= found[0] <= _MOST_DIGITS:
        raise InvalidArgument(f"Spark has no type {shown(kind)}")
    return found


def holds(wide: SparkType, narrow: SparkType) -> bool:
    """Whether Spark reads values of ``narrow`` as ``wide``, which may lack fields of its structs. Raises Ambiguous."""
    if isinstance(wide, tuple) and isinstance(narrow, tuple):
        if wide[0] != narrow[0] or wide[0] == "unreadable":
            return False
        if wide[0] == "struct":
            inner = dict(narrow[1])
            return all((mine := match(n, inner)) is None or holds(kind, inner[mine]) for n, kind in wide[1])
        return all(holds(w, n) for w, n in zip(wide[1:], narrow[1:], strict=True))
    return bool(widest(wide, narrow) == wide)


def of_json(kind: Any) -> SparkType:
    """A type from JSON, which has lists instead of tuples."""
    return tuple(map(of_json, kind)) if isinstance(kind, list) else kind


def follow(path: tuple[str, ...], columns: Mapping[str, SparkType]) -> tuple[str, ...] | None:
    """The path in these columns that matches a path of other columns; None if there is none. Raises Ambiguous."""
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
    """The reason why Spark cannot read a column of this type; None if it can."""
    if not isinstance(kind, tuple):
        return None
    if kind[0] == "unreadable":
        return str(kind[1])
    inner = [t for _, t in kind[1]] if kind[0] == "struct" else list(kind[1:])
    return next((p for p in map(problem, inner) if p), None)


def widened(schemas: Iterable[Iterable[tuple[str, SparkType]]]) -> dict[str, SparkType]:
    """The columns of all schemas, in order of appearance, with types widened to hold all values.

    If types are incompatible, the first one is kept; Spark then reports the error when it reads the other files.
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
