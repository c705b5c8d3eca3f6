"""Polls back all watches (P24): operations end even if no watch delivers anything."""

from __future__ import annotations

from typing import Any

import pytest

from distop.protocol.jobs import Claim
from distop.protocol.records import OperationRef
from distop.protocol.txn import Put, Txn
from tests.simulation.planted_limits import forget_claims
from tests.simulation.test_found_bugs import argument
from tests.simulator import Simulation, run
from tests.simulator.run import without_logs
from tests.simulator.scenario import Action, Submission, draw_scenario, plain
from tests.simulator.scenes import gates_changed_at_once, simplified

COORDINATORS = 330.0
"""Maximum seconds between two listings by a coordinator."""


@pytest.mark.parametrize("actions", [(), (Action(5.0, "cancel"),)], ids=["to its end", "cancelled"])
@pytest.mark.parametrize("seed", range(3))
def test_operations_end_although_no_watch_delivers_anything(
    seed: int, actions: tuple[Action, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The streams are open, but deliver neither events nor progress."""
    monkeypatch.setattr(run, "LIVENESS", 2 * COORDINATORS)
    submission = Submission(0, 0.5, "check", "a", argument(seed, 12, 1.0), None, "collect_all", actions)
    with without_logs():
        sim = Simulation(plain(seed, 2, [submission], poll=2.0))
        swallowed: list[int] = []

        def swallow(watch: object, changes: list[Any], revision: int) -> None:
            swallowed.append(revision)

        monkeypatch.setattr(sim.etcd.watching, "send", swallow)
        monkeypatch.setattr(sim.etcd.watching, "progress", lambda *_: None)
        report = sim.run()
    assert swallowed
    assert report.breaches == []
    assert (report.ended, report.claimed) == (1, 2), "an executor found no work"
    assert sim.answers.ended == {"a/check/1": "cancelled" if actions else "success"}


@pytest.mark.parametrize("seed", range(1, 6))
def test_claims_that_an_executor_forgets_are_released(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_claims(monkeypatch)
    with without_logs():
        report = Simulation(gates_changed_at_once(simplified(draw_scenario(seed, scenes=False)))).run()
    assert report.breaches == []


def test_a_poll_releases_a_claim_unknown_to_its_holder() -> None:
    """No other executor may take it while the session lives, so the operation would never end."""
    submission = Submission(0, 0.5, "check", "a", {**argument(1, 12, 1.0), "trouble": 0.0}, None, "collect_all", ())
    ref, job = OperationRef("a", "check", "", 1), 11
    unknown: list[str] = []
    with without_logs():
        sim = Simulation(plain(1, 2, [submission], poll=2.0))

        def claim() -> None:
            process, before = sim.machines[0].process, sim.etcd.revision
            assert process is not None
            assert sim.etcd.store.get(sim.keys.claim(ref, job)) is None
            held = Claim(sim.machines[0].name, process.label, 1, 0)
            sim.etcd.store.apply(Txn((), (Put(sim.keys.claim(ref, job), held.encode()),)))
            sim.etcd._commit(before, process.label)
            unknown.append(process.label)

        sim.loop.world_at(2.0, claim)
        report = sim.run()
    assert unknown
    assert report.breaches == []
    assert sim.answers.ended == {"a/check/1": "success"}
