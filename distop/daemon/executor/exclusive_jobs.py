"""Jobs that are to run alone in their executor ("suspects"): when this executor falls quiet, so that one of them can.

A suspect is taken by the first executor on which nothing runs. So that this happens beside a backlog, too, one of them
claims nothing more until its own jobs have ended (it "falls quiet"): the first by rendezvous for that job. The others
go on with the backlog, and take their turn only if it is still there long after.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.clock import time
from distop.decide import next_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from distop.daemon.incarnation_context import Context
    from distop.protocol.records import OperationRef
    from distop.services.open_operation import OpenOperation


class Quiet:
    """Of one incarnation. ``ref``: the operation for which nothing else is claimed here.

    It stays so over hints and polls, which would otherwise give each slot that falls free to the backlog, until a look
    shows that nothing of the operation is to run alone any more, it cannot be served, or its suspect has run here.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self.ref: OperationRef | None = None
        self.running = False
        """Its suspect runs here."""
        self._left: dict[OperationRef, None] = {}
        """Other operations with suspects, which are left to others unless nothing runs here."""

    def blocks(self, ref: OperationRef) -> bool:
        """Nothing of this operation is to be claimed for the sake of another."""
        return self.ref is not None and self.ref != ref

    @property
    def waits(self) -> bool:
        """An operation has suspects, for which this executor is not quiet."""
        return self.ref is None and bool(self._left)

    def fall(self, may: Callable[[OperationRef], bool]) -> None:
        """Nothing runs here: be quiet for an operation that ``may`` be served, if one has suspects."""
        if self.ref is None:
            self.ref = next(filter(may, self._left), None)

    def concerns(self, op: OpenOperation) -> bool:
        """After a look at an operation: only suspects of it may be claimed."""
        if op.only_suspects:
            return True
        self._left.pop(op.ref, None)
        if self.ref == op.ref and not self.running:
            self.ref = None
        return False

    def claims(self, op: OpenOperation, alone: bool) -> bool:
        """Whether one of the operation's suspects is to be claimed now. ``alone``: nothing runs here. If not, this
        executor may have fallen quiet for it, or it is to be looked at again at ``next_due``.
        """
        turns = self._turns(op)
        first = next(iter(turns.values()))
        if self.ref is None and (alone or first <= 0):
            self.ref = op.ref
        if self.ref == op.ref:
            self._left.pop(op.ref, None)
            if alone:
                op.suspects = {p: op.suspects[p] for p in turns}
                self.running = True
                return True
        else:
            self._left[op.ref] = None
            due = time.monotonic() + max(first, 0.0)
            op.next_due = due if op.next_due is None else min(op.next_due, due)
        op.forget_candidates()  # they may be taken by the time that it is looked at again
        op.exhausted = True
        return False

    def _turns(self, op: OpenOperation) -> dict[int, float]:
        """Seconds until it is this executor's turn to fall quiet for each of the suspects, soonest first."""
        others = self._ctx.others(op.ref.type, op.gate.tables(op.ref.table), op.gate.where)
        mine = self._ctx.executor_id
        turns = {}
        for p, (seen, _) in op.suspects.items():
            place = next_steps.place_for_suspect(seen.value, mine, others, f"{op.ref}/{p}")
            turns[p] = next_steps.quiet_in(place, op.unchanged_for(p))
        return dict(sorted(turns.items(), key=lambda turn: turn[1]))

    def over(self, ref: OperationRef) -> None:
        """Nothing of it runs here (any more), or it cannot be served for now: go on with others. That more is to run
        alone shows at the next look.
        """
        if self.ref == ref:
            self.ref, self.running = None, False
            self._left[ref] = None

    def gone(self, ref: OperationRef) -> None:
        """It is not open any more, and nothing of it runs here. A look that was under way when its gate went may have
        fallen quiet for it since.
        """
        self._left.pop(ref, None)
        if self.ref == ref:
            self.ref, self.running = None, False

    def keep(self, gates: Container[OperationRef]) -> None:
        """Forget the operations that are not open any more; but a suspect that runs is to stay alone until it ends."""
        for ref in [ref for ref in self._left if ref not in gates]:
            del self._left[ref]
        if self.ref is not None and self.ref not in gates and not self.running:
            self.ref = None
