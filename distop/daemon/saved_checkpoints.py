"""Reads and writes the checkpoints of resumable jobs.

A checkpoint is read before a job continues, and written under its claim's fence while the job runs.
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
"""Maximum checkpoints in one read: up to 64 KiB each (T2)."""


async def read_checkpoints(ctx: Context, ref: OperationRef, partitions: Sequence[int]) -> dict[int, Any]:
    """The checkpoints of these jobs, by partition; a job without one is left out. Raises the errors of a read."""
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
    """The checkpoint writes of one held job.

    ``seen``: the mod revision of the checkpoint in etcd; None if it is unknown. ``latest``: the number of the newest
    save. ``turn``: held by the write in progress.
    """

    held: Held
    seen: int | None
    latest: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class Checkpoints:
    """The checkpoints of one incarnation's jobs. Each job has at most one write in progress.

    A child that got no answer in time saves again while its earlier write may still arrive. Of two writes that compare
    the same revision only one is applied, and it could be the older one.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._saving: dict[tuple[OperationRef, int], _Saving] = {}

    async def load(self, op: OpenOperation, block: Sequence[int]) -> dict[int, Any]:
        """The checkpoints that earlier attempts of these held jobs saved. Raises the errors of a read."""
        if not op.spec.rules.resumable:
            return {}
        return await read_checkpoints(self._ctx, op.ref, [p for p in block if op.held[p].claim.attempt > 1])

    async def save(self, op: OpenOperation, partition: int, value: Any) -> bool:
        """Save a checkpoint once the write in progress has ended; returns whether it was saved.

        If a newer one waits by then, only that one is saved. Raises InvalidArgument (it is too large), SessionLost, and
        the errors of a read.
        """
        held = op.held.get(partition)
        if held is None:
            return False
        saving = self._saving.get((op.ref, partition))
        if saving is None or saving.held.fence != held.fence:
            first = 0 if held.claim.attempt == 1 else None  # a first attempt finds no checkpoint
            saving = self._saving[op.ref, partition] = _Saving(held, first)
        data = self._ctx.encode(value)
        saving.latest += 1
        number = saving.latest
        async with saving.turn:
            if number != saving.latest or op.held.get(partition) is not saving.held:
                return False
            return await self._write(op.ref, partition, saving, data)

    async def _write(self, ref: OperationRef, partition: int, saving: _Saving, data: bytes) -> bool:
        """Write a checkpoint that follows the one in etcd.

        After a refused or abandoned write the revision is read again. A late copy of that write still changes nothing:
        of the writes that compare one mod revision, at most one is ever applied.
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
        """Forget a job that this executor no longer holds."""
        self._saving.pop((ref, partition), None)
