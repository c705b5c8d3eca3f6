"""Planted bugs in claims, elections, completion, sessions and starts, each with the kinds of breaches that prove it.

A bug is a small change of production code: a wrapped or replaced function.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from distop.clock import time
from distop.daemon.coordinator.coordinator_role import Coordinator
from distop.daemon.coordinator.finish_batches import Finishes
from distop.daemon.saved_checkpoints import Checkpoints
from distop.decide import job_claims, next_steps
from distop.decide.view import ClusterView
from distop.protocol import batch_claims, job_transitions
from distop.protocol import operation_finish as f
from distop.protocol import operation_transitions as t
from distop.protocol.json_codec import dumps
from distop.protocol.keys import Keys
from distop.protocol.state_tables import Stage
from distop.protocol.txn import Compare, Delete, Relation, Target, Txn, absent
from distop.services.submission import insertion, submit
from distop.store.session import Session
from distop.worker.daemon_side.requests import CompleteRequest
from tests.simulation.bug_planting import Patch, bug, give, substitute, wrap
from tests.simulation.planted_watches import BUGS
from tests.simulator import scenes

ALWAYS = absent("no such key")


CLAIMS = (
    (job_transitions, "claim"),
    *((batch_claims, name) for name in ("claim_runs", "claim_together", "claim_apart")),
)
"""Functions that build claims of jobs with an open gate."""


def without(txn: Txn, drop: Callable[[Compare], bool]) -> Txn:
    """The transaction without some compares, also in nested transactions."""

    def ops(branch: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(without(op, drop) if isinstance(op, Txn) else op for op in branch)

    kept = tuple(compare for compare in txn.compares if not drop(compare))
    return replace(txn, compares=kept, success=ops(txn.success), failure=ops(txn.failure))


def node_absent(compare: Compare) -> bool:
    return "Node." in compare.key and compare.relation is Relation.EQUAL


def node_exists(compare: Compare) -> bool:
    return "Node." in compare.key and compare.relation is Relation.GREATER


# ---------------------------------------------------------------------- fences


@bug("invariant 1", "invariant 2", first=26)
def report_without_its_fence(patch: Patch) -> None:
    wrap(patch, job_transitions, "report", lambda guarded, _: replace(guarded, guard=ALWAYS))


@bug("invariant 3", "not the holder", first=42)
def drop_the_fence_compare_of_a_release(patch: Patch) -> None:
    """Only the existence of the claim is compared, not its holder."""

    def exists(guarded: job_transitions.Guarded, _: Any) -> job_transitions.Guarded:
        return replace(guarded, guard=Compare(guarded.guard.key, Target.CREATE, Relation.GREATER, 0))

    wrap(patch, job_transitions, "wait_again", exists)


@bug("invariant 3", "not the holder", first=292)
def drop_the_fence_compare_of_a_checkpoint(patch: Patch) -> None:
    wrap(patch, job_transitions, "checkpoint", lambda guarded, _: replace(guarded, guard=ALWAYS, also=()))


@bug("checkpoint lost", focus=("requests-late",), shape=scenes.many_steps, first=3, drawn=3064)
def a_checkpoint_that_does_not_compare_the_one_before(patch: Patch) -> None:
    """A late copy of an early checkpoint undoes later ones under the same fence."""
    wrap(patch, job_transitions, "checkpoint", lambda guarded, _: replace(guarded, also=()))


@bug("invariant 4", "invariant 9", first=47)
def drop_the_gate_compare(patch: Patch) -> None:
    for module, name in CLAIMS:
        wrap(patch, module, name, lambda txn, _: without(txn, lambda compare: "Open." in compare.key))


# Rare: a session has to end while one of its claims is in flight.
@bug("invariant 4", first=145)
def drop_the_node_key_compare_of_a_claim(patch: Patch) -> None:
    for module, name in CLAIMS:
        wrap(patch, module, name, lambda txn, _: without(txn, node_exists))


def give_claimant(patch: Patch, **values: Any) -> None:
    """Have claimable jobs looked for by a claimant with these values."""
    former = job_claims.claimable

    def claimable(
        count: int, ended: Any, claims: Any, by: Any, now: float, unchanged_for: Any, *, resumable: bool = False
    ) -> Any:
        return former(count, ended, claims, replace(by, **values), now, unchanged_for, resumable=resumable)

    substitute(patch, job_claims, "claimable", claimable)


@bug("invariant 2")
def take_over_a_live_incarnation(patch: Patch) -> None:
    """A holder that is not seen for a moment counts as dead, without a compare."""
    give_claimant(patch, live=())
    wrap(patch, job_transitions, "claim", lambda txn, _: without(txn, node_absent))


# Rare: a coordinator's write has to arrive after the election of another one.
@bug(
    "invariant 8",
    "not the coordinator",
    focus=("requests-late", "freeze", "crash", "late-renewal"),
    first=66,
    drawn=1424,
)
def drop_the_election_compare(patch: Patch) -> None:
    wrap(patch, t, "election_guard", lambda *_: ALWAYS)


@bug("invariant 8", first=3)
def elect_while_another_lives(patch: Patch) -> None:
    wrap(patch, t, "elect", lambda txn, _: without(txn, node_absent))
    wrap(patch, ClusterView, "live", lambda *_: False)


@bug("two attempts at once", "stopped too late")
def reap_the_claims_of_live_holders(patch: Patch) -> None:
    give(patch, next_steps, "next_step", live=())
    wrap(patch, job_transitions, "revoke", lambda txn, _: without(txn, node_absent))


# ------------------------------------------------------------------ completion


@bug("completion before decision")
def run_completion_before_the_decision_is_written(patch: Patch) -> None:
    former = Coordinator._perform

    async def perform(self: Coordinator, op: Any, step: Any, *, refused: bool = False) -> bool:
        if isinstance(step, next_steps.Commit) and step.txn.label == "decide":
            arg = await self._ctx.argument(op.ref)

            async def none(start: int) -> tuple[list[Any], None]:
                return [], None

            counts = "success", 0, 0, 0
            await self._ctx.worker.complete(CompleteRequest(str(op.ref), op.ref.type, arg, None, *counts, none))
        return await former(self, op, step, refused=refused)

    substitute(patch, Coordinator, "_perform", perform)


@bug("completion before decision", first=16)
def make_a_report_before_the_last_job_has_ended(patch: Patch) -> None:
    former = next_steps.next_step

    def early(keys: Any, op: Any, live: Any, election: Any, now: float, poll: float, *actors: Any) -> Any:
        if op.stage is Stage.OPEN and op.spec.rules.reports_only and op.plan.count - op.ended == 1:
            op = replace(op, success=op.success + 1)
        return former(keys, op, live, election, now, poll, *actors)

    substitute(patch, next_steps, "next_step", early)


# Rare: during a cancel, the end of a claim has to be seen before the end of its job.
@bug("invariant 5", focus=("slow-watches",), first=78, drawn=11849)
def complete_on_a_stale_count(patch: Patch) -> None:
    async def counted(self: Coordinator, op: Any) -> bool:
        return True

    substitute(patch, Coordinator, "_counted", counted)


# Rare: two operations of one table have to finish at the same time.
@bug("invariant 7", first=64)
def finish_without_comparing_run_ops(patch: Patch) -> None:
    wrap(patch, f, "finish", lambda txn, _: without(txn, lambda compare: compare.key.endswith(".runOps")))


@bug("invariant 13", focus=("requests-late",), shape=scenes.planned_in_chunks, first=38, drawn=1955)
def plan_without_comparing_its_chunks(patch: Patch) -> None:
    """A late chunk of an interrupted planning gets into the later plan. Either of the two compares prevents it."""
    for name in ("write_chunk", "write_plan"):
        wrap(patch, t, name, lambda txn, _: without(txn, lambda compare: ".plan." in compare.key))


@bug("invariant 10", first=10)
def count_no_failure_at_a_takeover(patch: Patch) -> None:
    def uncounted(found: Any, given: Any) -> Any:
        claim, mod, _ = found
        return (replace(claim, failures=given.seen.value.failures), mod, False) if given.seen is not None else found

    wrap(patch, job_claims, "claim_for", uncounted)


# ------------------------------------------------------------ sessions, clients


@bug("stopped too late", "two attempts at once", focus=("late-renewal",), shape=scenes.long_jobs, first=10, drawn=24873)
def lease_deadline_from_the_time_of_receipt(patch: Patch) -> None:
    former = Session._move_deadline
    substitute(patch, Session, "_move_deadline", lambda self, sent: former(self, time.boottime()))


@bug("invariant 14", first=10)
def retry_an_unknown_outcome_with_a_new_transaction(patch: Patch) -> None:
    """A refused start is repeated without a check whether its first copy was applied."""

    async def nothing(etcd: Any, keys: Keys, wanted: Any) -> list[None]:
        return [None] * len(wanted)

    wrap(patch, submit, "won", lambda *_: False)
    substitute(patch, insertion, "find_earlier", nothing)


@bug("invariant 7", first=10)
def count_one_for_a_group_of_starts(patch: Patch) -> None:
    def one(txn: Txn, given: Any) -> Txn:
        key = given.keys.run_ops(given.new[0].ref.table)
        counts = {**given.seen.run_ops}
        counts[given.new[0].ref.type] = counts.get(given.new[0].ref.type, 0) + 1
        ops = (replace(op, value=dumps(counts)) if getattr(op, "key", "") == key else op for op in txn.success)
        return replace(txn, success=tuple(ops))

    wrap(patch, t, "starts", one)


# One of several simultaneous finishes has to be cancelled at that moment, so they are delayed before they are sent.
@bug("invariant 5", "invariant 12", shape=scenes.many_at_once, first=13, drawn=203)
def finish_a_group_with_the_guards_of_its_first_operation(patch: Patch) -> None:
    former = Finishes._run_ops

    async def late(self: Finishes, ref: Any) -> Any:
        await asyncio.sleep(0.05)
        return await former(self, ref)

    substitute(patch, Finishes, "_run_ops", late)

    def of_the_first(txn: Txn, given: Any) -> Txn:
        others = {given.keys.of(one.ref, name) for one in given.finals[1:] for name in ("state", "decision", "cancel")}
        others |= {given.keys.gate(one.ref) for one in given.finals[1:]}
        return without(txn, lambda compare: compare.key in others)

    wrap(patch, f, "finish", of_the_first)


@bug("checkpoint lost", first=8)
def a_release_that_loses_the_checkpoint(patch: Patch) -> None:
    def forget(guarded: job_transitions.Guarded, given: Any) -> job_transitions.Guarded:
        return replace(guarded, ops=(*guarded.ops, Delete(given.keys.job(given.ref, given.partition, "progress"))))

    wrap(patch, job_transitions, "wait_again", forget)


@bug("checkpoint lost", first=8)
def resume_without_reading_the_checkpoint(patch: Patch) -> None:
    async def none(self: Checkpoints, op: Any, block: Any) -> dict[int, Any]:
        return {}

    substitute(patch, Checkpoints, "load", none)


@bug("liveness", first=14)
def wait_as_long_as_a_wrong_clock_says(patch: Patch) -> None:
    give_claimant(patch, patience=float("inf"))


@bug("invariant 5")
def clean_up_before_the_history_is_written(patch: Patch) -> None:
    """The finish leaves the history record to a later write, which a crash may prevent."""

    def later(txn: Txn, given: Any) -> Txn:
        written = {given.keys.history(one.ref) for one in given.finals}
        return replace(txn, success=tuple(op for op in txn.success if getattr(op, "key", "") not in written))

    wrap(patch, f, "finish", later)


__all__ = ["BUGS"]
