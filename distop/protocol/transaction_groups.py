"""Decides which writes share one etcd transaction (group commit).

A group must fit (T1, T2), and no part may write a key that another part writes or compares (T3). Then the order of the
parts does not matter, and etcd accepts the transaction. Both rules are checked on the transactions themselves.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING

from distop.protocol.txn import MAX_OPERATIONS, Delete, Get, Put, Txn, operations

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distop.protocol.txn import Compare, TxnOperation

GROUP_BYTES = 1024 * 1024
"""Bytes of values in one group; one part alone may have more."""


class Room:
    """The space left in one transaction while parts are added to it (T1, T2).

    ``common``: what the transaction has besides the parts. A compare that several parts share counts once
    (:func:`merged`). ``most``: the limit for the longest list plus the longest nested list. Conflicts between the
    parts are found by :func:`independent_count`.
    """

    __slots__ = ("_compares", "_distinct", "_failure", "_most", "_nested", "_size", "_success", "parts")

    def __init__(self, common: Txn | None = None, most: int = MAX_OPERATIONS) -> None:
        self.parts: list[Txn] = []
        self._most = most
        self._compares: list[Compare] = list(common.compares) if common is not None else []
        self._distinct = len(self._compares)
        """No more of them than this are different."""
        self._success = len(common.success) if common is not None else 0
        self._failure = len(common.failure) if common is not None else 0
        self._nested = self._size = 0

    def add(self, part: Txn) -> bool:
        """Add a part; returns False if it does not fit. The first part always fits."""
        nested, size = self._nested, self._size
        for op in (*part.success, *part.failure):
            if isinstance(op, Put):
                size += len(op.value)
            elif isinstance(op, Txn):
                nested, size = max(nested, operations(op)), size + _value_bytes(op)
        success, failure = self._success + len(part.success), self._failure + len(part.failure)
        distinct = self._distinct + len(part.compares)
        if distinct + nested > self._most:
            distinct = len({*self._compares, *part.compares})
        if self.parts and (max(distinct, success, failure) + nested > self._most or size > GROUP_BYTES):
            return False
        self.parts.append(part)
        self._compares += part.compares
        self._distinct, self._success, self._failure = distinct, success, failure
        self._nested, self._size = nested, size
        return True

    @property
    def full(self) -> bool:
        """Whether hardly anything more fits."""
        return max(self._distinct, self._success, self._failure) + self._nested > self._most - 2


def _value_bytes(txn: Txn) -> int:
    ops = (*txn.success, *txn.failure)
    return sum(len(op.value) if isinstance(op, Put) else _value_bytes(op) for op in ops if isinstance(op, Put | Txn))


def fitting_count(parts: Iterable[Txn], common: Txn | None = None, most: int = MAX_OPERATIONS) -> int:
    """How many of these parts go into one transaction, in order; at least one, if any."""
    room = Room(common, most)
    for part in parts:
        if not room.add(part):
            break
    return independent_count(room.parts)


def merged(parts: Sequence[Txn], common: Txn | None = None) -> Txn:
    """One transaction with all of these parts; what ``common`` has comes first."""
    whole = parts if common is None else (common, *parts)
    return Txn(
        tuple(dict.fromkeys(compare for one in whole for compare in one.compares)),
        tuple(op for one in whole for op in one.success),
        tuple(op for one in whole for op in one.failure),
        whole[0].label if whole else "",
    )


def independent_count(parts: Sequence[Txn]) -> int:
    """How many of these parts, in order, can be applied together, in any order.

    None of them writes a key that another one writes or compares. Several may delete the same key.
    """
    if len(parts) < 2 or _share_no_keys(parts):
        return len(parts)
    put, deleted, compared = _KeySet(), _KeySet(), _KeySet()
    for n, one in enumerate(map(_TouchedKeys, parts)):
        if (
            any(put.meet(*key) or deleted.meet(*key) or compared.meet(*key) for key in one.put)
            or any(put.meet(*key) or compared.meet(*key) for key in one.deleted)
            or any(put.meet(*key) or deleted.meet(*key) for key in one.compared)
        ):
            return n
        for known, more in ((put, one.put), (deleted, one.deleted), (compared, one.compared)):
            for key in more:
                known.add(*key)
    return len(parts)


class _TouchedKeys:
    """The keys and ranges that a part puts, deletes and compares, also when nested."""

    __slots__ = ("compared", "deleted", "put")

    def __init__(self, part: Txn) -> None:
        self.put: list[tuple[str, str]] = []
        self.deleted: list[tuple[str, str]] = []
        self.compared: list[tuple[str, str]] = []
        self._look(part)

    def _look(self, txn: Txn) -> None:
        for one in txn.compares:
            self.compared.append((one.key, one.range_end))
        self._write(txn.success)
        if txn.failure:
            self._write(txn.failure)

    def _write(self, ops: Iterable[TxnOperation]) -> None:
        for op in ops:
            if isinstance(op, Put):
                self.put.append((op.key, ""))
            elif isinstance(op, Delete):
                self.deleted.append((op.key, op.range_end))
            elif isinstance(op, Txn):
                self._look(op)


def _share_no_keys(parts: Sequence[Txn]) -> bool:
    """Whether no two parts touch the same key, except keys that no part writes.

    This is the usual case, and takes a few microseconds for each part. False: a closer look is needed.
    """
    writer: dict[str, int] = {}
    compared: dict[str, int] = {}
    """The number of the part that compares each key; -1: several parts."""
    ranges: list[tuple[str, str, int]] = []

    def look(txn: Txn, n: int) -> bool:
        for one in txn.compares:
            if one.range_end:
                ranges.append((one.key, one.range_end, n))
            elif compared.setdefault(one.key, n) != n:
                compared[one.key] = -1
        for ops in (txn.success, txn.failure):
            for op in ops:
                if isinstance(op, Txn):
                    if not look(op, n):
                        return False
                elif isinstance(op, Delete) and op.range_end:
                    ranges.append((op.key, op.range_end, n))
                elif not isinstance(op, Get) and writer.setdefault(op.key, n) != n:
                    return False
        return True

    if not all(look(part, n) for n, part in enumerate(parts)):
        return False
    if any(writer[key] != compared[key] for key in writer.keys() & compared.keys()):
        return False
    if not ranges:
        return True
    ranges.sort()
    last, by = "", -1
    for start, end, n in ranges:
        if start < last and n != by:
            return False
        if end > last:
            last, by = end, n
    for known in (writer, compared):
        keys = sorted(known)
        for start, end, n in ranges:
            for key in keys[bisect_left(keys, start) : bisect_left(keys, end)]:
                if known[key] != n:
                    return False
    return True


class _KeySet:
    """A set of keys and key ranges that finds overlaps."""

    __slots__ = ("_ends", "_order", "_points", "_starts")

    def __init__(self) -> None:
        self._points: set[str] = set()
        self._order: list[str] = []
        self._starts: list[str] = []
        """The starts of disjoint ranges. Ranges that overlap are merged."""
        self._ends: list[str] = []

    def add(self, key: str, end: str) -> None:
        if not end:
            if key not in self._points:
                self._points.add(key)
                insort(self._order, key)
        elif key < end:
            first, last = bisect_left(self._ends, key), bisect_right(self._starts, end)
            if first < last:
                key, end = min(key, self._starts[first]), max(end, self._ends[last - 1])
            self._starts[first:last], self._ends[first:last] = [key], [end]

    def meet(self, key: str, end: str) -> bool:
        if not end:
            if key in self._points:
                return True
            n = bisect_right(self._starts, key)
            return n > 0 and key < self._ends[n - 1]
        n = bisect_left(self._order, key)
        if n < len(self._order) and self._order[n] < end:
            return True
        n = bisect_right(self._ends, key)
        return key < end and n < len(self._starts) and self._starts[n] < end
