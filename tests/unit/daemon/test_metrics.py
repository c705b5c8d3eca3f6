"""Metrics of a daemon: counters, and scrapes while its event loop is busy."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import prometheus_client
import pytest

from distop.daemon import counting_meter as module
from distop.daemon.counting_meter import resident
from distop.daemon.meter import NO_METER, Gauges, Meter
from distop.daemon.metrics import Metrics
from distop.errors import InvalidArgument
from distop.setting_values import duration
from distop.settings import Settings, executor_config


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_L27_retries_losses_reports_and_restarts_are_counted_across_sessions() -> None:
    metrics = Metrics("e1")
    metrics.retried("noop")
    metrics.jobs_lost("noop", 3)
    metrics.stages_removed("copy", 2, 30)
    metrics.reported(5, 2)
    metrics.committed("claim", 0.02, "refused")
    metrics.events_received("distOpNode", -4)
    metrics.job_ended("noop", "success", -1.0)  # a clock that went back
    for deaths in (2, 1):
        metrics.begin(lambda deaths=deaths: Gauges("i", child_restarts=deaths, slots=4))  # type: ignore[misc]
        metrics.end()
    assert value(metrics, "distop_job_retries_total", type="noop") == 1
    assert value(metrics, "distop_jobs_total", type="noop", outcome="lost") == 3
    assert value(metrics, "distop_reports_total", result="late") == 2
    assert value(metrics, "distop_commits_total", transaction="claim", result="refused") == 1
    assert value(metrics, "distop_watch_lag_revisions_sum", watch="distOpNode") == 0
    assert value(metrics, "distop_job_attempt_duration_seconds_sum", type="noop") == 0
    assert value(metrics, "distop_stages_removed_total", type="copy") == 2
    assert value(metrics, "distop_stage_bytes_removed_total", type="copy") == 30
    assert value(metrics, "distop_sessions_total") == 2
    assert value(metrics, "distop_child_restarts_total") == 3
    assert value(metrics, "distop_slots") == 0, "there is no session"


def test_the_metrics_have_a_separate_registry() -> None:
    before = list(prometheus_client.REGISTRY.collect())
    Metrics("e1")
    Metrics("e2")
    assert len(before) == len(list(prometheus_client.REGISTRY.collect()))
    assert not [f.name for f in prometheus_client.REGISTRY.collect() if f.name.startswith("distop")]


async def test_a_scrape_does_not_wait_for_a_busy_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the last values of the loop. No scrape blocks the loop."""
    monkeypatch.setattr(module, "ASK", 0.05)
    metrics = Metrics("e1")
    slots = iter((4, 5, 6))
    metrics.begin(lambda: Gauges("i", slots=next(slots)))
    port = metrics.serve("127.0.0.1", 0)
    try:

        def scrape() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                return str(answer.read().decode())

        assert "distop_slots 4.0" in await asyncio.to_thread(scrape)
        assert "distop_slots 4.0" in scrape(), "this call blocks the loop, which answers nothing"
        taken = rf"cannot serve metrics at 127.0.0.1:{port} \(Address already in use\)"
        with pytest.raises(InvalidArgument, match=taken):
            Metrics("e2").serve("127.0.0.1", port)
    finally:
        await asyncio.to_thread(metrics.close)
    metrics.close()


def test_resident_memory_counts_live_processes_only() -> None:
    assert resident([]) == 0
    assert resident([os.getpid()]) > 1_000_000
    assert resident([os.getpid(), 2**22 + 1]) > 1_000_000


def test_nothing_is_loaded_or_counted_without_metrics() -> None:
    code = "import sys, distop.daemon.process; print('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"
    for name in ("begin", "job_ended", "jobs_lost", "claimed", "retried", "reported", "committed", "events_received"):
        assert hasattr(Metrics, name)
        assert getattr(Meter, name).__get__(NO_METER) is not None


@pytest.mark.parametrize(
    ("text", "place"), [("127.0.0.1:9464", ("127.0.0.1", 9464)), ("[::1]:0", ("::1", 0)), ("host:1", ("host", 1))]
)
def test_the_address_of_the_metrics_is_parsed(text: str, place: tuple[str, int], tmp_path: Path) -> None:
    settings = Settings({"metrics": text, "work_dir": str(tmp_path)}, env={})
    assert executor_config(settings).metrics == place
    assert executor_config(Settings({"work_dir": str(tmp_path)}, env={})).metrics is None


@pytest.mark.parametrize("text", ["9464", ":9464", "host:", "host:65536", "host:-1", "host:x", ""])
def test_an_invalid_address_of_the_metrics_is_rejected(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--metrics must be HOST:PORT"):
        Settings({"metrics": text}, env={}).get("metrics")


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("36h", 129_600), ("1.5 d", 129_600), ("7200", 7200), (60, 60)]
)
def test_durations_are_parsed(text: object, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "5", "59m", "-3d", "0d", "1w", "nan", "infd", "d", "9" * 400 + "d", "1e400", None, True]
)
def test_an_invalid_history_age_is_rejected(text: object) -> None:
    with pytest.raises(InvalidArgument, match="--history-age must be"):
        Settings({"history_age": text if text is not None else [1]}, env={}).get("history_age")
