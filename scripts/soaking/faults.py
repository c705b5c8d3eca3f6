"""Injects the planned faults, and undoes each after its duration."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from distop.errors import DistopError
from soaking.executors import ExecutorFaults
from soaking.members import ROUGH, MemberFaults
from soaking.plan import plan
from soaking.repairs import Repairs
from tests.support.proxy import Mode

if TYPE_CHECKING:
    from soaking.cluster import SoakCluster
    from soaking.plan import Planned

Strike: TypeAlias = Callable[[random.Random, bool], str | None]
PATIENCE = 12.0
"""Seconds for which a fault waits for a free target; then it is omitted."""


class Faults:
    """Injects the planned faults at their times. ``say``: prints progress."""

    def __init__(self, cluster: SoakCluster, seed: int, seconds: float, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._say = say
        self._repairs = Repairs(say)
        self.members = MemberFaults(cluster, self._repairs, say)
        kinds = ExecutorFaults(cluster, self._repairs, say), self.members
        self._strikes: dict[str, Strike] = {name: strike for some in kinds for name, strike in some.strikes.items()}
        self.planned = plan(seed, seconds, sorted(self._strikes), ROUGH)
        self._left = list(self.planned)
        self._waiting: list[Planned] = []
        self._began = time.monotonic()
        self.counts: Counter[str] = Counter(dict.fromkeys(self._strikes, 0))
        self.left_out: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def begin(self) -> None:
        """Start the plan."""
        self._began = time.monotonic()

    def step(self) -> None:
        """Undo and inject the faults that are due."""
        self._repairs.step()
        self.members.step()
        now = time.monotonic() - self._began
        while self._left and self._left[0].at <= now:
            self._waiting.append(self._left.pop(0))
        for fault in list(self._waiting):
            if self._strike(fault):
                self._waiting.remove(fault)
            elif now > fault.at + PATIENCE:
                self._waiting.remove(fault)
                self.left_out[fault.kind] += 1

    def _strike(self, fault: Planned) -> bool:
        try:
            struck = self._strikes[fault.kind](fault.chance(), fault.gentle)
        except DistopError as error:
            struck = f"not answered: {str(error)[:80]}"
        if struck is None:
            return False
        self.counts[fault.kind] += 1
        self._say(f"{fault.number}. {fault.kind}: {struck}")
        return True

    def heal(self) -> list[str]:
        """Undo all faults now; returns the problems."""
        problems = self._repairs.heal()
        self.members.step()
        problems += self._repairs.heal() + self.members.problems
        for proxy in self._cluster.proxies:
            proxy.set(Mode.PASS)
        return problems
