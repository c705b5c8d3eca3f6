"""A model of etcd's key-value store in memory: no I/O, no clock, no threads.

It is exact in all that distop relies on: one revision for each transaction that writes, compares of missing keys, range
compares (T5), and nested transactions, whose compares all see the store *before* the outer transaction. A transaction
itself says whether etcd would reject its form (T1, T2, T3; ``protocol.txn.flaw``). Conformance tests compare the model
with a real etcd.
"""

from __future__ import annotations

import logging
import operator
from bisect import bisect_left, insort
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop.errors import EtcdRejected, LeaseNotFound, MalformedRequest
from distop.protocol.revisioned import Change
from distop.protocol.txn import (
    Compare,
    Delete,
    DeleteResult,
    Get,
    GetResult,
    KeyValue,
    Put,
    PutResult,
    Relation,
    Target,
    Txn,
    TxnResult,
    flaw,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Self

    from distop.protocol.txn import Flaw, TxnOperationResult

log = logging.getLogger("distop.malformed")

_RELATIONS: dict[Relation, Callable[[Any, Any], bool]] = {
    Relation.EQUAL: operator.eq,
    Relation.NOT_EQUAL: operator.ne,
    Relation.GREATER: operator.gt,
    Relation.LESS: operator.lt,
}
_MISSING = KeyValue("", b"", 0)
_Path = list[bool]


class ModelStore:
    """An etcd with one member.

    ``history`` holds the changes of each revision, from revision 2 on.

    As in a new etcd, the empty store has revision 1.
    """

    def __init__(self) -> None:
        self.revision = 1
        self.history: list[tuple[int, tuple[Change, ...]]] = []
        self.leases: dict[int, set[str]] = {}
        self.refused: list[Flaw] = []
        """The reasons why transactions were rejected as malformed."""
        self._items: dict[str, KeyValue] = {}
        self._order: list[str] = []

    @classmethod
    def holding(cls, revision: int, kvs: Iterable[KeyValue]) -> Self:
        """A read-only store at ``revision`` with this content."""
        store = cls()
        store.revision = revision
        store._items = {kv.key: kv for kv in kvs}
        store._order = sorted(store._items)
        return store

    # ------------------------------------------------------------------- read

    def get(self, key: str) -> KeyValue | None:
        """The current value of the key with its metadata, or None."""
        return self._items.get(key)

    def mod(self, key: str) -> int:
        """The mod revision of the key, or 0 if it does not exist."""
        kv = self._items.get(key)
        return kv.mod_revision if kv else 0

    def range(self, key: str, range_end: str = "") -> list[KeyValue]:
        """The keys in ``[key, range_end)`` in order.

        Without ``range_end`` the one key, if it exists.
        """
        return [self._items[k] for k in self._keys(key, range_end)]

    def listing(self) -> tuple[KeyValue, ...]:
        """All keys, in order."""
        return tuple(self._items[k] for k in self._order)

    def between(self, first: int, last: int) -> list[tuple[int, tuple[Change, ...]]]:
        """The changes of the revisions ``first`` to ``last``.

        Each revision from 2 on has an entry.
        """
        return self.history[max(0, first - 2) : max(0, last - 1)]

    def _keys(self, key: str, range_end: str) -> list[str]:
        if not range_end:
            return [key] if key in self._items else []
        return self._order[bisect_left(self._order, key) : bisect_left(self._order, range_end)]

    # ----------------------------------------------------------------- leases

    def grant(self, lease: int) -> int:
        """Create a lease with this id. Raises EtcdRejected if it already exists (L6)."""
        if lease in self.leases:
            raise EtcdRejected(
                "the lease already exists", code="FAILED_PRECONDITION", detail="etcdserver: lease already exists"
            )
        self.leases[lease] = set()
        return lease

    def expire(self, lease: int) -> int:
        """End a lease, which deletes its keys in one transaction (L5).

        Returns the revision after it.
        """
        if lease not in self.leases:
            raise _no_lease()
        held = sorted(self.leases.pop(lease))
        changes: list[Change] = []
        for key in held:
            self._delete(key, self.revision + 1, changes)
        self._commit(changes)
        return self.revision

    # ------------------------------------------------------------ transactions

    def apply(self, txn: Txn) -> TxnResult:
        """Commit a transaction.

        Raises MalformedRequest if etcd would reject its form (T1, T2, T3, empty keys), and LeaseNotFound for a put with
        a lease that does not exist. Then nothing is changed.
        """
        if (found := flaw(txn)) is not None:
            self.refused.append(found)
            log.error("malformed transaction: %s", found.text, extra={"malformed": found.text})
            raise MalformedRequest(found.text, code=found.code, detail=found.detail, key=found.key)
        path: _Path = []
        self._choose(txn, path)
        self._check_leases(txn, iter(path))
        changes: list[Change] = []
        result = self._run(txn, iter(path), self.revision + 1, changes)
        # etcd returns a revision only for the outermost of nested transactions.
        self._commit(changes)
        return replace(result, revision=self.revision)

    def _commit(self, changes: list[Change]) -> None:
        if changes:
            self.revision += 1
            self.history.append((self.revision, tuple(changes)))

    def _choose(self, txn: Txn, path: _Path) -> None:
        taken = all(map(self._holds, txn.compares))
        path.append(taken)
        for op in txn.success if taken else txn.failure:
            if isinstance(op, Txn):
                self._choose(op, path)

    def _holds(self, compare: Compare) -> bool:
        if compare.range_end:
            # An empty range is compared like a missing key.
            found = self.range(compare.key, compare.range_end)
            return all(_compare(compare, kv) for kv in found) if found else _compare_missing(compare)
        kv = self._items.get(compare.key)
        if kv is None:
            return _compare_missing(compare)
        return _compare(compare, kv)

    def _check_leases(self, txn: Txn, path: Iterator[bool]) -> None:
        for op in txn.success if next(path) else txn.failure:
            if isinstance(op, Txn):
                self._check_leases(op, path)
            elif isinstance(op, Put) and op.lease and op.lease not in self.leases:
                raise _no_lease()

    def _run(self, txn: Txn, path: Iterator[bool], revision: int, changes: list[Change]) -> TxnResult:
        taken = next(path)
        responses: list[TxnOperationResult] = []
        for op in txn.success if taken else txn.failure:
            if isinstance(op, Put):
                self._put(op, revision, changes)
                responses.append(PutResult())
            elif isinstance(op, Delete):
                found = self._keys(op.key, op.range_end)
                for key in found:
                    self._delete(key, revision, changes)
                responses.append(DeleteResult(len(found)))
            elif isinstance(op, Get):
                responses.append(self._get(op))
            else:
                responses.append(self._run(op, path, revision, changes))
        return TxnResult(taken, 0, tuple(responses))

    def _get(self, op: Get) -> GetResult:
        keys = self._keys(op.key, op.range_end)
        if op.count_only:
            return GetResult((), False, len(keys))
        cut = keys[: op.limit] if op.limit else keys
        found = [self._items[k] for k in cut]
        kvs = tuple([_without_value(kv) for kv in found] if op.keys_only else found)
        return GetResult(kvs, len(cut) < len(keys), len(keys))

    def _put(self, op: Put, revision: int, changes: list[Change]) -> None:
        old = self._items.get(op.key)
        if old is None:
            insort(self._order, op.key)
            kv = KeyValue(op.key, op.value, revision, revision, 1, op.lease)
        else:
            kv = KeyValue(op.key, op.value, revision, old.create_revision, old.version + 1, op.lease)
            if old.lease:
                self.leases.get(old.lease, set()).discard(op.key)
        if op.lease:
            self.leases[op.lease].add(op.key)
        self._items[op.key] = kv
        changes.append(Change(kv))

    def _delete(self, key: str, revision: int, changes: list[Change]) -> None:
        old = self._items.pop(key)
        del self._order[bisect_left(self._order, key)]
        if old.lease:
            self.leases.get(old.lease, set()).discard(key)
        changes.append(Change(KeyValue(key, b"", revision), True))


def _without_value(kv: KeyValue) -> KeyValue:
    return KeyValue(kv.key, b"", kv.mod_revision, kv.create_revision, kv.version, kv.lease)


def _compare_missing(compare: Compare) -> bool:
    """Compare a missing key: a compare of its value fails, and its numbers are all 0."""
    return compare.target is not Target.VALUE and _compare(compare, _MISSING)


def _compare(compare: Compare, kv: KeyValue) -> bool:
    field: int | bytes
    if compare.target is Target.VALUE:
        field = kv.value
    elif compare.target is Target.MOD:
        field = kv.mod_revision
    elif compare.target is Target.CREATE:
        field = kv.create_revision
    else:
        field = kv.version
    return _RELATIONS[compare.relation](field, compare.value)


def _no_lease() -> LeaseNotFound:
    return LeaseNotFound("the lease does not exist", code="NOT_FOUND", detail="etcdserver: requested lease not found")
