"""The store's content before and after a revision, by operation."""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from auditing.records import (
    ACTIVE,
    TERMINAL,
    BadRecord,
    job_key,
    operation_key,
    operation_name,
    quoted,
    record,
    without_namespace,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from auditing.records import OperationName

Key = tuple[str, str]
"""(family, what follows the instance) of a key of one operation."""

STATE, SPEC, ARG, PLAN = ("distOp", "state"), ("distOp", "spec"), ("distOp", "arg"), ("distOp", "plan")
OPTIONS, CANCEL, ACTIONS = ("distOp", "options"), ("distOp", "cancel"), ("distOp", "actions")
GATE, PENDING, HISTORY = ("distOpOpen", ""), ("distOpPending", ""), ("distOpHistory", "")


class Change(NamedTuple):
    """A key of an operation: its values before and after a revision (None: absent)."""

    before: str | None
    after: str | None


UNCHANGED = Change(None, None)
"""The change of a key that a revision did not write."""
Changes = dict[Key, Change]
"""What one revision changed of one operation."""


@dataclass(slots=True)
class Operation:
    """The known content of one operation."""

    keys: dict[Key, str] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    """Partition → the last attempt that was granted."""
    jobs: Counter[str] = field(default_factory=Counter)
    """How many jobs have ended as ``success`` and as ``failed``."""
    ended: str = ""
    """Its terminal state, also after its keys are gone."""
    recorded: float | None = None
    """When its history record was written, by the auditor's clock; None where that was not seen."""
    recorded_at: int = 0
    """The revision that wrote its history record; 0 where that was not seen."""
    started_at: int = 0
    """The revision that started it; 0 where that was not seen."""
    spec: dict[str, Any] = field(default_factory=dict)

    @property
    def state(self) -> str | None:
        return self.keys.get(STATE)

    @property
    def hold(self) -> str | None:
        """The hold under which it was submitted; None for none."""
        return self.spec.get("hold") or None

    @property
    def options(self) -> dict[str, Any]:
        """The record of its options; empty where none were set."""
        return self.record(OPTIONS)

    def record(self, key: Key) -> dict[str, Any]:
        """The JSON record at a key; an empty one where there is none."""
        return record(self.keys[key]) if key in self.keys else {}

    def claims(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(partition, claim) of all claims."""
        for (family, rest), value in self.keys.items():
            if family == "distOpClaim":
                yield int(rest), record(value)

    def edges(self, side: str) -> Iterator[str]:
        """The names of its edges on the side ``after`` or ``next``."""
        for family, rest in self.keys:
            if family == "distOp" and rest.startswith(f"{side}."):
                yield rest.removeprefix(f"{side}.")


class Content:
    """The store as the revisions so far have left it.

    ``clock`` returns seconds; None: ages cannot be judged.
    """

    def __init__(self, namespace: str, clock: Callable[[], float] | None) -> None:
        self.operations: dict[OperationName, Operation] = defaultdict(Operation)
        self.others: dict[str, str] = {}
        """All keys that belong to no operation."""
        self.replaced: dict[str, str | None] = {}
        """The former values of those of ``others`` that this revision changed."""
        self.active: dict[str, Counter[str]] = defaultdict(Counter)
        """Table → type → how many operations are running, paused or cancelling."""
        self.requests: dict[tuple[str, str, str], set[OperationName]] = defaultdict(set)
        """(table, type, request id) → the operations with it that are known, in their keys or in history."""
        self.ids: dict[tuple[str, str, str], set[OperationName]] = defaultdict(set)
        """(table, type, id) → the operations with it that have not ended, and some that have."""
        self.followed: set[OperationName] = set()
        """The operations of a series whose next one was started."""
        self.executors: dict[str, str] = {}
        """Incarnation → its executor, of all incarnations so far."""
        self.declared: dict[str, int] = {}
        """Type → the revision that wrote its declaration last."""
        self.registered: dict[str, int] = {}
        """Table, as its key names it → the revision that registered it."""
        self.removed_policies: set[str] = set()
        """The own ids of all policies that were removed."""
        self.watermarks: set[str] = set()
        """The keys of all watermarks so far."""
        self.revision = 0
        """The present revision; 0 for the content with which the audit starts."""
        self.clock = clock
        self._namespace = namespace

    def take(self, changes: Mapping[str, str | None], revision: int = 0) -> dict[OperationName, Changes]:
        """Apply a revision; returns what it changed of each operation."""
        self.revision = revision
        touched: dict[OperationName, Changes] = defaultdict(dict)
        self.replaced = {}
        for spelled, value in changes.items():
            key = without_namespace(spelled, self._namespace)
            if key is None:
                continue
            parsed = operation_key(key)
            if parsed is None:
                self.replaced[key] = self.others.get(key)
                _write(self.others, key, value)
                self._note(key, value)
            else:
                keys, short = self.operations[parsed.operation].keys, (parsed.family, parsed.rest)
                touched[parsed.operation][short] = Change(keys.get(short), value)
                _write(keys, short, value)
        for name, changed in touched.items():
            self._update(name, changed)
        return touched

    def _note(self, key: str, value: str | None) -> None:
        """Store the later needed facts of a key that belongs to no operation."""
        family, _, rest = key.partition(".")
        if family == "distOpNode" and value is not None:
            self.executors[rest] = str(record(value).get("executor", ""))
        elif family == "distOpBehavior":
            _write(self.declared, rest, self.revision if value is not None else None)
        elif family == "distOpTable":
            _write(self.registered, rest, self.registered.get(rest, self.revision) if value is not None else None)
        elif family == "distOpWatermark":
            self.watermarks.add(key.removesuffix(".young"))

    def _update(self, name: OperationName, changed: Changes) -> None:
        operation = self.operations[name]
        if (spec := changed.get(SPEC, UNCHANGED).after) is not None:
            operation.spec = record(spec)
            if identity := operation.spec.get("id"):
                self.ids[name.table, name.type, identity].add(name)
        for (family, rest), change in changed.items():
            job = job_key(rest) if family == "distOp" else None
            if job is not None and job[1] == "state" and change.after is not None and change.before is None:
                operation.jobs[change.after] += 1
        if STATE in changed:
            before, after = changed[STATE]
            if after in TERMINAL:
                operation.ended = after or ""
            elif after is None and not operation.ended:
                operation.ended = operation.record(HISTORY).get("state", "")
            self.active[name.table][name.type] += (after in ACTIVE) - (before in ACTIVE)
            if before is None:
                operation.started_at = self.revision
                self._follow(operation.spec)
        if changed.get(HISTORY, UNCHANGED).after is not None:
            operation.recorded_at = self.revision
            operation.recorded = self.clock() if self.clock is not None else None
            if not self.revision:
                self._follow(operation.record(HISTORY))

    def _follow(self, origin: dict[str, Any]) -> None:
        """Record the predecessor in its series of an operation; ``origin``: its spec or history record."""
        former, _, suffix = str(origin.get("request_id", "")).rpartition("#")
        if suffix == "next":
            with suppress(BadRecord):  # a request id of a caller that happens to end with "#next"
                self.followed.add(operation_name(former))

    def before(self, key: str) -> str | None:
        """The value of a key that belongs to no operation, before this revision."""
        return self.replaced[key] if key in self.replaced else self.others.get(key)

    def node_lived(self, incarnation: str) -> bool:
        """Whether the incarnation had its node key before this revision."""
        return self.before(f"distOpNode.{incarnation}") is not None

    def node(self, incarnation: str) -> dict[str, Any] | None:
        """The node record of an incarnation; None where it is not alive."""
        value = self.others.get(f"distOpNode.{incarnation}")
        return record(value) if value is not None else None

    def coordinator(self, name: OperationName) -> str | None:
        """The incarnation that was elected for the operation before this revision and still is; None: nobody."""
        key = f"distOpCoordinator.{quoted(name.table)}.{name.type}"
        elected = self.others.get(key)
        return elected if self.before(key) == elected else None

    def hour_old(self, revision: int) -> bool:
        """Whether a watermark shows that what this revision wrote is an hour old."""
        return any(
            (upto := self.before(key)) is not None and self.before(f"{key}.young") is None and int(upto) >= revision
            for key in self.watermarks
        )

    def hold(self, wanted: str, *, before: bool) -> dict[str, Any]:
        """The hold of this name before or after the revision; empty where there is none."""
        for key in {*self.others, *self.replaced}:
            if key.startswith("distOpHold.") and unquote(key.removeprefix("distOpHold.")) == wanted:
                value = self.before(key) if before else self.others.get(key)
                return record(value) if value is not None else {}
        return {}


def _write(content: dict[Any, Any], key: object, value: str | int | None) -> None:
    if value is None:
        content.pop(key, None)
    else:
        content[key] = value


class Step(NamedTuple):
    """What one revision changed of one operation.

    ``operation`` is as the revision left it.
    """

    content: Content
    name: OperationName
    operation: Operation
    changed: Changes

    def change(self, key: Key) -> Change:
        """The change of a key; UNCHANGED where the revision did not write it."""
        return self.changed.get(key, UNCHANGED)


class Finding(NamedTuple):
    """A broken rule; ``subject`` is an operation, one of its jobs, or a key."""

    rule: str
    subject: str
    text: str
