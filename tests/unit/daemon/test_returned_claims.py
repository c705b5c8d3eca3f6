"""Claims that an executor gives back without running a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from distop.errors import PermissionDenied
from distop.protocol.txn import Delete, Txn
from distop.services.open_operation import OpenOperation
from tests.unit.daemon.claiming import Running, open_operation

if TYPE_CHECKING:
    from tests.unit.support.clock import StandingClock


async def test_no_job_starts_under_a_claim_that_is_being_given_back(
    monkeypatch: pytest.MonkeyPatch, clock: StandingClock
) -> None:
    """The executor could not read the operation whose job it had claimed. Its next round found the claim, took it for
    its own whose answer was lost, and started the job. Then the claim was given back.

    Seed 13925 of the simulator found it, by luck: a role has to be revoked between a claim and the next read of the
    plan, and be restored such that the next round comes before the retried release. No crash point revokes a role.
    """
    world, ref = open_operation(1)
    running, former = Running(world, clock), OpenOperation.of

    async def of(*args: Any) -> OpenOperation:
        monkeypatch.setattr(OpenOperation, "of", former)
        raise PermissionDenied("the role was revoked")

    monkeypatch.setattr(OpenOperation, "of", of)
    assert await running.serve(ref) == [0]
    assert len(running.submitted.writes) == 1
    assert await running.serve(ref) == [0]
    assert running.started == []
    assert running.executor.busy, "it would report that it is drained"
    running.submitted.apply(world.store)
    assert running.held(ref) == []
    assert not running.executor.busy
    assert await running.serve(ref) == [0]
    assert running.started == [0]


@pytest.mark.parametrize("jobs", [1, 4])
@pytest.mark.parametrize("refused", [False, True])
async def test_claims_that_a_poll_gives_back_are_not_claimable_until_that_is_written(
    jobs: int, refused: bool, clock: StandingClock
) -> None:
    """They have an unknown outcome: their transaction was applied although its round failed."""
    world, ref = open_operation(jobs)
    world.do(world.claim(ref, "a", list(range(jobs))))
    running = Running(world, clock)
    running.sees()
    for p, seen in world.op(ref).claims.items():
        running.executor.give_back(ref, p, seen.value, seen.mod)
    await running.serve(ref)
    assert running.started == []
    if refused:
        world.store.apply(Txn((), tuple(Delete(world.keys.claim(ref, p)) for p in range(jobs))))
    running.submitted.apply(world.store)
    await running.serve(ref)  # may assume that all are free
    assert await running.serve(ref) == list(range(jobs))
    assert sorted(running.started) == list(range(jobs))
