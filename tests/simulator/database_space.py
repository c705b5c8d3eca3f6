"""The database quota of a simulated etcd (T8): the cost of requests, and the NOSPACE alarm.

As in etcd's quota.go and apply.go, each request with a cost is checked against the quota twice. The member that gets it
may refuse it. If that member still has room, the request is applied, and may then be answered with the same error. Both
raise the alarm. Under the alarm all requests with a cost are refused: lease grants, and transactions with a put in
either branch. Reads, deletions, renewals and revocations are served.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.protocol.supported_versions import parse_version
from distop.protocol.txn import Put, Txn

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distop.protocol.txn import KeyValue, TxnOperation
    from tests.simulator.virtual_loop import VirtualLoop

GRANT_COST = 64
KEY_COST = 256
"""Bytes that etcd adds to the key and the value of a put."""


class Space:
    """The database's ``size`` and ``quota`` in bytes (None: no limit). ``alarm``: NOSPACE is raised."""

    def __init__(self, loop: VirtualLoop, version: str, quota: int | None = None) -> None:
        self.size = 0
        self.quota = quota
        self.alarm = False
        self._loop = loop
        self._late = 0.0
        number = parse_version(version)
        self._counts_nested = counts_nested(number)
        self._serves_free = serves_free_requests(number)

    # ------------------------------------------------------------------ faults

    def fill(self, late: float = 0.0) -> None:
        """Fill the database. ``late``: for this many seconds after the first write without room, writes are applied and
        then answered with the error.
        """
        self.quota, self._late = self.size, late

    def empty(self) -> None:
        """Remove the quota and disarm the alarm."""
        self.quota, self._late = None, 0.0
        self.disarm()

    def disarm(self) -> None:
        """Disarm the alarm, as an administrator does. Without room, the next write raises it again."""
        self.alarm = False

    # ---------------------------------------------------------------- requests

    def cost(self, txn: Txn) -> int:
        """The bytes that a transaction takes in its larger branch; 0 without puts."""
        return max(self._list_cost(txn.success), self._list_cost(txn.failure))

    def _list_cost(self, operations: Iterable[TxnOperation]) -> int:
        total = 0
        for op in operations:
            if isinstance(op, Put):
                total += put_cost(op.key, op.value)
            elif isinstance(op, Txn) and self._counts_nested:
                total += self.cost(op)
        return total

    def fits(self, cost: int) -> bool:
        """Whether there is room for a request of this cost."""
        if self.quota is None or (self._serves_free and not cost):
            return True
        return self.size + cost < self.quota

    def refuses(self, cost: int) -> bool:
        """Whether a request of this cost is refused. Raises the alarm if the request found no room."""
        if not self._late and not self.fits(cost):
            self.alarm = True
            return True
        return self.alarm and cost > 0

    def overdrawn(self) -> None:
        """Record that a request was applied without room."""
        self._loop.world_at(self._loop.now + self._late, self._raise)

    def _raise(self) -> None:
        if self.quota is not None:
            self.alarm = True


def put_cost(key: str, value: bytes) -> int:
    """The bytes that one put takes."""
    return KEY_COST + len(key) + len(value)


def size_of(kvs: Iterable[KeyValue]) -> int:
    """The bytes that these keys take."""
    return sum(put_cost(kv.key, kv.value) for kv in kvs)


def counts_nested(version: tuple[int, ...]) -> bool:
    """Whether puts in nested transactions count; older servers ignored them."""
    return version >= (3, 7, 1) or (3, 6, 14) <= version < (3, 7) or (3, 5, 33) <= version < (3, 6)


def serves_free_requests(version: tuple[int, ...]) -> bool:
    """Whether a full etcd serves requests without cost; older servers refused all transactions, even reads."""
    return version >= (3, 5, 7) or (3, 4, 20) <= version < (3, 5)
