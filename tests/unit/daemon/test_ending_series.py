"""Ending a series cancels its current operation, even while the former one is ending."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from distop.client.async_operation import Operation
from distop.client.direct_backend import DirectBackend
from distop.errors import UnreadableRecord
from distop.protocol import operation_transitions as t
from distop.protocol.jobs import JobState
from distop.protocol.records import Cancel, History, OperationRef, State
from distop.protocol.schedule import Series, next_request
from distop.protocol.txn import Put, Txn
from distop.services.submission.series_lookup import latest_of
from tests.support.world import TABLE, TYPE, World
from tests.unit.support.modelclient import ModelClient


def started(world: World, request: str = "", first: str = "") -> OperationRef:
    """Start the first operation of a series, or the next one."""
    ref = world.next_ref()
    spec = replace(world.spec(ref), series=Series(60.0, first=first).to_json())
    spec = replace(spec, request_id=request) if request else spec
    world.do(t.starts(world.keys, world.counters(), [t.NewOperation(ref, spec, b"{}")]))
    return ref


def client_of(world: World) -> Any:
    client = ModelClient()
    client.store = world.store
    return client


async def test_the_current_operation_of_the_series_is_cancelled() -> None:
    world = World()
    ref = started(world)
    operation = Operation(DirectBackend(client_of(world), world.keys), ref)
    assert await operation.end_series("enough") == str(ref)
    assert world.op(ref).state is State.CANCELLING


async def test_an_ending_operation_is_waited_for_and_the_next_one_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.join("a")
    first = started(world)
    world.do(world.elect("a"))
    world.do(world.plan(first, 1))
    world.do(world.claim(first, "a", [0]))
    world.do(world.report(first, 0, JobState.SUCCESS))
    world.do(world.decide(first))
    client, sleep, slept = client_of(world), asyncio.sleep, list[float]()

    async def next_starts(seconds: float) -> None:
        if seconds:
            slept.append(seconds)
        if len(slept) == 1 and seconds:
            started(world, next_request(first), str(first))
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", next_starts)
    second = replace(first, instance=first.instance + 1)
    assert await Operation(DirectBackend(client, world.keys), first).end_series() == str(second)
    assert slept
    assert world.op(second).state is State.CANCELLING


@pytest.mark.timeout(20)
async def test_a_forged_record_of_an_operation_that_replaced_itself_is_refused() -> None:
    """The lookup of its successor did not end."""
    world = World()
    ref = OperationRef(TABLE, TYPE, "", 1)
    replaced = Cancel("aborted", "", str(ref))
    history = History(str(ref), State.CANCELLED, "", "", 0, 0, 0, cancel=replaced)
    world.do(Txn((), (Put(world.keys.history(ref), history.encode()),)))
    with pytest.raises(UnreadableRecord, match="replaced each other"):
        await Operation(DirectBackend(client_of(world), world.keys), ref).end_series()


@pytest.mark.timeout(20)
async def test_a_gate_without_an_operation_is_not_the_latest_of_a_series() -> None:
    world = World()
    ref = started(world)
    series = replace(ref, instance=9)
    world.do(Txn((), (Put(world.keys.gate(series), b"{}"),)))
    assert await latest_of(client_of(world), world.keys, ref) == ref
    assert await latest_of(client_of(world), world.keys, replace(ref, instance=5)) is None


@pytest.mark.timeout(20)
@pytest.mark.parametrize("state", ["running", "paused", "pending"])
async def test_the_error_of_a_command_names_a_missing_spec(state: str) -> None:
    world = World()
    ref = OperationRef(TABLE, TYPE, "", 1)
    world.do(Txn((), (Put(world.keys.of(ref, "state"), state.encode()),)))
    operation = Operation(DirectBackend(client_of(world), world.keys), ref)
    alter = partial(operation.alter, priority=1)
    ask = {"running": alter, "paused": operation.resume, "pending": operation.cancel}[state]
    with pytest.raises(UnreadableRecord, match=f"spec is missing, and {TABLE}/{TYPE}/1 has not ended"):
        await ask()
