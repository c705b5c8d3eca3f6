"""When an executor must take it that it is broken itself, and not the jobs that break on it (F38). Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distop.core.model import OperationRef

IN_A_ROW = 20
"""Unexpected errors in a row, without a job that ended in between."""
FROM_ONE = 15
"""So many of them at most count for one operation where the node is judged: what one broken operation does, however
often, says nothing about the node."""


class Suspected(StrEnum):
    """What is held back."""

    NODE = "node"
    OPERATION = "operation"


def suspected(broke: Mapping[OperationRef, int], of_it: int) -> Suspected | None:
    """What is to be held back on this node after a job broke. ``broke``: jobs that broke here since any job ended here,
    by operation; ``of_it``: those of the operation of the last one, since a job of this operation ended here.
    """
    if sum(min(count, FROM_ONE) for count in broke.values()) >= IN_A_ROW:
        return Suspected.NODE
    return Suspected.OPERATION if of_it >= IN_A_ROW else None
