"""``validate`` with injected faults (``fault_injection``)."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from distop.tables.iceberg import manifest_facts
from distop_behaviors.validate import Validate, batch, certificate, certification, file_lists, scan
from distop_behaviors.validate.key_job import KeyChecks
from tests.faults.fault_injection import inject, inject_around

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distop.behavior import JobContext, PartitionPlan, Planned, Summary, TableRecord


certificate.TYPES = (*certificate.TYPES, "faulty-validate")


class _Current(threading.local):
    table: str | None = None


_current = _Current()
"""The table of the operation in this thread, if it may have faults."""


class FaultyValidate(Validate):
    """``validate`` with another type name.

    Besides its steps (``STEPS``) it has injection points around ``partitions``, ``batch``, each ``result`` (after it:
    the result may not be reported yet) and ``completion``.
    """

    type_name = "faulty-validate"

    def partitions(self, table: TableRecord, arg: Any, ctx: JobContext) -> Planned:
        with _injection_points(table, "partitions"):
            return super().partitions(table, arg, ctx)

    def run_batch(
        self, arg: Any, partitions: Sequence[PartitionPlan], ctx: JobContext
    ) -> Iterator[tuple[PartitionPlan, Any]]:
        with _injection_points(ctx.table, "batch"):
            for pair in super().run_batch(arg, partitions, ctx):
                _inject("result.before")
                yield pair
                _inject("result.after")

    def complete_operation(self, arg: Any, table: TableRecord | None, summary: Summary, ctx: JobContext) -> Any:
        with _injection_points(table, "completion"):
            return super().complete_operation(arg, table, summary, ctx)


@contextlib.contextmanager
def _injection_points(table: TableRecord | None, what: str) -> Iterator[None]:
    _current.table = None if table is None else table.name
    try:
        _inject(f"{what}.before")
        yield
        _inject(f"{what}.after")
    finally:
        _current.table = None


def _inject(point: str) -> None:
    if _current.table is not None:
        inject(_current.table, point)


STEPS: list[tuple[Any, str]] = [
    (manifest_facts, "snapshot_of"),
    (scan, "count"),
    (batch, "fetch"),
    (KeyChecks, "run"),
    (certification, "certify"),
    (file_lists, "write"),
]
for _owner, _name in STEPS:
    inject_around(_owner, _name, lambda *_: _current.table)
