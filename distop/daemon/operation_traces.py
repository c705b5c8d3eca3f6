"""The spans of operations that this daemon sends, and the trace ids of its log lines.

Each span is sent once, at its end, by the process whose write to etcd was applied. This module is loaded only if
telemetry is exported. docs/reference/telemetry.md lists the spans.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop.clock import time, uuid
from distop.protocol import trace_context
from distop.protocol.json_codec import parse_time
from distop.protocol.records import State

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distop.protocol.jobs import Claim
    from distop.protocol.records import History, OperationRef, Spec
    from distop.protocol.trace_context import TraceContext
    from distop.runtime.telemetry import Telemetry

KEPT = 10_000
"""Operations whose contexts are kept."""


class OperationTraces:
    """Sends the spans of one daemon."""

    def __init__(self, telemetry: Telemetry, executor: str) -> None:
        self._telemetry = telemetry
        self._executor = executor
        self._contexts: OrderedDict[str, tuple[Spec, TraceContext]] = OrderedDict()

    def context(self, ref: OperationRef, spec: Spec) -> TraceContext:
        """The context of the operation's span."""
        name = str(ref)
        known = self._contexts.get(name)
        if known is not None and (known[0] is spec or known[0] == spec):
            return known[1]
        found = trace_context.of_operation(ref, spec.request_id, spec.time, spec.traceparent)
        if trace_context.parse(spec.traceparent) is None:
            found = replace(found, flags=self._telemetry.flags_of(found.trace_id))
        self._contexts[name] = spec, found
        while len(self._contexts) > KEPT:
            self._contexts.popitem(last=False)
        return found

    def planned(self, ref: OperationRef, spec: Spec, attempt: int, began: float, jobs: int, error: str = "") -> None:
        """A planning whose plan, or whose failure, was written."""
        above = self.context(ref, spec)
        about = {"distop.attempt": attempt, "distop.jobs": jobs}
        self._emit("distop.plan", above.span("plan", attempt), above, ref, (began, time.time()), about, error=error)

    def claimed(self, ref: OperationRef, spec: Spec, jobs: int, taken_over: int, began: float) -> None:
        """Claims that etcd has granted together."""
        above = self.context(ref, spec)
        about = {"distop.jobs": jobs, "distop.taken_over": taken_over}
        own = above.span("claim", self._executor, uuid.uuid4())
        self._emit("distop.claim", own, above, ref, (began, time.time()), about)

    def lost(self, ref: OperationRef, spec: Spec, jobs: Iterable[tuple[int, str, Claim]]) -> None:
        """Attempts that ended because their holders are gone; each job with its former claim.

        Nobody has measured them: their spans begin and end when their loss was found.
        """
        now = time.time()
        for partition, name, former in jobs:
            why = "the executor was lost while it ran the job"
            self._run(ref, spec, (partition, name, former.attempt), former.executor, (now, now), "lost", why)

    def ran(
        self,
        ref: OperationRef,
        spec: Spec,
        job: tuple[int, str, int],
        times: tuple[float, float],
        outcome: str,
        error: str,
    ) -> None:
        """An attempt whose end was written.

        ``job``: ordinal, name and attempt. ``outcome``: success, failed, retry or cancelled.
        """
        self._run(ref, spec, job, self._executor, times, outcome, error)

    def _run(
        self,
        ref: OperationRef,
        spec: Spec,
        job: tuple[int, str, int],
        executor: str,
        times: tuple[float, float],
        outcome: str,
        error: str,
    ) -> None:
        partition, name, attempt = job
        above = self.context(ref, spec)
        about = {
            "distop.partition": name,
            "distop.ordinal": partition,
            "distop.attempt": attempt,
            "distop.executor": executor,
            "distop.outcome": outcome,
        }
        own = above.span("run", partition, attempt)
        event = "retry" if outcome == "retry" else ""
        self._emit("distop.run", own, above, ref, times, about, error=error, event=event)

    def finished(self, ref: OperationRef, spec: Spec, began: float, history: History) -> None:
        """An operation that this daemon has ended. ``began``: the time at which its completion began."""
        own, started = self.context(ref, spec), parse_time(history.started) or began
        why = ""
        if history.state is State.FAILED:
            why = str(history.errors[0].get("text", "")) if history.errors else "the operation failed"
        self._emit(
            "distop.finish", own.span("finish"), own, ref, (began, time.time()), {"distop.state": str(history.state)}
        )
        about = {
            "distop.state": str(history.state),
            "distop.jobs": history.total,
            "distop.jobs.failed": history.failed,
            "distop.submitter": history.submitter,
        }
        caller = trace_context.parse(spec.traceparent)
        self._emit("distop.operation", own, caller, ref, (started, parse_time(history.finished)), about, error=why)

    def _emit(
        self,
        name: str,
        own: TraceContext,
        above: TraceContext | None,
        ref: OperationRef,
        times: tuple[float, float],
        about: dict[str, Any],
        *,
        error: str = "",
        event: str = "",
    ) -> None:
        attributes = {"distop.op": str(ref), "distop.type": ref.type, "distop.table": ref.table, **about}
        self._telemetry.emit(name, own, above, times, attributes, error=error, event=event)

    # ------------------------------------------------------------------- logs

    def name_traces_in_logs(self) -> None:
        """Add ``trace_id`` to log records about operations whose spans this daemon sends."""
        for handler in logging.getLogger("distop").handlers:
            handler.addFilter(self._name_trace)

    def stop_naming(self) -> None:
        """End :meth:`name_traces_in_logs`."""
        for handler in logging.getLogger("distop").handlers:
            handler.removeFilter(self._name_trace)

    def _name_trace(self, record: logging.LogRecord) -> bool:
        known = self._contexts.get(getattr(record, "operation", None) or "")
        if known is not None:
            record.trace_id = known[1].trace_id
        return True
