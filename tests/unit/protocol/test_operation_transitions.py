"""Every stage × event pair of the state tables, against the model store; and that guards are one-way (T9)."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distop.decide import job_claims
from distop.invariants.checker import check
from distop.protocol import actor_claims, batch_claims, job_transitions, state_tables
from distop.protocol import operation_finish as f
from distop.protocol import operation_transitions as t
from distop.protocol import pending_operations as w
from distop.protocol.dependencies import Hold
from distop.protocol.identity import Takes
from distop.protocol.jobs import Claim, JobState
from distop.protocol.keys import UNIQUE
from distop.protocol.operation_options import Options
from distop.protocol.plan import Gate, PartitionPlan, Plan, decode_chunk, encode_chunk
from distop.protocol.records import Decision, Spec, State
from distop.protocol.state_tables import Event, JobEvent, JobStage, Stage
from distop.protocol.transaction_groups import merged
from distop.protocol.txn import MAX_OPERATIONS, Put, Txn, operations
from distop.services.open_operation import OpenOperation
from tests.support.random_events import build, random_event, world_with_node
from tests.support.world import World, outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.protocol.records import OperationRef

JOBS = 2


def ready(*, planned_first: bool = True) -> tuple[World, OperationRef]:
    """Executors a and b, a elected, and an operation that is open (or, not planned, in planning)."""
    world = World()
    world.join("a")
    world.join("b")
    ref = world.next_ref()
    world.do(world.start(ref))
    world.do(world.elect("a"))
    if planned_first:
        world.do(world.plan(ref, JOBS))
    return world, ref


def done(world: World, ref: OperationRef) -> None:
    world.do(world.claim(ref, "a", range(JOBS)))
    for p in range(JOBS):
        world.do(world.report(ref, p, JobState.SUCCESS))


def absent_() -> tuple[World, OperationRef]:
    world, _ = ready()
    return world, world.next_ref()


def over() -> tuple[World, OperationRef]:
    world, _ = ready()
    ref = world.run_operation(JOBS)
    return world, ref


def open_() -> tuple[World, OperationRef]:
    return ready()


def open_done() -> tuple[World, OperationRef]:
    world, ref = ready()
    done(world, ref)
    return world, ref


def open_claimed() -> tuple[World, OperationRef]:
    world, ref = ready()
    world.do(world.claim(ref, "a", [0]))
    return world, ref


def waiting() -> tuple[World, OperationRef]:
    world, _ = ready()
    ref = world.next_ref()
    world.do(world.submit(ref))
    return world, ref


def waiting_for_another() -> tuple[World, OperationRef]:
    world, pred = ready()
    ref = world.next_ref()
    world.do(world.submit(ref, pred))
    return world, ref


def waiting_held() -> tuple[World, OperationRef]:
    world, _ = ready()
    ref = world.next_ref()
    world.do(w.hold(world.keys, "graph-1", Hold("graph"), 0))
    world.do(world.submit(ref, hold="graph-1"))
    return world, ref


def waiting_of_an_id() -> tuple[World, OperationRef]:
    world, _ = ready()
    ref = world.next_ref()
    world.do(world.start_of("x", waits=True))
    return world, ref


def waiting_behind_one_of_its_id() -> tuple[World, OperationRef]:
    world, _ = ready()
    world.do(world.start_of("x", waits=False))
    ref = world.next_ref()
    world.do(world.start_of("x", waits=True))
    return world, ref


def open_of_an_id() -> tuple[World, OperationRef]:
    world, _ = ready()
    ref = world.next_ref()
    world.do(world.start_of("x", waits=False))
    world.do(world.plan(ref, JOBS))
    return world, ref


def cleaning_awaited() -> tuple[World, OperationRef]:
    world, ref = open_done()
    world.do(world.submit(world.next_ref(), ref))
    world.do(world.finish_at_once(ref))
    return world, ref


def planning() -> tuple[World, OperationRef]:
    return ready(planned_first=False)


def paused() -> tuple[World, OperationRef]:
    world, ref = ready()
    world.do(world.pause(ref))
    return world, ref


def paused_done() -> tuple[World, OperationRef]:
    world, ref = open_done()
    world.do(world.pause(ref))
    return world, ref


def paused_claimed() -> tuple[World, OperationRef]:
    world, ref = open_claimed()
    world.do(world.wait_again(ref, 0, failed=False))
    world.do(world.pause(ref))
    return world, ref


def paused_now() -> tuple[World, OperationRef]:
    world, ref = open_claimed()
    world.do(world.pause_now(ref))
    world.do(world.wait_again(ref, 0, failed=False))
    return world, ref


def paused_unplanned() -> tuple[World, OperationRef]:
    world, ref = planning()
    world.do(world.pause(ref))
    return world, ref


def cancelling() -> tuple[World, OperationRef]:
    world, ref = ready()
    world.do(world.cancel(ref))
    return world, ref


def cancelling_unplanned() -> tuple[World, OperationRef]:
    world, ref = planning()
    world.do(world.cancel(ref))
    return world, ref


def cancelling_lost() -> tuple[World, OperationRef]:
    world, ref = open_claimed()
    world.do(world.cancel(ref))
    world.die("a")
    world.do(world.elect("b"))
    return world, ref


def cancelling_released() -> tuple[World, OperationRef]:
    world, ref = open_claimed()
    world.do(world.wait_again(ref, 0, failed=False))
    world.do(world.cancel(ref))
    return world, ref


def completing() -> tuple[World, OperationRef]:
    world, ref = open_done()
    world.do(world.decide(ref))
    return world, ref


def given_up() -> tuple[World, OperationRef]:
    world, ref = planning()
    world.do(world.give_up(ref))
    return world, ref


def cleaning() -> tuple[World, OperationRef]:
    world, ref = completing()
    world.do(world.finish(ref))
    return world, ref


def cleaning_at_once() -> tuple[World, OperationRef]:
    world, ref = open_done()
    world.do(world.finish_at_once(ref))
    return world, ref


def cleaning_cancelled() -> tuple[World, OperationRef]:
    world, ref = cancelling()
    world.do(world.finish_at_once(ref))
    return world, ref


PLACES: dict[Stage, tuple[Callable[[], tuple[World, OperationRef]], ...]] = {
    Stage.ABSENT: (absent_,),
    Stage.WAITING: (waiting, waiting_for_another, waiting_held, waiting_of_an_id, waiting_behind_one_of_its_id),
    Stage.PLANNING: (planning,),
    Stage.OPEN: (open_, open_done, open_claimed, open_of_an_id),
    Stage.PAUSED: (paused, paused_done, paused_claimed, paused_now, paused_unplanned),
    Stage.CANCELLING: (cancelling, cancelling_unplanned, cancelling_lost, cancelling_released),
    Stage.COMPLETING: (completing, given_up),
    Stage.CLEANING: (cleaning, cleaning_at_once, cleaning_cancelled, cleaning_awaited),
}
"""How to get into each stage, in all the ways that differ."""

UNDECIDED = (paused, paused_done, cancelling, cancelling_unplanned)

ABLE: dict[Event, frozenset[Callable[[], tuple[World, OperationRef]]]] = {
    Event.BEGIN: frozenset({waiting, waiting_of_an_id}),
    Event.BEGIN_PLANNED: frozenset({waiting, waiting_of_an_id}),
    Event.JOIN: frozenset({waiting, waiting_of_an_id}),
    Event.END_WAITING: frozenset({waiting, waiting_for_another, waiting_of_an_id, waiting_behind_one_of_its_id}),
    Event.SIGNAL: frozenset({cleaning_awaited}),
    Event.END: frozenset({cleaning, cleaning_at_once, cleaning_cancelled}),
    Event.REVOKE: frozenset({cancelling_lost}),
    Event.REAP: frozenset({cancelling_lost, cancelling_released}),
    Event.DECIDE: frozenset({open_, open_done, open_of_an_id, *UNDECIDED}),
    Event.FINISH_AT_ONCE: frozenset({open_, open_done, open_of_an_id, *UNDECIDED}),
    Event.FINISH_AND_END: frozenset({open_, open_done, open_of_an_id}),
}
"""Events that need more than the stage: a claim to revoke or reap, no claim left, nothing left to wait for, no hold."""

PAIRS = [(stage, event, place) for stage, places in PLACES.items() for place in places for event in Event]


@pytest.mark.parametrize(("stage", "event", "place"), PAIRS, ids=lambda v: getattr(v, "__name__", str(v)))
def test_operation_table(stage: Stage, event: Event, place: Callable[[], tuple[World, OperationRef]]) -> None:
    world, ref = place()
    assert world.stage(ref) is stage
    leads_to = state_tables.OPERATION_TABLE[stage].get(event)
    if leads_to is None and event in (Event.SUBMIT, Event.START, Event.START_PLANNED):
        with pytest.raises(ValueError, match="the next instance"):
            build(world, event, ref)
        return
    txn = build(world, event, ref)
    before, revision = world.store.listing(), world.store.revision
    result = world.store.apply(txn)
    if leads_to is None or (event in ABLE and place not in ABLE[event]):
        # Each claim is decided alone; and with nobody to tell, nothing is written.
        assert not result.succeeded or (event in (Event.REVOKE, Event.REAP, Event.SIGNAL) and leads_to is not None)
        assert world.store.listing() == before
        return
    assert result.succeeded
    if place is not cleaning_cancelled:  # no job has left a key there
        assert result.revision == revision + 1
    assert world.stage(ref) in leads_to
    faults = check(world.keys, world.store.history)
    at_once = (Event.DECIDE, Event.FINISH_AT_ONCE, Event.FINISH_AND_END)
    if place not in (open_, paused) or event not in at_once:
        # Deciding before the jobs have ended is for the coordinator not to ask for; the store only sees to claims.
        assert not faults


def test_the_tables_name_every_stage() -> None:
    assert set(state_tables.OPERATION_TABLE) == set(Stage) == set(PLACES)
    assert set(state_tables.JOB_TABLE) == set(JobStage)
    assert {e for events in state_tables.OPERATION_TABLE.values() for e in events} == set(Event)
    assert {e for events in state_tables.JOB_TABLE.values() for e in events} == set(JobEvent)


def test_transactions_look_up_stages_in_the_state_tables() -> None:
    world, ref = ready()
    assert state_tables.leads_to(Event.RESUME, Stage.OPEN) is Stage.OPEN
    with pytest.raises(ValueError, match="resume leads to open, planning"):
        state_tables.leads_to(Event.RESUME)
    with pytest.raises(ValueError, match="cancel leads to none"):
        state_tables.leads_to(Event.CANCEL, Stage.OPEN)
    with pytest.raises(ValueError, match="pause does not happen to .* while it is paused"):
        t.pause(world.keys, ref, 1, seen=State.PAUSED)
    with pytest.raises(ValueError, match="alter does not happen to .* while it is cancelling"):
        t.alter(world.keys, ref, State.CANCELLING, 1, Options(), None)
    assert state_tables.job_ends(JobEvent.FAIL_LOST) is state_tables.job_ends(JobEvent.REPORT_FAILED) is JobState.FAILED


@pytest.mark.parametrize(("stage", "event", "place"), PAIRS, ids=lambda v: getattr(v, "__name__", str(v)))
def test_no_event_happens_twice(stage: Stage, event: Event, place: Callable[[], tuple[World, OperationRef]]) -> None:
    world, ref = place()
    if event not in state_tables.OPERATION_TABLE[stage]:
        return
    txn = build(world, event, ref)
    if not world.store.apply(txn).succeeded:
        return
    before = world.store.listing()
    again = world.store.apply(txn)
    if event not in (Event.CLEAN, Event.REVOKE, Event.REAP, Event.SIGNAL):  # deleting what is gone already
        assert not again.succeeded
    assert world.store.listing() == before


@pytest.mark.parametrize("after", [p for places in PLACES.values() for p in places], ids=lambda p: p.__name__)
def test_a_former_coordinator_writes_nothing(after: Callable[[], tuple[World, OperationRef]]) -> None:
    world, ref = after()
    coordinator_events = [e for e in Event if e not in (Event.SUBMIT, Event.START, Event.START_PLANNED)]
    commands = (Event.ADD_DEPENDENCIES, Event.END_WAITING, Event.PAUSE, Event.PAUSE_NOW, Event.RESUME)
    commands = (*commands, Event.CANCEL, Event.ALTER)
    txns = [build(world, e, ref) for e in coordinator_events if e not in commands]
    for incarnation in list(world.leases):
        world.die(incarnation)
    world.join("c")
    world.do(world.elect("c"))
    before = world.store.listing()
    for txn in txns:
        assert not world.store.apply(txn).succeeded
    assert world.store.listing() == before


# ---------------------------------------------------------------------- jobs


def job_build(world: World, event: JobEvent, ref: OperationRef) -> Txn:
    if event in (JobEvent.CLAIM, JobEvent.RECLAIM, JobEvent.TAKE_OVER):
        if event is JobEvent.CLAIM:
            want = job_transitions.Want(0, Claim("ex-b", "b", 1, 0))
            return job_transitions.claim(world.keys, ref, world.store.mod(world.keys.gate(ref)), "b", [want])
        return world.claim(ref, "b", [0])
    if event is JobEvent.REVOKE:
        return world.revoke(ref, 0)
    if event is JobEvent.REVOKE_LOST:
        return world.revoke_lost(ref, "b", 0)
    if event is JobEvent.REAP:
        return world.reap(ref, 0)
    if event is JobEvent.EXTEND:
        return world.extend(ref, 0)
    if event is JobEvent.FAIL_LOST:
        return world.fail_lost(ref, "b", 0)
    if event in (JobEvent.RETRY, JobEvent.RELEASE):
        return world.wait_again(ref, 0, failed=event is JobEvent.RETRY)
    return world.report(ref, 0, JobState.SUCCESS if event is JobEvent.REPORT_SUCCESS else JobState.FAILED)


def job_at(stage: JobStage, actor: str = "") -> tuple[World, OperationRef]:
    world, ref = ready()
    if stage is not JobStage.FREE:
        world.do(world.own(ref, actor, 0) if actor else world.claim(ref, "a", [0]))
    if stage is JobStage.WAITING:
        world.do(world.wait_again(ref, 0, failed=True))
    elif stage in (JobStage.SUCCESS, JobStage.FAILED):
        world.do(world.report(ref, 0, JobState(stage.value)))
    return world, ref


JOB_ABOUT = {
    JobEvent.CLAIM: JobStage.FREE,
    JobEvent.RECLAIM: JobStage.WAITING,
    JobEvent.TAKE_OVER: JobStage.CLAIMED,
    JobEvent.EXTEND: JobStage.CLAIMED,
    JobEvent.REPORT_SUCCESS: JobStage.CLAIMED,
    JobEvent.REPORT_FAILED: JobStage.CLAIMED,
    JobEvent.RETRY: JobStage.CLAIMED,
    JobEvent.RELEASE: JobStage.CLAIMED,
    JobEvent.FAIL_LOST: JobStage.CLAIMED,
    JobEvent.REVOKE: JobStage.CLAIMED,
    JobEvent.REVOKE_LOST: JobStage.CLAIMED,
    JobEvent.REAP: JobStage.WAITING,
}
"""What each event's sender has seen: its transaction pins the claim of that stage by its mod revision."""


