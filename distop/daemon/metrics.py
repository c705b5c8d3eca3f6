"""Prometheus metrics of a daemon (lakeFS L27), served by the HTTP thread of the Prometheus library.

Imported only with ``--metrics HOST:PORT``. docs/how-to/monitor.md lists the metrics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from distop.daemon.counting_meter import EVENTS, CountingMeter
from distop.errors import InvalidArgument

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from wsgiref.simple_server import WSGIServer

    from prometheus_client.metrics_core import Metric as Family

    from distop.daemon.counting_meter import Metric


class Metrics(CountingMeter):
    """The metrics of one daemon in a Prometheus registry of its own."""

    def __init__(self, executor_id: str) -> None:
        super().__init__(executor_id)
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None
        disable_created: Any = prometheus.disable_created_metrics  # has no type annotations
        disable_created()  # no second series per metric with the start time
        self.registry = prometheus.CollectorRegistry()
        self.record_in(_PrometheusRecorder(self.registry))
        self.registry.register(_GaugeCollector(lambda: (_family(*one) for one in self.states())))

    def serve(self, host: str, port: int) -> int:
        """Start serving ``/metrics``; returns the port. Raises InvalidArgument if the address cannot be used."""
        self.ask_this_loop()
        try:
            self._server, self._thread = prometheus.start_http_server(port, host, self.registry)
        except OSError as error:
            reason = error.strerror or str(error)
            raise InvalidArgument(
                f"cannot serve metrics at {host}:{port} ({reason}): give another address with --metrics"
            ) from None
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = self._thread = None


class _PrometheusRecorder:
    """Counters and histograms of a registry."""

    def __init__(self, registry: prometheus.CollectorRegistry) -> None:
        self._metrics: dict[str, Any] = {}
        for one in EVENTS:
            if one.kind == "histogram":
                made: Any = prometheus.Histogram(one.name, one.text, one.labels, buckets=one.buckets, registry=registry)
            else:
                made = prometheus.Counter(one.name, one.text, one.labels, registry=registry)
            self._metrics[one.name] = made

    def add(self, metric: Metric, amount: int, labels: tuple[str, ...]) -> None:
        self._series(metric, labels).inc(amount)

    def observe(self, metric: Metric, value: float, labels: tuple[str, ...]) -> None:
        self._series(metric, labels).observe(value)

    def _series(self, metric: Metric, labels: tuple[str, ...]) -> Any:
        found = self._metrics[metric.name]
        return found.labels(*labels) if labels else found


class _GaugeCollector:
    """A collector of the Prometheus library that reads the gauges at each scrape."""

    def __init__(self, collect: Callable[[], Iterable[Family]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Family]:
        yield from self._collect()

    def describe(self) -> Iterator[Family]:
        """Nothing; otherwise the library would query the loop during the registration."""
        yield from ()


def _family(metric: Metric, values: Mapping[tuple[str, ...], float]) -> Family:
    kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
    family = kind(metric.name, metric.text, labels=metric.labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family
