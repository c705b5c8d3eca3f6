"""Runs jobs in the child: one after the other, or as a batch that is split where it breaks."""

from __future__ import annotations

import threading
import time
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
)
from distop.protocol.behavior_declaration import over_time_limit
from distop.protocol.jobs import MAX_OUTCOME_BYTES, to_go_on_from
from distop.protocol.json_codec import MAX_ERROR_TEXT
from distop.protocol.plan import PartitionPlan
from distop.protocol.records import TableRecord
from distop.runtime import secret_settings
from distop.storage import result_files
from distop.storage.confinement import looked_once
from distop.storage.places import Attempt, Stages, shared_of
from distop.worker import child_messages
from distop.worker.child_side.answer_checks import dump, fitted, is_fatal, kind_of, validate
from distop.worker.child_side.error_texts import explain, headline
from distop.worker.child_side.job_context import Context, Environment, SessionDeadline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pydantic import BaseModel

    from distop.behavior import Behavior

OUTCOME_MARGIN = 1024
"""What an outcome's other fields take at most, besides result and error."""


NOT_BEGUN = "the operation was paused before the job began"


STUCK = "a job that does not stop runs on in this worker process, which is replaced before others begin"
LINGER_SECONDS = 0.1
"""How often Spark is asked whether tasks that were told to stop have ended."""


class Refused(Exception):
    """The run was not started, and its jobs are not to blame."""


