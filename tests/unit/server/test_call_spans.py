"""Spans of the calls that a service answers."""

from __future__ import annotations

from contextvars import copy_context
from typing import TYPE_CHECKING

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from distop.errors import EtcdUnavailable, LimitExceeded, NotFound, ServiceUnavailable
from distop.runtime import caller_trace
from distop.runtime.telemetry import Telemetry
from distop.server.call_spans import CallSpans
from distop.v1 import operations_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.sdk.trace import ReadableSpan

HEADER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
OPTION = "00-00000000000000000000000000000001-0000000000000002-01"
CALL = "Operations/Start"


def answered(header: str, request: operations_pb2.StartRequest, act: Callable[[], None] = lambda: None) -> ReadableSpan:
    """The span of a call with this header."""
    exporter = InMemorySpanExporter()
    spans = CallSpans(Telemetry("test", {}, SimpleSpanProcessor(exporter), None))

    def call() -> None:
        caller_trace.answered(header)
        with spans.span(CALL, request):
            assert caller_trace.traceparent() != header
            act()

    try:
        copy_context().run(call)
    finally:
        (found,) = exporter.get_finished_spans()
        assert found.context is not None
        answered.last = found  # type: ignore[attr-defined]
    return found


def context_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"


def parent_of(span: ReadableSpan) -> str:
    return f"{span.parent.span_id:016x}" if span.parent is not None else ""


def test_a_call_is_below_its_header_and_a_start_below_its_option() -> None:
    plain = operations_pb2.StartRequest(type="noop")
    found = answered(HEADER, plain)
    assert (found.name, parent_of(found), context_of(found)[:35]) == (f"distop.v1.{CALL}", HEADER[36:52], HEADER[:35])
    assert not plain.options.HasField("traceparent")
    chosen = operations_pb2.StartRequest(options=operations_pb2.StartOptions(traceparent=OPTION))
    found = answered(HEADER, chosen)
    assert (parent_of(found), chosen.options.traceparent) == (OPTION[36:52], context_of(found))
    wrong = operations_pb2.StartRequest(options=operations_pb2.StartOptions(traceparent="x"))
    found = answered("", wrong)
    assert (parent_of(found), wrong.options.traceparent) == ("", "x"), "the handler refuses it"


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (NotFound("no"), None),
        (EtcdUnavailable("no"), "no"),
        (ServiceUnavailable("no"), "no"),
        (LimitExceeded("no"), None),
    ],
)
def test_only_errors_of_the_service_are_faults(error: Exception, fault: str | None) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        answered(HEADER, operations_pb2.StartRequest(), fail)
    found: ReadableSpan = answered.last  # type: ignore[attr-defined]
    assert found.attributes is not None
    assert (found.attributes["error.type"], found.status.description) == (type(error).__name__, fault)
