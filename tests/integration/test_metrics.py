"""The metrics of a real daemon, scraped as by Prometheus (lakeFS L27)."""

from __future__ import annotations

import re
import socket
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.conftest import TABLE

if TYPE_CHECKING:
    from tests.support.daemons import Daemon, Daemons

pytestmark = pytest.mark.etcd

DOCUMENT = Path(__file__).parents[2] / "docs/how-to/monitor.md"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scraped(daemon: Daemon) -> Samples:
    """Each sample by its name and labels, from the address in the daemon's log."""
    (url,) = set(re.findall(r"metrics at (http://\S+)", daemon.log.read_text()))
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(samples: Samples, name: str, **labels: str) -> float:
    return sum(v for (n, ls), v in samples.items() if n == name and labels.items() <= dict(ls).items())


def families(samples: Samples) -> set[str]:
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name, _ in samples}


def test_L27_a_daemon_serves_counters_and_its_current_state(group: Daemons) -> None:
    (daemon,) = group.start("a", options=("--metrics", "127.0.0.1:0"))
    op = group.client.start_operation("noop", TABLE, {"jobs": 12, "fail": ["3"]})
    assert op.wait(60).state == "failed"
    long = group.client.start_operation("noop", TABLE, {"jobs": 1, "sleep": 600})
    group.eventually(lambda: long.status().jobs["running"] == 1, "a job runs")
    found = scraped(daemon)
    assert total(found, "distop_jobs_total", type="noop", outcome="success") == 11
    assert total(found, "distop_jobs_total", type="noop", outcome="failed") == 1
    assert total(found, "distop_job_attempt_duration_seconds_count", type="noop") == 12
    assert total(found, "distop_claims_total", type="noop") == 13
    assert total(found, "distop_takeovers_total") == 0
    assert total(found, "distop_reports_total", result="applied") == 12
    assert total(found, "distop_commits_total", result="applied") >= 5
    assert total(found, "distop_commits_total", transaction="finish", result="applied") == 1
    assert total(found, "distop_commit_duration_seconds_count") == total(found, "distop_commits_total")
    assert total(found, "distop_watch_lag_revisions_count") > 0
    assert 0 < total(found, "distop_session_lease_remaining_seconds") <= 3
    assert (total(found, "distop_slots"), total(found, "distop_slots_busy")) == (2, 1)
    assert total(found, "distop_coordinated_operations", type="noop", stage="open") == 1
    assert total(found, "distop_child_restarts_total") == 0
    assert total(found, "distop_child_memory_bytes") > 10_000_000
    assert total(found, "distop_sessions_total") == 1
    assert total(found, "distop_executor_info", executor="a") == 1
    documented = set(re.findall(r"^\| `(distop_\w+)` \|", DOCUMENT.read_text(), re.MULTILINE))
    assert families(found) <= documented, "each metric is documented"
    rare = {"distop_job_retries_total", "distop_stages_removed_total", "distop_stage_bytes_removed_total"}
    assert documented - families(found) <= rare, "each documented metric is served"
    long.cancel()
    assert long.wait(60).state == "cancelled"
    group.eventually(lambda: total(scraped(daemon), "distop_slots_busy") == 0, "no slot is busy")


def test_L27_takeovers_are_counted(group: Daemons) -> None:
    group.start("a")
    op = group.client.start_operation("noop", TABLE, {"jobs": 2, "sleep": 4})
    group.eventually(lambda: op.status().jobs["running"] == 2, "both jobs run")
    (other,) = group.start("b", options=("--metrics", "127.0.0.1:0"))
    group._daemons["a"].kill()
    assert op.wait(90).success
    found = scraped(other)
    taken_over = total(found, "distop_takeovers_total", type="noop")
    assert taken_over == total(found, "distop_jobs_total", type="noop", outcome="success") > 0


def test_a_daemon_whose_metrics_port_is_in_use_ends_with_an_error(group: Daemons) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        daemon = group.spawn("a", "--metrics", f"127.0.0.1:{port}")
        assert daemon.process.wait(60) == 2
    log = daemon.log.read_text()
    assert f"cannot serve metrics at 127.0.0.1:{port}" in log
    assert "Traceback" not in log
    assert not group.live()
