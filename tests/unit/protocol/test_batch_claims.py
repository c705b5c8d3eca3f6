"""Claims of untouched jobs in one transaction, all or none: of several operations of one job, and of runs of jobs.

Claims that an earlier copy of the transaction won are recognized.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from distop.invariants.checker import check
from distop.protocol import batch_claims as g
from distop.protocol.jobs import Claim, JobState
from distop.protocol.records import OperationRef
from distop.protocol.txn import MAX_OPERATIONS, Get, Txn, TxnResult, operations
from distop.services.open_operation import OpenOperation
from tests.support.world import World

if TYPE_CHECKING:
    from collections.abc import Callable

MINE = Claim("ex-a", "a", 1, 0)


def opened(count: int) -> tuple[World, list[OperationRef]]:
    """So many operations of one job behind their gates; and two nodes."""
    world = World()
    world.join("a")
    world.join("b")
    world.do(world.elect("a"))
    for first in range(0, count, 20):
        world.do(world.starts(min(20, count - first)))
    refs = sorted(world.view().operations)
    for ref in refs:
        world.do(world.plan(ref, 1))
    return world, refs


def seen(world: World, refs: list[OperationRef]) -> list[g.Untouched]:
    keys = world.keys
    mods = {ref: world.store.mod(keys.gate(ref)) for ref in refs}
    return [g.Untouched(ref, mods[ref], OpenOperation.records(keys, ref)) for ref in refs]


def together(world: World, refs: list[OperationRef]) -> TxnResult:
    return world.store.apply(g.claim_together(world.keys, "a", seen(world, refs), MINE))


def test_several_operations_are_claimed_and_read_in_one_revision() -> None:
    world, refs = opened(3)
    before, asked = world.store.revision, seen(world, refs)
    result = world.store.apply(g.claim_together(world.keys, "a", asked, MINE))
    granted = g.granted_together(result, asked)
    assert [one.fence for one in granted] == [before + 1] * 3
    for ref, one in zip(refs, granted, strict=True):
        assert world.claim_of(ref, 0) == MINE
        spec, arg, plan, chunk = one.records
        assert spec.kv is not None
        assert spec.kv.key == world.keys.of(ref, "spec")
        assert arg.kv is not None
        assert plan.kv is not None
        assert chunk.kv is not None
    assert not check(world.keys, world.store.history)


def paused(world: World, ref: OperationRef) -> None:
    world.do(world.pause(ref))
    world.do(world.resume(ref))


def taken(world: World, ref: OperationRef, job: int = 0) -> None:
    world.do(world.claim(ref, "b", [job]))


def ended(world: World, ref: OperationRef, job: int = 0) -> None:
    taken(world, ref, job)
    world.do(world.report(ref, job, JobState.SUCCESS))


def cancelled(world: World, ref: OperationRef) -> None:
    world.do(world.cancel(ref))


@pytest.mark.parametrize("happens", [paused, taken, ended, cancelled])
def test_a_changed_operation_is_refused_and_the_others_are_claimed_on_their_own(happens: object) -> None:
    world, refs = opened(3)
    asked = seen(world, refs)
    happens(world, refs[1])  # type: ignore[operator]
    listing = world.store.listing()
    assert not world.store.apply(g.claim_together(world.keys, "a", asked, MINE)).succeeded
    assert world.store.listing() == listing, "all or none"
    result = world.store.apply(g.claim_apart(world.keys, "a", asked, MINE))
    assert [one is not None for one in g.granted_apart(result, asked, MINE)] == [True, False, True]
    assert [world.claim_of(ref, 0) == MINE for ref in refs] == [True, False, True]
    assert not check(world.keys, world.store.history)


def test_claims_of_an_earlier_copy_are_recognized_after_the_gate_was_closed() -> None:
    world, refs = opened(3)
    asked = seen(world, refs)
    first = world.store.apply(g.claim_together(world.keys, "a", asked, MINE))  # its answer is lost
    world.do(world.cancel(refs[2]))
    assert not world.store.apply(g.claim_together(world.keys, "a", asked, MINE)).succeeded
    revision = world.store.revision
    found = g.granted_apart(world.store.apply(g.claim_apart(world.keys, "a", asked, MINE)), asked, MINE)
    assert [one.fence for one in found if one is not None] == [first.revision] * 3
    assert world.store.revision == revision, "nothing was written again"


def test_an_expired_session_claims_nothing() -> None:
    world, refs = opened(2)
    asked = seen(world, refs)
    world.die("a")
    for txn in (g.claim_together(world.keys, "a", asked, MINE), g.claim_apart(world.keys, "a", asked, MINE)):
        assert not world.store.apply(txn).succeeded
    assert [world.claim_of(ref, 0) for ref in refs] == [None, None]


RUNS = ((0, 2), (3, 5), (6, 9))
JOBS = [p for first, after in RUNS for p in range(first, after)]


def of_nine_jobs() -> tuple[World, OperationRef, Txn]:
    """An operation of nine jobs, and a claim of three runs of them."""
    world, _ = opened(0)
    ref = world.next_ref()
    world.do(world.start(ref))
    world.do(world.plan(ref, 9))
    gate = world.store.mod(world.keys.gate(ref))
    return world, ref, g.claim_runs(world.keys, ref, gate, "a", RUNS, MINE)


def test_a_claim_of_runs_claims_each_job_of_each_run() -> None:
    world, ref, txn = of_nine_jobs()
    world.do(txn)
    assert [p for p in range(9) if world.claim_of(ref, p) == MINE] == JOBS
    assert not check(world.keys, world.store.history)


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("happens", [taken, ended])
def test_a_changed_job_in_any_run_prevents_all_claims_of_the_runs(
    happens: Callable[[World, OperationRef, int], None], job: int
) -> None:
    world, ref, txn = of_nine_jobs()
    happens(world, ref, job)
    listing = world.store.listing()
    assert not world.store.apply(txn).succeeded
    assert world.store.listing() == listing
    assert not check(world.keys, world.store.history)


def test_an_expired_session_claims_no_runs() -> None:
    world, ref, txn = of_nine_jobs()
    world.die("a")
    assert not world.store.apply(txn).succeeded
    assert [world.claim_of(ref, p) for p in JOBS] == [None] * len(JOBS)


@pytest.mark.parametrize("guard", [0, 1, 2])
def test_each_guard_of_a_batch_claim_is_needed(guard: int) -> None:
    """Each of the three of an operation refuses what the others would let pass."""
    happens = (cancelled, taken, ended)[guard]
    world, refs = opened(1)
    txn = g.claim_together(world.keys, "a", seen(world, refs), MINE)
    happens(world, refs[0])
    without = replace(txn, compares=(*txn.compares[: 1 + guard], *txn.compares[2 + guard :]))
    assert not world.store.apply(txn).succeeded
    assert world.store.apply(without).succeeded
    assert check(world.keys, world.store.history)


def test_the_largest_batch_claims_fit_into_a_transaction() -> None:
    world, refs = opened(g.OPERATIONS_PER_CLAIM)
    asked = [replace(one, records=one.records[:2]) for one in seen(world, refs)]
    assert operations(g.claim_together(world.keys, "a", asked, MINE)) <= MAX_OPERATIONS, "whose plans are not read"
    refs = refs[: g.PLANNED_PER_CLAIM]
    asked = seen(world, refs)
    for txn in (g.claim_apart(world.keys, "b", asked, MINE), g.claim_together(world.keys, "a", asked, MINE)):
        assert operations(txn) <= MAX_OPERATIONS
    assert together(world, refs).succeeded
    more = [*asked, replace(asked[0], records=(Get("x"),) * 4)]
    assert operations(g.claim_together(world.keys, "a", more, MINE)) > MAX_OPERATIONS
