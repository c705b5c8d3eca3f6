"""The state tables, and one function per event that returns the transaction which makes it happen.

Guards are one-way: a transaction that was refused once can never apply later, so a refused repetition proves that
the first copy is dead (T9). Equality with a mod revision is one-way; "absent" is used only for keys that cannot
come back while the other guards hold; the node key of an incarnation never comes back. Each clause was checked by
exhaustive exploration of a model: leaving one out gave a violation. The failure branch reads who won.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from distop.core.model import (
    Attempts,
    Cancel,
    Claim,
    Decision,
    History,
    JobState,
    OperationRef,
    Outcome,
    Phase,
    Plan,
    Spec,
    State,
    dumps,
)
from distop.core.txn import Compare, Delete, Get, Operation, Put, Txn, absent, exists, none_within, unchanged, value_is

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distop.core.keys import Keys

CLAIMS_PER_TXN = 124
"""Claims in one transaction, each a nested one that is decided alone. T1: 128, which a nested transaction shares with
what encloses it: two common guards, one more for each dead holder, and two compares or reads in each nested one."""
REPORTS_PER_TXN = 42
"""Reports in one transaction: three operations each (T1)."""
REPORT_BYTES_PER_TXN = 1024 * 1024
ORDINALS_PER_CLEAN = 300
"""Ordinals whose keys one cleanup page deletes: at most three keys each, so under 1,000."""
PLAN_BYTES_PER_TXN = 1024 * 1024
CHUNKS_PER_PLAN = 124


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


class Event(StrEnum):
    """What happens to an operation."""

    START = "start"
    START_PLANNED = "start_planned"
    PLAN = "plan"
    PLAN_ATTEMPT = "plan_attempt"
    GIVE_UP = "give_up"
    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"
    FAIL_FAST = "fail_fast"
    REAP = "reap"
    DECIDE = "decide"
    COMPLETE_ATTEMPT = "complete_attempt"
    FINISH = "finish"
    FINISH_AT_ONCE = "finish_at_once"
    CLEAN = "clean"
    END = "end"


OPERATION_TABLE: Mapping[Stage, Mapping[Event, frozenset[Stage]]] = {
    Stage.ABSENT: {Event.START: frozenset({Stage.PLANNING}), Event.START_PLANNED: frozenset({Stage.OPEN})},
    Stage.WAITING: {},
    Stage.PLANNING: {
        Event.PLAN: frozenset({Stage.OPEN}),
        Event.PLAN_ATTEMPT: frozenset({Stage.PLANNING}),
        Event.GIVE_UP: frozenset({Stage.COMPLETING}),
        Event.PAUSE: frozenset({Stage.PAUSED}),
        Event.CANCEL: frozenset({Stage.CANCELLING}),
    },
    Stage.OPEN: {
        Event.PAUSE: frozenset({Stage.PAUSED}),
        Event.CANCEL: frozenset({Stage.CANCELLING}),
        Event.FAIL_FAST: frozenset({Stage.CANCELLING}),
        Event.DECIDE: frozenset({Stage.COMPLETING}),
        Event.FINISH_AT_ONCE: frozenset({Stage.CLEANING}),
    },
    Stage.PAUSED: {
        Event.RESUME: frozenset({Stage.OPEN, Stage.PLANNING}),
        Event.CANCEL: frozenset({Stage.CANCELLING}),
        Event.DECIDE: frozenset({Stage.COMPLETING}),
        Event.FINISH_AT_ONCE: frozenset({Stage.CLEANING}),
    },
    Stage.CANCELLING: {
        Event.REAP: frozenset({Stage.CANCELLING}),
        Event.DECIDE: frozenset({Stage.COMPLETING}),
        Event.FINISH_AT_ONCE: frozenset({Stage.CLEANING}),
    },
    Stage.COMPLETING: {
        Event.COMPLETE_ATTEMPT: frozenset({Stage.COMPLETING}),
        Event.FINISH: frozenset({Stage.CLEANING}),
    },
    Stage.CLEANING: {Event.CLEAN: frozenset({Stage.CLEANING}), Event.END: frozenset({Stage.ABSENT})},
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
    REPORT_SUCCESS = "report_success"
    REPORT_FAILED = "report_failed"
    RETRY = "retry"
    RELEASE = "release"
    FAIL_LOST = "fail_lost"
    REAP = "reap"


JOB_TABLE: Mapping[JobStage, Mapping[JobEvent, JobStage]] = {
    JobStage.FREE: {JobEvent.CLAIM: JobStage.CLAIMED},
    JobStage.CLAIMED: {
        JobEvent.TAKE_OVER: JobStage.CLAIMED,
        JobEvent.REPORT_SUCCESS: JobStage.SUCCESS,
        JobEvent.REPORT_FAILED: JobStage.FAILED,
        JobEvent.RETRY: JobStage.WAITING,
        JobEvent.RELEASE: JobStage.WAITING,
        JobEvent.FAIL_LOST: JobStage.FAILED,
        JobEvent.REAP: JobStage.FREE,
    },
    JobStage.WAITING: {JobEvent.RECLAIM: JobStage.CLAIMED, JobEvent.REAP: JobStage.FREE},
    JobStage.SUCCESS: {},
    JobStage.FAILED: {},
}
"""Where each event leads a job. TAKE_OVER, FAIL_LOST and REAP of a claimed job need its incarnation to be gone."""


def _word(text: str) -> bytes:
    return str(text).encode()


# ---------------------------------------------------------------------- start


@dataclass(frozen=True, slots=True)
class Counters:
    """runOps and nextInstanceId as they were read, with their mod revisions (0: absent)."""

    run_ops: Mapping[str, int]
    run_ops_mod: int
    next_instance: int
    next_instance_mod: int


def start(
    keys: Keys,
    ref: OperationRef,
    seen: Counters,
    spec: Spec,
    arg: bytes,
    planned: tuple[Plan, Sequence[bytes]] | None = None,
) -> Txn:
    """Submit an operation (I39). With ``planned`` it brings its own plan and opens at once.

    The failure branch reads runOps, nextInstanceId, this instance's spec and history, and ``.current``: the request
    id in the spec or the history tells whether an earlier copy of this transaction won. Raises ValueError where the
    instance is not the next one.
    """
    if ref.instance != seen.next_instance:
        raise ValueError(f"{ref} cannot be started: the next instance is {seen.next_instance}")
    counts = dict(seen.run_ops)
    counts[ref.type] = counts.get(ref.type, 0) + 1
    run_ops, following = keys.run_ops(ref.table), keys.next_instance(ref.table, ref.type)
    current = keys.current(ref.table, ref.type, ref.object)
    compares = [unchanged(run_ops, seen.run_ops_mod), unchanged(following, seen.next_instance_mod)]
    ops: list[Operation] = [
        Put(run_ops, dumps(counts)),
        Put(following, _word(str(ref.instance + 1))),
        Put(keys.of(ref, "arg"), arg),
        Put(keys.of(ref, "spec"), spec.encode()),
        Put(keys.of(ref, "state"), _word(State.RUNNING)),
    ]
    if spec.one_at_a_time:
        compares.append(absent(current))
        ops.append(Put(current, _word(str(ref.instance))))
    if planned is None:
        ops.append(Put(keys.pending(ref), _word(Phase.PLANNING)))
    else:
        plan, chunks = planned
        ops += [Put(keys.chunk(ref, n), chunk) for n, chunk in enumerate(chunks)]
        ops += [Put(keys.of(ref, "plan"), plan.encode()), Put(keys.gate(ref), b"open")]
    return Txn(
        tuple(compares),
        tuple(ops),
        (Get(run_ops), Get(following), Get(keys.of(ref, "spec")), Get(keys.history(ref)), Get(current)),
        "start",
    )


# ----------------------------------------------------------------------- plan


def write_chunk(keys: Keys, ref: OperationRef, election: Compare, number: int, seen_mod: int, chunk: bytes) -> Txn:
    """One chunk of the plan, before the plan itself. ``seen_mod``: its mod revision as seen (0: absent)."""
    return Txn(
        (
            election,
            value_is(keys.of(ref, "state"), _word(State.RUNNING)),
            absent(keys.of(ref, "plan")),
            absent(keys.of(ref, "decision")),
            unchanged(keys.chunk(ref, number), seen_mod),
        ),
        (Put(keys.chunk(ref, number), chunk),),
        (Get(keys.chunk(ref, number)),),
        "chunk",
    )


def write_plan(
    keys: Keys,
    ref: OperationRef,
    election: Compare,
    plan: Plan,
    chunk_mods: Sequence[int],
    chunks: Sequence[bytes] = (),
) -> Txn:
    """The plan and the gate: claims are allowed from here on.

    ``chunk_mods``: the mod revision of each chunk as written. A small plan brings its ``chunks`` along (each then
    still at its ``chunk_mods``), which is the same as writing them just before. Chunks beyond these, left by a planning
    that died and had more of them, are deleted.
    """
    beyond = Delete(keys.chunk(ref, len(chunk_mods)), keys.chunks_range(ref)[1])
    return Txn(
        (
            election,
            value_is(keys.of(ref, "state"), _word(State.RUNNING)),
            absent(keys.of(ref, "plan")),
            absent(keys.of(ref, "decision")),
            *(unchanged(keys.chunk(ref, n), mod) for n, mod in enumerate(chunk_mods)),
        ),
        (
            *(Put(keys.chunk(ref, n), chunk) for n, chunk in enumerate(chunks)),
            Put(keys.of(ref, "plan"), plan.encode()),
            Put(keys.gate(ref), b"open"),
            Delete(keys.pending(ref)),
            Delete(keys.of(ref, "planning")),
            beyond,
        ),
        (Get(keys.of(ref, "plan")), Get(keys.of(ref, "state"))),
        "plan",
    )


def plan_attempt(keys: Keys, ref: OperationRef, election: Compare, seen_mod: int, attempts: Attempts) -> Txn:
    """Count an attempt to plan that ended in an unexpected error."""
    return Txn(
        (
            election,
            value_is(keys.of(ref, "state"), _word(State.RUNNING)),
            absent(keys.of(ref, "plan")),
            absent(keys.of(ref, "decision")),
            unchanged(keys.of(ref, "planning"), seen_mod),
        ),
        (Put(keys.of(ref, "planning"), attempts.encode()),),
        (Get(keys.of(ref, "planning")),),
        "plan_attempt",
    )


def give_up(keys: Keys, ref: OperationRef, election: Compare, state_mod: int, decision: Decision) -> Txn:
    """No plan can be made: the operation is decided as failed without one."""
    return Txn(
        (
            election,
            unchanged(keys.of(ref, "state"), state_mod),
            value_is(keys.of(ref, "state"), _word(State.RUNNING)),
            absent(keys.of(ref, "plan")),
            absent(keys.of(ref, "decision")),
        ),
        (Put(keys.of(ref, "decision"), decision.encode()), Put(keys.pending(ref), _word(Phase.COMPLETING))),
        (Get(keys.of(ref, "state")),),
        "give_up",
    )


# ---------------------------------------------------------------------- claims


@dataclass(frozen=True, slots=True)
class Want:
    """A job to claim: the claim as seen (``seen_mod`` 0: none) and the claim to write."""

    partition: int
    claim: Claim
    seen_mod: int = 0


def claim(
    keys: Keys, ref: OperationRef, gate_mod: int, incarnation: str, wants: Sequence[Want], dead: Iterable[str] = ()
) -> Txn:
    """Claim a block of jobs, each decided alone: free ones, waiting ones that are due, and (``dead``: their
    incarnations) those of executors that are gone. A granted claim's mod revision is its fence.

    Nested, not all or nothing: of two executors whose blocks overlap each gets a part. In each nested failure branch
    the claim is read: one that is mine already means that an earlier copy won.
    """
    success: list[Operation] = []
    for want in wants:
        key, state = keys.claim(ref, want.partition), keys.job(ref, want.partition, "state")
        guards = (unchanged(key, want.seen_mod),) if want.seen_mod else (absent(key), absent(state))
        success.append(Txn(guards, (Put(key, want.claim.encode()),), (Get(key), Get(state))))
    return Txn(
        (
            unchanged(keys.gate(ref), gate_mod),
            exists(keys.node(incarnation)),
            *(absent(keys.node(gone)) for gone in sorted(set(dead))),
        ),
        tuple(success),
        (Get(keys.gate(ref)), Get(keys.node(incarnation))),
        "take_over" if dead else "claim",
    )


@dataclass(frozen=True, slots=True)
class Guarded:
    """Writes under one claim's fence, to be committed alone or in a group (group commit)."""

    guard: Compare
    ops: tuple[Operation, ...]
    size: int
    label: str


