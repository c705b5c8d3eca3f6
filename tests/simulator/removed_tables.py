"""Checks removals of tables, by users and by operations.

No operation starts on an absent table. No table is removed while operations run, except by the plan of the only one.
That one removes the record once, together with its plan, and none that was registered after its start. Its copy of the
record is the removed one, and stays until the operation's last keys go. Invariant 6 checks that instance numbers
continue after a table is added again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.protocol import keys as K
from distop.protocol.json_codec import loads
from distop.protocol.records import CLUSTER_TABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distop.protocol.keys import ParsedKey
    from distop.protocol.records import OperationRef
    from distop.protocol.revisioned import Change
    from distop.protocol.txn import KeyValue


class TableRemovals:
    """Folds each revision. ``found(kind, key, text, op, partition)`` is called for each breach."""

    def __init__(self, found: Callable[..., None]) -> None:
        self._found = found
        self._tables: dict[str, KeyValue | None] = {CLUSTER_TABLE: None}
        """Registered tables with their records."""
        self._running: dict[str, bytes] = {}
        self.removed = 0
        """Number of removed tables."""
        self.removed_by: list[str] = []
        """The operations whose plans have removed a table, in order."""
        self._started: dict[str, dict[str, int]] = {}
        """Table → the operations that were started on it, each with the revision of its start."""
        self.started_before: set[str] = set()
        """The operations that were started before a removal of their table, which ends their series."""

    def step(self, parsed: Sequence[tuple[ParsedKey, Change]]) -> None:
        """Fold one whole revision."""
        removers: dict[str, tuple[OperationRef, KeyValue]] = {}
        for key, change in parsed:
            if key.name == "runOps":
                self._running[key.table] = change.kv.value
            elif key.family == K.TABLE and not change.deleted:
                self._tables[key.table] = change.kv
            elif key.family == K.REMOVED_TABLE and key.ref is not None:
                if change.deleted:
                    self._copy_goes(key.ref, change.kv.key, parsed)
                else:
                    removers[key.table] = key.ref, change.kv
        for key, change in parsed:
            if key.family == K.TABLE and change.deleted:
                record = self._tables.pop(key.table, None)
                self.removed += 1
                remover = removers.pop(key.table, None)
                running = loads(self._running.get(key.table, b"{}"))
                if remover is not None:
                    self._removed_by(*remover, record, parsed)
                    running.pop(remover[0].type, None)
                self.started_before |= set(self._started.get(key.table, ()))
                if running:
                    self._found("table removed too early", change.kv.key, f"{running} run on {key.table}")
            elif key.family == K.OP and key.name == "spec" and not change.deleted:
                self._started.setdefault(key.table, {})[str(key.ref)] = change.kv.mod_revision
                if key.table not in self._tables:
                    text = f"{key.ref} starts on a table that is not registered"
                    self._found("no such table", change.kv.key, text, str(key.ref))
        for ref, copy in removers.values():
            self._found("wrong removal", copy.key, f"{ref} has a copy of a record that was not removed", str(ref))

    def _removed_by(
        self,
        ref: OperationRef,
        copy: KeyValue,
        record: KeyValue | None,
        parsed: Sequence[tuple[ParsedKey, Change]],
    ) -> None:
        """Judge the removal by the plan of an operation. ``record``: the removed one."""
        wrong = []
        if str(ref) in self.removed_by:
            wrong.append("removes a table again")
        started = self._started.get(ref.table, {}).get(str(ref), 0)
        if record is None or record.mod_revision >= started:
            wrong.append("removes a record that was registered after its start")
        if record is None or record.value != copy.value:
            wrong.append("has a copy that is not the removed record")
        if not any(key.ref == ref and (key.name, key.chunk) == ("plan", -1) and not c.deleted for key, c in parsed):
            wrong.append("removes a record without writing its plan")
        self.removed_by.append(str(ref))
        for text in wrong:
            self._found("wrong removal", copy.key, f"{ref} {text}", str(ref))

    def _copy_goes(self, ref: OperationRef, key: str, parsed: Sequence[tuple[ParsedKey, Change]]) -> None:
        if not any(one.ref == ref and one.name == "state" and change.deleted for one, change in parsed):
            self._found("wrong removal", key, f"the copy of {ref} goes before the operation", str(ref))
