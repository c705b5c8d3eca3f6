"""Age watermarks: which records are at least an hour old, by etcd's own leases and by no wall clock.

The wall clock of an executor may be wrong by hours, and a monotonic clock ends with its process. A lease ends after its
time to live at the earliest (L4), whoever dies and whatever any clock says. So a watermark is a pair of keys that one
transaction puts: ``distOpWatermark.<slot>``, which stays, and ``distOpWatermark.<slot>.young`` on a lease of an hour.
The first one names a revision that was read before the lease was granted: etcd may apply the put long after its sender
gave it up, when the lease is nearly over. Once the second one is gone, everything up to that revision is an hour old,
and stays so: whoever deletes such records has nothing to compare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.core.codec import word
from distop.core.frozen import frozen
from distop.core.txn import Put, Txn, unchanged

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distop.core.keys import Keys
    from distop.core.txn import KeyValue

SLOTS = 8
"""Watermarks at once."""
STEPS = 6
"""A new one is put at the earliest when so large a part of the hour is over (1/6) since the one before."""


@frozen
class Watermark:
    """One of them, about everything that was written up to the revision ``upto``. ``mod``: the revision at which it was
    put. ``lease``: that of its young key; 0: that key is gone.
    """

    slot: int
    upto: int
    mod: int = 0
    lease: int = 0

    @property
    def old(self) -> bool:
        """Everything up to its revision is an hour old."""
        return not self.lease


def watermarks(keys: Keys, found: Iterable[KeyValue]) -> list[Watermark]:
    """The watermarks in a listing of their family, the oldest first."""
    marks: dict[int, KeyValue] = {}
    leases: dict[int, int] = {}
    for kv in found:
        key = keys.parse(kv.key)
        if key.name == "young":
            leases[key.chunk] = kv.lease or -1
        else:
            marks[key.chunk] = kv
    known = (Watermark(n, revision(kv.value), kv.mod_revision, leases.get(n, 0)) for n, kv in marks.items())
    return sorted(known, key=lambda one: one.upto)


def revision(value: bytes) -> int:
    """What the value of a watermark names; 0, which is before everything, where it names nothing."""
    return int(value) if value.isdigit() else 0


def newest_old(known: Sequence[Watermark]) -> Watermark | None:
    """The newest one that is an hour old."""
    return max((one for one in known if one.old), key=lambda one: one.upto, default=None)


def room(known: Sequence[Watermark]) -> Watermark | None:
    """Where the next one goes: a slot that was never used (``mod`` 0), or that of an old one, which is not the newest
    of these; None: there is no room.
    """
    used = {one.slot for one in known}
    unused = [slot for slot in range(SLOTS) if slot not in used]
    if unused:
        return Watermark(unused[0], 0)
    needed = newest_old(known)
    return next((one for one in known if one.old and one is not needed), None)


def put_watermark(keys: Keys, place: Watermark, upto: int, lease: int) -> Txn:
    """Put the next watermark in the slot of ``place``, with its young key on this lease. The revision ``upto`` was read
    before the lease was granted.
    """
    key, young = keys.watermark(place.slot), keys.young_watermark(place.slot)
    return Txn((unchanged(key, place.mod),), (Put(key, word(str(upto))), Put(young, b"", lease)), (), "watermark")
