"""The work that a job reports to the daemon, with a rate limit."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.protocol.work_done import WorkDone

WORK_SECONDS = 1.0
"""Minimum seconds between two reports of a job."""


class JobWork:
    """The work of one job, batch or call. ``send`` sends it to the daemon."""

    def __init__(self, send: Callable[[WorkDone], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._last = float("-inf")
        self._held: WorkDone | None = None
        """The last report that the rate limit held back; :meth:`send_held` sends it later."""

    def report(self, done: WorkDone) -> None:
        """Send a report, or hold it back."""
        with self._lock:
            self._held = done
        self.send_held()

    def send_held(self) -> None:
        """Send the report that was held back, if there is one and the last one was long ago."""
        with self._lock:
            if self._held is not None and time.monotonic() - self._last >= WORK_SECONDS:
                done, self._held, self._last = self._held, None, time.monotonic()
                self._send(done)
