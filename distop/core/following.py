"""Decides what may follow an operation: the one rule of completion code and coordinator. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.core.texts import shown

if TYPE_CHECKING:
    from distop.core.model import OperationRef


def follows_elsewhere(op: OperationRef, table: Any) -> str:
    """Why nothing on ``table`` follows an operation, a sentence; "": it is its own table.

    The decision, which names what follows, stands where submitters of the operation's table write: it starts nothing
    where they may not.
    """
    if table == op.table:
        return ""
    return f"{op} is followed by operations on its own table alone, not on {shown(table)}: have its caller start them"
