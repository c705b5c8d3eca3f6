"""Comparison of clocks by the date in an HTTP answer of etcd."""

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
    """The result of ``ask`` with a server that gives this answer ({NOW}: the current time; None: no answer)."""
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
    # The date has whole seconds, and time passes.
    assert off - 1 <= seen <= time.time() - (there - 1)


async def test_clocks_that_agree_to_the_second_are_equal() -> None:
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
async def test_an_answer_without_a_valid_date_is_rejected(answer: str) -> None:
    with pytest.raises(ClockUnreadable):
        await served(answer, compared)


async def test_a_silent_server_is_abandoned_at_the_time_limit() -> None:
    with pytest.raises(ClockUnreadable):
        await served(None, lambda address: compared(address, 0.05))


async def test_the_error_of_a_closed_port_names_it() -> None:
    async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
    with pytest.raises(ClockUnreadable, match=f"127.0.0.1:{port}"):
        await compared(f"127.0.0.1:{port}")
