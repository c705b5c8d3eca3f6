"""A watch feed can be closed at any moment while it starts."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from distop.store.watch import Feed
from tests.support.etcd import connected

if TYPE_CHECKING:
    from distop.store.client import EtcdClient
    from distop.store.embedded import EmbeddedEtcd


async def test_closing_a_feed_while_it_opens_ends_it(shared_etcd: EmbeddedEtcd) -> None:
    """Python 3.11's wait_for() drops a cancellation that arrives together with its result, which made closing hang."""
    random_delay = random.Random(1)

    async def open_and_close(client: EtcdClient) -> None:
        feed = Feed(client, "close/", "close0", lambda batch: None)
        await feed.start()
        end = asyncio.get_running_loop().time() + random_delay.uniform(0, 0.004)
        while asyncio.get_running_loop().time() < end:  # noqa: ASYNC110 (closes in any loop iteration)
            await asyncio.sleep(0)
        await feed.close()

    async with connected(shared_etcd.endpoint) as client, asyncio.timeout(30):
        for _ in range(20):
            await asyncio.gather(*(open_and_close(client) for _ in range(20)))