def report(keys: Keys, ref: OperationRef, partition: int, fence: int, state: JobState, outcome: Outcome) -> Guarded:
    """A job's end (I36): under its fence, which stands for "running and not ended"; losing is ignored."""
    value = outcome.encode()
    key = keys.claim(ref, partition)
    return Guarded(
        unchanged(key, fence),
        (
            Put(keys.job(ref, partition, "state"), _word(state)),
            Put(keys.job(ref, partition, "outcome"), value),
            Delete(key),
        ),
        len(value),
        "report",
    )


def wait_again(keys: Keys, ref: OperationRef, partition: int, fence: int, waiting: Claim) -> Guarded:
    """Retry and release: the claim is set to waiting; the job is stopped first."""
    key = keys.claim(ref, partition)
    value = waiting.encode()
    return Guarded(unchanged(key, fence), (Put(key, value),), len(value), "retry")


def checkpoint(keys: Keys, ref: OperationRef, partition: int, fence: int, value: bytes) -> Guarded:
    """A resumable job's progress, under its fence: a zombie's checkpoint is refused."""
    return Guarded(
        unchanged(keys.claim(ref, partition), fence),
        (Put(keys.job(ref, partition, "progress"), value),),
        len(value),
        "progress",
    )


def group(writes: Sequence[Guarded]) -> Txn:
    """All or nothing: the usual case, in which every fence still holds."""
    return Txn(
        tuple(w.guard for w in writes), tuple(op for w in writes for op in w.ops), (), writes[0].label if writes else ""
    )


