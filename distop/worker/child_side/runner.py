"""Runs jobs in the child: one after the other, or as a batch that is halved after a failure."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from distop.behavior import cleans_up
from distop.errors import (
    DistopError,
    InvalidArgument,
    JobCancelled,
    JobFailed,
    NotServed,
    TableUnavailable,
    UnknownBehavior,
    UsageError,
    describe,
    message_of,
)
from distop.protocol.behavior_declaration import over_time_limit
from distop.protocol.jobs import MAX_OUTCOME_BYTES
from distop.protocol.json_codec import MAX_ERROR_TEXT
from distop.protocol.plan import PartitionPlan
from distop.protocol.records import TableRecord
from distop.protocol.texts import plural
from distop.runtime import caller_trace, secret_settings
from distop.storage import result_files
from distop.storage.confinement import resolve_once
from distop.storage.places import Attempt, shared_of
from distop.storage.store_waits import StoreWaits, is_busy, repeated_while_busy
from distop.worker import child_messages
from distop.worker.child_side.answer_checks import dump, fatal_kind, is_fatal, validate_argument, validate_result
from distop.worker.child_side.environment import Environment, SessionDeadline
from distop.worker.child_side.error_texts import explain, headline
from distop.worker.child_side.job_context import ChildContext, JobScope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from distop.behavior import Behavior

OUTCOME_MARGIN = 1024
"""Maximum bytes of an outcome's fields other than result and error."""

STUCK = "a job does not stop in this worker process, which is replaced before other jobs start"
LINGER_SECONDS = 0.1
"""Seconds between two checks whether cancelled Spark tasks have ended."""


class RunRefused(Exception):
    """The run was not started, and its jobs are not to blame."""


@dataclass(slots=True)
class _TimeLimit:
    """The time limit of a run's jobs in seconds (0: none), and the jobs that exceeded it."""

    seconds: float
    grace: float
    overdue: set[int] = field(default_factory=set)
    """Jobs that exceeded the time limit, and were cancelled for that."""
    overdue_at: float = 0.0


