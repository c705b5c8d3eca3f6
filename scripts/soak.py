"""All kinds of faults at random, for as long as it is told: ``scripts/soak --minutes N --seed S``.

Three members of etcd, four executors (Spark in one of them) and a stream of operations of every kind. etcd's history is
audited as it grows; at the end everything is healed, every operation has to end, and what was written is compared with
what the outcomes name. Prints the counts and the slope of the daemons' memory. Exit code 1 on a violation, on data that
is not what it should be, or on an operation that does not end.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests.support

from soaking.cluster import SoakCluster
from soaking.faults import Faults
from soaking.stream import Stream


def say(text: str) -> None:
    """A line of progress, with the seconds since the start."""
    print(f"{time.monotonic() - _BEGAN:7.1f}  {text}", file=sys.stderr, flush=True)


_BEGAN = time.monotonic()


def main() -> int:
    """Soak; the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long faults happen (10)")
    parser.add_argument("--seed", type=int, default=1, help="of everything that is drawn (1)")
    parser.add_argument("--ttl", type=int, default=6, help="the executors' time to live (6)")
    parser.add_argument("--no-spark", action="store_true", help="leave Spark out")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the logs")
    given = parser.parse_args()
    os.environ["DISTOP_ACCEPT_ETCD_DEFECTS"] = "1"  # the etcd at hand may be one that daemons refuse
    folder = Path(tempfile.mkdtemp(prefix="distop-soak-"))
    say(f"seed {given.seed}, {given.minutes:g} minutes, logs in {folder}")
    rng = random.Random(given.seed)
    with SoakCluster(folder, given.ttl, spark=not given.no_spark) as cluster:
        stream, faults = Stream(cluster, rng, say), Faults(cluster, rng, say)
        end = time.monotonic() + given.minutes * 60
        while time.monotonic() < end and cluster.audit.violation is None and cluster.failure is None:
            stream.tend()
            faults.tend()
            cluster.measure()
            time.sleep(0.1)
        say("healing everything")
        faults.heal()
        problems = stream.finish()
        problems += cluster.finish()
    memory = cluster.memory()
    audit = cluster.audit
    if audit.violation is not None:
        problems.insert(0, "\n  ".join([str(audit.violation), *audit.violation.story]))
    print(f"faults: {faults.total} ({', '.join(f'{name} {n}' for name, n in sorted(faults.counts.items()))})")
    print(f"operations: {stream.started} started ({', '.join(f'{n} {s}' for s, n in sorted(stream.ended().items()))})")
    totals = audit.totals
    print(
        f"audit: revisions {totals.first} to {totals.last}, {totals.changes:,} changes, {totals.operations:,} "
        f"operations, {totals.jobs:,} jobs, compacted unseen: {totals.lost or 'nothing'}"
    )
    print(f"data: {stream.compared} outcomes compared with what they name")
    for line in memory:
        print(f"memory: {line}")
    for problem in problems:
        print(f"PROBLEM: {problem}")
    print("clean" if not problems else f"{len(problems)} problems; logs in {folder}")
    if not problems and not given.keep:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)
    return 1 if problems else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
