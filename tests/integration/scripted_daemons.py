"""Scripted daemons on a real etcd.

They publish behaviors, and send the transactions of a coordinator and executors one by one when a test asks for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.protocol import job_transitions
from distop.protocol import operation_finish as f
from distop.protocol import operation_transitions as t
from distop.protocol.behavior_declaration import Declaration
from distop.protocol.identity import plan_digest
from distop.protocol.jobs import Claim, JobState, Outcome
from distop.protocol.json_codec import loads
from distop.protocol.keys import Keys
from distop.protocol.plan import PartitionPlan, Plan, chunked
from distop.protocol.records import Decision, History, Node, OperationRef, Spec, State, TableRecord
from distop.protocol.txn import Put, Txn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.store.client import EtcdClient

TIME = "2013-01-01T00:00:00.000Z"
LATER = "2013-01-01T00:00:02.500Z"


class ScriptedDaemons:
    """The scripted daemons of one namespace."""

    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self.etcd = etcd
        self.keys = keys

    async def put(self, key: str, value: bytes) -> None:
        await self.etcd.commit(Txn((), (Put(key, value),)))

    async def publish(self, type_name: str, **fields: Any) -> None:
        declaration = Declaration(type_name, **fields)
        await self.put(self.keys.behavior(type_name), declaration.encode())

    async def table(self, name: str) -> None:
        await self.put(self.keys.table(name), TableRecord(name, "parquet", "/data").encode())

    async def join(self, incarnation: str, *types: str) -> None:
        await self.put(self.keys.node(incarnation), Node(f"executor-{incarnation}", "host", 2, types).encode())

    async def elect(self, ref: OperationRef, incarnation: str) -> Any:
        key = self.keys.coordinator(ref.table, ref.type)
        held = await self.etcd.get(key)
        if held is None:
            await self._commit(t.elect(self.keys, ref.table, ref.type, incarnation, 0, ""))
            held = await self.etcd.get(key)
        assert held is not None
        return t.election_guard(self.keys, ref.table, ref.type, held.mod_revision)

    async def _commit(self, txn: Txn) -> None:
        result = await self.etcd.commit(txn, deadline=10)
        assert result.succeeded, f"{txn.label} was refused: {result}"

    async def plan(self, ref: OperationRef, incarnation: str, names: Sequence[str]) -> None:
        chunks = chunked([PartitionPlan(n, name) for n, name in enumerate(names)])
        plan = Plan(len(names), "1", plan_digest(chunks), len(chunks))
        guard = await self.elect(ref, incarnation)
        await self._commit(t.write_plan(self.keys, ref, guard, plan, [0] * len(chunks), chunks))

    async def claim(self, ref: OperationRef, incarnation: str, *partitions: int) -> dict[int, int]:
        """Claim these partitions, and return the fence of each."""
        gate = await self.etcd.get(self.keys.gate(ref))
        assert gate is not None
        wants = [job_transitions.Want(p, Claim(f"executor-{incarnation}", incarnation, 1, 0)) for p in partitions]
        await self._commit(job_transitions.claim(self.keys, ref, gate.mod_revision, incarnation, wants))
        fences = {}
        for p in partitions:
            held = await self.etcd.get(self.keys.claim(ref, p))
            assert held is not None
            fences[p] = held.mod_revision
        return fences

    async def report(self, ref: OperationRef, partition: int, fence: int, *, error: str = "", name: str = "") -> None:
        state = JobState.FAILED if error else JobState.SUCCESS
        outcome = Outcome(name or str(partition), "e", "i", 1, TIME, LATER, error=error)
        await self._commit(
            job_transitions.group([job_transitions.report(self.keys, ref, partition, fence, state, outcome)])
        )

    async def wait_again(self, ref: OperationRef, partition: int, fence: int, error: str) -> None:
        waiting = Claim("e", "", 1, 1, LATER, error)
        await self._commit(
            job_transitions.group([job_transitions.wait_again(self.keys, ref, partition, fence, waiting)])
        )

    async def decide(self, ref: OperationRef, incarnation: str, verdict: State, total: int, failed: int) -> None:
        guard = await self.elect(ref, incarnation)
        state = await self.etcd.get(self.keys.of(ref, "state"))
        assert state is not None
        decision = Decision(verdict, total, total - failed, failed)
        await self._commit(f.decide(self.keys, ref, guard, state.mod_revision, decision))

    async def finish(
        self, ref: OperationRef, incarnation: str, verdict: State, report: Any = None, errors: Sequence[Any] = ()
    ) -> None:
        """Write the history record of an operation, with or without a decision before."""
        guard = await self.elect(ref, incarnation)
        state, decided, run_ops, spec = [
            await self.etcd.get(key)
            for key in (
                self.keys.of(ref, "state"),
                self.keys.of(ref, "decision"),
                self.keys.run_ops(ref.table),
                self.keys.of(ref, "spec"),
            )
        ]
        assert state is not None
        assert run_ops is not None
        assert spec is not None
        operation_spec = Spec.decode(spec.value)
        counts = Decision.decode(decided.value) if decided else Decision(verdict, 1, int(verdict == "success"), 0)
        history = History(
            str(ref),
            verdict,
            TIME,
            LATER,
            counts.total,
            counts.success,
            counts.failed,
            report,
            tuple(errors),
            "",
            operation_spec.request_id,
            request_digest=operation_spec.request_digest,
            submitter=operation_spec.submitter,
            labels=operation_spec.labels,
        )
        decision_mod = decided.mod_revision if decided else 0
        final = f.Final(ref, state.mod_revision, decision_mod, history, operation_spec.one_at_a_time)
        await self._commit(f.finish(self.keys, guard, loads(run_ops.value), run_ops.mod_revision, [final]))

    async def clean(self, ref: OperationRef, incarnation: str) -> None:
        guard = await self.elect(ref, incarnation)
        state = await self.etcd.get(self.keys.of(ref, "state"))
        assert state is not None
        await self._commit(f.end(self.keys, ref, guard, state.mod_revision))
