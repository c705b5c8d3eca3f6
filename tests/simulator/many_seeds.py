"""Many seeds, on several processors; what was covered, and what was found."""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distop.protocol.frozen import frozen
from tests.simulator import protocol_courses
from tests.simulator.breach_story import describe
from tests.simulator.run import Simulation, quietly
from tests.simulator.scenario import scenario

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

STORIES = 3
"""Breaches of one seed that are told."""

MEASURED = {
    "executors": "executors that offer what was started, and may coordinate it",
    "claimed": "executors that held a claim",
    "elected": "executors that held an election",
    "partitions": "partitions of the largest operation",
    "operations": "operations ended",
    "revisions": "revisions",
    "virtual": "virtual seconds",
}
"""What is told of each outcome, and how it is called."""


@frozen
class Outcome:
    """What is kept of a run. ``stories``: one for each of the first breaches."""

    seed: int
    executors: int
    """Those that offer something that was started. Who offers a type may coordinate it, too."""
    claimed: int
    """Executors that held a claim."""
    elected: int
    """Incarnations that held an election."""
    partitions: int
    operations: int
    revisions: int
    virtual: float
    faults: dict[str, int]
    """That struck while an operation was open or pending."""
    courses: dict[str, int]
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
        report.offering,
        report.claimed,
        report.elected,
        wanted.partitions,
        report.ended,
        report.revisions,
        report.seconds,
        report.faults,
        report.courses,
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
        for what, told in MEASURED.items():
            values = [getattr(outcome, what) for outcome in outcomes]
            yield f"  {told}: {min(values):g} to {max(values):g}, median {statistics.median(values):g}"
        struck = ", ".join(f"{name} {number}" for name, number in sorted(faults.items()) if number)
        yield f"  faults while an operation was open or pending: {sum(faults.values())} in all: {struck}"
        yield f"  schedules without such a fault: {sum(not any(one.faults.values()) for one in outcomes)}"
        taken = {course: sum(one.courses[course] > 0 for one in outcomes) for course in protocol_courses.ALL}
        yield f"  schedules with a course of its own: {', '.join(f'{name} {n}' for name, n in taken.items())}"
        yield f"  seeds with a breach: {len(self.broken)}"
