"""The records of distop: what stands in etcd, as frozen values, with their JSON forms (docs/architecture.md).

Every record that others read carries ``v`` = :data:`SCHEMA_VERSION`; unknown fields are ignored. Times are
seconds since the epoch here and RFC 3339 text in UTC in the records. Nothing here reads a clock.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from distop.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

SCHEMA_VERSION = 1
"""The ``v`` of every record that this release writes; operations of a higher one are left alone."""

CLUSTER_TABLE = "@cluster"
"""The table name of operations that belong to no table: one job, named :data:`WHOLE`."""

WHOLE = "all"
"""The partition name of an operation with a single job for everything."""

MAX_PARTITIONS = 1_000_000
MAX_ARGUMENT_BYTES = 512 * 1024
MAX_OUTCOME_BYTES = 64 * 1024
MAX_CHUNK_BYTES = 512 * 1024


class State(StrEnum):
    """The states of an operation (``<root>.state``)."""

    PENDING = "pending"
    RUNNING = "running"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    SUCCESS = "success"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        """The operation has ended: its history record exists."""
        return self in (State.SUCCESS, State.FAILED, State.CANCELLED)


class Phase(StrEnum):
    """What an operation without a gate is in (``distOpPending``)."""

    WAITING = "waiting"
    PLANNING = "planning"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    COMPLETING = "completing"
    CLEANING = "cleaning"


class JobState(StrEnum):
    """The states of a job that ended (``<root>.<partition>.state``); until then the key is absent."""

    SUCCESS = "success"
    FAILED = "failed"


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def dumps(value: Any) -> bytes:
    """Compact JSON in UTF-8. A lone surrogate (a byte of a path that is no UTF-8) is written as its JSON escape, and
    so comes back as it was: a text must not stop a report.
    """
    return _ENCODER.encode(value).encode(errors="backslashreplace")


def loads(value: bytes) -> Any:
    """The JSON value; ValueError where it is none."""
    return json.loads(value)


def rfc3339(seconds: float) -> str:
    """Seconds since the epoch as RFC 3339 in UTC with milliseconds: ``2013-01-01T00:00:00.000Z``."""
    return _rfc3339(int(seconds * 1000))


@lru_cache(maxsize=256)
def _rfc3339(milliseconds: int) -> str:
    # Thousands of jobs end within the same few milliseconds.
    moment = datetime.fromtimestamp(milliseconds // 1000, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{milliseconds % 1000:03d}Z"


def from_rfc3339(text: str) -> float:
    """Seconds since the epoch; ValueError where it is no time."""
    return datetime.fromisoformat(text).timestamp()


_REF_SAFE = re.compile(r"[/%]")


def _part(text: str) -> str:
    return _REF_SAFE.sub(lambda m: f"%{ord(m.group()):02X}", text)


@dataclass(frozen=True, slots=True, order=True)
class OperationRef:
    """The identity of an operation: ``table/type[/object]/instance`` in its text form."""

    table: str
    type: str
    object: str
    """The object id, or "" for a type without one."""
    instance: int

    def __str__(self) -> str:
        parts = [self.table, self.type, *([self.object] if self.object else [])]
        return "/".join([*map(_part, parts), str(self.instance)])

    @classmethod
    def parse(cls, text: str) -> OperationRef:
        """The reverse of ``str``. Raises InvalidArgument where the text is no operation."""
        parts = text.split("/")
        try:
            if len(parts) not in (3, 4) or not all(parts) or not (parts[-1].isascii() and parts[-1].isdigit()):
                raise ValueError(text)
            named = [unquote(part, errors="strict") for part in parts[:-1]]
            return cls(named[0], named[1], named[2] if len(named) == 3 else "", int(parts[-1]))
        except ValueError:  # or an escape that is no UTF-8, or more digits than Python reads
            raise InvalidArgument(
                f"{text[:200]!r} is not an operation: write table/type/instance or table/type/object/instance, "
                "with % and / inside a part percent-encoded"
            ) from None


@dataclass(frozen=True, slots=True)
class Retry:
    """How unexpected errors are retried: ``attempts`` failures at most, back-off from ``initial`` doubling to
    ``maximum`` seconds, with jitter drawn by the executor.
    """

    attempts: int = 3
    initial: float = 1.0
    maximum: float = 60.0

    def delay(self, failures: int) -> float:
        """Seconds to wait after the ``failures``-th failure (from 1), before jitter."""
        return float(min(self.maximum, self.initial * 2.0 ** min(max(failures - 1, 0), 60)))

    def to_json(self) -> dict[str, Any]:
        return {"attempts": self.attempts, "initial": self.initial, "maximum": self.maximum}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Retry:
        return cls(int(data.get("attempts", 3)), float(data.get("initial", 1.0)), float(data.get("maximum", 60.0)))


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a behavior publishes at ``distOpBehavior.<type>``, so that a start is checked without its code."""

    type_name: str
    arg_schema: Mapping[str, Any] = field(default_factory=dict)
    result_schema: Mapping[str, Any] = field(default_factory=dict)
    report_schema: Mapping[str, Any] = field(default_factory=dict)
    object_field: str | None = None
    instances: str = "many"
    conflicts_with: tuple[str, ...] = ()
    can_fail: bool = True
    retry: Retry = Retry()
    lost: str = "retry"
    failure_policy: str = "fail_fast"
    resumable: bool = False
    batch: bool = False
    """The behavior has ``run_batch``: executors claim in blocks."""
    completes: bool = True
    """The behavior has completion code: without it the decision and the finish are one transaction."""
    description: str = ""

    def encode(self) -> bytes:
        return dumps(
            {
                "v": SCHEMA_VERSION,
                "type_name": self.type_name,
                "description": self.description,
                "arg_schema": dict(self.arg_schema),
                "result_schema": dict(self.result_schema),
                "report_schema": dict(self.report_schema),
                "object_field": self.object_field,
                "instances": self.instances,
                "conflicts_with": list(self.conflicts_with),
                **self.rules().to_json(),
            }
        )

    @classmethod
    def decode(cls, value: bytes) -> Declaration:
        data = loads(value)
        rules = Rules.from_json(data)
        return cls(
            data["type_name"],
            data.get("arg_schema") or {},
            data.get("result_schema") or {},
            data.get("report_schema") or {},
            data.get("object_field"),
            data.get("instances", "many"),
            tuple(data.get("conflicts_with", ())),
            rules.can_fail,
            rules.retry,
            rules.lost,
            rules.failure_policy,
            rules.resumable,
            rules.batch,
            rules.completes,
            data.get("description", ""),
        )

    def rules(self) -> Rules:
        """The part of the declaration that an operation takes with it into its spec."""
        return Rules(
            self.can_fail, self.retry, self.lost, self.failure_policy, self.resumable, self.batch, self.completes
        )


