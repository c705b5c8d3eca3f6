"""The clock of a server that answers like etcd's HTTP side, or does not."""

from __future__ import annotations

import asyncio
import time
from email.utils import formatdate
from typing import TYPE_CHECKING

import pytest

from distop.store.connection_settings import EtcdConfig
from distop.store.server_clock import ClockUnreadable, ahead

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

ANSWER = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nDate: {}\r\nContent-Length: 0\r\n\r\n"


async def served(answer: str | None, ask: Callable[[str], Awaitable[float]]) -> float:
    """What ``ask`` is told by a server that answers every request so, with the present time for {NOW}; None: it never
    does.
    """
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answer is None:
            await over.wait()
        else:
            writer.write(answer.replace("{NOW}", formatdate(usegmt=True)).encode())
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        try:
            return await ask(f"127.0.0.1:{port}")
        finally:
            over.set()


async def compared(address: str, limit: float = 20.0) -> float:
    return await ahead(EtcdConfig((address,)), address, limit)


@pytest.mark.parametrize("off", [3600.0, -3600.0])
async def test_a_wrong_clock_is_detected_in_both_directions(off: float) -> None:
    there = time.time() - off
    seen = await served(ANSWER.format(formatdate(there, usegmt=True)), compared)
    # A date is cut to its second, and the time passes.
    assert off - 1 <= seen <= time.time() - (there - 1)


async def test_clocks_that_agree_to_the_second_are_no_difference() -> None:
    assert await served(ANSWER.format("{NOW}"), compared) == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        *map(ANSWER.format, ("", "tomorrow", "Mon, 01 Jan 99999 00:00:00 GMT", "Mon, 99 Foo 2024 00:00:00 GMT")),
        ANSWER.format("{NOW}").replace("200 OK", "404 Not Found"),
        "PRI * HTTP/2.0",
        "\x00\x00\x12\x04\x00\x00\x00\x00\x00\r\n",
        "",
    ],
)
async def test_an_answer_without_a_date_gives_no_clock(answer: str) -> None:
    with pytest.raises(ClockUnreadable):
        await served(answer, compared)


async def test_the_client_switches_from_a_silent_server() -> None:
    with pytest.raises(ClockUnreadable):
        await served(None, lambda address: compared(address, 0.05))


async def test_a_closed_port_gives_no_clock() -> None:
    async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
    with pytest.raises(ClockUnreadable, match=f"127.0.0.1:{port}"):
        await compared(f"127.0.0.1:{port}")
