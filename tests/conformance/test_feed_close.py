"""A feed can be closed at any moment of its start."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from distop.store.watch import Feed
from tests.support.etcd import connected

if TYPE_CHECKING:
    from distop.store.embedded import EmbeddedEtcd


async def test_a_feed_closed_right_after_its_start_ends(shared_etcd: EmbeddedEtcd) -> None:
    async with connected(shared_etcd.endpoint) as client:
        for n in range(200):
            feed = Feed(client, "close/", "close0", lambda batch: None)
            await feed.start()
            for _ in range(n % 8):
                await asyncio.sleep(0)  # another point of its opening each time
            async with asyncio.timeout(20):
                await feed.close()
