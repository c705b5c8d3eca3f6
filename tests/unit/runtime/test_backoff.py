"""Pauses double up to a maximum and are random, so that processes do not retry in step."""

from __future__ import annotations

import contextvars

import pytest

from distop.clock import System, source
from distop.runtime.backoff import Backoff


class Bound(System):
    """Random numbers that are always the lower or always the upper bound."""

    def __init__(self, low: bool) -> None:
        self._low = low

    def uniform(self, a: float, b: float) -> float:  # type: ignore[override]
        return a if self._low else b


def pauses(backoff: Backoff, count: int, *, low: bool) -> list[float]:
    def with_bound() -> list[float]:
        source.set(Bound(low))
        return [backoff.pause() for _ in range(count)]

    return contextvars.copy_context().run(with_bound)


@pytest.mark.parametrize(("low", "share"), [(False, 1.0), (True, 0.5)])
def test_pauses_double_up_to_the_maximum(low: bool, share: float) -> None:
    assert pauses(Backoff(0.5, 3.0), 6, low=low) == [share * whole for whole in (0.5, 1.0, 2.0, 3.0, 3.0, 3.0)]


def test_a_reset_restores_the_first_pause() -> None:
    backoff = Backoff(0.1, 2.0)
    pauses(backoff, 4, low=False)
    backoff.reset()
    assert pauses(backoff, 2, low=False) == [0.1, 0.2]


def test_pauses_stay_at_the_maximum() -> None:
    assert pauses(Backoff(0.02, 2.0), 5_000, low=False)[-1] == 2.0
