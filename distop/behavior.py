"""What an author of an operation type meets: :class:`Behavior`, :class:`JobContext`, and the registry.

A behavior is one operation type. It is declared by class attributes (published, so that a start is checked
without its code) and its methods run in an executor's child process, never in the daemon or in a client.
Behaviors are found by entry points of the group ``distop.behaviors`` (I44, C19).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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
from distop.protocol.behavior_declaration import Declaration, Retry, check_time_limit
from distop.protocol.identity import RULES
from distop.protocol.keys import check_type_name
from distop.protocol.plan import WIDE, PartitionPlan, Pinned, Planned, is_wide, over, pinned, select
from distop.protocol.records import TableRecord
from distop.schemas.argument_schema import out_of_order
from distop.schemas.schema_bounds import BadSchema, check_schema

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from pydantic import BaseModel
    from pyspark.sql import DataFrame, SparkSession

    from distop.storage.deletion import Place
    from distop.tables.reader import Reader

__all__ = [
    "WIDE",
    "Behavior",
    "FatalError",
    "JobCancelled",
    "JobContext",
    "JobFailed",
    "OperationFailed",
    "OutcomeRow",
    "PartitionPlan",
    "Pinned",
    "Planned",
    "Progress",
    "Retry",
    "Summary",
    "TableRecord",
    "TableUnavailable",
    "is_wide",
    "load",
    "out_of_order",
    "over",
    "pinned",
    "registered",
    "select",
]

ENTRY_POINTS = "distop.behaviors"


@dataclass(frozen=True, slots=True)
class OutcomeRow:
    """One job's outcome, as ``complete_operation`` sees it."""

    partition: int
    name: str
    success: bool
    result: Any
    error: str
    stage: Place | None = None
    """The stage of the attempt whose outcome this is, by its fence; None where no executor has run it: whoever returned
    the job (``return_job``) has written nothing that could be published.
    """
    by_executor: bool = True
    """An executor ran the job; False: an actor returned it (``Client.return_job``)."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What ``complete_operation`` decides from: the fixed decision, and outcomes and plan, read lazily in pages.
    ``version``: the table's, as the plan has it. ``whole``: the start named no partitions, so that the plan has all
    that the behavior wanted.
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
        """The outcomes in order of their ordinals; jobs that were cancelled have none."""
        return self.rows()

    def partitions(self) -> Iterator[PartitionPlan]:
        """The plan's partitions in order, with their files; none where the operation ended before it had a plan."""
        return self.plan()


class Progress(ABC):
    """The checkpoint of a resumable job: fenced and rate-limited. Write it after the output it speaks of."""

    @abstractmethod
    def load(self) -> Any:
        """The last checkpoint saved by any attempt of this job, or None."""

    @abstractmethod
    def save(self, value: Any, *, force: bool = False) -> bool:
        """Save a JSON value (at most 64 KiB). False: skipped by the rate limit (``force`` overrides it)."""


