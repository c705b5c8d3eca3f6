"""Group commit of finishes: those of one type on one table that become ready while one is being committed go together
in the next transaction, each under the guards that it has alone.

All of them write runOps, so two that are sent at once would race for it. A finish that finds none under way is sent at
once; the first of those that waited then commits for all of them. Starts write runOps as well: one group right behind
the other would leave them no turn, so one of fewer than ``Limits.finishes`` waits for as long as the one before took.
Meanwhile it grows, so that as much ends in fewer transactions.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distop.clock import time
from distop.errors import MalformedRequest
from distop.protocol import operation_finish as f
from distop.protocol.json_codec import loads
from distop.protocol.txn import KeyValue, Put

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from distop.daemon.incarnation_context import Context
    from distop.protocol.records import OperationRef
    from distop.protocol.txn import Compare, Txn

LONGEST_TURN = 0.05
"""Seconds that a group waits for others at most."""
FORESEEN_FOR = 0.25
"""Seconds for which runOps, read ahead, is good for a try: where many operations start and end it changes often."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A finish that waits for its group commit.

    ``answer``: the revision at which it was written, 0 where it was refused, or None: it is its turn to commit.
    ``apart``: it is committed alone, because a group with it was refused without a known reason, or because etcd
    rejects it as invalid.
    """

    final: f.Final
    part: Txn
    answer: asyncio.Future[int | None]
    apart: bool = False

    def settle(self, answer: int | None) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


class Finishes:
    """Those of one type on one table, under one election (``guard``). ``reached`` waits until the coordinator's view
    has reached a revision (W11).
    """

    def __init__(self, ctx: Context, guard: Compare, reached: Callable[[int], Awaitable[None]]) -> None:
        self._ctx = ctx
        self._keys = ctx.keys
        self._guard = guard
        self._reached = reached
        self._busy = False
        self._took = 0.0
        """Seconds of the last commit."""
        self._waiting: deque[_Waiting] = deque()
        self._malformed: set[OperationRef] = set()
        """Operations whose finish etcd rejects as invalid, even alone; they are retried alone at once."""
        self._foreseen: tuple[float, asyncio.Task[KeyValue | None]] | None = None
        """The read that was begun last, and when."""
        self._since = 0
        """It tells of what was written at this revision, or before."""
        self._written: tuple[float, KeyValue | None] = (-FORESEEN_FOR, None)
        """runOps as it was written here last, and when that was."""

    def foresee(self, ref: OperationRef, since: int = 0) -> None:
        """The operation may end soon: read runOps for its finish now, while its last jobs or its completion code run;
        unless it is known as it was written at ``since``, or later. If it has changed by then, the finish is refused,
        and its refusal brings it.
        """
        _, written = self._written
        read = self._foreseen[1] if self._foreseen is not None else None
        known = max(self._since, written.mod_revision if written is not None else 0)
        if self._busy or (read is not None and not read.done()) or 0 < since <= known:
            return
        read = asyncio.ensure_future(self._ctx.client.get(self._keys.run_ops(ref.table)))
        read.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._foreseen, self._since = (time.monotonic(), read), since

    async def finish(self, final: f.Final) -> bool:
        """Write the terminal state and the history; False: refused, for another reason than runOps."""
        answer = asyncio.get_running_loop().create_future()
        one = _Waiting(final, f.part(self._keys, final), answer, final.ref in self._malformed)
        applied: int | None = None
        behind = self._busy
        if behind:
            self._waiting.append(one)
            applied = await self._turn(one)
        if applied is None:
            applied, others = 0, list[_Waiting]()
            self._busy = True
            try:
                try:
                    if behind and not one.apart and len(self._waiting) + 1 < self._ctx.limits.finishes:
                        await asyncio.sleep(min(self._took, LONGEST_TURN))
                    applied, others = await self._commit(one)
                finally:
                    self._hand_over()
                if applied:
                    await self._reached(applied)
            finally:
                for other in others:  # one wait is enough for all of them
                    other.settle(applied)
        self._malformed.discard(final.ref)
        if applied:
            state = final.history.state
            self._ctx.log.info("finished as %s", state, extra={"operation": str(final.ref)})
        return applied > 0

    async def _turn(self, one: _Waiting) -> int | None:
        try:
            return await one.answer
        except asyncio.CancelledError:
            if one.answer.done() and not one.answer.cancelled() and one.answer.result() is None:
                self._hand_over()  # it was told that it is its turn, and does not take it
            raise

    def _hand_over(self) -> None:
        while self._waiting:
            one = self._waiting.popleft()
            if not one.answer.done():
                one.settle(None)
                return
        self._busy = False

    async def _commit(self, mine: _Waiting) -> tuple[int, list[_Waiting]]:
        """Commit this one, with all that wait by the time when it is sent. The revision at which it was applied, or 0;
        and those that were with it, who are to be told so.
        """
        seen = await self._run_ops(mine.final.ref)
        group = [mine]
        try:
            while True:
                self._take(group)
                finals = [one.final for one in group]
                counts: Mapping[str, int] = loads(seen.value) if seen is not None else {}
                mod = seen.mod_revision if seen is not None else 0
                txn = f.finish(self._keys, self._guard, counts, mod, finals, [one.part for one in group])
                began = time.monotonic()
                try:
                    result = await self._ctx.commit(txn)
                except MalformedRequest:
                    if len(group) == 1:
                        self._malformed.add(mine.final.ref)
                        raise
                    group = self._apart(group)
                    continue
                self._took = time.monotonic() - began
                if result.succeeded:
                    self._keep_written(mine.final.ref, txn, result.revision)
                    others, group = [one for one in group if one is not mine], []
                    return result.revision, others
                refused = f.finish_refused(result, mod, finals)
                seen = refused.run_ops or seen
                gone = [one for one, is_gone in zip(group, refused.gone, strict=True) if is_gone]
                group = [one for one in group if one not in gone]
                for one in gone:
                    one.settle(0)
                if mine in gone:
                    return 0, []
                if not gone and not refused.moved:
                    # The election, a decision or the claims are not what they were.
                    if len(group) == 1:
                        return 0, []
                    group = self._apart(group)
        finally:
            # Whoever got no answer commits next.
            self._waiting.extendleft(one for one in reversed(group) if one is not mine and not one.answer.done())

    def _take(self, group: list[_Waiting]) -> None:
        """Add those that wait, as many as go in one transaction."""
        more: list[_Waiting] = []
        while self._waiting and not group[0].apart and not self._waiting[0].apart:
            if len(group) + len(more) >= self._ctx.limits.finishes:
                break
            one = self._waiting.popleft()
            if not one.answer.done():
                more.append(one)
        if more:
            parts, table = [one.part for one in (*group, *more)], group[0].final.ref.table
            fit = f.finish_together(self._keys, self._guard, table, parts, self._ctx.limits.finish_room)
            room = max(0, fit - len(group))
            group += more[:room]
            self._waiting.extendleft(reversed(more[room:]))

    def _apart(self, group: list[_Waiting]) -> list[_Waiting]:
        """One of them holds up the others, or etcd takes none of them together: each is committed alone."""
        for one in group:
            one.apart = True
        self._waiting.extendleft(reversed(group[1:]))
        return group[:1]

    def _keep_written(self, ref: OperationRef, txn: Txn, revision: int) -> None:
        key = self._keys.run_ops(ref.table)
        (value,) = (op.value for op in txn.success if isinstance(op, Put) and op.key == key)
        self._written = time.monotonic(), KeyValue(key, value, revision)

    async def _run_ops(self, ref: OperationRef) -> KeyValue | None:
        """As it was when it was read or written last, for a first try; a refusal brings it as it is."""
        begun, read = self._foreseen if self._foreseen is not None else (-FORESEEN_FOR, None)
        at, written = self._written
        now = time.monotonic()
        if read is not None and at <= begun and now - begun < FORESEEN_FOR:
            return await read
        if written is not None and now - at < FORESEEN_FOR:
            return written
        return await self._ctx.client.get(self._keys.run_ops(ref.table))
