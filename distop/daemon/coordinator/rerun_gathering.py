"""Collects the data for a rerun when an operation ends with unsuccessful jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.daemon.coordinator.orphaned_jobs import PlanRows
from distop.protocol import rerun_record
from distop.protocol.keys import state_ordinal
from distop.protocol.plan import CHUNK_PAGE
from distop.protocol.records import State
from distop.protocol.txn import Get

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from distop.daemon.incarnation_context import Context
    from distop.decide.operation_view import OperationView
    from distop.protocol.records import History
    from distop.protocol.txn import Put


async def kept_with(ctx: Context, op: OperationView, history: History) -> tuple[Put, ...]:
    """The writes that store a rerun's data with the history record.

    Nothing if all jobs succeeded or there was no plan. If the data of all unfinished jobs are too large, only the
    failed jobs are stored; if these are too large as well, nothing.
    """
    if history.state is State.SUCCESS or op.plan is None or op.spec is None or history.success == history.total:
        return ()
    argument = await ctx.client.get(ctx.keys.of(op.ref, "arg"))
    if argument is None:
        return ()
    failed = set(op.failed)
    sets: list[Collection[int]] = [failed] if failed else []
    unfinished = history.total - history.success - history.failed
    if unfinished and unfinished + len(failed) <= rerun_record.MAX_KEPT_JOBS:
        sets.insert(0, await _not_done(ctx, op))
    for wanted in sets:
        if len(wanted) <= rerun_record.MAX_KEPT_JOBS:
            rows = rerun_record.encode_rows(await _names(ctx, op, sorted(wanted)), failed)
            if rows is not None:
                found = rerun_record.writes(ctx.keys, op.ref, argument.value, op.spec, rows)
                if sum(len(put.value) for put in found) + len(history.encode()) <= rerun_record.MAX_FINISH_BYTES:
                    return found
    ctx.log.warning(
        "Cannot store what a rerun of the operation needs: its plan is too large", extra={"operation": str(op.ref)}
    )
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