@pytest.mark.parametrize("actor", ["", "w"], ids=["of an executor", "of an actor"])
@pytest.mark.parametrize("stage", JobStage)
@pytest.mark.parametrize("event", JobEvent)
def test_job_table(stage: JobStage, event: JobEvent, actor: str) -> None:
    if event is JobEvent.EXTEND and not actor:
        actor = "w"
    world, ref = job_at(stage, actor)
    leads_to = state_tables.JOB_TABLE[stage].get(event)
    gone = event in (JobEvent.TAKE_OVER, JobEvent.FAIL_LOST, JobEvent.REVOKE_LOST)
    if gone:
        world.die("a")
    if event in (JobEvent.REVOKE, JobEvent.REAP):
        world.do(world.cancel(ref))
        world.die("a")
        world.do(world.elect("b"))
    if leads_to is not None:
        txn = job_build(world, event, ref)
    else:
        # Built in a world where the job is where the event's sender believes it to be; the two worlds had the same
        # revisions up to there.
        other, ref = job_at(JOB_ABOUT[event], actor)
        if event in (JobEvent.REVOKE, JobEvent.REAP):
            other.do(other.cancel(ref))
            other.die("a")
            other.do(other.elect("b"))
        elif gone:
            other.die("a")
        txn = job_build(other, event, ref)
    before = world.store.listing()
    world.store.apply(txn)
    if leads_to is None:
        assert world.store.listing() == before
        return
    assert world.store.listing() != before
    assert world.job_stage(ref, 0) is leads_to
    if event is not JobEvent.FAIL_LOST:  # one lost executor is under the limit here
        assert not check(world.keys, world.store.history)
    after = world.store.listing()
    world.store.apply(txn)
    assert world.store.listing() == after


