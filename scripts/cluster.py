"""A Spark standalone cluster on this machine for trying out and testing: ``scripts/cluster up|down|status``.

``up`` starts a master and two workers of the installed PySpark, unless they run, and prints the options for an
executor: ``distop executor $(scripts/cluster up)``. All files are in ``.cluster`` of this clone: logs, pid files, the
workers' folders. The cluster listens on the loopback interface only. Exit code 1 if it cannot be started, or, for
``status``, if a process does not run.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from standalone import Size, Standalone, StandaloneError, options

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/cluster", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / ".cluster", help="the cluster's folder (.cluster)")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start the missing processes; prints the options for an executor")
    up.add_argument("--workers", type=int, default=2, help="number of workers (2)")
    up.add_argument("--cores", type=int, help="cores of each worker (this machine's, divided)")
    up.add_argument("--memory", default="1g", help="memory of each worker for Spark executors (1g)")
    commands.add_parser("down", help="stop the cluster")
    commands.add_parser("status", help="print which processes run")
    given = parser.parse_args()
    cluster = Standalone(given.folder)
    if given.command == "down":
        ended = cluster.down()
        print(f"{ended} processes were stopped" if ended else "no process was running", file=sys.stderr)
        return 0
    if given.command == "status":
        return _status(cluster)
    if given.workers < 1 or (given.cores is not None and given.cores < 1):
        parser.error("at least one worker with at least one core is needed")
    cores = given.cores or max(1, (os.cpu_count() or 1) // given.workers)
    try:
        url = cluster.up(Size(given.workers, cores, given.memory))
    except StandaloneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{given.workers} workers run; their logs are in {cluster.folder}", file=sys.stderr)
    print(" ".join(options(url)))
    return 0


def _status(cluster: Standalone) -> int:
    parts = cluster.parts()
    for part in parts:
        state = f"runs (process {part.pid})" if part.pid else f"does not run, see {part.log}"
        print(f"{part.name}: {state}", file=sys.stderr)
    whole = bool(parts) and all(part.pid for part in parts)
    if whole:
        print(" ".join(options(cluster.url)))
    elif not parts:
        print("no cluster was started: run scripts/cluster up", file=sys.stderr)
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
