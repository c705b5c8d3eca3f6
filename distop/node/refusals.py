"""What etcd refuses by its form, told to people through the node record: by operation, what is refused and in which
words. Such a write is not dropped: whoever has it sends it again with back-off, alone, and it holds up no other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.backoff import Backoff
from distop.core.codec import shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distop.errors import MalformedRequest
    from distop.logs import ContextLogger

PAUSE = (1.0, 300.0)
"""Seconds of back-off, first and longest, of a write whose form etcd does not take."""
MOST_OPERATIONS = 8
LONGEST = 500


class Refusals:
    """Of one incarnation. ``changed()`` is called when ``told`` is another."""

    def __init__(self, log: ContextLogger, changed: Callable[[], None]) -> None:
        self.told: Mapping[str, str] = {}
        """By operation, what is to stand in the node record."""
        self._log = log
        self._changed = changed
        self._texts: dict[str, dict[str, str]] = {}
        """By operation, and by what is written of it."""
        self._backoffs: dict[tuple[str, str], Backoff] = {}

    def refused(self, op: str, what: str, error: MalformedRequest) -> float:
        """etcd does not take what is to be written of an operation, alone. Seconds until it is to be sent again."""
        text = shorten(f"{what}: {error}", LONGEST)
        pause = self._backoffs.setdefault((op, what), Backoff(*PAUSE)).pause()
        if self._texts.setdefault(op, {}).get(what) != text:
            self._texts[op][what] = text
            said = "etcd rejects this write as invalid; retrying in %.0f s with back-off: %s"
            self._log.error(said, pause, text, extra={"operation": op, "error": error})
            self._tell()
        return pause

    def settled(self, op: str, what: str) -> None:
        """It was written, or need not be any more."""
        if self._backoffs.pop((op, what), None) is not None:
            texts = self._texts[op]
            del texts[what]
            if not texts:
                del self._texts[op]
            self._tell()

    def holds(self, op: str, what: str) -> bool:
        """It was refused, and has not been settled."""
        return (op, what) in self._backoffs

    def _tell(self) -> None:
        self.told = {op: "; ".join(texts.values()) for op, texts in list(self._texts.items())[:MOST_OPERATIONS]}
        self._changed()
