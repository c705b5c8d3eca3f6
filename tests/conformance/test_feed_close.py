"""A feed can be closed at any moment of its start."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from distop.store.watch import Feed
from tests.support.etcd import connected

if TYPE_CHECKING:
    from distop.store.client import EtcdClient
    from distop.store.embedded import EmbeddedEtcd


async def test_a_feed_closed_while_it_opens_ends(shared_etcd: EmbeddedEtcd) -> None:
    """Python 3.11's wait_for() drops a cancellation that comes together with its result: some closes then hung."""
    chance = random.Random(1)

    async def one(client: EtcdClient) -> None:
        feed = Feed(client, "close/", "close0", lambda batch: None)
        await feed.start()
        end = asyncio.get_running_loop().time() + chance.uniform(0, 0.004)
        while asyncio.get_running_loop().time() < end:  # noqa: ASYNC110 (any turn in which the stream may be opening)
            await asyncio.sleep(0)
        await feed.close()

    async with connected(shared_etcd.endpoint) as client, asyncio.timeout(30):
        for _ in range(20):
            await asyncio.gather(*(one(client) for _ in range(20)))
