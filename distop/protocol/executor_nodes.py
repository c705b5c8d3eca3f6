"""Executor nodes: the types and tables that each serves, and draining.

:func:`refusal` decides whether an executor serves some work (the settings ``types`` and ``tables``). A daemon's
elections, claims, planning, completion, cleanup, verification and sweeping use it. Its child process checks it once
more before any code of a behavior runs. Pure.

A drain is the request that an executor runs nothing. It outlives restarts. The record stays when a drain is undone, and
is then changed. So its mod revision is a sufficient guard: a late copy of an earlier request is refused (T9). An absent
key could come back.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

from distop.protocol.field_checks import checked
from distop.protocol.frozen import frozen
from distop.protocol.json_codec import SCHEMA_VERSION, dumps, loads
from distop.protocol.texts import one_line
from distop.protocol.txn import Get, Put, Txn, unchanged
from distop.protocol.user_actions import NO_ACTIONS, Action, Actions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from distop.protocol.keys import Keys


JOIN = "join"
"""The type of operations that only wait for others. Graphs insert them, and every executor serves them."""
WAITS_FOR_STORE = "waiting for the store"
"""The start of the status of a job, a planning or a completion that waits for a busy store of its table's files."""
NAMESPACE = ".*"
"""The end of a pattern that matches all tables of a namespace."""


@frozen
class Serves:
    """What an executor serves; None: everything. ``tables``: exact names, or namespaces such as ``sales.*``."""

    types: tuple[str, ...] | None = None
    tables: tuple[str, ...] | None = None

    def to_json(self) -> dict[str, list[str]]:
        """The fields in a node record and in messages to a child; fields without a limit are left out."""
        limits = (("types", self.types), ("tables", self.tables))
        return {name: list(names) for name, names in limits if names is not None}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Serves:
        types, tables = data.get("types"), data.get("tables")
        return checked(cls(None if types is None else tuple(types), None if tables is None else tuple(tables)))

    def __str__(self) -> str:
        return "; ".join(f"{name}: {', '.join(names)}" for name, names in self.to_json().items())


ALL = Serves()


def refusal(serves: Serves, type_name: str | None, tables: Iterable[str]) -> str:
    """Why an executor refuses work; "": it serves it.

    The reason is a clause such as "it does not serve table sales.orders". ``type_name`` None: no code of a type is
    needed. ``tables``: all tables that are read or written. An operation on no table has the table ``@cluster``, which
    is treated like any other table.
    """
    if type_name == JOIN:
        return ""
    if serves.types is not None and type_name is not None and type_name not in serves.types:
        return f"it does not serve the type {one_line(type_name)}"
    missing = [] if serves.tables is None else [t for t in dict.fromkeys(tables) if not _among(t, serves.tables)]
    return f"it does not serve {named(missing)}" if missing else ""


def named(tables: Iterable[str]) -> str:
    """Tables as part of a sentence."""
    names = [one_line(name) for name in tables]
    return f"table {names[0]}" if len(names) == 1 else f"the tables {', '.join(names)}"


def _among(table: str, patterns: tuple[str, ...]) -> bool:
    """Whether a pattern matches the table. A namespace matches all tables whose names begin with it and a dot."""
    return any(
        table == pattern or (pattern.endswith(NAMESPACE) and table.startswith(pattern[:-1])) for pattern in patterns
    )


class NodeState(StrEnum):
    """The state that a live executor reports."""

    ACTIVE = "active"
    DRAINING = "draining"
    DRAINED = "drained"
    """Asked to drain, and idle: it holds no claim and coordinates nothing."""


@frozen
class Drain:
    """``distOpNodeDrain.<executor>``: the request to drain. ``drain`` False: it was undone."""

    drain: bool
    time: str = ""
    by: str = ""
    actions: Actions = NO_ACTIONS
    """The recorded drains and undrains, including this one."""

    def encode(self) -> bytes:
        fields = {"drain": self.drain, "time": self.time, "by": self.by}
        return dumps({"v": SCHEMA_VERSION, **fields, **self.actions.to_json()})

    def then(self, drain: bool, time: str, by: str) -> Drain:
        """The record after one more request."""
        action = Action(time, "drain" if drain else "undrain", by)
        return Drain(drain, time, by, self.actions.and_then(action))

    @classmethod
    def decode(cls, value: bytes) -> Drain:
        data = loads(value)
        return checked(cls(bool(data["drain"]), data.get("time", ""), data.get("by", ""), Actions.from_json(data)))


def put_drain(keys: Keys, executor: str, seen_mod: int, wanted: Drain) -> Txn:
    """Ask an executor to drain, or undo that.

    Guard: the record is unchanged (``seen_mod``: its mod revision as read, 0: absent).
    """
    key = keys.drain(executor)
    return Txn((unchanged(key, seen_mod),), (Put(key, wanted.encode()),), (Get(key),), "drain")


def node_state(asked: bool, busy: bool) -> NodeState:
    """The state that an executor reports."""
    if not asked:
        return NodeState.ACTIVE
    return NodeState.DRAINING if busy else NodeState.DRAINED
