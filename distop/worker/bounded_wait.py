"""Bounded waits of the child for a JVM or a cluster that may never answer."""

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
"""Maximum seconds counted for one step: a process that was frozen itself has not been waiting."""


class BoundedWait:
    """The seconds that a caller still waits, in steps of :data:`STEP` seconds."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._looked = time.monotonic()

    def left(self) -> float:
        """Seconds left; 0 or less once the wait has ended."""
        now = time.monotonic()
        self._left -= min(now - self._looked, LONGEST_STEP)
        self._looked = now
        return self._left

    def join(self, thread: threading.Thread) -> bool:
        """Wait one step for a thread; False where it still runs and the wait has ended."""
        thread.join(max(0.0, min(STEP, self._left)))
        return not thread.is_alive() or self.left() > 0


def answer_within(seconds: float, ask: Callable[[], T]) -> T:
    """Call ``ask`` in a thread of its own, and return or raise what it does.

    Raises TimeoutError where it does not return in time.
    """
    answers: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            errors.append(error)

    asking, patience = threading.Thread(target=run, daemon=True), BoundedWait(seconds)
    asking.start()
    while asking.is_alive() and patience.join(asking):
        pass
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answers[0]
