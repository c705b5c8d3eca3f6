"""The calls that a child executes: planning, completion, cleanup of jobs that do not run, verification."""

from __future__ import annotations

import json
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from distop.behavior import OutcomeRow, Summary, cleans_up
from distop.errors import (
    DistopError,
    InvalidArgument,
    JobCancelled,
    NotServed,
    OperationFailed,
    TableUnavailable,
    UsageError,
    message_of,
)
from distop.protocol.json_codec import MAX_ERROR_TEXT, dumps
from distop.protocol.plan import MAX_CHUNK_BYTES, PartitionPlan, Planned, chunked, select
from distop.protocol.records import PLANNED_OPTIONS, OperationRef, TableRecord
from distop.runtime import secret_settings
from distop.storage.places import Attempt, shared_of, stage_of
from distop.storage.result_files import resolve
from distop.storage.store_waits import StoreWaits, is_busy, repeated_while_busy
from distop.worker import child_messages
from distop.worker.child_side import shared_files
from distop.worker.child_side.answer_checks import (
    dump,
    fatal_kind,
    is_fatal,
    to_json_value,
    validate_argument,
    validate_result,
)
from distop.worker.child_side.environment import Environment, SessionDeadline
from distop.worker.child_side.error_texts import explain
from distop.worker.child_side.job_context import ChildContext, JobScope
from distop.worker.child_side.outbox import ANSWER_SECONDS
from distop.worker.child_side.spark_session import SparkDied
from distop.worker.child_side.stage_sweeping import StageSweeper, Swept, sweep_ended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from distop.behavior import Behavior
    from distop.storage.deletion import Place


T = TypeVar("T")


class _Late(JobCancelled):
    """The session's deadline has passed, so the call must not continue. The daemon sends it again if possible."""


