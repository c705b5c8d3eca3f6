"""A receiver of OTLP over HTTP in this process."""

from __future__ import annotations

import gzip
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

if TYPE_CHECKING:
    from types import TracebackType


@dataclass(frozen=True)
class ReceivedSpan:
    """A span. ``error``: its message, "" unless it has failed."""

    name: str
    trace_id: str
    span_id: str
    parent: str
    begin: int
    end: int
    attributes: dict[str, Any]
    error: str
    events: tuple[str, ...]
    service: str


class OtlpReceiver:
    """Keeps what exporters send to ``url``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[ReceivedSpan] = []
        self._metrics: dict[str, dict[tuple[tuple[str, Any], ...], float]] = {}
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    data = gzip.decompress(data)
                receiver.receive(self.path, data)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> OtlpReceiver:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def spans(self) -> list[ReceivedSpan]:
        """The received spans."""
        with self._lock:
            return list(self._spans)

    def named(self, name: str) -> list[ReceivedSpan]:
        """The received spans of a name, in the order of their begin."""
        return sorted((one for one in self.spans if one.name == name), key=lambda one: one.begin)

    def metric(self, name: str, **attributes: Any) -> float | None:
        """The last value of a metric with these attributes (of a histogram: the count); None: not received."""
        with self._lock:
            series = self._metrics.get(name)
        if series is None:
            return None
        return sum(value for labels, value in series.items() if attributes.items() <= dict(labels).items())

    @property
    def metrics(self) -> set[str]:
        """The names of the received metrics."""
        with self._lock:
            return set(self._metrics)

    def receive(self, path: str, data: bytes) -> None:
        """Keep the content of a request."""
        with self._lock:
            if path == "/v1/traces":
                self._receive_spans(ExportTraceServiceRequest.FromString(data))
            elif path == "/v1/metrics":
                self._receive_metrics(ExportMetricsServiceRequest.FromString(data))

    def _receive_spans(self, request: Any) -> None:
        for resource in request.resource_spans:
            service = _attributes(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                for one in scope.spans:
                    self._spans.append(
                        ReceivedSpan(
                            one.name,
                            one.trace_id.hex(),
                            one.span_id.hex(),
                            one.parent_span_id.hex(),
                            one.start_time_unix_nano,
                            one.end_time_unix_nano,
                            _attributes(one.attributes),
                            one.status.message if one.status.code == 2 else "",
                            tuple(event.name for event in one.events),
                            service,
                        )
                    )

    def _receive_metrics(self, request: Any) -> None:
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                for one in scope.metrics:
                    kind = one.WhichOneof("data")
                    series = self._metrics.setdefault(one.name, {})
                    for point in getattr(one, kind).data_points:
                        value = point.count if kind == "histogram" else getattr(point, point.WhichOneof("value"))
                        series[tuple(sorted(_attributes(point.attributes).items()))] = float(value)


def _attributes(found: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in found}
