"""The values at the daemon's side of the worker: its configuration, what it is asked, what it answers."""

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
    from distop.worker.child_messages import Kind
    from distop.worker.daemon_side.result_handlers import Fetch


FindHistory: TypeAlias = "Callable[[str], Awaitable[Mapping[str, Any]]]"
"""The history record of an operation by its name: ``{"record": its JSON}``, or ``{"refused": why not}``."""


FindTables: TypeAlias = "Callable[[Collection[str]], Awaitable[Mapping[str, TableRecord | None]]]"
"""The records of tables, by their names, as they are registered now; None: there is none."""


async def no_history(op: str) -> Mapping[str, Any]:
    """Of a worker without a store."""
    return {"refused": f"there is no history record of {op}"}


@frozen
class WorkerConfig:
    """How the child is run."""

    work_dir: Path
    """A local directory of this executor alone: logs, Spark's local files, the operations' private directories."""
    executor: str
    incarnation: str
    slots: int = 1
    """How many runs go on at once."""
    shared_dir: str = ""
    """A path or URL that every node reaches; "": ``<table location>/_distop``."""
    space: str = ""
    """The folder in it of this namespace (:mod:`distop.store.cluster_identity`); "": none of its own."""
    spark_master: str = "local[*]"
    spark_conf: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Settings of the user: they win over distop's own."""
    ttl: float = 10.0
    """Of the session that the jobs are claimed in, in seconds: Spark executors on other nodes stop within it."""
    log_level: str = "info"
    grace: float = 10.0
    """Seconds for a job to stop when told to, before its child is killed."""
    cleanup_timeout: float = 60.0
    """Seconds for the cleanup of jobs that run nowhere, all that are asked for at once."""
    verifier_urls: tuple[str, ...] = ()
    """Prefixes of the URLs that verifiers may be asked at."""
    trusted_spark_catalogs: tuple[str, ...] = ()
    """Catalogs of Spark whose server or code may choose classes, hosts and where credentials are sent."""
    serves: Serves = ALL
    """The child refuses everything else."""
    behaviors: Mapping[str, str] = field(default_factory=dict)
    """Of ``distop dev`` alone: behaviors that need not be installed, type → place of its class."""
    find_tables: FindTables | None = None
    """With it, nothing of an operation reaches the child before its copies of records are those that this gives. None:
    a worker without a store.
    """
    call_limit: float = 3600.0
    """Seconds for planning, and for completion: a location that hangs must not hold an operation for ever."""
    start_timeout: float = 60.0
    """Seconds for a child to say hello."""
    python: str = sys.executable
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the child's environment."""


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
    """Jobs of one operation for one slot: one after the other, or as one batch."""

    op: str
    type: str
    arg: Any
    table: Mapping[str, Any] | None
    items: tuple[JobItem, ...]
    batch: bool
    cleanup_first: bool = False
    """Somebody was here before (taken over, or an attempt that ended badly): cancel_job_and_cleanup, then start; not
    where the job goes on from a checkpoint."""
    resumable: bool = False
    """Its jobs go on from their checkpoints: what those speak of is cleaned up only when the job is given up."""
    time_limit: float = 0.0
    """Seconds for one job; of a batch: until its next outcome. 0: no limit."""
    deadline: float = 0.0
    """Seconds of CLOCK_BOOTTIME after which the child refuses to start a job, unless the deadline was renewed after
    the request arrived there (Worker.set_deadline); 0: none."""
    opened: int = 0
    """The mod revision of the gate under which its jobs were claimed: it tells this operation from an earlier one of
    the same name. 0: not known, so that nothing is kept of it."""


@frozen
class JobEnded:
    """How a job ended. Times are seconds since the epoch.

    ``success`` and ``verdict`` (JobFailed) are answers; ``error`` is an unexpected error; ``fatal`` one that no
    retry mends; ``crash``: the job killed its child, alone in it; ``cancelled``: told to stop, and cleaned up (or
    stopped with its whole session; one that was only released keeps what its checkpoint speaks of); ``refused``: not
    started, and not the job's fault; ``unable``: it needs what cannot be had on this node, another may have it;
    ``unavailable``: the same, but only for the moment. The last four are released, not blamed.
    """

    partition: int
    kind: Kind
    result: Any = None
    error: str = ""
    started: float = 0.0
    finished: float = 0.0


