"""Bounded waits of the child for a JVM or a cluster, which may never answer."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

STEP = 0.5
"""Seconds of one wait."""
LONGEST_STEP = 2.0
"""Seconds that count for one wait at most: a process that was frozen itself has not been waiting."""


class Patience:
    """Seconds that a caller still waits, in steps of :data:`STEP`."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._looked = time.monotonic()

    def left(self) -> float:
        """Seconds; 0 or less: the wait is over."""
        now = time.monotonic()
        self._left -= min(now - self._looked, LONGEST_STEP)
        self._looked = now
        return self._left

    def join(self, thread: threading.Thread) -> bool:
        """Wait one step for the end of a thread. False where it goes on, and the wait is over."""
        thread.join(max(0.0, min(STEP, self._left)))
        return not thread.is_alive() or self.left() > 0


def answer_within(seconds: float, ask: Callable[[], T]) -> T:
    """What ``ask`` returns, from a thread of its own. Raises TimeoutError where it does not return in time, and what it
    raises.
    """
    answers: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            errors.append(error)

    asking, patience = threading.Thread(target=run, daemon=True), Patience(seconds)
    asking.start()
    while asking.is_alive() and patience.join(asking):
        pass
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answers[0]
