"""Which etcd servers are refused, warned of, and asked for progress."""

from __future__ import annotations

import pytest

from distop.store.versions import judge, orders_requested_progress, parse


@pytest.mark.parametrize(
    ("text", "members", "refused", "warned"),
    [
        ("3.5.1", 3, True, False),
        ("3.5.1", 1, False, True),
        ("3.5.3", 3, False, True),
        ("3.4.23", 1, False, True),
        ("3.3.27", 1, True, False),
        ("3.5.33", 3, False, False),
        ("3.6.13", 3, False, True),
        ("3.6.14", 3, False, False),
        ("3.7.1", 5, False, False),
        ("3.8.0-alpha.1", 3, False, False),
        ("", 3, False, False),  # we may not ask
    ],
)
def test_judgement(text: str, members: int, refused: bool, warned: bool) -> None:
    verdict = judge(parse(text), members)
    assert (bool(verdict.refused), bool(verdict.warning)) == (refused, warned)


@pytest.mark.parametrize(
    ("text", "safe"),
    [("3.5.1", False), ("3.5.8", True), ("3.4.24", False), ("3.4.25", True), ("3.6.0", True), ("", False)],
)
def test_progress_is_asked_only_where_it_is_ordered(text: str, safe: bool) -> None:  # W3
    assert orders_requested_progress(parse(text)) is safe
