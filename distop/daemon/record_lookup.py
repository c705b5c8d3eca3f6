"""Reads records for the behaviors in the child, and checks them."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument, UnreadableRecord
from distop.protocol.record_reading import read
from distop.protocol.record_signature import why_refused
from distop.protocol.records import History, OperationRef, TableRecord
from distop.protocol.txn import Get

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from distop.daemon.incarnation_context import Context


async def find_history(ctx: Context, op: str) -> Mapping[str, Any]:
    """A history record for a behavior, checked because the behavior may act on it.

    It belongs to the operation, and has a valid signature if this executor has a certificate key. Raises the errors of
    the client.
    """
    try:
        ref = OperationRef.parse(op)
        kv = await ctx.client.get(ctx.keys.history(ref))
        if kv is None:
            return {"refused": f"there is no history record of {op}: it has not ended, or the record was deleted"}
        record = read(History.decode, kv)
    except (InvalidArgument, UnreadableRecord) as error:
        return {"refused": str(error)}
    if why := why_refused(str(ref), ctx.config.certificate_key, ctx.keys.namespace, record):
        return {"refused": f"the history record of {op} is rejected: {why}"}
    return {"record": record.to_json()}


async def find_tables(ctx: Context, names: Collection[str]) -> Mapping[str, TableRecord | None]:
    """The registered records of tables; None for an invalid name, and for an unreadable record.

    Raises the errors of the client.
    """
    asked: dict[str, Get] = {}
    for name in names:
        with suppress(InvalidArgument, ValueError):
            asked[name] = Get(ctx.keys.table(name))
    found: dict[str, TableRecord | None] = dict.fromkeys(names)
    wanted, size = list(asked), ctx.limits.reads
    for page in (wanted[n : n + size] for n in range(0, len(wanted), size)):
        for name, answer in zip(page, await ctx.client.read(*(asked[name] for name in page)), strict=True):
            with suppress(UnreadableRecord):
                found[name] = read(TableRecord.decode, answer.kv) if answer.kv is not None else None
    return found


async def find_removed_table(ctx: Context, op: str) -> TableRecord | None:
    """The record of its table that the plan of an operation has removed; None if there is none, or it is unreadable.

    Raises the errors of the client.
    """
    kv = await ctx.client.get(ctx.keys.removed_table(OperationRef.parse(op)))
    with suppress(UnreadableRecord):
        return read(TableRecord.decode, kv) if kv is not None else None
    return None
