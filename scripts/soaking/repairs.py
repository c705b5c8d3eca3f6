"""Schedules the undoing of faults, and tracks which targets have a fault."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from distop.errors import DistopError

if TYPE_CHECKING:
    from collections.abc import Callable

AGAIN = 0.5
"""Seconds before a failed undoing is retried."""
HEALED = 90.0
"""Time limit in seconds for undoing all faults at the end."""


class NotYet(Exception):
    """An undoing has to be retried."""


class Repairs:
    """Undoings with their due times, and the targets that are busy until then."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._due: list[tuple[float, Callable[[], None], tuple[str, ...]]] = []
        self._busy: dict[str, float] = {}

    def later(self, seconds: float, undo: Callable[[], None], *busy: str) -> None:
        """Call ``undo`` after ``seconds``, and retry it while it raises NotYet or a DistopError.

        The ``busy`` targets are free again a second after its success.
        """
        self._due.append((time.monotonic() + seconds, undo, busy))
        for name in busy:
            self._busy[name] = float("inf")

    def rest(self, name: str, seconds: float) -> None:
        """Keep a target free of faults for ``seconds``."""
        self._busy[name] = time.monotonic() + seconds

    def free(self, *names: str) -> list[str]:
        """The names of the targets without a fault."""
        now = time.monotonic()
        return [name for name in names if self._busy.get(name, 0.0) < now]

    def step(self) -> None:
        """Call the undoings that are due."""
        for entry in [entry for entry in self._due if entry[0] <= time.monotonic()]:
            self._due.remove(entry)
            self._undo(*entry[1:])

    def heal(self) -> list[str]:
        """Undo all faults now; returns the problems."""
        limit = time.monotonic() + HEALED
        while self._due:
            if time.monotonic() > limit:
                return [f"{len(self._due)} faults could not be undone within {HEALED:g} s"]
            due, self._due = sorted(self._due, key=lambda entry: entry[0]), []
            for _, undo, busy in due:
                self._undo(undo, busy)
            time.sleep(0.1)
        return []

    def _undo(self, undo: Callable[[], None], busy: tuple[str, ...]) -> None:
        try:
            undo()
        except (NotYet, DistopError) as error:
            self._say(f"could not undo a fault; retrying: {str(error)[:100]}")
            self.later(AGAIN, undo, *busy)
        else:
            for name in busy:
                self.rest(name, 1.0)
