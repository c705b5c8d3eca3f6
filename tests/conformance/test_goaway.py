"""F7: after a GOAWAY frame, requests, watches and sessions continue over a new connection."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from distop.protocol.txn import Put, Txn, absent
from distop.store.session import Session
from distop.store.watch import Feed
from tests.conformance.mirror import Mirror
from tests.support.etcd import connected, until
from tests.support.proxy import TcpProxy

if TYPE_CHECKING:
    from distop.store.embedded import EmbeddedEtcd


GOAWAY = 7
HEADER = 9
ALL_STREAMS = 2**31 - 1


class GoAwayProxy(TcpProxy):
    """Passes on answers in whole HTTP/2 frames, so that it can insert a GOAWAY frame between two of them."""

    sent = 0
    """The number of GOAWAY frames sent, one for each connection."""

    def go_away(self, code: int, last_stream: int, text: bytes = b"") -> None:
        """Send GOAWAY on all connections: streams after ``last_stream`` are not served, for the reason ``code``."""
        payload = last_stream.to_bytes(4, "big") + code.to_bytes(4, "big") + text
        frame = len(payload).to_bytes(3, "big") + bytes((GOAWAY, 0)) + bytes(4) + payload
        for pair in self._pairs:
            if not pair.client.is_closing():
                pair.client.write(frame)
                self.sent += 1

    async def _answers(self, reader: asyncio.StreamReader, pair: Any) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                header = await reader.readexactly(HEADER)
                pair.client.write(header + await reader.readexactly(int.from_bytes(header[:3], "big")))
        self._forget(pair, pair.client)


pytestmark = pytest.mark.etcd


@pytest.mark.parametrize(
    ("code", "last", "text"),
    [
        pytest.param(0, ALL_STREAMS, b"", id="in order, streams may end"),
        pytest.param(0, 0, b"", id="no stream was served"),
        pytest.param(11, 0, b"too_many_pings", id="too many pings"),
    ],
)
async def test_a_session_and_a_watch_survive_goaway(own_etcd: EmbeddedEtcd, code: int, last: int, text: bytes) -> None:
    async with GoAwayProxy(own_etcd.port) as proxy, connected(proxy.endpoint) as client:
        mirror = Mirror()
        feed = Feed(client, "t.", "t/", mirror.apply)
        await feed.start()
        session = Session(client, "node", b"", 6)
        await session.start()
        for number in range(2):
            sent = proxy.sent
            proxy.go_away(code, last, text)
            assert proxy.sent > sent, "no connection is open"
            result = await client.commit(Txn((absent(f"t.{number}"),), (Put(f"t.{number}", b"1"),)))
            assert result.succeeded or result.repeated
            await feed.reached(result.revision)
            before = session.deadline
            await until(lambda before=before: session.deadline > before or session.lost.done())
            assert session.alive
        assert set(mirror.values) == {"t.0", "t.1"}
        await session.close()
        await feed.close()
