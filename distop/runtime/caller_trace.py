"""The trace context of the caller: of the call that a service answers, or of the current OpenTelemetry span.

OpenTelemetry is not loaded here: whoever has a current span has loaded it.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from distop.protocol import trace_context

if TYPE_CHECKING:
    from collections.abc import Iterator

_API = "opentelemetry.trace"
of_call: ContextVar[str] = ContextVar("traceparent", default="")
"""The traceparent of the call that is being answered, checked; "": none."""


def traceparent() -> str:
    """The caller's traceparent; "" if there is no trace."""
    current = getattr(sys.modules.get(_API), "get_current_span", None)
    if current is not None:
        found = current().get_span_context()
        if found.is_valid:
            return f"00-{found.trace_id:032x}-{found.span_id:016x}-{int(found.trace_flags) & 0xFF:02x}"
    return of_call.get()


@contextmanager
def span(name: str, **attributes: str) -> Iterator[None]:
    """A span of the caller's own OpenTelemetry around a call, if the caller has loaded it."""
    api: Any = sys.modules.get(_API)
    if not hasattr(api, "get_current_span"):  # not loaded, or not completely
        yield
        return
    with api.get_tracer("distop").start_as_current_span(name, kind=api.SpanKind.PRODUCER, attributes=attributes):
        yield


@contextmanager
def attached(text: str) -> Iterator[None]:
    """Make the span of a traceparent OpenTelemetry's current one, if this process has loaded OpenTelemetry."""
    api: Any = sys.modules.get(_API)
    found = trace_context.parse(text)
    if found is None or not hasattr(api, "get_current_span"):
        yield
        return
    ids = int(found.trace_id, 16), int(found.span_id, 16)
    with api.use_span(api.NonRecordingSpan(api.SpanContext(*ids, True, api.TraceFlags(found.flags)))):
        yield


def answered(text: object) -> None:
    """Set the trace context of the call that this task answers. Anything but a valid traceparent is ignored."""
    found = trace_context.parse(text)
    of_call.set(str(found) if found is not None else "")
