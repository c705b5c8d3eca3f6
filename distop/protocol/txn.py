"""An etcd transaction as a value: compares and the operations of two branches.

Pure code builds these; only ``distop.store.client`` sends them. Keys are ASCII text (``protocol.keys`` spells them),
values are bytes. A revision of 0 means "absent", as in etcd's own compares.
"""

from __future__ import annotations

from dataclasses import field
from enum import IntEnum
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

from distop.protocol.frozen import frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAX_OPERATIONS = 128
"""etcd's default limit for each list of a transaction: compares, success, failure (T1)."""
MAX_REQUEST_BYTES = 1536 * 1024
"""etcd's default limit for a request (T2)."""
ENVELOPE_BYTES = 256
"""Bytes that etcd adds to a request before it measures it, at most (an id and the sender)."""


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
    """The key was last written at ``mod_revision`` (0: it is absent).

    One-way: once false, it stays false, unless it is 0 and the key can come back.
    """
    return Compare(key, Target.MOD, Relation.EQUAL, mod_revision)


def absent(key: str) -> Compare:
    """The key does not exist."""
    return Compare(key, Target.CREATE, Relation.EQUAL, 0)


def exists(key: str) -> Compare:
    """The key exists, with any value."""
    return Compare(key, Target.CREATE, Relation.GREATER, 0)


def none_within(start: str, end: str) -> Compare:
    """No key exists in ``[start, end)``. Cheap only if the range is nearly empty (T5)."""
    return Compare(start, Target.CREATE, Relation.EQUAL, 0, end)


def value_is(key: str, value: bytes) -> Compare:
    """The key exists with this value."""
    return Compare(key, Target.VALUE, Relation.EQUAL, value)


def is_not(key: str, value: bytes) -> Compare:
    """The key exists with another value (etcd's value compares are false for an absent key)."""
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
    success: tuple[TxnOperation, ...] = ()
    failure: tuple[TxnOperation, ...] = ()
    label: str = field(default="", compare=False)
    """The event's name ("claim", "report", …), for logs and traces; not sent to etcd."""


TxnOperation: TypeAlias = Put | Delete | Get | Txn


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
    """The answer to a put."""


@frozen
class DeleteResult:
    """The number of deleted keys."""

    deleted: int


@frozen
class GetResult:
    """The answer to a read. ``more``: ``limit`` cut it. ``count``: the number of keys in the range."""

    kvs: tuple[KeyValue, ...]
    more: bool = False
    count: int = 0

    @property
    def kv(self) -> KeyValue | None:
        """The first key found, or None."""
        return self.kvs[0] if self.kvs else None


@frozen
class TxnResult:
    """etcd's answer to a transaction.

    ``responses`` follow the order of the branch that was taken. ``revision`` is the store's revision after it: for a
    transaction that wrote, the mod revision of its writes. ``repeated``: an earlier copy of this transaction had an
    unknown outcome. So a refusal may mean that the earlier copy won: check what the failure branch read (T9).
    """

    succeeded: bool
    revision: int
    responses: tuple[TxnOperationResult, ...] = ()
    repeated: bool = False


TxnOperationResult: TypeAlias = PutResult | DeleteResult | GetResult | TxnResult


PARCEL = 60
"""Operations in one parcel."""


def parcels(ops: Sequence[TxnOperation]) -> list[TxnOperation]:
    """Operations that exceed one list, packed into nested transactions.

    The nested transactions compare nothing. A nested list may have as many operations as its parent's list leaves of
    the limit (T1). So about sixty parcels fit into one list.
    """
    return [Txn((), tuple(ops[n : n + PARCEL])) for n in range(0, len(ops), PARCEL)]


def unpacked(results: Iterable[TxnOperationResult]) -> list[TxnOperationResult]:
    """The results of operations, whether or not they are in :func:`parcels`."""
    found: list[TxnOperationResult] = []
    for one in results:
        if isinstance(one, TxnResult):
            found += one.responses
        else:
            found.append(one)
    return found


@frozen
class Flaw:
    """Why etcd rejects a transaction as invalid, whatever the store contains.

    ``code`` is the gRPC status name, ``detail`` has etcd's own words, ``text`` is one sentence. ``key`` is the first
    key concerned, or empty.
    """

    detail: str
    text: str
    key: str = ""
    code: str = "INVALID_ARGUMENT"


TOO_LARGE = "etcdserver: request is too large"
"""etcd's message for a request that is too large. An etcd with a raised limit accepts it."""


def flaw(txn: Txn) -> Flaw | None:
    """Why etcd with default limits rejects this transaction as invalid; None: it fits.

    The checks come in etcd's order: number of operations and empty keys (T1), keys written twice (T3), bytes (T2).
    """
    found = _ill_formed(txn, MAX_OPERATIONS, txn.label)
    if found is None:
        for branch in (txn.success, txn.failure):
            if twice := _Written().fold(branch):
                text = f"the transaction {txn.label!r} puts {twice!r} twice, or puts and deletes it"
                return Flaw("etcdserver: duplicate key given in txn request", text, twice)
        if (size := request_bytes(txn)) + ENVELOPE_BYTES > MAX_REQUEST_BYTES:
            text = f"the transaction {txn.label!r} has {size} bytes; etcd accepts {MAX_REQUEST_BYTES} in a request"
            return Flaw(TOO_LARGE, text, largest_value(txn)[0])
    return found


