"""Waits while an object store is busy, which count as no attempt of a job, of planning or of completion."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from distop.clock import time
from distop.errors import FatalError, JobCancelled, JobFailed, OperationFailed, TableBusy, UsageError
from distop.protocol.executor_nodes import WAITS_FOR_STORE
from distop.runtime.backoff import Backoff
from distop.storage.store_errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from distop.runtime.logs import Log

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds between two tries."""
LIMIT = 900.0
"""Seconds from the first error without any result after which the attempt fails."""
_STEP = 0.5
"""Seconds between two checks whether to stop."""
_CAUSES = 10
"""Number of causes of an error that are examined."""
_FINAL = (FatalError, UsageError, JobFailed, OperationFailed, JobCancelled)
"""Errors that are final, whatever their cause."""


class StoreWaits:
    """The waits since the last result. ``check`` raises to stop.

    ``showing(text)`` returns a context in which this text is the status.
    """

    def __init__(
        self, check: Callable[[], None], showing: Callable[[str], AbstractContextManager[None]], log: Log
    ) -> None:
        self._check = check
        self._showing = showing
        self._log = log
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget the waits so far: there was a result."""
        self._backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        self._end: float | None = None

    def wait(self, error: Exception) -> None:
        """Wait before the next try. Raises ``error`` if the limit has passed, and the errors of ``check``."""
        now = time.monotonic()
        if self._end is None:
            self._end = now + LIMIT
        if now >= self._end:
            raise error
        until = min(now + self._backoff.pause(), self._end)
        self._log.warning("The store is busy; trying again in %.0f s: %s", until - now, error)
        with self._showing(f"{WAITS_FOR_STORE}: {error}"):
            while (left := until - time.monotonic()) > 0:
                self._check()
                threading.Event().wait(min(_STEP, left))


def is_busy(error: BaseException) -> bool:
    """Whether a store that is busy has caused an error. A verdict and a fatal error are final, whatever their cause."""
    if isinstance(error, _FINAL):
        return False
    cause: BaseException | None = error
    for _ in range(_CAUSES):
        if isinstance(cause, TableBusy | StoreUnavailable):
            return True
        if cause is None:
            break
        cause = cause.__cause__
    return False


def repeated_while_busy(
    work: Callable[[bool], T],
    waits: StoreWaits,
    *,
    repeats: Callable[[Exception], bool] = is_busy,
    results: Callable[[], int] = lambda: 0,
) -> T:
    """The result of ``work(again)``, which is called again while the store is busy.

    ``repeats``: whether an error leads to another call. ``results``: the number of results so far; after a new one the
    time limit begins anew. Raises the error of the busy store after :data:`LIMIT` seconds, the other errors of
    ``work``, and those of ``waits``.
    """
    again, seen = False, results()
    while True:
        try:
            return work(again)
        except Exception as error:
            if not repeats(error):
                raise
            if (now := results()) != seen:
                seen = now
                waits.begin_anew()
            waits.wait(error)
            again = True
