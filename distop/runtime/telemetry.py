"""OpenTelemetry's SDK in this process: spans with given ids, and a meter, exported over OTLP (HTTP, protobuf).

Loaded only if telemetry is exported (:mod:`distop.runtime.telemetry_settings`); needs the extra ``otel``. The global
providers are not changed: they belong to the code of behaviors.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from distop import __version__
from distop.protocol.trace_context import SAMPLED, TraceContext
from distop.runtime import secret_settings

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from opentelemetry.metrics import Meter
    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.sdk.trace import SpanProcessor

EXPORT_LIMIT = 5.0
"""Maximum seconds of the last export at the end of the process."""
MOST_TEXT = 500
"""Maximum characters of an error, and of an attribute, in a span."""
_NANO = 1_000_000_000


class _GivenIds(IdGenerator):
    """The ids of the next span, which are given, in this thread."""

    def __init__(self) -> None:
        self._next = threading.local()

    def give(self, context: TraceContext) -> None:
        self._next.trace_id, self._next.span_id = int(context.trace_id, 16), int(context.span_id, 16)

    def generate_span_id(self) -> int:
        return int(self._next.span_id)

    def generate_trace_id(self) -> int:
        return int(self._next.trace_id)


class Telemetry:
    """The exporters of one process.

    ``name`` and ``attributes`` describe the process, unless ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` do.
    ``spans`` and ``metrics``: where to, None: not exported.
    """

    def __init__(
        self, name: str, attributes: Mapping[str, str], spans: SpanProcessor | None, metrics: MetricReader | None
    ) -> None:
        own = {"service.name": name, "service.version": __version__, **attributes}
        resource = Resource.create(own).merge(OTELResourceDetector().detect())
        self._ids = _GivenIds()
        self._traces: TracerProvider | None = None
        self._metrics: MeterProvider | None = None
        if spans is not None:
            self._traces = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
            self._traces.add_span_processor(spans)
            self._tracer = self._traces.get_tracer("distop", __version__)
        if metrics is not None:
            self._metrics = MeterProvider([metrics], resource, shutdown_on_exit=False)

    @classmethod
    def exporting(
        cls, name: str, attributes: Mapping[str, str], endpoint: str | None, signals: Collection[str]
    ) -> Telemetry:
        """Telemetry that exports these signals to an endpoint, or where OpenTelemetry's variables say."""
        base = endpoint.rstrip("/") if endpoint else None
        spans = OTLPSpanExporter(f"{base}/v1/traces" if base else None) if "TRACES" in signals else None
        metrics = OTLPMetricExporter(f"{base}/v1/metrics" if base else None) if "METRICS" in signals else None
        return cls(
            name,
            attributes,
            BatchSpanProcessor(spans) if spans is not None else None,
            PeriodicExportingMetricReader(metrics) if metrics is not None else None,
        )

    @property
    def traces(self) -> bool:
        """Whether spans are exported."""
        return self._traces is not None

    @property
    def meter(self) -> Meter | None:
        """The meter, if metrics are exported."""
        return self._metrics.get_meter("distop", __version__) if self._metrics is not None else None

    def flags_of(self, trace_id: str) -> int:
        """The flags of a trace without a caller: as the sampler decides, which is the same in all processes."""
        assert self._traces is not None
        decided = self._traces.sampler.should_sample(None, int(trace_id, 16), "distop.operation")
        return SAMPLED if decided.decision is Decision.RECORD_AND_SAMPLE else 0

    def emit(
        self,
        name: str,
        context: TraceContext,
        parent: TraceContext | None,
        times: tuple[float, float],
        attributes: Mapping[str, Any],
        *,
        error: str = "",
        event: str = "",
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> None:
        """Send a span that has ended. ``times``: of its begin and end. ``event``: what happened at its end."""
        begin, end = (int(max(0.0, one) * _NANO) for one in times)
        attributes = {key: _text(value) if isinstance(value, str) else value for key, value in attributes.items()}
        self._ids.give(context)
        above = set_span_in_context(NonRecordingSpan(_span_context(parent)), Context()) if parent else Context()
        span = self._tracer.start_span(name, above, kind, attributes, start_time=begin)
        if event:
            span.add_event(event, timestamp=end)
        if error:
            span.set_status(Status(StatusCode.ERROR, _text(secret_settings.redact(error))))
        span.end(max(begin, end))

    def close(self) -> None:
        """Export what is left."""
        limit = int(EXPORT_LIMIT * 1000)
        if self._traces is not None:
            self._traces.force_flush(limit)
            self._traces.shutdown()
        if self._metrics is not None:
            self._metrics.shutdown(limit)


def _text(text: str) -> str:
    """A text that protobuf can encode, and not too long: records of etcd may have any."""
    return text[:MOST_TEXT].encode(errors="replace").decode()


def _span_context(context: TraceContext) -> SpanContext:
    return SpanContext(int(context.trace_id, 16), int(context.span_id, 16), True, TraceFlags(context.flags))
