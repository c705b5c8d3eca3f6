"""User actions: who did what to an operation, a table or an executor, and when.

The transaction that performs an action also records it, so neither happens without the other. A record keeps the last
:data:`MOST_ACTIONS` and counts dropped ones. ``by`` is what the client reports about itself: etcd does not show who
wrote a key. (``distop audit`` is something else: it checks the invariants.) Pure.
"""

from __future__ import annotations

from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from distop.protocol.field_checks import checked
from distop.protocol.frozen import frozen
from distop.protocol.json_codec import SCHEMA_VERSION, dumps, loads, shorten
from distop.protocol.txn import Put

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_ACTIONS = 20
"""Maximum number of actions in one record: the last ones."""
MOST_BYTES = 16 * 1024
"""Maximum bytes of the actions in one record; the last one is always kept."""
LONGEST_BY = 200
LONGEST_VALUE = 500
"""Maximum bytes of one changed value; of a longer one only the size is kept."""
MOST_CHANGES = 20
"""Maximum number of table changes that an apply action lists."""


@frozen
class Action:
    """One action. ``before`` and ``after``: the changed fields with their old and new values."""

    time: str
    action: str
    by: str
    before: Mapping[str, Any] = field(default_factory=dict)
    after: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"time": self.time, "action": self.action, "by": shorten(self.by, LONGEST_BY)}
        if self.before or self.after:
            data |= {"from": _short(self.before), "to": _short(self.after)}
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Action:
        return checked(cls(data["time"], data["action"], data["by"], data.get("from") or {}, data.get("to") or {}))

    @classmethod
    def change(cls, time: str, action: str, by: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Action:
        """An action that changed ``before`` into ``after``: it lists the fields that differ; None: absent."""
        names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        return cls(time, action, by, {n: before.get(n) for n in names}, {n: after.get(n) for n in names})


def _short(values: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {name: len(dumps(value)) for name, value in values.items()}
    return {name: value if sizes[name] <= LONGEST_VALUE else f"({sizes[name]} bytes)" for name, value in values.items()}


@frozen
class Actions:
    """The last actions on one subject, in order; ``dropped``: the number of earlier ones."""

    kept: tuple[Action, ...] = ()
    dropped: int = 0

    @property
    def count(self) -> int:
        """The number of all actions, including dropped ones."""
        return self.dropped + len(self.kept)

    def and_then(self, action: Action) -> Actions:
        """The actions with one more; the first ones are dropped if there are too many."""
        kept = (*self.kept, action)[-MOST_ACTIONS:]
        while len(kept) > 1 and len(dumps([one.to_json() for one in kept])) > MOST_BYTES:
            kept = kept[1:]
        return replace(self, kept=kept, dropped=self.count + 1 - len(kept))

    def since(self, count: int) -> tuple[Action, ...]:
        """The actions after the first ``count``, if they are kept."""
        return self.kept[max(0, count - self.dropped) :]

    def to_json(self) -> dict[str, Any]:
        """The fields of a record; {} without actions."""
        data: dict[str, Any] = {"actions": [one.to_json() for one in self.kept]} if self.kept else {}
        return {**data, "actions_dropped": self.dropped} if self.dropped else data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Actions:
        kept = tuple(Action.from_json(one) for one in data.get("actions") or ())
        return checked(cls(kept, int(data.get("actions_dropped", 0))))

    def encode(self) -> bytes:
        return dumps({"v": SCHEMA_VERSION, **self.to_json()})

    @classmethod
    def decode(cls, value: bytes) -> Actions:
        return cls.from_json(loads(value))


NO_ACTIONS = Actions()


def recorded(key: str, actions: Actions) -> tuple[Put, ...]:
    """The write that records the actions at a key; () without actions."""
    return (Put(key, actions.encode()),) if actions.kept else ()


# ------------------------------------------------------------------ as they are listed


def entry(kind: str, name: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """An action in the form of ``distop history --actions`` and the action log.

    ``kind``: operation, table or executor.
    """
    first = {"time": record.get("time", ""), "action": record["action"], "kind": kind, "name": name}
    return {
        **first,
        "by": record.get("by", ""),
        **{n: v for n, v in record.items() if n not in ("time", "action", "by")},
    }


def entries(kind: str, name: str, actions: Actions) -> list[dict[str, Any]]:
    """All kept actions on a subject, oldest first."""
    return [entry(kind, name, one.to_json()) for one in actions.kept]


def started(op: str, time: str, submitter: str, by: str) -> dict[str, Any]:
    """The start of an operation. If the caller gave a ``submitter``, it is listed beside ``by``."""
    return entry("operation", op, {"time": time, "action": "start", **_starter(submitter, by)})


def _starter(submitter: str, by: str) -> dict[str, str]:
    return {"by": by, "submitter": submitter} if by else {"by": submitter}


def cancelled(op: str, cancel: Mapping[str, Any], finished: str = "") -> dict[str, Any]:
    """The cancel of an operation; ``finished``: its end, used if the cancel has no time."""
    details = {name: cancel[name] for name in ("reason", "text", "replaced_by") if cancel.get(name)}
    who = {"time": cancel.get("time") or finished, "by": cancel.get("by", "")}
    return entry("operation", op, {**who, "action": "cancel", **details})


def ended(op: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """The end of an operation, from its history record.

    If its report lists changes to a table, the action is an apply by the user that started the operation.
    """
    report = record.get("report")
    changes = report.get("changes") if isinstance(report, dict) else None
    details: dict[str, Any] = {"time": record.get("finished", ""), "action": "finish", "state": record.get("state", "")}
    if isinstance(changes, list) and changes and all(isinstance(one, dict) for one in changes):
        assert isinstance(report, dict)
        names = ("check", "column", "type", "property")
        details |= {"action": "apply", **_starter(record.get("submitter", ""), record.get("by", ""))}
        details["changes"] = [_short({n: one[n] for n in names if one.get(n)}) for one in changes[:MOST_CHANGES]]
        details |= _short({name: report[name] for name in ("verdict", "snapshot", "reverted") if report.get(name)})
    if executor := record.get("executor"):
        details["executor"] = executor
    return entry("operation", op, details)


def of_operation(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All actions on an operation, oldest first, from its history record or its status as JSON."""
    op, cancel = str(record["op"]), record.get("cancel")
    found = [started(op, record.get("started", ""), record.get("submitter", ""), record.get("by", ""))]
    if dropped := record.get("actions_dropped"):
        found.append(entry("operation", op, {"action": "(dropped)", "dropped": dropped}))
    found += [entry("operation", op, one) for one in record.get("actions") or ()]
    if cancel:
        found.append(cancelled(op, cancel, record.get("finished") or ""))
    if record.get("finished"):
        found.append(ended(op, record))
    return found
