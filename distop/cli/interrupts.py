"""An event loop that Ctrl-C interrupts even while it sleeps."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Like ``asyncio.run()``, but each signal wakes the loop.

    Raises KeyboardInterrupt at Ctrl-C, and the errors of ``main``.

    ``asyncio.run()`` handles SIGINT in a Python handler, which runs between two steps of the interpreter. If the signal
    arrives after the last step and before the loop sleeps, or reaches another thread, nothing wakes the loop, and the
    interrupt takes effect at the next event. A wake-up descriptor closes that gap.
    """

    async def interruptible() -> T:
        with _woken(asyncio.get_running_loop()):
            return await main

    return asyncio.run(interruptible())


@contextmanager
def _woken(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only the main thread handles signals
        yield
        return
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        loop.add_reader(ours, ours.recv, 4096)
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            loop.remove_reader(ours)
