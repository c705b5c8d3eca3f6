"""Runs many seeds in parallel; reports coverage and breaches."""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distop.protocol.frozen import frozen
from tests.simulator import protocol_paths
from tests.simulator.breach_timeline import describe
from tests.simulator.run import Simulation, without_logs
from tests.simulator.scenario import draw_scenario

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_TIMELINES = 3
"""Maximum breaches of one seed that are reported."""

MEASURED = {
    "executors": "executors that offer a started type, and may coordinate it",
    "claimed": "executors that held a claim",
    "elected": "executors that won an election",
    "partitions": "partitions of the largest operation",
    "operations": "ended operations",
    "revisions": "revisions",
    "virtual": "virtual seconds",
}
"""The reported measures: field of ``Outcome`` → description."""


@frozen
class Outcome:
    """The result of a run. ``timelines``: of its first breaches."""

    seed: int
    executors: int
    """Executors that offer the type of a started operation, and so may coordinate it."""
    claimed: int
    """Executors that held a claim."""
    elected: int
    """Executors that won an election."""
    partitions: int
    operations: int
    revisions: int
    virtual: float
    faults: dict[str, int]
    """Faults that struck while an operation was open or pending, by kind."""
    paths: dict[str, int]
    timelines: tuple[str, ...]


def run_seed(seed: int) -> Outcome:
    """Run one seed."""
    with without_logs():
        scenario = draw_scenario(seed)
        sim = Simulation(scenario)
        report = sim.run()
        timelines = tuple("\n".join(describe(sim, breach)) for breach in report.breaches[:MAX_TIMELINES])
    return Outcome(
        seed,
        report.offering,
        report.claimed,
        report.elected,
        scenario.partitions,
        report.ended,
        report.revisions,
        report.seconds,
        report.faults,
        report.paths,
        timelines,
    )


def run_seeds(seeds: Iterable[int], jobs: int) -> Iterator[Outcome]:
    """Run these seeds in ``jobs`` processes; yields each outcome when it is known."""
    if jobs < 2:
        yield from map(run_seed, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, initializer=gc.freeze, maxtasksperchild=None) as pool:
        yield from pool.imap_unordered(run_seed, seeds, chunksize=8)


@dataclass(slots=True)
class Tally:
    """All outcomes, and their summary."""

    outcomes: list[Outcome] = field(default_factory=list)
    begun: float = field(default_factory=time.perf_counter)

    @property
    def broken(self) -> list[Outcome]:
        """The outcomes with a breach, by seed."""
        return sorted((one for one in self.outcomes if one.timelines), key=lambda one: one.seed)

    def lines(self) -> Iterator[str]:
        """The summary as text."""
        outcomes, seconds = self.outcomes, time.perf_counter() - self.begun
        count = len(outcomes)
        faults: Counter[str] = Counter()
        for outcome in outcomes:
            faults.update(outcome.faults)
        yield f"{count} schedules in {seconds:.1f} s: {count / seconds:.1f} per second"
        for what, description in MEASURED.items():
            values = [getattr(outcome, what) for outcome in outcomes]
            yield f"  {description}: {min(values):g} to {max(values):g}, median {statistics.median(values):g}"
        struck = ", ".join(f"{name} {number}" for name, number in sorted(faults.items()) if number)
        yield f"  faults while an operation was open or pending: {sum(faults.values())} ({struck})"
        yield f"  schedules without such a fault: {sum(not any(one.faults.values()) for one in outcomes)}"
        taken = {path: sum(one.paths[path] > 0 for one in outcomes) for path in protocol_paths.ALL}
        yield f"  schedules that take a special path: {', '.join(f'{name} {n}' for name, n in taken.items())}"
        yield f"  seeds with a breach: {len(self.broken)}"
