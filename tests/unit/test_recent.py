"""What is made once for several batches and operations."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from distop.recent import Kept


def test_the_one_not_asked_for_for_longest_goes_first() -> None:
    made: list[str] = []
    kept: Kept[str | None] = Kept(2)

    def ask(name: str, *, keep: bool = True) -> None:
        kept.get((name,), lambda: made.append(name), keep=keep)

    for name in ("a", "b", "a", "c", "a", "c"):
        ask(name)
    assert made == ["a", "b", "c"], "None is a value as well"
    ask("b")
    assert made == ["a", "b", "c", "b"], "c came after b, and a was asked for since"
    ask("d", keep=False)
    ask("d", keep=False)
    ask("c")
    assert made == ["a", "b", "c", "b", "d", "d"], "what is not to be kept pushes nothing out"


def test_what_cannot_be_made_is_tried_again() -> None:
    kept: Kept[float] = Kept(2)
    with pytest.raises(ZeroDivisionError):
        kept.get(("a",), lambda: 1 / 0)
    assert kept.get(("a",), lambda: 1.0) == 1.0


def test_batches_ask_at_once() -> None:
    """Making a value pushes others out, also the one that another thread is about to take."""
    kept: Kept[int] = Kept(1)

    def ask(number: int) -> bool:
        return all(kept.get((n,), lambda n=n: n * n) == n * n for n in range(number, number + 200))  # type: ignore[misc]

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(ask, range(40)))