class JobContext(ABC):
    """What running code is given. One object per call; not to be kept after it."""

    partition: PartitionPlan | None
    """The partition, or None in a batch, in planning and in completion."""
    attempt: int
    """From 1, grows with every claim of the job."""
    operation: str
    """``table/type[/object]/instance``."""
    table: TableRecord | None
    work_dir: Path
    """A private directory on this node for this operation; emptied when the operation is gone."""
    shared_dir: str
    """Where what is too large for etcd goes: a path or URL that every node can reach. It belongs to this namespace
    alone.
    """
    shared: Place | None
    """The same for :mod:`distop.storage.deletion`; None where there is none."""
    space: str
    """What tells this namespace of this etcd from others that write into the same folder, as a part of a name."""
    log: logging.LoggerAdapter[logging.Logger]
    progress: Progress
    again: bool = False
    """Whether an earlier run of this job (in a batch: of one of its jobs) was cut off: what it read may have crashed
    the process.
    """
    superseded: bool = False
    """In a cleanup: the attempt was cut off a while ago, and somebody else may run the job now, or have done it. Remove
    what it left on this node and in its own ``stage``, and nothing that another attempt would write as well.
    """

    @property
    def stage(self) -> str:
        """Where this attempt writes its output: a directory of its own, named by its fence, made on first use. Only
        what the published outcome names exists for readers; what an attempt that lost left there is garbage.
        """
        raise NotImplementedError("there is no stage outside a job")

    @property
    def stage_place(self) -> Place:
        """The stage for :mod:`distop.storage.deletion`; not made by being asked for."""
        raise NotImplementedError("there is no stage outside a job")

    def stage_of(self, partition: PartitionPlan) -> str:
        """In a batch: the stage of one of its partitions."""
        return self.stage

    @property
    @abstractmethod
    def spark(self) -> SparkSession:
        """The child's Spark session, made on first use."""

    @property
    @abstractmethod
    def cancelled(self) -> bool:
        """The job must stop: cancelled, paused at once, or its executor is being drained."""

    def check_cancelled(self) -> None:
        """Raise JobCancelled if the job must stop."""
        if self.cancelled:
            raise JobCancelled("the job was told to stop")

    def is_cancelled(self, partition: PartitionPlan) -> bool:
        """In a batch: this partition must stop, while others go on."""
        return self.cancelled

    def reader(self, partition: PartitionPlan | Pinned) -> Reader:
        """Reads the files of a partition, or of another table (``PartitionPlan.beside``), whatever the format is: what
        each of them has (counts, bounds), its rows in Spark with file and position, and what an error says of them.
        Raises InvalidArgument where there is no table, or the plan is not one of it.
        """
        from distop.tables import reader_of

        table = partition.table if isinstance(partition, Pinned) else self.table
        if table is None:
            raise InvalidArgument("there is no table whose files could be read: start the operation on one")
        return reader_of(table, [partition])

    def rows(self, partition: PartitionPlan | Pinned) -> DataFrame:
        """The rows that the table has in a partition (or another table has), with all columns and without rows that
        were deleted. Raises ``distop.tables.reading.file_facts.Unreadable`` where a file is not what was planned,
        InvalidArgument as :meth:`reader` does, and what Spark raises.
        """
        return self.reader(partition).all_rows(self.spark, partition.files)

    def check_reachable(self) -> None:
        """Raise TableUnavailable where nothing of the table can be seen from this node: that a file is missing then
        says nothing of the table, and another node may do the job.
        """
        from distop.tables import check_reachable

        if self.table is not None:
            check_reachable(self.table, lambda: self.spark)

    def other_table(self, name: str) -> TableRecord:
        """In planning: another table as it is registered now. Raises InvalidArgument where there is none of this name,
        and elsewhere: what a job reads is pinned by its plan (``PartitionPlan.beside``).
        """
        raise InvalidArgument("other_table is available in planning only")

    def history_record(self, op: str) -> Mapping[str, Any]:
        """The history record of an operation that has ended, as JSON (docs/contract.md): read by the executor, and
        signed with its key where it has one. So an argument names an operation, and does not bring what it found.
        Raises InvalidArgument where there is none, or it is not accepted.
        """
        raise InvalidArgument(f"there is no history record of {op} here")

    @abstractmethod
    def status(self, text: str) -> None:
        """One line for people: what the job is doing now."""

    def start_operation(
        self,
        type_name: str,
        table: str,
        arg: Any = None,
        *,
        partitions: Sequence[str] | None = None,
        delay: float | None = None,
    ) -> None:
        """In completion: an operation on the same table to start when this one has finished, once, whatever crashes in
        between. Raises InvalidArgument elsewhere, and for another table.

        A start that is refused then (another operation excludes it, or runs one at a time) is tried again for ten
        minutes after the finish; after that, and where the type, the table or the argument is wrong, the coordinator's
        log has an error, and it is not started.
        """
        raise InvalidArgument("start_operation is available in complete_operation only")


