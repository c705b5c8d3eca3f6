"""Dependencies of operations: edges and holds, and what may follow an operation.

The records of what operations wait for: edges between two of them, and holds.

Decides what may follow an operation: the one rule of completion code and coordinator. Pure.
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
    """One end of an edge: ``<root>.after.<edge>`` names the operation that is waited for, ``<root>.next.<edge>`` the
    one that waits. ``on``: what has to become of the former, "success" or any "end". ``broken``: how it ended instead
    (``failed``, ``cancelled``), told to the one that waits; "" before.
    """

    op: str
    on: str = "success"
    broken: str = ""

    def satisfied_by(self, ended: State) -> bool:
        """The operation that is waited for ended so that the other may go on."""
        return self.on == "end" or ended is State.SUCCESS

    def encode(self) -> bytes:
        broken = {"broken": self.broken} if self.broken else {}
        return dumps({"v": SCHEMA_VERSION, "op": self.op, "on": self.on, **broken})

    @classmethod
    def decode(cls, value: bytes) -> Edge:
        data = loads(value)
        return checked(cls(data["op"], data.get("on", "success"), data.get("broken", "")))


class HoldState(StrEnum):
    """Whether what is held may yet begin."""

    HELD = "held"
    DENIED = "denied"
    """It never will: its coordinator ends it."""
    CONFIRMED = "confirmed"
    """No hold, but the receipt of one that was taken away (``protocol.prepared_operations``)."""


def hold_named(id_: str) -> str:
    """What a hold is called beside operations, for people."""
    return f"hold {id_}"


GRAPH = "graph"
"""The kind of a hold of operations that are being inserted in several transactions."""


@frozen
class Hold:
    """``distOpHold.<id>``: operations that name it in their spec do not begin while it is there; its absence lets them.

    ``kind``: "graph" (operations that are being inserted in several transactions), or "prepared" (a submission in two
    phases, which its sender has yet to confirm). ``text``: why it was denied.
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
            cls(
                data.get("kind", ""), HoldState(data.get("state", "held")), data.get("text", ""), data.get("options")
            )
        )


def follows_elsewhere(op: OperationRef, table: Any) -> str:
    """Why nothing on ``table`` follows an operation, a sentence; "": it is its own table.

    The decision, which names what follows, stands where submitters of the operation's table write: it starts nothing
    where they may not.
    """
    if table == op.table:
        return ""
    return f"{op} is followed by operations on its own table alone, not on {shown(table)}: have its caller start them"
