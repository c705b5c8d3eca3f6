"""What a simulated etcd does when its database is full (T8): the quota, what a request costs, and the alarm.

As in etcd's quota.go and apply.go: each request that costs something is held against the quota twice. The member that
takes it refuses it; where that one still found room, it is applied, and then answered with the same words. Either
raises the alarm. While that stands, all that costs something is refused: grants of leases, and transactions with a put
in their lists, whichever of these would be taken. Reads, deletions, renewals and revocations go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.protocol.supported_versions import parse_version
from distop.protocol.txn import Put, Txn

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distop.protocol.txn import KeyValue, Operation
    from tests.simulator.virtual_loop import VirtualLoop

GRANT_COST = 64
KEY_COST = 256
"""Bytes that etcd adds to the key and the value of a put."""


class Space:
    """``size``: bytes of the database. ``quota``: how many it may have, None: as many as it likes. ``alarm``: NOSPACE
    is raised.
    """

    def __init__(self, loop: VirtualLoop, version: str, quota: int | None = None) -> None:
        self.size = 0
        self.quota = quota
        self.alarm = False
        self._loop = loop
        self._late = 0.0
        number = parse_version(version)
        self._counts_nested = counts_nested(number)
        self._free_passes = lets_pass_what_is_free(number)

    # ------------------------------------------------------------------ faults

    def fill(self, late: float = 0.0) -> None:
        """There is no room from now on. ``late``: for so many seconds after the first write that finds none, writes are
        applied and then answered with the alarm.
        """
        self.quota, self._late = self.size, late

    def empty(self) -> None:
        """There is room, and the alarm is disarmed."""
        self.quota, self._late = None, 0.0
        self.disarm()

    def disarm(self) -> None:
        """What a person does once there is room again; where there is none, the next write raises it once more."""
        self.alarm = False

    # ---------------------------------------------------------------- requests

    def cost(self, txn: Txn) -> int:
        """What a transaction would take, whichever of its lists were taken; 0 for one that puts nothing."""
        return max(self._list_cost(txn.success), self._list_cost(txn.failure))

    def _list_cost(self, operations: Iterable[Operation]) -> int:
        total = 0
        for op in operations:
            if isinstance(op, Put):
                total += put_cost(op.key, op.value)
            elif isinstance(op, Txn) and self._counts_nested:
                total += self.cost(op)
        return total

    def fits(self, cost: int) -> bool:
        """There is room for it."""
        if self.quota is None or (self._free_passes and not cost):
            return True
        return self.size + cost < self.quota

    def refuses(self, cost: int) -> bool:
        """It is not applied. Raises the alarm where it is this request that found no room."""
        if not self._late and not self.fits(cost):
            self.alarm = True
            return True
        return self.alarm and cost > 0

    def overdrawn(self) -> None:
        """A request was applied for which there was no room."""
        self._loop.world_at(self._loop.now + self._late, self._raise)

    def _raise(self) -> None:
        if self.quota is not None:
            self.alarm = True


def put_cost(key: str, value: bytes) -> int:
    """What one put takes."""
    return KEY_COST + len(key) + len(value)


def size_of(kvs: Iterable[KeyValue]) -> int:
    """What these take."""
    return sum(put_cost(kv.key, kv.value) for kv in kvs)


def counts_nested(version: tuple[int, ...]) -> bool:
    """Whether the puts of a transaction within another cost anything: before, it was let in for free."""
    return version >= (3, 7, 1) or (3, 6, 14) <= version < (3, 7) or (3, 5, 33) <= version < (3, 6)


def lets_pass_what_is_free(version: tuple[int, ...]) -> bool:
    """Whether a full etcd does what costs nothing: before, it refused every transaction, even if it only read."""
    return version >= (3, 5, 7) or (3, 4, 20) <= version < (3, 5)
