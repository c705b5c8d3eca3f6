"""Runs ``export`` without etcd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.storage.opened_stores import open_store
from distop_behaviors.export import Export
from tests.support.context import FakeContext, complete, run_jobs

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from distop.behavior import PartitionPlan, TableRecord
    from tests.support.context import Ran


class ExportRun:
    """Exports of a table to one target. ``tables``: other registered tables."""

    def __init__(self, table: TableRecord, target: str, work: Path, tables: Iterable[TableRecord] = ()) -> None:
        self.table = table
        self.target = target
        self._work = work
        self._tables = {one.name: one for one in tables}
        self.operation = f"{table.name}/export/1"
        self.registrations: list[TableRecord] = []

    def context(self) -> FakeContext:
        ctx = FakeContext(self._work, self.table)
        ctx.tables = self._tables
        ctx.operation = self.operation
        return ctx

    def argument(self, **arg: Any) -> Any:
        return Export.Arg.model_validate({"to": self.target, **arg})

    def plan(self, **arg: Any) -> tuple[list[PartitionPlan], str]:
        planned = Export().partitions(self.table, self.argument(**arg), self.context())
        return list(planned.partitions), planned.version

    def jobs(self, plans: list[PartitionPlan], ctx: FakeContext | None = None, **arg: Any) -> list[Any]:
        """The outcomes of jobs, which run as one batch."""
        return run_jobs(Export(), self.argument(**arg), plans, ctx or self.context())

    def run(self, **arg: Any) -> Ran:
        """Plan, run the jobs and complete."""
        plans, version = self.plan(**arg)
        rows = self.jobs(plans, **arg)
        return self.complete(rows, plans, version, **arg)

    def complete(self, rows: list[Any], plans: list[PartitionPlan], version: str, /, **arg: Any) -> Ran:
        ctx = self.context()
        ran = complete(Export(), self.argument(**arg), self.table, rows, plans, ctx, version=version)
        self.registrations = ctx.registrations
        return ran

    def contents(self) -> dict[str, bytes]:
        """The objects at the target, without the pages and the owner's record."""
        store = open_store(self.target)
        found = {one.key: store.get(one.key, limit=1 << 24).data for one in store.list()}
        return {key: data for key, data in found.items() if not key.startswith("_distop/")}
