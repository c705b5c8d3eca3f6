"""An operation type for measurements: one SQL statement of a table format in the Spark session of an executor."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from distop.behavior import Behavior, PartitionPlan, Planned

if TYPE_CHECKING:
    from distop.behavior import JobContext, Summary, TableRecord


class ProcedureArg(BaseModel):
    """The statement."""

    sql: str


class Answer(BaseModel):
    """The seconds that the statement took, and the first row of its result as text."""

    seconds: float
    row: str


class Procedure(Behavior):
    """Runs and times one statement, in one job."""

    type_name = "procedure"
    Arg = ProcedureArg
    Result = Answer
    Report = Answer

    def partitions(self, table: TableRecord, arg: ProcedureArg, ctx: JobContext) -> Planned:
        return Planned([PartitionPlan(0, "procedure")])

    def start_or_resume_job(self, arg: ProcedureArg, partition: PartitionPlan, ctx: JobContext) -> Answer:
        session = ctx.spark
        began = time.perf_counter()
        rows = session.sql(arg.sql).collect()
        return Answer(seconds=time.perf_counter() - began, row=str(rows[0]) if rows else "")

    def complete_operation(
        self, arg: ProcedureArg, table: TableRecord | None, summary: Summary, ctx: JobContext
    ) -> Any:
        return next(outcome.result for outcome in summary.outcomes() if outcome.success)
