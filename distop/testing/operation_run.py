"""A whole operation in one process and on a model of etcd, for tests of a behavior."""

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
from distop.schemas.argument_schema import encode_argument
from distop.services.operation_results import OperationResult
from distop.tables import check_table
from distop.testing.lone_executor import LoneExecutor
from distop.testing.model_store import ModelStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pyspark.sql import SparkSession

    from distop.services.inspection.outcomes import JobResult


@dataclass(frozen=True)
class OperationRun:
    """What became of an operation: how it ended (``result``), how each job that has ended did (``jobs``), and what the
    completion asked to start (``follow_ups``). ``store`` holds the keys as they were at its end, for a further
    operation that reads its history record; ``folder`` all that was written.
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
        """What the completion returned, as the history record has it."""
        return self.result.report

    @property
    def errors(self) -> Sequence[Mapping[str, Any]]:
        """The first errors, as the history record has them."""
        return self.result.errors

    def job(self, name: str) -> JobResult:
        """The job of this partition. Raises NotFound where none of this name has ended."""
        for one in self.jobs:
            if one.name == name:
                return one
        raise NotFound(f"no job {name!r} has ended (ended: {', '.join(one.name for one in self.jobs) or 'none'})")


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
    """Start, plan, run and complete one operation, without etcd and other processes, by the rules of an executor.

    ``table``: a record, or the folder of a Parquet table; None: an operation on no table, with one job. ``partitions``:
    the names of those to run; or the plan itself, as PartitionPlan objects, in place of what the behavior's
    ``partitions()`` would plan. ``tables``: others that are registered. ``spark``: a session; None: the active one, or
    one that is started on first use. ``folder``: for all that is written (a temporary one otherwise, which goes with
    the result). ``store``: of an earlier run, whose history record this operation reads. The last three are options of
    the start.

    Jobs run one after the other (a behavior with ``run_batch``: all in one batch). The back-off of a retry is skipped.
    Time limits, cancels and lost executors are not simulated.

    Raises what a start raises: InvalidArgument for a wrong argument or table. What the behavior raises ends in the
    result.
    """
    store = store if store is not None else ModelStore()
    with ExitStack() as temporary:
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="distop-test-"))
            temporary.callback(shutil.rmtree, folder, ignore_errors=True)
        behavior, record, names = _chosen(behavior, table, partitions, folder)
        executor = LoneExecutor(behavior, record, tables, spark, folder, store)
        executor.start(encode_argument(arg), names, failure_policy, retry_attempts, max_failed)
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
    """The behavior, with the given plan if there is one; the table's record; the names of the partitions to run. Raises
    InvalidArgument.
    """
    if isinstance(table, str | Path):
        table = TableRecord("table", "parquet", str(table))
    if plan := [one for one in partitions or () if isinstance(one, PartitionPlan)]:
        record = table if table is not None else TableRecord("table", "parquet", str(folder / "table"))
        return _planned(behavior, plan), record, None
    names = [str(one) for one in partitions] if partitions is not None else None
    if names is not None and table is None:
        raise InvalidArgument("partitions are named of a table: give run_operation(table=…), or PartitionPlan objects")
    return behavior, check_table(table) if table is not None else None, names


def _planned(behavior: type[Behavior], plan: Sequence[PartitionPlan]) -> type[Behavior]:
    """The behavior with this plan in place of its own."""

    class Given(behavior):  # type: ignore[misc, valid-type]
        __doc__ = behavior.__doc__

        def partitions(self, table: TableRecord, arg: Any, ctx: Any) -> Planned:
            return Planned(plan)

    return Given
