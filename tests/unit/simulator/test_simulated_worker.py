"""The simulated worker has the methods of the real one, with the same parameters."""

from __future__ import annotations

import inspect

import pytest

from distop.worker.daemon_side.host import WorkerHost
from tests.simulator.sim_worker import SimWorker

METHODS = sorted(name for name in dir(WorkerHost) if not name.startswith("_") and callable(getattr(WorkerHost, name)))


@pytest.mark.parametrize("name", METHODS)
def test_a_simulated_method_has_the_parameters_of_the_real_one(name: str) -> None:
    real = inspect.signature(getattr(WorkerHost, name)).parameters
    simulated = inspect.signature(getattr(SimWorker, name)).parameters
    assert [(p.name, p.kind) for p in simulated.values()] == [(p.name, p.kind) for p in real.values()]
