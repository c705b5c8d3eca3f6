"""Checks of ``distop doctor``: space, clocks and rejected writes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from distop.protocol.keys import Keys
from distop.protocol.records import Node
from distop.protocol.txn import Put, Txn
from distop.services import doctor
from distop.services.doctor import judge_space
from distop.store import server_clock
from tests.unit.support.modelclient import ModelClient

MEBIBYTE = 1024 * 1024
KEYS = Keys()


@pytest.mark.parametrize(
    ("size", "quota", "status", "words"),
    [
        (1, 0, "ok", "no alarm, the database has 1.0 of 2,048 MiB (etcd's default quota"),
        (1638, 0, "ok", "1,638.0 of 2,048 MiB"),
        (1639, 0, "warning", "a full etcd refuses writes: compact and defragment it"),
        (1639, 8192, "ok", "no alarm, the database has 1,639.0 of 8,192 MiB"),
        (7000, 8192, "warning", "the database has 7,000.0 of 8,192 MiB; a full etcd"),
        (9000, 8192, "warning", "9,000.0 of 8,192 MiB"),
    ],
)
def test_doctor_warns_before_etcd_is_full(size: int, quota: int, status: str, words: str) -> None:
    found = judge_space(size * MEBIBYTE, quota * MEBIBYTE)
    assert (found.name, found.status) == ("space", status)
    assert words in found.text


class NodesClient(ModelClient):
    """A client of a cluster that has these nodes."""

    def __init__(self, *nodes: Node) -> None:
        super().__init__()
        self.transport = SimpleNamespace(address="127.0.0.1:2379")
        puts = tuple(Put(KEYS.node(f"i{n}"), node.encode()) for n, node in enumerate(nodes))
        self.store.apply(Txn((), puts))


async def test_an_executor_whose_clock_cannot_be_compared_is_named() -> None:
    async def agrees(*_: Any) -> float:
        return 0.0

    etcd: Any = NodesClient(
        Node("b", "h", 1, ()), Node("a", "h", 1, (), clock_unknown="no HTTP at etcd:2379: timed out")
    )
    reset = server_clock.reading.set(agrees)
    try:
        found = await doctor._clock(etcd, KEYS)
    finally:
        server_clock.reading.reset(reset)
    assert (found.name, found.status) == ("clock", "warning")
    assert found.text.endswith("delete no history by age: a's (no HTTP at etcd:2379: timed out)")


async def test_rejected_writes_beyond_the_named_ones_are_counted() -> None:
    refused = {f"t/noop/{n}": "reports: too large" for n in range(8)}
    etcd: Any = NodesClient(Node("a", "h", 1, (), refused=refused, refused_more=4))
    found = await doctor._writes(etcd, KEYS)
    assert (found.name, found.status) == ("writes", "error")
    assert f"; and {12 - doctor._SHOWN} more: " in found.text
