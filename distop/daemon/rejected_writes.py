"""Writes that etcd rejects as invalid, reported in the node record by operation.

Such a write is not dropped: its owner retries it alone, with back-off, and it holds up no other write.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from distop.runtime import secret_settings
from distop.runtime.backoff import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from distop.errors import MalformedRequest
    from distop.runtime.logs import ContextLogger

PAUSE = (1.0, 300.0)
"""Seconds of back-off, first and longest, for a write that etcd rejects as invalid."""
MOST_OPERATIONS = 8
"""Operations that the node record names at most."""
MOST_WRITES = 3
"""Writes of an operation that the node record names at most."""
LONGEST = 500
"""Maximum characters of the text for one write."""


@dataclass
class _Write:
    """A rejected write: its back-off, and etcd's error."""

    backoff: Backoff
    text: str = ""


class _Operation:
    """The rejected writes of one operation."""

    def __init__(self) -> None:
        self.writes: dict[tuple[str, Hashable], _Write] = {}
        self.texts: Counter[str] = Counter()
        """How many of these writes have a text, those first that were rejected first."""

    def drop(self, text: str) -> None:
        self.texts[text] -= 1
        if self.texts[text] <= 0:
            del self.texts[text]

    def text(self) -> str:
        named = list(islice(self.texts, MOST_WRITES))
        more = len(self.writes) - len(named)
        return "; ".join([*named, f"and {more} more write{'s' if more > 1 else ''}"] if more else named)


class RejectedWrites:
    """The rejected writes of one incarnation.

    ``changed()`` is called when ``published`` or ``more`` has changed. A write is identified by its operation, its kind
    and ``write``, which is left out if an operation has at most one write of the kind at a time.
    """

    def __init__(self, log: ContextLogger, changed: Callable[[], None]) -> None:
        self.published: Mapping[str, str] = {}
        """Operation → text for the node record."""
        self.more = 0
        """Operations with rejected writes that ``published`` leaves out."""
        self._log = log
        self._changed = changed
        self._operations: dict[str, _Operation] = {}

    def refused(self, op: str, what: str, error: MalformedRequest, write: Hashable = None) -> float:
        """Record that etcd rejects a write of an operation, even alone.

        Returns the seconds until it is to be sent again.
        """
        text = secret_settings.shortened(f"{what}: {error}", LONGEST)
        of = self._operations.setdefault(op, _Operation())
        one = of.writes.setdefault((what, write), _Write(Backoff(*PAUSE)))
        pause = one.backoff.pause()
        if one.text != text:
            if one.text:
                of.drop(one.text)
            if text not in of.texts:
                message = "etcd rejects this write as invalid; retrying in %.0f s with back-off: %s"
                self._log.error(message, pause, text, extra={"operation": op, "error": error})
            one.text = text
            of.texts[text] += 1
            self._publish()
        return pause

    def settled(self, op: str, what: str, write: Hashable = None) -> None:
        """The write was applied, or is no longer needed."""
        of = self._operations.get(op)
        if of is None or (one := of.writes.pop((what, write), None)) is None:
            return
        of.drop(one.text)
        if not of.writes:
            del self._operations[op]
        self._publish()

    def _publish(self) -> None:
        self.published = {op: of.text() for op, of in islice(self._operations.items(), MOST_OPERATIONS)}
        self.more = len(self._operations) - len(self.published)
        self._changed()
