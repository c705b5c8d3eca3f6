"""Planted bugs in commands (drain, pause now, rerun), cleanups, history, nodes that cannot run a type, and errors."""

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
from tests.simulation.bug_planting import Mistake, Patch, Planted, bug, substitute, wrap
from tests.simulation.planted import BUGS
from tests.simulator import run, scenes

# ---------------------------------------------------------------------- starts


@bug("invariant 14", "unexpected client error", first=10)
def start_again_what_the_request_started(patch: Patch) -> None:
    """An operation is not found that the client started before its restart, or by a start with an unknown outcome."""

    async def find_earlier(etcd: Any, keys: Any, wanted: Any) -> list[None]:
        return [None for _ in wanted]

    substitute(patch, insertion, "find_earlier", find_earlier)


# ---------------------------------------------------------------------- pauses


# Rare: a resumable job has to be paused now soon after it has saved a checkpoint.
@bug("checkpoint lost", first=151)
def a_pause_that_loses_the_checkpoint(patch: Patch) -> None:
    """The release of a stopped job removes its checkpoint; a failed job keeps it."""
    former = Jobs._write

    def write(self: Jobs, op: Any, held: Any, event: Any) -> Any:
        found = former(self, op, held, event)
        if found is None or self._ctx.cluster.pending.get(op.ref) is not Phase.HALTED:
            return found
        return replace(found, ops=(*found.ops, Delete(self._ctx.keys.job(op.ref, event.partition, "progress"))))

    substitute(patch, Jobs, "_write", write)


@bug("not stopped", shape=scenes.paused_for_long, drawn=223, slow=True)
def a_pause_now_that_does_not_release(patch: Patch) -> None:
    """It works like a pause that lets running jobs end."""
    former = Executor._closed

    def closed(self: Executor, op: Any) -> None:
        if self._ctx.cluster.pending.get(op.ref) is Phase.HALTED and op.held:
            self._ctx.worker.pause(str(op.ref))
        else:
            former(self, op)

    substitute(patch, Executor, "_closed", closed)


# Rare, for the same reason.
@bug("checkpoint lost", first=151)
def a_pause_now_that_cleans_up(patch: Patch) -> None:
    """The output that a checkpoint describes is removed with the unfinished output."""
    former = Executor._closed

    def closed(self: Executor, op: Any) -> None:
        if self._ctx.cluster.pending.get(op.ref) is Phase.HALTED:
            self._ctx.worker.cancel(str(op.ref))
        former(self, op)

    substitute(patch, Executor, "_closed", closed)


# ------------------------------------------------------------------------ ends


@bug("liveness: endless", shape=scenes.few_jobs, drawn=164, slow=True)
def a_finished_job_starts_again(patch: Patch) -> None:
    """It is released without its checkpoint, and saves new ones: the run makes progress for ever."""
    former = Jobs._write

    def write(self: Jobs, op: Any, held: Any, event: Any) -> Any:
        if event.kind != "success":
            return former(self, op, held, event)
        found = former(self, op, held, replace(event, kind="cancelled"))
        return replace(found, ops=(*found.ops, Delete(self._ctx.keys.job(op.ref, event.partition, "progress"))))

    substitute(patch, Jobs, "_write", write)
    patch.setattr(run, "MAX_LIVENESS", 3)  # an hour of virtual time would show nothing more


# -------------------------------------------------------------------- cleanups


@bug("output not cleaned up")
def start_over_without_a_cleanup(patch: Patch) -> None:
    """The output of a former attempt is not removed before a job starts over."""
    wrap(patch, Jobs, "_asked", lambda asked, _: (replace(asked[0], cleanup_first=False), asked[1]))


@bug("output not cleaned up", first=5)
def clean_up_after_one_cancelled_job_of_many(patch: Patch) -> None:
    former = Reaper._clean_up

    async def clean_up(self: Reaper, op: Any, rows: Any, claims: Any) -> None:
        await former(self, op, rows, claims[:1])

    substitute(patch, Reaper, "_clean_up", clean_up)


@bug("output not cleaned up")
def fail_for_good_without_cleaning_up(patch: Patch) -> None:
    def fail(self: Jobs, op: Any, ends: Any, *, lost: bool = False) -> None:
        for held, event in ends:
            outcome = self._outcome(held, replace(event, result=None))
            failed, keys = JobState.FAILED, self._ctx.keys
            write = job_transitions.report(keys, op.ref, event.partition, held.fence, failed, outcome, held.claim)
            self._ctx.reporter.submit([(write, self._answer(op, event.partition, ended=True, event=event, lost=lost))])

    substitute(patch, Jobs, "_fail_after_cleanup", fail)


