"""Removes result files and stages of operations whose history records were deleted.

Results too large for etcd are files in the shared directory, kept as long as the history has the operation's record. So
are stages that users read (``Behavior.staged_output``). Other stages were removed before; killed processes may have
written some since.
The record is deleted before the files, so no record refers to a removed file. If a daemon dies between the two, or a
file cannot be removed, the files are found when the next record of the same table, type and object is deleted.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from distop.errors import DistopError, SessionLost, describe
from distop.protocol.executor_nodes import refusal
from distop.protocol.records import OperationRef, TableRecord
from distop.protocol.texts import plural
from distop.protocol.txn import Get
from distop.worker.daemon_side.requests import WorkerError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distop.daemon.incarnation import Incarnation


class ResultSweeper:
    """Removes result files and stages of forgotten operations.

    ``types``: the types that may have such files; ``staging``: those with stages.
    """

    def __init__(self, ctx: Incarnation) -> None:
        self.types: frozenset[str] = frozenset()
        self.staging: frozenset[str] = frozenset()
        self._ctx = ctx
        self._forgotten: dict[OperationRef, None] = {}
        self._added = asyncio.Event()

    def add(self, forgotten: Sequence[OperationRef]) -> None:
        """Add operations whose records were deleted."""
        self._forgotten |= dict.fromkeys(ref for ref in forgotten if ref.type in self.types)
        if self._forgotten:
            self._added.set()

    async def run(self) -> None:
        """Remove the files of added operations, without end. Raises SessionLost."""
        while True:
            await self._added.wait()
            self._added.clear()
            forgotten, self._forgotten = list(self._forgotten), {}
            for table in dict.fromkeys(ref.table for ref in forgotten):
                try:
                    await self._sweep(table, [str(ref) for ref in forgotten if ref.table == table])
                except SessionLost:
                    raise
                except (WorkerError, DistopError) as error:
                    message = "Cannot remove files of operations on %s; retrying when its next record is deleted: %s"
                    self._ctx.log.warning(message, table, describe(error))

    async def _sweep(self, table: str, ops: Sequence[str]) -> None:
        if why := refusal(self._ctx.config.serves, None, (table,)):
            self._ctx.log.info("Leaving files of operations on %s for another executor: %s", table, why)
            return
        record = await self._record(table)
        found = await self._ctx.worker.find_files(ops, record)
        gone: dict[str, list[str]] = {}
        for op in found:
            if await self._is_gone(op):
                gone.setdefault(OperationRef.parse(op).type, []).append(op)
        for type_name, forgotten in gone.items():
            removed = await self._ctx.worker.remove_files(forgotten, record, self.staging)
            if removed.stages:
                self._ctx.meter.stages_removed(type_name, removed.stages, removed.bytes)
                count = plural(removed.stages, "stage")
                self._ctx.log.info("Removed %s of forgotten operations with %d bytes", count, removed.bytes)

    async def _record(self, table: str) -> Mapping[str, Any] | None:
        """The registered record of a table; None if it is not registered."""
        found = await self._ctx.client.get(self._ctx.keys.table(table))
        return None if found is None else TableRecord.decode(found.value).to_json()

    async def _is_gone(self, op: str) -> bool:
        """Whether an operation has no record and does not run. (Both are read at one revision.)"""
        ref, keys = OperationRef.parse(op), self._ctx.keys
        answers = await self._ctx.client.read(Get(keys.history(ref)), Get(keys.of(ref, "state")))
        return all(answer.kv is None for answer in answers)
