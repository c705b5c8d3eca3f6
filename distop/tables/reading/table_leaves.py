"""Gives the leaves of a file the names and types of its table, for formats whose tables have their own columns."""

from __future__ import annotations

from distop.tables.reading.file_facts import Leaf


def in_table(found: Leaf, ours: Leaf) -> Leaf:
    """The table's leaf with the physical form of a file's leaf; its kind is "other" if bounds are not comparable."""
    kind = found.kind if ours.kind == found.kind and _widens(found, ours) else "other"
    return Leaf(ours.path, kind, ours.type, found.bits, found.scale, found.optional)


def _widens(found: Leaf, ours: Leaf) -> bool:
    if found.type == ours.type:
        return True
    if ours.kind == "decimal":
        return found.scale == ours.scale
    return ours.kind in ("int", "float") and found.bits <= ours.bits
