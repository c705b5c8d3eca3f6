"""A poll stands behind every watch (P24): where none of them ever tells anything, all is done all the same."""

from __future__ import annotations

from typing import Any

import pytest

from distop.protocol.jobs import Claim
from distop.protocol.records import OperationRef
from distop.protocol.txn import Put, Txn
from tests.simulation.planted_limits import forget_claims
from tests.simulation.test_scenarios import argument
from tests.simulator import Simulation, run
from tests.simulator.run import quietly
from tests.simulator.scenario import Act, Wish, plain, scenario
from tests.simulator.scenes import gates_change_at_once, plainly

COORDINATORS = 330.0
"""Seconds between two listings of a coordinator's, at most."""


@pytest.mark.parametrize("acts", [(), (Act(5.0, "cancel"),)], ids=["to its end", "cancelled"])
@pytest.mark.parametrize("seed", range(3))
def test_all_ends_where_no_watch_tells_anything(
    seed: int, acts: tuple[Act, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The streams stand, and nothing comes on them: no event, and no word of how far the server is."""
    monkeypatch.setattr(run, "LIVENESS", 2 * COORDINATORS)
    wish = Wish(0, 0.5, "check", "a", argument(seed, 12, 1.0), None, "collect_all", acts)
    with quietly():
        sim = Simulation(plain(seed, 2, [wish], poll=2.0))
        swallowed: list[int] = []

        def swallow(watch: object, changes: list[Any], revision: int) -> None:
            swallowed.append(revision)

        monkeypatch.setattr(sim.etcd.watching, "_send", swallow)
        monkeypatch.setattr(sim.etcd.watching, "progress", lambda *_: None)
        report = sim.run()
    assert swallowed
    assert report.breaches == []
    assert (report.ended, report.claimed) == (1, 2), "both executors found work"
    assert sim.told.ended == {"a/check/1": "cancelled" if acts else "success"}


@pytest.mark.parametrize("seed", range(1, 6))
def test_claims_that_an_executor_forgets_are_given_back(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_claims(monkeypatch)
    with quietly():
        report = Simulation(gates_change_at_once(plainly(scenario(seed, scenes=False)))).run()
    assert report.breaches == []


def test_a_poll_gives_back_a_claim_unknown_to_its_holder() -> None:
    """Nobody else may take it while the session lives: the operation would never end."""
    wish = Wish(0, 0.5, "check", "a", {**argument(1, 12, 1.0), "trouble": 0.0}, None, "collect_all", ())
    ref, job = OperationRef("a", "check", "", 1), 11
    unknown: list[str] = []
    with quietly():
        sim = Simulation(plain(1, 2, [wish], poll=2.0))

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
    assert sim.told.ended == {"a/check/1": "success"}
