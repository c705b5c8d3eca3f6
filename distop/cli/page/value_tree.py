"""Converts any JSON value to nodes that a page can show: texts, lists, pairs, tables. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MOST = 200
"""Elements of a list, or fields of an object, that a page shows; the others are counted."""
_DEEPEST = 6
_COLUMNS = 8
_LONGEST = 4_000


@dataclass(frozen=True, slots=True)
class Scalar:
    """A text. ``kind``: ``text``, ``number`` or ``word`` (null, true, false)."""

    text: str
    kind: str = "text"


@dataclass(frozen=True, slots=True)
class Items:
    """A list; ``left``: how many elements are not shown."""

    items: tuple[ValueNode, ...]
    left: int = 0


@dataclass(frozen=True, slots=True)
class Pairs:
    """Names with values."""

    pairs: tuple[tuple[str, ValueNode], ...]
    left: int = 0


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of objects that have the same few fields."""

    columns: tuple[str, ...]
    rows: tuple[tuple[ValueNode, ...], ...]
    left: int = 0


ValueNode: TypeAlias = Scalar | Items | Pairs | Grid


def tree(value: Any, depth: int = 0) -> ValueNode:
    """The value as nodes, up to the depth that a page can show; deeper values are JSON text."""
    if isinstance(value, dict | list | tuple) and value:
        if depth >= _DEEPEST:
            return leaf(json.dumps(value, ensure_ascii=False, default=str))
        if isinstance(value, dict):
            shown = list(value.items())[:MOST]
            return Pairs(tuple((str(k), tree(v, depth + 1)) for k, v in shown), len(value) - len(shown))
        if (columns := _columns(value)) is not None:
            rows = tuple(tuple(leaf(row.get(name, "")) for name in columns) for row in value[:MOST])
            return Grid(columns, rows, len(value) - len(rows))
        items = tuple(tree(v, depth + 1) for v in value[:MOST])
        return Items(items, len(value) - len(items))
    return leaf(value)


def _columns(rows: Sequence[Any]) -> tuple[str, ...] | None:
    """The columns of a table, if the values are several objects with plain values; else None."""
    if len(rows) < 2 or not all(isinstance(row, dict) and row for row in rows):
        return None
    names = tuple(dict.fromkeys(str(name) for row in rows for name in row))
    plain = all(not isinstance(value, dict | list) or not value for row in rows for value in row.values())
    alike = sum(len(row) for row in rows) * 2 > len(names) * len(rows)
    return names if plain and alike and len(names) <= _COLUMNS else None


def leaf(value: Any) -> Scalar:
    """The node of a plain or empty value."""
    if isinstance(value, bool) or value is None:
        return Scalar(json.dumps(value), "word")
    if isinstance(value, int | float):
        return Scalar(str(value), "number")  # without separators: it may be a year, or an id
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return Scalar(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…")


def phrase(value: Mapping[str, Any]) -> str:
    """A small object in one line: ``range: column distance, min 0, max 6000``."""
    return "; ".join(f"{name}: {_inline(inner)}" for name, inner in value.items())


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_inline(inner)}" for name, inner in value.items())
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
