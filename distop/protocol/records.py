"""The records of distop: what stands in etcd, as frozen values, with their JSON forms (docs/reference/keys.md).

Every record that others read carries ``v`` = ``SCHEMA_VERSION``; unknown fields are ignored. Times are seconds since
the epoch in code and RFC 3339 text in UTC in the records.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from distop.errors import InvalidArgument
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
    HALTED = "halted"
    """Paused, and what runs is told to stop."""
    CANCELLING = "cancelling"
    COMPLETING = "completing"
    CLEANING = "cleaning"

    def of(self, stage: str) -> bool:
        """The phase is one of this stage."""
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
    """It is the key of whatever is kept of operations."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.table, self.type, self.object, self.instance)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process hashes texts otherwise.
        return OperationRef, (self.table, self.type, self.object, self.instance)

    def __str__(self) -> str:
        parts = [self.table, self.type, *([self.object] if self.object else [])]
        return "/".join([*map(_part, parts), str(self.instance)])

    @classmethod
    def parse(cls, text: str) -> OperationRef:
        """The reverse of ``str``; escapes that it does not write, such as those of keys, are read as well: ``str`` of
        what is returned is the one name. Raises InvalidArgument where the text is no operation.
        """
        parts = text.split("/")
        try:
            if len(parts) not in (3, 4) or not all(parts) or not (parts[-1].isascii() and parts[-1].isdigit()):
                raise ValueError(text)
            if parts[-1] != str(int(parts[-1])) or parts[-1] == "0" or _NO_ESCAPE.search(text):
                raise ValueError(text)
            named = [unquote(part, errors="strict") for part in parts[:-1]]
            return cls(named[0], named[1], named[2] if len(named) == 3 else "", int(parts[-1]))
        except ValueError:  # or an escape that is no UTF-8, or more digits than Python reads
            raise InvalidArgument(
                f"{text[:200]!r} is not an operation: write table/type/instance or table/type/object/instance, "
                "with % and / inside a part percent-encoded"
            ) from None


PLANNED_OPTIONS = frozenset({"columns", "partition_types"})
"""The options of a table that planning may find, and a plan set: they say how to read files, and not which."""


@dataclass(frozen=True, slots=True)
class TableRecord:
    """``distOpTable.<table>``: where a table is and how to read it."""

    name: str
    format: str
    location: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """The folder that its location is, an absolute path or a URL; "" where it is a name in a catalog."""
        return self.location if self.location.startswith("/") or "://" in self.location else ""

    def extended(self, options: Mapping[str, Any]) -> TableRecord:
        """The record with these options besides: those that planning found (Plan)."""
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
    """A spec's field as it stands there. Raises what :meth:`Series.from_json` raises."""
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
    """The names asked for, or None for all of the table's."""
    one_at_a_time: bool = False
    """The operation holds ``.current`` of its type or object."""
    version: int = SCHEMA_VERSION
    rerun_of: str = ""
    """The operation of whose partitions this one runs some again."""
    request_digest: str = ""
    """Of what was asked for under the request id (``identity.request_digest``): the same id stands for nothing else."""
    not_before: str = ""
    """It begins at this time (RFC 3339), or later."""
    hold: str = ""
    """It does not begin while this hold is there."""
    series: Mapping[str, Any] | None = None
    """Another one like it follows (``protocol.schedule``)."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """What the caller finds it by (``protocol.operation_labels``)."""
    where: Mapping[str, str] = field(default_factory=dict)
    """The labels that an executor must have to work for it."""
    id: str = ""
    """Its id, which no other operation of the type on the table has before it ends (``protocol.identity``); "": a
    one-off."""
    follows: str = ""
    """The operation of the same id for whose end it waits."""
    by: str = ""
    """Who started it, where the caller gave another ``submitter``: what the client says of itself."""

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
        for name in ("rerun_of", "not_before", "hold", "series", "id", "follows", "by"):
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
            )
        )
        # Keys are made of these.
        "".join((spec.request_id, spec.hold, spec.id, spec.follows, spec.rerun_of)).encode()
        return spec


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
    """Grows each time this daemon set claims to waiting: others then look for work that their watches, which
    see no claims, would miss until the next poll."""
    state: NodeState = NodeState.ACTIVE
    unable: Mapping[str, str] = field(default_factory=dict)
    """Types that are installed, but need what cannot be had here (``behaviors`` leaves them out), and what that is."""
    doing: Mapping[str, str] = field(default_factory=dict)
    """What its jobs say that they are doing, by operation: of those that have run for a while, for people alone."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Writes that etcd rejects as invalid, by operation, in etcd's words; this daemon retries them with back-off. Of
    some operations only; ``refused_more`` counts the others."""
    clock: int = 0
    """Seconds by which its clock is ahead of etcd's (negative: behind), if more than a minute."""
    spark: str = ""
    """Why its Spark session runs no tasks now, for people only; "": nothing is wrong."""
    failing: Mapping[str, str] = field(default_factory=dict)
    """Types that could not be run here at the last attempt, and why. This daemon retries them after a pause; during
    the pause ``behaviors`` leaves them out, and ``unable`` names them, too.
    """
    serves: Serves = ALL
    """The types and tables that it works for (fields ``types`` and ``tables``)."""
    clock_unknown: str = ""
    """Why its clock cannot be compared with etcd's; "": it can, or another try is due."""
    refused_more: int = 0
    """Operations with rejected writes that ``refused`` does not name."""

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
                **({"refused": dict(self.refused)} if self.refused else {}),
                **({"refused_more": self.refused_more} if self.refused_more else {}),
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
            )
        )


