"""The state tables of operations and jobs: where each event leads.

All other events are refused. ``protocol.operation_transitions``, ``protocol.pending_operations``,
``protocol.operation_finish`` and ``protocol.job_transitions`` have the transaction of each event. They look up here
which state it compares, and which state, pending and gate keys it writes. The diagrams in
docs/internals/architecture.md are generated from these tables.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING

from distop.protocol.jobs import JobState
from distop.protocol.json_codec import word
from distop.protocol.records import Phase, State
from distop.protocol.txn import Delete, Put, value_is

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef
    from distop.protocol.txn import Compare


class Stage(StrEnum):
    """The stage of an operation, from its state, gate, pending and decision keys."""

    ABSENT = "absent"
    WAITING = "waiting"
    PLANNING = "planning"
    OPEN = "open"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    COMPLETING = "completing"
    CLEANING = "cleaning"


STATES: Mapping[Stage, State] = {
    Stage.WAITING: State.PENDING,
    Stage.PLANNING: State.RUNNING,
    Stage.OPEN: State.RUNNING,
    Stage.PAUSED: State.PAUSED,
    Stage.CANCELLING: State.CANCELLING,
}
"""The value of ``.state`` in each stage.

A decided operation keeps its state; one that is being cleaned up has a terminal state.
"""
PHASES: Mapping[Stage, Phase] = {
    Stage.WAITING: Phase.WAITING,
    Stage.PLANNING: Phase.PLANNING,
    Stage.PAUSED: Phase.PAUSED,
    Stage.CANCELLING: Phase.CANCELLING,
    Stage.COMPLETING: Phase.COMPLETING,
    Stage.CLEANING: Phase.CLEANING,
}
"""The value of the pending key in each stage; an open operation has a gate instead."""
_HELD = {STATES[stage]: stage for stage in (Stage.WAITING, Stage.PAUSED, Stage.CANCELLING)}


def stage_of(state: State | None, *, decided: bool, planned: bool) -> Stage:
    """The stage of an operation, from its own keys. Gate and pending follow from it (invariant 12)."""
    if state is None:
        return Stage.ABSENT
    if state.terminal:
        return Stage.CLEANING
    if decided:
        return Stage.COMPLETING
    if state is State.RUNNING:
        return Stage.OPEN if planned else Stage.PLANNING
    return _HELD[state]


class Event(StrEnum):
    """The events of an operation."""

    SUBMIT = "submit"
    """Starts as pending; START and START_PLANNED start at once."""
    START = "start"
    START_PLANNED = "start_planned"
    ADD_DEPENDENCIES = "add_dependencies"
    BEGIN = "begin"
    BEGIN_PLANNED = "begin_planned"
    JOIN = "join"
    END_WAITING = "end_waiting"
    PLAN = "plan"
    PLAN_ATTEMPT = "plan_attempt"
    GIVE_UP = "give_up"
    PAUSE = "pause"
    PAUSE_NOW = "pause_now"
    RESUME = "resume"
    ALTER = "alter"
    CANCEL = "cancel"
    FAIL_FAST = "fail_fast"
    REVOKE = "revoke"
    REAP = "reap"
    DECIDE = "decide"
    COMPLETE_ATTEMPT = "complete_attempt"
    FINISH = "finish"
    FINISH_AT_ONCE = "finish_at_once"
    FINISH_AND_END = "finish_and_end"
    SIGNAL = "signal"
    CLEAN = "clean"
    END = "end"


OPERATION_TABLE: Mapping[Stage, Mapping[Event, frozenset[Stage]]] = {
    Stage.ABSENT: {
        Event.SUBMIT: frozenset({Stage.WAITING}),
        Event.START: frozenset({Stage.PLANNING}),
        Event.START_PLANNED: frozenset({Stage.OPEN}),
    },
    Stage.WAITING: {
        Event.ADD_DEPENDENCIES: frozenset({Stage.WAITING}),
        Event.ALTER: frozenset({Stage.WAITING}),
        Event.BEGIN: frozenset({Stage.PLANNING}),
        Event.BEGIN_PLANNED: frozenset({Stage.OPEN}),
        Event.JOIN: frozenset({Stage.CLEANING}),
        Event.END_WAITING: frozenset({Stage.CLEANING}),
    },
    Stage.PLANNING: {
        Event.PLAN: frozenset({Stage.OPEN}),
        Event.PLAN_ATTEMPT: frozenset({Stage.PLANNING}),
        Event.GIVE_UP: frozenset({Stage.COMPLETING}),
        Event.PAUSE: frozenset({Stage.PAUSED}),
        Event.PAUSE_NOW: frozenset({Stage.PAUSED}),
        Event.ALTER: frozenset({Stage.PLANNING}),
        Event.CANCEL: frozenset({Stage.CANCELLING}),
    },
    Stage.OPEN: {
        Event.ALTER: frozenset({Stage.OPEN}),
        Event.PAUSE: frozenset({Stage.PAUSED}),
        Event.PAUSE_NOW: frozenset({Stage.PAUSED}),
        Event.CANCEL: frozenset({Stage.CANCELLING}),
        Event.FAIL_FAST: frozenset({Stage.CANCELLING}),
        Event.DECIDE: frozenset({Stage.COMPLETING}),
        Event.FINISH_AT_ONCE: frozenset({Stage.CLEANING}),
        Event.FINISH_AND_END: frozenset({Stage.ABSENT}),
    },
    Stage.PAUSED: {
        Event.PAUSE_NOW: frozenset({Stage.PAUSED}),
        Event.RESUME: frozenset({Stage.OPEN, Stage.PLANNING}),
        Event.ALTER: frozenset({Stage.PAUSED}),
        Event.CANCEL: frozenset({Stage.CANCELLING}),
        Event.DECIDE: frozenset({Stage.COMPLETING}),
        Event.FINISH_AT_ONCE: frozenset({Stage.CLEANING}),
    },
    Stage.CANCELLING: {
        Event.REVOKE: frozenset({Stage.CANCELLING}),
        Event.REAP: frozenset({Stage.CANCELLING}),
        Event.DECIDE: frozenset({Stage.COMPLETING}),
        Event.FINISH_AT_ONCE: frozenset({Stage.CLEANING}),
    },
    Stage.COMPLETING: {
        Event.COMPLETE_ATTEMPT: frozenset({Stage.COMPLETING}),
        Event.FINISH: frozenset({Stage.CLEANING}),
    },
    Stage.CLEANING: {
        Event.SIGNAL: frozenset({Stage.CLEANING}),
        Event.CLEAN: frozenset({Stage.CLEANING}),
        Event.END: frozenset({Stage.ABSENT}),
    },
}
"""The stages to which each event leads.