@dataclass(frozen=True, slots=True)
class Rules:
    """How an operation's jobs are run and judged: its behavior's declaration, as it was at the start."""

    can_fail: bool = True
    retry: Retry = Retry()
    lost: str = "retry"
    failure_policy: str = "fail_fast"
    resumable: bool = False
    batch: bool = False
    completes: bool = True

    def to_json(self) -> dict[str, Any]:
        return {
            "can_fail": self.can_fail,
            "retry": self.retry.to_json(),
            "lost": self.lost,
            "failure_policy": self.failure_policy,
            "resumable": self.resumable,
            "batch": self.batch,
            "completes": self.completes,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Rules:
        return cls(
            bool(data.get("can_fail", True)),
            Retry.from_json(data.get("retry") or {}),
            data.get("lost", "retry"),
            data.get("failure_policy", "fail_fast"),
            bool(data.get("resumable", False)),
            bool(data.get("batch", False)),
            bool(data.get("completes", True)),
        )

    def at_limit(self, failures: int) -> bool:
        """``failures`` unexpected errors are as many as allowed. A behavior that cannot fail has no limit."""
        return self.can_fail and failures >= self.retry.attempts


@dataclass(frozen=True, slots=True)
class TableRecord:
    """``distOpTable.<table>``: where a table is and how to read it."""

    name: str
    format: str
    location: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "v": SCHEMA_VERSION,
            "name": self.name,
            "format": self.format,
            "location": self.location,
            "options": dict(self.options),
        }

    def encode(self) -> bytes:
        return dumps(self.to_json())

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TableRecord:
        return cls(data["name"], data["format"], data["location"], data.get("options") or {})

    @classmethod
    def decode(cls, value: bytes) -> TableRecord:
        return cls.from_json(loads(value))


