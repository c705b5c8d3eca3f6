"""The daemon's data types of the worker: configuration, requests, results."""

from __future__ import annotations

import sys
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from distop.errors import DistopError
from distop.protocol.executor_nodes import ALL, Serves
from distop.protocol.frozen import frozen

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping
    from pathlib import Path

    from distop.protocol.records import TableRecord
    from distop.storage.storage_options import StorageOptions
    from distop.worker.child_messages import EndKind
    from distop.worker.daemon_side.result_handlers import Fetch, Page


FindHistory: TypeAlias = "Callable[[str], Awaitable[Mapping[str, Any]]]"
"""Finds the history record of an operation by name: ``{"record": its JSON}``, or ``{"refused": reason}``."""


FindRemovedTable: TypeAlias = "Callable[[str], Awaitable[TableRecord | None]]"
FindTables: TypeAlias = "Callable[[Collection[str]], Awaitable[Mapping[str, TableRecord | None]]]"
"""Finds the registered records of tables by name; None: the table is not registered."""


async def no_history(op: str) -> Mapping[str, Any]:
    """The FindHistory of a worker without a store."""
    return {"refused": f"there is no history record of {op}"}


@frozen
class WorkerConfig:
    """The configuration of the child."""

    work_dir: Path
    """A private local directory of this executor: logs, Spark's local files, the operations' private directories."""
    executor: str
    incarnation: str
    slots: int = 1
    """Maximum number of concurrent runs."""
    shared_dir: str = ""
    """A path or URL that every node can reach; "": ``<table location>/_distop``."""
    storage: Mapping[str, StorageOptions] = field(default_factory=dict)
    """How to reach buckets."""
    space: str = ""
    """The namespace's folder in the shared directory (:mod:`distop.store.cluster_identity`); "": no folder."""
    spark_master: str = "local[*]"
    spark_conf: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The user's Spark settings; they override distop's."""
    ttl: float = 10.0
    """TTL in seconds of the session that holds the claims: Spark executors on other nodes stop within it."""
    log_level: str = "info"
    grace: float = 10.0
    """Seconds for a cancelled job to stop, before its child is killed."""
    cleanup_timeout: float = 60.0
    """Seconds for one cleanup call, with all its jobs."""
    verifier_urls: tuple[str, ...] = ()
    """Prefixes of the allowed verifier URLs."""
    trusted_spark_catalogs: tuple[str, ...] = ()
    """Spark catalogs whose server or code may choose classes, hosts and where credentials are sent."""
    export_to: tuple[str, ...] = ()
    """The places below which tables may be exported."""
    serves: Serves = ALL
    """The types and tables that the child serves; it refuses all others."""
    behaviors: Mapping[str, str] = field(default_factory=dict)
    """For ``distop dev`` only: behaviors that are not installed, type → location of the class."""
    find_tables: FindTables | None = None
    """Used to compare an operation's copies of table records with the registered ones, before the child gets them.

    None: a worker without a store.
    """
    find_removed_table: FindRemovedTable | None = None
    """Returns the record of its table that the plan of an operation has removed; None: it has removed none."""
    call_limit: float = 3600.0
    """Seconds for planning, and for completion: a hanging storage location must not block an operation forever."""
    start_timeout: float = 60.0
    """Seconds for a child to start and send its hello."""
    python: str = sys.executable
    env: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables of the child."""


@frozen
class JobItem:
    """One job to run: ``partition`` is PartitionPlan.to_json(), ``fence`` the claim's mod revision."""

    partition: Mapping[str, Any]
    attempt: int
    fence: int
    progress: Any = None

    @property
    def ordinal(self) -> int:
        return int(self.partition["partition"])

    def row(self) -> tuple[Mapping[str, Any], int, int, Any]:
        return (self.partition, self.attempt, self.fence, self.progress)


@frozen
class RunRequest:
    """Jobs of one operation for one slot: run one after the other, or as one batch."""

    op: str
    type: str
    arg: Any
    table: Mapping[str, Any] | None
    items: tuple[JobItem, ...]
    batch: bool
    cleanup_first: bool = False
    """Call cancel_job_and_cleanup before the start, because of an earlier attempt (a takeover, or a failed attempt).

    Not for a job that resumes from its checkpoint.
    """
    resumable: bool = False
    """Its jobs resume from their checkpoints, so their files are cleaned up only when the job is abandoned."""
    time_limit: float = 0.0
    """Seconds for one job; for a batch: until its next outcome. 0: no limit."""
    deadline: float = 0.0
    """Seconds of CLOCK_BOOTTIME after which the child starts no job; 0: none.

    A deadline renewed after the request arrived counts instead (Worker.set_deadline).
    """
    opened: int = 0
    """The mod revision of the gate under which its jobs were claimed, which distinguishes operations of the same name.

    0: unknown, so nothing of the operation is cached.
    """
    trace: str = ""
    """A traceparent: of the operation's span if ``traced``, else of its caller; "": none."""
    traced: bool = False
    """The executor sends a span of each attempt."""


@frozen
class JobEnded:
    """The end of a job. Times are seconds since the epoch.

    ``success`` and ``verdict`` (JobFailed) are answers; ``error``: an unexpected error; ``fatal``: an error that must
    not be retried; ``crash``: the job, alone in its child, killed it; ``cancelled``: stopped and cleaned up (or stopped
    with its session; a released job keeps the files of its checkpoint); ``refused``: not started, through no fault of
    the job; ``unable``: this node lacks what the job needs, another node may have it; ``unavailable``: the same, but
    only for the moment. The last four kinds release the job and do not count as failures.
    """

    partition: int
    kind: EndKind
    result: Any = None
    error: str = ""
    started: float = 0.0
    finished: float = 0.0


