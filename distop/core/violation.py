"""An invariant that did not hold, and which of them a history can show."""

from __future__ import annotations

from distop.core.frozen import frozen

NUMBERS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17, 18, 19)
"""The invariants that a history can show."""


@frozen
class Violation:
    """The number of the invariant, the revision that broke it, the key, what is wrong, and (``story``) the last events
    of the key: of its operation, and of the job where it is about one.
    """

    invariant: int
    revision: int
    key: str
    text: str
    story: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"invariant {self.invariant} at revision {self.revision}: {self.key}: {self.text}"
