"""The status of a job: reports it to the daemon, with a rate limit, and shows what the job waits for meanwhile."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STATUS_SECONDS = 0.5
"""Minimum seconds between two reports of a job."""
STARTING_SPARK = "starting Spark"
"""The status of a job that waits for the start of the Spark session: of the JVM, 5 to 15 s."""


class JobStatus:
    """The status of one job, batch or call. ``send`` sends a text to the daemon."""

    def __init__(self, send: Callable[[str], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._last = float("-inf")
        self._text = ""
        """The last status of the behavior that was sent."""
        self._held: str | None = None
        """The last status that the rate limit, or a wait, held back; :meth:`send_held` sends it later."""
        self._waiting = 0
        """Number of threads of this job that wait."""

    def report(self, text: str) -> None:
        """Send a status, or hold it back."""
        with self._lock:
            if not self._waiting and time.monotonic() - self._last >= STATUS_SECONDS:
                self._report(text)
            else:
                self._held = text

    def send_held(self) -> None:
        """Send the status that was held back, if there is one: it may describe a long step."""
        with self._lock:
            if self._held is not None and not self._waiting:
                self._report(self._held)

    @contextlib.contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Report what the job waits for, instead of its own status, which is reported again afterwards."""
        with self._lock:
            self._waiting += 1
            if self._waiting == 1:
                self._send(text)
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1
                if not self._waiting:
                    self._report(self._text if self._held is None else self._held)

    def _report(self, text: str) -> None:
        self._last, self._held, self._text = time.monotonic(), None, text
        self._send(text)
