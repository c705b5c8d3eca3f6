"""An event loop that hears an interrupt even while it sleeps."""

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
    """``asyncio.run()`` that is woken by each signal. Raises KeyboardInterrupt at Ctrl-C, and what ``main`` raises.

    ``asyncio.run()`` takes SIGINT in a Python handler. That runs between two steps of the interpreter: where the signal
    comes after the last of them and before the loop sleeps, or reaches another thread, nothing wakes the loop, and the
    interrupt is heard when something else happens. A wake-up descriptor has no such gap.
    """

    async def heard() -> T:
        with _woken(asyncio.get_running_loop()):
            return await main

    return asyncio.run(heard())


@contextmanager
def _woken(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
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
