"""``validate`` in a child that is struck at a step of its work (``striking``)."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from distop.tables.iceberg import manifest_facts
from distop_behaviors.validate import Validate, batch, certificate, certification, file_lists, scan
from distop_behaviors.validate.key_job import KeyChecks
from tests.faults.striking import hang_on, strike

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distop.behavior import JobContext, PartitionPlan, Planned, Summary, TableRecord


certificate.TYPES = (*certificate.TYPES, "struck-validate")


class _Now(threading.local):
    table: str | None = None


_now = _Now()
"""The table of the operation that runs in this thread, if it is one to be struck."""


class StruckValidate(Validate):
    """``validate``, by another name. Besides its steps (``STEPS``) it is struck around ``partitions``, around each
    ``result`` (after one: it was handed over to be reported, and may not be yet) and around ``completion``.
    """

    type_name = "struck-validate"

    def partitions(self, table: TableRecord, arg: Any, ctx: JobContext) -> Planned:
        with _at_work(table, "partitions"):
            return super().partitions(table, arg, ctx)

    def run_batch(
        self, arg: Any, partitions: Sequence[PartitionPlan], ctx: JobContext
    ) -> Iterator[tuple[PartitionPlan, Any]]:
        with _at_work(ctx.table, "batch"):
            for pair in super().run_batch(arg, partitions, ctx):
                _strike("result.before")
                yield pair
                _strike("result.after")

    def complete_operation(self, arg: Any, table: TableRecord | None, summary: Summary, ctx: JobContext) -> Any:
        with _at_work(table, "completion"):
            return super().complete_operation(arg, table, summary, ctx)


@contextlib.contextmanager
def _at_work(table: TableRecord | None, what: str) -> Iterator[None]:
    _now.table = None if table is None else table.name
    try:
        _strike(f"{what}.before")
        yield
        _strike(f"{what}.after")
    finally:
        _now.table = None


def _strike(point: str) -> None:
    if _now.table is not None:
        strike(_now.table, point)


STEPS: list[tuple[Any, str]] = [
    (manifest_facts, "snapshot_of"),
    (scan, "count"),
    (batch, "fetch"),
    (KeyChecks, "run"),
    (certification, "certify"),
    (file_lists, "write"),
]
for _owner, _name in STEPS:
    hang_on(_owner, _name, lambda *_: _now.table)
