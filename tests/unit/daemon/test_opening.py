"""An executor that is asked to take jobs of an operation in the transaction that writes its plan."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from distop.daemon.executor.executor_role import Executor
from distop.daemon.incarnation_context import Context
from distop.daemon.rejected_writes import RejectedWrites
from distop.decide import next_steps
from distop.decide.view import ClusterView
from distop.errors import PermissionDenied, SessionLost
from distop.protocol.behavior_declaration import Rules
from distop.protocol.identity import plan_digest
from distop.protocol.keys import Keys
from distop.protocol.plan import Gate, PartitionPlan, Plan, chunked
from distop.protocol.records import Node, OperationRef, Spec
from distop.protocol.revisioned import Seen
from distop.protocol.size_limits import DEFAULT
from distop.protocol.txn import Put, Txn, TxnResult
from distop.runtime import logs
from distop.services.open_operation import OpenOperation
from distop.settings import ExecutorConfig
from distop.store.connection_settings import EtcdConfig
from tests.support.virtualtime import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Callable

REF = OperationRef("t", "noop", "", 1)
PLAN = Txn((), (Put("plan", b""),), (), "plan")


def now() -> float:
    """Seconds on the loop's clock."""
    return asyncio.get_running_loop().time()


class Alone(Context):
    """The only executor. Its transactions are answered when the test says so."""

    def __init__(self) -> None:
        self.keys = Keys()
        self.cluster = ClusterView(self.keys)
        self.cluster.nodes["me"] = Node("me", "host", 2, ("noop",))
        self.incarnation = self.executor_id = "me"
        self.types = frozenset({"noop"})
        self.capability: Any = type("Able", (), {"serves": staticmethod(lambda *_: True), "unable": {}})
        self.worker: Any = SimpleNamespace(stuck=())
        self.log = logs.get("distop.test")
        self.rejected_writes = RejectedWrites(self.log, lambda: None)
        self.limits = DEFAULT
        self.gates_at = 0
        self.config = ExecutorConfig(EtcdConfig(("nowhere:2379",)), Path("/nowhere"), slots=2)
        self.sent: list[str] = []
        self.asked = asyncio.Event()
        self.answer: asyncio.Future[TxnResult] = asyncio.get_running_loop().create_future()

    async def commit(self, txn: Txn) -> TxnResult:
        self.sent.append(txn.label)
        self.asked.set()
        return await self.answer


def planned() -> OpenOperation:
    chunks = chunked([PartitionPlan(n, f"p={n}") for n in range(4)])
    plan = Plan(4, "", plan_digest(chunks), len(chunks))
    return OpenOperation.planned(REF, Spec("request", "", "", Rules()), {}, plan, chunks)


async def closed_while_it_waits(ctx: Alone, executor: Executor, error: Exception) -> None:
    """The coordinator's role ends before the answer comes, which is this error."""
    asked = asyncio.ensure_future(executor.open(REF, planned, PLAN, 7))
    await ctx.asked.wait()
    assert executor._free_slots == 0, "they are taken before the answer is there"
    asked.cancel()
    await asyncio.wait([asked])
    assert asked.cancelled()
    opening = executor._serving[REF]
    ctx.answer.set_exception(error)
    await asyncio.wait([opening])
    await asyncio.sleep(0)
    assert executor._free_slots == 2
    assert executor._serving == executor._operations == {}


async def test_what_goes_wrong_once_nobody_coordinates_is_told(caplog: pytest.LogCaptureFixture) -> None:
    ctx = Alone()
    executor = Executor(ctx)
    with caplog.at_level(logging.WARNING, "distop"):
        await closed_while_it_waits(ctx, executor, PermissionDenied("the role was revoked", code="", detail=""))
    (record,) = caplog.records
    assert "the role was revoked" in record.getMessage()
    assert record.operation == str(REF)  # type: ignore[attr-defined]
    assert REF in executor._troubles, "it is read before its jobs are claimed"


async def test_the_end_of_the_session_is_told_by_whoever_ends_the_incarnation(caplog: pytest.LogCaptureFixture) -> None:
    ctx = Alone()
    with caplog.at_level(logging.WARNING, "distop"):
        await closed_while_it_waits(ctx, Executor(ctx), SessionLost("it is over"))
    assert caplog.records == []


async def test_what_goes_wrong_while_somebody_coordinates_is_for_them_to_tell(caplog: pytest.LogCaptureFixture) -> None:
    ctx = Alone()
    executor = Executor(ctx)
    ctx.answer.set_exception(PermissionDenied("the role was revoked", code="", detail=""))
    with caplog.at_level(logging.WARNING, "distop"):
        with pytest.raises(PermissionDenied):
            await executor.open(REF, planned, PLAN, 7)
    assert caplog.records == []
    assert executor._free_slots == 2