ACTOR_EVENTS = {
    JobEvent.CLAIM: lambda world, ref: world.own(ref, "v", 0),
    JobEvent.RECLAIM: lambda world, ref: world.own(ref, "v", 0),
    JobEvent.TAKE_OVER: lambda world, ref: world.own(ref, "v", 0),
    JobEvent.EXTEND: lambda world, ref: world.extend(ref, 0),
    JobEvent.REPORT_SUCCESS: lambda world, ref: world.give(ref, 0, JobState.SUCCESS),
    JobEvent.REPORT_FAILED: lambda world, ref: world.give(ref, 0, JobState.FAILED),
    JobEvent.RETRY: lambda world, ref: world.give(ref, 0, None),
}


@pytest.mark.parametrize("stage", JobStage)
@pytest.mark.parametrize("event", ACTOR_EVENTS)
def test_actors_follow_the_job_table(stage: JobStage, event: JobEvent) -> None:
    world, ref = job_at(stage, "w")
    other, _ = (world, ref) if event in state_tables.JOB_TABLE[stage] else job_at(JOB_ABOUT[event], "w")
    txn = ACTOR_EVENTS[event](other, ref)
    before = world.store.listing()
    result = world.store.apply(txn)
    leads_to = state_tables.JOB_TABLE[stage].get(event)
    if leads_to is None:
        assert world.store.listing() == before
        return
    assert world.store.listing() != before, result
    assert world.job_stage(ref, 0) is leads_to
    assert not check(world.keys, world.store.history)
    after = world.store.listing()
    world.store.apply(txn)
    assert world.store.listing() == after, "sent again"