@frozen
class Listener:
    """What a run's owner wants to hear: ends of jobs; what a job says that it does (ordinal, -1 for a batch; text); a
    checkpoint to be saved, and whether it was; how many Spark tasks of what runs are done, and how many there are.
    """

    on_events: Callable[[list[JobEnded]], None]
    on_status: Callable[[int, str], None] | None = None
    on_progress: Callable[[int, Any], Awaitable[bool]] | None = None
    on_tasks: Callable[[int, int], None] | None = None


@frozen
class PlanResult:
    """A plan as it goes into etcd: encoded chunks, the number of partitions, the table's version; how many of the
    partitions left their file list in the shared directory; and options of the table that its jobs need (Plan)."""

    chunks: list[bytes]
    count: int
    version: str
    spilled: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    """The names of other tables that the jobs read."""


@frozen
class PlanPages:
    """An operation's plan, for its completion: the table's version; whether the start named no partitions; and its
    chunks. ``page(n)`` gives the partitions of one, as JSON texts, and the number of the next (None: that was all).
    """

    version: str
    whole: bool
    chunks: int
    page: Fetch


@frozen
class CompleteResult:
    """What complete_operation gave: its report; ``failure`` where it raised OperationFailed; the operations to
    start next, each {type, table, arg, partitions}.
    """

    report: Any
    failure: str | None = None
    follow_ups: tuple[Mapping[str, Any], ...] = ()


@frozen
class Verified:
    """Whether a sender's transaction was completed; None: nobody can tell, and ``why``, a word of
    ``protocol.prepared_operations.Unanswered``.
    """

    completed: bool | None
    why: str = ""


class WorkerError(DistopError):
    """Planning, completion or cleanup did not succeed. ``fatal``: no retry mends it (a wrong argument, a behavior
    that is not installed); ``unable``: what it needs cannot be had on this node, another may have it; ``unavailable``:
    the same, but only for the moment; ``crash``: the child died; ``late``: the child
    stood still for longer than the session's deadline, and the call is sent again; ``transient``: anything else.
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
    "stubborn": "a job did not stop when it was told to",
    "stopped": "the daemon is stopping",
    "replaced": "another one takes its place",
}
"""Why a child was stopped, for people."""


@frozen
class Death:
    """The end of a child, after which none of its processes is left.

    ``reason``: ``exited`` (by itself), ``guardian-died``, ``protocol-error``, ``slow-start``, ``deadline``,
    ``daemon-gone``, ``stubborn``, ``stopped``, ``aborted``;
    ``frozen`` (it did not answer its daemon for a minute); ``replaced`` (a job did not stop, and the
    others have ended, or went on for too long); ``no-spark`` (its Spark session did not start),
    ``spark-stalled`` (its Spark session completed no tasks).
    """

    reason: str
    detail: str = ""
    tail: str = ""
    """The end of its log."""
    runs: tuple[int, ...] = ()
    """The runs that were in it."""
    calls: tuple[int, ...] = ()

    @property
    def crashed(self) -> bool:
        """Something inside ended it: what was running is suspect."""
        return self.reason in ("exited", "guardian-died", "protocol-error", "frozen")

    @property
    def final(self) -> bool:
        """It was stopped with all its jobs, which are not to be run again here."""
        return self.reason in ("deadline", "stopped", "aborted", "daemon-gone")

    @property
    def of_spark(self) -> bool:
        """Whether its Spark session was unusable.

        No job is to blame for that, and another child may get a better session.
        """
        return self.reason in ("no-spark", "spark-stalled")

    def __str__(self) -> str:
        if self.of_spark:
            return f"the worker process ended: {self.detail}"
        if not self.crashed:
            return f"the worker process was stopped: {_STOPPED.get(self.reason, self.reason)}"
        return f"the worker process died ({self.detail}); what it wrote last is in the log of its executor"

    def with_log(self) -> str:
        """For the daemon's own log alone: all tables share a child, and its log has lines of all of them."""
        return f"{self}; the end of its log:\n{self.tail}" if self.crashed and self.tail else str(self)
