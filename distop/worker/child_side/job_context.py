"""The context that a behavior gets in the child (:class:`JobContext`)."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from distop.behavior import NO_SHARED_DIRECTORY, JobContext
from distop.errors import InvalidArgument
from distop.protocol import trace_context
from distop.protocol.json_codec import rfc3339
from distop.runtime import secret_settings
from distop.storage.files import local_path
from distop.storage.places import Attempt, Stages, operation_path, shared_of, stage_of
from distop.worker import child_messages
from distop.worker.child_side.checkpoints import JobProgress, NoProgress
from distop.worker.child_side.context_arguments import ended_operation, follow_up, status_text, table_name
from distop.worker.child_side.job_status import STARTING_SPARK, JobStatus
from distop.worker.child_side.job_work import JobWork
from distop.worker.child_side.outbox import ANSWER_SECONDS
from distop.worker.child_side.shared_files import with_files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from pyspark.sql import SparkSession

    from distop.behavior import PartitionPlan, TableRecord
    from distop.protocol.work_done import WorkDone
    from distop.storage.deletion import Place
    from distop.worker.child_side.environment import Environment

MAX_STATUS = 500
"""Maximum characters of a status text; longer texts are truncated."""


@dataclass(frozen=True, slots=True)
class JobScope:
    """What a context is about: one job, one batch, or one call of an operation.

    ``run``: the number of the run, 0 for a call. ``call``: the number of a planning or completion, else 0. ``fence``:
    the fence of the job's claim; ``fences``: those of a batch, by partition. ``opened``: the mod revision of the
    operation's gate. ``checkpoint``: of an earlier attempt. ``may_stage``: the type declares staged output. ``tag``:
    the Spark tag, if it is not the job's own. ``trace``: a traceparent, and whether it is that of the operation, whose
    attempts have spans. ``cancelled``: whether a partition is cancelled, or with None all.
    """

    operation: str
    table: TableRecord | None
    _: KW_ONLY
    run: int = 0
    call: int = 0
    partition: PartitionPlan | None = None
    attempt: int = 1
    fence: int = 0
    fences: Mapping[int, int] | None = None
    incarnation: str = ""
    opened: int = 0
    checkpoint: Any = None
    may_stage: bool = True
    tag: str = ""
    trace: tuple[str, bool] = ("", False)
    stages: Stages = field(default_factory=Stages)
    cancelled: Callable[[int | None], bool] = lambda _: False
    follow_ups: list[Mapping[str, Any]] | None = None
    registrations: list[Mapping[str, Any]] | None = None
    find_table: Callable[[str], TableRecord] | None = None
    list_tables: Callable[[], Sequence[TableRecord]] | None = None


class ChildContext(JobContext):
    """The JobContext of one job, one batch, or one call in the child."""

    def __init__(self, env: Environment, scope: JobScope) -> None:
        self._env = env
        self._scope = scope
        self._status = JobStatus(self._send_status)
        self._work = JobWork(self._send_work)
        self.operation = scope.operation
        self.table = scope.table
        self.partition = scope.partition
        self.attempt = scope.attempt
        self.call = ""
        """The name of the child's call, "" for a run."""

    @property
    def tag(self) -> str:
        """The Spark tag of this job: operation, job and attempt, without commas; or the given one."""
        if self._scope.tag:
            return self._scope.tag
        job = f"{self.partition.partition:06d}" if self.partition is not None else f"run{self._scope.run}"
        return f"{self.operation}-{self.call or job}-{self.attempt}".replace(",", "%2C")

    @property
    def traceparent(self) -> str:
        text, traced = self._scope.trace
        operation = trace_context.parse(text) if traced else None
        if operation is None or self.partition is None:
            return text
        return str(operation.span("run", self.partition.partition, self.attempt))

    @property
    def spark(self) -> SparkSession:
        name = f" {self.partition.name}" if self.partition is not None else ""
        with contextlib.nullcontext() if self._env.spark.started else self.waiting(STARTING_SPARK):
            return self._env.spark.session(self.operation, self.tag, f"{self.operation}{name}")

    def with_files(self, partition: PartitionPlan) -> PartitionPlan:
        """A partition of the plan with its checked file lists. Raises the errors of ``shared_files.with_files``."""
        return with_files(partition, self.shared, self.operation, self.table, self._check_files)

    def _check_files(self, table: TableRecord, paths: Sequence[str]) -> None:
        """Raises InvalidArgument for files of a plan that do not belong to the table, and the catalog's errors."""
        from distop.tables import folders_of  # imported late: few processes read data

        def folders(elsewhere: bool) -> tuple[str, ...]:
            return folders_of(table, self.check_cancelled, lambda: self.spark, elsewhere=elsewhere)

        # The name is not unique: an operation may be written by hand under a used number.
        instance = f"gate{self._scope.opened}" if self._scope.opened else self.call or f"run{self._scope.run}"
        self._env.table_folders.check((self.operation, instance), table, paths, folders, self.check_cancelled)

    @property
    def cancelled(self) -> bool:
        return self._scope.cancelled(self.partition.partition if self.partition is not None else None)

    def is_cancelled(self, partition: PartitionPlan) -> bool:
        return self._scope.cancelled(partition.partition)

    def other_table(self, name: str) -> TableRecord:
        find = self._scope.find_table
        return find(table_name(name)) if find is not None else super().other_table(name)

    def registered_tables(self) -> Sequence[TableRecord]:
        known = self._scope.list_tables
        return known() if known is not None else super().registered_tables()

    def history_record(self, op: str) -> Mapping[str, Any]:
        question = child_messages.HistoryMessage(t="history", op=ended_operation(op), seq=0)
        answer = self._env.outbox.ask(question, ANSWER_SECONDS)
        if "refused" in answer:
            raise InvalidArgument(answer["refused"])
        found: Mapping[str, Any] = answer["record"]
        return found

    def status(self, text: str) -> None:
        self._status.report(status_text(text))

    def waiting(self, text: str) -> AbstractContextManager[None]:
        """Show what the job waits for, instead of its own status, which is shown again afterwards."""
        return self._status.waiting(status_text(text))

    def send_held_status(self) -> None:
        """Send the status and the work that the rate limits held back, if there are any."""
        self._status.send_held()
        self._work.send_held()

    def _report_work(self, done: WorkDone) -> None:
        self._work.report(done)

    def _send_work(self, done: WorkDone) -> None:
        message = child_messages.WorkMessage(t="work", work=done.to_json())
        self._send_of_scope(message)

    def _send_of_scope(self, message: child_messages.WorkMessage | child_messages.StatusMessage) -> None:
        """Send a message of the current job or call. A cleanup reports neither work nor status."""
        if self._scope.run:
            message["run"] = self._scope.run
            message["partition"] = self.partition.partition if self.partition is not None else -1
        elif self._scope.call:
            message["call"] = self._scope.call
        else:
            return
        self._env.outbox.send(message)

    def _send_status(self, text: str) -> None:
        line = secret_settings.redact(text)[:MAX_STATUS].encode(errors="replace").decode()
        message = child_messages.StatusMessage(t="status", text=line)
        self._send_of_scope(message)

    @cached_property
    def shared(self) -> Place | None:  # type: ignore[override]
        return shared_of(self._env.shared_dir, self._env.space, self.table)

    @property
    def space(self) -> str:  # type: ignore[override]
        return self._env.space

    @cached_property
    def shared_dir(self) -> str:  # type: ignore[override]
        return self.shared.location if self.shared is not None else ""

    @cached_property
    def work_dir(self) -> Path:  # type: ignore[override]
        path = self._env.work_dir / "ops" / operation_path(self.operation)
        path.mkdir(parents=True, exist_ok=True)
        return path

    @cached_property
    def progress(self) -> JobProgress | NoProgress:  # type: ignore[override]
        if self.partition is None or not self._scope.run:
            return NoProgress(self._scope.checkpoint)
        return JobProgress(self._env.outbox, self._scope.run, self.partition.partition, self._scope.checkpoint)

    @cached_property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:  # type: ignore[override]
        fields = {"operation": self.operation, "attempt": self.attempt}
        if self.partition is not None:
            fields["partition"] = self.partition.name
        return logging.LoggerAdapter(self._env.log, fields)

    @property
    def stage(self) -> str:
        """The folder for this attempt's output, created on first use; the outcome publishes it.

        Raises InvalidArgument without a shared directory, and in a batch.
        """
        if self.partition is None:
            raise InvalidArgument("a batch has one stage for each partition: use stage_of(partition)")
        return self.stage_of(self.partition)

    def stage_of(self, partition: PartitionPlan) -> str:
        """The stage of one partition of a batch."""
        self.check_stages()
        place = self.stage_place_of(partition)
        # A cleanup, which is a call, uses the existing stage of its attempt.
        self._scope.stages.make(place, again=self.again or not self._scope.run)
        return str(local_path(place.location) or place.location)

    @property
    def stage_place(self) -> Place:
        if self.partition is None:
            raise InvalidArgument("a batch has one stage for each partition, so it has no stage_place")
        return self.stage_place_of(self.partition)

    def check_stages(self) -> None:
        if not self._scope.may_stage:
            raise InvalidArgument(
                f"the type of {self.operation} declares no staged output: set staged_output to 'remove' or 'keep' in "
                "its class"
            )

    def stage_place_of(self, partition: PartitionPlan) -> Place:
        if self.shared is None:
            raise InvalidArgument(NO_SHARED_DIRECTORY)
        scope, number = self._scope, partition.partition
        fence = scope.fence if scope.fences is None else scope.fences[number]
        return stage_of(self.shared, Attempt(self.operation, number, fence, scope.incarnation))

    def start_operation(
        self,
        type_name: str,
        table: str,
        arg: Any = None,
        *,
        partitions: Sequence[str] | None = None,
        delay: float | None = None,
    ) -> None:
        if self._scope.follow_ups is None:
            super().start_operation(type_name, table, arg, partitions=partitions, delay=delay)
            return
        asked = follow_up(self.operation, type_name, table, arg, partitions, delay)
        due = {"not_before": rfc3339(time.time() + asked.delay)} if asked.delay else {}
        self._scope.follow_ups.append({**asked.to_json(), **due})

    def register_table(self, record: TableRecord) -> None:
        if self._scope.registrations is None:
            super().register_table(record)
            return
        name = table_name(record.name)
        self._env.refuse_unserved(self.operation, None, (name,))
        self._scope.registrations.append(record.to_json())
