"""The interface for a daemon's metrics.

:class:`Meter` counts nothing. A daemon without a metrics endpoint uses it, and loads no metrics library.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from distop.protocol.frozen import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Meter:
    """Counts a daemon's work. Its methods are called thousands of times a second, so they must be cheap."""

    def begin(self, gauges: Callable[[], Gauges]) -> None:
        """Start of an incarnation. ``gauges`` returns its current gauges."""

    def end(self) -> None:
        """End of the incarnation."""

    def job_ended(self, type_name: str, outcome: str, seconds: float) -> None:
        """Count a job with an accepted report. ``outcome``: ``success`` or ``failed``; ``seconds``: of its attempt."""

    def jobs_lost(self, type_name: str, jobs: int) -> None:
        """Count jobs that failed because their executors were lost too often."""

    def claimed(self, type_name: str, jobs: int, taken_over: int) -> None:
        """Count granted claims. ``taken_over``: how many of them were held by executors that are gone."""

    def retried(self, type_name: str) -> None:
        """Count a failed attempt of a job that is retried."""

    def reported(self, applied: int, late: int) -> None:
        """Count written reports, retries, releases and checkpoints; ``late``: refused, because their fence was gone."""

    def committed(self, label: str, seconds: float, outcome: str) -> None:
        """Count a transaction. ``outcome``: ``applied``, ``refused`` (its guards did not hold), or ``error``."""

    def stages_removed(self, type_name: str, stages: int, size: int) -> None:
        """Count removed stages, which nothing names, and the bytes of their files."""

    def events_received(self, watch: str, behind: int) -> None:
        """Count events of a watch that arrived ``behind`` revisions after the newest known one."""


NO_METER = Meter()


@frozen
class Gauges:
    """The state of a daemon at one moment.

    ``operations``: the number of operations that it coordinates, by type and stage. ``silent``: seconds since the last
    answer of each watch. ``child_session``: the Unix session of the child process, 0: none.
    """

    incarnation: str = ""
    lease_seconds: float = 0.0
    slots: int = 0
    slots_busy: int = 0
    operations: Mapping[tuple[str, str], int] = field(default_factory=dict)
    silent: Mapping[str, float] = field(default_factory=dict)
    child_restarts: int = 0
    child_session: int = 0