@frozen
class Listener:
    """The callbacks of a run: ends of jobs; status (ordinal, -1 for a batch; text); checkpoints; Spark tasks; work.

    ``on_progress`` saves a checkpoint and returns whether it was saved. ``on_tasks`` gets the numbers of completed and
    of all Spark tasks of the running job, ``on_work`` how much work a job has done (ordinal, -1 for a batch; work).
    """

    on_events: Callable[[list[JobEnded]], None]
    on_status: Callable[[int, str], None] | None = None
    on_progress: Callable[[int, Any], Awaitable[bool]] | None = None
    on_tasks: Callable[[int, int], None] | None = None
    on_work: Callable[[int, Any], None] | None = None


@frozen
class PlanResult:
    """A plan in the form for etcd: encoded chunks, number of partitions, and the table's version.

    ``spilled``: the number of partitions whose file lists are in the shared directory. ``options``: table options that
    the jobs need (Plan).
    """

    chunks: list[bytes]
    count: int
    version: str
    spilled: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    """The names of other tables that the jobs read, sorted."""
    removes_table: bool = False
    """The plan removes the table's record."""


@frozen
class PlanPages:
    """An operation's plan for its completion: the table's version and the chunks.

    ``whole``: the operation was started for all partitions. ``page(n)`` returns the partitions of chunk ``n`` as JSON
    texts, and the number of the next chunk (None: no more).
    """

    version: str
    whole: bool
    chunks: int
    page: Fetch


@frozen
class CompleteRequest:
    """A completion.

    ``fetch(start)`` returns a page of outcomes from that ordinal on, as JSON texts {partition, success, outcome}, and
    the ordinal of the next page (None: no more). ``first``: the page from 0 on, which is then not fetched. ``plan``:
    None if the operation has no plan.
    """

    op: str
    type: str
    arg: Any
    table: Mapping[str, Any] | None
    verdict: str
    total: int
    success: int
    failed: int
    fetch: Fetch
    first: Page | None = None
    plan: PlanPages | None = None


@frozen
class RemovedStages:
    """What a sweep has removed: the number of stages, and the bytes of their files."""

    stages: int = 0
    bytes: int = 0


@frozen
class CompleteResult:
    """The result of complete_operation: its report, and the operations to start next.

    ``failure``: the text of OperationFailed, if it was raised. ``follow_ups``: each {type, table, arg, partitions}.
    ``removed``: stages that no outcome names. ``registrations``: the records of tables to register, as JSON.
    """

    report: Any
    failure: str | None = None
    follow_ups: tuple[Mapping[str, Any], ...] = ()
    removed: RemovedStages = RemovedStages()
    registrations: tuple[Mapping[str, Any], ...] = ()


@frozen
class Verified:
    """A verifier's answer: whether the sender's transaction was completed.

    ``completed`` None: unknown, and ``why`` is a ``protocol.prepared_operations.Unanswered``.
    """

    completed: bool | None
    why: str = ""


class WorkerError(DistopError):
    """Planning, completion or cleanup failed.

    ``fatal``: must not be retried (a wrong argument, a behavior that is not installed); ``unable``: this node lacks
    what it needs, another node may have it; ``unavailable``: the same, but only for the moment; ``crash``: the child
    died; ``late``: the child was frozen until after the session's deadline, and the call is sent again; ``transient``:
    all other errors.
    """

    def __init__(
        self, kind: Literal["transient", "fatal", "unable", "unavailable", "crash", "late"], message: str
    ) -> None:
        super().__init__(message)
        self.kind = kind


_STOPPED = {
    "slow-start": "it did not start in time; see its log",
    "deadline": "the session was about to expire",
    "daemon-gone": "its daemon is gone",
    "stubborn": "a cancelled job did not stop in time",
    "stopped": "the daemon is stopping",
    "replaced": "another worker process replaces it",
}
"""Reason of a stop → text for people."""


@frozen
class Death:
    """The end of a child. All its processes are dead.

    ``reason``: ``exited`` (by itself), ``guardian-died``, ``protocol-error``, ``slow-start``, ``deadline``,
    ``daemon-gone``, ``stubborn`` (a cancelled job did not stop), ``stopped``, ``aborted``; ``frozen`` (it did not
    answer its daemon for a minute); ``replaced`` (a job did not stop, and the other jobs ended or took too long);
    ``no-spark`` (its Spark session did not start), ``spark-stalled`` (its Spark session completed no tasks).
    """

    reason: str
    detail: str = ""
    tail: str = ""
    """The end of its log."""
    runs: tuple[int, ...] = ()
    """The runs that it had."""
    calls: tuple[int, ...] = ()

    @property
    def crashed(self) -> bool:
        """Whether something inside ended it, so that its runs and calls are suspect."""
        return self.reason in ("exited", "guardian-died", "protocol-error", "frozen")

    @property
    def final(self) -> bool:
        """Whether it was stopped together with its jobs, which must not run again here."""
        return self.reason in ("deadline", "stopped", "aborted", "daemon-gone")

    @property
    def spark_unusable(self) -> bool:
        """Whether its Spark session was unusable.

        No job is to blame for that, and the session of another child may work.
        """
        return self.reason in ("no-spark", "spark-stalled")

    def __str__(self) -> str:
        if self.spark_unusable:
            return f"the worker process ended: {self.detail}"
        if not self.crashed:
            return f"the worker process was stopped: {_STOPPED.get(self.reason, self.reason)}"
        return f"the worker process died ({self.detail}); the log of its executor has its last output"

    def with_log(self) -> str:
        """The text with the end of the child's log, which has lines of all tables: for the daemon's log only."""
        return f"{self}; the end of its log:\n{self.tail}" if self.crashed and self.tail else str(self)
