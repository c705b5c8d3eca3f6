"""The daemon's calls to its child other than jobs: planning, completion, cleanup, verification."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from distop.protocol.records import OperationRef
from distop.worker import child_messages
from distop.worker.daemon_side.requests import CompleteResult, PlanResult, RemovedStages, RunRequest, Verified
from distop.worker.daemon_side.result_handlers import Sources

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from distop.worker.daemon_side.admission import SharedExclusiveLock
    from distop.worker.daemon_side.call_channel import Caller
    from distop.worker.daemon_side.requests import CompleteRequest, JobItem, PlanPages, WorkerConfig
    from distop.worker.daemon_side.result_handlers import Fetch, FindTable, Page
    from distop.worker.daemon_side.table_verification import TableRecordCheck


CHILD_LIMIT = 60.0
"""Minimum seconds for a verification, including the wait for a child."""


class ChildCalls:
    """The calls to the child, as methods of the worker, which sets the attributes."""

    config: WorkerConfig
    _caller: Caller
    _admission: SharedExclusiveLock
    _registered: TableRecordCheck

    async def plan(
        self,
        op: str,
        type: str,  # noqa: A002
        arg: Any,
        table: Mapping[str, Any],
        names: tuple[str, ...] | None,
        find_table: FindTable | None = None,
        list_tables: Fetch | None = None,
    ) -> PlanResult:
        """Plan the jobs of an operation, only those of ``names`` if given.

        ``find_table`` returns the record of another table, or None; ``list_tables`` all records. Raises WorkerError,
        kind ``transient`` after the time limit.
        """
        message = child_messages.PlanMessage(
            t="plan", call=0, op=op, type=type, arg=arg, table=table, names=None if names is None else list(names)
        )
        await self._registered.check(op, table)
        sources, limit = Sources(table=find_table, tables=list_tables), self.config.call_limit
        value, chunks = await self._caller.call(message, sources=sources, lock=self._admission, limit=limit)
        beside = tuple(value.get("beside") or ())
        found = value["count"], value["version"], value["spilled"], value["options"]
        return PlanResult(chunks, *found, beside, removes_table=bool(value.get("removes_table")))

    async def complete(self, request: CompleteRequest) -> CompleteResult:
        """Run the completion code. Raises WorkerError, kind ``transient`` after the time limit."""
        plan, first = request.plan, request.first
        message = child_messages.CompleteMessage(
            t="complete",
            call=0,
            op=request.op,
            type=request.type,
            arg=request.arg,
            table=request.table,
            verdict=request.verdict,
            total=request.total,
            success=request.success,
            failed=request.failed,
        )
        if plan is not None:
            message["plan"] = {"version": plan.version, "whole": plan.whole, "chunks": plan.chunks}
        if first is not None:
            message["following"] = first[1]

        await self._registered.check(request.op, request.table)
        rows = partial(iter, first[0]) if first is not None else None
        sources = Sources(request.fetch, partial(self._checked_page, request.op, plan) if plan is not None else None)
        limit = self.config.call_limit
        value, _ = await self._caller.call(message, rows, sources=sources, lock=self._admission, limit=limit)
        removed = RemovedStages(*value.get("swept", ()))
        follow_ups, tables = tuple(value["follow_ups"]), tuple(value.get("registrations", ()))
        return CompleteResult(value["report"], value["failure"], follow_ups, removed, tables)

    async def _checked_page(self, op: str, plan: PlanPages, number: int) -> Page:
        found = await plan.page(number)
        await self._registered.check_page(op, found[0])
        return found

    async def sweep(
        self, op: str, table: Mapping[str, Any] | None, *, plans: bool, stages: bool, earlier: bool
    ) -> RemovedStages:
        """Remove the file lists that planning wrote to the shared directory, and the operation's stages.

        ``earlier``: also stages of earlier operations of the same table, type and object, which have ended.
        Raises WorkerError.
        """
        await self._registered.check(op, table)
        message = child_messages.SweepMessage(
            t="sweep", call=0, op=op, table=table, plans=plans, stages=stages, earlier=earlier
        )
        value, _ = await self._caller.call(message, lock=self._admission, limit=self.config.cleanup_timeout)
        return RemovedStages(*value)

    async def find_files(self, ops: Sequence[str], table: Mapping[str, Any] | None) -> list[str]:
        """The operations that may have result files or stages.

        They are ``ops`` and earlier ones of the same table, type and object. Raises WorkerError.
        """
        message = child_messages.ResultsMessage(
            t="results", call=0, op=ops[0], table=table, ops=list(ops), remove=False, staging=[]
        )
        value, _ = await self._caller.call(message, lock=self._admission, limit=self.config.cleanup_timeout)
        return list(value)

    async def remove_files(
        self, ops: Sequence[str], table: Mapping[str, Any] | None, staging: Collection[str]
    ) -> RemovedStages:
        """Remove the result files of operations, and the stages of those of the types ``staging``.

        Raises WorkerError.
        """
        message = child_messages.ResultsMessage(
            t="results", call=0, op=ops[0], table=table, ops=list(ops), remove=True, staging=sorted(staging)
        )
        value, _ = await self._caller.call(message, lock=self._admission, limit=self.config.cleanup_timeout)
        return RemovedStages(*value)

    async def statistics(self, table: Mapping[str, Any], names: Sequence[str], small_bytes: int) -> Mapping[str, Any]:
        """The version and these statistics of a table: {version, statistics}, from its metadata.

        A statistic that the format does not have is None. Raises WorkerError.
        """
        op = str(OperationRef(table["name"], "statistics", "", 1))
        await self._registered.check(op, table)
        message = child_messages.StatisticsMessage(
            t="statistics", call=0, op=op, table=table, names=list(names), small_bytes=small_bytes
        )
        value, _ = await self._caller.call(message, lock=self._admission, limit=self.config.call_limit)
        found: Mapping[str, Any] = value
        return found

    async def verify(self, op: str, external_id: str, verify: str, limit: float) -> Verified:
        """Ask a verifier, with a time limit of ``limit`` seconds. Raises WorkerError if the child did not do so."""
        message = child_messages.VerifyMessage(
            t="verify", call=0, op=op, table=None, external_id=external_id, verify=verify, limit=limit
        )
        value, _ = await self._caller.call(message, lock=self._admission, limit=max(CHILD_LIMIT, 2 * limit))
        return Verified(value["completed"], value["why"])

    async def cleanup(
        self,
        op: str,
        type: str,  # noqa: A002
        arg: Any,
        table: Mapping[str, Any] | None,
        items: Sequence[JobItem],
        *,
        incarnation: str = "",
        superseded: bool = False,
    ) -> None:
        """Call cancel_job_and_cleanup for each job, for ``incarnation`` (default: the worker's).

        Raises WorkerError with the first error; kind ``transient`` if all of them, including the wait for a child, take
        longer than the configured time. ``superseded``: see JobContext.
        """
        request = RunRequest(op, type, arg, table, tuple(items), batch=False)
        await self._cleanup(
            request, items, incarnation or self.config.incarnation, self._admission, superseded=superseded
        )

    async def _cleanup(
        self,
        request: RunRequest,
        items: Sequence[JobItem],
        incarnation: str,
        lock: SharedExclusiveLock | None = None,
        *,
        superseded: bool = False,
    ) -> None:
        await self._registered.check(request.op, request.table, (item.partition for item in items))
        message = child_messages.CleanupMessage(
            t="cleanup",
            call=0,
            op=request.op,
            type=request.type,
            arg=request.arg,
            table=request.table,
            items=[],
            incarnation=incarnation,
            superseded=superseded,
            more=False,
        )
        rows = partial(map, _row, items)
        await self._caller.call(message, rows, lock=lock, limit=self.config.cleanup_timeout)


def _row(item: JobItem) -> str:
    return child_messages.row(item.row())
