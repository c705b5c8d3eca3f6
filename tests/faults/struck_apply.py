"""``apply`` in a child that is struck at a step of its work (``striking``)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop.worker.child_side.job_context import ChildContext
from distop_behaviors.apply import Apply
from distop_behaviors.apply.apply_loop import Applying
from distop_behaviors.apply.catalog_commit import CatalogTarget
from distop_behaviors.apply.hadoop_commit import HadoopTarget
from distop_behaviors.apply.rewrite_publication import Narrowing
from tests.faults.striking import STRIKES, hang_on

if TYPE_CHECKING:
    from collections.abc import Mapping


class StruckApply(Apply):
    """``apply``, by another name."""

    type_name = "struck-apply"


_of_daemon = ChildContext.history_record


def _history_record(self: ChildContext, op: str) -> Mapping[str, Any]:
    """Of a validation that the test has run without daemons (``Strikes.present``)."""
    path = Path(os.environ[STRIKES]) / f"{op.replace('/', '.')}.history"
    if not path.exists():
        return _of_daemon(self, op)
    record: dict[str, Any] = json.loads(path.read_text())
    return record


if STRIKES in os.environ:
    ChildContext.history_record = _history_record  # type: ignore[method-assign]

STEPS: list[tuple[Any, str]] = [
    *((Applying, name) for name in ("load", "judge", "commit", "settle")),
    (CatalogTarget, "swap"),
    (HadoopTarget, "rewrite"),
    *((Narrowing, name) for name in ("stage", "publish", "sweep")),
]
for _owner, _name in STEPS:
    hang_on(_owner, _name, lambda self, *_: self._table.name)
