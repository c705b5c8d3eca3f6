"""Whether history records and their request ids are kept for an hour, and for the age that a scenario sets.

The simulation's own time counts, and not what executors take for the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.core import keys as K
from distop.core.codec import parse_time
from distop.core.limits import DEFAULT, Limits
from distop.core.model import History
from distop.testing.simulation.source import EPOCH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from distop.core.keys import ParsedKey
    from distop.core.seen import Change
    from distop.testing.simulation.scenario import Scenario

HOUR = 3600.0
"""Seconds for which docs/contract.md promises a record; deliberately not read from :class:`Limits`."""


MINUTE = 60.0
"""Seconds by which a clock may be wrong that deletes by age, as docs/how-to/monitor.md says."""


def age(wanted: Scenario) -> float | None:
    """The seconds for which records are kept by age; None where something else may delete them earlier.

    A clock that is ahead by less than a minute deletes as much earlier.
    """
    clocks_jump = any(fault.kind == "clock" for fault in wanted.faults)
    if wanted.history_age is None or wanted.history_limit < 1000 or clocks_jump:
        return None
    return wanted.history_age - max([host.skew for host in wanted.hosts if 0 < host.skew <= MINUTE], default=0.0)


def promised(limits: Limits) -> float:
    """The seconds for which records are kept in a scenario with these limits: the hour, unless it sets another time."""
    return HOUR if limits.history_kept == DEFAULT.history_kept else limits.history_kept


class HistoryRetention:
    """Judges each deletion of a history record.

    ``kept``: the seconds for which a record must be kept at least; ``age``: the seconds for which it is kept after the
    end that it tells, None where that is not judged.
    """

    def __init__(
        self, kept: float, age: float | None, now: Callable[[], float], found: Callable[[str, str, str], None]
    ) -> None:
        self._kept = kept
        self._age = age
        self._now = now
        self._found = found
        self._written: dict[str, tuple[float, float]] = {}
        """When each record of this run was written, and the end that it tells; those that stood there before are older.
        """

    def step(self, parsed: Iterable[tuple[ParsedKey, Change]]) -> None:
        """Take the changes of one revision."""
        for key, change in parsed:
            if key.family != K.HISTORY or key.name:
                continue
            if not change.deleted:
                ended = parse_time(History.decode(change.kv.value).finished) - EPOCH
                self._written[change.kv.key] = self._now(), ended
            elif (known := self._written.pop(change.kv.key, None)) is not None:
                self._deleted(change.kv.key, *known)

    def _deleted(self, key: str, written: float, ended: float) -> None:
        age = self._now() - written
        if age < self._kept:
            text = f"deleted {age:.1f} s after its operation ended; it is kept for {self._kept:g} s"
            self._found("forgotten", key, text)
        elif self._age is not None and (told := self._now() - ended) < self._age:
            text = f"deleted by age, {told:.1f} s after the end that it tells; it is kept for {self._age:g} s"
            self._found("forgotten", key, text)
