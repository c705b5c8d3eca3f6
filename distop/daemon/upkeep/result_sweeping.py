"""Results that are too large for etcd stand in files of the shared directory, for as long as the history has their
operation: these are removed once its record was.

First the record goes, then the files: none is removed that a record names. Where a daemon dies in between, or a file
cannot be removed, it is found when the next record of that table, type and object goes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from distop.errors import DistopError, SessionLost, describe
from distop.protocol.executor_nodes import refusal
from distop.protocol.records import OperationRef, TableRecord
from distop.protocol.txn import Get
from distop.worker.daemon_side.requests import WorkerError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distop.daemon.incarnation import Incarnation


class ResultSweeper:
    """Removes the results of operations that are forgotten. ``types``: those whose results may stand in files."""

    def __init__(self, ctx: Incarnation) -> None:
        self.types: frozenset[str] = frozenset()
        self._ctx = ctx
        self._forgotten: dict[OperationRef, None] = {}
        self._told = asyncio.Event()

    def tell(self, forgotten: Sequence[OperationRef]) -> None:
        """The records of these were deleted."""
        self._forgotten |= dict.fromkeys(ref for ref in forgotten if ref.type in self.types)
        if self._forgotten:
            self._told.set()

    async def run(self) -> None:
        """For ever: remove what stands in files of those that were told. It keeps no operation waiting. Raises
        SessionLost.
        """
        while True:
            await self._told.wait()
            self._told.clear()
            forgotten, self._forgotten = list(self._forgotten), {}
            for table in dict.fromkeys(ref.table for ref in forgotten):
                try:
                    await self._sweep(table, [str(ref) for ref in forgotten if ref.table == table])
                except SessionLost:
                    raise
                except (WorkerError, DistopError) as error:
                    self._ctx.log.warning("results in files of %s could not be removed: %s", table, describe(error))

    async def _sweep(self, table: str, ops: Sequence[str]) -> None:
        if why := refusal(self._ctx.config.serves, None, (table,)):
            self._ctx.log.info("Leaving results in files of %s for another executor: %s", table, why)
            return
        record = await self._record(table)
        found = await self._ctx.worker.sweep_results(ops, record, remove=False)
        gone = [op for op in found if await self._is_gone(op)]
        if gone:
            await self._ctx.worker.sweep_results(gone, record, remove=True)

    async def _record(self, table: str) -> Mapping[str, Any] | None:
        """The table as it is registered; None where it is not, or not any more."""
        found = await self._ctx.client.get(self._ctx.keys.table(table))
        return None if found is None else TableRecord.decode(found.value).to_json()

    async def _is_gone(self, op: str) -> bool:
        """Neither is there a record of it, nor does it go on. (Both are read at one revision.)"""
        ref, keys = OperationRef.parse(op), self._ctx.keys
        answers = await self._ctx.client.read(Get(keys.history(ref)), Get(keys.of(ref, "state")))
        return all(answer.kv is None for answer in answers)
