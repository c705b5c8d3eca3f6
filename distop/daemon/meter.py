"""What a daemon counts of its own work, for whoever measures it. A :class:`Meter` itself counts nothing: a daemon whose
metrics nobody asked for has this one, and loads no library for it.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from distop.protocol.frozen import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Meter:
    """Called in the daemon's loop, thousands of times a second: each call does next to nothing."""

    def begin(self, gauges: Callable[[], Gauges]) -> None:
        """An incarnation begins, which tells how it stands when it is asked."""

    def over(self) -> None:
        """The incarnation has ended."""

    def job_ended(self, type_name: str, outcome: str, seconds: float) -> None:
        """A job ended here, by a report that was accepted: ``success`` or ``failed``, after an attempt of so long."""

    def jobs_lost(self, type_name: str, jobs: int) -> None:
        """Jobs were reported as failed because executors were lost during them once too often."""

    def claimed(self, type_name: str, jobs: int, taken_over: int) -> None:
        """Claims were won; some of them were those of executors that are gone."""

    def retried(self, type_name: str) -> None:
        """A job broke and is to be tried again."""

    def reported(self, applied: int, late: int) -> None:
        """Reports, retries, releases and checkpoints were written, or were refused because their fences were gone."""

    def committed(self, label: str, seconds: float, outcome: str) -> None:
        """A transaction came to its end: ``applied``, ``refused`` (its guards did not hold), or ``error``."""

    def heard(self, watch: str, behind: int) -> None:
        """Events arrived, so many revisions behind what etcd was known to have by then."""


NO_METER = Meter()


@frozen
class Gauges:
    """How a daemon stands at one moment. ``operations``: those that it coordinates, by type and stage. ``silent``:
    seconds since each watch had its last answer. ``child_session``: the Unix session of the process that runs
    behaviors, 0: none.
    """

    incarnation: str = ""
    lease_seconds: float = 0.0
    slots: int = 0
    slots_busy: int = 0
    operations: Mapping[tuple[str, str], int] = field(default_factory=dict)
    silent: Mapping[str, float] = field(default_factory=dict)
    child_restarts: int = 0
    child_session: int = 0