def one_by_one(writes: Sequence[Guarded]) -> Txn:
    """Each decided alone, after the group was refused."""
    return Txn((), tuple(Txn((w.guard,), w.ops, ()) for w in writes), (), writes[0].label if writes else "")


def fail_lost(
    keys: Keys,
    ref: OperationRef,
    gate_mod: int,
    incarnation: str,
    dead: str,
    lost: Sequence[tuple[int, int, Outcome]],
) -> Txn:
    """Jobs whose executor is gone and whose limit is reached: failed, with an outcome that tells of the crash.
    ``lost``: (partition, the claim's mod revision, outcome), all of incarnation ``dead``.
    """
    return Txn(
        (
            unchanged(keys.gate(ref), gate_mod),
            exists(keys.node(incarnation)),
            absent(keys.node(dead)),
        ),
        tuple(
            Txn(
                (unchanged(keys.claim(ref, p), mod),),
                (
                    Put(keys.job(ref, p, "state"), _word(JobState.FAILED)),
                    Put(keys.job(ref, p, "outcome"), outcome.encode()),
                    Delete(keys.claim(ref, p)),
                ),
            )
            for p, mod, outcome in lost
        ),
        (Get(keys.gate(ref)),),
        "fail_lost",
    )


def reap(
    keys: Keys, ref: OperationRef, election: Compare, state_mod: int, partition: int, claim_mod: int, holder: str
) -> Txn:
    """While cancelling: delete a claim that waits (``holder`` "") or whose incarnation is gone."""
    gone = (absent(keys.node(holder)),) if holder else ()
    return Txn(
        (
            election,
            unchanged(keys.of(ref, "state"), state_mod),
            value_is(keys.of(ref, "state"), _word(State.CANCELLING)),
            unchanged(keys.claim(ref, partition), claim_mod),
            *gone,
        ),
        (Delete(keys.claim(ref, partition)),),
        (),
        "reap",
    )


