"""Many seeds, on several processors; what was covered, and what was found."""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distop.testing.simulation.run import Simulation, quietly
from distop.testing.simulation.scenario import scenario
from distop.testing.simulation.story import describe

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

STORIES = 3
"""Breaches of one seed that are told."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is kept of a run. ``stories``: one for each of the first breaches."""

    seed: int
    executors: int
    coordinators: int
    partitions: int
    operations: int
    revisions: int
    virtual: float
    faults: dict[str, int]
    stories: tuple[str, ...]


def one(seed: int) -> Outcome:
    """Run one seed."""
    with quietly():
        wanted = scenario(seed)
        sim = Simulation(wanted)
        report = sim.run()
        stories = tuple("\n".join(describe(sim, breach)) for breach in report.breaches[:STORIES])
    return Outcome(
        seed,
        len(wanted.hosts),
        wanted.coordinators,
        wanted.partitions,
        report.ended,
        report.revisions,
        report.seconds,
        report.faults,
        stories,
    )


def many(seeds: Iterable[int], jobs: int) -> Iterator[Outcome]:
    """Run all of them in so many processes; outcomes as they come."""
    if jobs < 2:
        yield from map(one, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, initializer=gc.freeze, maxtasksperchild=None) as pool:
        yield from pool.imap_unordered(one, seeds, chunksize=8)


@dataclass(slots=True)
class Tally:
    """The distribution of what was run."""

    outcomes: list[Outcome] = field(default_factory=list)
    begun: float = field(default_factory=time.perf_counter)

    @property
    def broken(self) -> list[Outcome]:
        return sorted((one for one in self.outcomes if one.stories), key=lambda one: one.seed)

    def lines(self) -> Iterator[str]:
        """For people."""
        outcomes, seconds = self.outcomes, time.perf_counter() - self.begun
        count = len(outcomes)
        faults: Counter[str] = Counter()
        for outcome in outcomes:
            faults.update(outcome.faults)
        yield f"{count} schedules in {seconds:.1f} s: {count / seconds:.1f} a second"
        for what in ("executors", "coordinators", "partitions", "operations", "revisions", "virtual"):
            values = [getattr(outcome, what) for outcome in outcomes]
            told = {"operations": "operations ended", "virtual": "virtual seconds"}.get(what, what)
            yield f"  {told}: {min(values):g} to {max(values):g}, median {statistics.median(values):g}"
        struck = ", ".join(f"{name} {number}" for name, number in sorted(faults.items()))
        yield f"  faults: {sum(faults.values())} in all: {struck}"
        yield f"  seeds with a breach: {len(self.broken)}"
