"""Plans operations: the partitions that the planner lists become the plan."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from distop.clock import time
from distop.daemon.coordinator.attempt_limit import Elsewhere, failed_attempt
from distop.errors import NotServed
from distop.protocol import operation_transitions as t
from distop.protocol import table_registry
from distop.protocol.behavior_declaration import Declaration
from distop.protocol.executor_nodes import refusal
from distop.protocol.identity import plan_digest
from distop.protocol.json_codec import dumps, rfc3339
from distop.protocol.keys import TABLE
from distop.protocol.plan import PartitionPlan, Plan, chunked
from distop.protocol.record_reading import read
from distop.protocol.records import Decision, State, TableRecord
from distop.protocol.state_tables import Stage
from distop.protocol.texts import one_line, plural
from distop.protocol.txn import Get
from distop.protocol.user_actions import NO_ACTIONS, Action, Actions
from distop.worker import child_messages
from distop.worker.daemon_side.requests import PlanResult, WorkerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

    from distop.daemon.coordinator.election import Election
    from distop.decide.operation_view import OperationView
    from distop.protocol.records import OperationRef, Spec
    from distop.protocol.txn import Txn

CHUNKS_IN_FLIGHT = 8


def _named(spec: Spec) -> PlanResult:
    """The plan of a type without code: its partitions are named by the start."""
    if not spec.partitions:
        raise WorkerError("fatal", "the type has no code to list the table's partitions, and the start names none")
    partitions = [PartitionPlan(n, name) for n, name in enumerate(spec.partitions)]
    return PlanResult(chunked(partitions), len(partitions), "")


class Planning:
    """Plans operations under one election.

    ``relist`` updates the view. ``need`` leaves an operation to a node that serves more tables, or returns what a
    missing node would need.
    """

    def __init__(
        self,
        election: Election,
        relist: Callable[[], Awaitable[object]],
        need: Callable[[OperationView, Collection[str]], str],
    ) -> None:
        self._ctx = ctx = election.ctx
        self._keys = ctx.keys
        self._guard = election.guard
        self._view = election.view
        self._commit = election.commit
        self._reached = election.reached
        self._call = election.call
        self._relist = relist
        self._need = need
        self._refused: dict[OperationRef, dict[str, None]] = {}
        """Further tables that operations read, and this node does not serve."""
        self._began: dict[OperationRef, float] = {}
        """The times at which plannings have begun."""
        self._log = ctx.log

    async def plan(self, op: OperationView) -> bool:
        """Let the child list the partitions, and write the plan.

        Returns False if a transaction was refused. Raises Elsewhere.
        """
        assert op.spec is not None
        spec, ref = op.spec, op.ref
        self._began[ref] = time.time()
        try:
            return await self._plan(op, spec)
        finally:
            del self._began[ref]

    async def _plan(self, op: OperationView, spec: Spec) -> bool:
        ref = op.ref
        self._refused.pop(ref, None)
        try:
            arg = await self._ctx.argument(ref)
            planned = _named(spec) if not spec.rules.code else await self._list(ref, spec, arg)
        except WorkerError as error:
            refused = self._refused.pop(ref, None)
            if refused is None:
                return await self._failed(ref, error)
            if not (missing := self._need(op, refused)):
                return False
            return await self._failed(ref, WorkerError("transient", f"no live executor {missing}"))
        return await self._write(self._view.operations.get(ref, op), planned)  # a listing makes new objects

    async def _write(self, op: OperationView, planned: PlanResult) -> bool:
        """Write the plan, with its chunks if they fit into one transaction, else after them."""
        ref, limits, chunks = op.ref, self._ctx.limits, planned.chunks
        found = plan_digest(chunks), len(chunks), planned.spilled, planned.options, planned.beside
        plan = Plan(planned.count, planned.version, *found, removes_table=planned.removes_table)
        terms, removal, most = replace(op.terms, beside=planned.beside), t.NO_REMOVAL, t.CHUNKS_PER_PLAN
        if planned.removes_table:
            most = t.CHUNKS_WITH_REMOVAL
            try:
                removal = await self._removal(op)
            except WorkerError as error:
                return await self._failed(ref, error)
        self._log.info("Planned %s", plural(planned.count, "job"), extra={"operation": str(ref)})
        seen = [op.chunks.get(n, 0) for n in range(len(chunks))]
        size = sum(map(len, chunks)) + (len(dumps(planned.options)) if planned.options else 0)
        if size <= limits.plan_bytes and len(chunks) <= limits.plan_chunks:
            written = t.write_plan(self._keys, ref, self._guard, plan, seen, chunks, terms, removal)
            return self._traced(op, await self._commit(written), plan.count)
        mods = await self._write_chunks(ref, chunks, seen)
        if not all(mods):
            await self._relist()
            return False
        if len(mods) > most:
            too_many = f"the plan has {len(mods)} chunks of 512 KiB; at most {most} are allowed"
            return await self._failed(ref, WorkerError("fatal", too_many))
        written = t.write_plan(self._keys, ref, self._guard, plan, mods, terms=terms, removal=removal)
        return self._traced(op, await self._commit(written), plan.count)

    def _traced(self, op: OperationView, written: bool, jobs: int, error: str = "") -> bool:
        """Send the span of a planning if its end was written; returns ``written``."""
        if written and self._ctx.traces is not None and op.spec is not None:
            attempt = op.planning.value.attempts + 1 if op.planning is not None else 1
            self._ctx.traces.planned(op.ref, op.spec, attempt, self._began[op.ref], jobs, error)
        return written

    async def _removal(self, op: OperationView) -> Txn:
        """The removal of the record of the operation's table, which goes with its plan.

        Raises WorkerError if the record is not the one with which the operation was started, if another operation runs
        on the table, or if the type does not declare that it removes the table: submitters can write the operation's
        own keys.
        """
        ref, keys = op.ref, self._keys
        assert op.spec is not None
        reads = table_registry.read_table(keys, ref.table)
        table, run_ops, before, behavior = await self._ctx.client.read(*reads, Get(keys.behavior(ref.type)))
        if behavior.kv is None or not read(Declaration.decode, behavior.kv).removes_table:
            raise WorkerError("fatal", f"the type {ref.type} does not declare that it removes a table's record")
        if table.kv is None or run_ops.kv is None or table.kv.mod_revision != op.spec.table_revision:
            raise WorkerError(
                "fatal",
                f"the record of table {one_line(ref.table)} was changed or removed since {ref} was started, so nothing "
                "was removed: start the operation again",
            )
        others = {name: n for name, n in table_registry.running(run_ops.kv).items() if (name, n) != (ref.type, 1)}
        if others:
            raise WorkerError(
                "fatal",
                f"the record of table {one_line(ref.table)} is not removed while other operations run on it: "
                f"{', '.join(sorted(others))}",
            )
        record = read(TableRecord.decode, table.kv)
        fields = {"format": record.format, "location": record.location, "options": dict(record.options)}
        actions = read(Actions.decode, before.kv) if before.kv is not None else NO_ACTIONS
        done = Action.change(rfc3339(time.time()), "remove_table", str(ref), fields, {})
        return table_registry.removal(keys, ref, table.kv, run_ops.kv, actions.and_then(done))

    async def _write_chunks(self, ref: OperationRef, chunks: Sequence[bytes], seen: Sequence[int]) -> list[int]:
        """Write the chunks of a plan; returns their mod revisions, 0 for those whose transaction was refused.

        ``seen``: the mod revisions of the chunks that are there, 0 for none.
        """
        limit = asyncio.Semaphore(CHUNKS_IN_FLIGHT)

        async def write(n: int) -> int:
            async with limit:
                result = await self._ctx.commit(t.write_chunk(self._keys, ref, self._guard, n, seen[n], chunks[n]))
                return result.revision if result.succeeded else 0

        return await asyncio.gather(*(write(n) for n in range(len(chunks))))

    async def _list(self, ref: OperationRef, spec: Spec, arg: Any) -> PlanResult:
        if spec.table is None:
            raise WorkerError("fatal", "an operation without a table must make its own plan")
        table, worker = spec.table.to_json(), self._ctx.worker
        planned: PlanResult = await self._call(
            ref,
            Stage.PLANNING,
            lambda: worker.plan(
                *(str(ref), ref.type, arg, table, spec.partitions),
                partial(self._find_table, ref),
                self._list_tables,
            ),
        )
        return planned

    async def _find_table(self, ref: OperationRef, name: str) -> Mapping[str, Any] | None:
        """The current registry record of a table.

        Raises NotServed, UnreadableRecord, and etcd's errors.
        """
        if why := refusal(self._ctx.config.serves, ref.type, (name,)):
            self._refused.setdefault(ref, {})[name] = None
            raise NotServed(f"executor {self._ctx.executor_id} refuses: {why}")
        kv = await self._ctx.client.get(self._keys.table(name))
        return read(TableRecord.decode, kv).to_json() if kv is not None else None

    async def _list_tables(self, start: int) -> tuple[list[str], int | None]:
        """The registry records of all tables as JSON, in one page. Raises UnreadableRecord, and etcd's errors."""
        listing = await self._ctx.client.list(*self._keys.family(TABLE))
        return [child_messages.row(read(TableRecord.decode, kv).to_json()) for kv in listing.kvs], None

    async def _failed(self, ref: OperationRef, error: WorkerError) -> bool:
        op = self._view.operations.get(ref)
        if op is None or op.spec is None:
            return True
        before, seen_mod = (op.planning.value.attempts, op.planning.mod) if op.planning is not None else (0, 0)
        failed = failed_attempt(self._ctx, ref, op.spec, "planning", before, error)
        if failed is None:
            return False
        attempts, last = failed
        if last:
            decision = Decision(State.FAILED, 0, 0, 0, error=attempts.error)
            given_up = t.give_up(self._keys, ref, self._guard, op.state_mod, decision)
            return self._traced(op, await self._commit(given_up), 0, attempts.error)
        attempt = t.plan_attempt(self._keys, ref, self._guard, seen_mod, attempts)
        if self._traced(op, await self._commit(attempt), 0, attempts.error):
            raise Elsewhere
        return False
