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

WRITTEN_BY_SUBMITTERS = (K.OP, K.OPEN, K.PENDING, K.UNIQUE, K.REQUEST, K.POLICY_EVENT)
"""Families that a start, pause, alter, cancel and an emitted event write, below the table's name."""
READ_BY_SUBMITTERS = (K.CLAIM, K.COORDINATOR, K.HISTORY, K.POLICY, K.POLICY_STATE)
"""Families that the status of an operation or of a policy is read from, below the table's name."""
WRITTEN_BY_MAINTAINERS = (K.POLICY, K.POLICY_STATE)
"""Further families that the commands of policies write, below the table's name."""
SHARED = (K.BEHAVIOR, K.NODE)
"""Families that belong to no table: declarations, which every start needs, and live executors."""


@frozen
class Permission:
    """A range of keys as etcd grants it.

    ``after``: the first key after the range; "": the range is the key ``first`` alone.
    """

    first: str
    after: str
    write: bool

    @property
    def access(self) -> str:
        """etcd's name of the access: ``read`` or ``readwrite``."""
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
    """A role of etcd. ``kind``: ``viewer``, ``executor``, ``submitter`` or ``maintainer``.

    ``table``: the table of a submitter or maintainer; "" for others.
    """

    name: str
    kind: str
    table: str
    permissions: tuple[Permission, ...]

    def may_read(self, key: str) -> bool:
        """Whether a user with only this role may read the key."""
        return any(one.covers(key) for one in self.permissions)

    def may_write(self, key: str) -> bool:
        """Whether a user with only this role may write or delete the key."""
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
    """The role that reads everything in the namespace and writes nothing."""
    return Role(_name(keys, "viewer"), "viewer", "", (Permission(*keys.everything(), write=False),))


def executor(keys: Keys) -> Role:
    """The role that reads and writes everything in the namespace; operators need it as well."""
    return Role(_name(keys, "executor"), "executor", "", (Permission(*keys.everything(), write=True),))


def submitter(keys: Keys, table: str) -> Role:
    """The role that starts and controls operations on one table, and emits events for its policies.

    Raises InvalidArgument for an invalid table name.
    """
    return Role(_name(keys, f"submitter.{K.encode(table)}"), "submitter", table, _of_submitters(keys, table))


def maintainer(keys: Keys, table: str) -> Role:
    """The role of a submitter that also makes, pauses and removes the table's policies.

    Raises InvalidArgument for an invalid table name.
    """
    written = [Permission(*table_family(keys, family, table), write=True) for family in WRITTEN_BY_MAINTAINERS]
    ranges = [one.first for one in written]
    permissions = (
        *(one for one in _of_submitters(keys, table) if one.first not in ranges),
        *written,
        Permission(keys.policy_mark(), "", write=True),
    )
    return Role(_name(keys, f"maintainer.{K.encode(table)}"), "maintainer", table, permissions)


def _of_submitters(keys: Keys, table: str) -> tuple[Permission, ...]:
    return (
        *(Permission(*table_family(keys, family, table), write=True) for family in WRITTEN_BY_SUBMITTERS),
        *(Permission(*table_family(keys, family, table), write=False) for family in READ_BY_SUBMITTERS),
        *(Permission(*keys.family(family), write=False) for family in SHARED),
        *(Permission(key, "", write=False) for key in (keys.table(table), keys.table_actions(table), keys.space())),
    )


def roles(keys: Keys, tables: Iterable[str]) -> tuple[Role, ...]:
    """The viewer, the executor, and one submitter and one maintainer for each table.

    Raises InvalidArgument for an invalid table name.
    """
    of_tables = [role(keys, table) for table in dict.fromkeys(tables) for role in (submitter, maintainer)]
    return (viewer(keys), executor(keys), *of_tables)


def _name(keys: Keys, name: str) -> str:
    """The role's name, encoded like a key: unique for namespace, kind and table."""
    return f"{keys.namespace}/distop.{name}" if keys.namespace else f"distop.{name}"
