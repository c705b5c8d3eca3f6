"""Claims that etcd rejects as invalid: sent in smaller groups, and reported if rejected alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from distop.daemon.rejected_writes import PAUSE
from distop.protocol import txn as txns
from distop.protocol.jobs import Claim, JobState
from distop.protocol.state_tables import JobStage
from distop.protocol.txn import Put, Txn
from tests.support.world import TYPE, World
from tests.unit.daemon.claiming import Running, open_operation

if TYPE_CHECKING:
    from distop.protocol.records import OperationRef
    from tests.unit.support.clock import StandingClock

pytestmark = pytest.mark.malformed


def lost(world: World, ref: OperationRef, partitions: int, attempt: int = 1) -> None:
    """These jobs were claimed by ``b``, which is gone."""
    world.join("b")
    for p in range(partitions):
        claim = Claim("ex-b", "b", attempt, attempt - 1)
        world.store.apply(Txn((), (Put(world.keys.claim(ref, p), claim.encode()),)))
    world.die("b")


@pytest.mark.parametrize("scattered", [False, True])
async def test_a_group_that_is_too_large_is_claimed_in_smaller_ones(
    scattered: bool, monkeypatch: pytest.MonkeyPatch, clock: StandingClock
) -> None:
    """Neighbours, which are claimed as runs, and single jobs."""
    world, ref = open_operation(200)
    ended = list(range(0, 200, 2)) if scattered else []
    for p in ended:
        world.do(world.claim(ref, "a", [p]))
        world.do(world.report(ref, p, JobState.SUCCESS))
    running = Running(world, clock)
    monkeypatch.setattr(txns, "MAX_OPERATIONS", 24)
    assert await running.serve(ref) == [p for p in range(200) if p not in ended]
    assert running.rejections == {}
    assert running.wait(ref) <= 0


async def test_a_claim_that_is_rejected_alone_is_reported_and_the_others_are_granted(clock: StandingClock) -> None:
    world, ref = open_operation(100)
    running = Running(world, clock)
    running.poisoned = {world.keys.claim(ref, 7)}
    others = [p for p in range(100) if p != 7]
    pauses = []
    for _ in range(4):
        assert await running.serve(ref) == others
        assert running.rejections == {str(ref): "claims: etcdserver: request is too large"}
        pauses.append(running.wait(ref))
        running.executor._backlog.ran(ref)
        assert running.wait(ref) == pauses[-1], "the end of another job does not shorten the pause"
        clock.now += pauses[-1]
    assert PAUSE[0] / 2 <= pauses[0] < pauses[-1]
    running.poisoned.clear()
    assert await running.serve(ref) == list(range(100))
    assert running.rejections == {}
    assert running.wait(ref) <= 0


async def test_an_operation_whose_claims_are_rejected_blocks_no_other(clock: StandingClock) -> None:
    world, ref = open_operation(3)
    other = world.next_ref()
    world.do(world.start(other))
    world.do(world.plan(other, 2))
    running = Running(world, clock)
    running.poisoned = {world.keys.claim(ref, p) for p in range(3)}
    await running.serve(ref)
    assert (running.held(ref), running.held(other)) == ([], [0, 1])
    assert list(running.rejections) == [str(ref)]


@pytest.mark.parametrize("poisoned", [False, True])
async def test_a_claim_without_a_read_that_is_rejected_is_retried_with_a_read(
    poisoned: bool, monkeypatch: pytest.MonkeyPatch, clock: StandingClock
) -> None:
    """A new operation, with more jobs than etcd accepts in one transaction."""
    world, ref = open_operation(30)
    running = Running(world, clock, slots=30)
    running.poisoned = {world.keys.claim(ref, 29)} if poisoned else set()
    monkeypatch.setattr(txns, "MAX_OPERATIONS", 24)
    assert await running.serve(ref) == list(range(29 if poisoned else 30))
    assert list(running.rejections) == ([str(ref)] if poisoned else [])


@pytest.mark.parametrize("attempt", [1, 3])
async def test_takeovers_and_ends_of_lost_jobs_are_sent_in_smaller_groups(
    attempt: int, monkeypatch: pytest.MonkeyPatch, clock: StandingClock
) -> None:
    """Jobs that are retried, and jobs that have no attempt left."""
    world, ref = open_operation(60)
    lost(world, ref, 40, attempt)
    running = Running(world, clock)
    running.sees()
    monkeypatch.setattr(txns, "MAX_OPERATIONS", 24)
    key = world.keys.claim(ref, 7) if attempt == 1 else world.keys.job(ref, 7, "outcome")
    running.poisoned = {key}
    await running.serve(ref)  # assumes that all are free
    for _ in range(2):
        held = await running.serve(ref)
        assert list(running.rejections) == [str(ref)]
    ended = [p for p in range(60) if world.job_stage(ref, p) is JobStage.FAILED]
    assert len(ended) == (0 if attempt == 1 else 39)
    assert sorted([*held, *ended]) == [p for p in range(60) if p != 7]
    running.poisoned.clear()
    await running.serve(ref)
    assert running.rejections == {}


async def test_lost_claims_that_no_claim_compares_are_revoked_in_smaller_groups(
    monkeypatch: pytest.MonkeyPatch, clock: StandingClock
) -> None:
    world, ref = open_operation(60, max_jobs=40)
    lost(world, ref, 40)
    running = Running(world, clock)
    ctx = running.executor._ctx
    ctx.limits = replace(ctx.limits, gone=0)
    running.sees()
    monkeypatch.setattr(txns, "MAX_OPERATIONS", 24)
    running.poisoned = {world.keys.claim(ref, 7)}
    for _ in range(2):
        held = await running.serve(ref)
        assert len(held) == 39, "the one that is rejected counts as live"
        assert list(running.rejections) == [str(ref)]
    assert [p for p, seen in world.op(ref).claims.items() if seen.value.incarnation == "b"] == [7]
    running.poisoned.clear()
    await running.serve(ref)
    assert running.rejections == {}


async def test_one_rejected_small_operation_is_reported_and_the_others_are_claimed(clock: StandingClock) -> None:
    world, first = open_operation(1)
    refs = [first]
    for _ in range(5):
        refs.append(world.next_ref())
        world.do(world.start(refs[-1]))
        world.do(world.plan(refs[-1], 1))
    running = Running(world, clock, slots=4)
    running.poisoned = {world.keys.claim(refs[2], 0)}
    for _ in range(9):
        running.executor._backlog.ran_together(TYPE, [0.0])
    await running.serve(first)
    assert [len(running.held(ref)) for ref in refs] == [1, 1, 0, 0, 1, 1], "etcd rejects each group with it"
    await running.serve(first)
    running.executor._assign()  # the one that is rejected waits
    await asyncio.gather(*running.executor._rounds)
    assert [len(running.held(ref)) for ref in refs] == [1, 1, 0, 1, 1, 1]
    assert list(running.rejections) == [str(refs[2])]


@pytest.mark.parametrize("how", ["gone", "drained"])
async def test_operations_that_are_not_claimed_any_more_are_not_reported(how: str, clock: StandingClock) -> None:
    world, ref = open_operation(3)
    running = Running(world, clock)
    running.poisoned = {world.keys.claim(ref, p) for p in range(3)}
    await running.serve(ref)
    assert list(running.rejections) == [str(ref)]
    ctx = running.executor._ctx
    if how == "gone":
        ctx.cluster.gates.clear()
    else:
        ctx.cluster.drains.add("ex-a")
    running.executor.cluster_changed(hint=True)
    assert running.rejections == {}
