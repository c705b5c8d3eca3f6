"""Prometheus metrics of a daemon (lakeFS L27), served by the library's own HTTP thread. Imported where they are wanted
alone: ``--metrics HOST:PORT``. docs/how-to/monitor.md lists them.

Counters are moved in the daemon's loop. What stands for a moment is asked for when somebody scrapes: the HTTP thread
asks the loop, waits for it a little, and tells what it was told last where the loop has no time; so no scrape holds it
up.
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
"""Seconds for which a scrape waits for the loop."""
COMMIT_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
JOB_BUCKETS = (0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0)
LAG_BUCKETS = (0, 1, 2, 5, 10, 50, 100, 500, 1000, 5000)


class Metrics(Meter):
    """The metrics of one daemon, through all of its incarnations. In a registry of its own: what else runs in the
    process has nothing to do with it.
    """

    def __init__(self, executor_id: str) -> None:
        self._executor = executor_id
        self._gauges: Callable[[], Gauges] | None = None
        self._last = Gauges()
        self._restarts = 0
        """Of the children of former incarnations."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None
        disable_created: Any = prometheus.disable_created_metrics  # it has no types
        disable_created()  # a second series for each, which tells when the daemon was started
        self.registry = registry = prometheus.CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> prometheus.Counter:
            return prometheus.Counter(name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> prometheus.Histogram:
            return prometheus.Histogram(name, text, labels, buckets=buckets, registry=registry)

        self._jobs = counter("distop_jobs_total", "Jobs that ended here.", "type", "outcome")
        self._seconds = histogram(
            "distop_job_attempt_duration_seconds", "How long the attempts took that ended jobs.", JOB_BUCKETS, "type"
        )
        self._claims = counter("distop_claims_total", "Claims won.", "type")
        self._takeovers = counter("distop_takeovers_total", "Claims taken over from lost executors.", "type")
        self._retries = counter("distop_job_retries_total", "Jobs that broke here and are to be tried again.", "type")
        self._reports = counter("distop_reports_total", "Writes under a claim's fence.", "result")
        self._commits = counter("distop_commits_total", "Transactions sent to etcd.", "transaction", "result")
        self._latency = histogram(
            "distop_commit_duration_seconds",
            "From sending a transaction to its known outcome.",
            COMMIT_BUCKETS,
            "transaction",
        )
        self._lag = histogram(
            "distop_watch_lag_revisions",
            "Revisions by which events were behind what etcd was known to have when they arrived.",
            LAG_BUCKETS,
            "watch",
        )
        self._sessions = counter("distop_sessions_total", "Sessions in etcd that this daemon has begun.")
        registry.register(_Moment(self._collect))

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

    def heard(self, watch: str, behind: int) -> None:
        self._lag.labels(watch).observe(max(0, behind))

    def begin(self, gauges: Callable[[], Gauges]) -> None:
        self._gauges = gauges
        self._sessions.inc()

    def over(self) -> None:
        """It has ended."""
        if self._gauges is not None:
            self._restarts += self._gauges().child_restarts
            self._gauges, self._last = None, Gauges()

    # ------------------------------------------------------------- serving

    def serve(self, host: str, port: int) -> int:
        """Serve ``/metrics`` from now on; the port. Raises InvalidArgument where it cannot be had."""
        self._loop = asyncio.get_running_loop()
        try:
            self._server, self._thread = prometheus.start_http_server(port, host, self.registry)
        except OSError as error:
            reason = error.strerror or str(error)
            raise InvalidArgument(
                f"metrics cannot be served at {host}:{port} ({reason}): choose another place with --metrics"
            ) from None
        return int(self._server.server_port)

    def close(self) -> None:
        """Serve no longer."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = self._thread = None

    # ------------------------------------------------------------- called in the HTTP thread

    def _collect(self) -> Iterable[Metric]:
        now = self._ask()
        yield _gauge("distop_executor_info", "The daemon.", {
            (self._executor, now.incarnation, __version__): 1}, "executor", "incarnation", "version")  # fmt: skip
        yield _gauge("distop_session_lease_remaining_seconds", "Until the session ends if no renewal is answered.", {
            (): now.lease_seconds})  # fmt: skip
        yield _gauge("distop_slots", "Jobs or batches that may run here at once.", {(): now.slots})
        yield _gauge("distop_slots_busy", "Slots that are taken.", {(): now.slots_busy})
        coordinated = "Operations that this daemon coordinates."
        yield _gauge("distop_coordinated_operations", coordinated, now.operations, "type", "stage")
        yield _gauge("distop_watch_silence_seconds", "Since a watch had its last answer.", {
            (name,): seconds for name, seconds in now.silent.items()}, "watch")  # fmt: skip
        restarts = CounterMetricFamily(
            "distop_child_restarts", "Processes that run behaviors and died or had to be killed."
        )
        restarts.add_metric((), self._restarts + now.child_restarts)
        yield restarts
        yield _gauge("distop_child_memory_bytes", "Resident memory of that process, its JVM and workers.", {
            (): resident(session_members(now.child_session)) if now.child_session else 0})  # fmt: skip

    def _ask(self) -> Gauges:
        if self._loop is not None:
            with contextlib.suppress(NoAnswer, RuntimeError):  # it is busy, or closed
                self._last = asyncio.run_coroutine_threadsafe(self._look(), self._loop).result(ASK)
        return self._last

    async def _look(self) -> Gauges:
        return self._gauges() if self._gauges is not None else Gauges()


class _Moment:
    """A collector, as the library wants it."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        yield from self._collect()

    def describe(self) -> Iterator[Metric]:
        """Nothing: the library would ask the loop while it registers this."""
        yield from ()


def _gauge(name: str, text: str, values: Any, *labels: str) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def resident(pids: Iterable[int]) -> int:
    """The resident memory of processes, in bytes; pages that they share are counted for each."""
    total, size = 0, os.sysconf("SC_PAGE_SIZE")
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * size
    return total