class Call:
    """One call, run in its own thread. Other threads call ``cancel`` and ``interrupt``."""

    def __init__(self, env: Environment, message: Mapping[str, Any], on_spark_died: Callable[[str], None]) -> None:
        self._env = env
        self._message = message
        self._on_spark_died = on_spark_died
        self._items: list[Any] = list(message.get("items", ()))
        self.number: int = message["call"]
        self._stop = threading.Event()
        self._deadline = SessionDeadline(env, message.get("deadline", 0.0))
        self._current: ChildContext | None = None
        """The current context of the behavior: a cleanup has one for each job."""
        self._table = TableRecord.from_json(message["table"]) if message["table"] else None
        self._follow_ups: list[Mapping[str, Any]] = []
        self._registrations: list[Mapping[str, Any]] = []
        self._may_stage = False
        self._removes_unnamed = False
        """Whether the end of the jobs decides which stages stay."""
        self._named: dict[int, tuple[int, str]] = {}
        """Fence and incarnation of the attempts of successful outcomes that were read, by partition."""
        self._all_read = False
        """Whether all outcomes were read."""

    def add(self, message: Mapping[str, Any]) -> None:
        self._items += message["items"]

    def cancel(self) -> None:
        self._stop.set()
        self.interrupt()

    def interrupt(self) -> None:
        """Cancel the running Spark jobs if the call must stop."""
        ctx = self._current
        if self._stop.is_set() and ctx is not None and self._env.spark.started:
            threading.Thread(target=self._env.spark.interrupt, args=(ctx.tag,), daemon=True).start()

    def track(self) -> None:
        """Report the status that the rate limit held back, if there is one."""
        if (ctx := self._current) is not None:
            ctx.send_held_status()

    def _check(self) -> None:
        if self._stop.is_set():
            raise JobCancelled("the call was cancelled")
        if self._deadline.passed():
            raise _Late("the session's deadline has passed")

    def run(self) -> None:
        """Run the call, and send its result or its error."""
        behavior: Behavior | None = None
        try:
            value: Any = None
            self._check()
            self._refuse_unserved()
            if self._message["t"] == "verify":
                from distop.worker.child_side import sender_verification  # imports http, which few operations need

                value = sender_verification.verify(self._message, self._env.verifier_urls)
            elif self._message["t"] == "sweep":
                value = self._sweep(self._shared())
            elif self._message["t"] == "results":
                value = self._results(self._shared())
            elif self._message["t"] == "statistics":
                value = self._statistics()
            else:
                behavior = self._env.behavior(self._message["type"])
                self._may_stage = behavior.staged_output != "refuse"
                self._removes_unnamed = behavior.staged_output == "keep" and not behavior.resumable
                kinds: dict[str, Callable[[Behavior, Any], Any]] = {
                    "plan": self._plan,
                    "complete": self._complete,
                    "cleanup": self._cleanup,
                }
                value = kinds[self._message["t"]](behavior, validate_argument(behavior, self._message["arg"]))
            self._env.outbox.send(child_messages.ResultMessage(t="result", call=self.number, value=value))
        except BaseException as error:
            if why := self._env.spark.lost(error, expected=self._env.stopping or self._stop.is_set()):
                self._on_spark_died(why)
            own_error = isinstance(error, DistopError)
            fatal = isinstance(error, UsageError) or (behavior is not None and is_fatal(behavior, error, self._env.log))
            stopping = self._stop.is_set() or self._deadline.passed()
            if not fatal and not stopping and not isinstance(error, TableUnavailable | NotServed):
                self._env.log.exception("Call %s of %s failed", self._message["t"], self._message["op"])
            message_only = (fatal and own_error) or isinstance(error, NotServed)
            text = (message_of(error) if message_only else "") or explain(error)
            text = secret_settings.shortened(text, MAX_ERROR_TEXT).encode(errors="replace").decode()
            kind = "late" if isinstance(error, _Late) else fatal_kind(error) if fatal else "transient"
            self._env.outbox.send(child_messages.FailedMessage(t="failed", call=self.number, kind=kind, message=text))
        finally:
            self._env.spark.unbind()

    def _refuse_unserved(self) -> None:
        """Raises NotServed if this executor does not serve the operation's type or tables."""
        ops = self._message.get("ops", (self._message["op"],))
        rows = self._items if self._message["t"] == "cleanup" else ()
        beside = [other["table"]["name"] for row, *_ in rows for other in row.get("beside", ())]
        needs_code = self._message["t"] not in ("sweep", "results", "statistics")
        type_name = self._message.get("type", OperationRef.parse(self._message["op"]).type)
        for op in ops:
            self._env.refuse_unserved(op, type_name if needs_code else None, (self._table, *beside))

    def _shared(self) -> Place | None:
        return shared_of(self._env.shared_dir, self._env.space, self._table)

    def _sweep(self, where: Place | None) -> Any:
        """Remove the files of an ended operation; returns the number and the bytes of removed stages."""
        if where is None:
            return (0, 0)
        op = self._message["op"]
        if self._message["plans"]:
            shared_files.remove_plans(where, op)
        swept = Swept()
        if self._message["stages"]:
            earlier = self._message["earlier"]
            swept = sweep_ended(partial(self._stages, where=where), op, where, earlier=earlier, log=self._env.log)
        return swept.stages, swept.bytes

    def _results(self, where: Place | None) -> Any:
        """The operations with results or stages; with ``remove`` the number and the bytes of removed stages."""
        ops = self._message["ops"]
        if where is None:
            return (0, 0) if self._message["remove"] else []
        if not self._message["remove"]:
            return shared_files.operations_with_files(where, ops)
        swept = Swept()
        for op in ops:
            self._check()
            shared_files.remove_results(where, op)
            if OperationRef.parse(op).type in self._message["staging"]:
                swept += self._stages(op, where).remove_all(late=True)
        return swept.stages, swept.bytes

    def _stages(self, op: str, where: Place) -> StageSweeper:
        spark = self._env.spark
        return StageSweeper(
            op,
            where,
            self._env.space,
            self._table,
            check=self._check,
            spark=lambda: spark.session(op, f"{op}-{self._message['t']}{self.number}".replace(",", "%2C"), op),
            log=self._env.log,
        )

    def _remove_unnamed_stages(self) -> Swept:
        """Remove the stages of dead attempts, after all jobs have ended.

        Not those of resumable jobs: a job that continued from a checkpoint may name files of its earlier attempts.
        Those that no user reads are removed later, together with all others: this completion may be repeated.
        """
        where = self._shared()
        if not self._removes_unnamed or where is None:
            return Swept()
        if not self._all_read:
            for _ in self._rows():
                pass
        return self._stages(self._message["op"], where).remove_unnamed(self._named)

    def _statistics(self) -> Any:
        """The table's version and statistics, from metadata alone."""
        from distop.tables import statistics_of

        assert self._table is not None
        found = statistics_of(self._table, self._message["names"], self._message["small_bytes"], self._check)
        return {"version": found.version, "statistics": found.values(self._message["names"])}

    def _context(self, **fields: Any) -> ChildContext:
        op, stopped = self._message["op"], self._stop
        scope = JobScope(op, self._table, cancelled=lambda _: stopped.is_set(), may_stage=self._may_stage, **fields)
        ctx = ChildContext(self._env, scope)
        ctx.call = f"{self._message['t']}{self.number}"
        self._current = ctx
        self._check()
        return ctx

    def _plan(self, behavior: Behavior, arg: Any) -> Any:
        if self._table is None:
            raise InvalidArgument(f"cannot plan {self._message['op']}: it has no table")
        ctx = self._context(call=self.number, find_table=self._other_table, list_tables=self._all_tables)
        # The operation's attempts are for other errors than a busy store.
        planned, partitions = self._while_busy(behavior, ctx, lambda: self._planned(behavior, arg, ctx))
        for chunk in chunked(partitions):
            self._check()
            self._env.outbox.send(child_messages.ChunkMessage(t="chunk", call=self.number, data=chunk.decode()))
        spilled = sum(1 for p in partitions for listed in p.lists() if listed.files_at)
        options = dict(planned.options)
        if unknown := sorted(set(options) - PLANNED_OPTIONS):
            raise InvalidArgument(
                f"the plan sets the table option {unknown[0]!r}: only {', '.join(sorted(PLANNED_OPTIONS))} are allowed"
            )
        if (size := len(dumps(options))) > MAX_CHUNK_BYTES:
            raise InvalidArgument(f"the plan's table options have {size} bytes: at most {MAX_CHUNK_BYTES} are allowed")
        beside = sorted({other.table.name for p in partitions for other in p.beside})
        self._env.refuse_unserved(self._message["op"], self._message["type"], beside)
        answer = {"count": len(partitions), "version": planned.version, "spilled": spilled, "options": options}
        if planned.removes_table and not behavior.removes_table:
            raise InvalidArgument(f"{behavior.type_name} does not declare removes_table, so its plan removes no table")
        return {**answer, "beside": beside, "removes_table": planned.removes_table}

    def _planned(self, behavior: Behavior, arg: Any, ctx: ChildContext) -> tuple[Planned, list[PartitionPlan]]:
        """The plan, and its jobs with long lists of files in the shared directory."""
        assert self._table is not None
        planned = behavior.partitions(self._table, arg, ctx)
        partitions = select(behavior.jobs(arg, planned.partitions, self._message["names"], ctx), None)
        return planned, shared_files.spill(partitions, ctx.shared, ctx.operation)

    def _while_busy(self, behavior: Behavior, ctx: ChildContext, work: Callable[[], T]) -> T:
        def repeats(error: Exception) -> bool:
            return is_busy(error) and not is_fatal(behavior, error, self._env.log)

        return repeated_while_busy(lambda _: work(), StoreWaits(self._check, ctx.waiting, ctx.log), repeats=repeats)

    def _other_table(self, name: str) -> TableRecord:
        self._check()
        question = child_messages.TableMessage(t="table", call=self.number, name=name, seq=0)
        found = self._env.outbox.ask(question, ANSWER_SECONDS)
        self._env.refuse_unserved(self._message["op"], self._message["type"], (name,))
        if found is None:
            raise InvalidArgument(f"there is no table {name!r}: register it with `distop table add`")
        return TableRecord.from_json(found)

    def _all_tables(self) -> list[TableRecord]:
        self._check()
        question = child_messages.FetchMessage(t="fetch", call=self.number, start=0, seq=0, tables=True)
        _, rows = self._env.outbox.ask(question, ANSWER_SECONDS)
        return [TableRecord.from_json(row) for row in rows]

    def _complete(self, behavior: Behavior, arg: Any) -> Any:
        message = self._message
        plan = message.get("plan") or child_messages.PlanOutline(version="", whole=False, chunks=0)
        ctx = self._context(call=self.number, follow_ups=self._follow_ups, registrations=self._registrations)
        summary = Summary(
            *(message["verdict"], message["total"], message["success"], message["failed"], self._rows),
            version=plan["version"],
            whole=plan["whole"],
            plan=lambda: self._partitions(plan["chunks"], ctx),
        )
        failure: str | None = None

        def complete() -> Any:
            self._follow_ups.clear()
            self._registrations.clear()
            return behavior.complete_operation(arg, self._table, summary, ctx)

        try:
            report = self._while_busy(behavior, ctx, complete)
        except OperationFailed as error:
            # The text becomes part of a value, and the outbox redacts no values.
            report, failure = error.report, secret_settings.redact(message_of(error)) or "the operation failed"
        if report is not None:
            report = validate_result(behavior.Report, report, "the report")
        try:
            tables = {"registrations": self._registrations} if self._registrations else {}
            encoded = dump({"report": to_json_value(report), "follow_ups": self._follow_ups, **tables})
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidArgument(f"the report cannot be stored as JSON: {error}") from error
        if len(encoded) > child_messages.MAX_REPORT_BYTES:
            raise InvalidArgument(
                f"the report has {len(encoded)} bytes: at most {child_messages.MAX_REPORT_BYTES} are allowed; put "
                "large data into a file and name the file in the report"
            )
        swept = self._remove_unnamed_stages()
        removed = {"swept": (swept.stages, swept.bytes)} if swept.stages else {}
        return {**json.loads(encoded), "failure": failure, **removed}

    def _rows(self) -> Iterator[OutcomeRow]:
        start: int | None = 0
        where = self._shared()
        while start is not None:
            self._check()
            if start == 0 and "following" in self._message:
                start, rows = self._message["following"], self._items
            else:
                question = child_messages.FetchMessage(t="fetch", call=self.number, start=start, seq=0)
                start, rows = self._env.outbox.ask(question, ANSWER_SECONDS)
            for row in rows:
                outcome = row["outcome"] or {}
                name = outcome.get("name") or str(row["partition"])
                recorded = (outcome.get("fence"), outcome.get("incarnation"))
                attempt = Attempt.of_outcome(self._message["op"], row["partition"], *recorded)
                if attempt is not None and row["success"]:
                    self._named[attempt.partition] = attempt.fence, attempt.incarnation
                result = resolve(outcome.get("result"), where, attempt)
                stage = stage_of(where, attempt) if where is not None and attempt is not None else None
                error, by_executor = outcome.get("error") or "", attempt is not None
                yield OutcomeRow(row["partition"], name, row["success"], result, error, stage, by_executor)
        self._all_read = True

    def _partitions(self, chunks: int, ctx: ChildContext) -> Iterator[PartitionPlan]:
        start: int | None = 0 if chunks else None
        while start is not None:
            self._check()
            question = child_messages.FetchMessage(t="fetch", call=self.number, start=start, seq=0, plan=True)
            start, rows = self._env.outbox.ask(question, ANSWER_SECONDS)
            for row in rows:
                partition = PartitionPlan.from_json(row)
                beside = [other.table for other in partition.beside]
                self._env.refuse_unserved(self._message["op"], self._message["type"], beside)
                yield ctx.with_files(partition)

    def _cleanup(self, behavior: Behavior, arg: Any) -> None:
        """Clean up after all jobs, even if some cleanups fail. Raises the first error."""
        if not cleans_up(type(behavior)):
            return  # do not query a catalog or start Spark for nothing
        first_error: Exception | None = None
        for data, attempt, fence, progress in self._items:
            partition = PartitionPlan.from_json(data)
            ctx = self._context(
                partition=partition,
                attempt=attempt,
                fence=fence,
                incarnation=self._message["incarnation"],
                checkpoint=progress,
            )
            ctx.superseded = self._message.get("superseded", False)
            try:
                partition = ctx.partition = ctx.with_files(partition)
                behavior.cancel_job_and_cleanup(arg, partition, ctx)
            except Exception as error:
                if isinstance(error, SparkDied | JobCancelled):
                    raise
                first_error = first_error or error
        if first_error is not None:
            raise first_error
