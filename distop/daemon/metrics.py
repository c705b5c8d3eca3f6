"""Prometheus metrics of a daemon (lakeFS L27), served by the HTTP thread of the Prometheus library.

Imported only with ``--metrics HOST:PORT``. docs/how-to/monitor.md lists the metrics.

The daemon's loop updates counters. Gauges are read at each scrape: the HTTP thread asks the loop, waits shortly, and
serves the previous values if the loop is busy; so a scrape never delays the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from concurrent.futures import TimeoutError as NoAnswer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from distop import __version__
from distop.daemon.meter import Gauges, Meter
from distop.errors import InvalidArgument
from distop.worker.guardian import session_members

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Iterator
    from wsgiref.simple_server import WSGIServer

    from prometheus_client.metrics_core import Metric

ASK = 1.0
"""Maximum seconds for which a scrape waits for the loop."""
COMMIT_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
JOB_BUCKETS = (0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0)
LAG_BUCKETS = (0, 1, 2, 5, 10, 50, 100, 500, 1000, 5000)


class Metrics(Meter):
    """The metrics of one daemon with all its incarnations, in a separate registry."""

    def __init__(self, executor_id: str) -> None:
        self._executor = executor_id
        self._gauges: Callable[[], Gauges] | None = None
        self._last = Gauges()
        self._restarts = 0
        """Child restarts of previous incarnations."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None
        disable_created: Any = prometheus.disable_created_metrics  # has no type annotations
        disable_created()  # no second series per metric with the start time
        self.registry = prometheus.CollectorRegistry()
        self._jobs = self._counter("distop_jobs_total", "Jobs that ended on this executor.", "type", "outcome")
        self._seconds = self._histogram(
            "distop_job_attempt_duration_seconds", "Duration of attempts that ended jobs.", JOB_BUCKETS, "type"
        )
        self._claims = self._counter("distop_claims_total", "Claims won.", "type")
        self._takeovers = self._counter("distop_takeovers_total", "Claims taken over from lost executors.", "type")
        self._retries = self._counter("distop_job_retries_total", "Failed attempts that will be repeated.", "type")
        self._reports = self._counter("distop_reports_total", "Writes under a claim's fence.", "result")
        self._commits = self._counter("distop_commits_total", "Transactions sent to etcd.", "transaction", "result")
        self._latency = self._histogram(
            "distop_commit_duration_seconds",
            "Time from sending a transaction to its known outcome.",
            COMMIT_BUCKETS,
            "transaction",
        )
        self._lag = self._histogram(
            "distop_watch_lag_revisions",
            "Revisions by which received events were behind the newest known revision of etcd.",
            LAG_BUCKETS,
            "watch",
        )
        self._stages = self._counter("distop_stages_removed_total", "Stages that were removed.", "type")
        self._stage_bytes = self._counter(
            "distop_stage_bytes_removed_total", "Bytes of the files of removed stages.", "type"
        )
        self._sessions = self._counter("distop_sessions_total", "etcd sessions that this daemon has started.")
        self.registry.register(_GaugeCollector(self._collect))

    def _counter(self, name: str, text: str, *labels: str) -> prometheus.Counter:
        return prometheus.Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> prometheus.Histogram:
        return prometheus.Histogram(name, text, labels, buckets=buckets, registry=self.registry)

    # ------------------------------------------------------------- called in the loop

    def job_ended(self, type_name: str, outcome: str, seconds: float) -> None:
        self._jobs.labels(type_name, outcome).inc()
        self._seconds.labels(type_name).observe(max(0.0, seconds))

    def jobs_lost(self, type_name: str, jobs: int) -> None:
        self._jobs.labels(type_name, "lost").inc(jobs)

    def claimed(self, type_name: str, jobs: int, taken_over: int) -> None:
        self._claims.labels(type_name).inc(jobs)
        self._takeovers.labels(type_name).inc(taken_over)

    def retried(self, type_name: str) -> None:
        self._retries.labels(type_name).inc()

    def reported(self, applied: int, late: int) -> None:
        self._reports.labels("applied").inc(applied)
        self._reports.labels("late").inc(late)

    def committed(self, label: str, seconds: float, outcome: str) -> None:
        self._commits.labels(label, outcome).inc()
        self._latency.labels(label).observe(seconds)

    def stages_removed(self, type_name: str, stages: int, size: int) -> None:
        self._stages.labels(type_name).inc(stages)
        self._stage_bytes.labels(type_name).inc(size)

    def events_received(self, watch: str, behind: int) -> None:
        self._lag.labels(watch).observe(max(0, behind))

    def begin(self, gauges: Callable[[], Gauges]) -> None:
        self._gauges = gauges
        self._sessions.inc()

    def end(self) -> None:
        """The incarnation has ended."""
        if self._gauges is not None:
            self._restarts += self._gauges().child_restarts
            self._gauges, self._last = None, Gauges()

    # ------------------------------------------------------------- serving

    def serve(self, host: str, port: int) -> int:
        """Start serving ``/metrics``; returns the port. Raises InvalidArgument if the address cannot be used."""
        self._loop = asyncio.get_running_loop()
        try:
            self._server, self._thread = prometheus.start_http_server(port, host, self.registry)
        except OSError as error:
            reason = error.strerror or str(error)
            raise InvalidArgument(
                f"cannot serve metrics at {host}:{port} ({reason}): give another address with --metrics"
            ) from None
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = self._thread = None

    # ------------------------------------------------------------- called in the HTTP thread

    def _collect(self) -> Iterable[Metric]:
        now = self._ask()
        yield _gauge("distop_executor_info", "Names of the daemon.", {
            (self._executor, now.incarnation, __version__): 1}, "executor", "incarnation", "version")  # fmt: skip
        yield _gauge("distop_session_lease_remaining_seconds", "Time until the session ends without renewals.", {
            (): now.lease_seconds})  # fmt: skip
        yield _gauge("distop_slots", "Maximum concurrent jobs or batches.", {(): now.slots})
        yield _gauge("distop_slots_busy", "Slots in use.", {(): now.slots_busy})
        coordinated = "Operations that this daemon coordinates."
        yield _gauge("distop_coordinated_operations", coordinated, now.operations, "type", "stage")
        yield _gauge("distop_watch_silence_seconds", "Time since a watch's last response.", {
            (name,): seconds for name, seconds in now.silent.items()}, "watch")  # fmt: skip
        restarts = CounterMetricFamily("distop_child_restarts", "Worker processes that died or were killed.")
        restarts.add_metric((), self._restarts + now.child_restarts)
        yield restarts
        yield _gauge("distop_child_memory_bytes", "Resident memory of the worker process, its JVM and workers.", {
            (): resident(session_members(now.child_session)) if now.child_session else 0})  # fmt: skip

    def _ask(self) -> Gauges:
        if self._loop is not None:
            with contextlib.suppress(NoAnswer, RuntimeError):  # the loop is busy, or closed
                self._last = asyncio.run_coroutine_threadsafe(self._read(), self._loop).result(ASK)
        return self._last

    async def _read(self) -> Gauges:
        return self._gauges() if self._gauges is not None else Gauges()


class _GaugeCollector:
    """A collector of the Prometheus library that reads the gauges at each scrape."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        yield from self._collect()

    def describe(self) -> Iterator[Metric]:
        """Nothing; otherwise the library would query the loop during the registration."""
        yield from ()


def _gauge(name: str, text: str, values: Any, *labels: str) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def resident(pids: Iterable[int]) -> int:
    """The resident memory of processes in bytes; shared pages count for each process."""
    total, size = 0, os.sysconf("SC_PAGE_SIZE")
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * size
    return total
