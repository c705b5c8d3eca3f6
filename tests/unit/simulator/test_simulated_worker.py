"""The simulator's worker stands in for the real one: what the daemon may ask of the one it may ask of the other."""

from __future__ import annotations

import inspect

import pytest

from distop.worker.daemon_side.host import Worker
from tests.simulator.sim_worker import SimWorker

ASKED = sorted(name for name in dir(Worker) if not name.startswith("_") and callable(getattr(Worker, name)))


@pytest.mark.parametrize("name", ASKED)
def test_it_takes_what_the_real_one_takes(name: str) -> None:
    real = inspect.signature(getattr(Worker, name)).parameters
    simulated = inspect.signature(getattr(SimWorker, name)).parameters
    assert [(p.name, p.kind) for p in simulated.values()] == [(p.name, p.kind) for p in real.values()]
