"""Space ids: each namespace of each etcd has its own folder in a shared directory."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import pytest

from distop.errors import NotFound, UnreadableRecord
from distop.protocol.keys import Keys
from distop.protocol.txn import Put, Txn
from distop.store.cluster_identity import ensure_space_id, read_space_id
from distop.store.embedded import EmbeddedEtcd
from distop.store.ports import reserve
from tests.support.etcd import connected

if TYPE_CHECKING:
    from distop.store.client import EtcdClient

pytestmark = pytest.mark.etcd


class RacingClient:
    """A client that writes only once all clients have read the key and found it missing."""

    def __init__(self, etcd: EtcdClient, read: asyncio.Barrier) -> None:
        self._etcd, self._read = etcd, read
        self.commit = etcd.commit

    async def get(self, key: str) -> object:
        found = await self._etcd.get(key)
        if found is None:
            await self._read.wait()
        return found


async def test_hole_9_etcd_clusters_of_one_id_have_different_spaces() -> None:
    ids, spaces = set(), set()
    (peer,) = reserve(1)
    for _ in range(2):
        with EmbeddedEtcd(peer_port=peer, compaction=None) as server:
            async with connected(server.endpoint) as etcd:
                spaces |= {await ensure_space_id(etcd, Keys(name)) for name in ("", "a")}
                ids.add(etcd.transport.identity.cluster_id)
    assert len(ids) == 1, "the servers have different cluster ids"
    assert len(spaces) == 4


async def test_executors_that_start_at_the_same_time_share_one_space(own_etcd: EmbeddedEtcd) -> None:
    async with connected(own_etcd.endpoint) as etcd:
        barrier = asyncio.Barrier(2)
        found = await asyncio.gather(*(ensure_space_id(RacingClient(etcd, barrier), Keys("a")) for _ in range(2)))  # type: ignore[arg-type]
        assert found == [await read_space_id(etcd, Keys("a")), await ensure_space_id(etcd, Keys("a"))]
        assert re.fullmatch("[0-9a-f]{32}", found[0])


@pytest.mark.parametrize("value", ["", "..", "../a", "A" * 32, "0" * 31, "0" * 32 + "\n", "٠" * 32])
async def test_an_invalid_space_id_is_rejected(own_etcd: EmbeddedEtcd, value: str) -> None:
    async with connected(own_etcd.endpoint) as etcd:
        with pytest.raises(NotFound, match=r"^the key a/distOpSpace is missing"):
            await read_space_id(etcd, Keys("a"))
        await etcd.commit(Txn((), (Put("a/distOpSpace", value.encode()),)))
        for find in (ensure_space_id, read_space_id):
            with pytest.raises(UnreadableRecord, match="a/distOpSpace cannot be read"):
                await find(etcd, Keys("a"))
