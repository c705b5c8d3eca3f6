"""Sees to prepared operations that nobody confirms: asks their verifiers, and lets them begin or gives them up (C13).

One daemon asks at a time: an attempt begins by counting it in the hold, under compare, and the others see that it is
counted. Which is the first follows from the hold and from the incarnations that live (``core.prepared.rank``). Clocks
are each node's own, since it saw the hold written.
"""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING

from distop.core import prepared as p
from distop.core.draining import NodeState
from distop.core.links import HoldState
from distop.core.model import OperationRef, State
from distop.core.records import read, word
from distop.core.serving import refusal
from distop.errors import DistopError, InvalidArgument, SessionLost, describe
from distop.worker.model import Verified, WorkerError

if TYPE_CHECKING:
    from distop.node.context import Context

AT_ONCE = 8
"""Verifications of one daemon that go on at once."""


class Verifying:
    """The verifications of one incarnation."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._log = ctx.log
        self._at_work: dict[str, asyncio.Task[None]] = {}
        """By hold."""

    def due(self, terms: p.Terms, age: float) -> float:
        """Seconds until it is this executor's turn to see to a hold that was last written ``age`` seconds ago.

        Infinite where it does not serve the operation.
        """
        ctx = self._ctx
        nodes = ctx.cluster.nodes
        try:
            ref = OperationRef.parse(terms.op)
        except InvalidArgument:
            return inf  # it names no operation that could begin
        if not ctx.admits(ref.type, (ref.table,)):
            return inf
        serving = (inc for inc, node in nodes.items() if not refusal(node.serves, ref.type, (ref.table,)))
        able = [inc for inc in serving if nodes[inc].state is NodeState.ACTIVE]
        # Those that are drained come last: they ask where nobody else is there.
        rank = p.rank(terms, ctx.incarnation, able) if ctx.incarnation in able else len(able)
        return p.due_after(terms, rank, asking=terms.asker in ctx.cluster.nodes) - age

    def begin(self, id_: str, terms: p.Terms, mod: int) -> bool:
        """See to this hold, as it was seen, unless that is under way. False: others have to end first."""
        if id_ in self._at_work:
            return True
        if len(self._at_work) >= AT_ONCE:
            return False
        task = self._at_work[id_] = asyncio.ensure_future(self._see_to(terms, mod))
        task.add_done_callback(lambda _: self._at_work.pop(id_, None))
        return True

    def close(self) -> None:
        """Stop at once."""
        for task in self._at_work.values():
            task.cancel()

    async def _see_to(self, terms: p.Terms, mod: int) -> None:
        try:
            await self._attempt(terms, mod)
        except SessionLost:
            return
        except (DistopError, OSError) as error:
            self._log.warning("a prepared operation has to wait: %s", describe(error), extra={"operation": terms.op})

    async def _attempt(self, terms: p.Terms, mod: int) -> None:
        """Raises SessionLost."""
        ctx, ref = self._ctx, OperationRef.parse(terms.op)
        kv = await ctx.client.get(ctx.keys.of(ref, "state"))
        if kv is None or read(word(State), kv) is not State.PENDING:
            # It was cancelled by a client that does not know of two phases: nobody is to be told that it was confirmed.
            await ctx.commit(p.write(ctx.keys, terms, mod, HoldState.DENIED, "it has ended"))
            return
        begun = p.begun(terms, ctx.incarnation)
        if begun is None:
            await self._give_up(terms, mod, completed=None)
            return
        counted = await ctx.commit(p.write(ctx.keys, begun, mod))
        if not counted.succeeded:
            return  # somebody else was first; or it was confirmed
        answer = await self._ask(begun)
        if answer.completed:
            if (await ctx.commit(p.confirm(ctx.keys, ref, begun, counted.revision))).succeeded:
                self._log.info(
                    "%s says that its sender's transaction was completed", terms.verify, extra={"operation": terms.op}
                )
        elif answer.completed is False:
            await self._give_up(begun, counted.revision, completed=False)
        else:
            failed = p.without_answer(begun, p.Unanswered.of(answer.why))
            if p.begun(failed, ctx.incarnation) is None:
                await self._give_up(failed, counted.revision, completed=None)
                return
            self._log.warning("%s did not tell: %s", terms.verify, failed.error, extra={"operation": terms.op})
            await ctx.commit(p.write(ctx.keys, failed, counted.revision))

    async def _ask(self, terms: p.Terms) -> Verified:
        try:
            return await self._ctx.worker.verify(terms.op, terms.external_id, terms.verify, p.ASK_LIMIT)
        except WorkerError as error:
            self._log.warning("%s was not asked: %s", terms.verify, describe(error), extra={"operation": terms.op})
            return Verified(None, p.Unanswered.FAILED)

    async def _give_up(self, terms: p.Terms, mod: int, *, completed: bool | None) -> None:
        text = p.sentence(terms, completed)
        denied = p.alarm(terms)
        if (await self._ctx.commit(p.write(self._ctx.keys, denied, mod, HoldState.DENIED, text))).succeeded:
            self._log.error("a prepared operation is given up: %s", text, extra={"operation": terms.op})
