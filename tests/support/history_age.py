"""Makes the history an hour older: writes an age watermark and ends its lease."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.protocol import keys as K
from distop.protocol.age_watermarks import Watermark, newest_old, next_slot, put_watermark, watermarks
from distop.store.session import new_lease_id

if TYPE_CHECKING:
    from distop.protocol.keys import Keys
    from distop.store.client import EtcdClient
    from distop.testing import ModelStore


def age_model_history(store: ModelStore, keys: Keys) -> Watermark:
    """Make the history in the model of etcd an hour older; returns the watermark."""
    slot, upto = next_slot(watermarks(keys, store.range(*keys.family(K.WATERMARK)))), store.revision
    assert slot is not None
    lease = store.grant(1_000_000 + upto)
    assert store.apply(put_watermark(keys, slot, upto, lease)).succeeded
    store.expire(lease)
    return _newest(watermarks(keys, store.range(*keys.family(K.WATERMARK))))


async def age_history(etcd: EtcdClient, keys: Keys) -> Watermark:
    """Make the history in a real etcd an hour older; returns the watermark."""
    listing = await etcd.list(*keys.family(K.WATERMARK))
    slot = next_slot(watermarks(keys, listing.kvs))
    assert slot is not None
    lease = new_lease_id()
    await etcd.grant(3600, lease)
    assert (await etcd.commit(put_watermark(keys, slot, listing.revision, lease))).succeeded
    await etcd.revoke(lease)
    return _newest(watermarks(keys, (await etcd.list(*keys.family(K.WATERMARK))).kvs))


def _newest(known: list[Watermark]) -> Watermark:
    found = newest_old(known)
    assert found is not None
    return found