# -------------------------------------------------------------------- commands


def cancel(keys: Keys, ref: OperationRef, state_mod: int, why: Cancel, election: Compare | None = None) -> Txn:
    """Two-phase: no more claims from here on; holders stop, then the coordinator finishes. With ``election`` it is
    the coordinator's own (fail fast).
    """
    return Txn(
        (
            *((election, exists(keys.gate(ref))) if election else ()),
            unchanged(keys.of(ref, "state"), state_mod),
            exists(keys.of(ref, "state")),
            absent(keys.of(ref, "decision")),
            absent(keys.of(ref, "cancel")),
            absent(keys.history(ref)),
        ),
        (
            Put(keys.of(ref, "state"), _word(State.CANCELLING)),
            Put(keys.of(ref, "cancel"), why.encode()),
            Delete(keys.gate(ref)),
            Put(keys.pending(ref), _word(Phase.CANCELLING)),
        ),
        _who_won(keys, ref),
        "fail_fast" if election else "cancel",
    )


def pause(keys: Keys, ref: OperationRef, state_mod: int) -> Txn:
    """No more claims until it is resumed; running jobs finish."""
    return Txn(
        (
            unchanged(keys.of(ref, "state"), state_mod),
            value_is(keys.of(ref, "state"), _word(State.RUNNING)),
            absent(keys.of(ref, "decision")),
        ),
        (
            Put(keys.of(ref, "state"), _word(State.PAUSED)),
            Delete(keys.gate(ref)),
            Put(keys.pending(ref), _word(Phase.PAUSED)),
        ),
        _who_won(keys, ref),
        "pause",
    )


