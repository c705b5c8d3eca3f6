"""Records of dependencies: edges between two operations, and holds.

:func:`follows_elsewhere` is the one rule for follow-ups, used by completion code and coordinator. Pure.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

from distop.protocol.field_checks import checked
from distop.protocol.frozen import frozen
from distop.protocol.json_codec import SCHEMA_VERSION, dumps, loads
from distop.protocol.records import State
from distop.protocol.texts import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distop.protocol.records import OperationRef


@frozen
class Edge:
    """One of the two keys of an edge.

    ``<root>.after.<edge>`` names the predecessor, ``<root>.next.<edge>`` the successor. ``on``: how the predecessor has
    to end, "success" or any "end". ``broken``: how it ended instead (``failed``, ``cancelled``), recorded for the
    successor; "" before.
    """

    op: str
    on: str = "success"
    broken: str = ""

    def satisfied_by(self, ended: State) -> bool:
        """Whether the successor may continue after the predecessor ended in this state."""
        return self.on == "end" or ended is State.SUCCESS

    def encode(self) -> bytes:
        broken = {"broken": self.broken} if self.broken else {}
        return dumps({"v": SCHEMA_VERSION, "op": self.op, "on": self.on, **broken})

    @classmethod
    def decode(cls, value: bytes) -> Edge:
        data = loads(value)
        return checked(cls(data["op"], data.get("on", "success"), data.get("broken", "")))


class HoldState(StrEnum):
    """Whether operations under a hold may still begin."""

    HELD = "held"
    DENIED = "denied"
    """They never begin: their coordinator ends them."""
    CONFIRMED = "confirmed"
    """Not a hold, but the receipt of a deleted one (``protocol.prepared_operations``)."""


def hold_named(id_: str) -> str:
    """The name of a hold in lists of operations, for people."""
    return f"hold {id_}"


GRAPH = "graph"
"""The kind of a hold whose operations are being inserted in several transactions."""


@frozen
class Hold:
    """``distOpHold.<id>``: delays the operations that name it in their spec.

    They do not begin while it exists. ``kind``: "graph" (operations that are being inserted in several transactions),
    or "prepared" (a submission in two phases that its sender has not confirmed yet). ``text``: why it was denied.
    """

    kind: str
    state: HoldState = HoldState.HELD
    text: str = ""
    options: Mapping[str, Any] | None = None

    def encode(self) -> bytes:
        return dumps(
            {
                "v": SCHEMA_VERSION,
                "kind": self.kind,
                "state": str(self.state),
                "text": self.text,
                **({"options": dict(self.options)} if self.options else {}),
            }
        )

    @classmethod
    def decode(cls, value: bytes) -> Hold:
        data = loads(value)
        return checked(
            cls(data.get("kind", ""), HoldState(data.get("state", "held")), data.get("text", ""), data.get("options"))
        )


def follows_elsewhere(op: OperationRef, table: Any) -> str:
    """Why an operation may not have a follow-up on ``table``.

    A sentence; "": it is the operation's own table. Submitters of the operation's table can write the decision, which
    names the follow-ups. So the decision must not start operations on tables where they may not.
    """
    if table == op.table:
        return ""
    return f"{op} is followed by operations on its own table alone, not on {shown(table)}: have its caller start them"
