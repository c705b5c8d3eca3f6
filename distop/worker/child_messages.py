"""What daemon and child say to each other: frames of JSON over a socket pair that the child inherits.

A frame is its length (4 bytes, big endian) and that many bytes of JSON, one object with its kind in ``t``. Pure:
bytes in, values out. Runs (jobs of one operation in one slot) and calls (planning, completion, cleanup) carry
numbers that the daemon gives and that are never used again within one child.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict

from distop.protocol.json_codec import dumps

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

MAX_FRAME = 16 * 1024 * 1024
"""Bytes of a frame's JSON. What is larger (items, outcomes, plans) is sent as several frames."""

PAGE_BYTES = 1024 * 1024
"""Bytes of rows that go into one frame where there are several."""

MAX_REPORT_BYTES = 512 * 1024
"""Bytes of the report of ``complete_operation``: it is stored in one etcd value."""

EXIT_SPARK_DIED = 70
"""The child's exit code when its JVM died or hung, or its SparkContext was stopped. A new process can start another."""
EXIT_DAEMON_GONE = 71
"""The child's exit code when its socket to the daemon ended."""
EXIT_SPARK_START = 72
"""The child's exit code when its Spark session did not start. PySpark keeps parts of such a session, so only a new
process can start another one."""
EXIT_SPARK_STALLED = 73
"""The child's exit code when its Spark session completes no tasks although it has jobs, and a new session may."""

_LENGTH = struct.Struct(">I")

Kind = Literal["success", "verdict", "error", "fatal", "crash", "cancelled", "refused", "unable", "unavailable"]


class ProtocolError(Exception):
    """The bytes are no frames of this protocol, or a frame is too large."""


# ------------------------------------------------------------------ daemon → child


class ConfigMessage(TypedDict):
    """The first frame: the fields of WorkerConfig that the child needs."""

    t: Literal["config"]
    work_dir: str
    shared_dir: str
    space: str
    spark_master: str
    spark_conf: dict[str, str]
    ttl: float
    executor: str
    log_level: str
    verifier_urls: list[str]
    trusted_spark_catalogs: list[str]
    serves: dict[str, list[str]]
    """The fields of core.serving.Serves."""
    behaviors: dict[str, str]
    """Type → place of its class (``distop.behavior_source``); they come before installed ones."""
    environment: dict[str, str]
    """Variables that the child sets by itself: /proc shows those that a process was started with."""


class RunMessage(TypedDict):
    """Run jobs. With ``more``, the items go on in the next run message of the same number."""

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
    """Call cancel_job_and_cleanup before each start: somebody was here before."""
    cancelled: list[int]
    """Ordinals that were cancelled before the start: clean up, do not start."""
    keep: NotRequired[bool]
    """They are only released: what a checkpoint speaks of stays."""
    careful: bool
    """Tell each end at once: the first that is missing when the child dies is the one that ran."""
    deadline: float
    """Seconds of CLOCK_BOOTTIME: a run that arrives later is refused; 0: none."""
    incarnation: str
    more: bool
    limit: NotRequired[float]
    """Seconds for one job; none where it is left out."""
    grace: NotRequired[float]
    """With ``limit``: seconds for a job to stop."""
    opened: NotRequired[int]
    """See RunRequest."""
    line: NotRequired[int]
    """It takes its turn among the runs of the same line, in one thread; their ends may be told a little later."""


class PingMessage(TypedDict):
    """Does the child answer at all?"""

    t: Literal["ping"]


class DeadlineMessage(TypedDict):
    """The session's deadline moved: jobs of runs that arrived in time may be started until then."""

    t: Literal["deadline"]
    boottime: float


class PauseMessage(TypedDict):
    """Let what has begun of a run go on, and refuse the rest."""

    t: Literal["pause"]
    run: int


class CancelMessage(TypedDict):
    """Stop these partitions of a run (None: all), or a call."""

    t: Literal["cancel"]
    run: NotRequired[int]
    call: NotRequired[int]
    partitions: NotRequired[list[int] | None]
    keep: NotRequired[bool]
    """They are only released: what a checkpoint speaks of stays."""


class ProbeMessage(TypedDict):
    """Is what runs now something that was told to stop at least ``grace`` seconds ago?"""

    t: Literal["probe"]
    run: int
    grace: float


class _CallMessage(TypedDict):
    """What all calls have. ``deadline``: as in RunMessage; left out until it is sent."""

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
    """What is known of a plan before its chunks are read."""

    version: str
    whole: bool
    chunks: int


class CompleteMessage(_CallMessage):
    """Run the completion code. ``plan`` is left out where the operation has none. With ``following``, the first page of
    outcomes comes with it: ``items`` as in a reply to a ``fetch``, whose value it would be. With ``more``, further rows
    follow."""

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
    """Call cancel_job_and_cleanup for each item; with ``more`` the items go on in the next message. ``superseded``: of
    attempts that were cut off a while ago, whose jobs may be somebody else's by now."""

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
    """Remove what planning left of an operation in the shared directory: it has ended."""

    t: Literal["sweep"]
    call: int
    op: str
    table: Mapping[str, Any] | None