def resume(keys: Keys, ref: OperationRef, state_mod: int, planned: bool) -> Txn:
    """Back to where it was paused: open, or planning when it had no plan yet (both are compared)."""
    plan = keys.of(ref, "plan")
    after: tuple[Operation, ...]
    if planned:
        after = (Put(keys.gate(ref), b"open"), Delete(keys.pending(ref)))
    else:
        after = (Put(keys.pending(ref), _word(Phase.PLANNING)),)
    return Txn(
        (
            unchanged(keys.of(ref, "state"), state_mod),
            value_is(keys.of(ref, "state"), _word(State.PAUSED)),
            exists(plan) if planned else absent(plan),
            absent(keys.of(ref, "decision")),
        ),
        (Put(keys.of(ref, "state"), _word(State.RUNNING)), *after),
        _who_won(keys, ref),
        "resume",
    )


def _who_won(keys: Keys, ref: OperationRef) -> tuple[Operation, ...]:
    return (Get(keys.of(ref, "state")), Get(keys.of(ref, "decision")), Get(keys.of(ref, "cancel")))


# ---------------------------------------------------------------------- finish


def decide(keys: Keys, ref: OperationRef, election: Compare, state_mod: int, decision: Decision) -> Txn:
    """Fix the verdict before the completion code runs; cancel and pause are refused from then on."""
    return Txn(
        (
            election,
            unchanged(keys.of(ref, "state"), state_mod),
            *_undecided(keys, ref, decision.verdict),
            absent(keys.history(ref)),
        ),
        (
            Put(keys.of(ref, "decision"), decision.encode()),
            Delete(keys.gate(ref)),
            Put(keys.pending(ref), _word(Phase.COMPLETING)),
        ),
        (Get(keys.of(ref, "state")), Get(keys.of(ref, "decision"))),
        "decide",
    )


def complete_attempt(keys: Keys, ref: OperationRef, election: Compare, seen_mod: int, decision: Decision) -> Txn:
    """Count a completion attempt that ended in an unexpected error."""
    return Txn(
        (election, unchanged(keys.of(ref, "decision"), seen_mod), absent(keys.history(ref))),
        (Put(keys.of(ref, "decision"), decision.encode()),),
        (),
        "complete_attempt",
    )


def finish(
    keys: Keys,
    ref: OperationRef,
    election: Compare,
    state_mod: int,
    decision_mod: int,
    run_ops: Mapping[str, int],
    run_ops_mod: int,
    history: History,
    one_at_a_time: bool,
) -> Txn:
    """The terminal state and the history record, in one transaction (C30).

    ``decision_mod`` 0: there is no decision, because the behavior has no completion code; deciding and finishing are
    then one step, under the guards of both (a join of two adjacent transactions, so no new interleaving).
    """
    counts = {t: n for t, n in run_ops.items() if n > 0}
    counts[ref.type] = counts.get(ref.type, 0) - 1
    if counts[ref.type] <= 0:
        del counts[ref.type]
    decision = keys.of(ref, "decision")
    guards: tuple[Compare, ...]
    if decision_mod:
        guards = (unchanged(decision, decision_mod),)
    else:
        guards = _undecided(keys, ref, history.state)
    return Txn(
        (
            election,
            unchanged(keys.of(ref, "state"), state_mod),
            *guards,
            absent(keys.history(ref)),
            unchanged(keys.run_ops(ref.table), run_ops_mod),
        ),
        (
            Put(keys.of(ref, "state"), _word(history.state)),
            Put(keys.history(ref), history.encode()),
            Put(keys.run_ops(ref.table), dumps(counts)),
            *(() if decision_mod else (Delete(keys.gate(ref)),)),
            *((Delete(keys.current(ref.table, ref.type, ref.object)),) if one_at_a_time else ()),
            Put(keys.pending(ref), _word(Phase.CLEANING)),
        ),
        (Get(keys.run_ops(ref.table)), Get(keys.of(ref, "state"))),
        "finish",
    )


