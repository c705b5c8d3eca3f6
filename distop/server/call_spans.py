"""A span for each call that the service answers, below the caller's."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import SpanKind

from distop.clock import time, uuid
from distop.errors import DistopError
from distop.protocol import trace_context
from distop.protocol.trace_context import TraceContext
from distop.runtime import caller_trace
from distop.v1 import operations_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distop.runtime.telemetry import Telemetry

FAULTS = frozenset(
    {
        *("EtcdUnavailable", "ServiceUnavailable", "OutcomeUnknown"),
        *("EtcdRejected", "MalformedRequest", "UnreadableRecord"),
    }
)
"""Errors that are not the caller's, besides unexpected ones."""


class CallSpans:
    """Sends spans of calls. Loaded only if traces are exported."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    @contextmanager
    def span(self, call: str, request: Any) -> Iterator[None]:
        """The span of one call, ``Service/Method``. An operation that it starts is below it.

        A trace context in the request's options takes precedence over the header's, and is replaced by the span's.
        """
        options = getattr(request, "options", None)
        chosen = trace_context.parse(options.traceparent) if isinstance(options, operations_pb2.StartOptions) else None
        above = chosen or trace_context.parse(caller_trace.of_call.get())
        made = uuid.uuid4().hex
        trace_id = above.trace_id if above is not None else uuid.uuid4().hex
        flags = above.flags if above is not None else self._telemetry.flags_of(trace_id)
        own = TraceContext(trace_id, made[:16], flags)
        caller_trace.of_call.set(str(own))  # each call has a task of its own
        if chosen is not None:
            request.options.traceparent = str(own)
        service, _, method = call.partition("/")
        about = {"rpc.system": "grpc", "rpc.service": f"distop.v1.{service}", "rpc.method": method}
        began, error = time.time(), ""
        try:
            yield
        except DistopError as failed:
            about["error.type"] = type(failed).__name__
            error = str(failed) if type(failed).__name__ in FAULTS else ""
            raise
        except Exception as failed:
            about["error.type"] = error = type(failed).__name__
            raise
        finally:
            times = began, time.time()
            self._telemetry.emit(f"distop.v1.{call}", own, above, times, about, error=error, kind=SpanKind.SERVER)