class ResultsMessage(_CallMessage):
    """Whose results stand in files, of these operations and of those that came before them in the same folders: its
    result is a list of references. With ``remove``: remove what there is of these, and of no other.
    """

    t: Literal["results"]
    call: int
    op: str
    table: Mapping[str, Any] | None
    ops: list[str]
    remove: bool


class VerifyMessage(_CallMessage):
    """Ask a verifier whether the transaction of this external id was completed: its result is {completed: true, false
    or null (nobody can tell), why (a word)}. ``limit``: seconds."""

    t: Literal["verify"]
    call: int
    op: str
    table: None
    external_id: str
    verify: str
    limit: float


class ReplyMessage(TypedDict):
    """The answer to a ``progress``, ``table`` or ``fetch`` of the child: to a ``fetch``, ``value`` is the ordinal to go
    on from, and ``items`` are rows {partition, success, outcome}. With ``more``, further rows follow."""

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
    | ReplyMessage
    | StopMessage
)

# ------------------------------------------------------------------ child → daemon


class HelloMessage(TypedDict):
    """The first frame of the child: what is installed. ``skipped``: type name → why it could not be loaded."""

    t: Literal["hello"]
    declarations: list[str]
    """Each the JSON text of a Declaration."""
    skipped: dict[str, str]


class EndedMessage(TypedDict):
    """Jobs that ended: (partition, kind, result, error, started, finished)."""

    t: Literal["ended"]
    run: int
    jobs: list[tuple[int, Kind, Any, str, float, float]]


class DoneMessage(TypedDict):
    """The run is over: every item has got its end before, unless it was given up."""

    t: Literal["done"]
    run: int
    given_up: NotRequired[bool]
    """The child has to be replaced before its other items can run."""


class StuckMessage(TypedDict):
    """Work that was told to stop goes on in the child, which is to be replaced once its other jobs have ended."""

    t: Literal["stuck"]
    why: str


class PongMessage(TypedDict):
    """The answer to a ping."""

    t: Literal["pong"]


class StatusMessage(TypedDict):
    """``partition`` is -1 where the run is a batch."""

    t: Literal["status"]
    run: int
    partition: int
    text: str


class TasksMessage(TypedDict):
    """How far Spark is with what a run does now: tasks that are done, and tasks that it knows of."""

    t: Literal["tasks"]
    run: int
    done: int
    total: int


class ProgressMessage(TypedDict):
    """A checkpoint to be saved; answered by a reply with true or false."""

    t: Literal["progress"]
    run: int
    partition: int
    value: Any
    seq: int


class FetchMessage(TypedDict):
    """Asks for outcomes from ordinal ``start`` on, or (``plan``) for the partitions in the plan's chunk ``start``;
    answered by a reply with {rows, next}."""

    t: Literal["fetch"]
    call: int
    start: int
    seq: int
    plan: NotRequired[bool]


class TableMessage(TypedDict):
    """Asks in planning for the record of a table; answered by a reply with that, or null where there is none."""

    t: Literal["table"]
    call: int
    name: str
    seq: int


class HistoryMessage(TypedDict):
    """Asks for the history record of an operation; answered by a reply with {record: its JSON} or {refused: why}."""

    t: Literal["history"]
    op: str
    seq: int


class SparkMessage(TypedDict):
    """What is wrong with the Spark session now; "": nothing any more."""

    t: Literal["spark"]
    trouble: str


class ProbedMessage(TypedDict):
    t: Literal["probed"]
    run: int
    stubborn: bool


class ChunkMessage(TypedDict):
    """One chunk of a plan, as the text that goes into etcd."""

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
    """``late``: the child read the call after the session's deadline, and did nothing."""
    message: str


FromChild = (
    HelloMessage
    | EndedMessage
    | DoneMessage
    | StatusMessage
    | TasksMessage
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
        raise ProtocolError(f"a frame of {len(payload)} bytes is too large: at most {MAX_FRAME} are allowed")
    return _LENGTH.pack(len(payload)) + payload


def _dumps(value: Any) -> str:
    """Like ``protocol.json_codec.dumps``: a lone surrogate is written as its JSON escape."""
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
    """A message whose ``items`` are these rows, as frames of about ``limit`` bytes; ``more`` is set as it must be.
    Rows are JSON already, and are encoded once or not at all: this is what the daemon does most of its work for."""
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
    """Takes bytes as they arrive, gives messages as they are complete."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that ``data`` completes. Raises ProtocolError for what is none."""
        self._buffer += data
        position = 0
        try:
            while len(self._buffer) - position >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer, position)
                if length > MAX_FRAME:
                    raise ProtocolError(f"a frame of {length} bytes is announced: at most {MAX_FRAME} are allowed")
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
                    raise ProtocolError("a frame holds no message: an object with its kind in 't' is needed")
                yield message
        finally:
            del self._buffer[:position]
