"""``apply`` with injected faults (``fault_injection``)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop.tables import commit_file
from distop.worker.child_side.job_context import ChildContext
from distop_behaviors.apply import Apply
from distop_behaviors.apply.apply_loop import Applying
from distop_behaviors.apply.catalog_commit import CatalogTarget
from distop_behaviors.apply.delta_commit import DeltaTarget
from distop_behaviors.apply.hadoop_commit import HadoopTarget
from distop_behaviors.apply.rewrite_publication import Narrowing
from tests.faults.fault_injection import FAULTS, inject_around

if TYPE_CHECKING:
    from collections.abc import Mapping


class FaultyApply(Apply):
    """``apply`` with another type name."""

    type_name = "faulty-apply"


_original_history_record = ChildContext.history_record


def _history_record(self: ChildContext, op: str) -> Mapping[str, Any]:
    """The record of a validation that the test ran without daemons (``FaultInjector.add_certificate``)."""
    path = Path(os.environ[FAULTS]) / f"{op.replace('/', '.')}.history"
    if not path.exists():
        return _original_history_record(self, op)
    record: dict[str, Any] = json.loads(path.read_text())
    return record


if FAULTS in os.environ:
    ChildContext.history_record = _history_record  # type: ignore[method-assign]

STEPS: list[tuple[Any, str]] = [
    *((Applying, name) for name in ("load", "judge", "commit", "settle")),
    (CatalogTarget, "swap"),
    (DeltaTarget, "swap"),
    *((HadoopTarget, name) for name in ("swap", "rewrite")),
    *((Narrowing, name) for name in ("stage", "publish")),
]
for _owner, _name in STEPS:
    inject_around(_owner, _name, lambda self, *_: self._table.name)
inject_around(commit_file, "create", lambda place, *_: Path(place.anchor).name)
