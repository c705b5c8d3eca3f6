"""Suspended machines, and the writes that their processes may still make just after they resume."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from distop.worker.guardian import boottime

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MOMENT = 2.0
"""Seconds for which superseded processes may run after their machine resumes: the guardian has to run on busy
processors, and to kill all of the child.
"""


@dataclass(frozen=True, slots=True)
class Suspension:
    """A suspension of an executor's machine. ``since``, ``woke``: seconds of CLOCK_BOOTTIME, as in a journal, before
    the first process stopped and before the first one continued.
    """

    executor: str
    since: float
    woke: float = float("inf")


class Suspensions:
    """All suspensions of a soak."""

    def __init__(self) -> None:
        self._all: list[Suspension] = []
        self.late: list[float] = []
        """The delays after a resume of writes that were allowed, in seconds."""

    def begin(self, executor: str) -> None:
        """Record that the executor's machine is about to be suspended."""
        self._all.append(Suspension(executor, boottime()))

    def end(self, executor: str) -> None:
        """Record that the executor's machine is about to resume."""
        (number,) = (n for n, one in enumerate(self._all) if one.executor == executor and one.woke == float("inf"))
        self._all[number] = replace(self._all[number], woke=boottime())

    def just_woke(self, executor: str) -> bool:
        """Whether superseded processes may still run there; true also during the suspension."""
        return any(one.executor == executor and boottime() <= one.woke + MOMENT for one in self._all)

    def of(self, held: Mapping[tuple[int, int], str]) -> Allowed:
        """The allowed late writes of an operation. ``held``: (partition, attempt) → executor that held the claim."""
        return Allowed(self, held)

    def allows(self, executor: str | None, began: float, when: float) -> bool:
        """Whether a superseded attempt there may write at ``when``: its machine had just resumed, and the other attempt
        ``began`` after the start of the suspension.
        """
        for one in self._all:
            if one.executor == executor and one.since <= began and 0 <= when - one.woke <= MOMENT:
                self.late.append(when - one.woke)
                return True
        return False

    def woken(self, executor: str, when: float) -> bool:
        """Whether the executor's machine had just resumed at that time."""
        return any(one.executor == executor and 0 <= when - one.woke <= MOMENT for one in self._all)


@dataclass(frozen=True, slots=True)
class Allowed:
    """Whether an attempt may have written late: only if its holder is known and was suspended."""

    suspensions: Suspensions
    held: Mapping[tuple[int, int], str]

    def __call__(self, partition: int, attempt: int, began: float, when: float) -> bool:
        return self.suspensions.allows(self.held.get((partition, attempt)), began, when)

    def left(self, partition: int, path: Path) -> bool:
        """Whether a file of a job may remain: an attempt wrote it when its machine had just resumed.

        A file's times are of the wall clock.
        """
        when = path.stat().st_mtime - (time.time() - boottime())
        holders = {executor for (job, _), executor in self.held.items() if job == partition}
        return any(self.suspensions.woken(executor, when) for executor in holders)
