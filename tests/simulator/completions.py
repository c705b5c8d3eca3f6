"""Checks of completion code at the moment it runs: the state in etcd, and the outcomes that it gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.protocol.jobs import JobState
from distop.protocol.keys import state_ordinal
from distop.protocol.plan import Plan
from tests.simulator.simulated_behaviors import TYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef
    from distop.testing.model_store import ModelStore


class Completions:
    """Checks each call of completion code. ``found(kind, key, text, operation)`` is called for each breach."""

    def __init__(self, store: ModelStore, keys: Keys, found: Callable[[str, str, str, str], None]) -> None:
        self._store = store
        self._keys = keys
        self._found = found

    def runs(
        self, ref: OperationRef, verdict: str, total: int, success: int, failed: int, rows: Sequence[Mapping[str, Any]]
    ) -> None:
        """Check one call: the decision is written, and the outcomes match the counts.

        For code that only makes a report, all jobs have ended instead. A call after the operation's end is ignored, as
        its result is dropped.
        """
        if self._store.get(self._keys.history(ref)) is not None:
            return
        where = self._keys.of(ref, "decision")
        if self._store.get(where) is None and not self._all_ended(ref, verdict, total, success, failed):
            self._found("completion before decision", where, "completion code runs before the decision", str(ref))
            return
        shown = (len(rows), sum(bool(row["success"]) for row in rows))
        if verdict != "cancelled" and shown != (success + failed, success):
            text = f"completion code gets the counts {success} + {failed}, but the outcomes {shown}"
            self._found("outcomes lost", where, text, str(ref))

    def _all_ended(self, ref: OperationRef, verdict: str, *counts: int) -> bool:
        """Whether the code only makes a report, all jobs have ended, and its counts are right."""
        plan = self._store.get(self._keys.of(ref, "plan"))
        if plan is None or not TYPES[ref.type].reports_only:
            return False
        ends = [kv.value for kv in self._store.range(*self._keys.jobs_range(ref)) if state_ordinal(kv.key) is not None]
        total, success = Plan.decode(plan.value).count, ends.count(JobState.SUCCESS.encode())
        right = "success" if success == total else "failed"
        return len(ends) == total and counts == (total, success, total - success) and verdict == right
