"""The context that a behavior gets in the child (:class:`JobContext`), and the child's shared environment."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from functools import cached_property
from typing import TYPE_CHECKING, Any

from distop.behavior import Behavior, JobContext, Progress, load, registered
from distop.behavior_source import BehaviorSource
from distop.errors import InvalidArgument, NotServed
from distop.protocol.dependencies import follows_elsewhere
from distop.protocol.executor_nodes import Serves, refusal
from distop.protocol.jobs import MAX_BYTES, for_cleanup, given_up, to_go_on_from
from distop.protocol.json_codec import dumps, rfc3339
from distop.protocol.records import OperationRef
from distop.runtime import secret_settings, spark_rules
from distop.storage.files import local_path
from distop.storage.places import Attempt, Stages, operation_path, shared_of, stage_of
from distop.worker import child_messages
from distop.worker.child_side.job_status import JobStatus
from distop.worker.child_side.shared_files import with_files
from distop.worker.child_side.spark_session import SparkHolder
from distop.worker.child_side.table_folders import TableFolders
from distop.worker.guardian import boottime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

    from distop.behavior import Loadable, PartitionPlan, TableRecord
    from distop.storage.deletion import Place
    from distop.worker.child_side.outbox import Outbox

PROGRESS_SECONDS = 1.0  # minimum seconds between two checkpoints of a job
MAX_STATUS = 500
"""Maximum characters of a status text; longer texts are truncated."""
ANSWER_SECONDS = 60.0
"""Time-out for the daemon's answer to a checkpoint or a request for outcomes."""


class Environment:
    """The shared state of one child: settings, connection, Spark session, loaded behaviors."""

    def __init__(self, config: Mapping[str, Any], work_dir: Path, outbox: Outbox) -> None:
        self.work_dir = work_dir
        self.shared_dir: str = config["shared_dir"]
        self.verifier_urls: tuple[str, ...] = tuple(config["verifier_urls"])
        self.serves = Serves.from_json(config["serves"])
        self.space: str = config["space"]
        self.executor: str = config["executor"]
        self.outbox = outbox
        # Overrides the Spark setting, so that the list of trusted catalogs has one source.
        trusted = {spark_rules.CONF: ",".join(config["trusted_spark_catalogs"])}
        self.spark = SparkHolder(
            config["spark_master"], config["executor"], work_dir, config["ttl"], {**config["spark_conf"], **trusted}
        )
        self.log = logging.getLogger("distop.child")
        self.stuck = False
        """Cancelled work does not stop: no job starts in this process any more."""
        self.stopping = False
        """The child is stopping: errors of jobs are no longer the jobs' own."""
        self.deadline = 0.0
        """The session's last renewed deadline (seconds of CLOCK_BOOTTIME), for all runs; 0: not renewed yet."""
        named = {name: BehaviorSource.parse(text) for name, text in config["behaviors"].items()}
        found: dict[str, Loadable] = {**registered(), **named}
        self.installed = {name: entry for name, entry in found.items() if not refusal(self.serves, name, ())}
        """The installed behaviors by type name, of the types that this executor serves, at the start of this child."""
        self.table_folders = TableFolders()
        self._behaviors: dict[str, Behavior] = {}
        self._lock = threading.Lock()

    def refuse_unserved(self, op: str, type_name: str | None, tables: Iterable[TableRecord | str | None]) -> None:
        """Raises NotServed if this executor does not serve an operation's type, its table, or one of ``tables``.

        ``type_name`` None: no code of the type is needed. The daemon has checked the same; this is the last check
        before anything is imported or opened.
        """
        ref = OperationRef.parse(op)
        wanted = [ref.table]
        wanted += [one if isinstance(one, str) else one.name for one in tables if one is not None]
        # The requested type selects the code, and the record selects the table: check both besides the names in ``op``.
        types = (None,) if type_name is None else (ref.type, type_name)
        for name in types:
            if why := refusal(self.serves, name, wanted):
                raise NotServed(f"executor {self.executor} refuses {op}: {why}")

    def behavior(self, type_name: str) -> Behavior:
        """The behavior of a type, loaded on first use. Raises UnknownBehavior, and the errors of its import."""
        with self._lock:
            if type_name not in self._behaviors:
                self._behaviors[type_name] = load(type_name, self.installed)
            return self._behaviors[type_name]


