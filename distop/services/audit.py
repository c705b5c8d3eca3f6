"""The audit: checks etcd's history against the invariants (docs/internals/architecture.md, "Invariants")."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from distop.errors import InvalidArgument
from distop.invariants.checker import Checker
from distop.invariants.replay_state import NUMBERS
from distop.protocol import keys as K
from distop.store.history import CaughtUp, HistoryReader, HistoryStart, Revision

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from distop.invariants.replay_state import Violation
    from distop.protocol.keys import Keys, ParsedKey
    from distop.protocol.records import OperationRef
    from distop.protocol.revisioned import Change
    from distop.store.client import EtcdClient
    from distop.store.history import HistoryStep

__all__ = ["Audit", "Totals", "history"]

Moment: TypeAlias = Literal["lost", "caught up", "violation"]
"""``lost``: revisions were compacted before they could be read. ``caught up``: all that is there was read."""


def history(client: EtcdClient, keys: Keys, *, follow: bool = False) -> AsyncGenerator[HistoryStep, None]:
    """The history of all of distop's keys in a namespace. Raises the errors of ``HistoryReader.steps``."""
    return HistoryReader(client, *keys.everything(), follow=follow).steps()


@dataclass(slots=True)
class Totals:
    """Counts of what was checked. ``lost``: (first, last) ranges of revisions that were compacted before the audit."""

    first: int = 1
    last: int = 0
    revisions: int = 0
    changes: int = 0
    operations: int = 0
    jobs: int = 0
    lost: list[tuple[int, int]] = field(default_factory=list)


class Audit:
    """Checks the steps of a history, one after the other.

    With ``ref``, all steps are replayed, since counters and elections depend on all of a table's operations, but only
    violations of that operation and its dependencies are reported.
    """

    def __init__(self, keys: Keys, ref: OperationRef | None = None) -> None:
        self.totals = Totals()
        self.violation: Violation | None = None
        """The first violation."""
        self.known = ref is None
        """Whether the history has keys or the history record of ``ref``."""
        self.concerning = 0
        """Number of checked revisions that wrote keys of ``ref``."""
        self._keys = keys
        self._ref = ref
        self._record = keys.history(ref) if ref is not None else ""
        self._roots = tuple(f"{root}." for root in (*keys.roots(ref), self._record)) if ref is not None else ()
        self._own = (keys.gate(ref), keys.pending(ref), self._record) if ref is not None else ()
        self._checker = Checker(keys)
        self._before = (0, 0)
        """Numbers of operations and jobs before the last loss of history; running ones are counted again."""

    def take(self, step: HistoryStep) -> None:
        """Check the next step. Steps after a violation are ignored."""
        if self.violation is not None:
            return
        if isinstance(step, HistoryStart):
            self._restart(step)
        elif isinstance(step, Revision):
            self._revision(step)
        else:
            self.totals.last = max(self.totals.last, step.revision)

    async def run(self, steps: AsyncGenerator[HistoryStep, None]) -> AsyncGenerator[Moment, None]:
        """Check a history, and yield each moment to report. Ends at a violation."""
        async with aclosing(steps) as stream:
            async for step in stream:
                self.take(step)
                if self.violation is not None:
                    yield "violation"
                    return
                if isinstance(step, HistoryStart):
                    yield "lost"
                if isinstance(step, CaughtUp):
                    yield "caught up"

    def _restart(self, step: HistoryStart) -> None:
        totals = self.totals
        totals.lost.append((step.lost, step.revision))
        if not totals.revisions:
            totals.first = step.revision + 1
        totals.last = step.revision
        self._before = (totals.operations, totals.jobs)
        self._checker = Checker(self._keys)
        self._checker.begin(step.kvs)
        self._count(any(kv.key == self._record for kv in step.kvs))

    def _revision(self, step: Revision) -> None:
        totals = self.totals
        totals.revisions += 1
        totals.changes += len(step.changes)
        totals.last = step.number
        found = [v for v in self._checker.feed(step.number, step.changes) if self._concerns(v)]
        if self._ref is not None:
            self.concerning += any(self._is_of_it(change) for change in step.changes)
        self._count(not self.known and any(change.kv.key == self._record for change in step.changes))
        if found:
            self.violation = found[0]

    def _count(self, recorded: bool) -> None:
        totals, checker = self.totals, self._checker
        if self._ref is None:
            totals.operations = self._before[0] + checker.operations_seen
            totals.jobs = self._before[1] + checker.jobs_seen
            return
        self.known = self.known or recorded or self._ref in checker.operations
        if self.concerning:
            totals.operations = 1
            totals.jobs = max(totals.jobs, checker.jobs_of(self._ref))

    def _is_of_it(self, change: Change) -> bool:
        """Whether a change belongs to the operation; the later deletion of its history record does not."""
        key = change.kv.key
        if change.deleted and key.startswith(self._record):
            return False
        return key in self._own or key.startswith(self._roots)

    @property
    def unseen(self) -> bool:
        """Whether no change of ``ref`` was checked: the kept history has only its record or its initial state."""
        return self._ref is not None and not self.concerning

    def summary(self) -> str:
        """What was checked and what was not, in one line."""
        totals, ref = self.totals, self._ref
        if totals.last < totals.first:
            text = f"checked nothing: there are no revisions after {totals.last}"
        elif not totals.revisions:
            text = f"checked nothing: distop wrote nothing in revisions {totals.first} to {totals.last}"
        elif self.unseen:
            text = f"checked nothing of {ref}: revisions {totals.first} to {totals.last} have no changes of it"
        else:
            own = f"{self.concerning:,} of them of {ref}, " if ref is not None else ""
            text = f"checked revisions {totals.first} to {totals.last} ({totals.revisions:,} of distop, {own}"
            text += f"{totals.changes:,} changes): {_counted(totals.operations, 'operation')}, "
            text += f"{_counted(totals.jobs, 'job')}, {len(NUMBERS)} invariants"
        lost = ", ".join(f"{first}–{last}" for first, last in totals.lost)
        return f"{text}; not checked: revisions {lost}" if lost else text

    def _concerns(self, violation: Violation) -> bool:
        ref = self._ref
        if ref is None:
            return True
        try:
            key = self._keys.parse(violation.key)
        except InvalidArgument:
            return False
        return key.ref == ref if key.ref is not None else _depends(ref, key)

    def to_json(self) -> dict[str, Any]:
        """The result for ``distop audit --json``."""
        totals, violation = self.totals, self.violation
        return {
            "ok": violation is None,
            "summary": self.summary(),
            "first_revision": totals.first,
            "last_revision": totals.last,
            "revisions": totals.revisions,
            "changes": totals.changes,
            "operations": totals.operations,
            "jobs": totals.jobs,
            "invariants": list(NUMBERS),
            "lost": [list(pair) for pair in totals.lost],
            "violation": None
            if violation is None
            else {
                "invariant": violation.invariant,
                "revision": violation.revision,
                "key": violation.key,
                "text": violation.text,
                "story": list(violation.story),
            },
        }


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count != 1 else ''}"


def _depends(ref: OperationRef, key: ParsedKey) -> bool:
    """Whether an operation depends on a key that belongs to no operation."""
    if key.family == K.NODE:
        return True
    if key.table != ref.table:
        return False
    return key.name == "runOps" or key.type == ref.type
