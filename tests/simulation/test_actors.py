"""Claims by actors beside executors in simulated clusters, and the breaches that bugs in them cause."""

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
from tests.simulator import Scenario, actors, draw_scenario
from tests.simulator.run import simulate
from tests.simulator.scenario import Submission, plain

if TYPE_CHECKING:
    from collections.abc import Iterable

SEEDS = range(1, 29)


def kinds(seeds: Iterable[int]) -> Counter[str]:
    """The kinds of breaches in the first of these scenarios, with actors, that has any."""
    found: Counter[str] = Counter()
    for seed in seeds:
        scenario = replace(draw_scenario(seed), actors=2)
        found.update(breach.kind for breach in simulate(seed, scenario=scenario).breaches)
        if found:
            break
    return found


def test_actors_beside_executors_with_faults_cause_no_breach() -> None:
    paths: Counter[str] = Counter()
    for seed in SEEDS[:14]:
        report = simulate(seed, scenario=replace(draw_scenario(seed), actors=1 + seed % 2))
        assert report.breaches == [], f"seed {seed}"
        paths.update(report.paths)
    for name in ("claim by an actor", "extension by an actor", "return by an actor", "take-over from an actor"):
        assert paths[name] > 3, paths


def test_a_claim_that_is_taken_too_early_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_claims, "abandoned_in", lambda claim, unchanged_for: 0.0)
    assert kinds(SEEDS)["claim taken too early"]


async def give_back_late(client: Any, job: Any, note: Any) -> None:
    """An actor that returns its job at about the time when others may take it."""
    await asyncio.sleep((job.duration + PATIENCE[1]) * random.uniform(0.9, 1.4))
    await actors._return_job(client, job, Release(), note)


def late_actors(seed: int) -> Scenario:
    """Two actors and two executors, with jobs that fail after a cleanup if their holder is lost."""
    argument = {"seed": seed, "partitions": 30, "pace": 0.3, "calls": 0.1, "trouble": 0.3, "chunk": 1000}
    return replace(plain(seed, 2, (Submission(0, 0.3, "lone", "a", argument, None, "collect_all", ()),)), actors=2)


def test_a_job_of_a_late_actor_is_claimed_before_the_cleanup(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the actor cannot return it during the cleanup, and no attempt resumes from removed output."""
    monkeypatch.setattr(actors, "work_on", give_back_late)
    seeds = range(11, 41)  # the first one shows the bug
    for seed in seeds[:5]:
        assert simulate(seed, scenario=late_actors(seed)).breaches == [], f"seed {seed}"
    clean_up_before_the_claim(monkeypatch)
    found = (breach.text for seed in seeds for breach in simulate(seed, scenario=late_actors(seed)).breaches)
    assert any("had been cleaned up" in text for text in found)


def test_a_take_over_that_does_not_compare_the_fence_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    former = actor_claims.take

    def careless(keys: Any, one: actor_claims.Taking) -> Txn:
        txn = former(keys, one)
        return replace(txn, compares=txn.compares[:1]) if one.seen_mod else txn

    monkeypatch.setattr(actor_claims, "take", careless)
    assert kinds(SEEDS)


def test_a_return_that_does_not_compare_the_fence_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    former = actor_claims.finish
    monkeypatch.setattr(actor_claims, "finish", lambda *args: replace(former(*args), compares=()))
    assert kinds(range(8, 41))  # the first one shows the bug


def test_a_take_over_that_does_not_compare_the_gate_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    former = actor_claims.take

    def careless(keys: Any, one: actor_claims.Taking) -> Txn:
        txn = former(keys, one)
        return replace(txn, compares=txn.compares[1:])

    monkeypatch.setattr(actor_claims, "take", careless)
    assert kinds(range(41, 121))  # the first one shows the bug


def test_some_seeds_have_actors() -> None:
    drawn = Counter(draw_scenario(seed).actors for seed in range(1, 401))
    assert set(drawn) == {0, 1, 2}
    assert drawn[0] > drawn[1] + drawn[2]


def test_a_refused_extension_without_responses_names_no_holder() -> None:
    nothing = TxnResult(False, 5, ())
    token = actor_claims.Token.parse("t/copy/1#0@5.0123456789abcdef")
    assert actor_claims.refused_extension(token, nothing) is None
