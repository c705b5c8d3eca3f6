"""Whether history records and their request ids are kept for an hour.

The simulation's own time counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.core import keys as K
from distop.core.limits import DEFAULT, Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from distop.core.keys import ParsedKey
    from distop.core.seen import Change


HOUR = 3600.0
"""Seconds for which docs/contract.md promises a record; deliberately not read from :class:`Limits`."""


def promised(limits: Limits) -> float:
    """The seconds for which records are kept in a scenario with these limits: the hour, unless it sets another time."""
    return HOUR if limits.history_kept == DEFAULT.history_kept else limits.history_kept


class HistoryRetention:
    """Judges each deletion of a history record.

    ``kept``: the seconds for which a record must be kept at least.
    """

    def __init__(self, kept: float, now: Callable[[], float], found: Callable[[str, str, str], None]) -> None:
        self._kept = kept
        self._now = now
        self._found = found
        self._written: dict[str, float] = {}
        """When each record of this run was written; those that stood there before are older."""

    def step(self, parsed: Iterable[tuple[ParsedKey, Change]]) -> None:
        """Take the changes of one revision."""
        for key, change in parsed:
            if key.family != K.HISTORY or key.name:
                continue
            if not change.deleted:
                self._written[change.kv.key] = self._now()
            elif (written := self._written.pop(change.kv.key, None)) is not None:
                age = self._now() - written
                if age < self._kept:
                    text = f"deleted {age:.1f} s after its operation ended; it is kept for {self._kept:g} s"
                    self._found("forgotten", change.kv.key, text)
