"""Whether this process exports telemetry. OpenTelemetry is loaded only if it does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distop.runtime.logs import Log
    from distop.runtime.telemetry import Telemetry

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


def start(
    name: str, attributes: Mapping[str, str], endpoint: str | None, env: Mapping[str, str], log: Log
) -> Telemetry | None:
    """Export what :func:`exported` says, as the service ``name``; None: nothing.

    Raises UsageError if the setting asks for it, and OpenTelemetry is not installed.
    """
    signals = exported(endpoint, env)
    if not signals:
        return None
    try:
        from distop.runtime.telemetry import Telemetry
    except ImportError as error:
        why = f"telemetry needs OpenTelemetry ({error}): pip install 'distop[otel]'"
        if endpoint:
            raise UsageError(why) from None
        log.warning("Exporting no telemetry, although variables OTEL_… ask for it: %s", why)
        return None
    log.info("Exporting %s over OTLP", " and ".join(sorted(signals)).lower())
    return Telemetry.exporting(name, attributes, endpoint, signals)
