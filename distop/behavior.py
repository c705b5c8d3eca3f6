"""The interface for authors of operation types.

Behavior, JobContext, and the registry.

A behavior implements one operation type. Its class attributes declare it; executors publish the declaration, so that
a client can check a start without the behavior's code. Its methods run in an executor's child process, never in the
daemon or in a client. The entry points of the group ``distop.behaviors`` name the installed behaviors (I44, C19).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from distop.errors import (
    FatalError,
    InvalidArgument,
    JobCancelled,
    JobFailed,
    OperationFailed,
    TableUnavailable,
    UnknownBehavior,
    UsageError,
)
from distop.protocol.behavior_declaration import ALL_TYPES, STAGED_OUTPUTS, Declaration, Retry, check_time_limit
from distop.protocol.identity import RULES
from distop.protocol.keys import check_type_name
from distop.protocol.plan import WIDE, PartitionPlan, Pinned, Planned, is_wide, over, pinned, select
from distop.protocol.records import TableRecord
from distop.protocol.texts import did_you_mean
from distop.protocol.work_done import WorkDone, checked_work
from distop.schemas.argument_schema import out_of_order
from distop.schemas.schema_bounds import BadSchema, check_schema

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from pydantic import BaseModel
    from pyspark.sql import DataFrame, SparkSession

    from distop.storage.deletion import Place
    from distop.storage.stage_manifest import Manifest, StagedFile, StagedOutput
    from distop.tables.reader import Reader

__all__ = [
    "WIDE",
    "Behavior",
    "FatalError",
    "JobCancelled",
    "JobContext",
    "JobFailed",
    "Manifest",
    "OperationFailed",
    "OutcomeRow",
    "PartitionPlan",
    "Pinned",
    "Planned",
    "Progress",
    "Retry",
    "StagedFile",
    "StagedOutput",
    "Summary",
    "TableRecord",
    "TableUnavailable",
    "WorkDone",
    "is_wide",
    "load",
    "out_of_order",
    "over",
    "pinned",
    "registered",
    "select",
]

ENTRY_POINTS = "distop.behaviors"
NO_SHARED_DIRECTORY = "staged output needs a shared directory: start the executors with --shared-dir"


def __getattr__(name: str) -> Any:
    """The models of staged output, imported on first use: daemons load this module, but not pydantic."""
    if name in ("Manifest", "StagedFile", "StagedOutput"):
        from distop.storage import stage_manifest

        return getattr(stage_manifest, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass(frozen=True, slots=True)
class OutcomeRow:
    """The outcome of one job, as ``complete_operation`` reads it."""

    partition: int
    name: str
    success: bool
    result: Any
    error: str
    stage: Place | None = None
    """The stage of the attempt that reported this outcome (its fence names it). None if an actor returned the job
    (``Client.return_job``): an actor has no stage to publish from.
    """
    by_executor: bool = True
    """True if an executor ran the job; False if an actor returned it (``Client.return_job``)."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The verdict and the job counts of an operation, with its outcomes and plan.

    Outcomes and plan are read lazily in pages.

    ``version``: the version of the table that was planned. ``whole``: True if the start named no partitions, so that
    the plan holds everything the behavior planned.
    """

    verdict: Literal["success", "failed", "cancelled"]
    total: int
    success: int
    failed: int
    rows: Callable[[], Iterator[OutcomeRow]] = field(repr=False, default=lambda: iter(()))
    version: str = ""
    whole: bool = False
    plan: Callable[[], Iterator[PartitionPlan]] = field(repr=False, default=lambda: iter(()))

    def outcomes(self) -> Iterator[OutcomeRow]:
        """The outcomes in the order of the plan. A cancelled job has no outcome."""
        return self.rows()

    def partitions(self) -> Iterator[PartitionPlan]:
        """The partitions of the plan, in order, with their files.

        Empty if planning has failed.
        """
        return self.plan()


class Progress(ABC):
    """The checkpoint of a resumable job: fenced and rate-limited.

    Save it after the output that it describes.
    """

    @abstractmethod
    def load(self) -> Any:
        """The last checkpoint that an attempt of this job has saved, or None."""

    @abstractmethod
    def save(self, value: Any, *, force: bool = False) -> bool:
        """Save a JSON value (at most 64 KiB). Returns False if the rate limit skipped it.

        ``force``: ignore the rate limit.
        """


class JobContext(ABC):
    """What a behavior's method may use while it runs. Do not keep it after the call."""

    partition: PartitionPlan | None
    """The partition of the job. None in a batch, in planning and in completion."""
    attempt: int
    """The number of the attempt: 1 at first, one more with each claim of the job."""
    operation: str
    """``table/type[/object]/instance``."""
    table: TableRecord | None
    work_dir: Path
    """A private directory on this node for this operation. The executor empties it after the operation has ended."""
    shared_dir: str
    """A path or URL that every node can reach, for data that is too large for etcd. Only this namespace uses it."""
    shared: Place | None
    """``shared_dir`` as a place, for :func:`distop.storage.opened_stores.store_of`. None if there is none."""
    space: str
    """An identifier of this namespace in this etcd, for names in a folder that several namespaces write into."""
    log: logging.LoggerAdapter[logging.Logger]
    progress: Progress
    again: bool = False
    """True if an earlier run of this job (in a batch: of one of its jobs) was interrupted. A file that it read may have
    crashed the process.
    """
    superseded: bool = False
    """In a cleanup: True if the attempt was interrupted a while ago, so that another executor may run the job now, or
    may have ended it. Remove only what this attempt left on this node and in its own ``stage``, and nothing that
    another attempt also writes.
    """

    @property
    def traceparent(self) -> str:
        """The trace context (W3C) of this attempt, for calls of other services; "" if there is none.

        If the executor exports no traces, it is that of the operation's caller. It is the current span of OpenTelemetry
        while a job runs, if the behavior's modules have loaded OpenTelemetry.
        """
        return ""

    @property
    def stage(self) -> str:
        """The directory for the output of this attempt, created on first use.

        The attempt's fencing token is part of its name. Readers see only what the published outcome names. Files of an
        attempt whose outcome was not published are garbage, which executors remove.
        """
        raise NotImplementedError("stage is available in a job only")

    @property
    def stage_place(self) -> Place:
        """The stage as a place, for :func:`distop.storage.opened_stores.store_of`.

        Does not create the directory.
        """
        raise NotImplementedError("stage_place is available in a job only")

    def stage_of(self, partition: PartitionPlan) -> str:
        """In a batch: the stage of one of its partitions, created on first use."""
        return self.stage

    def stage_place_of(self, partition: PartitionPlan) -> Place:
        """In a batch: the stage of one of its partitions as a place. Does not create the directory."""
        return self.stage_place

    def completion_stage(self) -> Place:
        """In completion: create a new stage, for output that no job has written.

        Raises InvalidArgument without a shared directory, and the errors of a stage.
        """
        from distop.storage import places

        self.check_stages()
        if self.shared is None:
            raise InvalidArgument(NO_SHARED_DIRECTORY)
        place = places.completion_stage(self.shared, self.operation)
        places.make_stage(place)
        return place

    def check_stages(self) -> None:
        """Raise InvalidArgument if the operation type declares no staged output (``Behavior.staged_output``)."""

    def table_data(self, stage: Place) -> Place:
        """The folder for those files of a stage that are already at their final place, below the table.

        ``stage``: a place of ``stage_place``, ``completion_stage`` or ``OutcomeRow.stage``. Does not create it: see
        :meth:`make_table_data`. Raises InvalidArgument if the operation has no table or no shared directory, UnsafePath
        if the place is no stage, and the errors of planning for a table whose catalog cannot be reached.
        """
        from distop.storage import places
        from distop.tables import place_of

        if self.table is None or self.shared is None:
            raise InvalidArgument("staged files in a table need a table and a shared directory")
        if "_table_folder" not in self.__dict__:  # a catalog is asked once
            self.__dict__["_table_folder"] = place_of(self.table, self.check_cancelled, lambda: self.spark).rstrip("/")
        return places.table_data(stage, self.shared, self.space, self.__dict__["_table_folder"])

    def make_table_data(self, stage: Place) -> Place:
        """Create the folder of :meth:`table_data`, and return it. The stage must exist.

        Write new data files of the table there, and publish them by a commit of the table: nothing is moved. Files
        that the table does not name are removed together with the stage. Raises the errors of :meth:`table_data`,
        FileExistsError if something is there, and UnsafePath if other users may change the folder.
        """
        from distop.storage import places

        self.check_stages()
        data = self.table_data(stage)
        places.make_table_data(stage, data)
        return data

    def keep_table_data(self, stage: Place) -> None:
        """Keep the files of a stage in the table when the stage is removed: the table names them now.

        Call it in completion after the table's commit, if that is known to have succeeded. Otherwise all versions of
        the table are read later, to find out. Raises OSError.
        """
        from distop.storage import places

        places.keep_table_data(stage)

    def manifest(
        self,
        files: Mapping[str, int | None] | Iterable[str] = (),
        *,
        partition: PartitionPlan | None = None,
        in_table: Mapping[str, int | None] | Iterable[str] = (),
        checksums: bool = True,
    ) -> StagedOutput:
        """Write the manifest of the stage; return it in the job's result, whose outcome commits the files.

        ``files``: the paths of closed files below the stage, perhaps with their numbers of rows; ``in_table``: those
        below :meth:`table_data`. ``partition``: in a batch, whose stage. ``checksums``: False: files of over 8 MiB
        are not read again; of these, only size and, in an object store, version are kept. Completion reads it by
        :meth:`staged`. Raises InvalidArgument for a missing file, UnsafePath, and OSError.
        """
        from distop.storage.stage_manifest import write_manifest

        which = partition if partition is not None else self.partition
        if which is None:
            raise InvalidArgument("a batch has one manifest for each partition: give manifest(…, partition=…)")
        self.stage_of(which)
        stage, below = self.stage_place_of(which), _with_rows(in_table)
        data = self.table_data(stage) if below else None
        return write_manifest(stage, _with_rows(files), data=data, in_table=below, checksums=checksums)

    def staged(self, outcome: OutcomeRow, output: StagedOutput) -> Manifest:
        """In completion: the staged files of a job. ``output``: in its result.

        The manifest must be in the own stage of the outcome's attempt, and have the committed digest; check each file
        with ``Manifest.check``. Raises InvalidArgument if an actor returned the job, NotFound if the manifest is
        missing, UnreadableRecord if it is another one, UnsafePath if other users may have written it, and OSError.
        """
        from distop.storage.stage_manifest import read_manifest

        stage = outcome.stage
        data = self.table_data(stage) if stage is not None and self.table is not None and self.shared else None
        return read_manifest(stage, output, data)

    @property
    @abstractmethod
    def spark(self) -> SparkSession:
        """The Spark session of the child process, started on first use."""

    @property
    @abstractmethod
    def cancelled(self) -> bool:
        """True if the job must stop.

        It is cancelled or paused at once, or its executor drains.
        """

    def check_cancelled(self) -> None:
        """Raise JobCancelled if the job must stop."""
        if self.cancelled:
            raise JobCancelled("the job was asked to stop")

    def is_cancelled(self, partition: PartitionPlan) -> bool:
        """In a batch: True if this partition must stop. The others may continue."""
        return self.cancelled

    def reader(self, partition: PartitionPlan | Pinned) -> Reader:
        """A reader of the files of a partition or of a pinned table, of any format.

        It gives the statistics of each file (counts, bounds), its rows in Spark with file and position, and an
        explanation of errors. A pinned table is another table that the plan names (``PartitionPlan.beside``). Raises
        InvalidArgument if the operation has no table, or if the partition is not one of it.
        """
        from distop.tables import reader_of

        table = partition.table if isinstance(partition, Pinned) else self.table
        if table is None:
            raise InvalidArgument("the operation has no table, so there are no files to read: start it on a table")
        return reader_of(table, [partition])

    def rows(self, partition: PartitionPlan | Pinned) -> DataFrame:
        """The rows of a partition or of a pinned table: all columns, without deleted rows.

        Raises ``distop.tables.reading.file_facts.Unreadable`` if a file differs from the plan, InvalidArgument as
        :meth:`reader` does, and what Spark raises.
        """
        return self.reader(partition).all_rows(self.spark, partition.files)

    def check_reachable(self) -> None:
        """Raise TableUnavailable if this node sees nothing of the table.

        A missing file then says nothing about the table, and another node may be able to run the job.
        """
        from distop.tables import check_reachable

        if self.table is not None:
            check_reachable(self.table, lambda: self.spark)

    def other_table(self, name: str) -> TableRecord:
        """In planning: the record of another table, as it is registered now.

        Raises InvalidArgument if no table has this name, and outside planning: a job reads the tables that its plan
        has pinned (``PartitionPlan.beside``).
        """
        raise InvalidArgument("other_table is available in planning only")

    def registered_tables(self) -> Sequence[TableRecord]:
        """In planning: the records of all tables as they are registered now, with that of the operation.

        Raises InvalidArgument outside planning.
        """
        raise InvalidArgument("registered_tables is available in planning only")

    def history_record(self, op: str) -> Mapping[str, Any]:
        """The history record of an operation that has ended, as JSON (docs/contract.md).

        The executor reads it from etcd and checks its signature if it has a key. So an argument can name an operation
        instead of carrying its result, which anybody could forge. Raises InvalidArgument if there is no record, if
        the executor does not accept it, or if ``op`` is not the name of an operation.
        """
        raise InvalidArgument(f"there is no history record of {op} here")

    @abstractmethod
    def status(self, text: str) -> None:
        """Publish one line for people: what the job does now. Raises InvalidArgument if it is not a text."""

    def work_done(
        self,
        *,
        files: int = 0,
        bytes: int = 0,  # noqa: A002 -- as the field of WorkDone
        of_files: int = 0,
        of_bytes: int = 0,
        commits: int = 0,
        committed_files: int = 0,
        committed_bytes: int = 0,
    ) -> None:
        """Publish how much of its work this job, planning or completion has done, for people.

        All numbers are sums since the start of the job, not additions. ``of_files`` and ``of_bytes``: of how many; 0: a
        job has those of its plan, a planning or completion does not know them. ``committed_files`` and
        ``committed_bytes``: how much stays if the operation is cancelled now; ``commits``: commits of the table.

        Call it as often as you like: there is a rate limit. Results and reports may keep the numbers in a field
        ``work`` (:class:`distop.behavior.WorkDone`). Raises InvalidArgument for a negative number.
        """
        numbers = {"files": files, "bytes": bytes, "of_files": of_files, "of_bytes": of_bytes}
        committed = {"commits": commits, "committed_files": committed_files, "committed_bytes": committed_bytes}
        self._report_work(checked_work({**numbers, **committed}))

    def _report_work(self, done: WorkDone) -> None:
        """Publish what :meth:`work_done` has checked; a context without a daemon does nothing."""

    def start_operation(
        self,
        type_name: str,
        table: str,
        arg: Any = None,
        *,
        partitions: Sequence[str] | None = None,
        delay: float | None = None,
    ) -> None:
        """In completion: start another operation on the table after this one.

        It starts exactly once, even if processes crash. Raises InvalidArgument outside completion, for another table,
        and for values that a start does not accept.

        If the start is refused (a conflicting operation runs, or the type runs one at a time), the coordinator retries
        it for ten minutes. After that, and if the type, the table or the argument is wrong, the coordinator logs an
        error and does not start it.
        """
        raise InvalidArgument("start_operation is available in complete_operation only")

    def register_table(self, record: TableRecord) -> None:
        """In completion: register a new table, which this operation has written, before the operation ends.

        It is registered once, even if processes crash. A table that is registered with an equal record stays so; with
        another record, the completion fails. Raises InvalidArgument outside completion, and for an invalid record.
        """
        raise InvalidArgument("register_table is available in complete_operation only")


