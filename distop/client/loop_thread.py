"""The thread with the event loop that serves the clients of a process."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, TypeVar

from distop.errors import EtcdUnavailable, UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine


T = TypeVar("T")

_LOOK_UP = 3_600.0
"""Seconds of one uninterrupted wait: an endless wait could not be interrupted on every platform."""


class Loop:
    """The private thread and its event loop."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="distop-client", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread and wait for it.

        An interrupt of the caller (Ctrl-C) cancels it.
        """
        if os.getpid() != self.pid:
            work.close()
            raise UsageError("this client was made before a fork: connect again in the child process")
        if threading.current_thread() is self._thread:
            work.close()
            raise UsageError("the blocking client was called from its own event loop: use distop.aio there")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while True:
                try:
                    return future.result(_LOOK_UP)
                except TimeoutError:
                    if future.done():
                        return future.result()
        except CancelledError:
            raise EtcdUnavailable("the client was closed") from None
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Stop the loop and the thread."""
        if os.getpid() == self.pid and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(2.0)


async def next_of(stream: AsyncGenerator[T, None]) -> T | None:
    return await anext(stream, None)


async def close(stream: Any) -> None:
    await stream.aclose()
