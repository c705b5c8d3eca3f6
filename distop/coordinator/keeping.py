"""Gathers, when an operation ends and not all of its jobs succeeded, what a rerun of it will need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.coordinator.reaping import PlanRows
from distop.core import kept
from distop.core.keys import state_ordinal
from distop.core.model import State
from distop.core.plan import CHUNK_PAGE
from distop.core.txn import Get

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from distop.core.model import History
    from distop.core.operationview import OperationView
    from distop.core.txn import Put
    from distop.node.context import Context


async def kept_with(ctx: Context, op: OperationView, history: History) -> tuple[Put, ...]:
    """What is to be written with this history record; nothing where all jobs succeeded, where there was no plan, or
    where it would be too large: then the failed jobs alone are tried, then nothing.
    """
    if history.state is State.SUCCESS or op.plan is None or op.spec is None or history.success == history.total:
        return ()
    argument = await ctx.client.get(ctx.keys.of(op.ref, "arg"))
    if argument is None:
        return ()
    failed = set(op.failed)
    sets: list[Collection[int]] = [failed] if failed else []
    unfinished = history.total - history.success - history.failed
    if unfinished and unfinished + len(failed) <= kept.MAX_KEPT_JOBS:
        sets.insert(0, await _not_done(ctx, op))
    for wanted in sets:
        if len(wanted) <= kept.MAX_KEPT_JOBS:
            rows = kept.encode_rows(await _names(ctx, op, sorted(wanted)), failed)
            if rows is not None:
                found = kept.writes(ctx.keys, op.ref, argument.value, op.spec, rows)
                if sum(len(put.value) for put in found) + len(history.encode()) <= kept.MAX_FINISH_BYTES:
                    return found
    ctx.log.warning("too large to be kept for a rerun", extra={"operation": str(op.ref)})
    return ()


async def _not_done(ctx: Context, op: OperationView) -> set[int]:
    assert op.plan is not None
    listing = await ctx.client.list(*ctx.keys.jobs_range(op.ref), keys_only=True)
    ended = {p for kv in listing.kvs if (p := state_ordinal(kv.key)) is not None}
    return set(range(op.plan.count)) - (ended - op.failed)


async def _names(ctx: Context, op: OperationView, wanted: Sequence[int]) -> list[tuple[int, str]]:
    assert op.plan is not None
    named: list[tuple[int, str]] = []
    for first in range(0, op.plan.chunks, CHUNK_PAGE):
        numbers = range(first, min(first + CHUNK_PAGE, op.plan.chunks))
        found = await ctx.client.read(*(Get(ctx.keys.chunk(op.ref, n)) for n in numbers))
        # Chunk by chunk: each alone holds up the loop for no longer than it takes to decode it.
        for answer in found:
            if answer.kv is not None:
                rows = PlanRows([answer.kv.value]).of(wanted)
                named += [(int(row["partition"]), str(row["name"])) for row in rows]
    return named