class Run:
    """One run: its items, what of it was cancelled, what runs now. Lives in one thread; ``cancel`` and ``stubborn``
    are called by the reader, ``track`` by a thread of its own."""

    def __init__(self, env: Environment, message: Mapping[str, Any], on_spark_died: Callable[[str], None]) -> None:
        self._env = env
        self._on_spark_died = on_spark_died
        self.number: int = message["run"]
        self.op: str = message["op"]
        self.type: str = message["type"]
        self._arg_json = message["arg"]
        self._table = TableRecord.from_json(message["table"]) if message["table"] else None
        self._batch: bool = message["batch"]
        self._cleanup_first: bool = message["cleanup"]
        self._careful: bool = message["careful"]
        self._deadline = SessionDeadline(env, message["deadline"])
        self._incarnation: str = message["incarnation"]
        self._opened: int = message.get("opened", 0)
        self.line: int = message.get("line", 0)
        self._limit: float = message.get("limit", 0.0)
        self._grace: float = message.get("grace", 0.0)
        self._overdue: set[int] = set()
        """What ran longer than its time limit, and was told to stop."""
        self._overdue_at = 0.0
        self._given_up = False
        """It did not stop: what its thread still does counts no more."""
        self._items: dict[int, tuple[PartitionPlan, int, int, Any]] = {}
        self._stages = Stages()
        self._open: set[int] = set()
        self._cancelled: dict[int, float] = {}
        self._keep = False
        """What was cancelled is only released."""
        self._paused = False
        self._lock = threading.Lock()
        self._current: tuple[int, ...] = ()
        self._since = time.monotonic()
        self._context: Context | None = None
        """Of what runs now."""
        self._tasks: tuple[int, int] | None = None
        """What of its Spark tasks was told last."""
        self._arg: Any = None
        self._declared: type[BaseModel] | None = None
        """What the results are to be."""
        self._to_file = False
        """Those too large for etcd go to the shared directory."""
        self._malformed = ""
        """What is wrong with a partition."""
        self.add(message)

    def add(self, message: Mapping[str, Any]) -> None:
        """Further items of the same run."""
        for data, attempt, fence, progress in message["items"]:
            try:
                partition = PartitionPlan.from_json(data)
            except Exception as error:  # its plan was written by hand; this thread reads for the jobs of all tables
                self._malformed = f"the plan has a row that cannot be read: {describe(error)}"
                partition = PartitionPlan(data["partition"], "")
            self._items[partition.partition] = (partition, attempt, fence, progress)
        self._open.update(self._items)
        self.cancel(message["cancelled"], keep=message.get("keep", False))

    # ------------------------------------------------------------------ called by the reader

    def cancel(self, partitions: Sequence[int] | None, *, keep: bool = False) -> None:
        now = time.monotonic()
        with self._lock:
            self._keep = keep
            for ordinal in self._items if partitions is None else partitions:
                self._cancelled.setdefault(ordinal, now)
        self.interrupt()

    def pause(self) -> None:
        """Begin nothing more."""
        self._paused = True

    def interrupt(self) -> None:
        """Cancel the Spark jobs of what runs now, if all of it is to stop."""
        with self._lock:
            told = self._all_told() or self._overdue.intersection(p for p in self._current if p in self._open)
            tag = self._context.tag if self._context is not None and told else ""
        if tag and self._env.spark.started:
            threading.Thread(target=self._env.spark.interrupt, args=(tag,), daemon=True).start()

    def track(self) -> None:
        """Tell how far Spark is with what runs now, and what it said last of itself. Waits for Spark's answer."""
        with self._lock:
            ctx = self._context
        if ctx is None:
            return
        ctx.say_held()
        tasks = self._env.spark.tasks(ctx.tag)
        with self._lock:
            if tasks is None or tasks == self._tasks or ctx is not self._context:
                return
            self._tasks = tasks
        self._env.outbox.send(child_messages.TasksMessage(t="tasks", run=self.number, done=tasks[0], total=tasks[1]))

    def stubborn(self, grace: float) -> bool:
        """What runs now was told to stop at least ``grace`` seconds ago."""
        with self._lock:
            told = self._all_told()
            last = max([self._since, *(self._cancelled[p] for p in told)])
        return bool(told) and time.monotonic() - last >= grace

    def _all_told(self) -> list[int]:
        """What runs now, if all of it was told to stop by a cancel."""
        running = [p for p in self._current if p in self._open]
        return running if all(p in self._cancelled for p in running) else []

    # ------------------------------------------------------------------ the time limit, by a thread of its own

    def enforce_limit(self) -> bool:
        """Stop what runs longer than the time limit. True once it has not stopped for the grace: the run was given up,
        and has said so."""
        if not self._limit:
            return False
        now = time.monotonic()
        with self._lock:
            running = [p for p in self._current if p in self._open]
            if not running or self._given_up:
                return False
            if not self._overdue.intersection(running):
                if now - self._since >= self._limit and not self._all_told():
                    self._overdue_at = now
                    self._overdue.update(running)
                return False
            if now - self._overdue_at < self._grace:
                return False
            self._given_up = True
            alone = len(self._current) == 1
        self._env.log.error("a job of %s does not stop, and is given up: %s", self.op, over_time_limit(self._limit))
        self._give_up(running[0] if alone else None)
        return True

    def _give_up(self, guilty: int | None) -> None:
        """End the run, whose thread or Spark tasks run on. ``guilty``: the job that ran alone; a batch leaves what has
        no end to the daemon, which finds the guilty one in halves."""
        self._env.stuck = True
        self._env.outbox.send(child_messages.StuckMessage(t="stuck", why=f"a job of {self.op} does not stop"))
        if guilty is not None:
            self._end(guilty, "error", None, over_time_limit(self._limit), time.time())
        if not self._batch:
            self._end_all("refused", STUCK)
        self._env.outbox.send(child_messages.DoneMessage(t="done", run=self.number, given_up=True))

    def _lingers(self) -> bool:
        """Spark tasks of a job that was over its time limit run on, although it was told to stop a while ago."""
        until = time.monotonic() + self._grace
        while self._env.spark.started and self._env.spark.lingers():
            if time.monotonic() >= until:
                return True
            time.sleep(LINGER_SECONDS)
        return False

    # ------------------------------------------------------------------ the thread

    def run(self) -> None:
        """Give every item its end, whatever happens, then say done."""
        try:
            self._run()
        except Refused as error:
            self._end_all("refused", str(error))
        except UsageError as error:
            self._end_all(kind_of(error), str(error))
        except BaseException as error:
            self._env.log.exception("run %d of %s broke", self.number, self.op)
            self._check_spark(error)
            self._end_all("error", explain(error))
        if self._env.stopping or self._given_up:
            return  # whatever has no end yet was stopped with the child, or has been told of
        done = child_messages.DoneMessage(t="done", run=self.number)
        (self._env.outbox.send_later if self.line else self._env.outbox.send)(done)

    def _run(self) -> None:
        if self._malformed:
            raise InvalidArgument(self._malformed)
        beside = (other.table for partition, *_ in self._items.values() for other in partition.beside)
        try:
            self._env.refuse_unserved(self.op, self.type, (self._table, *beside))
            behavior = self._env.behavior(self.type)
        except (NotServed, UnknownBehavior) as error:
            self._env.log.warning("%s", error)
            raise Refused(str(error)) from error
        self._arg = validate(behavior, self._arg_json)
        self._declared = behavior.Result
        self._to_file = behavior.large_results == "file"
        cleans = cleans_up(type(behavior))
        if self._batch and behavior.run_batch is not None:
            self._run_batches(behavior, list(self._items), cleans)
            return
        for ordinal in self._items:
            if not self._begin([ordinal]):
                continue
            try:
                self._run_one(behavior, ordinal, cleans)
            finally:
                self._set_current(())
                self._env.spark.unbind()

    def _begin(self, group: list[int]) -> list[int]:
        """Those of a group that are to begin now; of a run that was paused, or where something is stuck: those that
        were cancelled before."""
        if self._given_up:
            return []
        if not self._paused and not self._env.stuck:
            return group
        why = NOT_BEGUN if self._paused else STUCK
        for ordinal in [p for p in group if p not in self._cancelled]:
            self._end(ordinal, "refused", None, why, time.time())
        return [p for p in group if p in self._cancelled]

    def _run_one(self, behavior: Behavior, ordinal: int, cleans: bool) -> None:
        partition, _, _, progress = self._items[ordinal]
        ctx = self._job_context(partition)
        self._set_current((ordinal,), ctx)
        started = time.time()
        try:
            # With its file list, for the cleanup as for the job.
            partition = ctx.partition = ctx.with_files(partition)
            if self._deadline.passed():
                self._end(ordinal, "refused", None, "the session's deadline has passed", started)
                return
            if ordinal in self._cancelled:
                self._end_cancelled(behavior, ctx, partition, cleans, started)
                return
            if self._cleanup_first and cleans and not (behavior.resumable and to_go_on_from(progress) is not None):
                behavior.cancel_job_and_cleanup(self._arg, partition, ctx)
                ctx.progress.begin_anew()
            result = behavior.start_or_resume_job(self._arg, partition, ctx)
        except BaseException as error:
            self._end_with_error(behavior, ctx, partition, cleans, error, started)
        else:
            self._end(ordinal, "success", result, "", started)

    def _run_batches(self, behavior: Behavior, ordinals: list[int], cleans: bool) -> None:
        """A stack of groups; one that breaks is cut in half, until the broken partition stands alone."""
        groups = [(ordinals, self._cleanup_first)]
        while groups:
            group, cleanup = groups.pop()
            if not (group := self._begin(group)):
                continue
            try:
                error, started = self._run_batch(behavior, group, cleanup and cleans, cleans)
            finally:
                self._set_current(())
                self._env.spark.unbind()
            left = [p for p in group if p in self._open]
            if self._given_up:
                return
            overdue = bool(self._overdue.intersection(group))
            if overdue and self._lingers():
                with self._lock:
                    self._given_up = True
                self._give_up(left[0] if len(group) == len(left) == 1 else None)
                return
            if error is None or not left:
                continue
            if overdue and len(group) == 1:
                self._end(left[0], "error", None, over_time_limit(self._limit), started)
                continue
            # What is left has its own clock from now on.
            self._overdue.difference_update(group)
            if len(left) == 1 and len(group) == 1:
                self._end_alone(behavior, self._items[left[0]][0], error, started)
                continue
            self._env.log.warning(
                "a batch of %d of %s broke with %d left, which are run again in halves: %s",
                *(len(group), self.op, len(left), headline(error)),
            )
            middle = max(1, len(left) // 2)
            groups += [(half, True) for half in (left[middle:], left[:middle]) if half]

    def _run_batch(
        self, behavior: Behavior, group: list[int], cleanup: bool, cleans: bool
    ) -> tuple[BaseException | None, float]:
        """Run one group; (what broke it, when it started). What it gave has been reported; without an error,
        everything has."""
        ctx = self._batch_context(group)
        self._set_current(tuple(group), ctx)
        started = time.time()
        loaded = {p: self._items[p][0] for p in group}
        broke: BaseException | None = None
        try:
            todo: list[PartitionPlan] = []
            late = self._deadline.passed()
            with looked_once():
                loaded = {p: ctx.with_files(partition) for p, partition in loaded.items()}
            for ordinal, partition in loaded.items():
                if late:
                    self._end(ordinal, "refused", None, "the session's deadline has passed", started)
                elif ordinal in self._cancelled:
                    self._end_cancelled(behavior, self._job_context(partition, ctx), partition, cleans, started)
                else:
                    if cleanup:
                        behavior.cancel_job_and_cleanup(self._arg, partition, self._job_context(partition, ctx))
                    todo.append(partition)
            if todo:
                assert behavior.run_batch is not None
                yielded: Iterable[tuple[PartitionPlan, Any]] = behavior.run_batch(self._arg, todo, ctx)
                for partition, value in yielded:
                    if partition.partition not in self._open or partition.partition not in loaded:
                        continue
                    if isinstance(value, BaseException) and self._is_overdue(partition.partition):
                        continue  # it comes of being told to stop, and tells nothing of this job alone
                    if isinstance(value, BaseException):
                        partition = loaded[partition.partition]
                        own = self._job_context(partition, ctx)
                        self._end_with_error(behavior, own, partition, cleans, value, started)
                    else:
                        self._end(partition.partition, "success", value, "", started)
                    if (self._cancelled or self._overdue) and ctx.cancelled:
                        break  # all that is left was cancelled: do not wait for the generator to notice
        except BaseException as error:
            self._check_spark(error)
            broke = error
        if self._env.stopping or self._given_up:
            return None, started
        if broke is None and self._overdue.intersection(group):
            broke = JobCancelled(over_time_limit(self._limit))
        for ordinal in [p for p in group if p in self._open]:
            if ordinal in self._cancelled:
                own = self._job_context(loaded[ordinal], ctx)
                self._end_cancelled(behavior, own, loaded[ordinal], cleans, started)
            elif self._is_overdue(ordinal):
                pass
            elif broke is None:
                self._end(ordinal, "error", None, "run_batch gave no outcome for this partition", started)
            elif kind_of(broke) == "unable":
                # Of the node, not of a partition: no half of the batch could do better here.
                self._end(ordinal, "unable", None, str(broke), started)
            elif isinstance(broke, TableUnavailable):
                # The whole table is unreachable: each half of the batch would only fail again.
                self._end_alone(behavior, loaded[ordinal], broke, started)
        return broke, started

    def _job_context(self, partition: PartitionPlan, batch: Context | None = None) -> Context:
        """What a job is given; in a ``batch``: what the cleanup of one of its jobs is given. That one has the batch's
        tag: Spark keeps it for the thread, and what the batch did next would run under another, out of a cancel's
        reach."""
        _, attempt, fence, progress = self._items[partition.partition]
        return self._with_again(
            Context(
                self._env,
                self.op,
                self._table,
                number=self.number,
                partition=partition,
                attempt=attempt,
                fence=fence,
                incarnation=self._incarnation,
                opened=self._opened,
                progress=progress,
                cancelled=self._is_cancelled,
                stages=self._stages,
                tag=batch.tag if batch is not None else "",
            )
        )

    def _batch_context(self, group: list[int]) -> Context:
        def cancelled(ordinal: int | None) -> bool:
            if ordinal is not None:
                return self._is_cancelled(ordinal)
            return all(self._is_cancelled(p) for p in group if p in self._open)

        return self._with_again(
            Context(
                self._env,
                self.op,
                self._table,
                number=self.number,
                attempt=max(self._items[p][1] for p in group),
                incarnation=self._incarnation,
                opened=self._opened,
                cancelled=cancelled,
                stages=self._stages,
                fences={p: self._items[p][2] for p in group},
            )
        )

    def _with_again(self, ctx: Context) -> Context:
        ctx.again = self._cleanup_first
        return ctx

    # ------------------------------------------------------------------ ends

    def _is_cancelled(self, ordinal: int | None) -> bool:
        return ordinal in self._cancelled or ordinal in self._overdue

    def _is_overdue(self, ordinal: int) -> bool:
        """It is over its time limit, and was not cancelled before."""
        return ordinal in self._overdue and ordinal not in self._cancelled

    def _set_current(self, ordinals: tuple[int, ...], ctx: Context | None = None) -> None:
        with self._lock:
            self._current, self._context, self._since = ordinals, ctx, time.monotonic()
            self._tasks = None

    def _check_spark(self, error: BaseException) -> None:
        """Leave the process when the error may come from a dead Spark: no job is to blame before it ran alone."""
        if why := self._env.spark.lost(error, expected=self._env.stopping or bool(self._cancelled or self._overdue)):
            self._on_spark_died(why)

    def _end_with_error(
        self,
        behavior: Behavior,
        ctx: Context,
        partition: PartitionPlan,
        cleans: bool,
        error: BaseException,
        started: float,
    ) -> None:
        ordinal = partition.partition
        self._check_spark(error)
        if self._given_up:
            return
        if self._env.stopping:
            return  # it may come of Spark being stopped under it; the daemon knows that it stopped the job
        if isinstance(error, JobFailed) and behavior.can_fail:
            problem = self._clean_for_good(behavior, ctx, partition) if cleans else ""
            if problem:
                # The verdict stands only once nothing is left behind: the attempt is tried again.
                self._end(ordinal, "error", None, f"the cleanup after a verdict failed: {problem}", started)
            else:
                self._end(ordinal, "verdict", error.result, str(error) or "the job failed", started)
        elif ordinal in self._cancelled:
            self._end_cancelled(behavior, ctx, partition, cleans, started)
        elif ordinal in self._overdue:
            self._end(ordinal, "error", None, over_time_limit(self._limit), started)
            if self._lingers():
                self._env.stuck = True
                why = f"Spark tasks of {partition.name} of {self.op} do not stop"
                self._env.outbox.send(child_messages.StuckMessage(t="stuck", why=why))
        elif isinstance(error, JobCancelled):
            self._end(ordinal, "error", None, "JobCancelled was raised, but nobody cancelled the job", started)
        else:
            self._end_alone(behavior, partition, error, started)

    def _end_alone(self, behavior: Behavior, partition: PartitionPlan, error: BaseException, started: float) -> None:
        """An unexpected error of this job and no other: whether a retry mends it."""
        if is_fatal(behavior, error, self._env.log):
            text = str(error) if isinstance(error, DistopError) else explain(error)
            self._end(partition.partition, kind_of(error), None, text or headline(error), started)
        else:
            self._env.log.error("%s of %s: %s", partition.name, self.op, headline(error), exc_info=error)
            self._end(partition.partition, "error", None, explain(error), started)

    def _end_cancelled(
        self, behavior: Behavior, ctx: Context, partition: PartitionPlan, cleans: bool, started: float
    ) -> None:
        with self._lock:
            self._since = time.monotonic()
        if self._keep and behavior.resumable and not self._batch and ctx.progress.settle():
            cleans = False
        problem = self._cleanup(behavior, ctx, partition) if cleans else ""
        self._end(partition.partition, "cancelled", None, f"the cleanup failed: {problem}" if problem else "", started)

    def _clean_for_good(self, behavior: Behavior, ctx: Context, partition: PartitionPlan) -> str:
        if not ctx.progress.give_up():
            return "its checkpoint could not be given up before"
        return self._cleanup(behavior, ctx, partition)

    def _cleanup(self, behavior: Behavior, ctx: Context, partition: PartitionPlan) -> str:
        try:
            behavior.cancel_job_and_cleanup(self._arg, partition, ctx)
        except BaseException as error:
            self._check_spark(error)
            self._env.log.exception("the cleanup of %s of %s failed", partition.name, self.op)
            return explain(error)
        return ""

    def _end(self, ordinal: int, kind: child_messages.Kind, result: Any, error: str, started: float) -> None:
        with self._lock:
            if ordinal not in self._open:
                return  # the run was given up meanwhile
            self._open.discard(ordinal)
            self._since = time.monotonic()
        text = b"null"
        name = self._items[ordinal][0].name
        # A lone surrogate (from a file name, say) is no UTF-8, and etcd's records are.
        error = secret_settings.shortened(error, MAX_ERROR_TEXT).encode(errors="replace").decode()
        if result is not None or (kind == "success" and self._declared is not None):
            try:
                text = dump(fitted(self._declared, result, f"the result of partition {name}"))
                if len(text) + len(error.encode()) > MAX_OUTCOME_BYTES - OUTCOME_MARGIN:
                    text = self._in_file(ordinal, text)
                elif result_files.file_of(result) is not None:
                    raise ValueError(
                        f"{result_files.POINTER!r} stands for a result in a file: give the field another name"
                    )
            except InvalidArgument as problem:
                kind, text, error = "fatal", b"null", str(problem)
            except (TypeError, ValueError, RecursionError) as problem:
                kind, text = "fatal", b"null"
                error = f"the result of partition {name} cannot be stored: {problem}"
            except OSError as problem:
                # The disk, or what it is reached through: another attempt may do better.
                kind, text = "error", b"null"
                error = f"the result of partition {name} could not be written to a file: {headline(problem)}"
        self._env.outbox.ended(self.number, ordinal, kind, text, error, started)
        if self._careful:
            self._env.outbox.flush()

    def _in_file(self, ordinal: int, text: bytes) -> bytes:
        """What stands in the outcome for a result that is too large for it. Raises ValueError where it is refused, and
        OSError.
        """
        where = shared_of(self._env.shared_dir, self._env.space, self._table)
        if not self._to_file or where is None:
            most, instead = MAX_OUTCOME_BYTES - OUTCOME_MARGIN, "put large results into a file and return its path"
            if self._to_file:
                instead = "give the executors a --shared-dir"
            raise ValueError(f"it has {len(text)} bytes, at most {most} are kept: {instead}")
        fence = self._items[ordinal][2]
        return dump(result_files.write(where, Attempt(self.op, ordinal, fence, self._incarnation), text))

    def _end_all(self, kind: child_messages.Kind, error: str) -> None:
        now = time.time()
        for ordinal in list(self._open):
            self._end(ordinal, kind, None, error, now)
