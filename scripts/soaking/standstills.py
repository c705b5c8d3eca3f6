"""Machines that stood still, and what their processes may have done for a moment after they went on."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from distop.worker.guardian import boottime

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MOMENT = 2.0
"""Seconds for which what was overtaken may go on after it woke up: its guardian has to run, on a machine whose
processors are not idle, and to kill all of the child.
"""


@dataclass(frozen=True, slots=True)
class Standstill:
    """``since``, ``woke``: seconds of CLOCK_BOOTTIME, as in a journal; before the first process stopped, and before the
    first went on.
    """

    executor: str
    since: float
    woke: float = float("inf")


class Standstills:
    """Of the machines of a soak."""

    def __init__(self) -> None:
        self._all: list[Standstill] = []
        self.late: list[float] = []
        """What was allowed: how long after it woke up an attempt that was overtaken wrote last."""

    def begin(self, executor: str) -> None:
        """It is about to stand still."""
        self._all.append(Standstill(executor, boottime()))

    def end(self, executor: str) -> None:
        """It is about to go on."""
        (number,) = (n for n, one in enumerate(self._all) if one.executor == executor and one.woke == float("inf"))
        self._all[number] = replace(self._all[number], woke=boottime())

    def just_woke(self, executor: str) -> bool:
        """What ran there when it stood still may not be dead yet; so also while it stands still."""
        return any(one.executor == executor and boottime() <= one.woke + MOMENT for one in self._all)

    def of(self, held: Mapping[tuple[int, int], str]) -> Allowed:
        """What the attempts of an operation may have done, whose holders ``held`` tells: (partition, attempt) →
        executor.
        """
        return Allowed(self, held)

    def excuse(self, executor: str | None, began: float, when: float) -> bool:
        """Whether what ran there may write ``when`` another attempt has begun: that did so after this machine stood
        still, which only just went on.
        """
        for one in self._all:
            if one.executor == executor and one.since <= began and 0 <= when - one.woke <= MOMENT:
                self.late.append(when - one.woke)
                return True
        return False

    def woken(self, executor: str, when: float) -> bool:
        """Whether its machine had just gone on then."""
        return any(one.executor == executor and 0 <= when - one.woke <= MOMENT for one in self._all)


@dataclass(frozen=True, slots=True)
class Allowed:
    """Whether an attempt may have written late: only one whose holder is known, and stood still."""

    standstills: Standstills
    held: Mapping[tuple[int, int], str]

    def __call__(self, partition: int, attempt: int, began: float, when: float) -> bool:
        return self.standstills.excuse(self.held.get((partition, attempt)), began, when)

    def left(self, partition: int, path: Path) -> bool:
        """Whether a file may be left of a job: some attempt made it, or touched it, when its machine had just woken up.
        A file's times are of the clock that tells the time of day.
        """
        when = path.stat().st_mtime - (time.time() - boottime())
        holders = {executor for (job, _), executor in self.held.items() if job == partition}
        return any(self.standstills.woken(executor, when) for executor in holders)