def _ill_formed(txn: Txn, limit: int, label: str) -> Flaw | None:
    """Check T1: a nested transaction has what its parent's longest list leaves."""
    longest = max(len(txn.compares), len(txn.success), len(txn.failure))
    if longest > limit:
        text = f"a list of the transaction {label!r} has {longest} entries; etcd accepts {limit}"
        return Flaw("etcdserver: too many operations in txn request", text)
    for one in (*txn.compares, *txn.success, *txn.failure):
        if isinstance(one, Txn):
            if found := _ill_formed(one, limit - longest, label):
                return found
        elif not one.key:
            return Flaw("etcdserver: key is not provided", f"the transaction {label!r} has an empty key")
    return None


class _Written:
    """Keys that operations put and delete, to find duplicates in etcd's order (T3)."""

    __slots__ = ("points", "put", "ranges")

    def __init__(self) -> None:
        self.put: set[str] = set()
        self.points: set[str] = set()
        """Single keys that are deleted."""
        self.ranges: list[tuple[str, str]] = []

    def fold(self, branch: Sequence[TxnOperation]) -> str:
        """Add one branch; returns a key that is put twice, or put and deleted, or ""."""
        for op in branch:
            if isinstance(op, Delete):
                if op.range_end:
                    self.ranges.append((op.key, op.range_end))
                else:
                    self.points.add(op.key)
        for op in branch:
            # The branches of a nested transaction exclude each other: both may put a key.
            if isinstance(op, Txn) and (twice := self._fold_nested(op)):
                return twice
        for op in branch:
            if isinstance(op, Put):
                if self._has(op.key):
                    return op.key
                self.put.add(op.key)
        return ""

    def _fold_nested(self, txn: Txn) -> str:
        then, otherwise = _Written(), _Written()
        if twice := then.fold(txn.success) or otherwise.fold(txn.failure):
            return twice
        put = then.put | otherwise.put
        if twice := next(filter(self._has, sorted(put)), ""):
            return twice
        self.put |= put
        for one in (then, otherwise):
            self.points |= one.points
            self.ranges += one.ranges
        return ""

    def _has(self, key: str) -> bool:
        return key in self.put or key in self.points or any(start <= key < end for start, end in self.ranges)


def largest_value(txn: Txn) -> tuple[str, int]:
    """The key and the size in bytes of the largest value that is put.

    ("", 0) if nothing is put.
    """
    puts = [(op.key, len(op.value)) for op in (*txn.success, *txn.failure) if isinstance(op, Put)]
    puts += [largest_value(op) for op in (*txn.success, *txn.failure) if isinstance(op, Txn)]
    return max(puts, key=itemgetter(1), default=("", 0))


def request_bytes(txn: Txn) -> int:
    """The size in bytes of the encoded request."""
    compares = sum(_framed(_compare_bytes(one)) for one in txn.compares)
    return compares + sum(_framed(_framed(_operation_bytes(op))) for op in (*txn.success, *txn.failure))


def _compare_bytes(one: Compare) -> int:
    value = _framed(len(one.value)) if isinstance(one.value, bytes) else 1 + _varint(one.value)
    end = 1 + _framed(_length(one.range_end)) if one.range_end else 0
    return 2 * (one.target > 0) + 2 * (one.relation > 0) + _framed(_length(one.key)) + value + end


def _operation_bytes(op: TxnOperation) -> int:
    if isinstance(op, Txn):
        return request_bytes(op)
    if isinstance(op, Put):
        value = _framed(len(op.value)) if op.value else 0
        return _framed(_length(op.key)) + value + (1 + _varint(op.lease) if op.lease else 0)
    size = _framed(_length(op.key)) + (_framed(_length(op.range_end)) if op.range_end else 0)
    if isinstance(op, Get):
        size += (1 + _varint(op.limit) if op.limit else 0) + 2 * op.keys_only + 2 * op.count_only
    return size


def _length(key: str) -> int:
    return len(key) if key.isascii() else len(key.encode("utf-8", "surrogateescape"))


def _framed(size: int) -> int:
    """The size of a field of ``size`` bytes with its tag and its length."""
    return 1 + _varint(size) + size


def _varint(number: int) -> int:
    return max(1, (number.bit_length() + 6) // 7) if number >= 0 else 10


def operations(txn: Txn) -> int:
    """The count that etcd limits (T1): the transaction's longest list plus the longest nested one."""
    nested = [operations(op) for op in (*txn.success, *txn.failure) if isinstance(op, Txn)]
    return max(len(txn.compares), len(txn.success), len(txn.failure)) + max(nested, default=0)
