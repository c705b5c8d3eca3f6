"""Low-level claims in simulated clusters: actors beside executors, and what is seen when a part of that is wrong."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from distop.clock import random
from distop.decide import job_claims
from distop.decide.job_claims import PATIENCE
from distop.protocol import actor_claims
from distop.protocol.txn import Txn, TxnResult
from distop.services.claims.owned_jobs import Release
from tests.simulation.planted_losses import clean_up_before_the_claim
from tests.simulator import Scenario, actors, scenario
from tests.simulator.run import simulate
from tests.simulator.scenario import Wish, plain

if TYPE_CHECKING:
    from collections.abc import Iterable

SEEDS = range(1, 29)


def kinds(seeds: Iterable[int]) -> Counter[str]:
    """What is seen to be broken, in scenarios with actors, until something is."""
    found: Counter[str] = Counter()
    for seed in seeds:
        wanted = replace(scenario(seed), actors=2)
        found.update(breach.kind for breach in simulate(seed, wanted=wanted).breaches)
        if found:
            break
    return found


def test_actors_work_beside_executors_with_faults_and_nothing_is_broken() -> None:
    courses: Counter[str] = Counter()
    for seed in SEEDS[:14]:
        report = simulate(seed, wanted=replace(scenario(seed), actors=1 + seed % 2))
        assert report.breaches == [], f"seed {seed}"
        courses.update(report.courses)
    for name in ("claim by an actor", "extension", "return by an actor", "taken from an actor"):
        assert courses[name] > 3, courses


def test_a_claim_that_is_taken_before_its_time_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_claims, "abandoned_in", lambda claim, unchanged_for: 0.0)
    assert kinds(SEEDS)["taken too early"]


async def give_back_late(client: Any, job: Any, note: Any) -> None:
    """An actor that gives its job back about when others may take it."""
    await asyncio.sleep((job.duration + PATIENCE[1]) * random.uniform(0.9, 1.4))
    await actors._give(client, job, Release(), note)


def late_actors(seed: int) -> Scenario:
    """Two actors and two executors, on jobs that fail where their holder is lost, after a cleanup."""
    argument = {"seed": seed, "partitions": 30, "pace": 0.3, "calls": 0.1, "trouble": 0.3, "chunk": 1000}
    return replace(plain(seed, 2, (Wish(0, 0.3, "lone", "a", argument, None, "collect_all", ()),)), actors=2)


def test_a_job_of_a_late_actor_is_claimed_before_the_cleanup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the actor cannot give it back meanwhile, for another attempt to go on from what was removed."""
    monkeypatch.setattr(actors, "_work", give_back_late)
    seeds = range(11, 41)  # from the first that shows it
    for seed in seeds[:5]:
        assert simulate(seed, wanted=late_actors(seed)).breaches == [], f"seed {seed}"
    clean_up_before_the_claim(monkeypatch)
    found = (breach.text for seed in seeds for breach in simulate(seed, wanted=late_actors(seed)).breaches)
    assert any("had been cleaned up" in text for text in found)


def test_a_take_over_that_does_not_compare_the_fence_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    former = actor_claims._take

    def careless(keys: Any, one: actor_claims.Taking) -> Txn:
        txn = former(keys, one)
        return replace(txn, compares=txn.compares[:1]) if one.seen_mod else txn

    monkeypatch.setattr(actor_claims, "_take", careless)
    assert kinds(SEEDS)


def test_a_return_that_does_not_compare_the_fence_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    former = actor_claims.finish
    monkeypatch.setattr(actor_claims, "finish", lambda *args: replace(former(*args), compares=()))
    assert kinds(range(8, 41))  # from the first that shows it


def test_a_take_over_behind_a_gate_that_is_gone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    former = actor_claims._take

    def careless(keys: Any, one: actor_claims.Taking) -> Txn:
        txn = former(keys, one)
        return replace(txn, compares=txn.compares[1:])

    monkeypatch.setattr(actor_claims, "_take", careless)
    assert kinds(range(24, 121))  # from the first that shows it


def test_the_seeds_have_actors_now_and_then() -> None:
    drawn = Counter(scenario(seed).actors for seed in range(1, 401))
    assert set(drawn) == {0, 1, 2}
    assert drawn[0] > drawn[1] + drawn[2]


def test_a_refusal_tells_whose_the_claim_is() -> None:
    nothing = TxnResult(False, 5, ())
    token = actor_claims.Token.parse("t/copy/1#0@5.0123456789abcdef")
    assert actor_claims.refused_extension(token, nothing) is None
