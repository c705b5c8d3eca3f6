"""A table under test, on which validate runs in several ways that must agree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from distop.behavior import TableRecord
from distop.tables import plan_table
from distop_behaviors.validate import Validate
from tests.support.context import Ran, run_operation

if TYPE_CHECKING:
    from pathlib import Path


class Table:
    """A folder of Parquet files to which a test adds files, and on which it runs validate."""

    def __init__(self, directory: Path, context: Any) -> None:
        self.directory = directory
        self.context = context
        self.options: dict[str, Any] = {}

    @property
    def record(self) -> TableRecord:
        return TableRecord("t", "parquet", str(self.directory), self.options)

    def add(self, name: str, data: Any, **options: Any) -> Path:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(data if isinstance(data, pa.Table) else pa.table(data), path, **options)
        return path

    def run(self, *checks: dict[str, Any], **arg: Any) -> Ran:
        return run_operation(Validate(), self.record, {"checks": list(checks), **arg}, self.context)

    def agrees(self, *checks: dict[str, Any], **arg: Any) -> list[tuple[str, int]]:
        """(verdict, violations) of each check; equal with statistics, by a scan, and in batches of one partition."""
        runs = [self.run(*checks, statistics=mode, **arg) for mode in ("auto", "never")]
        plans = plan_table(self.record).partitions
        if len(plans) > 1:
            argument = {"checks": list(checks), **arg}
            runs.append(run_operation(Validate(), self.record, argument, self.context, batches=len(plans)))
        answers = [[(c["verdict"], c["violations"], c["error"]) for c in r.report["checks"]] for r in runs]
        assert all(a == answers[0] for a in answers)
        return [(verdict, violations) for verdict, violations, _ in answers[0]]


def between(column: str, low: Any = None, high: Any = None) -> dict[str, Any]:
    spec = {"column": column, **({} if low is None else {"min": low}), **({} if high is None else {"max": high})}
    return {"range": spec}