def test_an_actors_claim_needs_no_node_key_and_changes_with_each_extension() -> None:
    world, ref = ready()
    world.do(world.own(ref, "w", 0))
    first, late = world.fence(ref, 0), world.own(ref, "v", 0)
    world.do(world.extend(ref, 0))
    assert world.fence(ref, 0) > first
    assert world.claim_of(ref, 0).actor == "w"
    before = world.store.listing()
    world.store.apply(late)
    assert world.store.listing() == before, "what was extended meanwhile is not taken"
    assert not check(world.keys, world.store.history)


def test_an_actor_may_extend_while_paused_but_not_while_cancelling() -> None:
    world, ref = ready()
    world.do(world.own(ref, "w", 0))
    world.do(world.pause(ref))
    world.do(world.extend(ref, 0))
    world.do(world.cancel(ref))
    fence = world.fence(ref, 0)
    world.store.apply(world.extend(ref, 0))
    assert world.fence(ref, 0) == fence
    world.do(world.give(ref, 0, JobState.SUCCESS))
    assert world.job_stage(ref, 0) is JobStage.SUCCESS, "what is done counts"
    assert not check(world.keys, world.store.history)


def test_the_invariants_find_writes_under_another_actors_claim() -> None:
    world, ref = ready()
    world.do(world.own(ref, "w", 0))
    former, key = world.claim_of(ref, 0), world.keys.claim(ref, 0)
    world.do(world.own(ref, "v", 0))
    for put, number in (
        (replace(former, attempt=2), 10),
        (replace(world.claim_of(ref, 0), failures=2), 10),
        (replace(world.claim_of(ref, 0), actor="w"), 3),
    ):
        other, _ = ready()
        other.do(other.own(ref, "w", 0))
        other.do(other.own(ref, "v", 0))
        other.do(Txn((), (Put(key, put.encode()),)))
        assert number in {fault.invariant for fault in check(other.keys, other.store.history)}
    world.do(Txn((), job_transitions.report(world.keys, ref, 0, 1, JobState.SUCCESS, outcome(0, former)).ops))
    assert 3 in {fault.invariant for fault in check(world.keys, world.store.history)}
    world, ref = ready()
    world.do(world.own(ref, "w", 0))
    claim = world.claim_of(ref, 0)
    world.do(world.cancel(ref))
    world.do(Txn((), (Put(key, claim.encode()),)))
    assert 4 in {fault.invariant for fault in check(world.keys, world.store.history)}


def test_live_holders_keep_their_claims() -> None:
    world, ref = ready()
    world.do(world.claim(ref, "a", [0]))
    before = world.store.listing()
    for txn in (world.claim(ref, "b", [0]), world.fail_lost(ref, "b", 0)):
        assert not world.store.apply(txn).succeeded
    world.store.apply(world.revoke_lost(ref, "b", 0))
    world.store.apply(world.cancel(ref))
    world.store.apply(world.revoke(ref, 0))
    assert [kv for kv in before if "Claim" in kv.key] == [kv for kv in world.store.listing() if "Claim" in kv.key]


def test_untouched_runs_are_claimed_all_or_none() -> None:
    world, ref = ready(planned_first=False)
    world.do(world.plan(ref, 6))
    gate = world.store.mod(world.keys.gate(ref))
    claim = Claim("ex-a", "a", 1, 0)

    def claims(incarnation: str, *runs: tuple[int, int], gate: int = gate) -> Txn:
        return batch_claims.claim_runs(world.keys, ref, gate, incarnation, runs, claim)

    whole = claims("a", (0, 2), (3, 5))
    assert world.store.apply(whole).succeeded
    assert [p for p in range(6) if world.claim_of(ref, p) == claim] == [0, 1, 3, 4]
    before = world.store.revision
    assert not world.store.apply(whole).succeeded, "sent again"
    assert not world.store.apply(claims("b", (1, 3))).succeeded
    world.do(world.report(ref, 0, JobState.SUCCESS))
    ended = world.store.revision
    assert not world.store.apply(claims("b", (0, 1))).succeeded
    assert not world.store.apply(claims("b", (2, 3), gate=gate + 1)).succeeded
    assert world.store.revision == ended > before


