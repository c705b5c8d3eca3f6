"""Traces and metrics of real daemons, as a collector receives them over OTLP."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from opentelemetry import trace

import distop
from tests.integration.conftest import TABLE
from tests.integration.test_service import Service
from tests.support.behaviors import sample_env  # noqa: F401
from tests.support.otlp import OtlpReceiver

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.daemons import Daemons
    from tests.support.otlp import ReceivedSpan

pytestmark = [pytest.mark.etcd, pytest.mark.rotating]

CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TRACE, SPAN = CALLER[3:35], CALLER[36:52]
QUICK = {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_METRIC_EXPORT_INTERVAL": "300"}
"""Exports within a test."""
DOCUMENT = Path(__file__).parents[2] / "docs/how-to/monitor.md"


@pytest.fixture
def collector() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


def unique(spans: list[ReceivedSpan]) -> bool:
    """Whether no span was sent twice."""
    return len({one.span_id for one in spans}) == len(spans)


def test_the_trace_of_an_operation_with_a_retry_and_a_takeover(
    collector: OtlpReceiver,
    group: Daemons,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    """The first executor is coordinator, too: its successor continues the trace."""
    options = ("--telemetry", collector.url, "--log-format", "json")
    (first,) = group.start("a", options=options, env={**sample_env, **QUICK})
    arg = {"names": ["p", "q", "r"], "once": ["p"], "sleep": 2.0}
    op = group.client.start_operation("traced", TABLE, arg, traceparent=CALLER)

    def is_exported() -> bool:
        jobs, runs = op.status().jobs, collector.named("distop.run")
        failed = [one for one in runs if one.error]
        return bool(jobs["running"] and failed and jobs["success"] == len(runs) - len(failed))

    group.eventually(is_exported, "an attempt has failed, all ended ones are exported, and a job runs")
    first.kill()
    group.start("b", options=options, env={**sample_env, **QUICK})
    assert op.wait(90).success
    group.eventually(lambda: collector.named("distop.operation"), "the trace is complete", "b")
    group.eventually(lambda: len([one for one in collector.named("distop.run") if not one.error]) == 3, "all runs")

    spans = collector.spans
    assert unique(spans)
    assert {one.trace_id for one in spans} == {TRACE}
    assert {one.attributes["distop.op"] for one in spans} == {op.ref}
    assert {one.service for one in spans} == {"distop-executor"}
    (operation,) = collector.named("distop.operation")
    assert (operation.parent, operation.error, operation.attributes["distop.state"]) == (SPAN, "", "success")
    for one in spans:
        assert one is operation or one.parent == operation.span_id, one
        assert one.begin <= one.end
    (plan,), (finish,) = collector.named("distop.plan"), collector.named("distop.finish")
    assert (plan.attributes["distop.jobs"], plan.attributes["distop.attempt"]) == (3, 1)
    runs = collector.named("distop.run")
    retried = next(one for one in runs if one.attributes["distop.outcome"] == "retry")
    assert retried.attributes["distop.partition"] == "p"
    assert ("planned error" in retried.error, retried.events) == (True, ("retry",))
    lost = [one for one in runs if one.attributes["distop.outcome"] == "lost"]
    assert lost
    assert {one.attributes["distop.executor"] for one in lost} == {"a"}
    taken_over = sum(one.attributes["distop.taken_over"] for one in collector.named("distop.claim"))
    assert taken_over == len(lost)
    ended = [one for one in runs if one.attributes["distop.outcome"] == "success"]
    assert sorted(one.attributes["distop.partition"] for one in ended) == ["p", "q", "r"]
    by_partition = {one.attributes["distop.ordinal"]: one for one in ended}
    for number, job in enumerate(op.results()):
        assert job.result["traceparent"] == f"00-{TRACE}-{by_partition[number].span_id}-01"
        assert job.result["current"] == f"{TRACE}-{by_partition[number].span_id}"
    assert max(one.end for one in ended) <= finish.end
    lines = [json.loads(line) for line in group.lines() if line.startswith("{")]
    named = {one["trace_id"] for one in lines if one.get("operation") == op.ref and "trace_id" in one}
    assert named == {TRACE}


def test_an_operation_without_a_caller_has_a_trace_of_its_own(collector: OtlpReceiver, group: Daemons) -> None:
    """Variables of OpenTelemetry enable it as well. Metrics have the names of Prometheus'."""
    env = {**QUICK, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_SERVICE_NAME": "lake"}
    (daemon,) = group.start("a", env=env, options=("--metrics", "127.0.0.1:0"))
    ops = [group.client.start_operation("noop", TABLE, {"jobs": 2, "fail": ["1"]}) for _ in range(2)]
    assert [op.wait(60).state for op in ops] == ["failed", "failed"]
    group.eventually(lambda: len(collector.named("distop.operation")) == 2, "both traces are complete")
    first, second = collector.named("distop.operation")
    assert first.trace_id != second.trace_id
    assert (first.parent, first.service) == ("", "lake")
    assert "partition 1 fails as the argument demands" in first.error
    group.eventually(lambda: len(collector.named("distop.run")) == 4, "all runs are there")
    assert {one.attributes["distop.outcome"] for one in collector.named("distop.run")} == {"success", "failed"}

    group.eventually(lambda: collector.metric("distop_jobs_total", outcome="failed") == 2, "the failures are counted")
    documented = set(re.findall(r"^\| `(distop_\w+)` \|", DOCUMENT.read_text(), re.MULTILINE))
    group.eventually(lambda: collector.metric("distop_sessions_total") == 1, "the session is counted")
    assert collector.metrics <= documented
    assert {"distop_slots", "distop_child_restarts_total", "distop_commit_duration_seconds"} <= collector.metrics
    assert collector.metric("distop_job_attempt_duration_seconds", type="noop") == 4
    assert "metrics at http" in daemon.log.read_text(), "Prometheus' are served as well"


def test_a_caller_that_records_nothing_and_a_disabled_sdk_send_nothing(collector: OtlpReceiver, group: Daemons) -> None:
    group.start("a", env=QUICK, options=("--telemetry", collector.url))
    unsampled, sampled = (
        group.client.start_operation("noop", TABLE, {"jobs": 2}, traceparent=parent)
        for parent in (CALLER[:-2] + "00", CALLER)
    )
    assert (unsampled.wait(60).success, sampled.wait(60).success) == (True, True)
    group.eventually(lambda: collector.named("distop.operation"), "the second trace is complete")
    assert {one.attributes["distop.op"] for one in collector.spans} == {sampled.ref}


def test_traces_pass_through_the_service(collector: OtlpReceiver, group: Daemons, tmp_path: Path) -> None:
    group.start("a", env=QUICK, options=("--telemetry", collector.url))
    service = Service(group.endpoint, tmp_path, options=("--http", "127.0.0.1:0", "--telemetry", collector.url))
    try:
        context = trace.SpanContext(int(TRACE, 16), int(SPAN, 16), True, trace.TraceFlags(1))
        with distop.connect(service.url) as client:
            with trace.use_span(trace.NonRecordingSpan(context)):
                ops = [client.start_operation("noop", TABLE, {"jobs": 1})]
            assert ops[0].wait(60).success
        (port,) = re.findall(r"Serving HTTP on 127\.0\.0\.1:(\d+)", service.text())
        url = f"http://127.0.0.1:{port}/v1/operations"
        body = {"type": "noop", "table": TABLE, "arg": {"jobs": 1}}
        for header in (CALLER, f"{CALLER}-x"):
            named = httpx.post(url, json=body, headers={"traceparent": header}, timeout=60).json()["op"]
            ops.append(group.client.operation(named))
            assert ops[-1].wait(60).success
        assert httpx.get(f"{url}/{TABLE}/noop/99", timeout=60).status_code == 404
    finally:
        service.end()  # exports what is left
    group.eventually(lambda: len(collector.named("distop.operation")) == 3, "all traces are complete")
    calls = {one.span_id: one for one in collector.named("distop.v1.Operations/Start")}
    above = {one.attributes["distop.op"]: calls[one.parent] for one in collector.named("distop.operation")}
    assert [(one.trace_id, one.parent) for one in (above[op.ref] for op in ops[:2])] == [(TRACE, SPAN)] * 2
    assert {one.service for one in calls.values()} == {"distop-service"}
    invalid = above[ops[2].ref]
    assert (invalid.trace_id != TRACE, invalid.parent) == (True, ""), "an invalid header is ignored"
    (missing,) = [one for one in collector.named("distop.v1.Operations/Get") if "error.type" in one.attributes]
    assert (missing.attributes["error.type"], missing.error) == ("NotFound", ""), "the caller's error is no fault"


def test_without_telemetry_nothing_of_it_is_loaded(group: Daemons) -> None:
    """A daemon of its own process that runs jobs has no module of OpenTelemetry, and none that would use it."""
    program = group.folder / "run.py"
    program.write_text(
        "import atexit, sys\n"
        "names = ('opentelemetry', 'distop.runtime.telemetry', 'distop.daemon.operation_traces',\n"
        "         'distop.daemon.counting_meter')\n"
        "def tell():\n"
        "    found = [one for one in sys.modules if one in names or one.startswith('opentelemetry.')]\n"
        "    print('loaded:', found, flush=True)\n"
        "atexit.register(tell)\n"
        "sys.argv[0] = 'distop'\n"
        "from distop.cli.main import main\n"
        "main()\n"
    )
    env = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"}
    log = group.folder / "own.log"
    command = [sys.executable, str(program), "executor", "--etcd", group.endpoint, "--id", "own"]
    command += ["--work-dir", str(group.folder / "own"), "--slots", "2"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env)
    try:
        group.eventually(group.live, "the executor is ready")
        op = group.client.start_operation("noop", TABLE, {"jobs": 50})
        assert op.wait(60).success
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
    assert "loaded: []" in log.read_text(), log.read_text()[-2000:]