class Run:
    """One run: its jobs, the cancelled ones, and the running one.

    It runs in one thread; the child's main thread calls ``cancel`` and ``ignores_cancel``, another one ``track``.
    """

    def __init__(self, env: Environment, message: Mapping[str, Any], on_spark_died: Callable[[str], None]) -> None:
        self._env = env
        self._on_spark_died = on_spark_died
        self.number: int = message["run"]
        self.op: str = message["op"]
        self.type: str = message["type"]
        self._arg_json = message["arg"]
        self._batch: bool = message["batch"]
        self._cleanup_first: bool = message["cleanup"]
        self._careful: bool = message["careful"]
        self._deadline = SessionDeadline(env, message["deadline"])
        self.line: int = message.get("line", 0)
        self._limit = _TimeLimit(message.get("limit", 0.0), message.get("grace", 0.0))
        self._given_up = False
        """The run was abandoned because its job does not stop: results of its thread no longer count."""
        self._items: dict[int, tuple[PartitionPlan, int, int, Any]] = {}
        self._scope = self._shared_scope(message)
        self._open: set[int] = set()
        self._cancelled: dict[int, float] = {}
        self._keep = False
        """Cancelled jobs are only released."""
        self._paused = False
        self._lock = threading.Lock()
        self._current: tuple[int, ...] = ()
        self._since = time.monotonic()
        self._context: ChildContext | None = None
        """The context of the running job or batch."""
        self._tasks: tuple[int, int] | None = None
        """The last reported numbers of Spark tasks."""
        self._arg: Any = None
        self._behavior: Behavior
        self._cleans = False
        """Whether the behavior has cleanup code."""
        self._malformed = ""
        """The error of an invalid partition, "" for none."""
        self.add(message)

    def _shared_scope(self, message: Mapping[str, Any]) -> JobScope:
        """What the contexts of all jobs share."""
        return JobScope(
            self.op,
            TableRecord.from_json(message["table"]) if message["table"] else None,
            run=self.number,
            incarnation=message["incarnation"],
            opened=message.get("opened", 0),
            cancelled=self._is_cancelled,
            trace=tuple(message.get("trace", ("", False))),
        )

    def add(self, message: Mapping[str, Any]) -> None:
        """Add further items of the same run."""
        for data, attempt, fence, progress in message["items"]:
            try:
                partition = PartitionPlan.from_json(data)
            except Exception as error:  # the plan may be written by hand; this thread must continue for other tables
                self._malformed = f"the plan has an unreadable row: {describe(error)}"
                partition = PartitionPlan(data["partition"], "")
            self._items[partition.partition] = (partition, attempt, fence, progress)
        self._open.update(self._items)
        self.cancel(message["cancelled"], keep=message.get("keep", False))

    # ------------------------------------------------------------------ called by the main thread

    def cancel(self, partitions: Sequence[int] | None, *, keep: bool = False) -> None:
        now = time.monotonic()
        with self._lock:
            self._keep = keep
            for ordinal in self._items if partitions is None else partitions:
                self._cancelled.setdefault(ordinal, now)
        self.interrupt()

    def pause(self) -> None:
        """Start no more jobs."""
        self._paused = True

    def interrupt(self) -> None:
        """Cancel the Spark jobs of the running jobs, if all of them were cancelled."""
        with self._lock:
            running = [p for p in self._current if p in self._open]
            stop = self._running_cancelled() or self._limit.overdue.intersection(running)
            tag = self._context.tag if self._context is not None and stop else ""
        if tag and self._env.spark.started:
            threading.Thread(target=self._env.spark.interrupt, args=(tag,), daemon=True).start()

    def track(self) -> None:
        """Report the Spark tasks and the last status of the running job. Waits for Spark's answer."""
        with self._lock:
            ctx = self._context
        if ctx is None:
            return
        ctx.send_held_status()
        tasks = self._env.spark.tasks(ctx.tag)
        with self._lock:
            if tasks is None or tasks == self._tasks or ctx is not self._context:
                return
            self._tasks = tasks
        self._env.outbox.send(child_messages.TasksMessage(t="tasks", run=self.number, done=tasks[0], total=tasks[1]))

    def ignores_cancel(self, grace: float) -> bool:
        """Whether the running jobs were cancelled at least ``grace`` seconds ago."""
        with self._lock:
            cancelled = self._running_cancelled()
            last = max([self._since, *(self._cancelled[p] for p in cancelled)])
        return bool(cancelled) and time.monotonic() - last >= grace

    def _running_cancelled(self) -> list[int]:
        """The running jobs if all of them were cancelled; else empty."""
        running = [p for p in self._current if p in self._open]
        return running if all(p in self._cancelled for p in running) else []

    # ------------------------------------------------------------------ the time limit, enforced by another thread

    def enforce_limit(self) -> bool:
        """Cancel jobs that exceed the time limit.

        True: a job did not stop within the grace period, and the run was abandoned and has reported that.
        """
        limit = self._limit
        if not limit.seconds:
            return False
        now = time.monotonic()
        with self._lock:
            running = [p for p in self._current if p in self._open]
            if not running or self._given_up:
                return False
            if not limit.overdue.intersection(running):
                if now - self._since >= limit.seconds and not self._running_cancelled():
                    limit.overdue_at = now
                    limit.overdue.update(running)
                return False
            if now - limit.overdue_at < limit.grace:
                return False
            self._given_up = True
            alone = len(self._current) == 1
        text = "Abandoning a job of %s, which does not stop: %s"
        self._env.log.error(text, self.op, over_time_limit(limit.seconds))
        self._abandon(running[0] if alone else None)
        return True

    def _abandon(self, guilty: int | None) -> None:
        """End the run although its thread or its Spark tasks do not stop.

        ``guilty``: the job, if it ran alone. The jobs of a batch get no end: the daemon finds the guilty one by
        halving.
        """
        self._env.stuck = True
        self._env.outbox.send(child_messages.StuckMessage(t="stuck", why=f"a job of {self.op} does not stop"))
        if guilty is not None:
            self._end(guilty, "error", None, over_time_limit(self._limit.seconds), time.time())
        if not self._batch:
            self._end_all("refused", STUCK)
        self._env.outbox.send(child_messages.DoneMessage(t="done", run=self.number, given_up=True))

    def _tasks_do_not_stop(self) -> bool:
        """Whether cancelled Spark tasks of a job that exceeded its time limit run longer than the grace period."""
        until = time.monotonic() + self._limit.grace
        while self._env.spark.started and self._env.spark.has_cancelled_tasks():
            if time.monotonic() >= until:
                return True
            time.sleep(LINGER_SECONDS)
        return False

    # ------------------------------------------------------------------ the thread

    def run(self) -> None:
        """Run all jobs, report exactly one end for each, then report that the run is done."""
        try:
            self._run()
        except RunRefused as error:
            self._end_all("refused", str(error))
        except UsageError as error:
            self._end_all(fatal_kind(error), message_of(error))
        except BaseException as error:
            self._env.log.exception("Unexpected error in run %d of %s", self.number, self.op)
            self._check_spark(error)
            self._end_all("error", explain(error))
        if self._env.stopping or self._given_up:
            return  # the other jobs were stopped with the child, or the run was reported as abandoned
        done = child_messages.DoneMessage(t="done", run=self.number)
        (self._env.outbox.send_later if self.line else self._env.outbox.send)(done)

    def _run(self) -> None:
        if self._malformed:
            raise InvalidArgument(self._malformed)
        beside = (other.table for partition, *_ in self._items.values() for other in partition.beside)
        try:
            self._env.refuse_unserved(self.op, self.type, (self._scope.table, *beside))
            behavior = self._behavior = self._env.behavior(self.type)
        except (NotServed, UnknownBehavior) as error:
            self._env.log.warning("Refusing jobs: %s", error)
            raise RunRefused(str(error)) from error
        self._scope = replace(self._scope, may_stage=behavior.staged_output != "refuse")
        self._arg = validate_argument(behavior, self._arg_json)
        self._cleans = cleans_up(type(behavior))
        if self._batch and behavior.run_batch is not None:
            self._run_batches(list(self._items))
            return
        for ordinal in self._items:
            if not self._startable([ordinal]):
                continue
            try:
                self._run_one(ordinal)
            finally:
                self._set_current(())
                self._env.spark.unbind()

    def _startable(self, group: list[int]) -> list[int]:
        """The jobs of a group that start now; refuses the others if the run is paused or the child is stuck.

        Jobs that were cancelled before are startable even then: they are cleaned up.
        """
        if self._given_up:
            return []
        if not self._paused and not self._env.stuck:
            return group
        why = child_messages.NOT_STARTED if self._paused else STUCK
        for ordinal in [p for p in group if p not in self._cancelled]:
            self._end(ordinal, "refused", None, why, time.time())
        return [p for p in group if p in self._cancelled]

    def _run_one(self, ordinal: int) -> None:
        partition = self._items[ordinal][0]
        ctx = self._job_context(partition)
        self._set_current((ordinal,), ctx)
        started = time.time()
        try:
            result = repeated_while_busy(
                lambda again: self._start_or_resume(ordinal, ctx, started, cleanup=again or self._cleanup_first),
                self._store_waits(ctx),
                repeats=lambda error: self._repeats(error) and _settled(ctx),
                results=lambda: ctx.progress.saves,
            )
        except BaseException as error:
            self._end_with_error(ctx, ctx.partition or partition, error, started)
        else:
            self._end(ordinal, "success", result, "", started)  # does nothing if the job has ended otherwise

    def _start_or_resume(self, ordinal: int, ctx: ChildContext, started: float, *, cleanup: bool) -> Any:
        """Run a job that is alone; returns its result. If it may not start, it is ended here."""
        behavior = self._behavior
        # Both the cleanup and the job need the file list.
        partition = ctx.partition = ctx.with_files(self._items[ordinal][0])
        if self._deadline.passed():
            self._end(ordinal, "refused", None, "the session's deadline has passed", started)
            return None
        if ordinal in self._cancelled:
            self._end_cancelled(ctx, partition, started)
            return None
        if cleanup and self._cleans and not (behavior.resumable and ctx.progress.resumes):
            behavior.cancel_job_and_cleanup(self._arg, partition, ctx)
            ctx.progress.begin_anew()
        if not self._scope.trace[0]:
            return behavior.start_or_resume_job(self._arg, partition, ctx)
        with caller_trace.attached(ctx.traceparent):
            return behavior.start_or_resume_job(self._arg, partition, ctx)

    def _store_waits(self, ctx: ChildContext) -> StoreWaits:
        return StoreWaits(ctx.check_cancelled, ctx.waiting, ctx.log)

    def _repeats(self, error: Exception) -> bool:
        """Whether a busy store has caused the error, and the behavior may be called again within the attempt.

        Exits the process if its Spark session is unusable.
        """
        if not is_busy(error):
            return False
        self._check_spark(error)
        once = self._behavior.can_fail and self._behavior.retry.attempts == 1
        stopped = self._env.stopping or self._given_up
        return not once and not stopped and not is_fatal(self._behavior, error, self._env.log)

    def _run_batches(self, ordinals: list[int]) -> None:
        """Run a batch; after an error, halve it until the failing partition is alone."""
        groups = [(ordinals, self._cleanup_first)]
        while groups:
            group, cleanup = groups.pop()
            if not (group := self._startable(group)):
                continue
            try:
                error, started = self._run_batch(group, cleanup and self._cleans)
            finally:
                self._set_current(())
                self._env.spark.unbind()
            left = [p for p in group if p in self._open]
            if self._given_up:
                return
            overdue = bool(self._limit.overdue.intersection(group))
            if overdue and self._tasks_do_not_stop():
                with self._lock:
                    self._given_up = True
                self._abandon(left[0] if len(group) == len(left) == 1 else None)
                return
            if error is None or not left:
                continue
            if overdue and len(group) == 1:
                self._end(left[0], "error", None, over_time_limit(self._limit.seconds), started)
                continue
            # The time limit of the remaining jobs starts again.
            self._limit.overdue.difference_update(group)
            if len(left) == 1 and len(group) == 1:
                self._end_with_own_error(self._items[left[0]][0], error, started)
                continue
            self._env.log.warning(
                "Batch of %s of %s failed; repeating the %s without an outcome in halves: %s",
                *(plural(len(group), "job"), self.op, plural(len(left), "job"), headline(error)),
            )
            middle = max(1, len(left) // 2)
            groups += [(half, True) for half in (left[middle:], left[:middle]) if half]

    def _run_batch(self, group: list[int], cleanup: bool) -> tuple[BaseException | None, float]:
        """Run one group as a batch, and report its outcomes. Returns (its error or None, its start time).

        Without an error, all its jobs have outcomes. While a store is busy, the jobs without an outcome are repeated.
        """
        ctx = self._batch_context(group)
        self._set_current(tuple(group), ctx)
        started = time.time()
        loaded = {p: self._items[p][0] for p in group}
        failure: BaseException | None = None
        try:
            repeated_while_busy(
                lambda again: self._run_open(loaded, ctx, started, cleanup=cleanup or (again and self._cleans)),
                self._store_waits(ctx),
                repeats=self._repeats,
                results=lambda: len(group) - len(self._open.intersection(group)),
            )
        except BaseException as error:
            self._check_spark(error)
            failure = error
        if self._env.stopping or self._given_up:
            return None, started
        if failure is None and self._limit.overdue.intersection(group):
            failure = JobCancelled(over_time_limit(self._limit.seconds))
        for ordinal in [p for p in group if p in self._open]:
            self._end_without_outcome(loaded[ordinal], ctx, failure, started)
        return failure, started

    def _run_open(
        self, loaded: dict[int, PartitionPlan], batch: ChildContext, started: float, *, cleanup: bool
    ) -> None:
        """Run the jobs of a batch that have no outcome yet. ``loaded``: its jobs; they get their file lists."""
        late = self._deadline.passed()
        still_open = [p for p in loaded if p in self._open]
        with resolve_once():
            loaded.update({p: batch.with_files(self._items[p][0]) for p in still_open})
        ready = [p for p in still_open if self._ready(loaded[p], batch, started, late=late, cleanup=cleanup)]
        if ready:
            self._report_outcomes([loaded[p] for p in ready], loaded, batch, started)

    def _ready(
        self, partition: PartitionPlan, batch: ChildContext, started: float, *, late: bool, cleanup: bool
    ) -> bool:
        """Whether the job runs in the batch, after its cleanup; ends it otherwise."""
        ordinal = partition.partition
        if late:
            self._end(ordinal, "refused", None, "the session's deadline has passed", started)
            return False
        if ordinal in self._cancelled:
            self._end_cancelled(self._job_context(partition, batch), partition, started)
            return False
        if cleanup:
            self._behavior.cancel_job_and_cleanup(self._arg, partition, self._job_context(partition, batch))
        return True

    def _report_outcomes(
        self, ready: list[PartitionPlan], loaded: Mapping[int, PartitionPlan], batch: ChildContext, started: float
    ) -> None:
        """Run ``run_batch``, and report the outcome of each job that it yields.

        Raises the first yielded error of a busy store; its job is still open.
        """
        busy: Exception | None = None
        assert self._behavior.run_batch is not None
        yielded: Iterable[tuple[PartitionPlan, Any]] = self._behavior.run_batch(self._arg, ready, batch)
        for partition, value in yielded:
            ordinal = partition.partition
            if ordinal not in self._open or ordinal not in loaded:
                continue
            if isinstance(value, BaseException):
                if self._is_overdue(ordinal):
                    continue  # a result of the cancel, not the job's own error
                if isinstance(value, Exception) and ordinal not in self._cancelled and self._repeats(value):
                    busy = busy or value
                    continue
                own = loaded[ordinal]
                self._end_with_error(self._job_context(own, batch), own, value, started)
            else:
                self._end(ordinal, "success", value, "", started)
            if (self._cancelled or self._limit.overdue) and batch.cancelled:
                break  # all remaining jobs were cancelled: do not wait for the generator
        if busy is not None:
            raise busy

    def _end_without_outcome(
        self, partition: PartitionPlan, batch: ChildContext, failure: BaseException | None, started: float
    ) -> None:
        """End a job for which the batch yielded no outcome, unless it runs again in a half of the batch."""
        ordinal = partition.partition
        if ordinal in self._cancelled:
            self._end_cancelled(self._job_context(partition, batch), partition, started)
        elif self._is_overdue(ordinal):
            pass
        elif failure is None:
            self._end(ordinal, "error", None, "run_batch yielded no outcome for this partition", started)
        elif fatal_kind(failure) == "unable":
            # The node is the cause, not a partition: halves of the batch would fail here, too.
            self._end(ordinal, "unable", None, message_of(failure), started)
        elif isinstance(failure, TableUnavailable) or is_busy(failure):
            # The whole table is unreachable: halves of the batch would fail, too.
            self._end_with_own_error(partition, failure, started)

    def _job_context(self, partition: PartitionPlan, batch: ChildContext | None = None) -> ChildContext:
        """The context of a job, or with ``batch`` of the cleanup of one job of the batch.

        The latter has the batch's Spark tag. Spark keeps the tag of a thread, so with another tag the batch's later
        Spark jobs would not be cancelled with the batch.
        """
        _, attempt, fence, checkpoint = self._items[partition.partition]
        scope = replace(self._scope, partition=partition, attempt=attempt, fence=fence, checkpoint=checkpoint)
        return self._context_of(replace(scope, tag=batch.tag) if batch is not None else scope)

    def _batch_context(self, group: list[int]) -> ChildContext:
        def cancelled(ordinal: int | None) -> bool:
            if ordinal is not None:
                return self._is_cancelled(ordinal)
            return all(self._is_cancelled(p) for p in group if p in self._open)

        attempt, fences = max(self._items[p][1] for p in group), {p: self._items[p][2] for p in group}
        return self._context_of(replace(self._scope, attempt=attempt, fences=fences, cancelled=cancelled))

    def _context_of(self, scope: JobScope) -> ChildContext:
        ctx = ChildContext(self._env, scope)
        ctx.again = self._cleanup_first
        return ctx

    # ------------------------------------------------------------------ ends

    def _is_cancelled(self, ordinal: int | None) -> bool:
        return ordinal in self._cancelled or ordinal in self._limit.overdue

    def _is_overdue(self, ordinal: int) -> bool:
        """Whether a job exceeded its time limit, and was not cancelled before."""
        return ordinal in self._limit.overdue and ordinal not in self._cancelled

    def _set_current(self, ordinals: tuple[int, ...], ctx: ChildContext | None = None) -> None:
        with self._lock:
            self._current, self._context, self._since = ordinals, ctx, time.monotonic()
            self._tasks = None

    def _check_spark(self, error: BaseException) -> None:
        """Exit the process if the error comes from an unusable Spark session: then no job is to blame."""
        expected = self._env.stopping or bool(self._cancelled or self._limit.overdue)
        if why := self._env.spark.lost(error, expected=expected):
            self._on_spark_died(why)

    def _end_with_error(
        self, ctx: ChildContext, partition: PartitionPlan, error: BaseException, started: float
    ) -> None:
        ordinal = partition.partition
        self._check_spark(error)
        if self._given_up:
            return
        if self._env.stopping:
            return  # the error may come from stopping Spark; the daemon knows that it stopped the job
        if isinstance(error, JobFailed) and self._behavior.can_fail:
            problem = self._clean_for_good(ctx, partition) if self._cleans else ""
            if problem:
                # A verdict counts only after a successful cleanup: the attempt is repeated.
                self._end(ordinal, "error", None, f"the cleanup after a verdict failed: {problem}", started)
            else:
                self._end(ordinal, "verdict", error.result, message_of(error) or "the job failed", started)
        elif ordinal in self._cancelled:
            self._end_cancelled(ctx, partition, started)
        elif ordinal in self._limit.overdue:
            self._end(ordinal, "error", None, over_time_limit(self._limit.seconds), started)
            if self._tasks_do_not_stop():
                self._env.stuck = True
                why = f"Spark tasks of {partition.name} of {self.op} do not stop"
                self._env.outbox.send(child_messages.StuckMessage(t="stuck", why=why))
        elif isinstance(error, JobCancelled):
            self._end(ordinal, "error", None, "JobCancelled was raised, but the job was not cancelled", started)
        else:
            self._end_with_own_error(partition, error, started)

    def _end_with_own_error(self, partition: PartitionPlan, error: BaseException, started: float) -> None:
        """End a job with an unexpected error of its own, as fatal or retryable."""
        if is_fatal(self._behavior, error, self._env.log):
            text = message_of(error) if isinstance(error, DistopError) else explain(error)
            self._end(partition.partition, fatal_kind(error), None, text or headline(error), started)
        else:
            message = "Job %s of %s failed: %s"
            self._env.log.error(message, partition.name, self.op, headline(error), exc_info=error)
            self._end(partition.partition, "error", None, explain(error), started)

    def _end_cancelled(self, ctx: ChildContext, partition: PartitionPlan, started: float) -> None:
        with self._lock:
            self._since = time.monotonic()
        kept = self._keep and self._behavior.resumable and not self._batch and ctx.progress.settle()
        problem = self._cleanup(ctx, partition) if self._cleans and not kept else ""
        self._end(partition.partition, "cancelled", None, f"the cleanup failed: {problem}" if problem else "", started)

    def _clean_for_good(self, ctx: ChildContext, partition: PartitionPlan) -> str:
        if not ctx.progress.give_up():
            return "its checkpoint could not be marked as abandoned before"
        return self._cleanup(ctx, partition)

    def _cleanup(self, ctx: ChildContext, partition: PartitionPlan) -> str:
        try:
            self._behavior.cancel_job_and_cleanup(self._arg, partition, ctx)
        except BaseException as error:
            self._check_spark(error)
            self._env.log.exception("Cleanup of job %s of %s failed", partition.name, self.op)
            return explain(error)
        return ""

    def _end(self, ordinal: int, kind: child_messages.EndKind, result: Any, error: str, started: float) -> None:
        with self._lock:
            if ordinal not in self._open:
                return  # the run was abandoned meanwhile
            self._open.discard(ordinal)
            self._since = time.monotonic()
        text = b"null"
        name = self._items[ordinal][0].name
        # A lone surrogate, from a file name for example, is not valid UTF-8, which etcd's records must be.
        error = secret_settings.shortened(error, MAX_ERROR_TEXT).encode(errors="replace").decode()
        if result is not None or (kind == "success" and self._behavior.Result is not None):
            try:
                text = dump(validate_result(self._behavior.Result, result, f"the result of partition {name}"))
                if len(text) + len(error.encode()) > MAX_OUTCOME_BYTES - OUTCOME_MARGIN:
                    text = self._in_file(ordinal, text)
                elif result_files.file_of(result) is not None:
                    raise ValueError(f"its field {result_files.POINTER!r} is reserved for results in files: rename it")
            except InvalidArgument as problem:
                kind, text, error = "fatal", b"null", str(problem)
            except (TypeError, ValueError, RecursionError) as problem:
                kind, text = "fatal", b"null"
                error = f"the result of partition {name} cannot be stored: {problem}"
            except OSError as problem:
                # A storage error: another attempt may succeed.
                kind, text = "error", b"null"
                error = f"cannot write the result of partition {name} to a file: {headline(problem)}"
        self._env.outbox.ended(self.number, ordinal, kind, text, error, started)
        if self._careful:
            self._env.outbox.flush()

    def _in_file(self, ordinal: int, text: bytes) -> bytes:
        """Write a result that is too large for etcd to a file; returns the outcome's pointer to it.

        Raises ValueError if large results are not allowed, and OSError.
        """
        where = shared_of(self._env.shared_dir, self._env.space, self._scope.table)
        to_file = self._behavior.large_results == "file"
        if not to_file or where is None:
            limit, advice = MAX_OUTCOME_BYTES - OUTCOME_MARGIN, "put large results into a file and return its path"
            if to_file:
                advice = "start the executors with --shared-dir"
            raise ValueError(f"it has {len(text)} bytes: at most {limit} are allowed; {advice}")
        fence = self._items[ordinal][2]
        return dump(result_files.write(where, Attempt(self.op, ordinal, fence, self._scope.incarnation), text))

    def _end_all(self, kind: child_messages.EndKind, error: str) -> None:
        now = time.time()
        for ordinal in list(self._open):
            self._end(ordinal, kind, None, error, now)


def _settled(ctx: ChildContext) -> bool:
    """Save the checkpoint that was held back; returns whether the job may continue from the last saved one.

    If a save has no answer, only the next attempt can read which one etcd has.
    """
    ctx.progress.settle()
    return ctx.progress.settled
