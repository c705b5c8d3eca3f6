"""The protocol between daemon and child: JSON frames over a socket pair that the child inherits.

A frame is a length (4 bytes, big endian) and that many bytes of JSON: one object with its kind in ``t``. Pure: bytes
in, values out. Runs (jobs of one operation in one slot) and calls (planning, completion, cleanup) have numbers, which
the daemon assigns and never reuses for one child.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict

from distop.protocol.json_codec import dumps

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

MAX_FRAME = 16 * 1024 * 1024
"""Maximum bytes of a frame's JSON. Larger data (items, outcomes, plans) is sent as several frames."""

PAGE_BYTES = 1024 * 1024
"""Bytes of rows in one of several frames."""

MAX_REPORT_BYTES = 512 * 1024
"""Maximum bytes of the report of ``complete_operation``: it is stored in one etcd value."""

NOT_STARTED = "the operation was paused before the job started"
"""The error of a job that a pause has refused."""

EXIT_SPARK_DIED = 70
"""The child's exit code when its JVM died or hung, or its SparkContext was stopped. A new process can start another."""
EXIT_DAEMON_GONE = 71
"""The child's exit code when its socket to the daemon ended."""
EXIT_SPARK_START = 72
"""The child's exit code when its Spark session did not start.

PySpark keeps parts of such a session, so only a new process can start another one.
"""
EXIT_SPARK_STALLED = 73
"""The child's exit code when its Spark session has jobs but completes no tasks, and a new session may."""

_LENGTH = struct.Struct(">I")

EndKind = Literal["success", "verdict", "error", "fatal", "crash", "cancelled", "refused", "unable", "unavailable"]


class ProtocolError(Exception):
    """The bytes are not frames of this protocol, or a frame is too large."""


# ------------------------------------------------------------------ daemon → child


class ConfigMessage(TypedDict):
    """The first frame: the fields of WorkerConfig that the child needs."""

    t: Literal["config"]
    work_dir: str
    shared_dir: str
    storage: dict[str, Any]
    """How to reach buckets, as in the settings file."""
    space: str
    spark_master: str
    spark_conf: dict[str, str]
    ttl: float
    executor: str
    log_level: str
    verifier_urls: list[str]
    trusted_spark_catalogs: list[str]
    export_to: list[str]
    """The places below which tables may be exported (``distop.storage.export_targets``)."""
    serves: dict[str, list[str]]
    """The fields of core.serving.Serves."""
    behaviors: dict[str, str]
    """Type → location of its class (``distop.behavior_source``); they take precedence over installed ones."""
    environment: dict[str, str]
    """Environment variables that the child sets itself, since /proc shows a process's initial environment."""


class RunMessage(TypedDict):
    """Run jobs. With ``more``, the items continue in the next run message of the same number."""

    t: Literal["run"]
    run: int
    op: str
    type: str
    arg: Any
    table: Mapping[str, Any] | None
    items: list[tuple[Mapping[str, Any], int, int, Any]]
    """(partition, attempt, fence, progress)"""
    batch: bool
    cleanup: bool
    """Call cancel_job_and_cleanup before each start, because of an earlier attempt."""
    cancelled: list[int]
    """Ordinals that were cancelled before the start: clean up, do not start."""
    keep: NotRequired[bool]
    """Cancelled jobs are only released: the files of their checkpoints stay."""
    careful: bool
    """Report each end at once: if the child dies, the first job without an end was the running one."""
    deadline: float
    """Seconds of CLOCK_BOOTTIME: a run that arrives later is refused; 0: no deadline."""
    incarnation: str
    more: bool
    trace: NotRequired[tuple[str, bool]]
    """A traceparent, and whether it is that of the operation, whose attempts have spans."""
    limit: NotRequired[float]
    """Time limit of one job in seconds; no limit if left out."""
    grace: NotRequired[float]
    """With ``limit``: seconds for a job to stop."""
    opened: NotRequired[int]
    """See RunRequest."""
    line: NotRequired[int]
    """The queue of the run: its runs run in order in one thread, and their ends may be reported a little later."""


class PingMessage(TypedDict):
    """Checks whether the child answers at all."""

    t: Literal["ping"]


class DeadlineMessage(TypedDict):
    """The session's deadline moved: jobs of runs that arrived in time may start until then."""

    t: Literal["deadline"]
    boottime: float


class PauseMessage(TypedDict):
    """Let the started jobs of a run continue, and refuse the others."""

    t: Literal["pause"]
    run: int


class CancelMessage(TypedDict):
    """Cancel these partitions of a run (None: all), or a call."""

    t: Literal["cancel"]
    run: NotRequired[int]
    call: NotRequired[int]
    partitions: NotRequired[list[int] | None]
    keep: NotRequired[bool]
    """The jobs are only released: the files of their checkpoints stay."""


class ProbeMessage(TypedDict):
    """Checks whether the running job was cancelled at least ``grace`` seconds ago."""

    t: Literal["probe"]
    run: int
    grace: float


class _CallMessage(TypedDict):
    """The common fields of calls. ``deadline``: see RunMessage; set when the call is sent."""

    deadline: NotRequired[float]