# ---------------------------------------------------------------------- drains


@bug("wrongly blamed", first=42)
def a_drain_that_fails_jobs(patch: Patch) -> None:
    """A job that was stopped for a drain counts a failure."""
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


@bug("not drained", shape=scenes.drained_for_long, drawn=100, slow=True)
def a_drain_that_waits_for_running_jobs(patch: Patch) -> None:
    former = Executor.cluster_changed

    def changed(self: Executor, *, hint: bool, refs: Any = None) -> None:
        held = {ref: op for ref, op in self._operations.items() if op.held} if self._ctx.draining else {}
        for ref in held:
            del self._operations[ref]
        former(self, hint=hint, refs=refs)
        self._operations.update(held)

    substitute(patch, Executor, "cluster_changed", changed)


@bug("drained but busy", first=42)
def drained_before_it_is_empty(patch: Patch) -> None:
    """An executor reports that it is drained as soon as the drain is requested."""

    def state(asked: bool, busy: bool) -> NodeState:
        return NodeState.DRAINED if asked else NodeState.ACTIVE

    substitute(patch, node_record, "node_state", state)


# ---------------------------------------------------------------------- reruns


# Rare: some jobs have to fail, others must not end, and the failed ones are rerun.
@bug("wrong rerun partitions", first=148)
def a_rerun_over_the_wrong_partitions(patch: Patch) -> None:
    """It also takes the unfinished partitions, which were not requested."""
    wrap(patch, rerun, "_names", lambda _, given: (*given.found.failed, *given.found.unfinished))


# Rare: several jobs have to fail and be rerun.
@bug("wrong rerun partitions", first=16)
def a_rerun_that_omits_partitions(patch: Patch) -> None:
    wrap(patch, rerun, "_names", lambda names, _: names[:1])


# ----------------------------------------------------------------- history


@bug("record deleted too early", "invariant 14", first=26)
def history_pruned_within_its_hour(patch: Patch) -> None:
    """A watermark counts as old as soon as it is written."""
    newest = lambda known: replace(known[-1], lease=0) if known else None  # noqa: E731
    substitute(patch, history_pruning, "newest_old", newest)


@bug("record deleted too early", first=26)
def a_watermark_without_its_lease(patch: Patch) -> None:
    wrap(patch, history_pruning, "put_watermark", lambda txn, _: replace(txn, success=txn.success[:1]))


# --------------------------------------------------------- nodes that cannot


@bug("job not on disk")
def start_without_writing_the_run(patch: Patch) -> None:
    """A node with a full disk starts jobs without writing the run."""
    former = LocalJobs.begin

    async def begin(self: LocalJobs, op: Any, arg: Any, table: Any, items: Any) -> None:
        with contextlib.suppress(OSError):
            await former(self, op, arg, table, items)

    substitute(patch, LocalJobs, "begin", begin)


@bug("wrongly blamed", first=55)
def count_failures_of_a_node_that_is_unable(patch: Patch) -> None:
    substitute(patch, Capability, "cannot", lambda self, type_name, why, tables: False)


@bug("wrongly blamed", first=54)
def count_failures_of_a_node_that_is_unable_for_now(patch: Patch) -> None:
    substitute(patch, Capability, "cannot_now", lambda self, type_name, why, where, given_back, tables: False)


@bug("liveness", shape=scenes.only_one_node_can_run, drawn=73, slow=True)
def offer_for_ever_a_type_that_cannot_run(patch: Patch) -> None:
    """The work is left to other nodes without a record."""
    substitute(patch, Capability, "cannot", lambda self, type_name, why, tables: True)


# ---------------------------------------------------------------- logged errors


@bug("unexpected error")
def an_error_that_is_caught_and_logged(patch: Patch) -> None:
    """The operation is retried a little later, so the error shows only in the log."""
    former = OpenOperation.take
    broken: set[int] = set()

    def take(self: OpenOperation, size: int) -> Any:
        if id(self) not in broken:
            broken.add(id(self))
            raise Mistake(size)
        return former(self, size)

    substitute(patch, OpenOperation, "take", take)


@bug("uncaught error")
def a_task_error_that_is_never_retrieved(patch: Patch) -> None:
    """The task that informs others of released jobs fails, and no code awaits that task."""

    async def announce(self: Executor) -> None:
        raise Mistake("no such thing")

    substitute(patch, Executor, "_announce_released", announce)


__all__ = ["BUGS", "Planted"]
