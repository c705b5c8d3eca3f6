"""What is exported, and spans with given ids."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from distop.daemon.counting_meter import EVENTS, STATES, CountingMeter
from distop.daemon.meter import Gauges
from distop.daemon.operation_traces import KEPT, OperationTraces
from distop.daemon.otel_metrics import OtelRecorder
from distop.errors import UsageError
from distop.protocol import trace_context
from distop.protocol.behavior_declaration import Rules
from distop.protocol.records import History, OperationRef, Spec, State
from distop.runtime import secret_settings
from distop.runtime.telemetry import MOST_TEXT, Telemetry
from distop.runtime.telemetry_settings import exported, start

CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
BOTH = {"TRACES", "METRICS"}
REF = OperationRef("t", "noop", "", 1)
TIME = "2026-01-31T18:00:00.000Z"


@pytest.mark.parametrize(
    ("endpoint", "env", "signals"),
    [
        (None, {}, set()),
        (None, {"OTEL_SERVICE_NAME": "lake", "OTEL_TRACES_SAMPLER": "always_on"}, set()),
        ("http://c:4318", {}, BOTH),
        ("http://c:4318", {"OTEL_SDK_DISABLED": "TRUE"}, set()),
        ("http://c:4318", {"OTEL_SDK_DISABLED": "1"}, BOTH),
        ("http://c:4318", {"OTEL_METRICS_EXPORTER": "none"}, {"TRACES"}),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, BOTH),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, {"METRICS"}),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, {"TRACES"}),
        (None, {"OTEL_METRICS_EXPORTER": "otlp"}, {"METRICS"}),
    ],
)
def test_a_setting_or_variables_of_opentelemetry_export(
    endpoint: str | None, env: dict[str, str], signals: set[str]
) -> None:
    assert exported(endpoint, env) == signals


def test_a_missing_package_is_an_error_only_if_the_setting_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distop.runtime.telemetry", None)
    log = logging.getLogger("distop.test")
    with pytest.raises(UsageError, match=r"pip install 'distop\[otel\]'"):
        start("test", {}, "http://c:4318", {}, log)
    assert start("test", {}, None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, log) is None


def spec(traceparent: str = "") -> Spec:
    return Spec("r", TIME, "me", Rules(), traceparent=traceparent)


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traces(spans: InMemorySpanExporter) -> OperationTraces:
    return OperationTraces(Telemetry("test", {}, SimpleSpanProcessor(spans), None), "e1")


def finish(traces: OperationTraces, of: Spec, **fields: Any) -> None:
    traces.finished(REF, of, 1.0, History(str(REF), State.FAILED, TIME, TIME, 1, 0, 1, **fields))


def test_spans_have_the_ids_that_follow_from_the_operation(
    traces: OperationTraces, spans: InMemorySpanExporter
) -> None:
    own = trace_context.of_operation(REF, "r", TIME, CALLER)
    traces.ran(REF, spec(CALLER), (3, "p", 2), (1.0, 2.0), "success", "")
    finish(traces, spec(CALLER))
    run, completion, operation = spans.get_finished_spans()
    assert run.context is not None
    assert run.parent is not None
    assert operation.context is not None
    assert operation.parent is not None
    assert f"{run.context.span_id:016x}" == own.span("run", 3, 2).span_id
    assert f"{run.parent.span_id:016x}" == f"{operation.context.span_id:016x}" == own.span_id
    assert f"{operation.parent.span_id:016x}" == CALLER[36:52]
    assert {one.context.trace_id for one in (run, completion, operation) if one.context} == {int(CALLER[3:35], 16)}
    assert (run.start_time, run.end_time) == (1_000_000_000, 2_000_000_000)


def test_a_sampler_decides_by_the_trace_of_an_operation_without_a_caller(
    monkeypatch: pytest.MonkeyPatch, spans: InMemorySpanExporter
) -> None:
    """All processes decide alike, so a trace is complete or absent."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    first, second = (OperationTraces(Telemetry("test", {}, SimpleSpanProcessor(spans), None), "e") for _ in range(2))
    sampled = set()
    for number in range(1, 41):
        ref = OperationRef("t", "noop", "", number)
        assert first.context(ref, spec()) == second.context(ref, spec())
        first.ran(ref, spec(), (0, "p", 1), (1.0, 2.0), "success", "")
        second.planned(ref, spec(), 1, 1.0, 1)
        sampled.add(first.context(ref, spec()).sampled)
    by_trace: dict[int, set[str]] = {}
    for one in spans.get_finished_spans():
        assert one.context is not None
        by_trace.setdefault(one.context.trace_id, set()).add(one.name)
    assert sampled == {True, False}
    assert all(names == {"distop.run", "distop.plan"} for names in by_trace.values())


def test_texts_of_spans_are_short_encodable_and_without_secrets(
    traces: OperationTraces, spans: InMemorySpanExporter
) -> None:
    secret_settings.hide(["hunter2-hunter2"])
    text = "\ud800 hunter2-hunter2 " + "x" * 10_000
    traces.ran(REF, spec(), (0, text, 1), (-5.0, 2.0), "failed", text)
    (found,) = spans.get_finished_spans()
    assert found.attributes is not None
    name, error = str(found.attributes["distop.partition"]), str(found.status.description)
    assert (len(name), len(error)) == (MOST_TEXT, MOST_TEXT)
    assert "hunter2" not in error
    assert (name + error).encode()
    assert found.start_time == 0


def test_few_contexts_are_kept(traces: OperationTraces) -> None:
    for number in range(KEPT + 10):
        traces.context(OperationRef("t", "noop", "", number + 1), spec())
    assert len(traces._contexts) == KEPT


async def test_metrics_have_the_names_and_labels_of_the_definitions() -> None:
    reader = InMemoryMetricReader()
    meter = Telemetry("test", {}, None, reader).meter
    assert meter is not None
    counting = CountingMeter("e1")
    OtelRecorder(meter, counting)
    counting.begin(lambda: Gauges("i", slots=4, operations={("noop", "open"): 2}, silent={"distOpNode": 1.0}))
    counting.job_ended("noop", "success", 0.5)
    counting.jobs_lost("noop", 3)
    counting.claimed("noop", 2, 1)
    counting.retried("noop")
    counting.reported(5, 2)
    counting.committed("claim", 0.02, "refused")
    counting.stages_removed("copy", 2, 30)
    counting.events_received("distOpNode", 4)

    data = await asyncio.to_thread(reader.get_metrics_data)
    assert data is not None
    found = {
        one.name: {tuple(dict(point.attributes or {}).items()): point for point in one.data.data_points}
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for one in scope.metrics
    }
    assert set(found) == {one.name for one in (*EVENTS, *STATES)}
    for one in (*EVENTS, *STATES):
        assert all(tuple(name for name, _ in labels) == one.labels for labels in found[one.name]), one
    jobs: Any = found["distop_jobs_total"]
    assert jobs[("type", "noop"), ("outcome", "lost")].value == 3
    buckets: Any = found["distop_commit_duration_seconds"][(("transaction", "claim"),)]
    assert buckets.explicit_bounds[0] == 0.001
    slots: Any = found["distop_slots"][()]
    assert slots.value == 4
