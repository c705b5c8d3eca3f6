"""Checks after each fault test: etcd's history against the invariants, and written data against the jobs' outcomes.

Both cover the history that etcd has. After a compaction, they start with the keys that remained.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop.protocol import keys as K
from distop.protocol.keys import Keys
from distop.store.history import HistoryStart, Revision
from tests.support.replay import violations_in
from tests.support.writing import Journal, WritingArg, output_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from distop.protocol.records import OperationRef
    from distop.protocol.txn import KeyValue
    from distop.store.history import HistoryStep

WRITING = ("writing", "sparkwriting")


@dataclass(slots=True)
class _Operation:
    arg: WritingArg | None = None
    state: str = ""
    """The state in its history record; "" if it has not ended."""
    outcomes: dict[int, list[str]] = field(default_factory=dict)


def find_problems(steps: Iterable[HistoryStep], *, overlaps: bool = False) -> list[str]:
    """All problems of history and data. ``overlaps``: two attempts of a job may have written at the same time."""
    steps = list(steps)
    return violations_in(steps) + data_problems(steps, overlaps=overlaps)


def data_problems(steps: Iterable[HistoryStep], *, overlaps: bool = False) -> list[str]:
    """The problems of written data only."""
    found = []
    for ref, operation in _operations(steps).items():
        if operation.arg is not None:
            found += [f"{ref}: {text}" for text in _compare(operation, operation.arg, overlaps)]
    return found


def _operations(steps: Iterable[HistoryStep]) -> dict[OperationRef, _Operation]:
    found: dict[OperationRef, _Operation] = defaultdict(_Operation)
    for step in steps:
        for kv, times in _written_values(step):
            if not kv.key.startswith((f"{K.OP}.", f"{K.HISTORY}.")):
                continue
            key = Keys().parse(kv.key)
            if key.ref is None or key.ref.type not in WRITING:
                continue
            operation = found[key.ref]
            if key.family == K.HISTORY:
                if not key.name and key.chunk < 0:
                    operation.state = json.loads(kv.value)["state"]
            elif key.name == "arg":
                operation.arg = WritingArg.model_validate_json(kv.value)
            elif key.name == "outcome":
                before = [] if isinstance(step, HistoryStart) else operation.outcomes.get(key.partition, [])
                operation.outcomes[key.partition] = before + [kv.value.decode()] * times
    return found


def _written_values(step: HistoryStep) -> Iterator[tuple[KeyValue, int]]:
    """Written values, and how often each was written: for keys at the start of history this is their version."""
    if isinstance(step, HistoryStart):
        yield from ((kv, kv.version) for kv in step.kvs)
    elif isinstance(step, Revision):
        yield from ((change.kv, 1) for change in step.changes if not change.deleted)


def _compare(operation: _Operation, arg: WritingArg, overlaps: bool) -> Iterator[str]:
    for partition, written in sorted(operation.outcomes.items()):
        if len(written) > 1:
            yield f"job {partition} has {len(written)} outcomes"
        outcome: dict[str, Any] = json.loads(written[-1])
        if outcome.get("result") is not None:
            if wrong := output_error(outcome, arg.rows):
                yield f"job {partition}: {wrong}"
        elif operation.state == "success" or not outcome.get("error"):
            yield f"job {partition} has neither a result nor an error"
    if operation.state == "success" and operation.outcomes.keys() != set(range(arg.jobs)):
        yield f"it succeeded with {len(operation.outcomes)} outcomes of {arg.jobs}"
    if not overlaps:
        yield from Journal(Path(arg.journal)).overlaps()
