"""Resolves unconfirmed prepared operations: asks their verifiers, then starts or abandons the operations (C13).

One daemon asks at a time: an attempt first increments the count in the hold, with a compare, so the others see it. The
order follows from the hold and the live incarnations (``protocol.prepared_operations.rank``). Each node measures the
time with its own clock, from the moment when it saw the hold.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING

from distop.errors import DistopError, InvalidArgument, MalformedRequest, SessionLost, describe
from distop.protocol import prepared_operations as p
from distop.protocol.dependencies import HoldState, hold_named
from distop.protocol.executor_nodes import NodeState, refusal
from distop.protocol.record_reading import read, word
from distop.protocol.records import OperationRef, State
from distop.protocol.txn import TxnResult
from distop.worker.daemon_side.requests import Verified, WorkerError

if TYPE_CHECKING:
    from distop.daemon.incarnation_context import Context
    from distop.protocol.txn import Txn

AT_ONCE = 8
"""Maximum number of concurrent verifications of one daemon."""
_WRITE = "verification"
"""In the node record, the name of a write about a prepared hold that etcd rejects."""


class Verifying:
    """The verifications of one incarnation."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._log = ctx.log
        self._at_work: dict[str, asyncio.Task[None]] = {}
        """Running verifications, by hold."""
        self._rejected: dict[str, tuple[int, asyncio.Event]] = {}
        """Holds with a write that etcd rejects as invalid: its compared revision, and the event that ends its pause."""

    def due(self, terms: p.PreparedTerms, age: float) -> float:
        """Seconds until this executor's turn to verify a hold that was last written ``age`` seconds ago.

        Infinite if it does not serve the operation.
        """
        ctx = self._ctx
        nodes = ctx.cluster.nodes
        try:
            ref = OperationRef.parse(terms.op)
        except InvalidArgument:
            return inf  # it has no valid operation
        if not ctx.admits(ref.type, (ref.table,)):
            return inf
        serving = (inc for inc, node in nodes.items() if not refusal(node.serves, ref.type, (ref.table,)))
        able = [inc for inc in serving if nodes[inc].state is NodeState.ACTIVE]
        # Drained executors come last: they ask only if there is no other one.
        rank = p.rank(terms, ctx.incarnation, able) if ctx.incarnation in able else len(able)
        return p.due_after(terms, rank, asking=terms.asker in ctx.cluster.nodes) - age

    def begin(self, id_: str, terms: p.PreparedTerms, mod: int) -> bool:
        """Start a verification of the hold at this revision, unless one runs. False: too many others run."""
        if id_ in self._at_work:
            return True
        if len(self._at_work) - len(self._rejected) >= AT_ONCE:
            return False
        task = self._at_work[id_] = asyncio.ensure_future(self._see_to(id_, terms, mod))
        task.add_done_callback(lambda _: self._at_work.pop(id_, None))
        return True

    def changed(self, id_: str) -> None:
        """Handle a written or removed hold: a rejected write that compares an older revision is not sent again."""
        found = self._rejected.get(id_)
        if found is not None and not self._stands(id_, found[0]):
            found[1].set()

    def close(self) -> None:
        """Stop at once."""
        for task in self._at_work.values():
            task.cancel()

    async def _see_to(self, id_: str, terms: p.PreparedTerms, mod: int) -> None:
        try:
            await self._attempt(id_, terms, mod)
        except SessionLost:
            return
        except (DistopError, OSError) as error:
            message, where = "Cannot verify a prepared operation; retrying later: %s", {"operation": terms.op}
            self._log.warning(message, describe(error), extra=where)

    def _stands(self, id_: str, mod: int) -> bool:
        """Whether the hold is unchanged, as far as this node knows. The view may not have that revision yet."""
        hold = self._ctx.cluster.holds.get(id_)
        return hold is not None and hold.mod <= mod

    async def _write(self, id_: str, txn: Txn, mod: int) -> TxnResult:
        """Write about a hold whose mod revision is ``mod``.

        A write that etcd rejects as invalid is reported, and retried alone while the hold is unchanged: so the
        verifier's answer is kept. Raises what a commit raises, such as SessionLost.
        """
        ctx, written = self._ctx, asyncio.Event()
        try:
            while True:
                try:
                    return await ctx.commit(txn)
                except MalformedRequest as error:
                    if not self._stands(id_, mod):
                        return TxnResult(False, 0)
                    self._rejected[id_] = mod, written
                    pause = ctx.rejected_writes.refused(hold_named(id_), _WRITE, error)
                with suppress(TimeoutError):
                    await asyncio.wait_for(written.wait(), pause)
                    return TxnResult(False, 0)
        finally:
            if self._rejected.pop(id_, None) is not None:
                ctx.rejected_writes.settled(hold_named(id_), _WRITE)

    async def _attempt(self, id_: str, terms: p.PreparedTerms, mod: int) -> None:
        """Verify a prepared operation once, and write the result. Raises SessionLost."""
        ctx, ref = self._ctx, OperationRef.parse(terms.op)
        kv = await ctx.client.get(ctx.keys.of(ref, "state"))
        if kv is None or read(word(State), kv) is not State.PENDING:
            # A client without two-phase support cancelled it: a later confirmation must fail.
            await self._write(id_, p.write(ctx.keys, terms, mod, HoldState.DENIED, "it has ended"), mod)
            return
        begun = p.begun(terms, ctx.incarnation)
        if begun is None:
            await self._give_up(id_, terms, mod, completed=None)
            return
        counted = await self._write(id_, p.write(ctx.keys, begun, mod), mod)
        if not counted.succeeded:
            return  # another daemon was first, or the operation was confirmed
        answer = await self._ask(begun)
        if answer.completed:
            confirmed = p.confirm(ctx.keys, ref, begun, counted.revision)
            if (await self._write(id_, confirmed, counted.revision)).succeeded:
                message, where = "Starting a prepared operation: verifier %s confirms it", {"operation": terms.op}
                self._log.info(message, terms.verify, extra=where)
        elif answer.completed is False:
            await self._give_up(id_, begun, counted.revision, completed=False)
        else:
            failed = p.without_answer(begun, p.Unanswered.of(answer.why))
            if p.begun(failed, ctx.incarnation) is None:
                await self._give_up(id_, failed, counted.revision, completed=None)
                return
            message, where = "Verifier %s gave no answer; retrying later: %s", {"operation": terms.op}
            self._log.warning(message, terms.verify, failed.error, extra=where)
            await self._write(id_, p.write(ctx.keys, failed, counted.revision), counted.revision)

    async def _ask(self, terms: p.PreparedTerms) -> Verified:
        try:
            return await self._ctx.worker.verify(terms.op, terms.external_id, terms.verify, p.ASK_LIMIT)
        except WorkerError as error:
            message, where = "Cannot ask verifier %s; retrying later: %s", {"operation": terms.op}
            self._log.warning(message, terms.verify, describe(error), extra=where)
            return Verified(None, p.Unanswered.FAILED)

    async def _give_up(self, id_: str, terms: p.PreparedTerms, mod: int, *, completed: bool | None) -> None:
        text = p.sentence(terms, completed)
        denied = p.write(self._ctx.keys, p.alarm(terms), mod, HoldState.DENIED, text)
        if (await self._write(id_, denied, mod)).succeeded:
            self._log.error("Abandoning a prepared operation: %s", text, extra={"operation": terms.op})