def leave(ctx: Alone, executor: Executor) -> None:
    executor._leaving = True


def drain(ctx: Alone, executor: Executor) -> None:
    ctx.cluster.drains.add("me")


def be_busy(ctx: Alone, executor: Executor) -> None:
    executor._free_slots = 0


def be_quiet(ctx: Alone, executor: Executor) -> None:
    executor._quiet.ref = OperationRef("t", "noop", "", 2)


@pytest.mark.parametrize("busy", [leave, drain, be_busy, be_quiet])
async def test_an_executor_that_takes_nothing_is_not_told_what_was_planned(
    busy: Callable[[Alone, Executor], None],
) -> None:
    ctx = Alone()
    executor = Executor(ctx)
    busy(ctx, executor)
    free = executor._free_slots
    ctx.answer.set_result(TxnResult(True, 9, ()))

    def make() -> OpenOperation:
        raise AssertionError("nothing is made of the plan")

    assert (await executor.open(REF, make, PLAN, 7)).revision == 9
    assert ctx.sent == ["plan"]
    assert executor._free_slots == free


async def test_all_of_an_executors_share_is_claimed_at_once_where_it_fits() -> None:
    """With the plan, or while the operation is read: otherwise a job waits for another round."""
    ctx = Alone()
    executor = Executor(ctx)
    assert executor._claimer.first_share(planned(), PLAN, 8) == [0, 1, 2, 3]
    assert executor._claimer.first_share(planned(), PLAN, 2) == [0, 1]
    ctx.caught_up_at = 4
    ctx.cluster.gates[REF] = Seen(Gate(2), 5)
    assert executor._few(REF, 2) == [0, 1]
    assert executor._few(REF, 1) == [], "it is read first"


async def test_of_a_batch_that_is_too_large_the_others_are_free_again() -> None:
    ctx = Alone()
    claimer = Executor(ctx)._claimer
    size = next_steps.BATCH_BYTES_PER_SLOT
    chunks = chunked([PartitionPlan(n, f"p={n}", bytes=size) for n in range(5)])
    plan = Plan(5, "", plan_digest(chunks), len(chunks))
    op = OpenOperation.planned(REF, Spec("request", "", "", Rules(batch=True)), {}, plan, chunks)
    assert claimer._one_batch(op, [0, 1, 2, 3, 4]) == [0, 1]
    assert list(op.free) == [2, 3, 4]


def test_an_executor_whose_child_is_stuck_goes_on_soon_after_it_has_been_replaced() -> None:
    """Nobody tells it so."""

    async def main() -> None:
        ctx = Alone()
        executor, served = Executor(ctx), list[float]()
        ctx.worker.stuck = ("t/noop/9",)
        looked: list[float] = []
        executor._assign_small = executor._assign_general = lambda: served.append(now())  # type: ignore[method-assign]
        disk_pause = executor._jobs.disk_pause

        def look() -> float:
            looked.append(now())
            assert len(looked) < 100, "it is looked at without a pause"
            return disk_pause()

        executor._jobs.disk_pause = look  # type: ignore[method-assign]
        running = asyncio.ensure_future(executor.run())
        await asyncio.sleep(20.0)
        assert served == []
        ctx.worker.stuck = ()
        await asyncio.sleep(5.0)
        assert served
        running.cancel()

    in_virtual_time(main)


async def test_the_child_forgets_an_operation_that_is_gone() -> None:
    """Its private directories stay otherwise until the executor starts again."""
    ctx = Alone()
    forgotten: list[str] = []

    async def forget(*refs: str) -> None:
        forgotten.extend(refs)

    ctx.worker.forget = forget
    executor = Executor(ctx)
    for number in (1, 2):
        ref = OperationRef("t", "noop", "", number)
        executor._operations[ref] = op = planned()
        op.ref, ctx.gates_at = ref, 9
    executor.cluster_changed(hint=False)
    for _ in range(5):
        await asyncio.sleep(0)
    assert forgotten == ["t/noop/1", "t/noop/2"]


async def test_others_are_told_of_claims_that_were_given_back() -> None:
    """They would look at them at the next poll alone."""
    ctx = Alone()
    told: list[str] = []

    async def drain() -> None:
        told.append("written")

    async def announce() -> None:
        told.append("told")

    ctx.reporter = SimpleNamespace(drain=drain)  # type: ignore[assignment]
    ctx.announce_released = announce  # type: ignore[method-assign]
    executor = Executor(ctx)
    for _ in range(2):
        executor._hint_released()
    for _ in range(5):
        await asyncio.sleep(0)
    assert told == ["written", "told"]
