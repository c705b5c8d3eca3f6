"""What the partitions of an operation are called, for those few whose errors are told before it has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.core.plan import decode_chunk
from distop.core.records import read
from distop.core.txn import Get

if TYPE_CHECKING:
    from collections.abc import Collection

    from distop.core.keys import Keys
    from distop.core.model import OperationRef
    from distop.core.plan import Plan
    from distop.store.client import EtcdClient


async def add_names(
    etcd: EtcdClient, keys: Keys, ref: OperationRef, plan: Plan, wanted: Collection[int], known: dict[int, str]
) -> None:
    """Add the names of these ordinals to those ``known``, which never change. What is gone meanwhile stays unknown.

    A chunk holds neighbouring ordinals and has up to half a megabyte, so it is looked for rather than all of them read.
    Raises UnreadableRecord.
    """
    for ordinal in sorted(set(wanted) - known.keys()):
        if ordinal in known:
            continue  # it stood in a chunk that was read for another one
        first, after = 0, plan.chunks
        while first < after:
            middle = min(max(ordinal * plan.chunks // max(plan.count, 1), first), after - 1)
            kv = (await etcd.read(Get(keys.chunk(ref, middle))))[0].kv
            rows = read(decode_chunk, kv) if kv is not None else []
            if not rows:
                return
            if ordinal < rows[0].partition:
                after = middle
            elif ordinal > rows[-1].partition:
                first = middle + 1
            else:
                known |= {row.partition: row.name for row in rows if row.partition in wanted}
                break
