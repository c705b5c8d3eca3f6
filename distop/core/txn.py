"""An etcd transaction as a value: what is compared, what is done if all compares hold, what otherwise.

Pure code builds these; only ``distop.store.client`` sends them. Keys are ASCII text (``core.keys`` spells
them), values are bytes. A revision of 0 means "absent", as it does in etcd's own compares.
"""

from __future__ import annotations

from dataclasses import field
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

from distop.core.frozen import frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAX_OPERATIONS = 128
"""etcd's default limit for each list of a transaction: compares, success, failure (T1)."""


class Target(IntEnum):
    """What a compare looks at; the numbers are etcd's."""

    VERSION = 0
    CREATE = 1
    MOD = 2
    VALUE = 3


class Relation(IntEnum):
    """How a compare relates the key's field (left) to the value (right); the numbers are etcd's."""

    EQUAL = 0
    GREATER = 1
    LESS = 2
    NOT_EQUAL = 3


@frozen
class Compare:
    """One condition. With ``range_end`` it must hold for every key in ``[key, range_end)`` (T5)."""

    key: str
    target: Target
    relation: Relation
    value: int | bytes
    range_end: str = ""


def unchanged(key: str, mod_revision: int) -> Compare:
    """The key was last written at ``mod_revision`` (0: it is absent). One-way: once false, false for ever,
    unless 0 and the key can come back.
    """
    return Compare(key, Target.MOD, Relation.EQUAL, mod_revision)


def absent(key: str) -> Compare:
    """The key does not exist."""
    return Compare(key, Target.CREATE, Relation.EQUAL, 0)


def exists(key: str) -> Compare:
    """The key exists, whatever its value."""
    return Compare(key, Target.CREATE, Relation.GREATER, 0)


def none_within(start: str, end: str) -> Compare:
    """No key exists in ``[start, end)``. Cheap only where the range is nearly empty (T5)."""
    return Compare(start, Target.CREATE, Relation.EQUAL, 0, end)


def value_is(key: str, value: bytes) -> Compare:
    """The key exists with this value."""
    return Compare(key, Target.VALUE, Relation.EQUAL, value)


def is_not(key: str, value: bytes) -> Compare:
    """The key exists with another value (etcd compares no value of a key that does not exist)."""
    return Compare(key, Target.VALUE, Relation.NOT_EQUAL, value)


@frozen
class Put:
    """Write a key. ``lease`` 0: no lease."""

    key: str
    value: bytes
    lease: int = 0


@frozen
class Delete:
    """Delete a key, or with ``range_end`` every key in ``[key, range_end)``."""

    key: str
    range_end: str = ""


@frozen
class Get:
    """Read a key, or with ``range_end`` up to ``limit`` keys in ``[key, range_end)`` (0: all of them)."""

    key: str
    range_end: str = ""
    limit: int = 0
    keys_only: bool = False
    count_only: bool = False


@frozen
class Txn:
    """If all ``compares`` hold then ``success`` else ``failure``; may be nested as an operation."""

    compares: tuple[Compare, ...] = ()
    success: tuple[Operation, ...] = ()
    failure: tuple[Operation, ...] = ()
    label: str = field(default="", compare=False)
    """The event's name ("claim", "report", …), for logs and traces; never sent."""


Operation: TypeAlias = Put | Delete | Get | Txn


@frozen
class KeyValue:
    """A key as etcd returns it. ``value`` is empty for a ``keys_only`` read."""

    key: str
    value: bytes
    mod_revision: int
    create_revision: int = 0
    version: int = 0
    lease: int = 0


@frozen
class PutResult:
    """A put was done."""


@frozen
class DeleteResult:
    """How many keys a delete removed."""

    deleted: int


@frozen
class GetResult:
    """What a read found; ``more`` says that ``limit`` cut it, ``count`` is the number of keys in the range."""

    kvs: tuple[KeyValue, ...]
    more: bool = False
    count: int = 0

    @property
    def kv(self) -> KeyValue | None:
        """The first key found, or None."""
        return self.kvs[0] if self.kvs else None


@frozen
class TxnResult:
    """etcd's answer to a transaction; ``responses`` follow the order of the branch that was taken.

    ``revision`` is the store's revision after it: for a transaction that wrote, the mod revision of what it
    wrote. ``repeated``: an earlier copy of this transaction had an unknown outcome, so a refusal may mean that
    the earlier copy won: look at what the failure branch read (T9).
    """

    succeeded: bool
    revision: int
    responses: tuple[Result, ...] = ()
    repeated: bool = False


Result: TypeAlias = PutResult | DeleteResult | GetResult | TxnResult


PARCEL = 60
"""Operations in one parcel."""


def parcels(ops: Sequence[Operation]) -> list[Operation]:
    """Operations that are too many for one list, in nested transactions that compare nothing. A nested one may have as
    many as the list that it is in leaves of the limit (T1): so some sixty parcels go into one list.
    """
    return [Txn((), tuple(ops[n : n + PARCEL])) for n in range(0, len(ops), PARCEL)]


def unpacked(results: Iterable[Result]) -> list[Result]:
    """The results of operations, be they in :func:`parcels` or not."""
    found: list[Result] = []
    for one in results:
        if isinstance(one, TxnResult):
            found += one.responses
        else:
            found.append(one)
    return found


def operations(txn: Txn) -> int:
    """What etcd limits (T1): the longest of the transaction's lists, and on top of it the longest nested one's."""
    nested = [operations(op) for op in (*txn.success, *txn.failure) if isinstance(op, Txn)]
    return max(len(txn.compares), len(txn.success), len(txn.failure)) + max(nested, default=0)
