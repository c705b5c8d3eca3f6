"""What a behavior is given in the child: :class:`JobContext` made real, and what all contexts of a child share."""

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

PROGRESS_SECONDS = 1.0
STATUS_SECONDS = 0.5
MAX_STATUS = 500
"""Characters of a status that are sent."""
ANSWER_SECONDS = 60.0
"""How long a checkpoint or a page of outcomes is waited for."""


class Environment:
    """What one child has: its settings, its connection, its Spark, the behaviors it has loaded."""

    def __init__(self, config: Mapping[str, Any], work_dir: Path, outbox: Outbox) -> None:
        self.work_dir = work_dir
        self.shared_dir: str = config["shared_dir"]
        self.verifier_urls: tuple[str, ...] = tuple(config["verifier_urls"])
        self.serves = Serves.from_json(config["serves"])
        self.space: str = config["space"]
        self.executor: str = config["executor"]
        self.outbox = outbox
        # It replaces a value among Spark's settings: the list has one source.
        trusted = {spark_rules.CONF: ",".join(config["trusted_spark_catalogs"])}
        self.spark = SparkHolder(
            config["spark_master"], config["executor"], work_dir, config["ttl"], {**config["spark_conf"], **trusted}
        )
        self.log = logging.getLogger("distop.child")
        self.stuck = False
        """Work that was told to stop goes on here: no job begins in this process any more."""
        self.stopping = False
        """The child was told to end: errors of jobs say nothing about them any more."""
        self.deadline = 0.0
        """The session's deadline as last renewed (seconds of CLOCK_BOOTTIME), for all runs; 0: not renewed yet."""
        named = {name: BehaviorSource.parse(text) for name, text in config["behaviors"].items()}
        found: dict[str, Loadable] = {**registered(), **named}
        self.installed = {name: entry for name, entry in found.items() if not refusal(self.serves, name, ())}
        """The behaviors that there are for this child, by type name, of those types that this executor serves: the next
        one finds what is installed meanwhile.
        """
        self.table_folders = TableFolders()
        self._behaviors: dict[str, Behavior] = {}
        self._lock = threading.Lock()

    def refuse_unserved(self, op: str, type_name: str | None, tables: Iterable[TableRecord | str | None]) -> None:
        """Raises NotServed where this executor does not serve an operation's type, its table, or one of these.

        ``type_name`` None: no code of the type is to run. The daemon decides the same before; this is the last moment
        before anything is imported or opened.
        """
        ref = OperationRef.parse(op)
        wanted = [ref.table]
        wanted += [one if isinstance(one, str) else one.name for one in tables if one is not None]
        # Code is chosen by the type that is asked for, and the table by its record: both count beside the name.
        types = (None,) if type_name is None else (ref.type, type_name)
        for name in types:
            if why := refusal(self.serves, name, wanted):
                raise NotServed(f"executor {self.executor} refuses {op}: {why}")

    def behavior(self, type_name: str) -> Behavior:
        """Raises UnknownBehavior, or whatever importing it raises."""
        with self._lock:
            if type_name not in self._behaviors:
                self._behaviors[type_name] = load(type_name, self.installed)
            return self._behaviors[type_name]


class SessionDeadline:
    """The session's deadline, as it counts for one request of the daemon.

    A request that arrives in time lives on with its session: the renewed deadline counts for what it starts later, such
    as the halves of a batch. A request that arrives late stays late, whatever is renewed afterwards.
    ``deadline``: as in RunMessage.
    """

    def __init__(self, env: Environment, deadline: float) -> None:
        self._env = env
        self._deadline = deadline
        self._arrived_late = False
        self._arrived_late = self.passed()

    def passed(self) -> bool:
        """Whether the request may start nothing more."""
        if not self._deadline:
            return False
        return self._arrived_late or boottime() >= max(self._deadline, self._env.deadline)


class JobProgress(Progress):
    """The checkpoint of one job: goes to the daemon, which writes it under the claim's fence."""

    def __init__(self, outbox: Outbox, run: int, partition: int, value: Any) -> None:
        self._outbox = outbox
        self._run = run
        self._partition = partition
        self._value = value
        self._asked = value is not None
        """There may be one in etcd, whatever became of the answer."""
        self._last = float("-inf")
        self._skipped: Any = None
        """The last one that the rate limit held back, or that could not be saved."""

    def load(self) -> Any:
        return for_cleanup(self._value)

    def save(self, value: Any, *, force: bool = False) -> bool:
        """See Progress.save; also False where the daemon could not save it (the claim is gone, or etcd is). Raises
        InvalidArgument for what is not JSON or over 64 KiB."""
        if not force and time.monotonic() - self._last < PROGRESS_SECONDS:
            self._skipped = value
            return False
        try:
            size = len(dumps(value))
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"a checkpoint must be a JSON value: {error}") from error
        if size > MAX_BYTES:
            raise InvalidArgument(f"a checkpoint of {size} bytes is too large: at most {MAX_BYTES} are kept")
        return self._save(value)

    def _save(self, value: Any) -> bool:
        self._last, self._asked = time.monotonic(), True
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
        """No attempt may go on from it: what it speaks of is to be removed. Whether that is sure."""
        return not self._asked or self._save(given_up(self._value))

    def begin_anew(self) -> None:
        """It was given up, and what it spoke of is removed."""
        self._value = to_go_on_from(self._value)

    def settle(self) -> bool:
        """The job stops and will go on, perhaps elsewhere: save what the rate limit held back. Whether there may be a
        checkpoint to go on from: a save without an answer may come through yet."""
        if self._skipped is not None:
            with contextlib.suppress(InvalidArgument):
                self.save(self._skipped, force=True)
        return self._asked