def test_a_small_operation_is_claimed_and_read_in_one_transaction() -> None:
    world, ref = ready(planned_first=False)
    world.do(world.plan(ref, 1))
    gate = world.store.get(world.keys.gate(ref))
    assert Gate.decode(gate.value).count == 1
    first, records = Claim("ex-a", "a", 1, 0), OpenOperation.records(world.keys, ref)
    asked = [batch_claims.Untouched(ref, gate.mod_revision, records)]
    txn = batch_claims.claim_together(world.keys, "a", asked, first)
    done = world.store.apply(txn)
    assert done.succeeded
    assert world.claim_of(ref, 0) == first
    spec, arg, plan, chunk = done.responses[-4:]
    assert (Spec.decode(spec.kv.value), Plan.decode(plan.kv.value).count) == (world.spec(ref), 1)
    assert arg.kv.key == world.keys.of(ref, "arg")
    assert [p.partition for p in decode_chunk(chunk.kvs[0].value)] == [0]
    assert not world.store.apply(txn).succeeded, "sent again"


@pytest.mark.parametrize(
    "value",
    [b"open", b"", b"[]", b'"1"', b'{"count":"x"}', b'{"v":99,"count":3}', b'{"count":1e999}', b"\xff", b"null"],
)
def test_a_gate_with_an_unknown_value_is_a_gate(value: bytes) -> None:
    assert Gate.decode(value) == Gate(0)


def test_which_claims_are_runs() -> None:
    claim = Claim("x", "x", 1, 0)
    fresh = [job_transitions.Want(p, claim) for p in (3, 4, 5, 9)]
    assert job_transitions.runs(fresh) == [(3, 6), (9, 10)]
    assert job_transitions.runs([]) is None
    assert job_transitions.runs([*fresh, job_transitions.Want(10, Claim("x", "x", 2, 0), 7)]) is None
    assert (
        job_transitions.runs([job_transitions.Want(2 * p, claim) for p in range(job_transitions.RUNS_PER_CLAIM + 1)])
        is None
    )


def test_overlapping_blocks_are_shared() -> None:
    world, ref = ready()
    one, two = world.claim(ref, "a", [0, 1]), world.claim(ref, "b", [1, 0])
    world.do(one)
    result = world.store.apply(two)
    assert result.succeeded  # the outer guards held; no claim was granted
    assert [r.succeeded for r in result.responses] == [False, False]
    assert {world.claim_of(ref, p).incarnation for p in (0, 1)} == {"a"}


def test_a_refused_group_of_writes_is_retried_one_by_one() -> None:
    world, ref = ready()
    world.do(world.claim(ref, "a", [0, 1]))
    claims = [world.claim_of(ref, p) for p in (0, 1)]
    fences = [world.fence(ref, 0), 999]
    writes = [
        job_transitions.report(world.keys, ref, p, fences[p], JobState.SUCCESS, outcome(p, claims[p])) for p in (0, 1)
    ]
    assert not world.store.apply(job_transitions.group(writes)).succeeded
    result = world.store.apply(job_transitions.one_by_one(writes))
    assert [r.succeeded for r in result.responses] == [True, False]
    assert world.job_stage(ref, 0) is JobStage.SUCCESS
    assert world.job_stage(ref, 1) is JobStage.CLAIMED


def test_a_late_holder_may_report_until_the_job_is_taken_over() -> None:
    """The token decides, not whether its session still lives (lakeFS L17)."""
    world, ref = ready()
    world.do(world.claim(ref, "a", [0, 1]))
    reports = [world.report(ref, p, JobState.SUCCESS) for p in (0, 1)]
    world.die("a")
    assert world.store.apply(reports[0]).succeeded
    world.do(world.claim(ref, "b", [1]))
    assert not world.store.apply(reports[1]).succeeded
    assert [world.job_stage(ref, p) for p in (0, 1)] == [JobStage.SUCCESS, JobStage.CLAIMED]
    assert not check(world.keys, world.store.history)


def test_a_zombie_saves_no_checkpoint() -> None:
    world, ref = ready()
    world.do(world.claim(ref, "a", [0]))
    stale = world.checkpoint(ref, 0, b"1")
    world.do(stale)
    world.die("a")
    world.do(world.claim(ref, "b", [0]))
    assert not world.store.apply(stale).succeeded


def test_a_plan_deletes_chunks_of_an_earlier_longer_one() -> None:
    world, ref = ready(planned_first=False)
    for n in range(3):
        world.do(world.chunk(ref, n, encode_chunk([PartitionPlan(n, f"old={n}")])))
    world.do(world.plan(ref, JOBS))
    assert [kv.key for kv in world.store.range(*world.keys.chunks_range(ref))] == [world.keys.chunk(ref, 0)]
    assert not check(world.keys, world.store.history)


def test_a_late_chunk_and_a_late_plan_are_refused() -> None:
    world, ref = ready(planned_first=False)
    late = world.chunk(ref, 1, b"[]")
    late_plan = world.plan(ref, 1)
    world.do(world.give_up(ref))
    assert not world.store.apply(late).succeeded
    assert not world.store.apply(late_plan).succeeded


