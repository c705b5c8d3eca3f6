"""Whether this process exports telemetry. Loads nothing of OpenTelemetry."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "OTEL_EXPORTER_OTLP"
SIGNALS = ("TRACES", "METRICS")


def exported(endpoint: str | None, env: Mapping[str, str]) -> frozenset[str]:
    """The signals of :data:`SIGNALS` that are exported. ``endpoint``: the setting ``telemetry``.

    Without the setting, an endpoint in OpenTelemetry's own variables, or an exporter ``otlp``, has the same effect.
    ``OTEL_SDK_DISABLED=true`` goes before all of them, an exporter ``none`` before the endpoints.
    """
    if env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return frozenset()
    return frozenset(signal for signal in SIGNALS if _is_exported(signal, endpoint, env))


def _is_exported(signal: str, endpoint: str | None, env: Mapping[str, str]) -> bool:
    exporters = {one.strip().lower() for one in env.get(f"OTEL_{signal}_EXPORTER", "").split(",")}
    if "none" in exporters:
        return False
    named = (env.get(f"{PREFIX}_ENDPOINT"), env.get(f"{PREFIX}_{signal}_ENDPOINT"))
    return bool(endpoint) or "otlp" in exporters or any(named)
