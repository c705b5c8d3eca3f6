"""The jobs that ``own_jobs`` finds and claims on the model store, also without events of the watch."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from distop.invariants.checker import check
from distop.protocol.actor_claims import OWNED_PER_TXN
from distop.protocol.txn import Put
from distop.services.claims import claim_candidates
from distop.services.claims import owned_jobs as m
from distop.services.claims.job_owner import Owner
from tests.support.world import TYPE, World
from tests.unit.support.modelclient import ModelClient
from tests.unit.support.modelfeed import SilentFeed
from tests.unit.support.virtualtime import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from distop.protocol.records import OperationRef

A_WHILE = 5
"""Seconds for which an actor leaves alone what it cannot read."""
SOON = 120.0
"""Seconds within which what changed is found, whether or not anything told of it."""


@pytest.fixture(autouse=True)
def feed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_candidates, "Feed", SilentFeed)


class Play:
    """A cluster with one executor, and actors."""

    def __init__(self) -> None:
        self.client = ModelClient()
        self.world = World(store=self.client.store)
        self.world.join("a")
        self.damaged = False
        """A record was written as no part of distop would."""

    def damage(self, key: str) -> Put:
        """Make a record unreadable; the write that repairs it."""
        kv = self.client.store.get(key)
        assert kv is not None
        self.damaged = True
        self.world.tamper(Put(key, b"what no release writes"))
        return Put(key, kv.value)

    def open(self, jobs: int) -> OperationRef:
        """Start an operation with this number of jobs."""
        world, ref = self.world, self.world.next_ref()
        world.do(world.start(ref))
        if not world.store.get(world.keys.coordinator(ref.table, ref.type)):
            world.do(world.elect("a"))
        world.do(world.plan(ref, jobs))
        return ref

    def actor(self) -> Actor:
        return Actor(self)


class Actor:
    """An actor with a client of its own."""

    def __init__(self, play: Play) -> None:
        self._client = play.client
        self.owner = Owner(play.client, play.world.keys)  # type: ignore[arg-type]

    async def own(self, most: int = 1000) -> list[m.OwnedJob]:
        return await self.owner.own(f"actor-{id(self):x}", {TYPE: None}, most, 3600.0, None)

    async def until_owned(self, count: int = 1) -> list[m.OwnedJob]:
        """Claim once a second, until this number of jobs is owned."""
        jobs = await self.own()
        async with asyncio.timeout(SOON):
            while len(jobs) < count:
                await asyncio.sleep(1.0)
                jobs += await self.own()
        return jobs


def run(work: Callable[[Play], Awaitable[Any]]) -> None:
    async def main() -> None:
        play = Play()
        await work(play)
        assert play.damaged or not check(play.world.keys, play.client.store.history)

    in_virtual_time(main)


@pytest.mark.parametrize("jobs", [1, 2, OWNED_PER_TXN, 2 * OWNED_PER_TXN + 1])
def test_all_jobs_are_claimed_in_as_few_transactions_as_etcd_takes(jobs: int) -> None:
    async def work(play: Play) -> None:
        ref = play.open(jobs)
        owned = await play.actor().own()
        assert sorted(job.ordinal for job in owned) == list(range(jobs))
        assert {job.op for job in owned} == {str(ref)}
        assert play.client.requests.count("own") == -(-jobs // OWNED_PER_TXN)

    run(work)


@pytest.mark.parametrize("jobs", [1, 2, OWNED_PER_TXN + 1])
@pytest.mark.parametrize("operations", [1, 2])
def test_jobs_that_another_actor_gave_back_are_found_again(operations: int, jobs: int) -> None:
    """No watch delivers an event about them."""

    async def work(play: Play) -> None:
        for _ in range(operations):
            play.open(jobs)
        one, other = play.actor(), play.actor()
        owned = await one.until_owned(operations * jobs)
        assert await other.own() == []
        for job in owned:
            await one.owner.give(job.token, m.Release())
        again = await other.until_owned(operations * jobs)
        assert {(job.op, job.ordinal) for job in again} == {(job.op, job.ordinal) for job in owned}
        assert {job.attempt for job in again} == {2}

    run(work)


def test_an_unreadable_operation_is_skipped_and_read_again_later() -> None:
    async def work(play: Play) -> None:
        broken = play.open(1)
        repair = play.damage(play.world.keys.of(broken, "spec"))
        actor, fine = play.actor(), play.open(1)
        assert [job.op for job in await actor.own()] == [str(fine)]
        play.world.tamper(repair)
        await nothing_for_a_while(actor)
        assert [job.op for job in await actor.until_owned()] == [str(broken)]

    run(work)


def test_an_operation_with_an_unreadable_claim_is_skipped_and_listed_again_later() -> None:
    async def work(play: Play) -> None:
        ref = play.open(1)
        one, other = play.actor(), play.actor()
        (job,) = await one.own()
        assert await other.own() == []
        repair = play.damage(play.world.keys.claim(ref, 0))
        await asyncio.sleep(1.0)
        assert await other.own() == []
        play.world.tamper(repair)
        await one.owner.give(job.token, m.Release())
        await nothing_for_a_while(other)
        assert [job.ordinal for job in await other.until_owned()] == [0]

    run(work)


def test_open_operations_are_listed_again_at_most_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be thousands of them."""
    listings = list[float]()

    class CountedFeed(SilentFeed):
        def _list(self) -> None:
            listings.append(asyncio.get_running_loop().time())
            super()._list()

    monkeypatch.setattr(claim_candidates, "Feed", CountedFeed)

    async def work(play: Play) -> None:
        await play.actor().own()
        await asyncio.sleep(SOON)
        assert 1 < len(listings) <= 1 + SOON / 10.0

    run(work)


async def nothing_for_a_while(actor: Actor) -> None:
    for _ in range(A_WHILE):
        assert await actor.own() == []
        await asyncio.sleep(1.0)


def test_a_job_of_a_lost_executor_is_taken_over_without_a_watch_event() -> None:
    """All that is watched is listed again and again."""

    async def work(play: Play) -> None:
        ref = play.open(1)
        play.world.join("b")
        play.world.do(play.world.claim(ref, "b", [0]))
        actor = play.actor()
        assert await actor.own() == []
        play.world.die("b")
        (job,) = await actor.until_owned()
        assert (job.attempt, job.failures) == (2, 1)

    run(work)
