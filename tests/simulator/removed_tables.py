"""Checks removals of tables: no operation starts on an absent table, and no table is removed while operations run.

Invariant 6 checks that instance numbers continue after a table is added again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.protocol import keys as K
from distop.protocol.json_codec import loads
from distop.protocol.records import CLUSTER_TABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distop.protocol.keys import ParsedKey
    from distop.protocol.revisioned import Change


class TableRemovals:
    """Folds each revision. ``found(kind, key, text, op, partition)`` is called for each breach."""

    def __init__(self, found: Callable[..., None]) -> None:
        self._found = found
        self._tables = {CLUSTER_TABLE}
        self._running: dict[str, bytes] = {}
        self.removed = 0
        """Number of removed tables."""
        self._started: dict[str, set[str]] = {}
        """Table → the operations that were started on it."""
        self.started_before: set[str] = set()
        """The operations that were started before a removal of their table, which ends their series."""

    def step(self, parsed: Sequence[tuple[ParsedKey, Change]]) -> None:
        """Fold one whole revision."""
        for key, change in parsed:
            if key.name == "runOps":
                self._running[key.table] = change.kv.value
            elif key.family == K.TABLE and not change.deleted:
                self._tables.add(key.table)
        for key, change in parsed:
            if key.family == K.TABLE and change.deleted:
                self._tables.discard(key.table)
                self.removed += 1
                self.started_before |= self._started.get(key.table, set())
                if running := loads(self._running.get(key.table, b"{}")):
                    self._found("table removed too early", change.kv.key, f"{running} run on {key.table}")
            elif key.family == K.OP and key.name == "spec" and not change.deleted:
                self._started.setdefault(key.table, set()).add(str(key.ref))
                if key.table not in self._tables:
                    text = f"{key.ref} starts on a table that is not registered"
                    self._found("no such table", change.kv.key, text, str(key.ref))
