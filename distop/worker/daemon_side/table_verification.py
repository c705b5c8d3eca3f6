"""Compares an operation's copies of table records with the registered records, before the child gets them."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from distop.errors import DistopError, describe
from distop.protocol.json_codec import UNREADABLE, loads
from distop.protocol.records import CLUSTER_TABLE, OperationRef
from distop.protocol.table_registry import copies, unregistered
from distop.worker.daemon_side.requests import WorkerError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distop.protocol.records import TableRecord
    from distop.protocol.table_registry import Copy
    from distop.worker.daemon_side.requests import FindRemovedTable, FindTables, RunRequest

_CACHED = 1_000
"""Maximum number of operations with cached results."""


class TableRecordCheck:
    """Checks copies of table records. ``find`` returns the registered records; None: no checks.

    ``find_removed`` returns the record that the plan of an operation has removed, which its jobs and its completion
    still use. It is asked only if the registered record is another one.
    """

    def __init__(self, find: FindTables | None, find_removed: FindRemovedTable | None = None) -> None:
        self._find = find
        self._find_removed = find_removed
        self._checked: OrderedDict[tuple[str, int], list[Copy]] = OrderedDict()
        """Operation and the revision of its gate → copies that were registered when it was opened: its jobs have these.

        An operation written by hand under the same name has another gate.
        """

    async def check(self, op: str, table: Mapping[str, Any] | None, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        """Check a call; ``rows``: of the plan. Raises WorkerError, ``fatal`` for a copy that is not registered."""
        await self._check(op, OperationRef.parse(op).table, table, rows)

    async def check_page(self, op: str, rows: Sequence[str]) -> None:
        """Check the other tables in rows of the plan, JSON texts. Raises WorkerError like :meth:`check`."""
        if named := [loads(row) for row in rows if '"beside"' in row]:
            await self._check(op, CLUSTER_TABLE, None, named)

    async def _check(
        self, op: str, table: str, record: Mapping[str, Any] | None, rows: Iterable[Mapping[str, Any]]
    ) -> None:
        if self._find is None:
            return
        found = _copies(op, table, record, rows)
        if why := await self._why_refused(op, found, await self._registered(found)):
            raise WorkerError("fatal", why)

    async def refusals(self, requests: Sequence[RunRequest]) -> list[str]:
        """For each request the reason why its jobs must not run, "" for none.

        Raises WorkerError if the registered records cannot be read.
        """
        if self._find is None:
            return [""] * len(requests)
        new: dict[str, list[Copy]] = {}
        reasons: dict[str, str] = {}
        for one in requests:
            rows = (item.partition for item in one.items)
            try:
                found = _copies(one.op, OperationRef.parse(one.op).table, one.table, rows)
            except WorkerError as error:
                reasons[one.op] = str(error)
                continue
            known = self._checked.get((one.op, one.opened), [])
            new[one.op] = [copy for copy in found if copy not in known]
        registered = await self._registered([copy for found in new.values() for copy in found])
        opened = {one.op: one.opened for one in requests}
        for op, found in new.items():
            reasons[op] = await self._why_refused(op, found, registered)
            if found and not reasons[op] and opened[op]:
                key = (op, opened[op])
                self._checked[key] = self._checked.get(key, []) + found
                self._checked.move_to_end(key)
        while len(self._checked) > _CACHED:
            self._checked.popitem(last=False)
        return [reasons[one.op] for one in requests]

    async def _why_refused(self, op: str, found: Sequence[Copy], registered: Mapping[str, TableRecord | None]) -> str:
        """As :func:`unregistered`, but the record that the operation's plan has removed counts as registered."""
        why, table = unregistered(op, found, registered), OperationRef.parse(op).table
        if not why or self._find_removed is None or table not in {name for name, _ in found}:
            return why
        try:
            removed = await self._find_removed(op)
        except DistopError as error:
            raise WorkerError("transient", f"cannot read the record of its table: {describe(error)}") from error
        return unregistered(op, found, {**registered, table: removed}) if removed is not None else why

    async def _registered(self, found: Sequence[Copy]) -> Mapping[str, TableRecord | None]:
        if self._find is None or not found:
            return {}
        try:
            return await self._find(sorted({name for name, _ in found}))
        except DistopError as error:
            raise WorkerError("transient", f"cannot read the records of its tables: {describe(error)}") from error


def _copies(op: str, table: str, record: Mapping[str, Any] | None, rows: Iterable[Mapping[str, Any]]) -> list[Copy]:
    """Like :func:`copies`, but raises WorkerError."""
    try:
        return copies(table, record, rows)
    except UNREADABLE as error:
        raise WorkerError("fatal", f"the plan of {op} has an invalid list of other tables") from error
