"""What unit tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from distop.clock import source
from distop.runtime import secret_settings
from tests.support.clock import StandingClock

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def clock() -> Iterator[StandingClock]:
    """In the place of the system's clock and chance."""
    one = StandingClock()
    token = source.set(one)
    yield one
    source.reset(token)


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test hides is hidden in that test alone."""
    monkeypatch.setattr(secret_settings, "_hidden", frozenset())
    monkeypatch.setattr(secret_settings, "_any_hidden", None)
