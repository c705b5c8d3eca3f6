"""Whoever ends a series cancels the operation of it that goes on, also where another one is just ending."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop.core import transitions as t
from distop.core.jobs import JobState
from distop.core.model import OperationRef, State
from distop.core.series import Series, next_request
from distop.operation import Operation
from tests.support.modelclient import ModelClient
from tests.support.world import World

if TYPE_CHECKING:
    import pytest


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


async def test_the_one_that_goes_on_is_cancelled() -> None:
    world = World()
    ref = started(world)
    operation = Operation(client_of(world), world.keys, ref)
    assert await operation.end_series("enough") == str(ref)
    assert world.op(ref).state is State.CANCELLING


async def test_one_that_is_just_ending_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert await Operation(client, world.keys, first).end_series() == str(second)
    assert slept
    assert world.op(second).state is State.CANCELLING
