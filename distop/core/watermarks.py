"""Age watermarks: which records are at least an hour old, by etcd's own leases and by no wall clock.

The wall clock of an executor may be wrong by hours, and a monotonic clock ends with its process. A lease ends after its
time to live at the earliest (L4), whoever dies and whatever any clock says. So a watermark is a pair of keys that one
transaction puts: ``distOpWatermark.<slot>``, which stays, and ``distOpWatermark.<slot>.young`` on a lease of an hour.
Once the second one is gone, everything that was written before the first one is an hour old, and stays so: whoever
deletes such records has nothing to compare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    """One of them. ``mod``: the revision at which it was put. ``lease``: that of its young key; 0: that key is gone."""

    slot: int
    mod: int
    lease: int = 0

    @property
    def old(self) -> bool:
        """Everything that was written before it is an hour old."""
        return not self.lease


def watermarks(keys: Keys, found: Iterable[KeyValue]) -> list[Watermark]:
    """The watermarks in a listing of their family, the oldest first."""
    mods: dict[int, int] = {}
    leases: dict[int, int] = {}
    for kv in found:
        key = keys.parse(kv.key)
        if key.name == "young":
            leases[key.chunk] = kv.lease or -1
        else:
            mods[key.chunk] = kv.mod_revision
    return sorted((Watermark(n, mod, leases.get(n, 0)) for n, mod in mods.items()), key=lambda one: one.mod)


def newest_old(known: Sequence[Watermark]) -> Watermark | None:
    """The newest one that is an hour old."""
    return max((one for one in known if one.old), key=lambda one: one.mod, default=None)


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


def put_watermark(keys: Keys, place: Watermark, lease: int) -> Txn:
    """Put the next watermark in the slot of ``place``, with its young key on this lease."""
    key, young = keys.watermark(place.slot), keys.young_watermark(place.slot)
    return Txn((unchanged(key, place.mod),), (Put(key, b""), Put(young, b"", lease)), (), "watermark")