class Behavior(ABC):
    """One operation type. See docs/how-to/write-a-behavior.md for a whole example."""

    type_name: ClassVar[str]
    Arg: ClassVar[type[BaseModel]]
    Result: ClassVar[type[BaseModel] | None] = None
    """What a job gives, also as the result of JobFailed: an instance, or what fits it. None: anything JSON."""
    Report: ClassVar[type[BaseModel] | None] = None
    """The same of complete_operation and OperationFailed, which may give None as well."""
    needs_table: ClassVar[bool] = False
    object_field: ClassVar[str | None] = None
    instances: ClassVar[Literal["many", "one"]] = "many"
    conflicts_with: ClassVar[Sequence[str]] = ()
    can_fail: ClassVar[bool] = True
    retry: ClassVar[Retry] = Retry()
    lost: ClassVar[Literal["retry", "fail"]] = "retry"
    failure_policy: ClassVar[Literal["fail_fast", "collect_all"]] = "fail_fast"
    resumable: ClassVar[bool] = False
    time_limit: ClassVar[float | None] = None
    """Seconds for one attempt of a job. One that takes longer is stopped, and is an unexpected error. A start and
    the executor's ``job-time-limit`` may give less, and not more. None: no limit of its own.
    """
    large_results: ClassVar[Literal["refuse", "file"]] = "refuse"
    """What becomes of a job's result that is too large for etcd (63 KiB of JSON): the job fails and says so, or the
    result goes to a file below ``shared_dir``, which the outcome names with its size and checksum; completion code and
    ``Operation.results()`` read it from there. It is removed when the history forgets the operation.
    """
    reports_only: ClassVar[bool] = False
    """complete_operation makes its report of the summary and what it reads (and may say what follows), and does nothing
    that could not be thrown away. It then runs as soon as all jobs have ended, before the decision is fixed, and the
    operation ends a round trip sooner. Of an operation that is cancelled, and after an attempt that failed, it runs
    after the decision, as any other.
    """

    joins: ClassVar[bool] = False
    """An operation of this type that waits for others ends with the last of them, without a job."""
    id_fields: ClassVar[Sequence[str] | None] = None
    """The fields of Arg whose values, with type and table, are an operation's id: of those that have the same one only
    one goes on at a time, and a start joins it (P16). ``()``: the type on the table alone. None: all are one-offs.
    """
    combine: ClassVar[Mapping[str, Literal["union", "concat", "max", "min", "sum", "last", "first"]]] = {}
    """How the arguments of two starts with the same id become one (``on_duplicate="combine"``), by field; fields
    without a rule must be the same.
    """

    def partitions(self, table: TableRecord, arg: Any, ctx: JobContext) -> Planned:
        """Freeze what the operation works on. Default: every partition of the table, by its format's planner.

        Never called for ``@cluster``, whose operations have one job. Raise InvalidArgument for what no retry
        can mend (the operation then fails at once with that sentence); where the table cannot be reached from this
        node, TableUnavailable leaves it to another, or to a later attempt.
        """
        from distop.tables import plan_table

        return plan_table(table, ctx.check_cancelled, lambda: ctx.spark)

    def jobs(
        self, arg: Any, partitions: Sequence[PartitionPlan], names: Sequence[str] | None, ctx: JobContext
    ) -> Sequence[PartitionPlan]:
        """The operation's jobs, out of all the ``partitions`` that it may work on. Default: one for each of those that
        the start, or a rerun, asks for by ``names`` (None: for all of them).

        A job over several partitions has a name that begins with ``@``, as no partition's does, the files of all of
        them, and in ``beside`` what it reads of other tables. A rerun asks for it by that name. Raise InvalidArgument
        for names that are none.
        """
        return select(partitions, names)

    @abstractmethod
    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        """Do one partition's part and return its Result (anything JSON where none is declared). Raise JobFailed for a
        verdict; any other exception is an unexpected error and is retried. Running it twice must equal running it once.
        """

    def cancel_job_and_cleanup(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> None:
        """Remove what a job that will not be published left behind. Must be idempotent (I16, I29, I36).

        Called after JobFailed, before a job that was tried before starts over, and when one is stopped. Not called for
        a resumable job that has a checkpoint and will go on from it.
        """

    def is_fatal(self, error: BaseException) -> bool:
        """No retry mends this error of the behavior's own code (any but JobFailed). Override it to tell the errors of
        what is used here apart; ``super().is_fatal(error)`` knows those that say so themselves.
        """
        return isinstance(error, FatalError | UsageError)

    def complete_operation(self, arg: Any, table: TableRecord | None, summary: Summary, ctx: JobContext) -> Any:
        """Run once all jobs ended; may run again after a crash, so it must be idempotent (I37). Returns the
        history record's report, which fits Report where that is declared. Raise OperationFailed(message, report) for a
        verdict.
        """
        return None

    # A behavior may define run_batch(self, arg, partitions, ctx) -> Iterable[(PartitionPlan, result | Exception)]:
    # one Spark job then serves many jobs, and each pair is reported as soon as it is yielded. An exception object in
    # the pair means for its partition what raising it means in start_or_resume_job; an exception raised by the
    # generator breaks the batch, which is then split until the broken partition stands alone.
    run_batch: ClassVar[Callable[..., Iterable[tuple[PartitionPlan, Any]]] | None] = None

    @classmethod
    def declaration(cls) -> Declaration:
        """What is published of this behavior. Raises InvalidArgument where it contradicts itself."""
        name = getattr(cls, "type_name", "")
        check_type_name(name)
        for value, allowed, what in (
            (cls.instances, ("many", "one"), "instances"),
            (cls.lost, ("retry", "fail"), "lost"),
            (cls.failure_policy, ("fail_fast", "collect_all"), "failure_policy"),
            (cls.large_results, ("refuse", "file"), "large_results"),
        ):
            if value not in allowed:
                raise InvalidArgument(f"behavior {name}: {what} is {value!r}, it must be one of {', '.join(allowed)}")
        for what in ("Arg", "Result", "Report"):
            kind = getattr(cls, what, None)
            if not hasattr(kind, "model_json_schema") and (what == "Arg" or kind is not None):
                raise InvalidArgument(f"behavior {name}: {what} must be a pydantic model")
        if isinstance(cls.conflicts_with, str):
            raise InvalidArgument(f"behavior {name}: conflicts_with is a list of types: [{cls.conflicts_with!r}]")
        for other in cls.conflicts_with:
            check_type_name(other)
        if cls.retry.attempts < 1:
            raise InvalidArgument(f"behavior {name}: retry.attempts is {cls.retry.attempts}, it must be at least 1")
        if cls.time_limit is not None:
            check_time_limit(cls.time_limit, f"behavior {name}: time_limit")
        if cls.object_field is not None and cls.object_field not in cls.Arg.model_fields:
            raise InvalidArgument(f"behavior {name}: object_field {cls.object_field!r} is no field of its Arg")
        schema = cls.Arg.model_json_schema()
        result = cls.Result.model_json_schema() if cls.Result is not None else {}
        report = cls.Report.model_json_schema() if cls.Report is not None else {}
        for what, one in (("Arg", schema), ("Result", result), ("Report", report)):
            try:
                check_schema(one)
            except BadSchema as error:
                raise InvalidArgument(f"behavior {name}: the schema of its {what} is not published: {error}") from None
        id_fields = _id_fields(name, cls.id_fields, cls.Arg, schema)
        _check_combine(name, cls.combine, id_fields or (), schema)
        if not cls.can_fail and cls.lost == "fail":
            raise InvalidArgument(f"behavior {name}: can_fail is false, so lost must be 'retry'")
        completes = cls.complete_operation is not Behavior.complete_operation
        if cls.reports_only and not completes:
            raise InvalidArgument(f"behavior {name}: reports_only is true, and there is no complete_operation")
        return Declaration(
            type_name=name,
            arg_schema=schema,
            result_schema=result,
            report_schema=report,
            object_field=cls.object_field,
            instances=cls.instances,
            conflicts_with=tuple(cls.conflicts_with),
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
        )


def cleans_up(kind: type[Behavior]) -> bool:
    """Whether it has a cleanup of its own."""
    return kind.cancel_job_and_cleanup is not Behavior.cancel_job_and_cleanup


def _id_fields(
    name: str, fields: Sequence[str] | None, arg: type[BaseModel], schema: Mapping[str, Any]
) -> tuple[str, ...] | None:
    """Who computes the id has the published schema alone: the fields, and what they are where they are left out, must
    stand in that. Raises InvalidArgument.
    """
    if fields is None:
        return None
    if isinstance(fields, str):
        raise InvalidArgument(f"behavior {name}: id_fields is a list of fields: [{fields!r}]")
    for one in fields:
        if one not in arg.model_fields or one not in schema.get("properties", {}):
            raise InvalidArgument(f"behavior {name}: id_fields names {one!r}, which is no field of its Arg")
        if arg.model_fields[one].default_factory is not None:
            raise InvalidArgument(
                f"behavior {name}: id_fields names {one!r}, whose default a function makes: give it a value, or none"
            )
    return tuple(fields)


def _check_combine(name: str, rules: Mapping[str, str], id_fields: Sequence[str], schema: Mapping[str, Any]) -> None:
    """Raises InvalidArgument."""
    if not isinstance(rules, dict):
        raise InvalidArgument(f"behavior {name}: combine has a rule for each of some fields, it is no {rules!r}")
    for one, rule in rules.items():
        if one not in schema.get("properties", {}):
            raise InvalidArgument(f"behavior {name}: combine names {one!r}, which is no field of its Arg")
        if one in id_fields:
            raise InvalidArgument(f"behavior {name}: combine names {one!r}, by which operations are told apart")
        if rule not in RULES:
            raise InvalidArgument(
                f"behavior {name}: combine has the rule {rule!r} for {one!r}, it must be one of {', '.join(RULES)}"
            )


def registered() -> Mapping[str, metadata.EntryPoint]:
    """The behaviors installed here, by type name; nothing is imported."""
    return {ep.name: ep for ep in metadata.entry_points(group=ENTRY_POINTS)}


class Loadable(Protocol):
    """What gives the class of a behavior: an entry point, or a :class:`distop.behavior_source.BehaviorSource`."""

    def load(self) -> Any: ...


def load(type_name: str, installed: Mapping[str, Loadable] | None = None) -> Behavior:
    """Import and make the behavior of this type. Raises UnknownBehavior where none is installed. ``installed``: what
    :func:`registered` gave, which looks through all packages each time; others may be added.
    """
    installed = registered() if installed is None else installed
    found = installed.get(type_name)
    if found is None:
        known = ", ".join(sorted(installed)) or "none"
        raise UnknownBehavior(f"no behavior {type_name!r} is installed here (installed: {known})")
    behavior: Behavior = found.load()()
    if behavior.type_name != type_name:
        raise UnknownBehavior(f"what is installed as {type_name!r} names a behavior of type {behavior.type_name!r}")
    return behavior
