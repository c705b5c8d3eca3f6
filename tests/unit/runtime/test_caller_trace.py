"""The caller's trace context: the current OpenTelemetry span, else the header of the answered call."""

from __future__ import annotations

import sys
from contextvars import copy_context

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from distop.protocol.behavior_declaration import Declaration
from distop.runtime import caller_trace
from distop.services.submission.insertion import make_spec
from distop.services.submission.start_options import StartOptions
from distop.services.submission.start_request import request

CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
OTHER = "00-00000000000000000000000000000001-0000000000000002-00"
_IDS = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0xF067AA0BA902B7
SPAN = trace.NonRecordingSpan(trace.SpanContext(*_IDS, is_remote=True, trace_flags=trace.TraceFlags(1)))


def spec(**options: str) -> str:
    """The trace context in the spec of a start with these options."""
    wanted = request("noop", "t", b"{}", StartOptions(**options), "me")
    return make_spec(wanted, Declaration("noop"), None).traceparent


def test_the_current_span_is_the_caller() -> None:
    assert (caller_trace.traceparent(), spec()) == ("", "")
    with trace.use_span(SPAN):
        assert (caller_trace.traceparent(), spec()) == (CALLER, CALLER)
        assert spec(traceparent=OTHER) == OTHER, "an option goes before it"


@pytest.mark.parametrize("header", [None, "", b"x", CALLER.upper(), "x" * 10**6])
def test_an_invalid_header_is_ignored(header: object) -> None:
    def answer() -> str:
        caller_trace.answered(CALLER)
        assert spec() == CALLER
        caller_trace.answered(header)
        return spec()

    assert copy_context().run(answer) == ""


def test_without_opentelemetry_nothing_of_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with caller_trace.span("distop.start"):
        assert caller_trace.traceparent() == ""


def test_a_start_is_a_span_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(trace, "get_tracer", lambda name: provider.get_tracer(name))
    with trace.use_span(SPAN), caller_trace.span("distop.start", **{"distop.type": "noop"}):
        sent = caller_trace.traceparent()
    (found,) = spans.get_finished_spans()
    assert (found.name, found.attributes) == ("distop.start", {"distop.type": "noop"})
    assert found.context is not None
    assert sent == f"00-{CALLER[3:35]}-{found.context.span_id:016x}-01"
