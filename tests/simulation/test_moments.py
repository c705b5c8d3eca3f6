"""Moments of the fault list that are too short to be met from outside: each is caused for certain, on the model."""

from __future__ import annotations

from typing import Any

import pytest

from distop.core import keys as K
from distop.core.txn import Put, Txn
from distop.testing.simulation import Simulation
from distop.testing.simulation.network import Fate
from distop.testing.simulation.run import quietly
from distop.testing.simulation.scenario import Fault, Wish
from tests.simulation.test_scenarios import argument, small


def incarnations(sim: Simulation) -> list[str]:
    """All that there ever were, by their node keys."""
    written = [
        change.kv.key
        for _, changes in sim.etcd.store.history
        for change in changes
        if change.kv.key.startswith(f"{K.NODE}.") and not change.deleted
    ]
    return list(dict.fromkeys(written))


def writes(txn: Txn) -> bool:
    return any(isinstance(op, Put) for op in txn.success)


def test_an_operation_that_is_over_before_its_start_is_answered() -> None:
    """F29: the start is written and its answer lost. Until the client asks again the operation has run, ended, and is
    cleaned up: its history tells the client that the request has its operation.
    """
    wish = Wish(0, 0.5, "quick", "a", argument(5, 2, 0.02), None, "collect_all", ())
    with quietly():
        sim = Simulation(small(5, 1, wish))
        starts: list[float] = []
        sent = [False]

        def sending(process: object, path: str, asked: Any) -> float:
            sent[0] = process is sim.clients[0] and isinstance(asked, Txn) and writes(asked)
            if sent[0]:
                starts.append(sim.loop.now)
            return 0.0

        def fate(process: object, path: str) -> Fate | None:
            return Fate("lost", silent=True) if sent[0] and len(starts) == 1 else None

        sim.network.sending, sim.network.fate = sending, fate
        report = sim.run()
    assert len(starts) == 2, "the client asked again, once"
    gone = {
        revision
        for revision, changes in sim.etcd.store.history
        for change in changes
        if change.deleted and change.kv.key.startswith(f"{K.PENDING}.")
    }
    cleaned = max(at for at, revision, _, _ in sim.log if revision in gone)
    assert starts[0] < cleaned < starts[1], "all of it was gone by then"
    assert report.breaches == []
    assert sim.told.started == {"request-0": "a/quick/1"}
    assert sim.told.ended == {"a/quick/1": "success"}


@pytest.mark.parametrize("seed", range(5))
def test_renewals_that_a_deposed_leader_answers_with_unknown(seed: int) -> None:
    """F13: "not a primary lessor" arrives as UNKNOWN, and says nothing of the lease: it is asked again, and the session
    goes on as it was.
    """
    deposed = Fault("deposed", 1.0, 2.0, (0.0, 0.0, 0.0, 0.0))
    wish = Wish(0, 0.5, "check", "a", argument(seed, 12, 0.3), None, "collect_all", ())
    with quietly():
        sim = Simulation(small(seed, 2, wish, deposed))
        told: list[float] = []
        error = sim.network.renewal_error

        def renewal_error() -> object:
            found = error()
            if found is not None:
                told.append(sim.loop.now)
            return found

        sim.network.renewal_error = renewal_error  # type: ignore[method-assign,assignment]
        report = sim.run()
    assert told, "renewals were answered so"
    assert report.breaches == []
    assert len(incarnations(sim)) == 2, "nobody lost a session"
