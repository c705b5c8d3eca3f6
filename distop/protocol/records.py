"""The records of distop in etcd, as frozen values with JSON forms.

docs/reference/keys.md describes them. Every record that others read has ``v`` = ``SCHEMA_VERSION``; unknown fields are
ignored. Times are seconds since the epoch in code, and RFC 3339 text in UTC in the records.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote

from distop.errors import InvalidArgument
from distop.protocol import trace_context
from distop.protocol.behavior_declaration import Rules
from distop.protocol.executor_nodes import ALL, NodeState, Serves
from distop.protocol.field_checks import checked
from distop.protocol.frozen import frozen
from distop.protocol.json_codec import MAX_ERROR_TEXT, SCHEMA_VERSION, dumps, loads, shorten
from distop.protocol.schedule import Series
from distop.protocol.user_actions import NO_ACTIONS, Actions

if TYPE_CHECKING:
    from collections.abc import Mapping

CLUSTER_TABLE = "@cluster"
"""The table name of operations that belong to no table: one job, named :data:`WHOLE`."""
WHOLE = "all"
"""The partition name of an operation with a single job for everything."""
MAX_ARGUMENT_BYTES = 512 * 1024
Subject: TypeAlias = tuple[str, str]
"""A table and an operation type."""


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
        """Whether the operation has ended: its history record exists."""
        return self in (State.SUCCESS, State.FAILED, State.CANCELLED)


class Phase(StrEnum):
    """The phase of an operation without a gate (``distOpPending``)."""

    WAITING = "waiting"
    PLANNING = "planning"
    PAUSED = "paused"
    HALTED = "halted"
    """Paused, and running jobs are told to stop."""
    CANCELLING = "cancelling"
    COMPLETING = "completing"
    CLEANING = "cleaning"

    def of(self, stage: str) -> bool:
        """Whether the phase belongs to this stage."""
        return stage == ("paused" if self is Phase.HALTED else self.value)


_REF_SAFE = re.compile(r"[/%]")
_NO_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")


@lru_cache(maxsize=4_096)
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
    _hash: int = field(init=False, repr=False, compare=False)
    """Cached: refs are used as keys very often."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.table, self.type, self.object, self.instance)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # Hashes of texts differ between processes.
        return OperationRef, (self.table, self.type, self.object, self.instance)

    def __str__(self) -> str:
        parts = [self.table, self.type, *([self.object] if self.object else [])]
        return "/".join([*map(_part, parts), str(self.instance)])

    @classmethod
    def parse(cls, text: str) -> OperationRef:
        """The reverse of ``str``. Raises InvalidArgument for an invalid text.

        Escapes that ``str`` does not write, such as those of keys, are accepted as well. ``str`` of the result is the
        canonical name.
        """
        parts = text.split("/")
        try:
            if len(parts) not in (3, 4) or not all(parts) or not (parts[-1].isascii() and parts[-1].isdigit()):
                raise ValueError(text)
            if parts[-1] != str(int(parts[-1])) or parts[-1] == "0" or _NO_ESCAPE.search(text):
                raise ValueError(text)
            named = [unquote(part, errors="strict") for part in parts[:-1]]
            return cls(named[0], named[1], named[2] if len(named) == 3 else "", int(parts[-1]))
        except ValueError:  # also an escape that is not UTF-8, or more digits than Python parses
            raise InvalidArgument(
                f"{text[:200]!r} is not an operation: write table/type/instance or table/type/object/instance, "
                "with % and / inside a part percent-encoded"
            ) from None


PLANNED_OPTIONS = frozenset({"columns", "partition_types"})
"""Options of a table that planning may find and a plan set: how to read files, not which."""


@dataclass(frozen=True, slots=True)
class TableRecord:
    """``distOpTable.<table>``: where a table is and how to read it."""

    name: str
    format: str
    location: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """Its location, if it is an absolute path or a URL; "" for a name in a catalog."""
        return self.location if self.location.startswith("/") or "://" in self.location else ""

    def extended(self, options: Mapping[str, Any]) -> TableRecord:
        """The record with additional options, which planning found (Plan)."""
        return replace(self, options={**self.options, **options}) if options else self

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
        return checked(cls(data["name"], data["format"], data["location"], data.get("options") or {}))

    @classmethod
    def decode(cls, value: bytes) -> TableRecord:
        return cls.from_json(loads(value))


