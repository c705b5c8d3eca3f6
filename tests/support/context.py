"""Runs a behavior without etcd: a JobContext, and functions for jobs, completions and whole operations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop import testing
from distop.behavior import JobFailed, OperationFailed, OutcomeRow, Summary, select
from distop.storage.deletion import Place
from distop.storage.files import local_path
from distop.storage.places import Attempt, stage_of
from distop.worker.child_side.stage_sweeping import StageSweeper, sweep_ended

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import SparkSession

    from distop.behavior import Behavior, JobContext, PartitionPlan, TableRecord


HISTORY: dict[str, dict[str, Any]] = {}
"""History records by operation, stored by :func:`store_certificate`."""


def store_certificate(certificate: Any) -> str:
    """Store a certificate in the history record of its operation; returns the operation."""
    op = str(certificate["operation"])
    HISTORY[op] = {"op": op, "state": "success", "report": {"certificate": dict(certificate)}}
    return op


def store_certificates(arg: Any) -> Any:
    """Store the certificates in an argument and replace them by their operations."""
    if not isinstance(arg, dict):
        return arg
    fields = ("since", "certificate")
    return {n: store_certificate(v) if n in fields and isinstance(v, dict) else v for n, v in arg.items()}


class FakeContext(testing.FakeContext):
    """A context with ``spark`` (None: the work must not use Spark), ``stopped`` (cancels the job), other ``tables``.

    Its history records are those of :func:`store_certificate`.
    """

    def __init__(
        self,
        work_dir: Path,
        table: TableRecord | None = None,
        spark: SparkSession | None = None,
        partition: PartitionPlan | None = None,
    ) -> None:
        operation = f"{table.name if table else '@cluster'}/validate/1"
        super().__init__(work_dir, table, partition, spark=spark, operation=operation)
        self.space = "c0ffee"
        self.shared = Place(str(work_dir))
        self.shared_dir = str(work_dir)
        self.history = HISTORY
        self.fence = 1
        self.stopped = False

    @property
    def stage_place(self) -> Place:
        assert self.partition is not None
        return self.stage_place_of(self.partition)

    def stage_place_of(self, partition: PartitionPlan) -> Place:
        return stage_of(self.shared, Attempt(self.operation, partition.partition, self.fence, "inc"))

    @property
    def stage(self) -> str:
        place = self.stage_place
        if (folder := local_path(place.location)) is not None:
            folder.mkdir(parents=True, exist_ok=True)
        return place.location

    @property
    def spark(self) -> SparkSession:
        if self._spark is None:
            raise AssertionError("this work must not use Spark")
        return self._spark

    @property
    def cancelled(self) -> bool:
        return self.stopped


class Ran:
    """The result of an operation: its report, its error message ("" if it succeeded), and its outcomes."""

    def __init__(self, report: Any, message: str, outcomes: list[OutcomeRow]) -> None:
        self.report = report
        self.message = message
        self.outcomes = outcomes

    @property
    def by_name(self) -> dict[str, OutcomeRow]:
        return {o.name: o for o in self.outcomes}


def run_operation(
    behavior: Behavior,
    table: TableRecord,
    arg: Any,
    context: Callable[[TableRecord], FakeContext],
    *,
    partitions: Sequence[PartitionPlan] | None = None,
    names: Sequence[str] | None = None,
    batches: int = 1,
) -> Ran:
    """Plan, run all jobs in ``batches`` batches, and complete, in one thread.

    ``names``: the names of the jobs to plan; None: all.
    """
    argument = behavior.Arg.model_validate(store_certificates(arg))
    given_context = context

    def context(table: TableRecord) -> FakeContext:  # type: ignore[no-redef]
        ctx = given_context(table)
        if behavior.type_name == "validate":  # it writes certificates of its operation
            ctx.operation = "/".join([table.name, "validate", ctx.operation.rpartition("/")[2]])
        return ctx

    whole, version = partitions is None and names is None, ""
    if partitions is None:
        ctx = context(table)
        planned = behavior.partitions(table, argument, ctx)
        partitions = select(behavior.jobs(argument, planned.partitions, names, ctx), None)
        table, version = table.extended(planned.options), planned.version
    rows: list[OutcomeRow] = []
    for n in range(batches):
        rows += run_jobs(behavior, argument, list(partitions[n::batches]), context(table))
    rows.sort(key=lambda r: r.partition)
    return complete(behavior, argument, table, rows, partitions, context(table), version=version, whole=whole)


def run_jobs(behavior: Behavior, argument: Any, plans: Sequence[PartitionPlan], ctx: FakeContext) -> list[OutcomeRow]:
    """The outcomes of these jobs, which run as one batch if the behavior supports batches.

    Raises errors of jobs, except JobFailed.
    """
    pairs: list[tuple[PartitionPlan, Any]] = []
    if behavior.run_batch is not None:
        pairs += behavior.run_batch(argument, plans, ctx) if plans else []
    else:
        for plan in plans:
            ctx.partition = plan
            try:
                pairs.append((plan, behavior.start_or_resume_job(argument, plan, ctx)))
            except JobFailed as e:
                pairs.append((plan, e))
    rows = []
    for plan, ended in pairs:
        failed = isinstance(ended, JobFailed)
        if isinstance(ended, Exception) and not failed:
            raise ended
        stage = stage_of(ctx.shared, Attempt(ctx.operation, plan.partition, ctx.fence, "inc"))
        result, error = _stored(ended.result if failed else ended), str(ended) if failed else ""
        rows.append(OutcomeRow(plan.partition, plan.name, not failed, result, error, stage))
    return rows


def complete(
    behavior: Behavior,
    argument: Any,
    table: TableRecord,
    rows: list[OutcomeRow],
    plans: Sequence[PartitionPlan],
    ctx: FakeContext,
    *,
    version: str,
    whole: bool = True,
) -> Ran:
    """Complete an operation with these outcomes."""
    failed = sum(not row.success for row in rows)
    counts = (len(rows), len(rows) - failed, failed)
    summary = Summary(
        *("failed" if failed else "success", *counts, lambda: iter(rows)),
        version=version,
        whole=whole,
        plan=lambda: iter(plans),
    )
    try:
        ran = Ran(_stored(behavior.complete_operation(argument, table, summary, ctx)), "", rows)
    except OperationFailed as e:
        ran = Ran(_stored(e.report), str(e), rows)
    sweep_stages(behavior, ctx)
    return ran


def sweep_stages(behavior: Behavior, ctx: JobContext) -> None:
    """Remove stages as an executor does after the end of an operation."""
    if behavior.staged_output != "remove" or ctx.shared is None:
        return
    shared = ctx.shared

    def sweeper(op: str) -> StageSweeper:
        return StageSweeper(op, shared, ctx.space, ctx.table, check=lambda: None, spark=lambda: ctx.spark, log=ctx.log)

    sweep_ended(sweeper, ctx.operation, shared, earlier=behavior.instances == "one", log=ctx.log)


def _stored(value: Any) -> Any:
    """A result after it was stored in etcd as JSON."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json")
    return json.loads(json.dumps(value, allow_nan=False))
