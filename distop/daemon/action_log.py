"""The log of actions: one line of JSON for each action that this executor acts upon.

What etcd keeps is the record; this is a copy of it, for who collects logs. Where another executor takes over an
operation, lines may occur again: operation, action and time tell them apart.
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
"""``logs.configure`` says where it goes."""


def write(who: ContextLogger, entries: Iterable[Mapping[str, Any]]) -> None:
    """Write these actions, where they are wanted; ``who``: a logger with the fields of the executor."""
    if not wanted():
        return
    for entry in entries:
        told = {"operation": entry["name"]} if entry["kind"] == "operation" else {}
        extra = {**(who.extra or {}), **told, "action": entry}
        log.info("%s of %s by %s", entry["action"], entry["name"], entry["by"] or "distop", extra=extra)


def wanted() -> bool:
    """Actions are written anywhere."""
    return log.isEnabledFor(logging.INFO)


class TableActions:
    """Writes what is done to tables, as a watch of their records tells it; nothing that was done before."""

    def __init__(self, keys: Keys, who: ContextLogger) -> None:
        self._keys = keys
        self._who = who
        self._counts: dict[str, int] = {}
        """How many actions of each table were seen."""
        self._listed = False

    def apply(self, batch: Batch) -> None:
        """Take a listing or events."""
        for event in batch.events:
            if event.deleted:
                continue
            try:
                table, actions = self._keys.parse(event.kv.key).table, a.Actions.decode(event.kv.value)
            except (InvalidArgument, *UNREADABLE):
                continue  # nobody acts by it
            before, self._counts[table] = self._counts.get(table, 0), actions.count
            if self._listed:
                write(self._who, [a.entry("table", table, one.to_json()) for one in actions.since(before)])
        self._listed = True


class ActionLog:
    """Writes what was done to the operations of one type on one table, each action once for each election."""

    def __init__(self, who: ContextLogger) -> None:
        self._who = who
        self._told: dict[OperationRef, tuple[int, bool]] = {}
        """How many actions of each were written, and whether its cancel was; its start was, in any case."""

    def see(self, op: OperationView | None) -> None:
        """Something was done to the operation, or for it: write what is new."""
        if op is None or op.spec is None or not wanted():
            return
        name, spec, found = str(op.ref), op.spec, list[dict[str, Any]]()
        known = self._told.get(op.ref)
        count, cancelled = known if known is not None else (0, False)
        if known is None:
            found.append(a.started(name, spec.time, spec.submitter, spec.by))
        found += [a.entry("operation", name, one.to_json()) for one in op.actions.since(count)]
        if op.cancel is not None and not cancelled:
            found.append(a.cancelled(name, op.cancel.to_json()))
        self._told[op.ref] = op.actions.count, op.cancel is not None
        write(self._who, found)

    def ended(self, op: OperationView | None, history: History) -> None:
        """This executor has brought the operation to its end."""
        if wanted():
            self.see(op)
            write(self._who, [a.ended(history.op, history.to_json())])

    def keep(self, refs: Container[OperationRef]) -> None:
        """Forget all others: they are gone."""
        for ref in [ref for ref in self._told if ref not in refs]:
            del self._told[ref]
