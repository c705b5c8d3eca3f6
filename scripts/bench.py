"""Measures distop's speed and size: ``scripts/bench NAME``, one benchmark or all.

Prints a table, or with ``--json`` one JSON document; progress goes to stderr. Both values of a ratio come from the same
run. With ``--check`` the exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests.support

from benchmarks import (
    coordination,
    delta,
    failover,
    fanin,
    iceberg,
    index,
    lakes,
    latency,
    maintenance,
    many,
    operations,
    peers,
    service,
    size,
    skew,
    starts,
    storage,
    unique,
    validate,
    waiting,
)
from benchmarks.common import Result, document, machine, show

from distop.runtime import logs

RUNS = {
    "coordination": coordination.run,
    "latency": latency.run,
    "starts": starts.run,
    "operations": operations.run,
    "fan-in": fanin.run,
    "waiting": waiting.run,
    "validate": validate.run,
    "iceberg": iceberg.FORMAT.run,
    "delta": delta.FORMAT.run,
    "unique": unique.run,
    "many": many.run,
    "index": index.run,
    "skew": skew.run,
    "storage": storage.run,
    "lakes": lakes.run,
    "maintenance": maintenance.run,
    "service": service.run,
    "peers": peers.run,
    "size": size.run,
    "failover": failover.run,
}
SEVERAL = {"behaviors": ("validate", "iceberg", "delta", "unique", "many", "index", "skew"), "all": tuple(RUNS)}


def main() -> int:
    """Run the benchmarks that the command line names; returns the exit code."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON document")
    common.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser = argparse.ArgumentParser(prog="scripts/bench", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    cases = {"cases": validate.CASE_NAMES}
    for name, what, options in (
        ("coordination", "jobs per second, relative to raw etcd", {"jobs": 10_000, "executors": 2, "runs": 5}),
        ("latency", "time from the start call of a one-job operation to its result", {"runs": 200}),
        ("starts", "starts per second on one table, by one caller and by many", {"starts": 800, "runs": 5}),
        (
            "operations",
            "operations of one job, started by several clients",
            {"operations": 10_000, "clients": 4, "executors": 2, "runs": 3},
        ),
        ("fan-in", "a join of many operations", {"predecessors": (1_000, 5_000, 20_000, 50_000), "executors": 2}),
        (
            "waiting",
            "very many operations that wait for a scheduled time",
            {"waiting": 100_000, "probes": 100, "seconds": 30.0, "executors": 2},
        ),
        ("validate", "validate, relative to hand-written Spark SQL", {"scale": 1.0, "runs": 7, "lives": 3, **cases}),
        ("iceberg", "the same on an Iceberg table", {"scale": 1.0, "runs": 7, "lives": 3, **cases}),
        ("delta", "the same on a Delta table", {"scale": 1.0, "runs": 7, "lives": 3, **cases}),
        ("unique", "unique and references, relative to hand-written Spark SQL", {"scale": 1.0, "runs": 5, "lives": 1}),
        ("many", "validate on thousands of partitions", {"partitions": 10_000, "runs": 7}),
        (
            "index",
            "build-index and lookup, relative to hand-written Spark code",
            {"scale": 1.0, "runs": 7, "formats": index.FORMATS},
        ),
        ("skew", "partitions of very different sizes on two executors", {"megabytes": 300, "tiny": 2_000, "runs": 7}),
        (
            "storage",
            "validate from statistics on S3, relative to bare requests and a local folder",
            {"files": 10_000, "runs": 5},
        ),
        (
            "lakes",
            "validate, build-index and lookup on S3, relative to a local folder",
            {"files": 1_000, "runs": 5, "formats": lakes.FORMATS},
        ),
        (
            "maintenance",
            "compact (whole, killed), expire-snapshots, remove-orphans, export, policies: relative to other programs",
            {"scale": 0.2, "runs": 3, "tables": 10_000, "cases": maintenance.CASES},
        ),
        (
            "service",
            "calls through a service, relative to the direct client",
            {"runs": 200, "starts": 800, "rounds": 5},
        ),
        (
            "peers",
            "no-op jobs beside Celery, Temporal and Dagster, and validate beside Great Expectations",
            {"jobs": 2_000, "runs": 3, "scale": 1.0, "environments": peers.ENVIRONMENTS, "cases": peers.CASES},
        ),
        ("size", "import time, memory, a very large operation", {"partitions": 100_000}),
        ("failover", "executors killed and stopped while they run jobs", {"runs": 50, "ttl": (10,)}),
        ("behaviors", "operation types, relative to hand-written code: " + ", ".join(SEVERAL["behaviors"]), {}),
        ("all", "all benchmarks", {}),
    ):
        command = commands.add_parser(name, parents=[common], help=what)
        for option, default in options.items():
            several = isinstance(default, tuple)
            kind, shown = (type(default[0]), " ".join(map(str, default))) if several else (type(default), default)
            nargs, choices = "+" if several else None, default if several and kind is str else None
            text = f"default {shown}"
            command.add_argument(f"--{option}", type=kind, nargs=nargs, choices=choices, default=default, help=text)
    given = vars(parser.parse_args())
    command, as_json, check = given.pop("command"), given.pop("json"), given.pop("check")
    values = (one for value in given.values() for one in (value if isinstance(value, list | tuple) else (value,)))
    if any(value <= 0 for value in values if not isinstance(value, str)):
        parser.error("all numbers must be greater than 0")
    where = machine()
    results: list[Result] = [RUNS[name](**given) for name in SEVERAL.get(command, (command,))]
    if as_json:
        print(document(where, results))
    else:
        show(where, results)
    return 1 if check and any(result.missed for result in results) else 0


if __name__ == "__main__":
    # SIGTERM also stops the started processes.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logs.configure("warning")
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
