"""An executor that is asked to take jobs of an operation in the transaction that writes its plan."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from distop import logs
from distop.config import ExecutorConfig
from distop.core.declaration import Rules
from distop.core.digest import plan_digest
from distop.core.keys import Keys
from distop.core.limits import DEFAULT
from distop.core.model import Node, OperationRef, Spec
from distop.core.plan import PartitionPlan, Plan, chunked
from distop.core.txn import Put, Txn, TxnResult
from distop.core.view import ClusterView
from distop.errors import PermissionDenied, SessionLost
from distop.executor.role import Executor
from distop.node.context import Context
from distop.node.openop import OpenOperation
from distop.store.config import EtcdConfig

if TYPE_CHECKING:
    from collections.abc import Callable

REF = OperationRef("t", "noop", "", 1)
PLAN = Txn((), (Put("plan", b""),), (), "plan")


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
