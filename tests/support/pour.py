"""A model store's history, written into a real etcd revision by revision."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.protocol.txn import Delete, Put, Txn

if TYPE_CHECKING:
    from distop.store.client import EtcdClient
    from tests.support.world import World


async def pour(world: World, client: EtcdClient, after: int = 0) -> int:
    """Write what the world's history has after its revision ``after``; etcd's revision then."""
    revision = 0
    for number, changes in world.store.history:
        if number > after:
            ops = [Delete(c.kv.key) if c.deleted else Put(c.kv.key, c.kv.value) for c in changes]
            revision = (await client.commit(Txn((), tuple(ops)))).revision
    return revision
