"""Run seeded schedules of the simulator; see ``scripts/simulate --help``."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys

from distop.testing.simulation.many import Tally, many
from distop.testing.simulation.run import quietly
from distop.testing.simulation.scenario import scenario
from distop.testing.simulation.shrinking import TRIES, shrink, tell
from distop.testing.simulation.strikes import checked, one_strike, strikes
from distop.testing.simulation.strikes import tell as tell_strike


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/simulate", description="Run the production code on a model of etcd, in virtual time, with faults."
    )
    parser.add_argument("--schedules", type=int, default=2000, metavar="N", help="how many seeds (default 2000)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="the first seed (default 1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per processor)")
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
    wanted = parser.parse_args()
    if wanted.strike:
        try:
            breached, lines = tell_strike(checked(*wanted.strike))
        except ValueError as error:
            parser.error(str(error))
        print(*lines, sep="\n")
        return 1 if breached else 0
    if wanted.points:
        return points(wanted.jobs)
    if wanted.replay is not None:
        return replay(wanted.replay, wanted.tries)
    tally = Tally()
    for outcome in many(range(wanted.seed, wanted.seed + wanted.schedules), wanted.jobs):
        tally.outcomes.append(outcome)
        if outcome.stories:
            print(f"seed {outcome.seed}:", *outcome.stories, sep="\n", flush=True)
    print(*tally.lines(), sep="\n")
    return 1 if tally.broken else 0


def replay(seed: int, tries: int) -> int:
    """Tell the story of the seed as it is made smaller; of all of it with no tries."""
    with quietly():
        wanted = scenario(seed)
        shrunk = shrink(wanted, tries=tries)
        if shrunk is None:
            print(f"seed {seed}: nothing is breached")
            return 0
        print(*tell(shrunk, wanted), sep="\n")
    return 1


def points(jobs: int) -> int:
    listed = strikes()
    outcomes = []
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for struck in pool.imap_unordered(one_strike, listed.all(), chunksize=16):
            outcomes.append(struck)
            if struck.stories:
                print(*struck.stories, sep="\n", flush=True)
    print(*listed.figures(outcomes), sep="\n")
    return 1 if any(struck.stories for struck in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
