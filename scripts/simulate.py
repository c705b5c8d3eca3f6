"""Run seeded schedules of the simulator; see ``scripts/simulate --help``."""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests.simulator, and tests.simulation for --planted

from tests.simulator.many_seeds import Tally, run_seeds
from tests.simulator.scenario import draw_scenario
from tests.simulator.shrinking import TRIES, TRIES_AT_ONCE, smallest
from tests.simulator.strikes import parse_strike, run_strike, strikes
from tests.simulator.strikes import tell as tell_strike


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/simulate", description="Run the production code on a model of etcd, in virtual time, with faults."
    )
    parser.add_argument("--schedules", type=int, default=2000, metavar="N", help="how run_seeds seeds (default 2000)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="the first seed (default 1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per processor)")
    parser.add_argument(
        "--within",
        type=float,
        metavar="SECONDS",
        help="fail if it takes longer than this (of the clock on the wall: give it the machine alone)",
    )
    parser.add_argument(
        "--replay",
        type=int,
        metavar="SEED",
        help="run this seed alone, and tell the smallest scenario that breaches the same",
    )
    parser.add_argument("--tries", type=int, default=TRIES, help=f"runs to make a replayed scenario smaller ({TRIES})")
    parser.add_argument("--points", action="store_true", help="instead: every strike at every crash point")
    parser.add_argument(
        "--strike",
        nargs=4,
        metavar=("REFERENCE", "NUMBER", "ACTION", "MOMENT"),
        help="run one of these strikes, and tell its story",
    )
    parser.add_argument(
        "--planted",
        nargs="*",
        metavar="BUG",
        help="instead: look for each planted bug, or for these, in the schedules, until one shows it; nothing is chosen"
        " for a bug, and one that is found only where something is, is said to be",
    )
    wanted = parser.parse_args(args)
    if wanted.strike:
        try:
            breached, lines = tell_strike(parse_strike(*wanted.strike))
        except ValueError as error:
            parser.error(str(error))
        print(*lines, sep="\n")
        return 1 if breached else 0
    if wanted.points:
        return points(wanted.jobs)
    if wanted.replay is not None:
        return replay(wanted.replay, wanted.tries)
    if wanted.planted is not None:
        return planted(wanted.planted, wanted.seed, wanted.schedules, wanted.jobs)
    return schedules(range(wanted.seed, wanted.seed + wanted.schedules), wanted.jobs, wanted.within)


def schedules(seeds: Sequence[int], jobs: int, within: float | None) -> int:
    """Run these seeds. The first that breaches something is made smaller at once."""
    begun = time.perf_counter()
    tally = Tally()
    for outcome in run_seeds(seeds, jobs):
        if outcome.timelines:
            print(f"seed {outcome.seed}:", *outcome.timelines, sep="\n", flush=True)
            if not tally.broken:
                print(*smallest(draw_scenario(outcome.seed), TRIES_AT_ONCE), sep="\n", flush=True)
        tally.outcomes.append(outcome)
    took = time.perf_counter() - begun
    print(*tally.lines(), sep="\n")
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = spent.ru_utime + spent.ru_stime
    print(f"{used:.0f} s of processor time, {1000 * used / len(seeds):.0f} ms for each")
    late = within is not None and took > within
    if late:
        print(f"it took {took:.0f} s, and was to take {within:g} s at most")
    return 1 if tally.broken or late else 0


def replay(seed: int, tries: int) -> int:
    """Tell the story of the seed as it is made smaller; of all of it with no tries."""
    told = smallest(draw_scenario(seed), tries)
    print(*(told or [f"seed {seed}: nothing is breached"]), sep="\n")
    return 1 if told else 0


def points(jobs: int) -> int:
    listed = strikes()
    outcomes = []
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for struck in pool.imap_unordered(run_strike, listed.all(), chunksize=16):
            outcomes.append(struck)
            if struck.timelines:
                print(*struck.timelines, sep="\n", flush=True)
    print(*listed.figures(outcomes), sep="\n")
    return 1 if any(struck.timelines for struck in outcomes) else 0


def planted(names: Sequence[str], first: int, count: int, jobs: int) -> int:
    """Look for planted bugs; 1 where one is not found for which tests/simulation chooses nothing."""
    from tests.simulation.bug_search import BUGS, generally

    if unknown := set(names) - {bug.name for bug in BUGS}:
        raise SystemExit(f"no bug of this name is planted: {', '.join(sorted(unknown))}")
    listed = [bug.name for bug in BUGS if not names or bug.name in names]
    missed = found = 0
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        search = functools.partial(generally, first=first, count=count)
        for bug, find in pool.imap_unordered(search, listed):
            found += find is not None
            missed += find is None and not bug.chosen
            how = "needs chosen faults or scenarios" if bug.chosen else "not found"
            print(f"{bug.name}: {find or how}", flush=True)
    print(f"{found} of {len(listed)} are found in the schedules {first} to {first + count - 1}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
