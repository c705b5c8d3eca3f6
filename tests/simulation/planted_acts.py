"""Bugs in what people ask of a cluster (drain, pause now, rerun), in nodes that cannot run a type, and errors that the
log alone would tell.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from distop.daemon import node_record
from distop.daemon.capability import Capability
from distop.daemon.coordinator.orphaned_jobs import Reaper
from distop.daemon.executor.executor_role import Executor
from distop.daemon.executor.job_runs import Jobs
from distop.daemon.local_jobs import LocalJobs
from distop.daemon.upkeep import history_pruning
from distop.protocol import job_transitions
from distop.protocol.executor_nodes import NodeState
from distop.protocol.jobs import JobState
from distop.protocol.records import Phase
from distop.protocol.txn import Delete
from distop.services.open_operation import OpenOperation
from distop.services.submission import insertion, rerun
from tests.simulation.planted import BUGS
from tests.simulation.planting import Mistake, Patch, Planted, bug, substitute, wrap
from tests.simulator import run, scenes

# ---------------------------------------------------------------------- starts


@bug("invariant 14", "surprise", first=10)
def start_what_a_request_began_already(patch: Patch) -> None:
    """Nobody looks for what a former life of the client began, or a former try of it whose outcome was unknown."""

    async def find_earlier(etcd: Any, keys: Any, wanted: Any) -> list[None]:
        return [None for _ in wanted]

    substitute(patch, insertion, "find_earlier", find_earlier)


# ---------------------------------------------------------------------- pauses


# Seldom: a resumable job has to be paused at once after it has saved something.
@bug("checkpoint lost", first=151)
def a_pause_that_loses_the_checkpoint(patch: Patch) -> None:
    """Whoever lets go of a job that was told to stop removes its checkpoint; a job that broke keeps it."""
    former = Jobs._write

    def write(self: Jobs, op: Any, held: Any, event: Any) -> Any:
        found = former(self, op, held, event)
        if found is None or self._ctx.cluster.pending.get(op.ref) is not Phase.HALTED:
            return found
        return replace(found, ops=(*found.ops, Delete(self._ctx.keys.job(op.ref, event.partition, "progress"))))

    substitute(patch, Jobs, "_write", write)


@bug("not stopped", shape=scenes.paused_for_long, slow=True)
def a_pause_now_that_does_not_release(patch: Patch) -> None:
    """It is taken for a pause that lets running jobs end."""
    former = Executor._closed

    def closed(self: Executor, op: Any) -> None:
        if self._ctx.cluster.pending.get(op.ref) is Phase.HALTED and op.held:
            self._ctx.worker.pause(str(op.ref))
        else:
            former(self, op)

    substitute(patch, Executor, "_closed", closed)


# Seldom: the same.
@bug("checkpoint lost", first=151)
def a_pause_now_that_cleans_up(patch: Patch) -> None:
    """What a checkpoint speaks of is removed with what the job was at."""
    former = Executor._closed

    def closed(self: Executor, op: Any) -> None:
        if self._ctx.cluster.pending.get(op.ref) is Phase.HALTED:
            self._ctx.worker.cancel(str(op.ref))
        former(self, op)

    substitute(patch, Executor, "_closed", closed)


# ------------------------------------------------------------------------ ends


@bug("liveness: still at it", shape=scenes.few_jobs, slow=True)
def a_job_that_is_done_begins_anew(patch: Patch) -> None:
    """It is let go of, without its checkpoint, and saves the next ones: something gets on for ever."""
    former = Jobs._write

    def write(self: Jobs, op: Any, held: Any, event: Any) -> Any:
        if event.kind != "success":
            return former(self, op, held, event)
        found = former(self, op, held, replace(event, kind="cancelled"))
        return replace(found, ops=(*found.ops, Delete(self._ctx.keys.job(op.ref, event.partition, "progress"))))

    substitute(patch, Jobs, "_write", write)
    patch.setattr(run, "LAST_WORD", 3)  # an hour of it would take long, and tell no more


# -------------------------------------------------------------------- cleanups


@bug("left behind")
def start_over_beside_what_is_left(patch: Patch) -> None:
    """Nothing is removed before a job that was tried before starts over."""
    wrap(patch, Jobs, "_asked", lambda asked, _: (replace(asked[0], cleanup_first=False), asked[1]))


@bug("left behind", first=5)
def clean_up_after_one_cancelled_job_of_many(patch: Patch) -> None:
    former = Reaper._clean_up

    async def clean_up(self: Reaper, op: Any, rows: Any, claims: Any) -> None:
        await former(self, op, rows, claims[:1])

    substitute(patch, Reaper, "_clean_up", clean_up)


@bug("left behind")
def fail_for_good_without_cleaning_up(patch: Patch) -> None:
    def fail(self: Jobs, op: Any, ends: Any, *, lost: bool = False) -> None:
        for held, event in ends:
            outcome = self._outcome(held, replace(event, result=None))
            failed, keys = JobState.FAILED, self._ctx.keys
            write = job_transitions.report(keys, op.ref, event.partition, held.fence, failed, outcome, held.claim)
            self._ctx.reporter.submit([(write, self._answer(op, event.partition, ended=True, event=event, lost=lost))])

    substitute(patch, Jobs, "_fail_after_cleanup", fail)


# ---------------------------------------------------------------------- drains


@bug("blamed", first=42)
def a_drain_that_fails_jobs(patch: Patch) -> None:
    """A job that was stopped for a drain counts as one that broke."""
    former = Jobs._write

    def write(self: Jobs, op: Any, held: Any, event: Any) -> Any:
        blamed = self._ctx.draining and event.kind == "cancelled"
        return former(self, op, held, replace(event, kind="error", error="it was stopped") if blamed else event)

    substitute(patch, Jobs, "_write", write)


@bug("checkpoint lost", first=48)
def a_drain_that_cleans_up(patch: Patch) -> None:
    former = Executor.cluster_changed

    def changed(self: Executor, *, hint: bool, refs: Any = None) -> None:
        if self._ctx.draining:
            for op in self._operations.values():
                self._ctx.worker.cancel(str(op.ref))
        former(self, hint=hint, refs=refs)

    substitute(patch, Executor, "cluster_changed", changed)


@bug("not drained", shape=scenes.drained_for_long, slow=True)
def a_drain_that_waits_for_running_jobs(patch: Patch) -> None:
    former = Executor.cluster_changed

    def changed(self: Executor, *, hint: bool, refs: Any = None) -> None:
        held = {ref: op for ref, op in self._operations.items() if op.held} if self._ctx.draining else {}
        for ref in held:
            del self._operations[ref]
        former(self, hint=hint, refs=refs)
        self._operations.update(held)

    substitute(patch, Executor, "cluster_changed", changed)


@bug("drained and busy", first=42)
def drained_before_it_is_empty(patch: Patch) -> None:
    """An executor says that it is drained as soon as it is asked to be."""

    def state(asked: bool, busy: bool) -> NodeState:
        return NodeState.DRAINED if asked else NodeState.ACTIVE

    substitute(patch, node_record, "node_state", state)


# ---------------------------------------------------------------------- reruns


# Seldom: some jobs have to fail and others not to end, and the failed ones to be run again.
@bug("rerun of others", first=148)
def a_rerun_over_the_wrong_partitions(patch: Patch) -> None:
    """It takes those without an end as well, which nobody asked for."""
    wrap(patch, rerun, "_names", lambda _, given: (*given.found.failed, *given.found.unfinished))


# Seldom: several jobs have to fail, and to be run again.
@bug("rerun of others", first=16)
def a_rerun_that_leaves_some_out(patch: Patch) -> None:
    wrap(patch, rerun, "_names", lambda names, _: names[:1])


# ----------------------------------------------------------------- history


@bug("forgotten", "invariant 14", first=26)
def history_pruned_within_its_hour(patch: Patch) -> None:
    """A watermark counts as old as soon as it is put."""
    newest = lambda known: replace(known[-1], lease=0) if known else None  # noqa: E731
    substitute(patch, history_pruning, "newest_old", newest)


@bug("forgotten", first=26)
def a_watermark_without_the_lease_of_its_hour(patch: Patch) -> None:
    wrap(patch, history_pruning, "put_watermark", lambda txn, _: replace(txn, success=txn.success[:1]))


# --------------------------------------------------------- nodes that cannot


@bug("job not written down")
def start_without_writing_down(patch: Patch) -> None:
    """A node whose disk is full runs its jobs all the same."""
    former = LocalJobs.begin

    async def begin(self: LocalJobs, op: Any, arg: Any, table: Any, items: Any) -> None:
        with contextlib.suppress(OSError):
            await former(self, op, arg, table, items)

    substitute(patch, LocalJobs, "begin", begin)


@bug("blamed", first=55)
def blame_what_one_node_cannot_run(patch: Patch) -> None:
    substitute(patch, Capability, "cannot", lambda self, type_name, why, tables: False)


@bug("blamed", first=54)
def blame_what_one_node_cannot_run_for_the_moment(patch: Patch) -> None:
    substitute(patch, Capability, "cannot_now", lambda self, type_name, why, where, given_back, tables: False)


@bug("liveness", shape=scenes.some_cannot, slow=True)
def offer_for_ever_what_cannot_be_run(patch: Patch) -> None:
    """The work is left to others, and nobody is told."""
    substitute(patch, Capability, "cannot", lambda self, type_name, why, tables: True)


# ------------------------------------------------------ errors told by the log


@bug("unexpected error")
def an_error_that_is_caught_and_logged(patch: Patch) -> None:
    """The operation is tried again a little later: nothing comes of it but a line in the log."""
    former = OpenOperation.take
    broken: set[int] = set()

    def take(self: OpenOperation, size: int) -> Any:
        if id(self) not in broken:
            broken.add(id(self))
            raise Mistake(size)
        return former(self, size)

    substitute(patch, OpenOperation, "take", take)


@bug("trouble")
def an_error_that_nobody_asks_for(patch: Patch) -> None:
    """The task that tells others of released jobs ends by it, and nobody waits for that task."""

    async def tell(self: Executor) -> None:
        raise Mistake("no such thing")

    substitute(patch, Executor, "_tell", tell)


__all__ = ["BUGS", "Planted"]
