"""Counts by file in one stage: what each task has counted is fetched as it is, and added up here.

Spark adds up in a second stage, for which it plans a query anew whenever it runs. Here there is nothing to plan: a row
for each file that a task met is all that comes, and a file is in as many tasks as it has splits. So the first stage is
kept as Spark has planned it, and run again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.jvm import active

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_AGGREGATION = "HashAggregate"


def of_tasks(session: SparkSession, query: DataFrame) -> tuple[DataFrame, Any] | None:
    """The partial counts that each task makes, to be added up by key, and the plan.

    They are computed anew whenever they are collected. None where Spark plans the query in another way, or reads more
    than the files for it. Raises what Spark raises.

    Functions that read the clock keep the answer of now: such a query must not be kept.
    """
    from pyspark.sql.classic.dataframe import DataFrame as Classic

    # Before Spark has put a shuffle between what its tasks count and what adds that up.
    whole = query._jdf.queryExecution().sparkPlan()
    if str(whole.nodeName()) != _AGGREGATION:
        return None
    partial = whole.child()
    if str(partial.nodeName()) != _AGGREGATION:
        return None
    if partial.output().length() != len(query.columns):
        return None  # what is always 0, or counted twice, is not made, and comes back in what adds them up
    if partial.collectLeaves().length() != 1:
        return None  # what else is read beside the files would be read before each run
    jvm: Any = session._jvm
    jsession: Any = session._jsparkSession
    with active(session):
        stage = jvm.org.apache.spark.sql.execution.QueryExecution.prepareExecutedPlan(jsession, partial)
        frame = Classic(jsession.internalCreateDataFrame(stage.execute(), stage.schema(), False), session)
        return frame, stage
