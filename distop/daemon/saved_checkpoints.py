"""Checkpoints of resumable jobs: reading those of earlier attempts, and saving new ones.

The checkpoints of resumable jobs, as attempts have saved them.

The checkpoints of resumable jobs: read before a job goes on, and written under its claim's fence while it runs.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distop.protocol import job_transitions
from distop.protocol.txn import Get

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.daemon.incarnation_context import Context
    from distop.protocol.records import OperationRef
    from distop.services.open_operation import Held, OpenOperation


AT_ONCE = 32
"""Checkpoints in one read: up to 64 KiB each (T2)."""


async def read_checkpoints(ctx: Context, ref: OperationRef, partitions: Sequence[int]) -> dict[int, Any]:
    """The checkpoints of these jobs, by partition; a job without one is left out. Raises as reads do."""
    found: dict[int, Any] = {}
    for n in range(0, len(partitions), AT_ONCE):
        page = partitions[n : n + AT_ONCE]
        answers = await ctx.client.read(*(Get(ctx.keys.job(ref, p, "progress")) for p in page))
        for p, answer in zip(page, answers, strict=True):
            if answer.kv is not None:
                found[p] = ctx.decode(answer.kv.value)
    return found


@dataclass(slots=True)
class _Saving:
    """Of one held job. ``seen``: the mod revision of its checkpoint, None where that is not known for sure."""

    held: Held
    seen: int | None
    latest: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class Checkpoints:
    """Of one incarnation. One write at a time for each job.

    A child that got no answer in time saves again while its first checkpoint may still be on its way. Two writes that
    follow the same checkpoint would refuse each other, and the order in which they arrive would be anybody's guess.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._saving: dict[tuple[OperationRef, int], _Saving] = {}

    async def load(self, op: OpenOperation, block: Sequence[int]) -> dict[int, Any]:
        """What former attempts at these held jobs have saved. Raises as reads do."""
        if not op.spec.rules.resumable:
            return {}
        return await read_checkpoints(self._ctx, op.ref, [p for p in block if op.held[p].claim.attempt > 1])

    async def save(self, op: OpenOperation, partition: int, value: Any) -> bool:
        """Save one, after those that are being saved; where a later one waits already, only that one. Whether it was
        saved. Raises InvalidArgument where it is too large, SessionLost, and as reads do.
        """
        held = op.held.get(partition)
        if held is None:
            return False
        saving = self._saving.get((op.ref, partition))
        if saving is None or saving.held.fence != held.fence:
            first = 0 if held.claim.attempt == 1 else None  # no former attempt has saved anything
            saving = self._saving[op.ref, partition] = _Saving(held, first)
        data = self._ctx.encode(value)
        saving.latest += 1
        number = saving.latest
        async with saving.turn:
            if number != saving.latest or op.held.get(partition) is not saving.held:
                return False
            return await self._write(op.ref, partition, saving, data)

    async def _write(self, ref: OperationRef, partition: int, saving: _Saving, data: bytes) -> bool:
        """What is read once more after a refusal, or after a write that nobody waited for to its end, cannot let a late
        copy in: each write follows one mod revision, and of those that follow the same one at most one ever applies.
        """
        keys, seen = self._ctx.keys, saving.seen
        if seen is None:
            former = await self._ctx.client.get(keys.job(ref, partition, "progress"))
            seen = former.mod_revision if former is not None else 0
        saving.seen = None
        applied = await self._ctx.reporter.write(
            job_transitions.checkpoint(keys, ref, partition, saving.held.fence, data, seen)
        )
        saving.seen = applied or None
        return bool(applied)

    def forget(self, ref: OperationRef, partition: int) -> None:
        """The job is held no longer."""
        self._saving.pop((ref, partition), None)
