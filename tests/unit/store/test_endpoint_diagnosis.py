"""Diagnosis of unusable endpoints: concurrent, and within the connect time-out."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from contextlib import AsyncExitStack

import pytest

from distop.store.connection_settings import Endpoint
from distop.store.endpoint_diagnosis import Diagnosis, explain


async def test_endpoints_are_diagnosed_concurrently() -> None:
    """Each server holds its client until all three have one, so one after the other would never end."""
    present: set[int] = set()
    met = asyncio.Event()

    async def serve(number: int, stack: AsyncExitStack) -> Endpoint:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if await reader.read(1):  # data came, so this is no mere check for an open port
                present.add(number)
                if len(present) == 3:
                    met.set()
                gone = asyncio.ensure_future(reader.read())
                await asyncio.wait({gone, everybody}, return_when=asyncio.FIRST_COMPLETED)
                gone.cancel()
                present.discard(number)
            writer.close()

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        await stack.enter_async_context(server)
        return Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])

    async with AsyncExitStack() as stack:
        everybody = asyncio.ensure_future(met.wait())
        endpoints = [await serve(number, stack) for number in range(3)]
        diagnosis = Diagnosis(endpoints, False, 60.0)
        assert diagnosis.start_if_due(60.0) == 58.0, "not due yet: the caller asks again after this time"
        assert diagnosis.start_if_due(1.5) == 1.5
        assert await diagnosis.results() == ["", "", ""]
        everybody.cancel()
    assert met.is_set()


async def test_a_cancelled_diagnosis_logs_no_error() -> None:
    """A daemon that reached etcd after all logged "_GatheringFuture exception was never retrieved"."""
    errors: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["message"]))
    accepted = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        diagnosis = Diagnosis([Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])], False, 60.0)
        diagnosis.start_if_due(1.5)
        await asyncio.wait_for(accepted.wait(), 10.0)
        diagnosis.cancel()
        del diagnosis
        for _ in range(5):
            await asyncio.sleep(0)
        gc.collect()
    assert errors == []


@pytest.mark.parametrize("timeout", [0.4, 5.0])
def test_the_diagnosis_takes_a_share_of_a_short_connect_timeout(timeout: float) -> None:
    diagnosis = Diagnosis([], False, timeout)
    left = diagnosis.start_if_due(timeout)
    assert 0 < left < timeout
    assert left == pytest.approx(timeout - min(2.0, 0.75 * timeout))


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_a_numeric_address_is_not_looked_up(host: str) -> None:
    passed = asyncio.get_running_loop().time()
    assert await explain(Endpoint(host, 1), False, passed) == "connection refused or timed out"


SILENT = """
import socket, threading
from distop.cli.main import main
socket.getaddrinfo = lambda *_, **__: threading.Event().wait()
main()
"""


def test_a_silent_dns_server_does_not_delay_the_exit() -> None:
    """The only function that asks it is replaced by one that never returns."""
    words = [sys.executable, "-c", SILENT, "ls", "--etcd", "nohost.invalid:2379", "--connect-timeout", "0.5"]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout) == (3, "")
    assert "within 0.5 s at nohost.invalid:2379 (DNS lookup of the host timed out)" in ran.stderr
