"""Partitions of a no-op asset of Dagster. Prints their rate as JSON. Run by an environment with the package dagster.

The partitions are materialized in this process, one run for each, with an instance on a disk. Dagster's own backfills
start a process for each run, and so are slower.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time

import dagster as dg

MOST = 50
"""Partitions that are measured: a run takes a large part of a second."""


def main() -> None:
    """Materialize the partitions."""
    options = json.loads(sys.argv[1])
    count = min(MOST, options["jobs"])
    keys = [f"p{n}" for n in range(count)]

    @dg.asset(partitions_def=dg.StaticPartitionsDefinition(keys))
    def noop() -> None:
        """The job."""

    quiet = {"loggers": {"console": {"config": {"log_level": "ERROR"}}}}
    with tempfile.TemporaryDirectory() as folder, dg.DagsterInstance.local_temp(folder) as instance:
        dg.materialize([noop], partition_key=keys[0], instance=instance, run_config=quiet)
        began = time.perf_counter()
        for key in keys:
            if not dg.materialize([noop], partition_key=key, instance=instance, run_config=quiet).success:
                raise RuntimeError(f"{key} failed")
        rate = count / (time.perf_counter() - began)
    print(json.dumps({"partitions of one no-op asset, a run each": rate}))


if __name__ == "__main__":
    main()