def _undecided(keys: Keys, ref: OperationRef, verdict: State) -> tuple[Compare, ...]:
    """An operation may be decided: no job is claimed, and it has either been cancelled or got a plan."""
    reason = "cancel" if verdict is State.CANCELLED else "plan"
    return absent(keys.of(ref, "decision")), exists(keys.of(ref, reason)), none_within(*keys.claims_range(ref))


OWN_KEYS = ("arg", "spec", "cancel", "plan", "planning", "decision")
"""An operation's own keys that cleanup deletes before the last step."""


def clean(keys: Keys, ref: OperationRef, election: Compare, state_mod: int, first: int) -> Txn:
    """One page of an ended operation's job keys: ordinals from ``first`` on."""
    return Txn(
        (election, unchanged(keys.of(ref, "state"), state_mod), _over(keys, ref)),
        (_job_page(keys, ref, first),),
        (),
        "clean",
    )


def end(keys: Keys, ref: OperationRef, election: Compare, state_mod: int, first: int) -> Txn:
    """The last page: the ordinals from ``first`` on, the operation's own keys, ``.state`` and pending together."""
    return Txn(
        (election, unchanged(keys.of(ref, "state"), state_mod), _over(keys, ref)),
        (
            _job_page(keys, ref, first),
            Delete(*keys.claims_range(ref)),
            Delete(*keys.chunks_range(ref)),
            *(Delete(keys.of(ref, name)) for name in OWN_KEYS),
            Delete(keys.of(ref, "state")),
            Delete(keys.pending(ref)),
        ),
        (),
        "end",
    )


def _over(keys: Keys, ref: OperationRef) -> Compare:
    return value_is(keys.pending(ref), _word(Phase.CLEANING))


def _job_page(keys: Keys, ref: OperationRef, first: int) -> Delete:
    root = keys.root(ref)
    after = first + ORDINALS_PER_CLEAN
    return Delete(f"{root}.{first:06d}", f"{root}.{after:06d}" if after < 1_000_000 else f"{root}.:")


# -------------------------------------------------------------------- election


def elect(keys: Keys, table: str, type_name: str, incarnation: str, seen_mod: int, holder: str) -> Txn:
    """Become the coordinator of a type on a table: the key is absent (``seen_mod`` 0), or unchanged with its
    incarnation gone. Its mod revision is the fence in every coordinator write.
    """
    key = keys.coordinator(table, type_name)
    gone = (absent(keys.node(holder)),) if seen_mod else ()
    return Txn(
        (unchanged(key, seen_mod), *gone, exists(keys.node(incarnation))),
        (Put(key, _word(incarnation)),),
        (Get(key), Get(keys.node(incarnation))),
        "elect",
    )


def resign(keys: Keys, table: str, type_name: str, fence: int) -> Txn:
    """Give up the election, if it is still held."""
    key = keys.coordinator(table, type_name)
    return Txn((unchanged(key, fence),), (Delete(key),), (), "resign")


def election_guard(keys: Keys, table: str, type_name: str, fence: int) -> Compare:
    """"My election": the guard of every coordinator write (invariant 8)."""
    return unchanged(keys.coordinator(table, type_name), fence)


# --------------------------------------------------------------------- history


def forget(keys: Keys, old: Sequence[tuple[OperationRef, int]]) -> Txn:
    """Delete old history records, each as it was read: (operation, its record's mod revision). Each alone."""
    return Txn(
        (),
        tuple(
            Txn(
                (unchanged(keys.history(ref), mod),),
                (Delete(keys.history(ref)), Delete(*_chunks_of_history(keys, ref))),
            )
            for ref, mod in old
        ),
        (),
        "forget",
    )


def _chunks_of_history(keys: Keys, ref: OperationRef) -> tuple[str, str]:
    key = keys.history(ref)
    return f"{key}.", f"{key}/"
