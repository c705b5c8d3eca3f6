"""One life of a daemon: its parts end together, and what it says of itself is said in the end, whatever was refused."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from distop import logs
from distop.config import ExecutorConfig
from distop.core.draining import NodeState
from distop.core.model import Node
from distop.daemon.incarnation import Incarnation, together
from distop.errors import PermissionDenied
from distop.store.config import EtcdConfig

if TYPE_CHECKING:
    from pathlib import Path


async def test_the_first_part_that_fails_ends_all_others() -> None:
    ended = []

    async def goes_on() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("goes on")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise PermissionDenied("no")

    with pytest.raises(PermissionDenied):
        await together(goes_on(), fails(), goes_on())
    assert ended == ["goes on", "goes on"]


class Record:
    """Takes the node record, but for the first ``refusals`` times."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.said: list[Node] = []

    async def update(self, value: bytes) -> None:
        await asyncio.sleep(0)
        if self.refusals:
            self.refusals -= 1
            raise PermissionDenied("etcd does not permit us the node update")
        self.said.append(Node.decode(value))


def incarnation(folder: Path, record: Record) -> Any:
    one: Any = Incarnation(ExecutorConfig(EtcdConfig(), folder), None, "ann", logs.get())  # type: ignore[arg-type]
    one.session, one._caught_up = record, True
    one.executor = one.elections = SimpleNamespace(busy=False)
    one.worker = SimpleNamespace(trouble="")
    return one


async def said(one: Any) -> None:
    """What is being said is said, or refused."""
    if one._saying is not None:
        await one._saying


async def test_what_was_refused_is_said_at_the_next_poll(tmp_path: Path) -> None:
    record = Record(refusals=1)
    one = incarnation(tmp_path, record)
    one.cluster.drains.add("ann")
    one.activity_changed()
    await said(one)
    assert record.said == []
    one.activity_changed()  # as each poll does
    await said(one)
    assert [node.state for node in record.said] == [NodeState.DRAINED]
    one.activity_changed()
    assert one._saying is None, "it is said once"


async def test_a_count_of_releases_that_was_refused_is_said_at_the_next_poll(tmp_path: Path) -> None:
    record = Record(refusals=2)
    one = incarnation(tmp_path, record)
    with pytest.raises(PermissionDenied):
        await one.announce_released()
    for _ in range(3):
        one.activity_changed()
        await said(one)
    assert [(node.released, node.state) for node in record.said] == [(1, NodeState.ACTIVE)]


async def test_a_count_of_releases_does_not_undo_what_was_said(tmp_path: Path) -> None:
    record = Record(refusals=0)
    one = incarnation(tmp_path, record)
    one.cluster.drains.add("ann")
    one.activity_changed()
    await said(one)
    await one.announce_released()
    assert [(node.released, node.state) for node in record.said] == [(0, NodeState.DRAINED), (1, NodeState.DRAINED)]
