"""The checkpoints of resumable jobs, as attempts have saved them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.core.txn import Get

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.core.model import OperationRef
    from distop.node.context import Context

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