def _series(data: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The series field of a spec, checked. Raises what :meth:`Series.from_json` raises."""
    if data is not None:
        Series.from_json(data)
    return data


@frozen
class Spec:
    """``<root>.spec``: what never changes about an operation."""

    request_id: str
    time: str
    submitter: str
    rules: Rules
    table: TableRecord | None = None
    partitions: tuple[str, ...] | None = None
    """The requested partition names; None: all of the table's."""
    one_at_a_time: bool = False
    """The operation holds ``.current`` of its type or object."""
    version: int = SCHEMA_VERSION
    rerun_of: str = ""
    """The operation of which this one reruns partitions."""
    request_digest: str = ""
    """Digest of what the request asked for (``identity.request_digest``): one id, one request."""
    not_before: str = ""
    """The earliest time at which it begins (RFC 3339)."""
    hold: str = ""
    """It does not begin while this hold exists."""
    series: Mapping[str, Any] | None = None
    """Its schedule, if another operation of the series follows (``protocol.schedule``)."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels by which the caller finds it (``protocol.operation_labels``)."""
    where: Mapping[str, str] = field(default_factory=dict)
    """Labels that an executor must have to work for it."""
    id: str = ""
    """Its id (``protocol.identity``); "": none.

    No other operation of the type on the table has it until this one ends.
    """
    follows: str = ""
    """The operation of the same id whose end it waits for."""
    by: str = ""
    """The user that started it, as the client reports it, if the caller gave another ``submitter``."""
    table_revision: int = 0
    """For a type that may remove the table's record: the mod revision of the record at the start."""
    traceparent: str = ""
    """The caller's trace context (``protocol.trace_context``); "": none."""

    def encode(self) -> bytes:
        data: dict[str, Any] = {
            "v": self.version,
            "request_id": self.request_id,
            "request_digest": self.request_digest,
            "time": self.time,
            "submitter": self.submitter,
            "table": self.table.to_json() if self.table else None,
            "partitions": list(self.partitions) if self.partitions is not None else None,
            "one_at_a_time": self.one_at_a_time,
            "options": self.rules.to_json(),
        }
        for name in (
            "rerun_of",
            "not_before",
            "hold",
            "series",
            "id",
            "follows",
            "by",
            "table_revision",
            "traceparent",
        ):
            if value := getattr(self, name):
                data[name] = value
        if self.labels:
            data["labels"] = dict(self.labels)
        if self.where:
            data["where"] = dict(self.where)
        return dumps(data)

    @classmethod
    def decode(cls, value: bytes) -> Spec:
        data = loads(value)
        names = data.get("partitions")
        spec = checked(
            cls(
                data.get("request_id", ""),
                data.get("time", ""),
                data.get("submitter", ""),
                Rules.from_json(data.get("options") or {}),
                TableRecord.from_json(data["table"]) if data.get("table") else None,
                tuple(names) if names is not None else None,
                bool(data.get("one_at_a_time", False)),
                int(data.get("v", SCHEMA_VERSION)),
                data.get("rerun_of", ""),
                data.get("request_digest", ""),
                data.get("not_before", ""),
                data.get("hold", ""),
                _series(data.get("series")),
                data.get("labels") or {},
                data.get("where") or {},
                data.get("id", ""),
                data.get("follows", ""),
                data.get("by", ""),
                int(data.get("table_revision", 0)),
                str(trace_context.parse(data.get("traceparent")) or ""),
            )
        )
        # Keys contain these, so they must be encodable.
        "".join((spec.request_id, spec.hold, spec.id, spec.follows, spec.rerun_of)).encode()
        return spec


ALL_OPERATIONS = "*"
"""Stands for the name of each operation that other executors serve."""


@frozen
class Node:
    """``distOpNode.<incarnation>``: a live executor daemon, on its session's lease."""

    executor: str
    host: str
    slots: int
    behaviors: tuple[str, ...]
    labels: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    released: int = 0
    """Grows each time this daemon sets claims to waiting.

    Watches do not cover claims, so other executors check for work when it changes instead of at the next poll.
    """
    state: NodeState = NodeState.ACTIVE
    unable: Mapping[str, str] = field(default_factory=dict)
    """Installed types that cannot run here, and the missing requirement; not in ``behaviors``."""
    doing: Mapping[str, str] = field(default_factory=dict)
    """What long jobs, plannings and completions report that they are doing, by operation; for people only."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Writes that etcd rejects as invalid, by operation, in etcd's words; retried with back-off.

    Only some operations are listed; ``refused_more`` counts the others.
    """
    clock: int = 0
    """Seconds by which its clock is ahead of etcd's (negative: behind), if over a minute."""
    spark: str = ""
    """Why its Spark session currently runs no tasks, for people only; "": no problem."""
    failing: Mapping[str, str] = field(default_factory=dict)
    """Types that failed to start here at the last attempt, and why; retried after a pause.

    During the pause ``behaviors`` leaves them out, and ``unable`` lists them as well.
    """
    serves: Serves = ALL
    """The types and tables that it serves (fields ``types`` and ``tables``)."""
    clock_unknown: str = ""
    """Why its clock cannot be compared with etcd's; "": it can, or a retry is due."""
    refused_more: int = 0
    """The number of operations with rejected writes that ``refused`` does not list."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Operations whose jobs it does not claim for a while, and why, as a sentence; for people only.

    ``ALL_OPERATIONS`` stands for all that other executors serve. ``skipped_more`` counts those that are not listed.
    """
    skipped_more: int = 0
    work: Mapping[str, Any] = field(default_factory=dict)
    """How much work long jobs, plannings and completions have done, by operation, as a list; for people only.

    Each is a :class:`distop.protocol.work_done.WorkDone` with ``partition`` (-1: a batch, a planning, a completion, or
    the sum of further jobs) and ``since``, the time of its first report.
    """

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
                "state": str(self.state),
                **({"unable": dict(self.unable)} if self.unable else {}),
                **({"doing": dict(self.doing)} if self.doing else {}),
                **({"work": dict(self.work)} if self.work else {}),
                **({"refused": dict(self.refused)} if self.refused else {}),
                **({"refused_more": self.refused_more} if self.refused_more else {}),
                **({"skipped": dict(self.skipped)} if self.skipped else {}),
                **({"skipped_more": self.skipped_more} if self.skipped_more else {}),
                **({"clock": self.clock} if self.clock else {}),
                **({"clock_unknown": self.clock_unknown} if self.clock_unknown else {}),
                **({"spark": self.spark} if self.spark else {}),
                **({"failing": dict(self.failing)} if self.failing else {}),
                **self.serves.to_json(),
            }
        )

    @classmethod
    def decode(cls, value: bytes) -> Node:
        data = loads(value)
        return checked(
            cls(
                data.get("executor", ""),
                data.get("host", ""),
                int(data.get("slots", 1)),
                tuple(data.get("behaviors", ())),
                data.get("labels") or {},
                data.get("version", ""),
                int(data.get("released", 0)),
                NodeState(data.get("state", "active")),
                data.get("unable") or {},
                data.get("doing") or {},
                data.get("refused") or {},
                int(data.get("clock", 0)),
                data.get("spark") or "",
                data.get("failing") or {},
                Serves.from_json(data),
                data.get("clock_unknown") or "",
                int(data.get("refused_more", 0)),
                data.get("skipped") or {},
                int(data.get("skipped_more", 0)),
                data.get("work") or {},
            )
        )


