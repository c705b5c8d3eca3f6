"""Violations of each invariant, planted by hand in a store: what no part of distop would write."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from distop.decide import job_claims
from distop.decide.due_operations import ended_waiting
from distop.protocol import operation_finish as f
from distop.protocol import operation_transitions as t
from distop.protocol import pending_operations as w
from distop.protocol.age_watermarks import Watermark
from distop.protocol.behavior_declaration import Declaration, Retry, Rules
from distop.protocol.dependencies import GRAPH, Edge, Hold, HoldState
from distop.protocol.identity import plan_digest
from distop.protocol.jobs import Claim, JobState, Outcome
from distop.protocol.json_codec import parse_time, rfc3339
from distop.protocol.keys import prefix_range
from distop.protocol.operation_options import Options
from distop.protocol.permits import FREE
from distop.protocol.plan import Gate, PartitionPlan, Plan, encode_chunk
from distop.protocol.records import Attempts, Cancel, Decision, History, OperationRef, Spec, State, TableRecord
from distop.protocol.schedule import Series
from distop.protocol.txn import Delete, Put, Txn
from distop.protocol.user_actions import NO_ACTIONS, Action
from tests.support.history_age import age_model_history
from tests.support.world import TABLE, TIME, TYPE, World, outcome, planned

if TYPE_CHECKING:
    from collections.abc import Callable


def opened(jobs: int = 2, rules: Rules | None = None) -> tuple[World, OperationRef]:
    world = World(rules=rules or Rules(retry=Retry(attempts=3)))
    world.join("a")
    world.join("b")
    ref = world.next_ref()
    world.do(world.start(ref))
    world.do(world.elect("a"))
    world.do(world.plan(ref, jobs))
    return world, ref


Plant = tuple[int, str, "Callable[[World, OperationRef], None]"]
PLANTS: list[Plant] = []


def plant(number: int) -> Callable[[Callable[[World, OperationRef], None]], Callable[[World, OperationRef], None]]:
    def add(f: Callable[[World, OperationRef], None]) -> Callable[[World, OperationRef], None]:
        PLANTS.append((number, f.__name__, f))
        return f

    return add


def _report(
    world: World, ref: OperationRef, p: int, by: Outcome, state: bytes = b"success"
) -> tuple[Put | Delete, ...]:
    keys = world.keys
    return (
        Put(keys.job(ref, p, "state"), state),
        Put(keys.job(ref, p, "outcome"), by.encode()),
        Delete(keys.claim(ref, p)),
    )


@plant(1)
def state_written_twice(world: World, ref: OperationRef) -> None:
    world.do(world.claim(ref, "a", [0]))
    world.do(world.report(ref, 0, JobState.SUCCESS))
    world.tamper(*_report(world, ref, 0, outcome(0, Claim("ex-a", "a", 1, 0)), b"failed"))


@plant(1)
def state_vanishes(world: World, ref: OperationRef) -> None:
    world.do(world.claim(ref, "a", [0]))
    world.do(world.report(ref, 0, JobState.SUCCESS))
    world.tamper(Delete(world.keys.job(ref, 0, "state")))


@plant(1)
def outcome_rewritten(world: World, ref: OperationRef) -> None:
    world.do(world.claim(ref, "a", [0]))
    world.do(world.report(ref, 0, JobState.SUCCESS))
    world.tamper(Put(world.keys.job(ref, 0, "outcome"), outcome(0, Claim("ex-a", "a", 1, 0)).encode()))


@plant(1)
def state_without_outcome(world: World, ref: OperationRef) -> None:
    world.do(world.claim(ref, "a", [0]))
    world.tamper(Put(world.keys.job(ref, 0, "state"), b"success"), Delete(world.keys.claim(ref, 0)))


@plant(2)
def reported_without_a_claim(world: World, ref: OperationRef) -> None:
    world.tamper(*_report(world, ref, 0, outcome(0, Claim("ex-a", "a", 1, 0))))


@plant(2)
def reported_by_somebody_else(world: World, ref: OperationRef) -> None:
    world.do(world.claim(ref, "a", [0]))
    world.tamper(*_report(world, ref, 0, outcome(0, Claim("ex-b", "b", 1, 0))))


@plant(2)
def failed_by_a_taker_before_the_limit(world: World, ref: OperationRef) -> None:
    world.do(world.claim(ref, "a", [0]))
    world.die("a")
    world.do(world.fail_lost(ref, "b", 0))


@plant(2)
def claim_outlives_the_report(world: World, ref: OperationRef) -> None:
    world.do(world.claim(ref, "a", [0]))
    world.tamper(*_report(world, ref, 0, outcome(0, Claim("ex-a", "a", 1, 0)))[:2])


@plant(2)
def taken_from_the_living(world: World, ref: OperationRef) -> None:
    world.do(world.claim(ref, "a", [0]))
    world.tamper(Put(world.keys.claim(ref, 0), Claim("ex-b", "b", 2, 1).encode()))


@plant(2)
def claimed_after_the_end(world: World, ref: OperationRef) -> None:
    world.do(world.claim(ref, "a", [0]))
    world.do(world.report(ref, 0, JobState.SUCCESS))
    world.tamper(Put(world.keys.claim(ref, 0), Claim("ex-b", "b", 2, 0).encode()))


@plant(2)
def claim_dropped_while_open(world: World, ref: OperationRef) -> None:
    world.do(world.claim(ref, "a", [0]))
    world.tamper(Delete(world.keys.claim(ref, 0)))


@plant(2)
def job_that_the_plan_does_not_have(world: World, ref: OperationRef) -> None:
    world.do(world.claim(ref, "a", [7]))
    world.do(world.report(ref, 7, JobState.SUCCESS))


@plant(3)
def the_former_holder_reports(world: World, ref: OperationRef) -> None:
    world.do(world.claim(ref, "a", [0]))
    world.die("a")
    world.do(world.claim(ref, "b", [0]))
    world.tamper(*_report(world, ref, 0, outcome(0, Claim("ex-a", "a", 1, 0))))


@plant(3)
def the_former_holder_reports_after_a_release(world: World, ref: OperationRef) -> None:
    world.do(world.claim(ref, "a", [0]))
    world.do(world.wait_again(ref, 0, failed=False))
    world.tamper(*_report(world, ref, 0, outcome(0, Claim("ex-a", "a", 1, 0))))


@plant(3)
def the_former_holder_releases(world: World, ref: OperationRef) -> None:
    world.do(world.claim(ref, "a", [0]))
    world.die("a")
    world.do(world.claim(ref, "b", [0]))
    world.tamper(Put(world.keys.claim(ref, 0), Claim("ex-a", "", 2, 1).encode()))


@plant(3)
def progress_of_a_job_that_waits(world: World, ref: OperationRef) -> None:
    world.do(world.claim(ref, "a", [0]))
    world.do(world.wait_again(ref, 0, failed=False))
    world.tamper(Put(world.keys.job(ref, 0, "progress"), b"1"))


@plant(4)
def claimed_while_paused(world: World, ref: OperationRef) -> None:
    world.do(world.pause(ref))
    world.tamper(Put(world.keys.claim(ref, 0), Claim("ex-a", "a", 1, 0).encode()))


@plant(4)
def claimed_by_a_ghost(world: World, ref: OperationRef) -> None:
    world.tamper(Put(world.keys.claim(ref, 0), Claim("ex-z", "z", 1, 0).encode()))


@plant(4)
def an_incarnation_comes_back(world: World, ref: OperationRef) -> None:
    world.die("b")
    world.join("b")


def finish_as(world: World, ref: OperationRef, record: History) -> None:
    keys = world.keys
    world.tamper(
        Put(keys.of(ref, "state"), str(record.state).encode()),
        Put(keys.history(ref), record.encode()),
        Put(keys.run_ops(TABLE), b"{}"),
        Delete(keys.gate(ref)),
        Put(keys.pending(ref), b"cleaning"),
    )


@plant(5)
def success_before_all_jobs(world: World, ref: OperationRef) -> None:
    world.do(world.claim(ref, "a", [0]))
    world.do(world.report(ref, 0, JobState.SUCCESS))
    finish_as(world, ref, History(str(ref), State.SUCCESS, TIME, TIME, 2, 1, 0, request_id=f"request-{ref}"))


@plant(5)
def history_miscounts(world: World, ref: OperationRef) -> None:
    for p in (0, 1):
        world.do(world.claim(ref, "a", [p]))
        world.do(world.report(ref, p, JobState.SUCCESS))
    finish_as(world, ref, History(str(ref), State.SUCCESS, TIME, TIME, 2, 1, 1, None, (), "0", f"request-{ref}"))


@plant(5)
def a_history_record_is_written_again(world: World, ref: OperationRef) -> None:
    key = world.keys.history(world.run_operation(1))
    kept = world.store.get(key)
    assert kept is not None
    record = History.decode(kept.value)
    world.tamper(Put(key, replace(record, state=State.FAILED).encode()))


@plant(5)
def finished_over_a_claim(world: World, ref: OperationRef) -> None:
    world.do(world.claim(ref, "a", [0]))
    finish_as(world, ref, History(str(ref), State.FAILED, TIME, TIME, 2, 0, 0, request_id=f"request-{ref}"))


@plant(5)
def cancelled_without_cancelling(world: World, ref: OperationRef) -> None:
    finish_as(world, ref, History(str(ref), State.CANCELLED, TIME, TIME, 2, 0, 0, request_id=f"request-{ref}"))


@plant(5)
def ended_without_history(world: World, ref: OperationRef) -> None:
    keys = world.keys
    world.tamper(
        Put(keys.of(ref, "state"), b"failed"),
        Put(keys.run_ops(TABLE), b"{}"),
        Delete(keys.gate(ref)),
        Put(keys.pending(ref), b"cleaning"),
    )


@plant(5)
def a_decision_that_is_wrong(world: World, ref: OperationRef) -> None:
    keys = world.keys
    world.tamper(
        Put(keys.of(ref, "decision"), Decision(State.SUCCESS, 2, 2, 0).encode()),
        Delete(keys.gate(ref)),
        Put(keys.pending(ref), b"completing"),
    )


@plant(5)
def a_decision_recounted(world: World, ref: OperationRef) -> None:
    for p in (0, 1):
        world.do(world.claim(ref, "a", [p]))
        world.do(world.report(ref, p, JobState.SUCCESS))
    world.do(world.decide(ref))
    world.tamper(Put(world.keys.of(ref, "decision"), Decision(State.FAILED, 2, 1, 1, "0").encode()))


@plant(5)
def back_from_the_end(world: World, ref: OperationRef) -> None:
    world.do(world.cancel(ref))
    world.do(world.finish_at_once(ref))
    world.tamper(Put(world.keys.of(ref, "state"), b"running"))


def begin(world: World, ref: OperationRef, following: int, request: str = "") -> tuple[Put, ...]:
    keys = world.keys
    count = len(world.view().operations) + 1
    spec = Spec(request or f"request-{ref}", TIME, "tester", world.rules)
    return (
        Put(keys.run_ops(TABLE), b'{"noop":%d}' % count),
        Put(keys.next_instance(TABLE, TYPE), b"%d" % following),
        Put(keys.of(ref, "arg"), b"{}"),
        Put(keys.of(ref, "spec"), spec.encode()),
        Put(keys.of(ref, "state"), b"running"),
        Put(keys.pending(ref), b"planning"),
    )


@plant(6)
def a_number_left_out(world: World, ref: OperationRef) -> None:
    world.tamper(*begin(world, replace(ref, instance=3), 4))


@plant(6)
def a_number_twice(world: World, ref: OperationRef) -> None:
    world.tamper(*begin(world, replace(ref, object="other", instance=1), 2))


@plant(6)
def no_number_taken(world: World, ref: OperationRef) -> None:
    writes = begin(world, replace(ref, instance=2), 3)
    world.tamper(*(w for w in writes if not w.key.endswith("nextInstanceId")))


@plant(6)
def the_counter_goes(world: World, ref: OperationRef) -> None:
    world.tamper(Delete(world.keys.next_instance(TABLE, TYPE)))


@plant(7)
def run_ops_overcounts(world: World, ref: OperationRef) -> None:
    world.tamper(Put(world.keys.run_ops(TABLE), b'{"noop":2}'))


@plant(7)
def run_ops_goes(world: World, ref: OperationRef) -> None:
    world.tamper(Delete(world.keys.run_ops(TABLE)))


@plant(7)
def run_ops_forgets_to_count_down(world: World, ref: OperationRef) -> None:
    keys = world.keys
    record = History(str(ref), State.FAILED, TIME, TIME, 2, 0, 0, request_id=f"request-{ref}")
    world.tamper(
        Put(keys.of(ref, "state"), b"failed"),
        Put(keys.history(ref), record.encode()),
        Delete(keys.gate(ref)),
        Put(keys.pending(ref), b"cleaning"),
    )


@plant(7)
def current_names_nobody(world: World, ref: OperationRef) -> None:
    world.tamper(Put(world.keys.current(TABLE, TYPE), b"9"))


@plant(7)
def current_is_dropped(world: World, ref: OperationRef) -> None:
    world.one_at_a_time = True
    second = world.next_ref()
    world.do(world.start(second))
    world.tamper(
        Delete(world.keys.current(TABLE, TYPE)),
        Put(world.keys.of(second, "state"), b"paused"),
        Put(world.keys.pending(second), b"paused"),
    )


@plant(8)
def decided_without_an_election(world: World, ref: OperationRef) -> None:
    decide = world.decide(ref)
    world.do(world.resign())
    world.tamper(*(op for op in decide.success if isinstance(op, Put | Delete)))


@plant(8)
def planned_without_an_election(world: World, ref: OperationRef) -> None:
    second = world.next_ref()
    world.do(world.start(second))
    plan = world.plan(second)
    world.do(world.resign())
    world.tamper(*(op for op in plan.success if isinstance(op, Put | Delete)))


@plant(8)
def failed_fast_without_an_election(world: World, ref: OperationRef) -> None:
    cancel = world.fail_fast(ref)
    world.do(world.resign())
    world.tamper(*(op for op in cancel.success if isinstance(op, Put | Delete)))


@plant(8)
def reaped_without_an_election(world: World, ref: OperationRef) -> None:
    world.do(world.claim(ref, "a", [0]))
    world.do(world.wait_again(ref, 0, failed=False))
    world.do(world.cancel(ref))
    world.do(world.resign())
    world.tamper(Delete(world.keys.claim(ref, 0)))


@plant(8)
def elected_over_the_living(world: World, ref: OperationRef) -> None:
    world.tamper(Put(world.keys.coordinator(TABLE, TYPE), b"b"))


@plant(8)
def elected_from_the_dead(world: World, ref: OperationRef) -> None:
    world.do(world.resign())
    world.tamper(Put(world.keys.coordinator(TABLE, TYPE), b"ghost"))


@plant(9)
def something_remains(world: World, ref: OperationRef) -> None:
    world.do(world.cancel(ref))
    world.do(world.finish_at_once(ref))
    first, after = world.keys.own_range(ref)
    kept = world.keys.of(ref, "cancel")
    rest = [op for op in world.end(ref).success if isinstance(op, Delete) and op.key != first]
    world.tamper(Delete(first, kept), Delete(kept + "\0", after), *rest)


@plant(9)
def something_comes_back(world: World, ref: OperationRef) -> None:
    world.do(world.cancel(ref))
    world.do(world.finish_at_once(ref))
    world.do(world.end(ref))
    world.tamper(Put(world.keys.chunk(ref, 0), b"[]"))


@plant(9)
def a_job_comes_back(world: World, ref: OperationRef) -> None:
    world.do(world.cancel(ref))
    world.do(world.finish_at_once(ref))
    world.do(world.end(ref))
    world.tamper(Put(world.keys.job(ref, 0, "progress"), b"1"))


@plant(9)
def gone_while_it_runs(world: World, ref: OperationRef) -> None:
    world.tamper(Delete(*prefix_range(f"{world.keys.root(ref)}.")), Delete(world.keys.gate(ref)))


@plant(10)
def the_attempt_goes_back(world: World, ref: OperationRef) -> None:
    world.do(world.claim(ref, "a", [0]))
    world.do(world.wait_again(ref, 0, failed=True))
    world.do(world.claim(ref, "a", [0]))
    world.do(world.wait_again(ref, 0, failed=False))
    world.tamper(Put(world.keys.claim(ref, 0), Claim("ex-b", "b", 1, 1).encode()))


@plant(10)
def the_failures_pass_the_limit(world: World, ref: OperationRef) -> None:
    for _ in range(3):
        world.do(world.claim(ref, "a", [0]))
        world.do(world.wait_again(ref, 0, failed=True))


@plant(2)
def a_claim_revoked_from_the_living(world: World, ref: OperationRef) -> None:
    world.do(world.claim(ref, "a", [0]))
    world.do(world.cancel(ref))
    claim = world.claim_of(ref, 0)
    assert claim is not None
    world.tamper(Put(world.keys.claim(ref, 0), job_claims.revoked(claim).encode()))


@plant(2)
def a_claim_revoked_from_the_living_behind_its_gate(world: World, ref: OperationRef) -> None:
    world.do(world.claim(ref, "a", [0]))
    claim = world.claim_of(ref, 0)
    assert claim is not None
    world.tamper(Put(world.keys.claim(ref, 0), job_claims.revoked_lost(claim, world.rules).encode()))


@plant(10)
def a_failure_forgotten(world: World, ref: OperationRef) -> None:
    world.do(world.claim(ref, "a", [0]))
    world.do(world.wait_again(ref, 0, failed=True))
    world.tamper(Put(world.keys.claim(ref, 0), Claim("ex-b", "b", 2, 0).encode()))


@plant(10)
def a_takeover_not_counted(world: World, ref: OperationRef) -> None:
    world.do(world.claim(ref, "a", [0]))
    world.die("a")
    world.tamper(Put(world.keys.claim(ref, 0), Claim("ex-b", "b", 2, 0).encode()))


@plant(10)
def planning_attempts_stand_still(world: World, ref: OperationRef) -> None:
    second = world.next_ref()
    world.do(world.start(second))
    world.do(world.plan_attempt(second))
    world.tamper(Put(world.keys.of(second, "planning"), Attempts(1).encode()))


@plant(12)
def gate_and_pending(world: World, ref: OperationRef) -> None:
    world.tamper(Put(world.keys.pending(ref), b"paused"))


@plant(12)
def neither_gate_nor_pending(world: World, ref: OperationRef) -> None:
    world.tamper(Delete(world.keys.gate(ref)))


@plant(12)
def pending_tells_something_else(world: World, ref: OperationRef) -> None:
    world.do(world.pause(ref))
    world.tamper(Put(world.keys.pending(ref), b"planning"))


@plant(12)
def a_gate_without_a_plan(world: World, ref: OperationRef) -> None:
    second = world.next_ref()
    world.do(world.start(second))
    world.tamper(Put(world.keys.gate(second), b"open"), Delete(world.keys.pending(second)))


def _plan_as(world: World, plan: Plan, chunks: list[bytes]) -> None:
    second = world.next_ref()
    world.do(world.start(second))
    keys = world.keys
    world.tamper(
        *(Put(keys.chunk(second, n), chunk) for n, chunk in enumerate(chunks)),
        Put(keys.of(second, "plan"), plan.encode()),
        Put(keys.gate(second), b"open"),
        Delete(keys.pending(second)),
    )


@plant(13)
def a_digest_that_does_not_fit(world: World, ref: OperationRef) -> None:
    plan, chunks = planned(2)
    _plan_as(world, replace(plan, digest="0" * 64), chunks)


@plant(13)
def a_chunk_is_missing(world: World, ref: OperationRef) -> None:
    plan, chunks = planned(2)
    _plan_as(world, replace(plan, chunks=2), chunks)


@plant(13)
def the_count_does_not_fit(world: World, ref: OperationRef) -> None:
    plan, chunks = planned(2)
    _plan_as(world, replace(plan, count=3), chunks)


@plant(13)
def ordinals_out_of_order(world: World, ref: OperationRef) -> None:
    chunks = [encode_chunk([PartitionPlan(1, "b"), PartitionPlan(0, "a")])]
    _plan_as(world, Plan(2, "", plan_digest(chunks), 1), chunks)


@plant(13)
def a_chunk_changed_after_the_plan(world: World, ref: OperationRef) -> None:
    world.tamper(Put(world.keys.chunk(ref, 0), b"[]"))


@plant(13)
def a_chunk_deleted_after_the_plan(world: World, ref: OperationRef) -> None:
    world.tamper(Delete(world.keys.chunk(ref, 0)))


@plant(14)
def a_request_began_twice(world: World, ref: OperationRef) -> None:
    world.tamper(*begin(world, replace(ref, instance=2), 3, f"request-{ref}"))


@plant(14)
def the_spec_changes(world: World, ref: OperationRef) -> None:
    world.tamper(Put(world.keys.of(ref, "spec"), replace(world.spec(ref), submitter="other").encode()))


def _limited(world: World, ref: OperationRef, **options: int) -> None:
    """The operation, with these options; job 0 is claimed by a."""
    world.do(world.alter(ref, Options(**options)))
    world.do(world.claim(ref, "a", [0]))


@plant(16)
def one_more_than_may_run(world: World, ref: OperationRef) -> None:
    _limited(world, ref, max_jobs=1)
    claim = Claim("ex-b", "b", 1, 0, permit=1)
    world.tamper(Put(world.keys.claim(ref, 1), claim.encode()), Put(world.keys.permit(ref, 1), b"1"))


@plant(16)
def claimed_without_a_permit(world: World, ref: OperationRef) -> None:
    _limited(world, ref, max_jobs=2)
    world.tamper(Put(world.keys.claim(ref, 1), Claim("ex-b", "b", 1, 0).encode()))


@plant(16)
def claimed_with_the_permit_of_another(world: World, ref: OperationRef) -> None:
    _limited(world, ref, max_jobs=2)
    had = world.claim_of(ref, 0).permit
    world.tamper(Put(world.keys.claim(ref, 1), Claim("ex-b", "b", 1, 0, permit=had).encode()))


@plant(16)
def a_permit_that_nobody_gave_back(world: World, ref: OperationRef) -> None:
    _limited(world, ref, max_jobs=1)
    world.tamper(
        Put(world.keys.job(ref, 0, "state"), b"success"),
        Put(world.keys.job(ref, 0, "outcome"), Outcome("p=0", "ex-a", "a", 1, TIME, TIME).encode()),
        Delete(world.keys.claim(ref, 0)),
    )


@plant(16)
def a_permit_of_a_job_that_never_had_a_claim(world: World, ref: OperationRef) -> None:
    _limited(world, ref, max_jobs=2)
    world.tamper(Put(world.keys.permit(ref, 0), b"1"))


@plant(16)
def a_permit_of_a_job_whose_claim_has_another(world: World, ref: OperationRef) -> None:
    _limited(world, ref, max_jobs=2)
    had = world.claim_of(ref, 0).permit
    world.tamper(Put(world.keys.permit(ref, 1 - had), b"0"))


@plant(16)
def a_permit_of_a_job_that_waits(world: World, ref: OperationRef) -> None:
    _limited(world, ref, max_jobs=2)
    world.do(world.wait_again(ref, 0, failed=False))
    world.tamper(Put(world.keys.permit(ref, 0), b"0"))


@plant(16)
def a_permit_is_freed_under_its_claim(world: World, ref: OperationRef) -> None:
    _limited(world, ref, max_jobs=1)
    world.tamper(Put(world.keys.permit(ref, world.claim_of(ref, 0).permit), FREE))


@plant(16)
def a_permit_is_deleted_under_its_claim(world: World, ref: OperationRef) -> None:
    _limited(world, ref, max_jobs=1)
    world.tamper(Delete(world.keys.permit(ref, world.claim_of(ref, 0).permit)))


@plant(16)
def one_more_than_an_executor_may_run(world: World, ref: OperationRef) -> None:
    _limited(world, ref, max_jobs_per_executor=1)
    world.tamper(Put(world.keys.claim(ref, 1), Claim("ex-a", "a", 1, 0).encode()))


@plant(16)
def a_gate_that_says_less_than_the_options(world: World, ref: OperationRef) -> None:
    _limited(world, ref, max_jobs=1)
    world.tamper(Put(world.keys.gate(ref), Gate(2).encode()))


@plant(17)
def claimed_by_an_executor_without_the_label(world: World, ref: OperationRef) -> None:
    second = world.next_ref()
    spec = replace(world.spec(second), where={"zone": "a"})
    world.do(t.starts(world.keys, world.counters(), [t.NewOperation(second, spec, b"{}")]))
    world.do(world.plan(second, 1))
    world.do(world.claim(second, "a", [0]))


@plant(15)
def one_that_waits_for_another_begins(world: World, ref: OperationRef) -> None:
    behind = world.next_ref()
    world.do(world.submit(behind, ref))
    keys = world.keys
    world.tamper(
        Put(keys.of(behind, "state"), b"running"),
        Put(keys.pending(behind), b"planning"),
        Put(keys.run_ops(TABLE), b'{"noop":2}'),
    )


@plant(15)
def one_is_aborted_without_cause(world: World, ref: OperationRef) -> None:
    behind = world.next_ref()
    world.do(world.submit(behind, ref))
    why = Cancel("aborted", f"{ref} ended as failed")
    history = ended_waiting(behind, world.own_spec(behind), State.CANCELLED, TIME, why)
    world.do(w.end_waiting(world.keys, behind, world.mod(behind, "state"), history, why, world.election))


@plant(15)
def one_is_told_that_another_failed_which_runs(world: World, ref: OperationRef) -> None:
    behind = world.next_ref()
    world.do(world.submit(behind, ref))
    (put, _) = w.link(world.keys, ref, behind, "success")
    world.tamper(Put(put.key, Edge(str(ref), "success", "failed").encode()))


@plant(15)
def one_is_made_to_wait_for_what_has_ended(world: World, ref: OperationRef) -> None:
    behind = world.next_ref()
    world.do(world.submit(behind))
    world.do(world.cancel(ref))
    world.do(world.finish_at_once(ref))
    world.tamper(*w.link(world.keys, ref, behind, "end"))


@plant(15)
def an_edge_goes_while_what_it_waits_for_goes_on(world: World, ref: OperationRef) -> None:
    behind = world.next_ref()
    world.do(world.submit(behind, ref))
    world.tamper(*(Delete(put.key) for put in w.link(world.keys, ref, behind, "success")))


@plant(15)
def one_ends_while_its_graph_is_inserted(world: World, ref: OperationRef) -> None:
    behind = world.next_ref()
    world.do(w.hold(world.keys, "h", Hold(GRAPH), 0))
    world.do(world.submit(behind, hold="h"))
    why = Cancel("user")
    history = ended_waiting(behind, world.own_spec(behind), State.CANCELLED, TIME, why)
    world.do(w.end_waiting(world.keys, behind, world.mod(behind, "state"), history, why))


@plant(15)
def a_denied_hold_goes_before_what_it_held(world: World, ref: OperationRef) -> None:
    world.do(w.hold(world.keys, "h", Hold(GRAPH, HoldState.DENIED, "no"), 0))
    world.do(world.submit(world.next_ref(), hold="h"))
    world.tamper(Delete(world.keys.hold("h")))


@plant(14)
def one_is_told_never_to_have_been_started(world: World, ref: OperationRef) -> None:
    waiting = world.next_ref()
    world.do(world.start_of("x", waits=True))
    why = Cancel("user")
    history = ended_waiting(waiting, world.own_spec(waiting), State.CANCELLED, TIME, why, void=True)
    world.do(w.end_waiting(world.keys, waiting, world.mod(waiting, "state"), history, why))


def named(world: World, ref: OperationRef) -> str:
    """The key of the request id with which the operation was started."""
    return world.keys.request(TABLE, TYPE, world.own_spec(ref).request_id)


@plant(14)
def a_request_names_what_it_did_not_begin(world: World, ref: OperationRef) -> None:
    world.tamper(Put(world.keys.request(TABLE, TYPE, "r"), str(ref).encode()))


@plant(14)
def a_request_names_nobody(world: World, ref: OperationRef) -> None:
    world.tamper(Put(named(world, ref), str(world.next_ref()).encode()))


@plant(14)
def a_request_is_forgotten_too_soon(world: World, ref: OperationRef) -> None:
    world.tamper(Delete(named(world, ref)))


@plant(14)
def a_request_is_forgotten_before_the_history(world: World, ref: OperationRef) -> None:
    ended = world.run_operation(1)
    world.tamper(Delete(world.keys.request(TABLE, TYPE, f"request-{ended}")))


@plant(14)
def a_request_outlives_the_history(world: World, ref: OperationRef) -> None:
    forgotten = world.run_operation(1)
    age_model_history(world.store, world.keys)
    world.tamper(Delete(world.keys.history(forgotten)))


def end_in_series(world: World, series: Series, *before_cleanup: Put | Delete) -> None:
    """An operation of a series that ends at ``TIME`` and is cleaned up, and no next one is started."""
    world.tamper(Put(world.keys.table(TABLE), TableRecord(TABLE, "parquet", "/data").encode()))
    world.tamper(Put(world.keys.behavior(TYPE), Declaration(TYPE).encode()))
    one = world.next_ref()
    new = t.NewOperation(one, replace(world.spec(one), series=series.to_json()), b"{}", named=True)
    world.do(t.starts(world.keys, world.counters(), [new]))
    world.do(world.plan(one, 1))
    world.do(world.claim(one, "a", [0]))
    world.do(world.report(one, 0, JobState.SUCCESS))
    world.do(world.decide(one))
    world.do(world.finish(one))
    for write in before_cleanup:
        world.tamper(write)
    world.do(world.end(one))


@plant(19)
def a_series_ends_without_its_next_operation(world: World, ref: OperationRef) -> None:
    end_in_series(world, Series(60.0, left=2))


@plant(19)
def a_series_ends_before_its_last_time(world: World, ref: OperationRef) -> None:
    end_in_series(world, Series(60.0, until=rfc3339(parse_time(TIME) + 60.0)))


@plant(19)
def a_series_on_a_grid_ends_before_its_last_time(world: World, ref: OperationRef) -> None:
    due = parse_time(TIME) - 90.0
    end_in_series(world, Series(60.0, since="start", due=rfc3339(due), until=rfc3339(due + 61.0)))


@plant(14)
def a_record_is_deleted_within_its_hour(world: World, ref: OperationRef) -> None:
    age_model_history(world.store, world.keys)
    young = world.run_operation(1)
    old = [(young, world.store.mod(world.keys.history(young)), f"request-{young}")]
    mark = Watermark(0, world.store.revision + 1)
    world.tamper(*(op for one in f.forget(world.keys, old, mark).success for op in one.success))


@plant(14)
def a_watermark_tells_of_what_is_written_after_it(world: World, ref: OperationRef) -> None:
    world.tamper(Put(world.keys.watermark(0), b"1000000"))


@plant(14)
def the_hour_of_a_watermark_never_ends(world: World, ref: OperationRef) -> None:
    world.tamper(Put(world.keys.watermark(0), b""), Put(world.keys.young_watermark(0), b""))


@plant(18)
def an_id_is_given_up_too_soon(world: World, ref: OperationRef) -> None:
    world.do(world.start_of("x", waits=True))
    world.tamper(Delete(world.keys.unique(TABLE, TYPE, "x")))


@plant(18)
def an_id_names_another(world: World, ref: OperationRef) -> None:
    world.do(world.start_of("x", waits=False))
    world.tamper(Put(world.keys.unique(TABLE, TYPE, "x"), str(ref).encode()))


@plant(18)
def an_id_is_kept_beyond_the_end(world: World, ref: OperationRef) -> None:
    waiting = world.next_ref()
    world.do(world.start_of("x", waits=True))
    ended = world.end_waiting(waiting)
    world.do(replace(ended, success=tuple(op for op in ended.success if not isinstance(op, Txn))))


def _as_if_free(world: World, *, waits: bool) -> None:
    """A start of the id that does not look whether anybody has it."""
    second = World()
    second.store.apply(Txn((), (Put(world.keys.next_instance(TABLE, TYPE), b"3"),)))
    txn = second.start_of("x", waits=waits)
    puts = tuple(op for op in txn.success if isinstance(op, Put) and not op.key.endswith("runOps"))
    counts = () if waits else (Put(world.keys.run_ops(TABLE), b'{"noop":3}'),)
    world.tamper(*puts, *counts)


@plant(18)
def two_of_one_id_wait(world: World, ref: OperationRef) -> None:
    world.do(world.start_of("x", waits=True))
    _as_if_free(world, waits=True)


@plant(18)
def two_of_one_id_run(world: World, ref: OperationRef) -> None:
    world.do(world.start_of("x", waits=False))
    _as_if_free(world, waits=False)


@plant(5)
def the_history_leaves_out_an_action(world: World, ref: OperationRef) -> None:
    for p in (0, 1):
        world.do(world.claim(ref, "a", [p]))
        world.do(world.report(ref, p, JobState.SUCCESS))
    late = world.finish_at_once(ref)
    world.do(world.alter(ref, None, NO_ACTIONS.and_then(Action("", "alter", "ann"))))
    world.tamper(*late.success)


# Every record that distop keeps, with something else in its place: what reads it may say so, and must not break.

GARBAGE, EMPTY = b"\x80 no record", b"[]"

Spoiling: TypeAlias = "Callable[[World, OperationRef, bytes], tuple[Put | Delete, ...]]"


def _of(name: str) -> Spoiling:
    return lambda world, ref, value: (Put(world.keys.of(ref, name), value),)


def _spoiled_history(world: World, ref: OperationRef, value: bytes) -> tuple[Put | Delete, ...]:
    keys = world.keys
    return (
        Put(keys.of(ref, "state"), b"failed"),
        Put(keys.history(ref), value),
        Put(keys.run_ops(TABLE), b"{}"),
        Delete(keys.gate(ref)),
        Put(keys.pending(ref), b"cleaning"),
    )


def _spoiled_chunk(world: World, ref: OperationRef, value: bytes) -> tuple[Put | Delete, ...]:
    second = world.next_ref()
    world.do(world.start(second))
    keys = world.keys
    return (
        Put(keys.chunk(second, 0), value),
        Put(keys.of(second, "plan"), Plan(1, "", plan_digest([value]), 1).encode()),
        Put(keys.gate(second), b"open"),
        Delete(keys.pending(second)),
    )


def _spoiled_state(world: World, ref: OperationRef, value: bytes) -> tuple[Put | Delete, ...]:
    world.do(world.claim(ref, "a", [0]))
    return _report(world, ref, 0, outcome(0, Claim("ex-a", "a", 1, 0)), value)


def _spoiled_outcome(world: World, ref: OperationRef, value: bytes) -> tuple[Put | Delete, ...]:
    world.do(world.claim(ref, "a", [0]))
    keys = world.keys
    return (
        Put(keys.job(ref, 0, "state"), b"success"),
        Put(keys.job(ref, 0, "outcome"), value),
        Delete(keys.claim(ref, 0)),
    )


def _spoiled_progress(world: World, ref: OperationRef, value: bytes) -> tuple[Put | Delete, ...]:
    world.do(world.claim(ref, "a", [0]))
    return (Put(world.keys.job(ref, 0, "progress"), value),)


SPOILED: dict[str, tuple[tuple[int, int], Spoiling]] = {
    "state": ((0, 0), _of("state")),
    "spec": ((0, 0), _of("spec")),
    "arg": ((14, 14), _of("arg")),
    "cancel": ((0, 0), _of("cancel")),
    "plan": ((0, 0), _of("plan")),
    "planning": ((0, 0), _of("planning")),
    "decision": ((0, 0), _of("decision")),
    "options": ((0, 0), _of("options")),
    "actions": ((0, 0), _of("actions")),
    "chunk": ((0, 13), _spoiled_chunk),
    "gate": ((-1, -1), lambda world, ref, value: (Put(world.keys.gate(ref), value),)),
    "pending": ((0, 0), lambda world, ref, value: (Put(world.keys.pending(ref), value),)),
    "job_state": ((0, 0), _spoiled_state),
    "outcome": ((0, 0), _spoiled_outcome),
    "progress": ((-1, -1), _spoiled_progress),
    "claim": ((0, 0), lambda world, ref, value: (Put(world.keys.claim(ref, 0), value),)),
    "history": ((0, 0), _spoiled_history),
    "history_arg": ((-1, -1), lambda world, ref, value: (Put(world.keys.beside_history(ref, "arg"), value),)),
    "history_spec": ((-1, -1), lambda world, ref, value: (Put(world.keys.beside_history(ref, "spec"), value),)),
    "history_chunk": ((-1, -1), lambda world, ref, value: (Put(world.keys.history_chunk(ref, 0), value),)),
    "run_ops": ((0, 0), lambda world, ref, value: (Put(world.keys.run_ops(TABLE), value),)),
    "next_instance": ((0, 0), lambda world, ref, value: (Put(world.keys.next_instance(TABLE, TYPE), value),)),
    "current": ((0, 0), lambda world, ref, value: (Put(world.keys.current(TABLE, TYPE), value),)),
    "coordinator": ((0, 8), lambda world, ref, value: (Put(world.keys.coordinator(TABLE, TYPE), value),)),
    "node": ((-1, -1), lambda world, ref, value: (Put(world.keys.node("a"), value),)),
    "drain": ((-1, -1), lambda world, ref, value: (Put(world.keys.drain("ex-a"), value),)),
    "behavior": ((-1, -1), lambda world, ref, value: (Put(world.keys.behavior(TYPE), value),)),
    "unique": ((0, 18), lambda world, ref, value: (Put(world.keys.unique(TABLE, TYPE, "x"), value),)),
    "request": ((0, 0), lambda world, ref, value: (Put(world.keys.request(TABLE, TYPE, "r"), value),)),
    "table_actions": ((-1, -1), lambda world, ref, value: (Put(world.keys.table_actions(TABLE), value),)),
    "table": ((-1, -1), lambda world, ref, value: (Put(world.keys.table(TABLE), value),)),
}
"""Record → the numbers of what garbage and an empty list in its place break (-1: the audit does not read it), and the
writes that put a value there.
"""


def _spoil(writes: Spoiling, value: bytes) -> Callable[[World, OperationRef], None]:
    def spoil(world: World, ref: OperationRef) -> None:
        world.tamper(*writes(world, ref, value))

    return spoil


for _record, (_numbers, _writes) in SPOILED.items():
    for _number, _kind, _value in zip(_numbers, ("garbage", "an_empty_list"), (GARBAGE, EMPTY), strict=True):
        if _number >= 0:
            PLANTS.append((_number, f"{_record}_is_{_kind}", _spoil(_writes, _value)))
