"""The metrics of a daemon: their definitions, and the meter that records its work in them.

Recorders export them: Prometheus (``daemon.metrics``) and OpenTelemetry (``daemon.otel_metrics``). The daemon's loop
updates counters. Gauges are read at each export, in a thread that asks the loop, waits shortly, and takes the previous
values if the loop is busy; so an export never delays the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from concurrent.futures import TimeoutError as NoAnswer
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from distop import __version__
from distop.daemon.meter import Gauges, Meter
from distop.protocol.frozen import frozen
from distop.worker.guardian import session_members

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

ASK = 1.0
"""Maximum seconds for which an export waits for the loop."""


@frozen
class Metric:
    """A definition. A name says its unit. ``buckets``: the upper bounds of a histogram."""

    name: str
    text: str
    labels: tuple[str, ...] = ()
    kind: Literal["counter", "histogram", "gauge"] = "counter"
    buckets: tuple[float, ...] = ()


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, text, labels, "gauge")


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(name, text, labels, "histogram", buckets)


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, text, labels)


JOBS = _counter("distop_jobs_total", "Jobs that ended on this executor.", "type", "outcome")
ATTEMPTS = _histogram(
    "distop_job_attempt_duration_seconds",
    "Duration of attempts that ended jobs.",
    (0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0),
    "type",
)
CLAIMS = _counter("distop_claims_total", "Claims won.", "type")
TAKEOVERS = _counter("distop_takeovers_total", "Claims taken over from lost executors.", "type")
RETRIES = _counter("distop_job_retries_total", "Failed attempts that will be repeated.", "type")
REPORTS = _counter("distop_reports_total", "Writes under a claim's fence.", "result")
COMMITS = _counter("distop_commits_total", "Transactions sent to etcd.", "transaction", "result")
LATENCY = _histogram(
    "distop_commit_duration_seconds",
    "Time from sending a transaction to its known outcome.",
    (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
    "transaction",
)
LAG = _histogram(
    "distop_watch_lag_revisions",
    "Revisions by which received events were behind the newest known revision of etcd.",
    (0, 1, 2, 5, 10, 50, 100, 500, 1000, 5000),
    "watch",
)
STAGES = _counter("distop_stages_removed_total", "Stages that were removed.", "type")
STAGE_BYTES = _counter("distop_stage_bytes_removed_total", "Bytes of the files of removed stages.", "type")
SESSIONS = _counter("distop_sessions_total", "etcd sessions that this daemon has started.")
EVENTS = (*(JOBS, ATTEMPTS, CLAIMS, TAKEOVERS, RETRIES, REPORTS, COMMITS, LATENCY, LAG, STAGES, STAGE_BYTES, SESSIONS),)
"""The metrics that are updated when something happens."""
INFO = _gauge("distop_executor_info", "Names of the daemon.", "executor", "incarnation", "version")
LEASE = _gauge("distop_session_lease_remaining_seconds", "Time until the session ends without renewals.")
SLOTS = _gauge("distop_slots", "Maximum concurrent jobs or batches.")
BUSY = _gauge("distop_slots_busy", "Slots in use.")
COORDINATED = _gauge("distop_coordinated_operations", "Operations that this daemon coordinates.", "type", "stage")
SILENCE = _gauge("distop_watch_silence_seconds", "Time since a watch's last response.", "watch")
RESTARTS = _counter("distop_child_restarts_total", "Worker processes that died or were killed.")
MEMORY = _gauge("distop_child_memory_bytes", "Resident memory of the worker process, its JVM and workers.")
STATES = (INFO, LEASE, SLOTS, BUSY, COORDINATED, SILENCE, RESTARTS, MEMORY)
"""The metrics that are read at each export."""


class Recorder(Protocol):
    """Exports the metrics of :data:`EVENTS`."""

    def add(self, metric: Metric, amount: int, labels: tuple[str, ...]) -> None:
        """Add to a counter."""

    def observe(self, metric: Metric, value: float, labels: tuple[str, ...]) -> None:
        """Add a value to a histogram."""


class CountingMeter(Meter):
    """The metrics of one daemon with all its incarnations."""

    def __init__(self, executor_id: str) -> None:
        self._executor = executor_id
        self._recorders: tuple[Recorder, ...] = ()
        self._gauges: Callable[[], Gauges] | None = None
        self._last = Gauges()
        self._restarts = 0
        """Child restarts of previous incarnations."""
        self._loop: asyncio.AbstractEventLoop | None = None

    def record_in(self, recorder: Recorder) -> None:
        """Record what happens from now on in this recorder, too."""
        self._recorders += (recorder,)

    def ask_this_loop(self) -> None:
        """Read gauges in the running loop."""
        self._loop = asyncio.get_running_loop()

    # ------------------------------------------------------------- called in the loop

    def _add(self, metric: Metric, amount: int, *labels: str) -> None:
        for one in self._recorders:
            one.add(metric, amount, labels)

    def _observe(self, metric: Metric, value: float, *labels: str) -> None:
        for one in self._recorders:
            one.observe(metric, value, labels)

    def job_ended(self, type_name: str, outcome: str, seconds: float) -> None:
        self._add(JOBS, 1, type_name, outcome)
        self._observe(ATTEMPTS, max(0.0, seconds), type_name)

    def jobs_lost(self, type_name: str, jobs: int) -> None:
        self._add(JOBS, jobs, type_name, "lost")

    def claimed(self, type_name: str, jobs: int, taken_over: int) -> None:
        self._add(CLAIMS, jobs, type_name)
        self._add(TAKEOVERS, taken_over, type_name)

    def retried(self, type_name: str) -> None:
        self._add(RETRIES, 1, type_name)

    def reported(self, applied: int, late: int) -> None:
        self._add(REPORTS, applied, "applied")
        self._add(REPORTS, late, "late")

    def committed(self, label: str, seconds: float, outcome: str) -> None:
        self._add(COMMITS, 1, label, outcome)
        self._observe(LATENCY, seconds, label)

    def stages_removed(self, type_name: str, stages: int, size: int) -> None:
        self._add(STAGES, stages, type_name)
        self._add(STAGE_BYTES, size, type_name)

    def events_received(self, watch: str, behind: int) -> None:
        self._observe(LAG, max(0, behind), watch)

    def begin(self, gauges: Callable[[], Gauges]) -> None:
        self._gauges = gauges
        self._add(SESSIONS, 1)

    def end(self) -> None:
        """The incarnation has ended."""
        if self._gauges is not None:
            self._restarts += self._gauges().child_restarts
            self._gauges, self._last = None, Gauges()

    # ------------------------------------------------------------- called in other threads

    def states(self) -> Iterator[tuple[Metric, Mapping[tuple[str, ...], float]]]:
        """The metrics of :data:`STATES`, each with its values by labels."""
        now = self._ask()
        yield INFO, {(self._executor, now.incarnation, __version__): 1}
        yield LEASE, {(): now.lease_seconds}
        yield SLOTS, {(): now.slots}
        yield BUSY, {(): now.slots_busy}
        yield COORDINATED, {(of, stage): count for (of, stage), count in now.operations.items()}
        yield SILENCE, {(name,): seconds for name, seconds in now.silent.items()}
        yield RESTARTS, {(): self._restarts + now.child_restarts}
        yield MEMORY, {(): resident(session_members(now.child_session)) if now.child_session else 0}

    def _ask(self) -> Gauges:
        if self._loop is not None:
            with contextlib.suppress(NoAnswer, RuntimeError):  # the loop is busy, or closed
                self._last = asyncio.run_coroutine_threadsafe(self._read(), self._loop).result(ASK)
        return self._last

    async def _read(self) -> Gauges:
        return self._gauges() if self._gauges is not None else Gauges()


def resident(pids: Iterable[int]) -> int:
    """The resident memory of processes in bytes; shared pages count for each process."""
    total, size = 0, os.sysconf("SC_PAGE_SIZE")
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * size
    return total
