"""Writes that etcd rejects as invalid, reported in the node record by operation.

Such a write is not dropped: its owner retries it alone, with back-off, and it holds up no other write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop import private
from distop.backoff import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distop.errors import MalformedRequest
    from distop.logs import ContextLogger

PAUSE = (1.0, 300.0)
"""Seconds of back-off, first and longest, for a write that etcd rejects as invalid."""
MOST_OPERATIONS = 8
"""Operations that the node record names at most."""
LONGEST = 500
"""Characters of the text for one write."""


class RejectedWrites:
    """The rejected writes of one incarnation.

    ``changed()`` is called when ``told`` has changed.
    """

    def __init__(self, log: ContextLogger, changed: Callable[[], None]) -> None:
        self.told: Mapping[str, str] = {}
        """Operation → text for the node record."""
        self._log = log
        self._changed = changed
        self._texts: dict[str, dict[str, str]] = {}
        """Operation → kind of write → text."""
        self._backoffs: dict[tuple[str, str], Backoff] = {}

    def refused(self, op: str, what: str, error: MalformedRequest) -> float:
        """Record that etcd rejects a write of an operation, even alone.

        Returns the seconds until it is to be sent again.
        """
        text = private.shortened(f"{what}: {error}", LONGEST)
        pause = self._backoffs.setdefault((op, what), Backoff(*PAUSE)).pause()
        if self._texts.setdefault(op, {}).get(what) != text:
            self._texts[op][what] = text
            said = "etcd rejects this write as invalid; retrying in %.0f s with back-off: %s"
            self._log.error(said, pause, text, extra={"operation": op, "error": error})
            self._tell()
        return pause

    def settled(self, op: str, what: str) -> None:
        """The write was applied, or is no longer needed."""
        if self._backoffs.pop((op, what), None) is not None:
            texts = self._texts[op]
            del texts[what]
            if not texts:
                del self._texts[op]
            self._tell()

    def holds(self, op: str, what: str) -> bool:
        """Whether the write is rejected and not settled."""
        return (op, what) in self._backoffs

    def _tell(self) -> None:
        self.told = {op: "; ".join(texts.values()) for op, texts in list(self._texts.items())[:MOST_OPERATIONS]}
        self._changed()