class PlanMessage(_CallMessage):
    t: Literal["plan"]
    call: int
    op: str
    type: str
    arg: Any
    table: Mapping[str, Any] | None
    names: list[str] | None


class PlanOutline(TypedDict):
    """The properties of a plan that are known before its chunks are read."""

    version: str
    whole: bool
    chunks: int


class CompleteMessage(_CallMessage):
    """Run the completion code. ``plan`` is left out if the operation has none.

    With ``following``, the message has the first page of outcomes: ``items`` and ``following`` are the items and the
    value of a reply to a ``fetch``. With ``more``, further rows follow.
    """

    t: Literal["complete"]
    call: int
    op: str
    type: str
    arg: Any
    table: Mapping[str, Any] | None
    verdict: str
    total: int
    success: int
    failed: int
    plan: NotRequired[PlanOutline]
    following: NotRequired[int | None]
    items: NotRequired[list[Any]]
    more: NotRequired[bool]


class CleanupMessage(_CallMessage):
    """Call cancel_job_and_cleanup for each item; with ``more`` the items continue in the next message.

    ``superseded``: the attempts lost their claims a while ago, so other executors may have the jobs now.
    """

    t: Literal["cleanup"]
    call: int
    op: str
    type: str
    arg: Any
    table: Mapping[str, Any] | None
    items: list[tuple[Mapping[str, Any], int, int, Any]]
    incarnation: str
    superseded: NotRequired[bool]
    more: bool


class SweepMessage(_CallMessage):
    """Remove files of an ended operation: the planning's file lists (``plans``), and its ``stages``.

    ``earlier``: also the stages of earlier operations of the same table, type and object, which have ended.
    Its result is (the number of removed stages, their bytes).
    """

    t: Literal["sweep"]
    call: int
    op: str
    table: Mapping[str, Any] | None
    plans: bool
    stages: bool
    earlier: bool


class ResultsMessage(_CallMessage):
    """Find the operations with result files or stages, of ``ops`` and of earlier ones in the same folders.

    Its result is a list of references. With ``remove``: remove those of exactly ``ops``; the result is (the number of
    removed stages, their bytes). ``staging``: the types with stages.
    """

    t: Literal["results"]
    call: int
    op: str
    table: Mapping[str, Any] | None
    ops: list[str]
    remove: bool
    staging: list[str]


class VerifyMessage(_CallMessage):
    """Ask a verifier whether the transaction of this external id was completed. ``limit``: seconds.

    Its result is {completed: true, false or null (unknown), why: a word}.
    """

    t: Literal["verify"]
    call: int
    op: str
    table: None
    external_id: str
    verify: str
    limit: float


class StatisticsMessage(_CallMessage):
    """Read the table's version, and these statistics (``distop.tables.statistics``).

    ``small_bytes``: the size below which a file is small. Its result is {version, statistics: name → number or null}.
    """

    t: Literal["statistics"]
    call: int
    op: str
    table: Mapping[str, Any]
    names: list[str]
    small_bytes: int


class ReplyMessage(TypedDict):
    """The answer to a request of the child: ``progress``, ``table``, ``history`` or ``fetch``.

    For a ``fetch``, ``value`` is the ordinal of the next page, and ``items`` are rows {partition, success, outcome}.
    With ``more``, further rows follow.
    """

    t: Literal["reply"]
    seq: int
    value: Any
    error: NotRequired[str]
    items: NotRequired[list[Any]]
    more: NotRequired[bool]


class StopMessage(TypedDict):
    """Stop Spark and exit."""

    t: Literal["stop"]


ToChild = (
    ConfigMessage
    | RunMessage
    | DeadlineMessage
    | PauseMessage
    | CancelMessage
    | ProbeMessage
    | PingMessage
    | PlanMessage
    | CompleteMessage
    | CleanupMessage
    | SweepMessage
    | ResultsMessage
    | VerifyMessage
    | StatisticsMessage
    | ReplyMessage
    | StopMessage
)

# ------------------------------------------------------------------ child → daemon


class HelloMessage(TypedDict):
    """The first frame of the child: the installed behaviors. ``skipped``: type name → why it cannot be loaded."""

    t: Literal["hello"]
    declarations: list[str]
    """Each the JSON text of a Declaration."""
    skipped: dict[str, str]


class EndedMessage(TypedDict):
    """Jobs have ended: (partition, kind, result, error, started, finished)."""

    t: Literal["ended"]
    run: int
    jobs: list[tuple[int, EndKind, Any, str, float, float]]


class DoneMessage(TypedDict):
    """The run has ended: every item has got its end before, unless the run was abandoned."""

    t: Literal["done"]
    run: int
    given_up: NotRequired[bool]
    """The run was abandoned: its other items need another child."""


class StuckMessage(TypedDict):
    """Cancelled work does not stop: the child must be replaced when its other jobs have ended."""

    t: Literal["stuck"]
    why: str


class PongMessage(TypedDict):
    """The answer to a ping."""

    t: Literal["pong"]


class StatusMessage(TypedDict):
    """The status text of a job, of planning or of completion; "" ends the report. ``partition`` is -1 for a batch."""

    t: Literal["status"]
    run: NotRequired[int]
    partition: NotRequired[int]
    call: NotRequired[int]
    text: str


