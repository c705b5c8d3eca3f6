"""Wide fan-in: one graph of many one-job operations and a join that waits for all of them.

The time is linear in the number of predecessors if the jobs per second stay constant.
"""

from __future__ import annotations

import time

from benchmarks.common import Cluster, EtcdProbe, Result, Row, cluster, report_progress
from distop import Start, chord

LAKEFS = "the design of lakeFS mentions 50-80 s for 50,000"


def run(predecessors: tuple[int, ...] = (1_000, 5_000, 20_000, 50_000), executors: int = 2) -> Result:
    """One graph of each size, each on a new cluster."""
    rows: list[Row] = []
    samples: dict[str, list[float]] = {}
    version = ""
    rates: list[float] = []
    for count in predecessors:
        with cluster(executors) as bench:
            version = EtcdProbe(bench.endpoint).version()
            _graph(bench, 50)
            inserted, ended = _graph(bench, count)
        samples[str(count)] = [inserted, ended]
        rates.append(count / ended)
        note = LAKEFS if count == 50_000 else f"inserted after {inserted:.1f} s"
        rows.append(Row(f"{count:,} predecessors, call to the join's end", ended, "s", note=note))
        rows.append(Row("the same as a rate", rates[-1], "jobs/s"))
        report_progress(f"fan-in of {count:,}: inserted after {inserted:.1f} s, joined after {ended:.1f} s")
    rows.append(Row("rate of the largest graph, relative to the smallest", rates[-1] / rates[0], "×"))
    settings = {"predecessors": list(predecessors), "executors": executors, "etcd": version}
    return Result("fan-in", settings, rows, samples)


def _graph(bench: Cluster, count: int) -> tuple[float, float]:
    """Seconds until the graph is inserted, and until its join has ended."""
    graph = chord([Start("noop", "@cluster", {}) for _ in range(count)], Start("join", "@cluster"))
    began = time.perf_counter()
    ops = bench.client.start_operations(graph)
    inserted = time.perf_counter() - began
    done = ops[-1].wait(1_800)
    ended = time.perf_counter() - began
    if done.state != "success":
        raise RuntimeError(f"The join ended as {done.state}")
    bench.wait_for_cleanup()
    return inserted, ended
