"""The state tables of operations and jobs: where each event leads, and that all else is refused.

``protocol.operation_transitions`` and ``protocol.job_transitions`` have the transaction of each event; the diagrams in
docs/internals/architecture.md are generated from these tables.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from distop.protocol.records import State

if TYPE_CHECKING:
    from collections.abc import Mapping


class Stage(StrEnum):
    """What an operation is in, as its state, gate, pending and decision keys tell together."""

    ABSENT = "absent"
    WAITING = "waiting"
    PLANNING = "planning"
    OPEN = "open"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    COMPLETING = "completing"
    CLEANING = "cleaning"


_HELD = {State.PENDING: Stage.WAITING, State.PAUSED: Stage.PAUSED, State.CANCELLING: Stage.CANCELLING}


def stage_of(state: State | None, *, decided: bool, planned: bool) -> Stage:
    """What an operation is in, by its own keys: gate and pending follow from them (invariant 12)."""
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
    """What happens to an operation."""

    SUBMIT = "submit"
    """To wait; START and START_PLANNED: to run at once."""
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
"""Where each event leads. What is not here is refused by the guards of the event's transaction, whatever revisions the
caller put into them, and changes nothing."""


class JobStage(StrEnum):
    """What a job is in, as its state and claim keys tell together."""

    FREE = "free"
    CLAIMED = "claimed"
    WAITING = "waiting"
    SUCCESS = "success"
    FAILED = "failed"


class JobEvent(StrEnum):
    """What happens to a job."""

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
    """Behind a gate with a limit; REVOKE: while cancelling."""
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
"""Where each event leads a job. TAKE_OVER, FAIL_LOST, REVOKE and REVOKE_LOST need its incarnation to be gone; of one
that an actor has claimed, that the claim is as it was when whoever does it first saw it. EXTEND is an actor's.
"""