def test_an_opened_gate_has_the_current_options() -> None:
    """A gate built before the options change is refused: it has the former options."""
    world, ref = ready(planned_first=False)
    plan = world.plan(ref, JOBS)
    world.do(world.alter(ref))
    assert not world.store.apply(plan).succeeded
    world.do(world.plan(ref, JOBS))
    world.do(world.pause(ref))
    resume = world.resume(ref)
    world.do(world.alter(ref))
    assert not world.store.apply(resume).succeeded
    world, ref = waiting()
    begin = world.begin(ref, JOBS)
    world.do(world.alter(ref))
    assert not world.store.apply(begin).succeeded
    assert world.do(world.begin(ref, JOBS)).succeeded


def test_no_gate_opens_after_planning_was_given_up() -> None:
    world, ref = ready(planned_first=False)
    late = world.plan(ref, JOBS)
    world.do(world.give_up(ref))
    assert not world.store.apply(late).succeeded


def test_all_jobs_of_a_dead_executor_are_taken_over_together() -> None:
    world, ref = ready(planned_first=False)
    world.do(world.plan(ref, 3))
    world.do(world.claim(ref, "a", [0, 1, 2]))
    world.die("a")
    world.do(world.claim(ref, "b", [0, 1, 2]))
    claims = [world.claim_of(ref, p) for p in range(3)]
    assert [(claim.incarnation, claim.attempt) for claim in claims if claim is not None] == [("b", 2)] * 3


def test_an_executor_without_a_session_takes_over_no_lost_job() -> None:
    world, ref = ready()
    world.do(world.claim(ref, "a", [0]))
    world.die("a")
    take_over, fail = world.claim(ref, "b", [0]), world.fail_lost(ref, "b", 0)
    world.die("b")
    assert [world.store.apply(txn).succeeded for txn in (take_over, fail)] == [False, False]


def test_lost_claims_are_set_to_waiting_together_and_only_with_a_session() -> None:
    world, ref = ready()
    world.do(world.claim(ref, "a", [0, 1]))
    world.die("a")
    world.do(world.revoke_lost(ref, "b", 0, 1))
    assert [seen.value.waiting for _, seen in sorted(world.op(ref).claims.items())] == [True, True]
    world, ref = ready()
    world.do(world.claim(ref, "a", [0, 1]))
    world.die("a")
    revoke = world.revoke_lost(ref, "b", 0, 1)
    world.die("b")
    assert not world.store.apply(revoke).succeeded


def test_all_lost_claims_of_a_cancelled_operation_are_revoked_together() -> None:
    world, ref = ready()
    world.do(world.claim(ref, "a", [0, 1]))
    world.do(world.cancel(ref))
    world.die("a")
    world.do(world.elect("b"))
    world.do(world.revoke(ref, 0, 1))
    assert [seen.value.waiting for _, seen in sorted(world.op(ref).claims.items())] == [True, True]


@pytest.mark.parametrize("what", ["fail_fast", "alter", "pause", "cancel", "give_up"])
def test_a_write_refused_by_a_pause_stays_refused(what: str) -> None:
    """Its sender was told so, and has done something else since (T9)."""
    world, ref = ready(planned_first=what not in ("alter", "give_up"))
    if what == "fail_fast":
        world.do(world.claim(ref, "a", [0]))
        world.do(world.report(ref, 0, JobState.FAILED))
    late = getattr(world, what)(ref)
    world.do(world.pause(ref))
    assert not world.store.apply(late).succeeded
    world.do(world.resume(ref))
    assert not world.store.apply(late).succeeded


def test_a_plan_deletes_the_record_of_planning_attempts() -> None:
    world, ref = ready(planned_first=False)
    world.do(world.plan_attempt(ref))
    world.do(world.plan(ref, JOBS))
    assert world.store.get(world.keys.of(ref, "planning")) is None


def test_an_actor_takes_all_requested_jobs() -> None:
    world, ref = ready()
    takes = [op for p in range(JOBS) for op in world.own(ref, "w", p).success]
    assert all(one.succeeded for one in world.do(Txn((), tuple(takes), (), "own")).responses)
    assert [claim and claim.actor for claim in (world.claim_of(ref, p) for p in range(JOBS))] == ["w"] * JOBS


def test_grouped_ends_of_pending_operations_equal_single_ends() -> None:
    world, first = waiting()
    second = world.next_ref()
    world.do(world.submit(second))
    world.do(merged([world.end_waiting(first), world.end_waiting(second)]))
    assert [world.stage(ref) for ref in (first, second)] == [Stage.CLEANING] * 2
    assert not check(world.keys, world.store.history)


def test_each_successor_of_a_cancelled_operation_is_informed() -> None:
    world, ref = ready()
    successors = []
    for _ in range(3):
        successors.append(world.next_ref())
        world.do(world.submit(successors[-1], ref))
    world.do(world.cancel(ref))
    world.do(world.finish_at_once(ref))
    world.do(world.signal(ref))
    reasons = [list((world.op(one).broken or {}).values()) for one in successors]
    assert reasons == [[f"{ref} ended as cancelled"]] * 3
    assert not world.op(ref).next


def test_an_end_grouped_with_another_signal_signals_all_of_its_successors() -> None:
    world, first = ready()
    second = world.next_ref()
    world.do(world.start(second))
    successors = []
    for _ in range(3):
        successors.append(world.next_ref())
        world.do(world.submit(successors[-1], second))
    for ref in (first, second):
        world.do(world.cancel(ref))
        world.do(world.finish_at_once(ref))
    world.do(merged([world.end(first), world.signal(second)]))
    reasons = [list((world.op(one).broken or {}).values()) for one in successors]
    assert reasons == [[f"{second} ended as cancelled"]] * 3


