"""The check of this machine's clock against etcd's, and the report of a failed check."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from distop.daemon.clock_check import TOLD_AFTER, ClockCheck
from distop.protocol.records import Node
from distop.runtime import logs
from distop.store import server_clock
from tests.unit.support.virtualtime import in_virtual_time, now

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distop.store.connection_settings import Endpoint, EtcdConfig

WHY = "no HTTP at 127.0.0.1:2379: timed out"


class Etcd:
    """A member's clock: seconds by which ours is ahead of it, or None if it cannot be read."""

    def __init__(self) -> None:
        self.ahead: float | None = 0.0
        self.changes = 0
        member = SimpleNamespace(address="127.0.0.1:2379")
        client: Any = SimpleNamespace(
            transport=SimpleNamespace(address=member.address), config=SimpleNamespace(members=[member])
        )
        self.check = ClockCheck(client, logs.get("distop.test"), self._changed)

    def _changed(self) -> None:
        self.changes += 1

    async def read(self, config: EtcdConfig, endpoint: Endpoint, limit: float) -> float:
        if self.ahead is None:
            raise server_clock.ClockUnreadable(WHY)
        return self.ahead


@pytest.fixture
def etcd() -> Iterator[Etcd]:
    etcd = Etcd()
    reset = server_clock.reading.set(etcd.read)
    yield etcd
    server_clock.reading.reset(reset)


async def test_a_clock_that_cannot_be_compared_counts_as_wrong(etcd: Etcd, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise history would be deleted by the age that a wrong clock gives."""
    caplog.set_level(logging.WARNING, "distop.test")
    assert await etcd.check.agrees()
    etcd.ahead = None
    assert not await etcd.check.agrees()
    assert (etcd.check.unknown, caplog.text) == ("", ""), "one failed check is not reported"
    for _ in range(TOLD_AFTER):
        assert not await etcd.check.agrees()
    assert etcd.check.unknown == WHY
    assert caplog.text.count(f"This machine's clock cannot be compared with etcd's: {WHY}. History is not deleted") == 1
    assert etcd.changes == 1
    etcd.ahead = 0.0
    assert await etcd.check.agrees()
    assert (etcd.check.unknown, etcd.changes) == ("", 2)
    assert caplog.text.count("clock can be compared with etcd's again") == 1


async def test_a_wrong_clock_stays_wrong_until_it_is_compared_again(etcd: Etcd) -> None:
    etcd.ahead = 7200.0
    assert not await etcd.check.agrees()
    etcd.ahead = None
    for _ in range(TOLD_AFTER):
        assert not await etcd.check.agrees()
    assert (etcd.check.ahead, etcd.check.unknown) == (7200, WHY)


def test_the_clocks_are_compared_regularly_and_soon_after_a_failure() -> None:
    """A clock may go wrong at any time, and a wrong one deletes history."""
    compared: list[float] = []

    async def main() -> None:
        etcd = Etcd()

        async def read(*asked: Any) -> float:
            compared.append(now())
            assert len(compared) < 500, "it is compared without a pause"
            return await etcd.read(*asked)

        server_clock.reading.set(read)
        running = asyncio.ensure_future(etcd.check.run())
        await asyncio.sleep(7200.0)
        assert 2 <= len(compared) <= 200
        etcd.ahead = None
        await asyncio.sleep(3600.0)
        assert etcd.check.unknown == WHY
        failed = len(compared)
        await asyncio.sleep(3600.0)
        assert 10 <= len(compared) - failed <= 200
        etcd.ahead = 7200.0
        await asyncio.sleep(300.0)
        assert etcd.check.ahead == 7200
        running.cancel()

    in_virtual_time(main, limit=20_000.0)


def test_the_node_record_holds_the_reason_why_a_clock_cannot_be_compared() -> None:
    node = Node("e", "host", 1, ("noop",), clock_unknown=WHY)
    assert Node.decode(node.encode()) == node
    assert b"clock_unknown" not in Node("e", "host", 1, ("noop",)).encode()
