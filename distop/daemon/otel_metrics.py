"""The metrics of a daemon over OpenTelemetry, by the same names as Prometheus'."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from opentelemetry.metrics import CallbackOptions, Observation

from distop.clock import time
from distop.daemon.counting_meter import EVENTS, STATES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from opentelemetry.metrics import Meter

    from distop.daemon.counting_meter import CountingMeter, Metric

    States = Mapping[str, Mapping[tuple[str, ...], float]]

SAME_EXPORT = 0.5
"""Seconds within which gauges belong to one export, which asks the daemon's loop once."""


class OtelRecorder:
    """Counters, histograms and gauges of a meter."""

    def __init__(self, meter: Meter, source: CountingMeter) -> None:
        self._metrics: dict[str, Any] = {}
        for one in EVENTS:
            self._metrics[one.name] = (
                meter.create_histogram(one.name, "", one.text, explicit_bucket_boundaries_advisory=one.buckets)
                if one.kind == "histogram"
                else meter.create_counter(one.name, "", one.text)
            )
        read = _OncePerExport(lambda: {metric.name: values for metric, values in source.states()})
        for one in STATES:
            create: Any = meter.create_observable_gauge if one.kind == "gauge" else meter.create_observable_counter
            create(one.name, [partial(_observations, one, read)], "", one.text)
        source.record_in(self)
        source.ask_this_loop()

    def add(self, metric: Metric, amount: int, labels: tuple[str, ...]) -> None:
        self._metrics[metric.name].add(amount, dict(zip(metric.labels, labels, strict=True)))

    def observe(self, metric: Metric, value: float, labels: tuple[str, ...]) -> None:
        self._metrics[metric.name].record(value, dict(zip(metric.labels, labels, strict=True)))


class _OncePerExport:
    """Reads the gauges once for all callbacks of an export."""

    def __init__(self, read: Callable[[], States]) -> None:
        self._read = read
        self._at = -SAME_EXPORT
        self._states: States = {}

    def __call__(self) -> States:
        if (now := time.monotonic()) - self._at >= SAME_EXPORT:
            self._states = self._read()
            self._at = now
        return self._states


def _observations(metric: Metric, read: Callable[[], States], _: CallbackOptions) -> Iterator[Observation]:
    values: Iterable[tuple[tuple[str, ...], float]] = read()[metric.name].items()
    for labels, value in values:
        yield Observation(value, dict(zip(metric.labels, labels, strict=True)))