@frozen
class Cancel:
    """``<root>.cancel``: why an operation is being cancelled. ``reason``: user, failed (fail fast), aborted."""

    reason: str
    text: str = ""
    replaced_by: str = ""
    """The operation that took its id, and ended it thereby before it had begun."""
    by: str = ""
    """Who cancelled it; "": nobody did, it follows from what became of jobs or of other operations."""
    time: str = ""

    def to_json(self) -> dict[str, Any]:
        told = {name: value for name in ("replaced_by", "by", "time") if (value := getattr(self, name))}
        return {"reason": self.reason, "text": self.text, **told}

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
        return checked(cls(int(data.get("attempts", 0)), data.get("error", ""), data.get("retry_at", "")))


@frozen
class Decision:
    """``<root>.decision``: the verdict by the jobs, never recounted; fixed before completion code that has effects."""

    verdict: State
    total: int
    success: int
    failed: int
    failed_ranges: str = ""
    """The failed jobs' ordinals, as :func:`json_codec.failed_text` gives them."""
    attempts: int = 0
    """Completion attempts that ended in an unexpected error."""
    error: str = ""
    """Why the operation fails where no job says it: planning, or the last completion error."""
    retry_at: str = ""
    follow_ups: tuple[Mapping[str, Any], ...] = ()
    """What the completion code wants started after the finish: ``{"type", "table", "arg", "partitions"}`` each."""
    failed_truncated: bool = False
    """``failed_ranges`` names only the first of the failed jobs."""

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
    """The first few errors: ``{"partition": name or None, "text": …}``, with ``"verdict": True`` where the job answered
    with a result, or the behavior with a report, which tells it in full.
    """
    failed_ranges: str = ""
    """Ordinals of the failed jobs, as :func:`json_codec.failed_text` gives them: ``3,7-9``."""
    request_id: str = ""
    cancel: Cancel | None = None
    failed_truncated: bool = False
    """``failed_ranges`` names only the first of the failed jobs."""
    rerun_of: str = ""
    request_digest: str = ""
    """As in the spec."""
    submitter: str = ""
    """As in the spec, shortened."""
    alarm: str = ""
    """What somebody has to look at: a prepared operation that was not confirmed, and never ran (C14)."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """As in the spec."""
    id: str = ""
    """As in the spec."""
    follows: str = ""
    """As in the spec."""
    series: str = ""
    """The operation with which the series began that it was of."""
    void: bool = False
    """It was of a graph that never was there as a whole: its request has started nothing, and may be repeated."""
    signature: str = ""
    """Of the report, where the executor that wrote it has a key (``protocol.record_signature``)."""
    by: str = ""
    """As in the spec."""
    actions: Actions = NO_ACTIONS
    """What was done to it, beside its start, its cancel and its end."""
    executor: str = ""
    """The one that brought it to its end; "": a client did."""

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
