"""A proxy that says GOAWAY to clients, as servers and load balancers do that want a connection to end."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tests.support.proxy import TcpProxy

if TYPE_CHECKING:
    import asyncio
    from typing import Any

GOAWAY = 7
HEADER = 9
ALL_STREAMS = 2**31 - 1


class GoAwayProxy(TcpProxy):
    """Passes on answers in whole HTTP/2 frames, so that one of its own fits in between. ``said``: on how many
    connections it said so.
    """

    said = 0

    def go_away(self, code: int, last_stream: int, text: bytes = b"") -> None:
        """Say on all connections that streams after ``last_stream`` are not served, and why."""
        payload = last_stream.to_bytes(4, "big") + code.to_bytes(4, "big") + text
        frame = len(payload).to_bytes(3, "big") + bytes((GOAWAY, 0)) + bytes(4) + payload
        for pair in self._pairs:
            if not pair.client.is_closing():
                pair.client.write(frame)
                self.said += 1

    async def _answers(self, reader: asyncio.StreamReader, pair: Any) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                header = await reader.readexactly(HEADER)
                pair.client.write(header + await reader.readexactly(int.from_bytes(header[:3], "big")))
        self._forget(pair, pair.client)
