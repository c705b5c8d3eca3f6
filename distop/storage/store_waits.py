"""Waits while an object store is busy, which count as no attempt of a job or of planning."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from distop.clock import time
from distop.errors import FatalError, TableBusy
from distop.protocol.executor_nodes import WAITS_FOR_STORE
from distop.runtime.backoff import Backoff
from distop.storage.store_errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.runtime.logs import Log

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds between two tries."""
LIMIT = 900.0
"""Seconds without any result after which the attempt fails."""
_STEP = 0.5
"""Seconds between two checks whether to stop."""
_CAUSES = 10
"""Number of causes of an error that are examined."""


class StoreWaits:
    """The waits since the last result. ``check`` raises to stop; ``status`` gets what is waited for.

    ``doing``: the status after each wait, if it is not empty.
    """

    def __init__(self, check: Callable[[], None], status: Callable[[str], None], log: Log, doing: str = "") -> None:
        self._check = check
        self._status = status
        self._log = log
        self._doing = doing
        self._backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        self._end = time.monotonic() + LIMIT

    def wait(self, error: Exception) -> None:
        """Wait before the next try. Raises ``error`` if the limit has passed, and the errors of ``check``."""
        now = time.monotonic()
        if now >= self._end:
            raise error
        until = min(now + self._backoff.pause(), self._end)
        self._log.warning("The store is busy; trying again in %.0f s: %s", until - now, error)
        self._status(f"{WAITS_FOR_STORE}: {error}")
        while (left := until - time.monotonic()) > 0:
            self._check()
            threading.Event().wait(min(_STEP, left))
        if self._doing:
            self._status(self._doing)


def is_busy(error: BaseException) -> bool:
    """Whether a store that is busy has caused an error. A fatal error is final, whatever its cause."""
    if isinstance(error, FatalError):
        return False
    cause: BaseException | None = error
    for _ in range(_CAUSES):
        if isinstance(cause, TableBusy | StoreUnavailable):
            return True
        if cause is None:
            break
        cause = cause.__cause__
    return False


def repeated_while_busy(work: Callable[[], T], waits: StoreWaits) -> T:
    """The result of ``work``, which is called again while the store is busy.

    Raises the error of the busy store after :data:`LIMIT` seconds, and the other errors of ``work``.
    """
    while True:
        try:
            return work()
        except Exception as error:
            if not is_busy(error):
                raise
            waits.wait(error)