def _with_rows(files: Mapping[str, int | None] | Iterable[str]) -> dict[str, int | None]:
    """Files with their rows, None for unknown ones."""
    return dict(files) if isinstance(files, Mapping) else dict.fromkeys(files)


class Behavior(ABC):
    """One operation type. docs/how-to/write-a-behavior.md has a whole example."""

    type_name: ClassVar[str]
    """The name of the operation type, as starts and keys in etcd have it."""
    Arg: ClassVar[type[BaseModel]]
    """The pydantic model of the argument of a start."""
    Result: ClassVar[type[BaseModel] | None] = None
    """The model of a job's result, also as the result of JobFailed: return an instance, or a value that fits it.
    None: any JSON value.
    """
    Report: ClassVar[type[BaseModel] | None] = None
    """The model of the report of complete_operation and OperationFailed, which may also be None. None: any JSON value.
    """
    needs_table: ClassVar[bool] = False
    """True: a start on ``@cluster`` is refused."""
    object_field: ClassVar[str | None] = None
    """The field of Arg whose value names the object in the table that the operation works on, such as a column."""
    instances: ClassVar[Literal["many", "one"]] = "many"
    """``one``: at most one operation of this type runs on a table, or on each object of it, at a time."""
    conflicts_with: ClassVar[Sequence[str]] = ()
    """Operation types that must not run on a table while this one runs on it, in both directions. ``*``: all types."""
    removes_table: ClassVar[bool] = False
    """True: a plan may remove the table's record (``Planned.removes_table``).

    It goes in the transaction that makes the plan durable, if nobody has changed it since the start. Jobs and
    completion then work with the record that was removed. No other operation runs on the table meanwhile. A cancelled
    or failed operation does not register the table again.
    """
    can_fail: ClassVar[bool] = True
    """False: a job is retried until it succeeds."""
    retry: ClassVar[Retry] = Retry()
    """How often, and with which back-off, an unexpected error is retried."""
    lost: ClassVar[Literal["retry", "fail"]] = "retry"
    """What happens to a job whose executor was lost: another executor runs it, or it fails."""
    failure_policy: ClassVar[Literal["fail_fast", "collect_all"]] = "fail_fast"
    """After a job has failed: cancel the other jobs, or run all of them."""
    resumable: ClassVar[bool] = False
    """True: a job that has saved a checkpoint continues from it in its next attempt, without a cleanup before."""
    time_limit: ClassVar[float | None] = None
    """Time limit in seconds for one attempt of a job. A job that exceeds it is stopped: an unexpected error. A start
    and the executor's setting ``job-time-limit`` can lower it, but not raise it. None: no limit.
    """
    large_results: ClassVar[Literal["refuse", "file"]] = "refuse"
    """What happens to a job's result that is too large for etcd (63 KiB of JSON). ``refuse``: the job fails with an
    error. ``file``: the result goes to a file below ``shared_dir``; the outcome holds the file's name, size and
    checksum, and completion code and ``Operation.results()`` read the file. It is removed together with the history
    record of the operation.
    """
    staged_output: ClassVar[Literal["refuse", "remove", "keep"]] = "refuse"
    """What happens to stages (``JobContext.stage``).

    ``refuse``: using one is an error. ``remove``: completion publishes their files elsewhere, and executors remove all
    stages after the operation has ended. ``keep``: users read the stages that outcomes name, until the history record
    of the operation is removed. Executors remove other stages when all jobs have ended (of a resumable type: together
    with the record, because a job may name files of its earlier attempts). Stages of killed executors are removed in
    both cases.
    """
    reports_only: ClassVar[bool] = False
    """True: complete_operation only makes a report (and may start follow-ups); its result can be thrown away.

    It then runs as soon as all jobs have ended, before the verdict is stored, which saves a round trip to etcd. If the
    operation is cancelled, or an attempt of the completion has failed, it runs after the verdict is stored, as for
    other behaviors.
    """

    joins: ClassVar[bool] = False
    """True: an operation that waits for other operations has no job, and ends when the last of them ends."""
    id_fields: ClassVar[Sequence[str] | None] = None
    """The fields of Arg that identify an operation, together with its type and table (P16).

    Only one operation with the same identity runs at a time; a second start joins it. ``()``: type and table are the
    identity. None: each start is an operation of its own.
    """
    combine: ClassVar[Mapping[str, Literal["union", "concat", "max", "min", "sum", "last", "first"]]] = {}
    """For each field: how the arguments of two starts with the same identity become one (``on_duplicate="combine"``).
    Fields without a rule must be equal.
    """

    def partitions(self, table: TableRecord, arg: Any, ctx: JobContext) -> Planned:
        """Plan the operation: fix the partitions and files it works on.

        Default: all partitions of the table.

        Not called on ``@cluster``, where an operation has one job. Raise InvalidArgument for an error that no retry
        can resolve: the operation fails at once with this message. Raise TableUnavailable if this node cannot reach
        the table: another node, or a later attempt, plans the operation.
        """
        from distop.tables import plan_table

        return plan_table(table, ctx.check_cancelled, lambda: ctx.spark)

    def jobs(
        self, arg: Any, partitions: Sequence[PartitionPlan], names: Sequence[str] | None, ctx: JobContext
    ) -> Sequence[PartitionPlan]:
        """Choose the operation's jobs from the planned ``partitions``.

        Default: one job for each partition.

        ``names``: the partitions that a start or a rerun asks for; None: all of them.

        A job may cover several partitions. Its name starts with ``@``, which no partition's name does; it has the files
        of all its partitions, and in ``beside`` the other tables it reads. A rerun asks for it by that name. Raise
        InvalidArgument for unknown names.
        """
        return select(partitions, names)

    @abstractmethod
    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        """Run the job of one partition and return its Result.

        Without a declared model, the result may be any JSON value. Raise JobFailed if the job has found that it must
        fail: it is not retried. Any other exception is an unexpected error and is retried. It must be idempotent: while
        an object store is busy, it is called again within the attempt.
        """

    def cancel_job_and_cleanup(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> None:
        """Remove the files of an attempt that will not be published.

        Must be idempotent (I16, I29, I36).

        Called after JobFailed, before a further attempt starts, and after a job was stopped. Not called for a resumable
        job that continues from its checkpoint.
        """

    def is_fatal(self, error: BaseException) -> bool:
        """True if no retry can resolve this error of the behavior's code.

        Override it to classify errors of the libraries you use. Call ``super().is_fatal(error)`` for all others: it
        knows distop's own error classes.
        """
        return isinstance(error, FatalError | UsageError)

    def complete_operation(self, arg: Any, table: TableRecord | None, summary: Summary, ctx: JobContext) -> Any:
        """Complete the operation after all jobs have ended, and return its report.

        It may run again after a crash or while an object store is busy, so it must be idempotent (I37). The report fits
        Report if that is declared. Raise OperationFailed(message, report) to fail the operation.
        """
        return None

    # A behavior may define run_batch(self, arg, partitions, ctx) -> Iterable[(PartitionPlan, result | Exception)]:
    # one Spark job then serves many jobs, and each pair is reported as soon as it is yielded. An exception object in
    # a pair has the same effect as raising it in start_or_resume_job for that partition. If the generator raises, the
    # executor splits the batch and runs the parts, until the failing partition is alone.
    run_batch: ClassVar[Callable[..., Iterable[tuple[PartitionPlan, Any]]] | None] = None

    @classmethod
    def declaration(cls) -> Declaration:
        """The declaration that executors publish.

        Raises InvalidArgument if class attributes are wrong.
        """
        name = getattr(cls, "type_name", "")
        check_type_name(name)
        _check_attributes(name, cls)
        schema, result, report = (_schema(name, cls, what) for what in ("Arg", "Result", "Report"))
        id_fields = _id_fields(name, cls.id_fields, cls.Arg, schema)
        _check_combine(name, cls.combine, id_fields or (), schema)
        completes = cls.complete_operation is not Behavior.complete_operation
        if cls.reports_only and not completes:
            raise InvalidArgument(f"behavior {name}: reports_only is true, so it must define complete_operation")
        # The call of a completion also removes stages that no outcome names.
        completes = completes or cls.staged_output == "keep"
        return Declaration(
            type_name=name,
            arg_schema=schema,
            result_schema=result,
            report_schema=report,
            object_field=cls.object_field,
            instances=cls.instances,
            conflicts_with=(ALL_TYPES,) if cls.removes_table else tuple(cls.conflicts_with),
            can_fail=cls.can_fail,
            retry=cls.retry,
            lost=cls.lost,
            failure_policy=cls.failure_policy,
            resumable=cls.resumable,
            batch=cls.run_batch is not None,
            completes=completes,
            reports_only=cls.reports_only,
            joins=cls.joins,
            cleans=cleans_up(cls),
            description=(cls.__doc__ or "").strip().partition("\n")[0],
            needs_table=cls.needs_table,
            id_fields=id_fields,
            combine=dict(cls.combine),
            time_limit=float(cls.time_limit or 0.0),
            to_file=cls.large_results == "file",
            staged_output=cls.staged_output,
            removes_table=cls.removes_table,
        )


def cleans_up(kind: type[Behavior]) -> bool:
    """True if the behavior overrides ``cancel_job_and_cleanup``."""
    return kind.cancel_job_and_cleanup is not Behavior.cancel_job_and_cleanup


def _schema(name: str, cls: type[Behavior], what: str) -> dict[str, Any]:
    """The JSON schema of a declared model, {} for none. Raises InvalidArgument."""
    model = getattr(cls, what)
    schema: dict[str, Any] = model.model_json_schema() if model is not None else {}
    try:
        check_schema(schema)
    except BadSchema as error:
        raise InvalidArgument(f"behavior {name}: the JSON schema of {what} cannot be published: {error}") from None
    return schema


def _check_attributes(name: str, cls: type[Behavior]) -> None:
    """Raises InvalidArgument if a class attribute has a wrong value."""
    for value, allowed, what in (
        (cls.instances, ("many", "one"), "instances"),
        (cls.lost, ("retry", "fail"), "lost"),
        (cls.failure_policy, ("fail_fast", "collect_all"), "failure_policy"),
        (cls.large_results, ("refuse", "file"), "large_results"),
        (cls.staged_output, STAGED_OUTPUTS, "staged_output"),
    ):
        if value not in allowed:
            raise InvalidArgument(f"behavior {name}: {what} is {value!r}, but must be one of {', '.join(allowed)}")
    for what in ("Arg", "Result", "Report"):
        kind = getattr(cls, what, None)
        if not hasattr(kind, "model_json_schema") and (what == "Arg" or kind is not None):
            raise InvalidArgument(f"behavior {name}: {what} must be a pydantic model")
    if isinstance(cls.conflicts_with, str):
        raise InvalidArgument(
            f"behavior {name}: conflicts_with must be a list of operation types: [{cls.conflicts_with!r}]"
        )
    for other in cls.conflicts_with:
        if other != ALL_TYPES:
            check_type_name(other)
    if cls.removes_table and not cls.needs_table:
        raise InvalidArgument(f"behavior {name}: removes_table is true, so needs_table must be true")
    if cls.retry.attempts < 1:
        raise InvalidArgument(f"behavior {name}: retry.attempts is {cls.retry.attempts}, but must be at least 1")
    if cls.time_limit is not None:
        check_time_limit(cls.time_limit, f"behavior {name}: time_limit")
    if cls.object_field is not None and cls.object_field not in cls.Arg.model_fields:
        raise InvalidArgument(
            f"behavior {name}: object_field {cls.object_field!r} is not a field of Arg"
            + did_you_mean(cls.object_field, cls.Arg.model_fields)
        )
    if not cls.can_fail and cls.lost == "fail":
        raise InvalidArgument(f"behavior {name}: can_fail is false, so lost must be 'retry'")


def _id_fields(
    name: str, fields: Sequence[str] | None, arg: type[BaseModel], schema: Mapping[str, Any]
) -> tuple[str, ...] | None:
    """``id_fields`` after checks. Raises InvalidArgument.

    A client computes the identity from the published schema alone, so the schema must hold each field and its default.
    """
    if fields is None:
        return None
    if isinstance(fields, str):
        raise InvalidArgument(f"behavior {name}: id_fields must be a list of fields: [{fields!r}]")
    for one in fields:
        if one not in arg.model_fields or one not in schema.get("properties", {}):
            hint = did_you_mean(one, arg.model_fields)
            raise InvalidArgument(f"behavior {name}: id_fields names {one!r}, which is not a field of Arg{hint}")
        if arg.model_fields[one].default_factory is not None:
            raise InvalidArgument(
                f"behavior {name}: id_fields names {one!r}, which has a default_factory: give it a constant default, "
                "or no default"
            )
    return tuple(fields)


def _check_combine(name: str, rules: Mapping[str, str], id_fields: Sequence[str], schema: Mapping[str, Any]) -> None:
    """Raises InvalidArgument if ``combine`` is wrong."""
    if not isinstance(rules, dict):
        raise InvalidArgument(f"behavior {name}: combine must map fields to rules, but it is {rules!r}")
    for one, rule in rules.items():
        if one not in schema.get("properties", {}):
            hint = did_you_mean(one, schema.get("properties", {}))
            raise InvalidArgument(f"behavior {name}: combine names {one!r}, which is not a field of Arg{hint}")
        if one in id_fields:
            raise InvalidArgument(
                f"behavior {name}: combine names {one!r}, which is in id_fields: it is equal in both starts, so remove "
                "its rule"
            )
        if rule not in RULES:
            raise InvalidArgument(
                f"behavior {name}: combine has the rule {rule!r} for {one!r}, but it must be one of {', '.join(RULES)}"
            )


def registered() -> Mapping[str, metadata.EntryPoint]:
    """The installed behaviors by type name. Imports none of them."""
    return {ep.name: ep for ep in metadata.entry_points(group=ENTRY_POINTS)}


class Loadable(Protocol):
    """A source of a behavior's class.

    An entry point, or a :class:`distop.behavior_source.BehaviorSource`.
    """

    def load(self) -> Any: ...


def load(type_name: str, installed: Mapping[str, Loadable] | None = None) -> Behavior:
    """Import and create the behavior of this type.

    Raises UnknownBehavior if it is not installed.

    ``installed``: the result of :func:`registered` (which scans all packages at each call), perhaps with more
    behaviors.
    """
    installed = registered() if installed is None else installed
    found = installed.get(type_name)
    if found is None:
        known = did_you_mean(type_name, sorted(installed), "installed")
        raise UnknownBehavior(f"no behavior {type_name!r} is installed here{known}")
    behavior: Behavior = found.load()()
    if behavior.type_name != type_name:
        raise UnknownBehavior(
            f"the entry point {type_name!r} of the group {ENTRY_POINTS!r} loads a behavior whose type_name is "
            f"{behavior.type_name!r}: both names must be equal"
        )
    return behavior
