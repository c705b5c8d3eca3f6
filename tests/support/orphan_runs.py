"""Runs ``remove-orphans`` and ``restore`` without etcd, and compares what is on the disk before and after."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop.behavior import JobFailed
from distop.storage.deletion_scope import OWN
from distop.storage.opened_stores import open_store
from distop_behaviors.orphans import RemoveOrphans, Restore
from tests.support.context import FakeContext, complete, run_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from distop.behavior import PartitionPlan, TableRecord

NOW = {"older_than": 0, "allow_recent": True}
"""The argument for files that were just written."""


def snapshot(folder: Path) -> dict[str, bytes | str]:
    """The content of every file below a folder, and the target of every link, by path."""
    found: dict[str, bytes | str] = {}
    for where, folders, files in os.walk(folder):
        for name in (*files, *folders):
            path = os.path.join(where, name)  # noqa: PTH118 -- also of names that are not UTF-8
            if os.path.islink(path):  # noqa: PTH114
                found[path] = os.readlink(path)  # noqa: PTH115
            elif name in files:
                found[path] = Path(path).read_bytes()
    return found


def wait_until_older(location: str) -> None:
    """Wait until all files of a store are older than its time."""
    store = open_store(location)
    newest = max((one.modified for one in store.list()), default=0.0)
    while store.time(OWN) <= newest:
        pass


class Run:
    """An operation on a table. ``tables``: other registered tables."""

    def __init__(
        self,
        table: TableRecord,
        work: Path,
        tables: Iterable[TableRecord] = (),
        *,
        operation: str = "",
    ) -> None:
        self.table = table
        self.operation = operation or f"{table.name}/remove-orphans/1"
        self._work = work
        self._tables = {one.name: one for one in tables}
        self.checkpoint: Any = None

    def context(self) -> FakeContext:
        ctx = FakeContext(self._work, self.table)
        ctx.tables = self._tables
        ctx.operation = self.operation
        return ctx

    def plan(self, **arg: Any) -> list[PartitionPlan]:
        argument = RemoveOrphans.Arg.model_validate({**NOW, **arg})
        return list(RemoveOrphans().partitions(self.table, argument, self.context()).partitions)

    def remove(self, plans: list[PartitionPlan], **arg: Any) -> dict[str, Any]:
        """Run the jobs; returns the report."""
        argument = RemoveOrphans.Arg.model_validate({**NOW, **arg})
        rows = []
        for plan in plans:
            rows += self._job(argument, plan)
        ran = complete(RemoveOrphans(), argument, self.table, rows, plans, self.context(), version="")
        return dict(ran.report)

    def _job(self, argument: Any, plan: PartitionPlan) -> list[Any]:
        return run_jobs(RemoveOrphans(), argument, [plan], self.context())

    def run(self, between: Callable[[], None] = lambda: None, **arg: Any) -> dict[str, Any]:
        """Plan, call ``between``, and run the jobs; returns the report."""
        plans = self.plan(**arg)
        between()
        return self.remove(plans, **arg)

    def restore(self, **arg: Any) -> dict[str, Any]:
        """Move the files of this operation back; returns the report."""
        argument = Restore.Arg.model_validate({"operation": self.operation, **arg})
        ctx = self.context()
        ctx.operation = f"{self.table.name}/restore/1"
        [plan] = Restore().partitions(self.table, argument, ctx).partitions
        ctx.partition = plan
        try:
            return dict(Restore().start_or_resume_job(argument, plan, ctx).model_dump(mode="json"))
        except JobFailed as error:
            return dict(error.result.model_dump(mode="json"))
