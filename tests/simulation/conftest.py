"""What several simulated tests begin with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.simulation.worlds import World

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.loop.end()
    assert world.loop.troubles == []
