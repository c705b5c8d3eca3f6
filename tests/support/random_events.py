"""Random events of a :class:`World`: transactions that daemons and clients may send in its current state."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from distop.protocol import state_tables
from distop.protocol.behavior_declaration import Retry, Rules
from distop.protocol.jobs import JobState
from distop.protocol.operation_options import Options
from distop.protocol.state_tables import Event, JobStage, Stage
from tests.support.world import World

if TYPE_CHECKING:
    from distop.protocol.records import OperationRef
    from distop.protocol.txn import Txn


_BUILDERS = {Event.JOIN: "joined"}
"""Events whose method of :class:`World` has another name."""


def build(world: World, event: Event, ref: OperationRef) -> Txn:
    """The event's transaction, with current revisions."""
    transaction: Txn = getattr(world, _BUILDERS.get(event, event.value))(ref)
    return transaction


_RANDOM_EVENTS = (
    "start start plan plan plan plan_attempt chunk claim claim claim claim claim claim report report report report "
    "own own own extend extend "
    "report_failed retry release revoke_lost checkpoint die join elect elect pause resume resume cancel fail_fast "
    "revoke reap reap "
    "submit submit start_of start_of start_of begin begin begin begin_planned joined end_waiting add_dependencies "
    "signal signal alter alter pause_now decide decide complete_attempt finish finish finish_all finish_at_once "
    "finish_and_end clean end resign"
).split()
_RARE = frozenset(
    {"joined", "end_waiting", "cancel", "pause", "pause_now", "resign", "die", "plan_attempt", "fail_fast"}
)


def world_with_node(seed: int) -> tuple[World, random.Random]:
    """A world with one executor, and the random numbers for :func:`random_event`."""
    world = World(rules=Rules(retry=Retry(attempts=3)))
    world.join("n0")
    return world, random.Random(seed)


def random_event(world: World, rng: random.Random) -> Txn | None:
    """A random transaction whose sender would send it in the current state, or None."""
    name = rng.choice(_RANDOM_EVENTS)
    if name in _RARE and rng.random() < 0.7:
        return None
    live = sorted(world.leases)
    elected = world.store.get(world.keys.coordinator("sales.orders", "noop"))
    operations_ = sorted(world.operations())
    if name == "join" and len(live) < 3:
        world.join(f"n{len(world.store.leases)}-{world.store.revision}")
        return None
    if name == "die" and len(live) > 1:
        world.die(rng.choice(live))
        return None
    if name == "start" and len(operations_) < 2:
        return world.start(world.next_ref()) if rng.random() < 0.5 else world.starts(2)
    if name == "submit" and len(operations_) < 4:
        unfinished = [one for one in operations_ if world.stage(one) is not Stage.CLEANING]
        chosen = rng.sample(unfinished, min(len(unfinished), rng.randrange(3)))
        return world.submit(world.next_ref(), *chosen, on=rng.choice(["success", "end"]))
    if name == "start_of" and len(operations_) < 4:
        return world.start_of(rng.choice("xxy"), waits=rng.random() < 0.5)
    if not live:
        return None
    if name == "elect" and (elected is None or elected.value.decode() not in live):
        return world.elect(rng.choice(live))
    if name == "resign" and elected is not None:
        return world.resign()
    if not operations_:
        return None
    ref = rng.choice(operations_)
    op = world.read(ref)
    stage = op.stage
    if name in ("claim", "own", "extend", "report", "report_failed", "retry", "release", "revoke_lost", "checkpoint"):
        return _job_event(world, rng, ref, name, live)
    if elected is None and name not in ("pause", "pause_now", "resume", "cancel", "alter"):
        return None
    if name == "chunk":
        return world.chunk(ref, rng.randrange(3), b"[]") if stage is Stage.PLANNING else None
    if name in ("join", "die", "elect", "resign", "start", "submit", "start_of"):
        return None
    if name == "finish_all":
        ended = [one for one in operations_ if world.stage(one) is Stage.COMPLETING]
        return world.finish_all(ended) if len(ended) > 1 else None
    event = Event(name.replace("joined", "join"))
    if event not in state_tables.OPERATION_TABLE[stage]:
        return None
    if event in (Event.DECIDE, Event.FINISH_AT_ONCE, Event.FINISH_AND_END):
        ended = op.plan is not None and op.ended >= op.plan.count
        if op.claims or not (ended or stage is Stage.CANCELLING):
            return None
        if event is Event.FINISH_AND_END and op.altered is not None:  # permits may be left
            return None
    if event in (Event.BEGIN, Event.BEGIN_PLANNED, Event.JOIN) and op.after:
        return None
    if event is Event.ADD_DEPENDENCIES:
        earlier = [one for one in operations_ if one < ref and world.stage(one) is not Stage.CLEANING]
        return world.add_dependencies(ref, rng.choice(earlier)) if earlier else None
    if event is Event.ALTER:
        return world.alter(ref, Options(rng.randrange(-2, 3), rng.randrange(3), rng.choice((0, 0, 2))))
    if event is Event.END:
        return world.end(ref)
    if event in (Event.REVOKE, Event.REAP):
        for p, seen in op.claims.items():
            if seen.value.waiting or (
                seen.value.incarnation not in live and (not seen.value.actor or actor_claim_expired(rng))
            ):
                return world.reap(ref, p) if event is Event.REAP else world.revoke(ref, p)
        return None
    if event is Event.FAIL_FAST and not op.failed:
        return None
    return build(world, event, ref)