@pytest.mark.parametrize("informs", [False, True])
def test_early_ends_are_refused_without_their_group(informs: bool) -> None:
    """An open operation and one with an uninformed successor stay; the last one goes.

    ``informs``: the group begins with an operation that informs its successor.
    """
    world, open_ref = ready()
    ended = [world.next_ref()]
    for awaited in (True, True, False):
        world.do(world.start(ended[-1]))
        if awaited:
            world.do(world.submit(world.next_ref(), ended[-1]))
        ended.append(world.next_ref())
    informing, awaited_ref, over_ = ended[:3]
    for ref in (informing, awaited_ref, over_):
        world.do(world.plan(ref, 0))
        world.do(world.finish_at_once(ref))
    group = [world.signal(informing)] if informs else []
    group += [world.end(ref) for ref in (open_ref, awaited_ref, over_)]
    alone = job_transitions.one_by_one([job_transitions.guarded(txn) for txn in group])
    assert [one.succeeded for one in world.do(alone).responses] == [True] * informs + [False, False, True]


# ---------------------------------------------------------------- limits (T1)


def test_the_largest_transactions_fit_into_the_limits_of_etcd() -> None:
    world, ref = ready()
    keys, election = world.keys, world.election
    wants = [job_transitions.Want(p, Claim("x", "x", 2, 1), 7) for p in range(job_transitions.CLAIMS_PER_TXN)]
    dead = [f"gone-{n}" for n in range(job_transitions.CLAIMS_PER_TXN)]
    claim = Claim("ex-a", "a", 1, 0)
    reports = [
        job_transitions.report(keys, ref, p, 7, JobState.SUCCESS, outcome(p, claim))
        for p in range(job_transitions.REPORTS_PER_TXN)
    ]
    lost = [(p, 7, outcome(p, claim)) for p in range(job_transitions.REPORTS_PER_TXN)]
    scattered = tuple((2 * n, 2 * n + 1) for n in range(job_transitions.RUNS_PER_CLAIM))
    most_runs = (scattered, ((0, job_transitions.CLAIMS_PER_TXN),))
    held = [(p, 7, replace(claim, incarnation=f"gone-{p}", permit=p)) for p in range(job_transitions.CLAIMS_PER_REAP)]
    plan = Plan(1, "", "", t.CHUNKS_PER_PLAN)
    mods = [1] * t.CHUNKS_PER_PLAN
    txns = [
        actor_claims.own(
            keys,
            [
                actor_claims.Taking(ref, 1, p, claim, 7, f"gone-{p}", outcome(p, claim))
                for p in range(actor_claims.OWNED_PER_TXN)
            ],
        ),
        actor_claims.extend(
            keys,
            [
                actor_claims.Extending(actor_claims.Token(ref, p, 7, "0" * 16), claim, 7)
                for p in range(actor_claims.OWNED_PER_TXN)
            ],
        ),
        job_transitions.claim(keys, ref, 1, "a", wants),
        job_transitions.claim(keys, ref, 1, "a", wants, dead),
        *(batch_claims.claim_runs(keys, ref, 1, "a", runs, claim) for runs in most_runs),
        job_transitions.group(reports),
        job_transitions.one_by_one(reports),
        job_transitions.fail_lost(keys, ref, 1, "a", "b", lost),
        job_transitions.revoke(keys, ref, election, 1, held, job_claims.revoked),
        job_transitions.revoke_lost(keys, ref, 1, "a", held, job_claims.revoked),
        job_transitions.reap(keys, ref, election, 1, [(p, 7) for p in range(job_transitions.CLAIMS_PER_REAP)]),
        t.write_plan(keys, ref, election, plan, mods),
        t.write_plan(keys, ref, election, plan, mods[:100], [b"[]"] * 100),
        world.end(ref),
        world.finish(ref),
        world.finish_at_once(ref),
    ]
    for txn in txns:
        assert operations(txn) <= MAX_OPERATIONS
        world.store.apply(txn)  # the store counts for itself


def test_the_largest_groups_with_ids_fit_into_the_limits_of_etcd() -> None:
    world = World()
    world.join("a")
    world.do(world.elect("a"))
    for n in range(40):
        world.do(world.start_of(f"x{n}", waits=True))
    seen, held = world.counters(), [world.new_operation_with_id(f"x{n}", n) for n in range(40)]
    for new, most in ((held, 14), ([replace(one, takes=Takes(f"y{n}")) for n, one in enumerate(held)], 40)):
        fit = t.fitting_starts(world.keys, new)
        txn = t.starts(world.keys, seen, new[:fit])
        assert operations(txn) <= MAX_OPERATIONS
        # One more may fit by chance: the last parcel is counted as a full one.
        assert fit == len(new) or operations(t.starts(world.keys, seen, new[: fit + 2])) > MAX_OPERATIONS
        assert fit >= most
        assert World(store=copy.deepcopy(world.store)).do(txn).succeeded
    world = World()
    world.join("a")
    world.do(world.elect("a"))
    refs = []
    for n in range(f.FINISHES_PER_TXN):
        refs.append(world.next_ref())
        world.do(world.start_of(f"x{n}", waits=False))
        world.do(world.plan(refs[-1], 0))
    finals = [replace(one, one_at_a_time=True) for one in world.finals(refs)]
    fit = world.finish_together(finals)
    assert 15 < fit < f.FINISHES_PER_TXN
    counts = world.counters()
    txn = f.finish(world.keys, world.election, counts.run_ops, counts.run_ops_mod, finals[:fit])
    assert operations(txn) <= MAX_OPERATIONS
    world.do(txn)
    assert len(world.store.range(*world.keys.family(UNIQUE))) == f.FINISHES_PER_TXN - fit
    assert not check(world.keys, world.store.history)


