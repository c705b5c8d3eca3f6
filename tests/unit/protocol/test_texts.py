"""Texts in errors: a value is quoted, and cut where it is long."""

from __future__ import annotations

from distop.protocol.texts import shown


def test_a_value_is_quoted_up_to_the_limit_and_its_cut_is_marked() -> None:
    assert shown("a" * 200) == f"'{'a' * 200}'"
    assert shown("a" * 201) == f"'{'a' * 200}…"
    assert shown(["a" * 300]) == f"['{'a' * 198}…"