The guards of an event's transaction refuse it in all other stages, whatever revisions the caller passes, and it then
changes nothing.
"""


def leads_to(event: Event, *among: Stage) -> Stage:
    """The one stage (``among`` these, if given) to which an event leads.

    Raises ValueError if it leads to none of them, or to several.
    """
    found = {after for events in OPERATION_TABLE.values() for after in events.get(event, ())}
    found &= set(among or Stage)
    if len(found) != 1:
        raise ValueError(f"{event} leads to {', '.join(sorted(found)) or 'none of these'}")
    return found.pop()


@cache
def states_before(event: Event) -> frozenset[State]:
    """The values of ``.state`` in which an event may happen."""
    return frozenset(STATES[stage] for stage, events in OPERATION_TABLE.items() if event in events and stage in STATES)


def comes_in(keys: Keys, ref: OperationRef, event: Event, seen: State | None = None) -> Compare:
    """The guard of an event: ``.state`` has the value that the table requires.

    ``seen``: the value as read, if several are possible. Raises ValueError if the event does not happen in that state.
    """
    allowed = states_before(event)
    if seen is None and len(allowed) == 1:
        (seen,) = allowed
    if seen is None or seen not in allowed:
        raise ValueError(f"{event.replace('_', ' ')} does not happen to {ref} while it is {seen}")
    return value_is(keys.of(ref, "state"), word(seen))


@cache
def _entered(event: Event, among: tuple[Stage, ...]) -> tuple[Stage, bool, bool, bool]:
    """The stage to which an event leads; whether it changes ``.state``, deletes the gate, deletes pending."""
    after = leads_to(event, *among)
    stages = [stage for stage, events in OPERATION_TABLE.items() if after in events.get(event, ())]
    return (
        after,
        any(STATES.get(stage) is not STATES.get(after) for stage in stages),
        after is not Stage.OPEN and Stage.OPEN in stages,
        after not in PHASES and any(stage in PHASES for stage in stages),
    )


def enters(
    keys: Keys, ref: OperationRef, event: Event, *among: Stage, ends: State | None = None, phase: Phase | None = None
) -> tuple[Put | Delete, ...]:
    """The writes of an event to the state, the gate and the pending key.

    The caller writes a gate that opens, because it knows the value. ``ends``: the terminal state of an operation that
    ends. ``phase``: for a stage with two phases. Raises what :func:`leads_to` raises.
    """
    after, moves, shuts, goes_on = _entered(event, among)
    ops: list[Put | Delete] = []
    if (says := ends or STATES.get(after)) is not None and (ends or moves):
        ops.append(Put(keys.of(ref, "state"), word(says)))
    if shuts:
        ops.append(Delete(keys.gate(ref)))
    if (waits := phase or PHASES.get(after)) is not None:
        ops.append(Put(keys.pending(ref), word(waits)))
    elif goes_on:
        ops.append(Delete(keys.pending(ref)))
    return tuple(ops)


class JobStage(StrEnum):
    """The stage of a job, from its state and claim keys."""

    FREE = "free"
    CLAIMED = "claimed"
    WAITING = "waiting"
    SUCCESS = "success"
    FAILED = "failed"


class JobEvent(StrEnum):
    """The events of a job."""

    CLAIM = "claim"
    RECLAIM = "reclaim"
    TAKE_OVER = "take_over"
    EXTEND = "extend"
    REPORT_SUCCESS = "report_success"
    REPORT_FAILED = "report_failed"
    RETRY = "retry"
    RELEASE = "release"
    FAIL_LOST = "fail_lost"
    REVOKE = "revoke"
    REVOKE_LOST = "revoke_lost"
    """Behind a gate with a job limit; REVOKE: while cancelling."""
    REAP = "reap"


JOB_TABLE: Mapping[JobStage, Mapping[JobEvent, JobStage]] = {
    JobStage.FREE: {JobEvent.CLAIM: JobStage.CLAIMED},
    JobStage.CLAIMED: {
        JobEvent.TAKE_OVER: JobStage.CLAIMED,
        JobEvent.EXTEND: JobStage.CLAIMED,
        JobEvent.REPORT_SUCCESS: JobStage.SUCCESS,
        JobEvent.REPORT_FAILED: JobStage.FAILED,
        JobEvent.RETRY: JobStage.WAITING,
        JobEvent.RELEASE: JobStage.WAITING,
        JobEvent.FAIL_LOST: JobStage.FAILED,
        JobEvent.REVOKE: JobStage.WAITING,
        JobEvent.REVOKE_LOST: JobStage.WAITING,
    },
    JobStage.WAITING: {JobEvent.RECLAIM: JobStage.CLAIMED, JobEvent.REAP: JobStage.FREE},
    JobStage.SUCCESS: {},
    JobStage.FAILED: {},
}
"""The stage to which each event leads a job.

TAKE_OVER, FAIL_LOST, REVOKE and REVOKE_LOST require that the holder's incarnation is gone; if an actor holds the claim,
that it is unchanged since the observer first read it. EXTEND is only for actors.
"""


def job_ends(event: JobEvent) -> JobState:
    """The value of a job's ``.state`` after an event that ends it. Raises ValueError for other events."""
    (after,) = {events[event] for events in JOB_TABLE.values() if event in events}
    return JobState(after)
