"""The audit: etcd's own history, as it is told, held against the invariants
(docs/internals/architecture.md, "Invariants").
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.invariants.checker import Checker
from distop.invariants.replay_state import NUMBERS
from distop.protocol import keys as K
from distop.store.history import Beginning, HistoryReader, Revision

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from distop.invariants.replay_state import Violation
    from distop.protocol.keys import Keys, ParsedKey
    from distop.protocol.records import OperationRef
    from distop.protocol.revisioned import Change
    from distop.store.client import EtcdClient
    from distop.store.history import Step

__all__ = ["Audit", "Totals", "history"]


def history(client: EtcdClient, keys: Keys, *, follow: bool = False) -> AsyncGenerator[Step, None]:
    """The history of all of distop's keys in a namespace. Raises what ``HistoryReader.steps`` raises."""
    return HistoryReader(client, *keys.everything(), follow=follow).steps()


@dataclass(slots=True)
class Totals:
    """What was checked. ``lost``: (first, last) revisions that were compacted before they could be read."""

    first: int = 1
    last: int = 0
    revisions: int = 0
    changes: int = 0
    operations: int = 0
    jobs: int = 0
    lost: list[tuple[int, int]] = field(default_factory=list)


class Audit:
    """A fold over the steps of a history. With ``ref``, everything is replayed (counters and elections depend on all of
    a table's operations), and what concerns that operation, or what it depends on, is told.
    """

    def __init__(self, keys: Keys, ref: OperationRef | None = None) -> None:
        self.totals = Totals()
        self.violation: Violation | None = None
        """The first one."""
        self.known = ref is None
        """Whether the operation that is asked for occurs: its keys, or its history record."""
        self.concerning = 0
        """Revisions that were checked and wrote something of the operation that is asked for."""
        self._keys = keys
        self._ref = ref
        self._record = keys.history(ref) if ref is not None else ""
        self._roots = tuple(f"{root}." for root in (*keys.roots(ref), self._record)) if ref is not None else ()
        self._own = (keys.gate(ref), keys.pending(ref), self._record) if ref is not None else ()
        self._checker = Checker(keys)
        self._before = (0, 0)
        """Operations and jobs that were seen before history was lost; those that went on are counted again."""

    def take(self, step: Step) -> None:
        """The next step. Nothing is taken in after a violation was found."""
        if self.violation is not None:
            return
        if isinstance(step, Beginning):
            self._begin(step)
        elif isinstance(step, Revision):
            self._revision(step)
        else:
            self.totals.last = max(self.totals.last, step.revision)

    def _begin(self, step: Beginning) -> None:
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
        """Whether a change is one of the operation's life; that its history is dropped long after is not."""
        key = change.kv.key
        if change.deleted and key.startswith(self._record):
            return False
        return key in self._own or key.startswith(self._roots)

    @property
    def unseen(self) -> bool:
        """Nothing of the operation that is asked for was checked: there is no more of it than its end, or how it stood
        where the history that is kept begins.
        """
        return self._ref is not None and not self.concerning

    def summary(self) -> str:
        """What was checked, and what was not, in one line."""
        totals, ref = self.totals, self._ref
        told = f"checked revisions {totals.first} to {totals.last} ({totals.revisions:,} of distop, "
        if totals.last < totals.first:
            told = f"checked nothing: nothing came after revision {totals.last}"
        elif not totals.revisions:
            told = f"checked nothing: distop wrote nothing from revision {totals.first} to {totals.last}"
        elif self.unseen:
            told = f"checked nothing of {ref}: revisions {totals.first} to {totals.last} have nothing of it"
        else:
            of_it = f"{self.concerning:,} of them of {ref}, " if ref is not None else ""
            told += f"{of_it}{totals.changes:,} changes): {_so_many(totals.operations, 'operation')}, "
            told += f"{_so_many(totals.jobs, 'job')}, {len(NUMBERS)} invariants"
        lost = ", ".join(f"{first}–{last}" for first, last in totals.lost)
        return f"{told}; not checked: revisions {lost}" if lost else told

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
        """The result as ``distop audit --json`` prints it."""
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


def _so_many(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count != 1 else ''}"


def _depends(ref: OperationRef, key: ParsedKey) -> bool:
    """Whether an operation depends on a key that belongs to none."""
    if key.family == K.NODE:
        return True
    if key.table != ref.table:
        return False
    return key.name == "runOps" or key.type == ref.type