def test_L20_a_replacing_operation_keeps_the_id_after_late_copies_of_the_replaced_one() -> None:
    world, first = waiting_of_an_id()
    begin, end = world.begin(first), world.end_waiting(first)
    second = world.next_ref()
    world.do(world.start_of("x", waits=True))
    for late in (begin, end):
        assert not world.store.apply(late).succeeded
    (held,) = world.store.range(*world.keys.family(UNIQUE))
    assert held.value == str(second).encode()
    replacing = world.start_of("x", waits=True)
    world.do(world.begin(second))
    assert not world.store.apply(replacing).succeeded, "what is in process is never touched"
    assert not check(world.keys, world.store.history)


def test_L20_an_operation_with_a_new_successor_is_not_replaced_by_a_combined_one() -> None:
    """The other one would be told that its dependency was cancelled."""
    world, holder = waiting_of_an_id()
    other = world.next_ref()
    world.do(world.submit(other))
    one = world.new_operation_with_id("x")
    assert one.takes is not None
    combined = t.starts(world.keys, world.counters(), [replace(one, takes=replace(one.takes, alone=True))])
    world.do(world.add_dependencies(other, holder))
    assert not world.store.apply(combined).succeeded


# --------------------------------------------------- random lives, late copies

MAY_COME_LATE = frozenset({"elect", "chunk", "plan", "plan_attempt", "clean", "end", "progress", "begin", "join"})
"""Why these may apply after a refusal: an election that was resigned is free again, and its late holder takes it up; a
planning that was paused and resumed is the same planning, and whichever plan comes first stands; what waited for
another one may begin, or end, once that has ended."""


@settings(max_examples=30)
@given(st.integers(0, 2**32))
def test_random_lives_keep_the_invariants_and_refusals_are_final(seed: int) -> None:
    world, rng = world_with_node(seed)
    refused: list[Txn] = []
    late: list[Txn] = []
    for _ in range(250):
        txn = random_event(world, rng)
        if txn is not None:
            late.append(txn)
            if rng.random() < 0.8:
                world.store.apply(txn)
        if late and rng.random() < 0.3:  # a copy that was delayed, or a repetition
            old = late.pop(rng.randrange(len(late)))
            if not world.store.apply(old).succeeded and old.label not in MAY_COME_LATE:
                refused.append(old)
        if refused and rng.random() < 0.2:
            assert not world.store.apply(rng.choice(refused)).succeeded
    for old in refused:
        assert not world.store.apply(old).succeeded, old.label
    faults = check(world.keys, world.store.history)
    assert not faults, "\n".join(map(str, faults))


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_the_revision_of_an_open_gate_follows_from_state_and_plan(seed: int) -> None:
    """A finish compares the gate alone, not the state: whatever writes a state writes or deletes the gate."""
    world, rng = world_with_node(seed)
    for _ in range(150):
        txn = random_event(world, rng)
        if txn is None or not world.store.apply(txn).succeeded:
            continue
        for ref, op in world.view().operations.items():
            gate = world.store.get(world.keys.gate(ref))
            if gate is not None and op.altered is None:
                assert gate.mod_revision == op.opened >= op.state_mod


def test_claims_are_revoked_and_reaped_together_and_decided_one_by_one() -> None:
    world, ref = ready(planned_first=False)
    jobs = job_transitions.CLAIMS_PER_REAP
    world.do(world.plan(ref, jobs))
    world.do(world.claim(ref, "a", range(100)))
    world.do(world.claim(ref, "b", range(100, jobs)))
    world.do(world.wait_again(ref, 0, failed=False))
    world.do(world.wait_again(ref, 1, failed=False))
    world.do(world.cancel(ref))
    stale = world.revoke(ref, *range(jobs))
    world.die("b")
    world.do(world.reap(ref, 1))

    def apply(txn: Txn) -> None:
        assert operations(txn) <= MAX_OPERATIONS
        revision = world.store.revision
        assert world.store.apply(txn).succeeded
        assert world.store.revision == revision + 1

    apply(stale)
    apply(world.reap(ref, *(p for p, seen in world.op(ref).claims.items() if seen.value.waiting)))
    gone = [p for p in range(jobs) if world.claim_of(ref, p) is None]
    assert gone == [0, 1, *range(100, jobs)], "what waited and what the dead held; the living keep theirs"
    assert not check(world.keys, world.store.history)
    before = world.store.listing()
    world.store.apply(stale)
    assert world.store.listing() == before


def test_a_cancelled_operation_with_an_unseen_plan_is_not_decided_without_it() -> None:
    world = World()
    world.join("a")
    ref = world.next_ref()
    world.do(world.start(ref))
    world.do(world.elect("a"))
    world.do(world.plan(ref, 2))
    world.do(world.cancel(ref))
    unplanned = Decision(State.CANCELLED, 0, 0, 0)
    late = f.decide(world.keys, ref, world.election, world.mod(ref, "state"), unplanned, planned=False)
    assert not world.store.apply(late).succeeded
    counters = world.counters()
    final = replace(world.finals([ref])[0], decision_mod=0, planned=False)
    end = f.finish(world.keys, world.election, counters.run_ops, counters.run_ops_mod, [final])
    assert not world.store.apply(end).succeeded


def test_an_operation_decided_while_paused_is_not_resumed() -> None:
    """Its gate would be open again, and its end remove it with the claims."""
    world, ref = ready()
    world.do(world.claim(ref, "a", range(JOBS)))
    for p in range(JOBS):
        world.do(world.report(ref, p, JobState.SUCCESS))
    world.do(world.pause(ref))
    resume = world.resume(ref)
    world.do(world.decide(ref))
    assert not world.store.apply(resume).succeeded
