"""Shared fixtures of the tests on the simulator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.simulation.simulated_cluster import SimCluster

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def cluster() -> Iterator[SimCluster]:
    cluster = SimCluster()
    yield cluster
    cluster.loop.end()
    assert cluster.loop.errors == []
