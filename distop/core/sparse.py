"""Collections that are empty in nearly all of very many views: they share one, until there is something to hold."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

T = TypeVar("T")
Key = TypeVar("Key")

NOTHING: Mapping[Any, Any] = MappingProxyType({})
"""What each operation has none of as yet, for all of them: very many may wait."""


def with_entry(held: Mapping[Key, T], key: Key, value: T) -> Mapping[Key, T]:
    """An entry more, in place where there are some."""
    if isinstance(held, dict):
        held[key] = value
        return held
    return {key: value}


def without_entry(held: Mapping[Key, T], key: Key) -> Mapping[Key, T]:
    """An entry less, in place."""
    if isinstance(held, dict):
        held.pop(key, None)
    return held or NOTHING


def without_member(held: AbstractSet[int], number: int) -> AbstractSet[int]:
    """A member less, in place."""
    if isinstance(held, set):
        held.discard(number)
    return held