class SessionDeadline:
    """The session's deadline for one request of the daemon.

    If a request arrives in time, the renewed deadline counts for all that it starts later, such as the halves of a
    batch. A request that arrives late stays late, despite later renewals. ``deadline``: see RunMessage.
    """

    def __init__(self, env: Environment, deadline: float) -> None:
        self._env = env
        self._deadline = deadline
        self._arrived_late = False
        self._arrived_late = self.passed()

    def passed(self) -> bool:
        """Whether the deadline has passed, so that the request must start nothing more."""
        if not self._deadline:
            return False
        return self._arrived_late or boottime() >= max(self._deadline, self._env.deadline)


class JobProgress(Progress):
    """The checkpoint of one job. The daemon writes it to etcd under the claim's fence."""

    def __init__(self, outbox: Outbox, run: int, partition: int, value: Any) -> None:
        self._outbox = outbox
        self._run = run
        self._partition = partition
        self._value = value
        self._sent = value is not None
        """etcd may have a checkpoint: one was sent, whatever its answer was."""
        self._last = float("-inf")
        self._skipped: Any = None
        """The last checkpoint that was not saved, because of the rate limit or an error."""

    def load(self) -> Any:
        return for_cleanup(self._value)

    def save(self, value: Any, *, force: bool = False) -> bool:
        """See Progress.save. Also False if the daemon could not save it (the claim is lost, or etcd is unavailable).

        Raises InvalidArgument for values that are not JSON or larger than 64 KiB.
        """
        if not force and time.monotonic() - self._last < PROGRESS_SECONDS:
            self._skipped = value
            return False
        try:
            size = len(dumps(value))
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"a checkpoint must be a JSON value: {error}") from error
        if size > MAX_BYTES:
            raise InvalidArgument(f"a checkpoint has {size} bytes: at most {MAX_BYTES} are allowed")
        return self._save(value)

    def _save(self, value: Any) -> bool:
        self._last, self._sent = time.monotonic(), True
        question = child_messages.ProgressMessage(
            t="progress", run=self._run, partition=self._partition, value=value, seq=0
        )
        try:
            saved = bool(self._outbox.ask(question, ANSWER_SECONDS))
        except (TimeoutError, RuntimeError):
            saved = False
        self._value, self._skipped = (value, None) if saved else (self._value, value)
        return saved

    def give_up(self) -> bool:
        """Mark the checkpoint as abandoned: no attempt may resume from it, and its files must be removed.

        Returns whether the mark was saved.
        """
        return not self._sent or self._save(given_up(self._value))

    def begin_anew(self) -> None:
        """Forget the checkpoint if it was abandoned: its files were removed."""
        self._value = to_go_on_from(self._value)

    def settle(self) -> bool:
        """Save the checkpoint that was held back, because the job stops and resumes later, maybe on another node.

        Returns whether there may be a checkpoint: a save without an answer may still succeed.
        """
        if self._skipped is not None:
            with contextlib.suppress(InvalidArgument):
                self.save(self._skipped, force=True)
        return self._sent


class NoProgress(Progress):
    """The progress of a batch, a planning or a completion, which have no checkpoint, or of a cleanup.

    A cleanup can read the checkpoint of its job, but not write one.
    """

    def __init__(self, value: Any = None) -> None:
        self._value = value

    def load(self) -> Any:
        return for_cleanup(self._value)

    def save(self, value: Any, *, force: bool = False) -> bool:
        return False

    def give_up(self) -> bool:
        """There is no checkpoint to abandon."""
        return True

    def begin_anew(self) -> None:
        """There is no checkpoint to forget."""

    def settle(self) -> bool:
        """There is no checkpoint to resume from."""
        return False


