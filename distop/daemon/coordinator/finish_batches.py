"""Group commit of the finishes of one type on one table.

Finishes that become ready during a commit share the next transaction, each under its own guards. All of them write
runOps, so two concurrent transactions would race for it. A finish without a commit under way is sent at once; the first
waiting finish commits for all of them.

Starts write runOps as well, and groups without pauses would starve them. So a group of fewer than ``Limits.finishes``
waits for as long as the previous commit took; meanwhile it grows, which saves transactions.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distop.clock import time
from distop.errors import MalformedRequest
from distop.protocol import operation_finish as f
from distop.protocol.json_codec import loads
from distop.protocol.transaction_groups import Room, independent_count
from distop.protocol.txn import KeyValue, Put
from distop.store.group_commit import GroupCommit

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from distop.daemon.incarnation_context import Context
    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef
    from distop.protocol.size_limits import Limits
    from distop.protocol.txn import Compare, Txn

LONGEST_TURN = 0.05
"""Maximum seconds for which a group waits for more finishes."""
RUN_OPS_MAX_AGE = 0.25
"""Maximum age in seconds of a prefetched runOps: it changes often where many operations start and end."""


@dataclass(slots=True, eq=False)
class _Finish:
    """A pending finish. ``applied``: the revision of its commit, 0 if it was refused."""

    final: f.Final
    part: Txn
    applied: asyncio.Future[int]
    apart: bool = False
    """Whether it is committed alone: a group with it was refused without a known cause, or etcd rejects it as invalid.
    """

    def settle(self, applied: int) -> None:
        if not self.applied.done():
            self.applied.set_result(applied)


class _FinishGroup:
    """Finishes that share a transaction."""

    def __init__(self, keys: Keys, guard: Compare, limits: Limits) -> None:
        self.items: list[_Finish] = []
        self._keys, self._guard, self._limits = keys, guard, limits
        self._room: Room | None = None

    def add(self, item: _Finish) -> bool:
        if self._room is None:
            common = f.common(self._keys, item.final.ref.table, self._guard)
            self._room = Room(common, self._limits.finish_room)
        elif item.apart or self.full:
            return False
        if not self._room.add(item.part):
            return False
        self.items.append(item)
        return True

    @property
    def full(self) -> bool:
        return len(self.items) >= self._limits.finishes or any(one.apart for one in self.items)


class Finishes:
    """The finishes of one type on one table under one election (``guard``).

    ``reached`` waits until the coordinator's view has reached a revision (W11).
    """

    def __init__(self, ctx: Context, guard: Compare, reached: Callable[[int], Awaitable[None]]) -> None:
        self._ctx = ctx
        self._keys = ctx.keys
        self._guard = guard
        self._reached = reached
        self._took = 0.0
        """Duration of the last commit in seconds."""
        self._commits: GroupCommit[_Finish] = GroupCommit(
            self._commit,
            lambda: _FinishGroup(self._keys, guard, ctx.limits),
            lambda error: None,  # each finish that waits is told
            rest=lambda: min(self._took, LONGEST_TURN),
            abandoned=lambda one: one.applied.done(),
        )
        self._malformed: set[OperationRef] = set()
        """Operations whose finish etcd rejects as invalid, even alone; they are retried alone at once."""
        self._prefetched: tuple[float, asyncio.Task[KeyValue | None]] | None = None
        """The latest prefetch of runOps, and the time of its start."""
        self._since = 0
        """The prefetch includes all writes up to this revision."""
        self._written: tuple[float, KeyValue | None] = (-RUN_OPS_MAX_AGE, None)
        """runOps as last written or read here, and the time of that."""
        self._telling: set[asyncio.Task[None]] = set()

    def prefetch_run_ops(self, ref: OperationRef, since: int = 0) -> None:
        """Prefetch runOps for the finish of an operation that may end soon.

        This happens while its last jobs or its completion code run, unless runOps is known as of ``since`` or later. If
        runOps changes before the finish, the finish is refused, and the refusal returns it.
        """
        _, written = self._written
        read = self._prefetched[1] if self._prefetched is not None else None
        known = max(self._since, written.mod_revision if written is not None else 0)
        if self._commits.busy or (read is not None and not read.done()) or 0 < since <= known:
            return
        read = asyncio.ensure_future(self._ctx.client.get(self._keys.run_ops(ref.table)))
        read.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._prefetched, self._since = (time.monotonic(), read), since

    async def finish(self, final: f.Final) -> bool:
        """Write the terminal state and the history record.

        Returns False if it was refused for another reason than runOps.
        """
        one = _Finish(final, f.part(self._keys, final), asyncio.get_running_loop().create_future())
        one.apart = final.ref in self._malformed
        one.applied.add_done_callback(self._withdrawn)
        self._commits.add([one])
        applied = await one.applied
        self._malformed.discard(final.ref)
        if applied:
            state = final.history.state
            self._ctx.log.info("Operation finished as %s", state, extra={"operation": str(final.ref)})
        return applied > 0

    def _withdrawn(self, applied: asyncio.Future[int]) -> None:
        if applied.cancelled():
            self._commits.interrupt()

    async def _commit(self, group: list[_Finish]) -> Sequence[_Finish]:
        """Commit these finishes; returns those to be sent again."""
        count = independent_count([one.part for one in group])
        return [*await self._write(group[:count]), *group[count:]]

    async def _write(self, group: list[_Finish]) -> Sequence[_Finish]:
        try:
            seen = await self._run_ops(group[0].final.ref)
            finals = [one.final for one in group]
            counts: Mapping[str, int] = loads(seen.value) if seen is not None else {}
            mod = seen.mod_revision if seen is not None else 0
            txn = f.finish(self._keys, self._guard, counts, mod, finals, [one.part for one in group])
            began = time.monotonic()
            result = await self._ctx.commit(txn)
        except MalformedRequest as error:
            if len(group) > 1:
                return self._apart(group)
            self._malformed.add(group[0].final.ref)
            group[0].applied.set_exception(error)
            return []
        except Exception as error:
            if not group[0].applied.done():
                group[0].applied.set_exception(error)
            return group[1:]
        self._took = time.monotonic() - began
        if result.succeeded:
            self._keep_written(finals[0].ref, txn, result.revision)
            settling = asyncio.ensure_future(self._settle(group, result.revision))
            self._telling.add(settling)
            settling.add_done_callback(self._telling.discard)
            return []
        return self._refused(group, f.finish_refused(result, mod, finals))

    def _refused(self, group: list[_Finish], refused: f.FinishRefused) -> list[_Finish]:
        """The finishes of a refused group to be sent again.

        They are sent with runOps as the refusal returned it, or each alone.
        """
        if refused.run_ops is not None:
            self._written = time.monotonic(), refused.run_ops
        left = []
        for one, is_gone in zip(group, refused.gone, strict=True):
            if is_gone:
                one.settle(0)
            else:
                left.append(one)
        if len(left) < len(group) or refused.moved:
            return left
        # The election, a decision or the claims have changed.
        if len(group) > 1:
            return self._apart(group)
        group[0].settle(0)
        return []

    async def _settle(self, group: Sequence[_Finish], revision: int) -> None:
        """Wait for the view, once for all of them.

        If the view's watch fails, the incarnation ends with that error; the finishes are applied all the same.
        """
        try:
            with contextlib.suppress(Exception):
                await self._reached(revision)
        finally:
            for one in group:
                one.settle(revision)

    @staticmethod
    def _apart(group: list[_Finish]) -> list[_Finish]:
        """Commit each finish alone, after etcd refused or rejected their group."""
        for one in group:
            one.apart = True
        return group

    def _keep_written(self, ref: OperationRef, txn: Txn, revision: int) -> None:
        key = self._keys.run_ops(ref.table)
        (value,) = (op.value for op in txn.success if isinstance(op, Put) and op.key == key)
        self._written = time.monotonic(), KeyValue(key, value, revision)

    async def _run_ops(self, ref: OperationRef) -> KeyValue | None:
        """runOps as last read or written, for a first attempt; a refusal returns the current value."""
        begun, read = self._prefetched if self._prefetched is not None else (-RUN_OPS_MAX_AGE, None)
        at, written = self._written
        now = time.monotonic()
        if read is not None and at <= begun and now - begun < RUN_OPS_MAX_AGE:
            return await read
        if written is not None and now - at < RUN_OPS_MAX_AGE:
            return written
        return await self._ctx.client.get(self._keys.run_ops(ref.table))
