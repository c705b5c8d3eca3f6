"""Lets an hour of the history pass: puts a watermark, and ends its lease."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.protocol import keys as K
from distop.protocol.age_watermarks import Watermark, newest_old, next_slot, put_watermark, watermarks
from distop.store.session import new_lease_id

if TYPE_CHECKING:
    from distop.protocol.keys import Keys
    from distop.store.client import EtcdClient
    from distop.testing import ModelStore


def pass_an_hour(store: ModelStore, keys: Keys) -> Watermark:
    """The watermark, in the model of etcd."""
    place, upto = next_slot(watermarks(keys, store.range(*keys.family(K.WATERMARK)))), store.revision
    assert place is not None
    lease = store.grant(1_000_000 + upto)
    assert store.apply(put_watermark(keys, place, upto, lease)).succeeded
    store.expire(lease)
    return _newest(watermarks(keys, store.range(*keys.family(K.WATERMARK))))


async def pass_hour(etcd: EtcdClient, keys: Keys) -> Watermark:
    """The watermark, in a real etcd."""
    listing = await etcd.list(*keys.family(K.WATERMARK))
    place = next_slot(watermarks(keys, listing.kvs))
    assert place is not None
    lease = new_lease_id()
    await etcd.grant(3600, lease)
    assert (await etcd.commit(put_watermark(keys, place, listing.revision, lease))).succeeded
    await etcd.revoke(lease)
    return _newest(watermarks(keys, (await etcd.list(*keys.family(K.WATERMARK))).kvs))


def _newest(known: list[Watermark]) -> Watermark:
    found = newest_old(known)
    assert found is not None
    return found
