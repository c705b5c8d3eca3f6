"""Types with two names: the table of aliases is complete, and both names exclude the same types."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import pytest

from distop.behavior import registered
from distop.protocol.table_registry import excluded_by
from distop.protocol.type_aliases import ALIASES, canonical, names_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distop.behavior import Behavior


@cache
def types() -> Mapping[str, type[Behavior]]:
    return {name: entry.load() for name, entry in registered().items()}


def conflicts() -> Mapping[str, Sequence[str]]:
    return {name: behavior.declaration().conflicts_with for name, behavior in types().items()}


def excluded(name: str) -> set[str]:
    """The types that a type excludes by either declaration, by their canonical names."""
    return {canonical(one) for one in excluded_by(name, conflicts()[name], conflicts())}


def test_each_type_that_is_another_one_is_in_the_table() -> None:
    names = {behavior: name for name, behavior in types().items()}
    found = {name: names[base] for behavior, name in names.items() for base in behavior.__bases__ if base in names}
    assert found == ALIASES


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_an_alias_excludes_what_its_type_excludes(alias: str, name: str) -> None:
    assert excluded(alias) == excluded(name)
    assert name in excluded(name)
    assert names_of(alias) == names_of(name) == (name, alias)
