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
from tests.simulator.strikes import describe_strike, parse_strike, run_strike, strikes


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/simulate", description="Run the production code on a model of etcd, in virtual time, with faults."
    )
    parser.add_argument("--schedules", type=int, default=2000, metavar="N", help="number of seeds (default 2000)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="the first seed (default 1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per processor)")
    parser.add_argument(
        "--within",
        type=float,
        metavar="SECONDS",
        help="fail if the run takes longer (in real time, so run nothing else meanwhile)",
    )
    parser.add_argument(
        "--replay",
        type=int,
        metavar="SEED",
        help="run only this seed, and print the smallest scenario with the same kind of breach",
    )
    parser.add_argument(
        "--tries", type=int, default=TRIES, help=f"maximum runs to shrink a replayed scenario (default {TRIES})"
    )
    parser.add_argument("--points", action="store_true", help="run every strike (a fault at a crash point) instead")
    parser.add_argument(
        "--strike",
        nargs=4,
        metavar=("REFERENCE", "NUMBER", "ACTION", "MOMENT"),
        help="run one of these strikes, and print its timeline",
    )
    parser.add_argument(
        "--planted",
        nargs="*",
        metavar="BUG",
        help="search for all planted bugs, or for these, in drawn schedules instead; fails if one is not found",
    )
    parser.add_argument(
        "--own-scene", action="store_true", help="search for a planted bug only in schedules that draw its scene"
    )
    options = parser.parse_args(args)
    if options.strike:
        try:
            breached, lines = describe_strike(parse_strike(*options.strike))
        except ValueError as error:
            parser.error(str(error))
        print(*lines, sep="\n")
        return 1 if breached else 0
    if options.points:
        return points(options.jobs)
    if options.replay is not None:
        return replay(options.replay, options.tries)
    if options.planted is not None:
        return planted(options.planted, options.seed, options.schedules, options.jobs, options.own_scene)
    return schedules(range(options.seed, options.seed + options.schedules), options.jobs, options.within)


def schedules(seeds: Sequence[int], jobs: int, within: float | None) -> int:
    """Run these seeds. The first scenario with a breach is shrunk at once."""
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
    print(f"{used:.0f} s of processor time, {1000 * used / len(seeds):.0f} ms per schedule")
    late = within is not None and took > within
    if late:
        print(f"the run took {took:.0f} s, more than the limit of {within:g} s")
    return 1 if tally.broken or late else 0


def replay(seed: int, tries: int) -> int:
    """Shrink the scenario of a seed in at most ``tries`` runs, and print its timeline."""
    lines = smallest(draw_scenario(seed), tries)
    print(*(lines or [f"seed {seed}: no breach"]), sep="\n")
    return 1 if lines else 0


def points(jobs: int) -> int:
    """Run all strikes."""
    listed = strikes()
    outcomes = []
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for struck in pool.imap_unordered(run_strike, listed.all(), chunksize=16):
            outcomes.append(struck)
            if struck.timelines:
                print(*struck.timelines, sep="\n", flush=True)
    print(*listed.figures(outcomes), sep="\n")
    return 1 if any(struck.timelines for struck in outcomes) else 0


def planted(names: Sequence[str], first: int, count: int, jobs: int, own_scene: bool) -> int:
    """Search for planted bugs. Returns 1 if one is not found."""
    from tests.simulation.bug_search import BUGS, search_freely

    if unknown := set(names) - {bug.name for bug in BUGS}:
        raise SystemExit(f"unknown bugs: {', '.join(sorted(unknown))}")
    listed = [bug.name for bug in BUGS if not names or bug.name in names]
    found = 0
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        search = functools.partial(search_freely, first=first, count=count, own_scene=own_scene)
        for bug, find in pool.imap_unordered(search, listed):
            found += find is not None
            print(f"{bug.name}: {find or f'not found (recorded seed: {bug.drawn_seed})'}", flush=True)
    print(f"found {found} of {len(listed)} bugs in schedules {first} to {first + count - 1}")
    return 0 if found == len(listed) else 1


if __name__ == "__main__":
    sys.exit(main())