@dataclass(frozen=True, slots=True)
class Spec:
    """``<root>.spec``: what never changes about an operation."""

    request_id: str
    time: str
    submitter: str
    rules: Rules
    table: TableRecord | None = None
    partitions: tuple[str, ...] | None = None
    """The names asked for, or None for all of the table's."""
    one_at_a_time: bool = False
    """The operation holds ``.current`` of its type or object."""
    version: int = SCHEMA_VERSION

    def encode(self) -> bytes:
        return dumps(
            {
                "v": self.version,
                "request_id": self.request_id,
                "time": self.time,
                "submitter": self.submitter,
                "table": self.table.to_json() if self.table else None,
                "partitions": list(self.partitions) if self.partitions is not None else None,
                "one_at_a_time": self.one_at_a_time,
                "options": self.rules.to_json(),
            }
        )

    @classmethod
    def decode(cls, value: bytes) -> Spec:
        data = loads(value)
        names = data.get("partitions")
        return cls(
            data.get("request_id", ""),
            data.get("time", ""),
            data.get("submitter", ""),
            Rules.from_json(data.get("options") or {}),
            TableRecord.from_json(data["table"]) if data.get("table") else None,
            tuple(names) if names is not None else None,
            bool(data.get("one_at_a_time", False)),
            int(data.get("v", SCHEMA_VERSION)),
        )


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """One partition as the plan froze it: its files as (path, size in bytes, mtime in ns)."""

    partition: int
    name: str
    bytes: int = 0
    files: tuple[tuple[str, int, int], ...] = ()
    files_at: str = ""
    """Where the file list stands when it is too large for etcd: a path under the shared directory."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The partition columns' values as text (None: null), for tables that have them."""

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"partition": self.partition, "name": self.name, "bytes": self.bytes}
        if self.files_at:
            data["files_at"] = self.files_at
        else:
            data["files"] = [list(f) for f in self.files]
        if self.values:
            data["values"] = dict(self.values)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PartitionPlan:
        return cls(
            int(data["partition"]),
            data["name"],
            int(data.get("bytes", 0)),
            tuple((f[0], int(f[1]), int(f[2])) for f in data.get("files", ())),
            data.get("files_at", ""),
            data.get("values") or {},
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """``<root>.plan``: written last, after its chunks. ``digest`` covers the chunks' bytes in order (invariant 13)."""

    count: int
    version: str
    digest: str
    chunks: int

    def encode(self) -> bytes:
        return dumps(
            {
                "v": SCHEMA_VERSION,
                "count": self.count,
                "version": self.version,
                "digest": self.digest,
                "chunks": self.chunks,
            }
        )

    @classmethod
    def decode(cls, value: bytes) -> Plan:
        data = loads(value)
        return cls(int(data["count"]), data.get("version", ""), data.get("digest", ""), int(data.get("chunks", 0)))


def encode_chunk(partitions: Iterable[PartitionPlan]) -> bytes:
    """A chunk of the plan: a JSON array."""
    return dumps([p.to_json() for p in partitions])


def decode_chunk(value: bytes) -> list[PartitionPlan]:
    """The reverse of :func:`encode_chunk`."""
    return [PartitionPlan.from_json(item) for item in loads(value)]


@dataclass(frozen=True, slots=True)
class Claim:
    """``distOpClaim…``: who runs a job (``incarnation``), or that it waits to be claimed again (no
    incarnation, ``retry_at``). ``failures`` counts unexpected errors and lost executors; the limit counts them.
    """

    executor: str
    incarnation: str
    attempt: int
    failures: int
    retry_at: str = ""
    error: str = ""
    """The last unexpected error, for people; bounded by :data:`MAX_ERROR_TEXT`."""

    @property
    def waiting(self) -> bool:
        """Nobody runs the job; it may be claimed when due."""
        return not self.incarnation

    def encode(self) -> bytes:
        data: dict[str, Any] = {"v": SCHEMA_VERSION, "executor": self.executor}
        if self.incarnation:
            data["incarnation"] = self.incarnation
        data["attempt"] = self.attempt
        data["failures"] = self.failures
        if self.retry_at:
            data["retry_at"] = self.retry_at
        if self.error:
            data["error"] = shorten(self.error, MAX_ERROR_TEXT)
        return dumps(data)

    @classmethod
    def decode(cls, value: bytes) -> Claim:
        data = loads(value)
        return cls(
            data.get("executor", ""),
            data.get("incarnation", ""),
            int(data.get("attempt", 1)),
            int(data.get("failures", 0)),
            data.get("retry_at", ""),
            data.get("error", ""),
        )


MAX_ERROR_TEXT = 4_000
"""Characters of an error text that a record keeps; the rest stays in the executor's log."""


def shorten(text: str, limit: int) -> str:
    """The text within ``limit`` characters: its beginning and its end, which carry what matters of an error."""
    if len(text) <= limit:
        return text
    head = limit // 3
    return f"{text[:head]} … {text[len(text) - (limit - head - 3):]}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """``<root>.<partition>.outcome``: how a job ended."""

    name: str
    executor: str
    incarnation: str
    attempt: int
    started: str
    finished: str
    result: Any = None
    error: str = ""

    def encode(self) -> bytes:
        """JSON of at most :data:`MAX_OUTCOME_BYTES`; raises InvalidArgument where the result is too large."""
        data: dict[str, Any] = {
            "v": SCHEMA_VERSION,
            "name": self.name,
            "executor": self.executor,
            "incarnation": self.incarnation,
            "attempt": self.attempt,
            "started": self.started,
            "finished": self.finished,
        }
        if self.result is not None:
            data["result"] = self.result
        if self.error:
            data["error"] = shorten(self.error, MAX_ERROR_TEXT)
        value = dumps(data)
        if len(value) > MAX_OUTCOME_BYTES:
            raise InvalidArgument(
                f"the outcome of partition {self.name} has {len(value)} bytes; at most {MAX_OUTCOME_BYTES} are kept: "
                "put large results into a file and return its path"
            )
        return value

    @classmethod
    def decode(cls, value: bytes) -> Outcome:
        data = loads(value)
        return cls(
            data.get("name", ""),
            data.get("executor", ""),
            data.get("incarnation", ""),
            int(data.get("attempt", 1)),
            data.get("started", ""),
            data.get("finished", ""),
            data.get("result"),
            data.get("error", ""),
        )


@dataclass(frozen=True, slots=True)
class Node:
    """``distOpNode.<incarnation>``: a live executor daemon, on its session's lease."""

    executor: str
    host: str
    slots: int
    behaviors: tuple[str, ...]
    labels: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    released: int = 0
    """Grows each time this daemon set claims to waiting: others then look for work that their watches, which
    see no claims, would miss until the next poll."""

    def encode(self) -> bytes:
        return dumps(
            {
                "v": SCHEMA_VERSION,
                "executor": self.executor,
                "host": self.host,
                "slots": self.slots,
                "behaviors": list(self.behaviors),
                "labels": dict(self.labels),
                "version": self.version,
                "released": self.released,
            }
        )

    @classmethod
    def decode(cls, value: bytes) -> Node:
        data = loads(value)
        return cls(
            data.get("executor", ""),
            data.get("host", ""),
            int(data.get("slots", 1)),
            tuple(data.get("behaviors", ())),
            data.get("labels") or {},
            data.get("version", ""),
            int(data.get("released", 0)),
        )


@dataclass(frozen=True, slots=True)
class Cancel:
    """``<root>.cancel``: why an operation is being cancelled. ``reason``: user, failed (fail fast), aborted."""

    reason: str
    text: str = ""

    def encode(self) -> bytes:
        return dumps({"v": SCHEMA_VERSION, "reason": self.reason, "text": self.text})

    @classmethod
    def decode(cls, value: bytes) -> Cancel:
        data = loads(value)
        return cls(data.get("reason", "user"), data.get("text", ""))


@dataclass(frozen=True, slots=True)
class Attempts:
    """How often planning (``<root>.planning``) was tried, and what went wrong last."""

    attempts: int
    error: str = ""
    retry_at: str = ""

    def encode(self) -> bytes:
        return dumps(
            {
                "v": SCHEMA_VERSION,
                "attempts": self.attempts,
                "error": shorten(self.error, MAX_ERROR_TEXT),
                "retry_at": self.retry_at,
            }
        )

    @classmethod
    def decode(cls, value: bytes) -> Attempts:
        data = loads(value)
        return cls(int(data.get("attempts", 0)), data.get("error", ""), data.get("retry_at", ""))


@dataclass(frozen=True, slots=True)
class Decision:
    """``<root>.decision``: the verdict by the jobs, fixed before the completion code runs (never recounted)."""

    verdict: State
    total: int
    success: int
    failed: int
    failed_ranges: str = ""
    attempts: int = 0
    """Completion attempts that ended in an unexpected error."""
    error: str = ""
    """Why the operation fails where no job says it: planning, or the last completion error."""
    retry_at: str = ""
    follow_ups: tuple[Mapping[str, Any], ...] = ()
    """What the completion code wants started after the finish: ``{"type", "table", "arg", "partitions"}`` each."""

    def encode(self) -> bytes:
        return dumps(
            {
                "v": SCHEMA_VERSION,
                "verdict": str(self.verdict),
                "total": self.total,
                "success": self.success,
                "failed": self.failed,
                "failed_ranges": self.failed_ranges,
                "attempts": self.attempts,
                "error": shorten(self.error, MAX_ERROR_TEXT),
                "retry_at": self.retry_at,
                "follow_ups": list(self.follow_ups),
            }
        )

    @classmethod
    def decode(cls, value: bytes) -> Decision:
        data = loads(value)
        return cls(
            State(data["verdict"]),
            int(data["total"]),
            int(data["success"]),
            int(data["failed"]),
            data.get("failed_ranges", ""),
            int(data.get("attempts", 0)),
            data.get("error", ""),
            data.get("retry_at", ""),
            tuple(data.get("follow_ups") or ()),
        )


@dataclass(frozen=True, slots=True)
class History:
    """``distOpHistory…``: the final record of an operation, written with its terminal state."""

    op: str
    state: State
    started: str
    finished: str
    total: int
    success: int
    failed: int
    report: Any = None
    errors: tuple[Mapping[str, Any], ...] = ()
    """The first few errors: ``{"partition": name or None, "text": …}``."""
    failed_ranges: str = ""
    """Ordinals of the failed jobs, as ranges: ``3,7-9``."""
    request_id: str = ""
    cancel: Cancel | None = None

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "v": SCHEMA_VERSION,
            "op": self.op,
            "state": str(self.state),
            "started": self.started,
            "finished": self.finished,
            "jobs": {"total": self.total, "success": self.success, "failed": self.failed},
            "report": self.report,
            "errors": [dict(e) for e in self.errors],
            "failed": self.failed_ranges,
            "request_id": self.request_id,
        }
        if self.cancel is not None:
            data["cancel"] = {"reason": self.cancel.reason, "text": self.cancel.text}
        return data

    def encode(self) -> bytes:
        return dumps(self.to_json())

    @classmethod
    def decode(cls, value: bytes) -> History:
        data = loads(value)
        jobs = data.get("jobs") or {}
        cancel = data.get("cancel")
        return cls(
            data["op"],
            State(data["state"]),
            data.get("started", ""),
            data.get("finished", ""),
            int(jobs.get("total", 0)),
            int(jobs.get("success", 0)),
            int(jobs.get("failed", 0)),
            data.get("report"),
            tuple(data.get("errors") or ()),
            data.get("failed", ""),
            data.get("request_id", ""),
            Cancel(cancel.get("reason", ""), cancel.get("text", "")) if cancel else None,
        )


def to_ranges(ordinals: Iterable[int]) -> str:
    """Sorted ordinals as ranges: ``[3, 7, 8, 9]`` → ``"3,7-9"``."""
    runs: list[list[int]] = []
    for n in sorted(set(ordinals)):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def from_ranges(text: str) -> list[int]:
    """The reverse of :func:`to_ranges`."""
    out: list[int] = []
    for run in filter(None, text.split(",")):
        first, _, last = run.partition("-")
        out.extend(range(int(first), int(last or first) + 1))
    return out


def chunked(partitions: Sequence[PartitionPlan], limit: int = MAX_CHUNK_BYTES) -> list[bytes]:
    """The plan's partitions as encoded chunks of at most ``limit`` bytes each (a larger single one stands alone)."""
    chunks: list[bytes] = []
    rows: list[bytes] = []
    size = 2
    for partition in partitions:
        row = dumps(partition.to_json())
        if rows and size + len(row) + 1 > limit:
            chunks.append(b"[" + b",".join(rows) + b"]")
            rows, size = [], 2
        rows.append(row)
        size += len(row) + 1
    if rows:
        chunks.append(b"[" + b",".join(rows) + b"]")
    return chunks