class ChildContext(JobContext):
    """The JobContext of one job, one batch, or one call in the child."""

    def __init__(
        self,
        env: Environment,
        op: str,
        table: TableRecord | None,
        *,
        number: int = 0,
        partition: PartitionPlan | None = None,
        attempt: int = 1,
        fence: int = 0,
        incarnation: str = "",
        opened: int = 0,
        progress: Any = None,
        cancelled: Callable[[int | None], bool] = lambda _: False,
        fences: Mapping[int, int] | None = None,
        follow_ups: list[Mapping[str, Any]] | None = None,
        tag: str = "",
        stages: Stages | None = None,
        find_table: Callable[[str], TableRecord] | None = None,
    ) -> None:
        self._env = env
        self._number = number
        self._fence = fence
        self._fences = fences
        self._incarnation = incarnation
        self._opened = opened
        self._loaded = progress
        self._cancelled = cancelled
        self._follow_ups = follow_ups
        self._tag = tag
        self._stages = stages if stages is not None else Stages()
        self._find_table = find_table
        self._status = JobStatus(self._send_status)
        self.operation = op
        self.table = table
        self.partition = partition
        self.attempt = attempt
        self.call = ""
        """The name of the child's call, "" for a run."""

    @property
    def tag(self) -> str:
        """The Spark tag of this job: operation, job and attempt, without commas; or the given one."""
        if self._tag:
            return self._tag
        job = self.call or (f"{self.partition.partition:06d}" if self.partition is not None else f"run{self._number}")
        return f"{self.operation}-{job}-{self.attempt}".replace(",", "%2C")

    @property
    def spark(self) -> SparkSession:
        name = f" {self.partition.name}" if self.partition is not None else ""
        with contextlib.nullcontext() if self._env.spark.started else self._status.starting_spark():
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
        instance = f"gate{self._opened}" if self._opened else self.call or f"run{self._number}"
        self._env.table_folders.check((self.operation, instance), table, paths, folders, self.check_cancelled)

    @property
    def cancelled(self) -> bool:
        return self._cancelled(self.partition.partition if self.partition is not None else None)

    def is_cancelled(self, partition: PartitionPlan) -> bool:
        return self._cancelled(partition.partition)

    def other_table(self, name: str) -> TableRecord:
        return self._find_table(name) if self._find_table is not None else super().other_table(name)

    def history_record(self, op: str) -> Mapping[str, Any]:
        question = child_messages.HistoryMessage(t="history", op=op, seq=0)
        answer = self._env.outbox.ask(question, ANSWER_SECONDS)
        if "refused" in answer:
            raise InvalidArgument(answer["refused"])
        found: Mapping[str, Any] = answer["record"]
        return found

    def status(self, text: str) -> None:
        if self._number:
            self._status.report(text)

    def send_held_status(self) -> None:
        """Send the status that the rate limit held back, if there is one."""
        self._status.send_held()

    def _send_status(self, text: str) -> None:
        if not self._number:
            return
        ordinal = self.partition.partition if self.partition is not None else -1
        line = secret_settings.redact(text)[:MAX_STATUS].encode(errors="replace").decode()
        self._env.outbox.send(child_messages.StatusMessage(t="status", run=self._number, partition=ordinal, text=line))

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
        if self.partition is None or not self._number:
            return NoProgress(self._loaded)
        return JobProgress(self._env.outbox, self._number, self.partition.partition, self._loaded)

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
        place = self._stage_place_of(partition)
        # A cleanup, which is a call, uses the existing stage of its attempt.
        self._stages.make(place, again=self.again or not self._number)
        return str(local_path(place.location) or place.location)

    @property
    def stage_place(self) -> Place:
        if self.partition is None:
            raise InvalidArgument("a batch has one stage for each partition, so it has no stage_place")
        return self._stage_place_of(self.partition)

    def _stage_place_of(self, partition: PartitionPlan) -> Place:
        if self.shared is None:
            raise InvalidArgument("staged output needs a shared directory: start the executors with --shared-dir")
        fence = self._fence if self._fences is None else self._fences[partition.partition]
        return stage_of(self.shared, Attempt(self.operation, partition.partition, fence, self._incarnation))

    def start_operation(
        self,
        type_name: str,
        table: str,
        arg: Any = None,
        *,
        partitions: Sequence[str] | None = None,
        delay: float | None = None,
    ) -> None:
        if self._follow_ups is None:
            super().start_operation(type_name, table, arg, partitions=partitions, delay=delay)
            return
        if why := follows_elsewhere(OperationRef.parse(self.operation), table):
            raise InvalidArgument(why)
        if delay is not None and not (isinstance(delay, int | float) and delay >= 0):
            raise InvalidArgument(f"the delay of a follow-up operation must be a number of seconds, not {delay!r}")
        if hasattr(arg, "model_dump"):
            arg = arg.model_dump(mode="json")
        names = list(partitions) if partitions is not None else None
        due = {"not_before": rfc3339(time.time() + delay)} if delay else {}
        self._follow_ups.append({"type": type_name, "table": table, "arg": arg, "partitions": names, **due})
