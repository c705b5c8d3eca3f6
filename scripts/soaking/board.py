"""What is struck now, and when that passes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from distop.errors import DistopError

if TYPE_CHECKING:
    from collections.abc import Callable

AGAIN = 0.5
"""Seconds until an undoing that did not work is tried again."""
HEALED = 90.0
"""Seconds within which everything can be undone in the end."""


class NotYet(Exception):
    """An undoing has to be tried again."""


class Board:
    """Undoings that are due at some time, and what is busy until then."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._due: list[tuple[float, Callable[[], None], tuple[str, ...]]] = []
        self._busy: dict[str, float] = {}

    def later(self, seconds: float, undo: Callable[[], None], *busy: str) -> None:
        """Undo it after so many seconds. It is repeated while it raises NotYet or a DistopError; what is ``busy`` stays
        so until a second after it worked.
        """
        self._due.append((time.monotonic() + seconds, undo, busy))
        for name in busy:
            self._busy[name] = float("inf")

    def rest(self, name: str, seconds: float) -> None:
        """Leave it alone for so long."""
        self._busy[name] = time.monotonic() + seconds

    def free(self, *names: str) -> list[str]:
        """Those that are not struck now."""
        now = time.monotonic()
        return [name for name in names if self._busy.get(name, 0.0) < now]

    def tend(self) -> None:
        """Undo what is due."""
        for entry in [entry for entry in self._due if entry[0] <= time.monotonic()]:
            self._due.remove(entry)
            self._undo(*entry[1:])

    def heal(self) -> list[str]:
        """Undo everything now; what could not be."""
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
            self._say(f"cannot be undone yet: {str(error)[:100]}")
            self.later(AGAIN, undo, *busy)
        else:
            for name in busy:
                self.rest(name, 1.0)
