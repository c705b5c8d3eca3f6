"""Further planted violations, of which each is found by one clause of its invariant alone."""

from __future__ import annotations

from dataclasses import replace

from distop.decide.due_operations import ended_waiting
from distop.protocol import pending_operations as w
from distop.protocol.behavior_declaration import Rules
from distop.protocol.dependencies import GRAPH, Hold, HoldState
from distop.protocol.executor_nodes import Serves
from distop.protocol.jobs import Claim, JobState
from distop.protocol.records import Cancel, Decision, History, Node, OperationRef, Spec, State
from distop.protocol.txn import Delete, Put
from tests.support.world import TABLE, TIME, TYPE, World
from tests.unit.invariants.plants import PLANTS, finish_as, plant

__all__ = ["PLANTS"]


def _second(world: World, rules: Rules | None = None) -> OperationRef:
    """Another operation, which is running."""
    world.rules = rules or world.rules
    ref = world.next_ref()
    world.do(world.start(ref))
    world.do(world.plan(ref))
    return ref


def _both_succeed(world: World, ref: OperationRef) -> None:
    world.do(world.claim(ref, "a", [0, 1]))
    for p in (0, 1):
        world.do(world.report(ref, p, JobState.SUCCESS))


def _decide_as(world: World, ref: OperationRef, decision: Decision) -> None:
    keys = world.keys
    world.tamper(
        Put(keys.of(ref, "decision"), decision.encode()), Delete(keys.gate(ref)), Put(keys.pending(ref), b"completing")
    )


def _record(ref: OperationRef, state: State = State.FAILED, total: int = 2, success: int = 0) -> History:
    return History(str(ref), state, TIME, TIME, total, success, 0, request_id=f"request-{ref}")


# ----------------------------------------------------------------------- jobs


@plant(8)
def a_job_is_cleaned_up_without_an_election(world: World, ref: OperationRef) -> None:
    _both_succeed(world, ref)
    world.do(world.finish_at_once(ref))
    world.do(world.resign())
    world.tamper(*(Delete(world.keys.job(ref, 0, name)) for name in ("state", "outcome")))


@plant(1)
def an_outcome_vanishes(world: World, ref: OperationRef) -> None:
    _both_succeed(world, ref)
    world.tamper(Delete(world.keys.job(ref, 0, "outcome")))


@plant(10)
def a_job_that_was_lost_too_often_succeeds(world: World, ref: OperationRef) -> None:
    for by, gone in (("a", "a"), ("b", "b"), ("c", "c"), ("d", "")):
        if by in "cd":
            world.join(by)
        world.do(world.claim(ref, by, [0]))
        if gone:
            world.die(gone)
    world.do(world.report(ref, 0, JobState.SUCCESS))


@plant(10)
def an_attempt_is_claimed_a_second_time(world: World, ref: OperationRef) -> None:
    world.do(world.claim(ref, "a", [0]))
    world.die("a")
    world.tamper(Put(world.keys.claim(ref, 0), Claim("ex-b", "b", 1, 1).encode()))


@plant(10)
def a_lost_job_is_taken_over_where_it_fails(world: World, ref: OperationRef) -> None:
    second = _second(world, replace(world.rules, lost="fail"))
    world.do(world.claim(second, "a", [0]))
    world.die("a")
    world.do(world.claim(second, "b", [0]))


def _extended(world: World, ref: OperationRef, **changed: object) -> None:
    claim = world.claim_of(ref, 0)
    assert claim is not None
    world.tamper(Put(world.keys.claim(ref, 0), replace(claim, **changed).encode()))


@plant(4)
def a_claim_is_extended_in_a_cancel(world: World, ref: OperationRef) -> None:
    world.do(world.own(ref, "w", 0))
    world.do(world.cancel(ref))
    _extended(world, ref)


@plant(3)
def a_claim_is_extended_by_another_actor(world: World, ref: OperationRef) -> None:
    world.do(world.own(ref, "w", 0))
    _extended(world, ref, actor="x")


@plant(3)
def a_claim_is_extended_as_another_attempt(world: World, ref: OperationRef) -> None:
    world.do(world.own(ref, "w", 0))
    _extended(world, ref, attempt=2)


@plant(10)
def extending_counts_a_failure(world: World, ref: OperationRef) -> None:
    world.do(world.own(ref, "w", 0))
    _extended(world, ref, failures=1)


@plant(3)
def a_job_that_nobody_held_is_set_to_waiting(world: World, ref: OperationRef) -> None:
    world.tamper(Put(world.keys.claim(ref, 0), Claim("ex-a", "", 1, 0).encode()))


@plant(3)
def a_job_that_waits_is_set_to_waiting(world: World, ref: OperationRef) -> None:
    world.do(world.claim(ref, "a", [0]))
    world.do(world.wait_again(ref, 0, failed=False))
    world.tamper(Put(world.keys.claim(ref, 0), Claim("ex-a", "", 1, 0).encode()))


@plant(10)
def one_failure_is_counted_twice(world: World, ref: OperationRef) -> None:
    world.do(world.claim(ref, "a", [0]))
    world.tamper(Put(world.keys.claim(ref, 0), Claim("ex-a", "", 1, 2).encode()))


@plant(17)
def claimed_by_an_executor_that_does_not_serve_the_type(world: World, ref: OperationRef) -> None:
    world.tamper(Put(world.keys.node("a"), Node("ex-a", "host", 2, (TYPE,), serves=Serves(("other",))).encode()))
    world.do(world.claim(ref, "a", [0]))


