"""Import time, start-up time, memory, and an operation with very many jobs."""

from __future__ import annotations

import json
import subprocess
import sys
import time

from benchmarks.common import PROGRAM, EtcdProbe, Result, Row, cluster, median, report_progress
from distop.protocol.records import TableRecord

TABLE = "bench.large"
HEAVY = ("pyspark", "pyarrow", "grpc", "pydantic")
IMPORTS = 9
HELPS = 5

_IMPORT = """
import json, sys, time
before = time.perf_counter()
import distop
seconds = time.perf_counter() - before
print(json.dumps([seconds, [name for name in %r if name in sys.modules]]))
"""


def run(partitions: int = 100_000) -> Result:
    """Measure all; the large operation runs on one new executor."""
    result = Result("size", {"partitions": partitions})
    _imports(result)
    _help(result)
    _large(result, partitions)
    return result


def _imports(result: Result) -> None:
    seconds: list[float] = []
    heavy: set[str] = set()
    for _ in range(IMPORTS):
        done = subprocess.run([sys.executable, "-c", _IMPORT % (HEAVY,)], capture_output=True, text=True, check=True)
        took, loaded = json.loads(done.stdout)
        seconds.append(1000 * took)
        heavy.update(loaded)
    result.samples["import"] = [ms / 1000 for ms in seconds]
    result.rows.append(Row("import distop", median(seconds), "ms", 100))
    result.rows.append(
        Row("heavy modules loaded by it", len(heavy), "", 0, note=", ".join(sorted(heavy)) or f"of {', '.join(HEAVY)}")
    )


def _help(result: Result) -> None:
    seconds: list[float] = []
    for _ in range(HELPS):
        began = time.perf_counter()
        subprocess.run([*PROGRAM, "--help"], capture_output=True, check=True)
        seconds.append(time.perf_counter() - began)
    result.samples["help"] = seconds
    result.rows.append(Row("distop --help", median(seconds), "s", 0.5))


def _large(result: Result, partitions: int) -> None:
    with cluster(1) as bench:
        executor, etcd = bench.executors[0], EtcdProbe(bench.endpoint)
        result.settings["etcd"] = etcd.version()
        result.rows.append(Row("daemon, resident before its first job", executor.memory("VmRSS"), "MB", 80))
        bench.client.add_table(TableRecord(TABLE, "parquet", "/nowhere"), check=False)
        report_progress(f"size: a no-op operation of {partitions:,} partitions")
        began = time.perf_counter()
        done = bench.client.start_operation("noop", TABLE, {"jobs": partitions}).wait(1_800)
        seconds = time.perf_counter() - began
        finished = done.state == "success" and done.jobs["success"] == partitions
        bench.wait_for_cleanup()
        cleaned = time.perf_counter() - began
        note = f"{done.state}, {done.jobs['success']:,} jobs, in {seconds:.1f} s; cleaned up after {cleaned:.1f} s"
        result.samples["large"] = [seconds]
        result.rows += [
            Row(f"{partitions:,} partitions finished", float(finished), "", 1, at_most=False, note=note),
            Row("daemon, peak resident memory", executor.memory("VmHWM"), "MB", 300),
            Row("etcd's database file afterwards", etcd.db_size() / 1e6, "MB", 300),
        ]
