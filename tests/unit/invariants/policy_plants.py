"""Planted violations of policies, each found by one clause of invariant 20 alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from distop.protocol import operation_transitions as t
from distop.protocol import policy as p
from distop.protocol.json_codec import parse_time
from distop.protocol.policy import Evaluation, Policy, PolicyState, PolicyVerdict, SeenPolicy, WaitingEvents
from distop.protocol.record_reading import read_policy
from distop.protocol.records import OperationRef
from distop.protocol.txn import Delete, Put, Txn
from distop.protocol.user_actions import Action
from tests.support.world import TABLE, TIME, TYPE, World
from tests.unit.invariants.clause_plants import PLANTS
from tests.unit.invariants.plants import plant

__all__ = ["PLANTS"]

NAME = "nightly"
POLICY = Policy(TYPE, "u1", every=60.0, on=("version", "event:loaded"))
AT = parse_time(TIME)
NO, STARTED, WAITS = PolicyVerdict.NO, PolicyVerdict.STARTED, PolicyVerdict.WAITS


def seen(world: World) -> SeenPolicy:
    return read_policy(*(world.store.get(get.key) for get in p.policy_reads(world.keys, TABLE, NAME)))


def made(world: World, policy: Policy = POLICY) -> Txn:
    """The transaction that makes or changes the policy."""
    mark, table = world.store.mod(world.keys.policy_mark()), world.store.mod(world.keys.table(TABLE))
    return p.set_policies(world.keys, TABLE, {NAME: (policy, seen(world))}, mark, table)


def elect(world: World, incarnation: str = "a") -> None:
    key = world.keys.policy_evaluator(TABLE)
    world.tamper(Put(key, incarnation.encode()))


def policy(world: World, policy: Policy = POLICY) -> None:
    """Make the policy, and elect an evaluator."""
    world.do(made(world, policy))
    world.do(p.elect(world.keys, TABLE, "a", 0, ""))


def emitted(world: World, id_: str = "e1") -> None:
    event = p.EmittedEvent(id_, "loaded", TIME)
    world.do(p.emit(world.keys, TABLE, event, {NAME: seen(world)}))


def judged(world: World, verdict: PolicyVerdict, *triggers: str, by: str = "a", **changed: Any) -> PolicyState:
    """The state after an evaluation, with these changes."""
    inputs = {"version": changed["version"]} if "version" in changed else {}
    one = Evaluation(TIME, verdict, "", triggers, inputs, changed.get("op", ""), by)
    return replace(seen(world).state, **changed).and_then(one)


def write(world: World, state: PolicyState, *more: Put | Delete) -> None:
    world.tamper(Put(world.keys.policy_state(TABLE, NAME), state.encode()), *more)


def evaluation(world: World, verdict: PolicyVerdict, *triggers: str, by: str = "a", **changed: Any) -> None:
    """An evaluation that writes the state without any guard."""
    state = judged(world, verdict, *triggers, by=by, **changed)
    left = seen(world).events.without(state.consumed)
    write(world, state, Put(world.keys.policy_event(TABLE, NAME), left.encode()))


def start(
    world: World, *triggers: str, recorded: bool = True, request: str = "", submitter: str = NAME, **changed: Any
) -> OperationRef:
    """An operation that a policy starts, in the revision of its evaluation, without any guard of the policy."""
    ref = world.next_ref()
    now = seen(world)
    uid = now.policy.uid if now.policy is not None else "u1"
    request = request or p.request_id(uid, triggers, now.state_mod)
    spec = replace(world.spec(ref), request_id=request, submitter=f"{p.SUBMITTER}{submitter}")
    txn = t.starts(world.keys, world.counters(), [t.NewOperation(ref, spec, b"{}", waits=True)])
    writes: tuple[Any, ...] = ()
    if recorded:
        state = judged(world, STARTED, *triggers, **{"op": str(ref)} | changed)
        left = now.events.without(state.consumed)
        writes = (Put(world.keys.policy_state(TABLE, NAME), state.encode()),)
        writes += (Put(world.keys.policy_event(TABLE, NAME), left.encode()),) if left != now.events else ()
    world.do(replace(txn, success=(*txn.success, *writes)))
    return ref


def life(world: World) -> None:
    """All commands and evaluations of a policy."""
    policy(world)
    emitted(world)
    start(world, "event:loaded@e1", "every@t", every_at=AT, consumed=("e1",))
    world.do(p.pause(world.keys, TABLE, NAME, seen(world), seen(world).policy.actions))  # type: ignore[union-attr]
    emitted(world, "e2")
    world.do(made(world, replace(POLICY, on=("version", "event:loaded", "event:other"))))
    now = seen(world)
    assert now.policy is not None
    resumed = now.policy.actions.and_then(Action(TIME, "resume_policy", "ann"))
    world.do(p.resume(world.keys, TABLE, NAME, now, resumed))
    evaluation(world, WAITS, "event:loaded@e2")
    evaluation(world, NO, "event:loaded@e2", "version@v1", version="v1", consumed=("e1", "e2"))
    start(world, "version@v2", "every@t2", version="v3", every_at=AT + 180.0)
    world.do(p.resign(world.keys, TABLE, world.store.mod(world.keys.policy_evaluator(TABLE))))
    world.die("a")
    elect(world, "b")
    evaluation(world, NO, "version@v1", version="v1", by="b")
    evaluation(world, NO, "every@t3", by="b", every_at=AT)
    emitted(world, "e3")
    world.do(p.remove(world.keys, TABLE, NAME, seen(world).mod))
    world.do(made(world, replace(POLICY, uid="u2")))


@plant(20)
def an_evaluator_is_elected_over_the_living(world: World, ref: OperationRef) -> None:
    policy(world)
    elect(world, "b")


@plant(20)
def an_evaluator_is_elected_from_the_dead(world: World, ref: OperationRef) -> None:
    elect(world, "x")


@plant(0)
def a_policy_cannot_be_read(world: World, ref: OperationRef) -> None:
    policy(world)
    world.tamper(Put(world.keys.policy(TABLE, NAME), b"{"))


@plant(20)
def events_of_no_policy(world: World, ref: OperationRef) -> None:
    world.tamper(Put(world.keys.policy_event(TABLE, NAME), WaitingEvents().encode()))


@plant(20)
def a_removed_policy_is_back(world: World, ref: OperationRef) -> None:
    txn = made(world)
    world.do(txn)
    world.do(p.remove(world.keys, TABLE, NAME, seen(world).mod))
    world.do(made(world))


@plant(20)
def a_policy_is_made_without_the_mark(world: World, ref: OperationRef) -> None:
    txn = made(world)
    world.do(replace(txn, success=tuple(one for one in txn.success if one.key != world.keys.policy_mark())))


@plant(20)
def a_policy_is_made_without_a_state(world: World, ref: OperationRef) -> None:
    world.tamper(Put(world.keys.policy_mark(), b""), Put(world.keys.policy(TABLE, NAME), POLICY.encode()))


@plant(20)
def a_removed_policy_leaves_its_state(world: World, ref: OperationRef) -> None:
    policy(world)
    world.tamper(Delete(world.keys.policy(TABLE, NAME)))


@plant(20)
def a_command_writes_the_state(world: World, ref: OperationRef) -> None:
    policy(world)
    changed = Put(world.keys.policy(TABLE, NAME), replace(POLICY, every=30.0).encode())
    write(world, judged(world, NO), changed)


@plant(20)
def the_own_id_changes(world: World, ref: OperationRef) -> None:
    policy(world)
    world.do(made(world, replace(POLICY, uid="u2")))


@plant(20)
def a_pause_is_lost(world: World, ref: OperationRef) -> None:
    resumed = POLICY.actions.and_then(Action(TIME, "resume_policy", "ann"))
    paused = replace(POLICY, paused=True, actions=resumed)
    world.tamper(
        Put(world.keys.policy_mark(), b""),
        Put(world.keys.policy(TABLE, NAME), paused.encode()),
        Put(world.keys.policy_state(TABLE, NAME), PolicyState().encode()),
    )
    world.tamper(Put(world.keys.policy(TABLE, NAME), replace(paused, paused=False).encode()))


@plant(20)
def evaluated_after_the_removal(world: World, ref: OperationRef) -> None:
    policy(world)
    late = judged(world, NO)
    world.do(p.remove(world.keys, TABLE, NAME, seen(world).mod))
    write(world, late)


@plant(20)
def evaluated_during_a_pause(world: World, ref: OperationRef) -> None:
    policy(world)
    world.do(p.pause(world.keys, TABLE, NAME, seen(world), POLICY.actions))
    evaluation(world, NO)


@plant(20)
def evaluated_by_another(world: World, ref: OperationRef) -> None:
    policy(world)
    evaluation(world, NO, by="b")


@plant(20)
def evaluated_without_an_evaluator(world: World, ref: OperationRef) -> None:
    world.do(made(world))
    evaluation(world, NO, by="")


@plant(20)
def evaluated_with_an_election(world: World, ref: OperationRef) -> None:
    world.do(made(world))
    write(world, judged(world, NO), Put(world.keys.policy_evaluator(TABLE), b"a"))


@plant(20)
def a_trigger_that_waits_is_consumed(world: World, ref: OperationRef) -> None:
    policy(world)
    evaluation(world, WAITS, "version@v1", version="v1")


@plant(20)
def an_interval_is_not_counted(world: World, ref: OperationRef) -> None:
    policy(world)
    evaluation(world, NO, "every@t")


@plant(20)
def a_version_is_evaluated_twice(world: World, ref: OperationRef) -> None:
    policy(world)
    evaluation(world, NO, "version@v1", version="v1")
    evaluation(world, NO, "version@v1", version="v1")


@plant(20)
def an_event_is_evaluated_twice(world: World, ref: OperationRef) -> None:
    policy(world)
    emitted(world)
    evaluation(world, NO, "event:loaded@e1", consumed=("e1",))
    evaluation(world, NO, "event:loaded@e1")


@plant(20)
def an_event_that_was_evaluated_waits_again(world: World, ref: OperationRef) -> None:
    policy(world)
    emitted(world)
    evaluation(world, NO, "event:loaded@e1")


@plant(20)
def another_version_is_noted(world: World, ref: OperationRef) -> None:
    policy(world)
    write(world, replace(judged(world, NO, "version@v1", version="v1"), version="v2"))


@plant(20)
def missed_intervals_count_twice(world: World, ref: OperationRef) -> None:
    policy(world)
    evaluation(world, NO, "every@t", every_at=AT)
    evaluation(world, NO, "every@t2", every_at=AT + 90.0)


@plant(20)
def each_missed_interval_counts(world: World, ref: OperationRef) -> None:
    policy(world)
    evaluation(world, NO, "every@t", every_at=AT - 600.0)


@plant(20)
def an_interval_is_counted_too_early(world: World, ref: OperationRef) -> None:
    policy(world)
    evaluation(world, NO, "every@t", every_at=AT)
    evaluation(world, NO, "every@t2", every_at=AT + 1.0)


@plant(20)
def an_operation_is_named_that_did_not_start(world: World, ref: OperationRef) -> None:
    policy(world)
    evaluation(world, STARTED, "version@v1", version="v1", op=str(ref))


@plant(20)
def too_many_evaluations_are_kept(world: World, ref: OperationRef) -> None:
    policy(world)
    state = judged(world, NO)
    write(world, replace(state, kept=state.kept * (p.MOST_EVALUATIONS + 1)))


@plant(20)
def the_evaluations_are_too_large(world: World, ref: OperationRef) -> None:
    policy(world)
    state = judged(world, NO)
    large = replace(state.kept[0], inputs={"x": "y" * p.MOST_BYTES})
    write(world, replace(state, kept=(large, *state.kept)))


@plant(20)
def started_by_no_policy(world: World, ref: OperationRef) -> None:
    start(world, "version@v1", recorded=False)


@plant(20)
def started_during_a_pause(world: World, ref: OperationRef) -> None:
    policy(world)
    world.do(p.pause(world.keys, TABLE, NAME, seen(world), POLICY.actions))
    start(world, "version@v1", recorded=False)


@plant(20)
def started_as_another_type(world: World, ref: OperationRef) -> None:
    policy(world, replace(POLICY, start="other"))
    start(world, "version@v1", version="v1")


@plant(20)
def started_without_an_evaluation(world: World, ref: OperationRef) -> None:
    policy(world)
    start(world, "version@v1", recorded=False)


@plant(20)
def started_from_a_former_state(world: World, ref: OperationRef) -> None:
    policy(world)
    request = p.request_id("u1", ("version@v1",), seen(world).state_mod)
    evaluation(world, NO, "version@v0", version="v0")
    start(world, "version@v1", version="v1", request=request)
