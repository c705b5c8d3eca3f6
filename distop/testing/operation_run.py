"""Runs a whole operation in one process, for tests of a behavior."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop.behavior import Behavior, PartitionPlan, Planned, TableRecord
from distop.errors import InvalidArgument, NotFound
from distop.protocol.texts import did_you_mean
from distop.schemas.argument_schema import encode_argument
from distop.services.operation_results import OperationResult
from distop.services.submission.start_options import StartOptions
from distop.tables import check_table
from distop.testing.lone_executor import LoneExecutor
from distop.testing.model_store import ModelStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pyspark.sql import SparkSession

    from distop.services.inspection.outcomes import JobResult


@dataclass(frozen=True)
class OperationRun:
    """The result of an operation in a test.

    ``result``: the result of the operation. ``jobs``: the results of all jobs that have ended. ``follow_ups``: the
    operations that the completion asked to start. ``store``: all keys at the end, for a further operation that reads
    the history record. ``folder``: all written files.
    """

    result: OperationResult
    jobs: tuple[JobResult, ...]
    follow_ups: tuple[Mapping[str, Any], ...]
    store: ModelStore = field(repr=False)
    folder: Path = field(repr=False)

    @property
    def state(self) -> str:
        """``success``, ``failed`` or ``cancelled``."""
        return self.result.state

    @property
    def report(self) -> Any:
        """The report of the completion, as stored in the history record."""
        return self.result.report

    @property
    def errors(self) -> Sequence[Mapping[str, Any]]:
        """The first errors, as stored in the history record."""
        return self.result.errors

    def job(self, name: str) -> JobResult:
        """The result of the job of this partition.

        Raises NotFound if no job of this name has ended.
        """
        for one in self.jobs:
            if one.name == name:
                return one
        names = [one.name for one in self.jobs]
        hint = did_you_mean(name, names) or f" (ended: {', '.join(names) or 'none'})"
        raise NotFound(f"no job {name!r} has ended{hint}")


def run_operation(
    behavior: type[Behavior],
    arg: Any = None,
    *,
    table: TableRecord | Path | str | None = None,
    partitions: Sequence[str] | Sequence[PartitionPlan] | None = None,
    tables: Iterable[TableRecord] = (),
    spark: SparkSession | None = None,
    folder: Path | None = None,
    store: ModelStore | None = None,
    failure_policy: str | None = None,
    retry_attempts: int | None = None,
    max_failed: int | str | None = None,
) -> OperationRun:
    """Start, plan, run and complete one operation in this process, without etcd.

    It follows the rules of an executor.

    ``table``: a record, or the folder of a Parquet table; None: an operation on ``@cluster``, with one job.
    ``partitions``: the names of the partitions to run; or PartitionPlan objects, which replace the plan of the
    behavior's ``partitions()``. ``tables``: other registered tables. ``spark``: a session; None: the active session, or
    one that is started on first use. ``folder``: a folder for all files; None: a temporary one, which is removed
    together with the returned object. ``store``: the store of an earlier run, whose history record this operation
    reads. ``failure_policy``, ``retry_attempts`` and ``max_failed``: options of the start.

    Jobs run one after the other; a behavior with ``run_batch`` gets all of them in one batch. Retries do not wait for
    their back-off; a busy object store is waited for, as in an executor. Time limits, cancels and lost
    executors are not simulated.

    Raises what a start raises: InvalidArgument for a wrong argument or table. Exceptions of the behavior are in the
    result.
    """
    store = store if store is not None else ModelStore()
    with ExitStack() as temporary:
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="distop-test-"))
            temporary.callback(shutil.rmtree, folder, ignore_errors=True)
        behavior, record, names = _chosen(behavior, table, partitions, folder)
        executor = LoneExecutor(behavior, record, tables, spark, folder, store)
        options = StartOptions(
            partitions=names, failure_policy=failure_policy, retry_attempts=retry_attempts, max_failed=max_failed
        )
        executor.start(encode_argument(arg), options)
        result = OperationResult.of(executor.run())
        run = OperationRun(result, executor.results(), executor.follow_ups, store, folder)
        weakref.finalize(run, temporary.pop_all().close)
    return run


def _chosen(
    behavior: type[Behavior],
    table: TableRecord | Path | str | None,
    partitions: Sequence[str] | Sequence[PartitionPlan] | None,
    folder: Path,
) -> tuple[type[Behavior], TableRecord | None, list[str] | None]:
    """The behavior, the table's record, and the names of the partitions to run.

    The behavior has the given plan, if any.

    Raises InvalidArgument.
    """
    if isinstance(table, str | Path):
        table = TableRecord("table", "parquet", str(table))
    if plan := [one for one in partitions or () if isinstance(one, PartitionPlan)]:
        record = table if table is not None else TableRecord("table", "parquet", str(folder / "table"))
        return _planned(behavior, plan), record, None
    names = [str(one) for one in partitions] if partitions is not None else None
    if names is not None and table is None:
        raise InvalidArgument(
            "partition names need a table: pass run_operation(table=…), or pass PartitionPlan objects as partitions"
        )
    return behavior, check_table(table) if table is not None else None, names


def _planned(behavior: type[Behavior], plan: Sequence[PartitionPlan]) -> type[Behavior]:
    """A subclass of the behavior that returns this plan."""

    class Given(behavior):  # type: ignore[misc, valid-type]
        __doc__ = behavior.__doc__

        def partitions(self, table: TableRecord, arg: Any, ctx: Any) -> Planned:
            return Planned(plan)

    return Given