class TasksMessage(TypedDict):
    """The numbers of completed and of all known Spark tasks of a run."""

    t: Literal["tasks"]
    run: int
    done: int
    total: int


class WorkMessage(TypedDict):
    """How much work a job, a planning or a completion has done; ``partition`` is -1 for a batch."""

    t: Literal["work"]
    run: NotRequired[int]
    partition: NotRequired[int]
    call: NotRequired[int]
    work: Any


class ProgressMessage(TypedDict):
    """Requests to save a checkpoint; the reply is true or false."""

    t: Literal["progress"]
    run: int
    partition: int
    value: Any
    seq: int


class FetchMessage(TypedDict):
    """Requests outcomes from ordinal ``start`` on, with ``plan`` the partitions in the plan's chunk ``start``.

    With ``tables``, during planning, the records of all registered tables.
    """

    t: Literal["fetch"]
    call: int
    start: int
    seq: int
    plan: NotRequired[bool]
    tables: NotRequired[bool]


class TableMessage(TypedDict):
    """Requests the record of a table during planning; the reply is null if the table is not registered."""

    t: Literal["table"]
    call: int
    name: str
    seq: int


class HistoryMessage(TypedDict):
    """Requests the history record of an operation; the reply is {record: its JSON} or {refused: why}."""

    t: Literal["history"]
    op: str
    seq: int


class SparkMessage(TypedDict):
    """The current problem of the Spark session; "": none any more."""

    t: Literal["spark"]
    trouble: str


class ProbedMessage(TypedDict):
    """The answer to a probe."""

    t: Literal["probed"]
    run: int
    stubborn: bool


class ChunkMessage(TypedDict):
    """One chunk of a plan: the text for etcd."""

    t: Literal["chunk"]
    call: int
    data: str


class ResultMessage(TypedDict):
    t: Literal["result"]
    call: int
    value: Any


class FailedMessage(TypedDict):
    t: Literal["failed"]
    call: int
    kind: Literal["transient", "fatal", "unable", "late"]
    """``late``: the child read the call after the session's deadline, and did not execute it."""
    message: str


FromChild = (
    HelloMessage
    | EndedMessage
    | DoneMessage
    | StatusMessage
    | TasksMessage
    | WorkMessage
    | ProgressMessage
    | FetchMessage
    | TableMessage
    | HistoryMessage
    | SparkMessage
    | ProbedMessage
    | StuckMessage
    | PongMessage
    | ChunkMessage
    | ResultMessage
    | FailedMessage
)


# ------------------------------------------------------------------ frames


def frame(payload: bytes) -> bytes:
    """The frame of a JSON text. Raises ProtocolError beyond :data:`MAX_FRAME`."""
    if len(payload) > MAX_FRAME:
        raise ProtocolError(f"a frame has {len(payload)} bytes: at most {MAX_FRAME} are allowed")
    return _LENGTH.pack(len(payload)) + payload


def _dumps(value: Any) -> str:
    """JSON text; as in ``json_codec.dumps``, a lone surrogate is written as its JSON escape."""
    return dumps(value).decode()


def encode(message: ToChild | FromChild) -> bytes:
    """A message as a frame."""
    return frame(_dumps(message).encode())


def row(value: Any) -> str:
    """One row of :func:`encode_paged` as JSON."""
    return _dumps(value)


def encode_paged(
    message: RunMessage | CompleteMessage | CleanupMessage | ReplyMessage, rows: Iterable[str], limit: int = PAGE_BYTES
) -> Iterator[bytes]:
    """A message with these rows as ``items``, in frames of about ``limit`` bytes; sets ``more``.

    Rows are JSON texts and are not encoded again: the daemon spends most of its time here.
    """
    head = _dumps({k: v for k, v in message.items() if k not in ("items", "more")})[:-1]
    group: list[str] = []
    size = 0

    def page(more: str) -> bytes:
        return frame(f'{head},"items":[{",".join(group)}],"more":{more}}}'.encode())

    for text in rows:
        if group and size + len(text) > limit:
            yield page("true")
            group.clear()
            size = 0
        group.append(text)
        size += len(text)
    yield page("false")


class Decoder:
    """Decodes messages from bytes that arrive in arbitrary pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that ``data`` completes. Raises ProtocolError for invalid bytes."""
        self._buffer += data
        position = 0
        try:
            while len(self._buffer) - position >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer, position)
                if length > MAX_FRAME:
                    raise ProtocolError(f"a frame has {length} bytes: at most {MAX_FRAME} are allowed")
                end = position + _LENGTH.size + length
                if len(self._buffer) < end:
                    break
                payload = bytes(self._buffer[position + _LENGTH.size : end])
                position = end
                try:
                    message = json.loads(payload)
                except ValueError as error:
                    raise ProtocolError(f"a frame is not JSON: {error}") from None
                if not isinstance(message, dict) or not isinstance(message.get("t"), str):
                    raise ProtocolError("a frame is not a message: an object with a text in 't' is required")
                yield message
        finally:
            del self._buffer[:position]
