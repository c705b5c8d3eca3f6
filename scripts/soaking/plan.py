"""Draws the plan of faults by the seed alone: kinds and times. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

FIRST = 10.0
"""Seconds until the first fault."""
PAUSE = (1.0, 5.0)
"""Minimum and maximum seconds between two faults."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One fault. ``at``: seconds from the start. ``gentle``: it spares the executors whose memory is measured."""

    number: int
    at: float
    kind: str
    gentle: bool
    seed: str

    def chance(self) -> random.Random:
        """The random generator for the fault's target and duration, independent of all other draws."""
        return random.Random(self.seed)

    def __str__(self) -> str:
        return f"{self.number}. at {self.at:.1f} s: {self.kind}{' (gently)' if self.gentle else ''}"


def plan(seed: int, seconds: float, kinds: Sequence[str], rough: Collection[str] = ()) -> list[Planned]:
    """Draw faults for ``seconds``. Each kind comes once before any comes again.

    In the second half all faults are gentle, so kinds in ``rough`` are left out.
    """
    chance = random.Random(f"{seed}/plan")
    some = _rounds(chance, kinds)
    at, planned = FIRST, list[Planned]()
    while at < seconds:
        gentle, number = at > seconds / 2, len(planned) + 1
        kind = next(kind for kind in some if not (gentle and kind in rough))
        planned.append(Planned(number, at, kind, gentle, f"{seed}/fault/{number}"))
        at += chance.uniform(*PAUSE)
    return planned


def _rounds(chance: random.Random, kinds: Sequence[str]) -> Iterator[str]:
    while True:
        yield from chance.sample(list(kinds), len(kinds))
