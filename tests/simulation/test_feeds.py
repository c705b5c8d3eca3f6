"""Feeds whose watches are silent or refused, or whose listings are slow."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import pytest

from distop.protocol.txn import Put, Txn
from distop.store.client import EtcdClient
from distop.store.watch import Feed
from tests.simulator.etcd_users import DENIED

if TYPE_CHECKING:
    from distop.store.watch import Batch
    from tests.simulation.simulated_cluster import SimCluster


class Content:
    """Collects the keys and counts the listings of a feed."""

    def __init__(self, client: EtcdClient, *, relist_every: float = 10_000.0) -> None:
        self.keys: set[str] = set()
        self.listings = 0
        self.feed = Feed(client, "k", "l", self._apply, relist_every=relist_every)

    def _apply(self, batch: Batch) -> None:
        self.listings += batch.listing
        self.keys |= {event.kv.key for event in batch.events}


async def write(client: EtcdClient, key: str) -> int:
    return (await client.commit(Txn((), (Put(key, b""),)))).revision


def opened(cluster: SimCluster, most: int = 100) -> list[float]:
    """The times at which watches are opened."""
    return cluster.sent_on_watches(most, lambda asked: asked.HasField("create_request"))


def test_a_feed_soon_reaches_a_revision_without_events(cluster: SimCluster) -> None:
    async def work(client: EtcdClient) -> None:
        content = Content(client)
        await content.feed.start()
        await asyncio.sleep(1.0)
        revision = await write(client, "z")
        async with asyncio.timeout(8.0):
            await content.feed.reached(revision)
        await content.feed.close()

    cluster.run(work)


@pytest.mark.parametrize("heard", [False, True], ids=["at once", "after an event"])
def test_a_watch_that_the_server_has_forgotten_is_replaced(cluster: SimCluster, heard: bool) -> None:
    """Its connection is open, but no events arrive. Without a new watch only the next listing would bring them."""

    async def work(client: EtcdClient) -> None:
        content, server = Content(client), cluster.etcd.watching
        await content.feed.start()
        await asyncio.sleep(5.0)
        if heard:
            await content.feed.reached(await write(client, "k0"))
            content.keys.clear()
        server._watches.clear()
        answer = server.progress
        server.progress = lambda *asked: None  # type: ignore[method-assign]
        await write(client, "k1")
        await asyncio.sleep(60.0)
        assert content.keys == {"k1"}
        server.progress = answer  # type: ignore[method-assign]
        await content.feed.close()

    cluster.run(work)


def test_an_idle_watch_is_kept(cluster: SimCluster) -> None:
    """Progress requests to the server are answered."""

    async def work(client: EtcdClient) -> None:
        when = opened(cluster)
        content = Content(client)
        await content.feed.start()
        for _ in range(10):
            await write(client, "z")
            await asyncio.sleep(30.0)
        assert len(when) == 1
        await content.feed.close()

    cluster.run(work)


def test_a_refused_watch_is_retried_soon_but_not_at_once(cluster: SimCluster, caplog: pytest.LogCaptureFixture) -> None:
    async def work(client: EtcdClient) -> None:
        when = opened(cluster)
        content, server = Content(client), cluster.etcd.watching
        server.refuses = DENIED
        await content.feed.start()
        await asyncio.sleep(60.0)
        assert 5 < len(when) <= 100
        assert content.feed.problem == DENIED
        server.refuses = ""
        await write(client, "k1")
        await asyncio.sleep(10.0)
        assert (content.keys, content.feed.problem) == ({"k1"}, "")
        await content.feed.close()

    with caplog.at_level(logging.WARNING, "distop"):
        cluster.run(work)
    assert len(caplog.records) == 1


def test_a_watch_that_cannot_be_opened_is_reported_by_its_feed(
    cluster: SimCluster, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(client: EtcdClient) -> None:
        content = Content(client)
        await content.feed.start()
        await asyncio.sleep(1.0)
        cluster.stop(0, 1, 2)
        await asyncio.sleep(10.0)
        assert content.feed.problem
        cluster.start(0, 1, 2)
        await asyncio.sleep(20.0)
        assert content.feed.problem == ""
        await content.feed.close()

    with caplog.at_level(logging.WARNING, "distop"):
        cluster.run(work)
    assert any("Watch of k" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(("takes", "least", "most"), [(0.0, 5, 30), (2.0, 0, 3)])
def test_listings_come_every_few_minutes_and_rarely_if_each_takes_long(
    cluster: SimCluster, takes: float, least: int, most: int
) -> None:
    """Listings are a safety net for the watch, and must not dominate etcd's load."""

    async def work(client: EtcdClient) -> None:
        content = Content(client, relist_every=20.0)
        cluster.network.sending = lambda process, path, asked: takes if path.endswith("/Range") else 0.0
        await content.feed.start()
        before = content.listings
        await asyncio.sleep(400.0)
        assert least <= content.listings - before <= most
        await content.feed.close()

    cluster.run(work)


def test_a_feed_ends_with_its_client(cluster: SimCluster) -> None:
    async def work(client: EtcdClient) -> None:
        async with EtcdClient(client.config) as own:
            content = Content(own)
            await content.feed.start()
            await asyncio.sleep(1.0)
        async with asyncio.timeout(60.0):
            await content.feed.wait()

    cluster.run(work)


def test_a_briefly_refused_watch_is_retried_soon_even_after_a_long_refusal(cluster: SimCluster) -> None:
    async def work(client: EtcdClient) -> None:
        content, server = Content(client), cluster.etcd.watching
        server.refuses = DENIED
        await content.feed.start()
        await asyncio.sleep(60.0)
        server.refuses = ""
        await asyncio.sleep(10.0)
        assert content.feed.problem == ""
        server.refuses = DENIED
        cluster.end_watches(DENIED)
        await write(client, "k1")
        await asyncio.sleep(0.3)
        assert content.feed.problem == DENIED
        server.refuses = ""
        await asyncio.sleep(0.6)
        assert content.keys == {"k1"}
        await content.feed.close()

    cluster.run(work)
