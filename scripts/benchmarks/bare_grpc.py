"""A gRPC service without any content: what calls of grpcio cost on this machine, as a base line.

As a program it serves on a free port, and prints the port.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

ANSWER = b"x" * 700
"""As many bytes as an ended operation has."""


async def serve() -> None:
    """Serve until the process is killed."""
    release = asyncio.Event()

    async def echo(request: bytes, _: Any) -> bytes:
        return request

    async def wait(_: bytes, __: Any) -> bytes:
        await release.wait()
        return ANSWER

    async def end(_: bytes, __: Any) -> bytes:
        release.set()
        return b""

    calls = {one.__name__: grpc.unary_unary_rpc_method_handler(one) for one in (echo, wait, end)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", calls),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


@contextmanager
def bare_service() -> Iterator[str]:
    """The address of such a service in a process of its own."""
    process = subprocess.Popen([sys.executable, Path(__file__)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield f"127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


async def call_times(channel: grpc.aio.Channel, calls: int) -> list[float]:
    """The seconds of each call of one caller."""
    found = []
    for _ in range(calls):
        began = time.perf_counter()
        await channel.unary_unary("/bare/echo")(b"x" * 100)
        found.append(time.perf_counter() - began)
    return found


async def calls_per_second(channel: grpc.aio.Channel, callers: int, calls: int) -> float:
    """Calls per second of several callers."""
    began = time.perf_counter()
    await asyncio.gather(*(call_times(channel, calls // callers) for _ in range(callers)))
    return calls / (time.perf_counter() - began)


async def answer_times(channel: grpc.aio.Channel, waits: int) -> list[float]:
    """Seconds from an event to each answer of calls that wait for it."""
    done: list[float] = []

    async def wait() -> None:
        await channel.unary_unary("/bare/wait")(b"")
        done.append(time.perf_counter())

    waiting = [asyncio.create_task(wait()) for _ in range(waits)]
    await call_times(channel, 200)  # the calls before have arrived by then
    began = time.perf_counter()
    await channel.unary_unary("/bare/end")(b"")
    await asyncio.gather(*waiting)
    return [one - began for one in done]


if __name__ == "__main__":
    asyncio.run(serve())
