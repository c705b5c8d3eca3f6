"""Draining an executor: the request that it shall run nothing, which outlives its restarts.

The record stays when a drain is undone, and is then changed: so its mod revision is the whole guard, and a copy of an
earlier request that comes late is refused (T9). An absent key could come back.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from distop.core.actions import NO_ACTIONS, Action, Actions
from distop.core.checked import checked
from distop.core.codec import SCHEMA_VERSION, dumps, loads
from distop.core.frozen import frozen
from distop.core.txn import Get, Put, Txn, unchanged

if TYPE_CHECKING:
    from distop.core.keys import Keys


class NodeState(StrEnum):
    """What a live executor says of itself."""

    ACTIVE = "active"
    DRAINING = "draining"
    DRAINED = "drained"
    """Asked to drain, and empty: it holds no claim and coordinates nothing."""


@frozen
class Drain:
    """``distOpNodeDrain.<executor>``. ``drain`` False: it was undone."""

    drain: bool
    time: str = ""
    by: str = ""
    actions: Actions = NO_ACTIONS
    """Who drained it and undid that, this request with the rest."""

    def encode(self) -> bytes:
        told = {"drain": self.drain, "time": self.time, "by": self.by}
        return dumps({"v": SCHEMA_VERSION, **told, **self.actions.to_json()})

    def then(self, drain: bool, time: str, by: str) -> Drain:
        """The record with one request more."""
        action = Action(time, "drain" if drain else "undrain", by)
        return Drain(drain, time, by, self.actions.and_then(action))

    @classmethod
    def decode(cls, value: bytes) -> Drain:
        data = loads(value)
        return checked(cls(bool(data["drain"]), data.get("time", ""), data.get("by", ""), Actions.from_json(data)))


def put_drain(keys: Keys, executor: str, seen_mod: int, wanted: Drain) -> Txn:
    """Ask an executor to drain, or undo that. ``seen_mod``: the record's mod revision as read (0: absent)."""
    key = keys.drain(executor)
    return Txn((unchanged(key, seen_mod),), (Put(key, wanted.encode()),), (Get(key),), "drain")


def node_state(asked: bool, busy: bool) -> NodeState:
    """What an executor says of itself."""
    if not asked:
        return NodeState.ACTIVE
    return NodeState.DRAINING if busy else NodeState.DRAINED
