"""What this node suspects of itself, by the jobs that broke here: it leaves them to others for a while (F38).

Only where there are others: jobs that nobody else can run go on here, with the attempts that they have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.clock import time
from distop.decide.executor import Suspected, suspected

if TYPE_CHECKING:
    from collections.abc import Container

    from distop.daemon.incarnation_context import Context
    from distop.protocol.records import OperationRef

PAUSE = 30.0
"""Seconds for which a node leaves to others what breaks on it."""
REMEMBERED = 64
"""Operations of which it is remembered that their jobs broke here, after they have ended."""


class Suspicion:
    """Of one incarnation."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._broke: dict[OperationRef, int] = {}
        """Jobs that broke since any job ended here."""
        self._of_one: dict[OperationRef, int] = {}
        """Those since a job of the same operation ended here."""
        self._node_until = 0.0
        self._until: dict[OperationRef, float] = {}

    def wait(self, ref: OperationRef) -> float:
        """Seconds for which jobs of this operation are left to others; nothing, or less, where they are not."""
        until = max(self._node_until, self._until.get(ref, 0.0)) - time.monotonic()
        return until if until > 0 and self._ctx.others(ref.type, (ref.table,)) else 0.0

    def ended(self, ref: OperationRef) -> None:
        """A job of it came to its end here, whatever that was."""
        self._broke.clear()
        self._of_one.pop(ref, None)

    def broke(self, ref: OperationRef) -> None:
        """A job of it broke here. What others cannot run either says nothing."""
        if not self._ctx.others(ref.type, (ref.table,)):
            return
        self._broke[ref] = self._broke.pop(ref, 0) + 1
        while len(self._broke) > REMEMBERED:
            del self._broke[next(iter(self._broke))]
        count = self._of_one[ref] = self._of_one.get(ref, 0) + 1
        held = suspected(self._broke, count)
        if held is Suspected.NODE:
            jobs, operations = sum(self._broke.values()), len(self._broke)
            self._broke.clear()
            self._of_one.clear()
            self._node_until = time.monotonic() + PAUSE
            said = "%d jobs of %d operations broke here, and none ended: this node claims nothing for %d s"
            self._ctx.log.error(said, jobs, operations, int(PAUSE))
        elif held is Suspected.OPERATION:
            del self._of_one[ref]
            self._until[ref] = time.monotonic() + PAUSE
            where = {"operation": str(ref)}
            said = "%d jobs of it in a row broke here: this node leaves it to others for %d s"
            self._ctx.log.error(said, count, int(PAUSE), extra=where)

    def keep(self, gates: Container[OperationRef]) -> None:
        """Forget the operations that are not open any more; that their jobs broke speaks of the node all the same."""
        for kept in (self._of_one, self._until):
            for ref in [ref for ref in kept if ref not in gates]:
                del kept[ref]
