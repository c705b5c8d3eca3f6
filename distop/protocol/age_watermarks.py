"""Age watermarks: which records are an hour old, measured by etcd leases.

An executor's wall clock may be wrong by hours, and a monotonic clock ends with its process. A lease ends after its
time to live at the earliest (L4), whoever dies and whatever a clock says. A watermark is a pair of keys put by one
transaction: ``distOpWatermark.<slot>``, which stays, and ``distOpWatermark.<slot>.young`` on a lease of an hour. The
first key names a revision that was read before the lease was granted: etcd may apply the put when the lease is nearly
over. Once the second key is gone, everything written up to that revision is an hour old, and stays so. So a deletion
of such records needs no compare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.protocol.frozen import frozen
from distop.protocol.json_codec import word
from distop.protocol.txn import Put, Txn, unchanged

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distop.protocol.keys import Keys
    from distop.protocol.txn import KeyValue

SLOTS = 8
"""Maximum number of watermarks at once."""
STEPS = 6
"""A new watermark is put at most every 1/6 of the hour."""


@frozen
class Watermark:
    """One watermark.

    ``upto``: everything written up to this revision is as old as the lease. ``mod``: the revision at which it was put.
    ``lease``: the lease of its young key; 0 once that key is gone.
    """

    slot: int
    upto: int
    mod: int = 0
    lease: int = 0

    @property
    def old(self) -> bool:
        """Whether everything written up to its revision is an hour old."""
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
    """The revision in the value of a watermark; 0, which is before all writes, if the value is invalid."""
    return int(value) if value.isdigit() else 0


def newest_old(known: Sequence[Watermark]) -> Watermark | None:
    """The newest watermark that is an hour old."""
    return max((one for one in known if one.old), key=lambda one: one.upto, default=None)


def next_slot(known: Sequence[Watermark]) -> Watermark | None:
    """The slot for the next watermark; None if all are needed.

    A slot that was never used (``mod`` 0), or that of an old watermark other than the newest old one.
    """
    used = {one.slot for one in known}
    unused = [slot for slot in range(SLOTS) if slot not in used]
    if unused:
        return Watermark(unused[0], 0)
    needed = newest_old(known)
    return next((one for one in known if one.old and one is not needed), None)


def put_watermark(keys: Keys, place: Watermark, upto: int, lease: int) -> Txn:
    """Put a watermark and its young key, on this lease, into the slot of ``place``.

    The revision ``upto`` was read before the lease was granted.
    """
    key, young = keys.watermark(place.slot), keys.young_watermark(place.slot)
    return Txn((unchanged(key, place.mod),), (Put(key, word(str(upto))), Put(young, b"", lease)), (), "watermark")
