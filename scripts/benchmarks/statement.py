"""An operation type for measurements: one hand-written SQL statement in the Spark session that validate uses.

Both sides run in one JVM, because the speed of the same query differs by a third between JVMs.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from distop.behavior import Behavior, PartitionPlan, Planned
from distop_behaviors.reading.check_session import session_of

if TYPE_CHECKING:
    from distop.behavior import JobContext, Summary, TableRecord

VIEW = "hand_written"

_viewed: list[str] = []
"""The location that the view reads."""


class StatementArg(BaseModel):
    """``sql`` on the view ``hand_written`` of ``location``.

    ``listing``: the time includes creating the DataFrame, which lists the files. ``others``: further views and their
    locations.
    """

    location: str
    format: str = "parquet"
    sql: str
    listing: bool = False
    others: dict[str, str] = {}


class Answer(BaseModel):
    """The only row of the result, and the seconds that the statement took."""

    row: list[int]
    seconds: float


class Statement(Behavior):
    """Runs and times one statement, in one job."""

    type_name = "statement"
    Arg = StatementArg
    Result = Answer
    Report = Answer
    reports_only = True

    def partitions(self, table: TableRecord, arg: StatementArg, ctx: JobContext) -> Planned:
        return Planned([PartitionPlan(0, "statement")])

    def start_or_resume_job(self, arg: StatementArg, partition: PartitionPlan, ctx: JobContext) -> Answer:
        session = session_of(ctx.spark)
        viewed = _viewed == [arg.location] and session.catalog.tableExists(VIEW)
        for name, location in arg.others.items():
            if not session.catalog.tableExists(name):
                session.read.parquet(location).createOrReplaceTempView(name)
        began = time.perf_counter()
        if arg.listing or not viewed:
            session.read.format(arg.format).load(arg.location).createOrReplaceTempView(VIEW)
            _viewed[:] = [arg.location]
        if not arg.listing:
            began = time.perf_counter()
        (row,) = session.sql(arg.sql).collect()
        return Answer(row=[int(count) for count in row], seconds=time.perf_counter() - began)

    def complete_operation(
        self, arg: StatementArg, table: TableRecord | None, summary: Summary, ctx: JobContext
    ) -> Any:
        return next(outcome.result for outcome in summary.outcomes() if outcome.success)
