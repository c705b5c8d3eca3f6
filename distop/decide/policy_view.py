"""A daemon's view of policies: the policies of all tables, their evaluators and their waiting events. Pure.

There may be tens of thousands of policies. So it keeps the values as etcd has them, and only their evaluator decodes
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from distop.errors import InvalidArgument
from distop.protocol import keys as K
from distop.protocol.revisioned import Change, Seen

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from distop.protocol.keys import Keys
    from distop.protocol.txn import KeyValue

_NONE: Mapping[str, KeyValue] = {}


class PolicyChanges(NamedTuple):
    """The tables that one response changes: their policies or events, and the elections of their evaluators."""

    policies: set[str]
    elections: set[str]


class PolicyView:
    """Folds a listing and the events that follow."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self._policies: dict[str, dict[str, KeyValue]] = {}
        """Table → name → the key of the policy."""
        self._events: dict[str, dict[str, KeyValue]] = {}
        """Table → name → the key of its waiting events."""
        self.evaluators: dict[str, Seen[str]] = {}
        """Table → the incarnation that evaluates its policies."""

    def listing(self) -> PolicyView:
        """An empty view, for a listing in parts (:meth:`take`)."""
        return PolicyView(self.keys)

    def take(self, listed: PolicyView) -> set[str]:
        """Replace everything by a listing; returns the tables whose policies or events differ."""
        changed = set()
        for mine, theirs in ((self._policies, listed._policies), (self._events, listed._events)):
            changed |= {table for table in mine.keys() | theirs.keys() if mine.get(table) != theirs.get(table)}
        self._policies, self._events, self.evaluators = listed._policies, listed._events, listed.evaluators
        return changed

    def apply(self, changes: Iterable[Change]) -> PolicyChanges:
        """Fold one response. Keys that this release cannot read are skipped."""
        found = PolicyChanges(set(), set())
        for change in changes:
            try:
                key = self.keys.parse(change.kv.key)
            except InvalidArgument:
                continue
            if key.family == K.POLICY_EVALUATOR:
                if change.deleted:
                    self.evaluators.pop(key.table, None)
                else:
                    holder = change.kv.value.decode(errors="replace")
                    self.evaluators[key.table] = Seen(holder, change.kv.mod_revision)
                found.elections.add(key.table)
            elif key.family in (K.POLICY, K.POLICY_EVENT):
                _fold(self._policies if key.family == K.POLICY else self._events, key.table, key.id, change)
                found.policies.add(key.table)
        return found

    def tables(self) -> Iterable[str]:
        """The tables that have a policy."""
        return self._policies.keys()

    def has(self, table: str) -> bool:
        """Whether a table has a policy."""
        return table in self._policies

    def policies(self, table: str) -> Mapping[str, KeyValue]:
        """The keys of a table's policies, by name."""
        return self._policies.get(table, _NONE)

    def waits(self, table: str) -> bool:
        """Whether a policy of the table has a key of waiting events."""
        return table in self._events

    def event(self, table: str, name: str) -> KeyValue | None:
        """The key of a policy's waiting events."""
        return self._events.get(table, _NONE).get(name)


def _fold(tables: dict[str, dict[str, KeyValue]], table: str, name: str, change: Change) -> None:
    if not change.deleted:
        tables.setdefault(table, {})[name] = change.kv
    elif (named := tables.get(table)) is not None:
        named.pop(name, None)
        if not named:
            del tables[table]