def actor_claim_expired(rng: random.Random) -> bool:
    """Whether an actor's claim counts as expired: random, because the world has no clock."""
    return rng.random() < 0.5


def _job_event(world: World, rng: random.Random, ref: OperationRef, name: str, live: list[str]) -> Txn | None:
    op = world.read(ref)
    if op.plan is None or not op.plan.count:
        return None
    p = rng.randrange(op.plan.count)
    claim = world.claim_of(ref, p)
    if name in ("claim", "own"):
        if op.stage is not Stage.OPEN or world.job_stage(ref, p) in (JobStage.SUCCESS, JobStage.FAILED):
            return None
        gate = world.gate(ref)
        if name == "own" and (gate.options.limited or gate.where):
            return None  # actors cannot claim such jobs
        if claim is not None and not claim.waiting:
            if claim.incarnation in live or (claim.actor and actor_claim_expired(rng)):
                return None
            if name == "own":
                return world.own(ref, rng.choice("vw"), p)
            if world.rules.at_limit(claim.failures + 1):
                return world.fail_lost(ref, rng.choice(live), p)
        return world.own(ref, rng.choice("vw"), p) if name == "own" else _claim(world, ref, rng.choice(live), p)
    if claim is None or claim.waiting:
        return None
    if name == "revoke_lost":
        abandoned = claim.incarnation not in live and not (claim.actor and actor_claim_expired(rng))
        lost = abandoned and op.stage is Stage.OPEN
        ends = world.rules.at_limit(claim.failures + 1)
        return world.revoke_lost(ref, rng.choice(live), p) if lost and live and not ends else None
    if name == "extend":
        extends = claim.actor and op.stage is not Stage.CANCELLING
        return world.extend(ref, p, rng.choice([1.0, 5.0])) if extends else None
    if name == "retry" and world.rules.at_limit(claim.failures + 1):
        name = "report_failed"
    if name in ("retry", "release"):
        return world.wait_again(ref, p, failed=name == "retry")
    if name == "checkpoint":
        return world.checkpoint(ref, p, b"%d" % world.store.revision)
    return world.report(ref, p, JobState.FAILED if name == "report_failed" else JobState.SUCCESS)


def _claim(world: World, ref: OperationRef, incarnation: str, partition: int) -> Txn | None:
    """A claim by an executor within its limit of jobs, or None."""
    most = world.gate(ref).options.max_jobs_per_executor
    op = world.read(ref)
    held = sum(seen.value.incarnation == incarnation for seen in op.claims.values())
    return None if most and held >= most else world.claim(ref, incarnation, [partition])