@frozen
class Cancel:
    """``<root>.cancel``: why an operation is cancelled. ``reason``: user, failed (fail fast), aborted."""

    reason: str
    text: str = ""
    replaced_by: str = ""
    """The operation that took its id and so ended it while it was pending."""
    by: str = ""
    """The user that cancelled it; "": no user; it follows from jobs or other operations."""
    time: str = ""

    def to_json(self) -> dict[str, Any]:
        known = {name: value for name in ("replaced_by", "by", "time") if (value := getattr(self, name))}
        return {"reason": self.reason, "text": self.text, **known}

    def encode(self) -> bytes:
        return dumps({"v": SCHEMA_VERSION, **self.to_json()})

    @classmethod
    def decode(cls, value: bytes) -> Cancel:
        return cls.from_json(loads(value))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cancel:
        names = ("text", "replaced_by", "by", "time")
        return checked(cls(data.get("reason", "user"), *(data.get(name, "") for name in names)))


@frozen
class Attempts:
    """``<root>.planning``: how often planning failed, and the last error."""

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
        return checked(cls(int(data.get("attempts", 0)), data.get("error", ""), data.get("retry_at", "")))


@frozen
class Decision:
    """``<root>.decision``: the verdict by the jobs; fixed before completion code with effects runs."""

    verdict: State
    total: int
    success: int
    failed: int
    failed_ranges: str = ""
    """Ordinals of the failed jobs, in the form of :func:`json_codec.failed_text`."""
    attempts: int = 0
    """Completion attempts that ended with an unexpected error."""
    error: str = ""
    """Why the operation fails if no job's error shows it: planning, or the last completion error."""
    retry_at: str = ""
    follow_ups: tuple[Mapping[str, Any], ...] = ()
    """Operations to start after the finish: ``{"type", "table", "arg", "partitions"}`` each."""
    failed_truncated: bool = False
    """``failed_ranges`` lists only the first failed jobs."""

    def encode(self) -> bytes:
        data: dict[str, Any] = {
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
        if self.failed_truncated:
            data["failed_truncated"] = True
        return dumps(data)

    @classmethod
    def decode(cls, value: bytes) -> Decision:
        data = loads(value)
        return checked(
            cls(
                State(data["verdict"]),
                int(data["total"]),
                int(data["success"]),
                int(data["failed"]),
                data.get("failed_ranges", ""),
                int(data.get("attempts", 0)),
                data.get("error", ""),
                data.get("retry_at", ""),
                tuple(data.get("follow_ups") or ()),
                bool(data.get("failed_truncated", False)),
            )
        )


@frozen
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
    """The first errors: ``{"partition": name or None, "text": …}``.

    With ``"verdict": True`` the job's result, or the behavior's report, contains the details.
    """
    failed_ranges: str = ""
    """Ordinals of the failed jobs, in the form of :func:`json_codec.failed_text`: ``3,7-9``."""
    request_id: str = ""
    cancel: Cancel | None = None
    failed_truncated: bool = False
    """``failed_ranges`` lists only the first failed jobs."""
    rerun_of: str = ""
    request_digest: str = ""
    """As in the spec."""
    submitter: str = ""
    """As in the spec, shortened."""
    alarm: str = ""
    """A problem that people have to check: a prepared operation was not confirmed and never ran (C14)."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """As in the spec."""
    id: str = ""
    """As in the spec."""
    follows: str = ""
    """As in the spec."""
    series: str = ""
    """The first operation of its series."""
    void: bool = False
    """Its graph was never inserted as a whole: its request started nothing and may be repeated."""
    signature: str = ""
    """Signature of the report, if its executor has a key (``protocol.record_signature``)."""
    by: str = ""
    """As in the spec."""
    actions: Actions = NO_ACTIONS
    """The recorded actions, besides start, cancel and end."""
    executor: str = ""
    """The executor that finished it; "": a client did."""

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
            "request_digest": self.request_digest,
            "submitter": self.submitter,
        }
        if self.cancel is not None:
            data["cancel"] = self.cancel.to_json()
        if self.failed_truncated:
            data["failed_truncated"] = True
        for name in ("rerun_of", "alarm", "id", "follows", "series", "void", "signature", "by", "executor"):
            if value := getattr(self, name):
                data[name] = value
        if self.labels:
            data["labels"] = dict(self.labels)
        return data | self.actions.to_json()

    def encode(self) -> bytes:
        return dumps(self.to_json())

    @classmethod
    def decode(cls, value: bytes) -> History:
        data = loads(value)
        jobs = data.get("jobs") or {}
        cancel = data.get("cancel")
        return checked(
            cls(
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
                Cancel.from_json(cancel) if cancel else None,
                bool(data.get("failed_truncated", False)),
                data.get("rerun_of", ""),
                data.get("request_digest", ""),
                data.get("submitter", ""),
                alarm=data.get("alarm", ""),
                labels=data.get("labels") or {},
                id=data.get("id", ""),
                follows=data.get("follows", ""),
                series=data.get("series", ""),
                void=data.get("void") is True,
                signature=str(data.get("signature") or ""),
                by=data.get("by", ""),
                actions=Actions.from_json(data),
                executor=data.get("executor", ""),
            )
        )