# ----------------------------------------------------------- beside operations


@plant(7)
def run_ops_goes_while_nothing_runs(world: World, ref: OperationRef) -> None:
    world.do(world.cancel(ref))
    world.do(world.finish_at_once(ref))
    world.tamper(Delete(world.keys.run_ops(TABLE)))


@plant(6)
def the_first_number_of_a_type_is_left_out(world: World, ref: OperationRef) -> None:
    keys, second = world.keys, OperationRef(TABLE, "other", "", 2)
    world.tamper(
        Put(keys.run_ops(TABLE), b'{"noop":1,"other":1}'),
        Put(keys.next_instance(TABLE, "other"), b"3"),
        Put(keys.of(second, "arg"), b"{}"),
        Put(keys.of(second, "spec"), Spec("request", TIME, "tester", world.rules).encode()),
        Put(keys.of(second, "state"), b"running"),
        Put(keys.pending(second), b"planning"),
    )


@plant(15)
def a_denied_hold_is_held_again(world: World, ref: OperationRef) -> None:
    world.do(w.hold(world.keys, "h", Hold(GRAPH, HoldState.DENIED, "no"), 0))
    world.tamper(Put(world.keys.hold("h"), Hold(GRAPH).encode()))


# ----------------------------------------------------------------- operations


@plant(5)
def the_history_tells_of_another_operation(world: World, ref: OperationRef) -> None:
    finish_as(world, ref, replace(_record(ref), op=str(replace(ref, instance=7))))


@plant(14)
def the_history_tells_of_another_request(world: World, ref: OperationRef) -> None:
    finish_as(world, ref, replace(_record(ref), request_id="another"))


@plant(5)
def the_history_is_written_while_it_runs(world: World, ref: OperationRef) -> None:
    world.tamper(Put(world.keys.history(ref), _record(ref).encode()))


@plant(9)
def the_argument_goes_while_it_runs(world: World, ref: OperationRef) -> None:
    world.tamper(Delete(world.keys.of(ref, "arg")))


@plant(9)
def the_decision_goes_before_the_end(world: World, ref: OperationRef) -> None:
    _both_succeed(world, ref)
    world.do(world.decide(ref))
    world.tamper(
        Delete(world.keys.of(ref, "decision")), Delete(world.keys.pending(ref)), Put(world.keys.gate(ref), b"open")
    )


@plant(10)
def completion_attempts_go_back(world: World, ref: OperationRef) -> None:
    _both_succeed(world, ref)
    world.do(world.decide(ref))
    world.do(world.complete_attempt(ref))
    world.tamper(Put(world.keys.of(ref, "decision"), Decision(State.SUCCESS, 2, 2, 0).encode()))


@plant(5)
def a_failure_is_decided_with_wrong_counts(world: World, ref: OperationRef) -> None:
    _decide_as(world, ref, Decision(State.FAILED, 2, 1, 0))


@plant(5)
def a_success_is_decided_before_all_jobs(world: World, ref: OperationRef) -> None:
    _decide_as(world, ref, Decision(State.SUCCESS, 2, 0, 0))


@plant(5)
def decided_over_a_claim(world: World, ref: OperationRef) -> None:
    world.do(world.claim(ref, "a", [0]))
    _decide_as(world, ref, Decision(State.FAILED, 2, 0, 0))


@plant(5)
def finished_as_what_was_not_decided(world: World, ref: OperationRef) -> None:
    _both_succeed(world, ref)
    _decide_as(world, ref, Decision(State.FAILED, 2, 2, 0))
    finish_as(world, ref, _record(ref, State.SUCCESS, success=2))


@plant(15)
def one_begins_under_a_hold(world: World, ref: OperationRef) -> None:
    behind = world.next_ref()
    world.do(w.hold(world.keys, "h", Hold(GRAPH), 0))
    world.do(world.submit(behind, hold="h"))
    world.tamper(
        Put(world.keys.of(behind, "state"), b"running"),
        Put(world.keys.pending(behind), b"planning"),
        Put(world.keys.run_ops(TABLE), b'{"noop":2}'),
    )


@plant(15)
def one_that_waits_is_cancelled_and_nothing_tells_why(world: World, ref: OperationRef) -> None:
    behind = world.next_ref()
    world.do(world.submit(behind, ref))
    why = Cancel("user")
    history = ended_waiting(behind, world.own_spec(behind), State.CANCELLED, TIME, why)
    txn = w.end_waiting(world.keys, behind, world.mod(behind, "state"), history, why)
    cancel = world.keys.of(behind, "cancel")
    world.tamper(*(op for op in txn.success if isinstance(op, Put | Delete) and op.key != cancel))


@plant(15)
def one_is_made_to_wait_for_what_ends_with_that(world: World, ref: OperationRef) -> None:
    behind = world.next_ref()
    world.do(world.submit(behind))
    ends = world.finish_at_once(ref).success
    world.tamper(*(op for op in ends if isinstance(op, Put | Delete)), *w.link(world.keys, ref, behind, "end"))


@plant(9)
def the_state_goes_first_while_it_runs(world: World, ref: OperationRef) -> None:
    keys = world.keys
    rest = Delete(*keys.own_range(ref)), Delete(keys.gate(ref)), Put(keys.run_ops(TABLE), b"{}")
    world.tamper(Delete(keys.of(ref, "state")), *rest)
