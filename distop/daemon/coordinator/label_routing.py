"""Gives up an election whose operations need a node with other labels, or one that serves more tables.

Planning and completion run code of the behavior, so they run only on a node that has the operation's labels, and serves
each table that the operation touches. Another coordinator gives up the election once its own calls into the child have
ended, if such a node lives. Until then it starts no other call, so that neither waits for the other for ever. Without
such a node the operation waits. A cancelled operation waits for a minute, then it ends without its completion code.
Which nodes count is decided by ``distop.decide.coordinator_ranking``.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from distop.clock import time
from distop.decide import coordinator_ranking, next_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from distop.daemon.incarnation_context import Context
    from distop.decide.operation_view import OperationView
    from distop.protocol.records import OperationRef

ABSENT = 60.0
"""Seconds for which a cancelled operation waits for a node to run its completion code: one may be restarting."""
AGAIN = 0.1
"""Seconds before the next attempt to resign from an election that has just been won."""


class Placing:
    """Decides for one coordinator which steps run on this node.

    ``pass_on`` resigns from the election, or returns False if that is not possible yet. ``kick`` checks operations
    again. ``only_ending``: for a minute no live node has had code of the type.
    """

    def __init__(
        self,
        ctx: Context,
        pass_on: Callable[[], bool],
        kick: Callable[[Collection[OperationRef]], None],
        only_ending: bool = False,
    ) -> None:
        self._ctx = ctx
        self._pass_on = pass_on
        self._kick = kick
        self._only_ending = only_ending
        self._elsewhere: dict[OperationRef, tuple[Mapping[str, str], tuple[str, ...]]] = {}
        """Operations whose next step is for another node, with their selectors and tables."""
        self._needs: dict[OperationRef, tuple[str, ...]] = {}
        """Tables besides their own that operations need for planning, and this node does not serve."""
        self._alone: dict[OperationRef, float] = {}
        """Operations that no live node can run, and since when that is known."""
        self._put_off: set[OperationRef] = set()
        """Operations whose next step waits until the election is given up."""
        self._own: set[OperationRef] = set()
        """Operations with a call into the child under way, or about to start."""
        self._leaving = False
        """Operations that must be served before the election is given up."""
        self._timer: asyncio.TimerHandle | None = None

    def here(self, op: OperationView, step: next_steps.NextStep) -> next_steps.NextStep:
        """The step to perform on this node now; None if another node performs it, or later."""
        assert op.spec is not None
        where, ref = op.spec.where, op.ref
        tables = (ref.table, *op.terms.beside, *self._needs.get(ref, ()))
        if not isinstance(step, next_steps.MakePlan | next_steps.RunCompletion | next_steps.CompleteFirst):
            self._settled(ref)
            return step
        if self._only_ending or not self._ctx.fits(where) or not self._ctx.admits(ref.type, tables):
            missing = coordinator_ranking.missing_executor(self._ctx.cluster.nodes, ref.type, where, tables)
            if missing and self._needs.pop(ref, None) is not None:
                return self.here(op, step)  # it fails, and says why
            ends = op.decision is not None and coordinator_ranking.ends_without_code(op.state, op.cancel)
            if op.decision is not None and ends and self._waited(ref, missing):
                self._settled(ref)
                return next_steps.without_code(op.decision, f"no live executor {missing}")
            self._elsewhere[ref] = where, tables
            self._look_soon(0.0)  # once all that have changed together have had their turn: some may be served here
            return None
        self._settled(ref)
        if self._leaving and self._wanted():
            self._put_off.add(ref)
            return None
        self._own.add(ref)
        return step

    def need(self, op: OperationView, tables: Collection[str]) -> str:
        """Leave the planning of an operation to a node that serves these tables, which planning reads.

        Returns what a missing executor would need; "" if one lives.
        """
        where = op.spec.where if op.spec is not None else {}
        wanted = (op.ref.table, *tables)
        missing = coordinator_ranking.missing_executor(self._ctx.cluster.nodes, op.ref.type, where, wanted)
        if not missing:
            self._needs[op.ref] = tuple(tables)
        return missing

    def _waited(self, ref: OperationRef, missing: str) -> bool:
        """Whether no live node has been able to run the operation's code for a minute."""
        if not missing:
            self._alone.pop(ref, None)
            return False
        now = time.monotonic()
        return self._only_ending or now - self._alone.setdefault(ref, now) >= ABSENT

    def done(self, ref: OperationRef) -> None:
        """Record the end of an operation's step."""
        self._own.discard(ref)
        if self._elsewhere:
            self._look_soon(0.0)

    def _settled(self, ref: OperationRef) -> None:
        self._alone.pop(ref, None)
        self._needs.pop(ref, None)
        if self._elsewhere.pop(ref, None) is not None and not self._elsewhere:
            self.changed()

    def _wanted(self) -> bool:
        """Whether another node would coordinate an operation that this one may not run."""
        nodes, mine = self._ctx.cluster.nodes, self._ctx.incarnation
        return any(
            set(coordinator_ranking.candidates(nodes, ref.type, where, tables)) - {mine}
            for ref, (where, tables) in self._elsewhere.items()
        )

    def _look_soon(self, pause: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(pause, self._look)

    def _look(self) -> None:
        """Give up the election if another node is needed and no call is under way here."""
        self._timer = None
        self._leaving = self._wanted()
        if self._leaving and not self._own and not self._pass_on():
            self._look_soon(AGAIN)

    def changed(self) -> None:
        """Check again after a change of nodes, the end of a wait, or a poll."""
        # Also operations that were left to a node that is gone by now: their minute has not started yet.
        nodes = self._ctx.cluster.nodes
        missing = [
            ref
            for ref, (where, tables) in self._elsewhere.items()
            if coordinator_ranking.missing_executor(nodes, ref.type, where, tables)
        ]
        if missing:
            self._kick(missing)
        if self._wanted():
            self._look_soon(0.0)
        elif self._put_off:
            self._leaving = False
            again, self._put_off = self._put_off, set()
            self._kick(again)

    def close(self) -> None:
        """Stop, after the end of the election."""
        if self._timer is not None:
            self._timer.cancel()
        self._elsewhere.clear()
        self._needs.clear()
        self._alone.clear()
