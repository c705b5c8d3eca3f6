"""Roles of etcd users as values: which keys each role may read and write (docs/security.md, "Roles").

etcd grants whole ranges of keys. Each range here is one key, or ends at a delimiter, so that a role for the table ``a``
reaches neither ``ab`` nor ``a.b``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.protocol import keys as K
from distop.protocol.frozen import frozen
from distop.protocol.table_registry import table_family

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distop.protocol.keys import Keys

WRITTEN_BY_SUBMITTERS = (K.OP, K.OPEN, K.PENDING, K.UNIQUE, K.REQUEST)
"""Families that starting, pausing, altering and cancelling write, below the table's name."""
READ_BY_SUBMITTERS = (K.CLAIM, K.COORDINATOR, K.HISTORY)
"""Families that the status of an operation comes from, below the table's name."""
SHARED = (K.BEHAVIOR, K.NODE)
"""Families that belong to no table: declarations, without which nothing is started, and live executors."""


@frozen
class Permission:
    """A range of keys as etcd grants it. ``after``: the first key behind it; "" for the one key ``first``."""

    first: str
    after: str
    write: bool

    @property
    def access(self) -> str:
        """etcd's word: ``read`` or ``readwrite``."""
        return "readwrite" if self.write else "read"

    def covers(self, key: str) -> bool:
        """Whether the key is in the range."""
        mine, first, after = key.encode(), self.first.encode(), self.after.encode()
        return first <= mine < after if after else mine == first

    def to_json(self) -> dict[str, Any]:
        """The fields for ``--json``."""
        return {"access": self.access, "key": self.first, "range_end": self.after}


@frozen
class Role:
    """A role of etcd. ``kind``: ``viewer``, ``submitter`` or ``executor``; ``table``: the submitter's."""

    name: str
    kind: str
    table: str
    permissions: tuple[Permission, ...]

    def may_read(self, key: str) -> bool:
        """Whether a user with this role alone reads the key."""
        return any(one.covers(key) for one in self.permissions)

    def may_write(self, key: str) -> bool:
        """Whether a user with this role alone writes or deletes the key."""
        return any(one.write and one.covers(key) for one in self.permissions)

    def to_json(self) -> dict[str, Any]:
        """The fields for ``--json``."""
        return {
            "role": self.name,
            "kind": self.kind,
            "table": self.table or None,
            "permissions": [one.to_json() for one in self.permissions],
        }


def viewer(keys: Keys) -> Role:
    """Reads everything in the namespace and writes nothing."""
    return Role(_name(keys, "viewer"), "viewer", "", (Permission(*keys.everything(), write=False),))


def executor(keys: Keys) -> Role:
    """Reads and writes everything in the namespace; an operator needs the same."""
    return Role(_name(keys, "executor"), "executor", "", (Permission(*keys.everything(), write=True),))


def submitter(keys: Keys, table: str) -> Role:
    """Starts and controls operations on one table. Raises InvalidArgument for what is no name of a table."""
    name = _name(keys, f"submitter.{K.encode(table)}")
    permissions = (
        *(Permission(*table_family(keys, family, table), write=True) for family in WRITTEN_BY_SUBMITTERS),
        *(Permission(*table_family(keys, family, table), write=False) for family in READ_BY_SUBMITTERS),
        *(Permission(*keys.family(family), write=False) for family in SHARED),
        *(Permission(key, "", write=False) for key in (keys.table(table), keys.table_actions(table), keys.space())),
    )
    return Role(name, "submitter", table, permissions)


def roles(keys: Keys, tables: Iterable[str]) -> tuple[Role, ...]:
    """Viewer, executor, and a submitter for each table, each once. Raises InvalidArgument."""
    return (viewer(keys), executor(keys), *(submitter(keys, table) for table in dict.fromkeys(tables)))


def _name(keys: Keys, name: str) -> str:
    """As a key is spelled: no two roles of different namespaces, kinds or tables have one name."""
    return f"{keys.namespace}/distop.{name}" if keys.namespace else f"distop.{name}"