class NoProgress(Progress):
    """In a batch, in planning and in completion there is no one job whose checkpoint it could be; a cleanup reads the
    checkpoint of its job, and writes none.
    """

    def __init__(self, value: Any = None) -> None:
        self._value = value

    def load(self) -> Any:
        return for_cleanup(self._value)

    def save(self, value: Any, *, force: bool = False) -> bool:
        return False

    def give_up(self) -> bool:
        """There is none to go on from."""
        return True

    def begin_anew(self) -> None:
        """There is none."""

    def settle(self) -> bool:
        """There is none to go on from."""
        return False


class Context(JobContext):
    """One job, one batch, or one call."""

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
        self._status_lock = threading.Lock()
        self._last_status = float("-inf")
        self._held_status: str | None = None
        """What the rate limit has held back: said by the run, should nothing else be said before."""
        self.operation = op
        self.table = table
        self.partition = partition
        self.attempt = attempt
        self.call = ""
        """Which call of the child this is, where it is no run."""

    @property
    def tag(self) -> str:
        """The Spark tag of this job: operation, job, attempt (a comma may not stand in it); or the one it was given."""
        if self._tag:
            return self._tag
        job = self.call or (f"{self.partition.partition:06d}" if self.partition is not None else f"run{self._number}")
        return f"{self.operation}-{job}-{self.attempt}".replace(",", "%2C")

    @property
    def spark(self) -> SparkSession:
        name = f" {self.partition.name}" if self.partition is not None else ""
        return self._env.spark.session(self.operation, self.tag, f"{self.operation}{name}")

    def with_files(self, partition: PartitionPlan) -> PartitionPlan:
        """The partition of the plan with its file lists, which are checked. Raises as ``shared_files.with_files``."""
        return with_files(partition, self.shared, self.operation, self.table, self._check_belong)

    def _check_belong(self, table: TableRecord, paths: Sequence[str]) -> None:
        """Raises InvalidArgument for files of a plan that are not the table's, and what asking its catalog raises."""

        from distop.tables import folders_of  # what reads data is loaded by who reads

        def folders(elsewhere: bool) -> tuple[str, ...]:
            return folders_of(table, self.check_cancelled, lambda: self.spark, elsewhere=elsewhere)

        # The name alone does not tell: a number that was used before may be written by hand again.
        of_which = f"gate{self._opened}" if self._opened else self.call or f"run{self._number}"
        self._env.table_folders.check((self.operation, of_which), table, paths, folders, self.check_cancelled)

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
        if not self._number:
            return
        with self._status_lock:
            if time.monotonic() - self._last_status >= STATUS_SECONDS:
                self._say(text)
            else:
                self._held_status = text

    def say_held(self) -> None:
        """Say the status that was held back, if there is one: the job may be busy with it for long."""
        with self._status_lock:
            if self._held_status is not None:
                self._say(self._held_status)

    def _say(self, text: str) -> None:
        self._last_status, self._held_status = time.monotonic(), None
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
        """Where this attempt's output is staged (published by being named in the outcome). Made on first use;
        raises InvalidArgument where there is no shared directory or no one partition."""
        if self.partition is None:
            raise InvalidArgument("a batch has a stage for each partition: use stage_of(partition)")
        return self.stage_of(self.partition)

    def stage_of(self, partition: PartitionPlan) -> str:
        """In a batch: the stage of one of its partitions."""
        place = self._stage_place_of(partition)
        # A cleanup, which is a call, finds what its attempt has made.
        self._stages.make(place, again=self.again or not self._number)
        return str(local_path(place.location) or place.location)

    @property
    def stage_place(self) -> Place:
        if self.partition is None:
            raise InvalidArgument("a batch has a stage for each partition")
        return self._stage_place_of(self.partition)

    def _stage_place_of(self, partition: PartitionPlan) -> Place:
        if self.shared is None:
            raise InvalidArgument("there is no place for staged output: give the executors a --shared-dir")
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
            raise InvalidArgument(f"the delay of what follows is a number of seconds, not {delay!r}")
        if hasattr(arg, "model_dump"):
            arg = arg.model_dump(mode="json")
        names = list(partitions) if partitions is not None else None
        due = {"not_before": rfc3339(time.time() + delay)} if delay else {}
        self._follow_ups.append({"type": type_name, "table": table, "arg": arg, "partitions": names, **due})
