"""Other names of operation types, by which callers of other systems know them."""

from __future__ import annotations

ALIASES = {"Compact_Table_Job": "compact", "Drop_Table_Purge_Job": "purge"}


def canonical(type_name: str) -> str:
    """The name of a type under which it is documented."""
    return ALIASES.get(type_name, type_name)


def names_of(type_name: str) -> tuple[str, ...]:
    """All names of a type, the canonical one first."""
    first = canonical(type_name)
    return first, *(alias for alias, name in ALIASES.items() if name == first)
