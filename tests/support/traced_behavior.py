"""``traced``: jobs whose first attempt may fail, and whose results name their trace contexts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from pydantic import BaseModel, Field

from distop.behavior import Behavior, PartitionPlan, Planned, Retry

if TYPE_CHECKING:
    from distop.behavior import JobContext, TableRecord


class TracedArg(BaseModel):
    """Names of partitions, and of those whose first attempt raises an error; seconds of each job."""

    names: list[str]
    once: list[str] = Field(default_factory=list)
    sleep: float = 0.0


class TracedResult(BaseModel):
    """The trace context of the attempt, and that of OpenTelemetry's current span in the job."""

    traceparent: str
    current: str


class Traced(Behavior):
    """Retries quickly."""

    type_name = "traced"
    Arg = TracedArg
    Result = TracedResult
    retry = Retry(attempts=4, initial=0.1, maximum=0.2)
    failure_policy = "collect_all"

    def partitions(self, table: TableRecord, arg: TracedArg, ctx: JobContext) -> Planned:
        return Planned([PartitionPlan(number, name) for number, name in enumerate(arg.names)])

    def start_or_resume_job(self, arg: TracedArg, partition: PartitionPlan, ctx: JobContext) -> Any:
        end = time.monotonic() + arg.sleep
        while time.monotonic() < end:
            ctx.check_cancelled()
            time.sleep(0.02)
        if partition.name in arg.once and ctx.attempt == 1:
            raise RuntimeError("planned error of the first attempt")
        current = trace.get_current_span().get_span_context()
        return TracedResult(traceparent=ctx.traceparent, current=f"{current.trace_id:032x}-{current.span_id:016x}")
