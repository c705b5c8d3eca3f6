"""The action log: one line of JSON for each user action that this executor handles.

The record in etcd is authoritative; the log is a copy for log collectors. If another executor takes over an operation,
its lines may be repeated: operation, action and time identify a line.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol import user_actions as a
from distop.protocol.json_codec import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from distop.decide.operation_view import OperationView
    from distop.protocol.keys import Keys
    from distop.protocol.records import History, OperationRef
    from distop.runtime.logs import ContextLogger
    from distop.store.watch import Batch

log = logging.getLogger("distop.actions")
"""``logs.configure`` sets its destination."""


def write(who: ContextLogger, entries: Iterable[Mapping[str, Any]]) -> None:
    """Write these actions, if the action log is enabled. ``who``: a logger with the fields of the executor."""
    if not wanted():
        return
    for entry in entries:
        operation = {"operation": entry["name"]} if entry["kind"] == "operation" else {}
        extra = {**(who.extra or {}), **operation, "action": entry}
        log.info("%s of %s by %s", entry["action"], entry["name"], entry["by"] or "distop", extra=extra)


def wanted() -> bool:
    """Whether the action log is enabled."""
    return log.isEnabledFor(logging.INFO)


class TableActions:
    """Logs actions on tables from a watch of their records. Actions before the first listing are skipped."""

    def __init__(self, keys: Keys, who: ContextLogger) -> None:
        self._keys = keys
        self._who = who
        self._counts: dict[str, int] = {}
        """The number of actions of each table that were seen."""
        self._listed = False

    def apply(self, batch: Batch) -> None:
        """Handle a listing or events."""
        for event in batch.events:
            if event.deleted:
                continue
            try:
                table, actions = self._keys.parse(event.kv.key).table, a.Actions.decode(event.kv.value)
            except (InvalidArgument, *UNREADABLE):
                continue  # unreadable records are skipped by all readers
            before, self._counts[table] = self._counts.get(table, 0), actions.count
            if self._listed:
                write(self._who, [a.entry("table", table, one.to_json()) for one in actions.since(before)])
        self._listed = True


class ActionLog:
    """Logs actions on the operations of one type on one table, each once in an election."""

    def __init__(self, who: ContextLogger) -> None:
        self._who = who
        self._reported: dict[OperationRef, tuple[int, bool]] = {}
        """For each operation: the number of logged actions, and whether its cancel was logged. Its start was."""

    def see(self, op: OperationView | None) -> None:
        """Log the new actions of an operation."""
        if op is None or op.spec is None or not wanted():
            return
        name, spec, found = str(op.ref), op.spec, list[dict[str, Any]]()
        known = self._reported.get(op.ref)
        count, cancelled = known if known is not None else (0, False)
        if known is None:
            found.append(a.started(name, spec.time, spec.submitter, spec.by))
        found += [a.entry("operation", name, one.to_json()) for one in op.actions.since(count)]
        if op.cancel is not None and not cancelled:
            found.append(a.cancelled(name, op.cancel.to_json()))
        self._reported[op.ref] = op.actions.count, op.cancel is not None
        write(self._who, found)

    def ended(self, op: OperationView | None, history: History) -> None:
        """Log the end of an operation that this executor has finished."""
        if wanted():
            self.see(op)
            write(self._who, [a.ended(history.op, history.to_json())])

    def keep(self, refs: Container[OperationRef]) -> None:
        """Forget all other operations, which are gone."""
        for ref in [ref for ref in self._reported if ref not in refs]:
            del self._reported[ref]
