"""Plans operations: the partitions that the planner lists become the plan."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from distop.daemon.coordinator.attempt_limit import Elsewhere, failed_attempt
from distop.errors import NotServed
from distop.protocol import operation_transitions as t
from distop.protocol.executor_nodes import refusal
from distop.protocol.identity import plan_digest
from distop.protocol.json_codec import dumps
from distop.protocol.plan import PartitionPlan, Plan, chunked
from distop.protocol.record_reading import read
from distop.protocol.records import Decision, State, TableRecord
from distop.protocol.state_tables import Stage
from distop.worker.daemon_side.requests import PlanResult, WorkerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping

    from distop.daemon.coordinator.orphaned_jobs import Call
    from distop.daemon.incarnation_context import Context
    from distop.decide.operation_view import OperationView
    from distop.decide.view import TypeView
    from distop.protocol.records import OperationRef, Spec
    from distop.protocol.txn import Compare, Txn

CHUNKS_IN_FLIGHT = 8


def _named(spec: Spec) -> PlanResult:
    """The plan of a type without code: its partitions are named by the start."""
    if not spec.partitions:
        raise WorkerError("fatal", "the type has no code to list the table's partitions, and the start names none")
    partitions = [PartitionPlan(n, name) for n, name in enumerate(spec.partitions)]
    return PlanResult(chunked(partitions), len(partitions), "")


class Planning:
    """Plans operations under one election (``guard``).

    ``commit`` sends a transaction, waits until the coordinator's ``view`` has reached it, and returns whether it was
    applied. ``reached`` only waits (W11). ``relist`` updates the view. ``call`` makes a call into the child, which ends
    when the operation leaves its stage. ``need`` leaves an operation to a node that serves more tables, or returns what
    a missing node would need.
    """

    def __init__(
        self,
        ctx: Context,
        guard: Compare,
        view: TypeView,
        commit: Callable[[Txn], Awaitable[bool]],
        reached: Callable[[int], Awaitable[None]],
        relist: Callable[[], Awaitable[object]],
        call: Call,
        need: Callable[[OperationView, Collection[str]], str],
    ) -> None:
        self._ctx = ctx
        self._keys = ctx.keys
        self._guard = guard
        self._view = view
        self._commit = commit
        self._reached = reached
        self._relist = relist
        self._call = call
        self._need = need
        self._refused: dict[OperationRef, dict[str, None]] = {}
        """Further tables that operations read, and this node does not serve."""
        self._log = ctx.log

    async def plan(self, op: OperationView) -> bool:
        """Let the child list the partitions, and write the plan.

        Returns False if a transaction was refused. Raises Elsewhere.
        """
        assert op.spec is not None
        spec, ref = op.spec, op.ref
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
        op = self._view.operations.get(ref, op)  # a listing makes new objects
        terms, digest = op.terms, plan_digest(planned.chunks)
        terms, chunks = replace(terms, beside=planned.beside), len(planned.chunks)
        found = planned.version, digest, chunks, planned.spilled, planned.options, planned.beside
        plan = Plan(planned.count, *found)
        self._log.info("Planned %d jobs", planned.count, extra={"operation": str(ref)})
        seen = [op.chunks.get(n, 0) for n in range(len(planned.chunks))]
        limits, size = self._ctx.limits, sum(map(len, planned.chunks))
        if planned.options:
            size += len(dumps(planned.options))
        if size <= limits.plan_bytes and len(planned.chunks) <= limits.plan_chunks:
            txn = t.write_plan(self._keys, ref, self._guard, plan, seen, planned.chunks, terms)
            result = await self._ctx.commit(txn)
            if result.succeeded:
                await self._reached(result.revision)
            return result.succeeded
        limit = asyncio.Semaphore(CHUNKS_IN_FLIGHT)

        async def write(n: int) -> int:
            async with limit:
                result = await self._ctx.commit(
                    t.write_chunk(self._keys, ref, self._guard, n, seen[n], planned.chunks[n])
                )
                return result.revision if result.succeeded else 0

        mods = await asyncio.gather(*(write(n) for n in range(len(planned.chunks))))
        if not all(mods):
            await self._relist()
            return False
        if len(mods) > t.CHUNKS_PER_PLAN:
            too_many = f"the plan has {len(mods)} chunks of 512 KiB; at most {t.CHUNKS_PER_PLAN} are allowed"
            return await self._failed(ref, WorkerError("fatal", too_many))
        return await self._commit(t.write_plan(self._keys, ref, self._guard, plan, mods, terms=terms))

    async def _list(self, ref: OperationRef, spec: Spec, arg: Any) -> PlanResult:
        if spec.table is None:
            raise WorkerError("fatal", "an operation without a table must make its own plan")
        table, worker = spec.table.to_json(), self._ctx.worker
        planned: PlanResult = await self._call(
            ref,
            Stage.PLANNING,
            lambda: worker.plan(str(ref), ref.type, arg, table, spec.partitions, partial(self._find_table, ref)),
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
            return await self._commit(t.give_up(self._keys, ref, self._guard, op.state_mod, decision))
        if await self._commit(t.plan_attempt(self._keys, ref, self._guard, seen_mod, attempts)):
            raise Elsewhere
        return False
