"""The reader of etcd's history with watches that are silent, slow, refused or broken."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from distop.errors import EtcdRejected, EtcdUnavailable
from distop.protocol.txn import Put, Txn
from distop.store.client import EtcdClient
from distop.store.history import CaughtUp, HistoryReader, Revision
from tests.simulator.etcd_users import DENIED

if TYPE_CHECKING:
    from tests.simulation.simulated_cluster import SimCluster
    from tests.simulator.server_links import Link


async def write(client: EtcdClient, *keys: str) -> None:
    for key in keys:
        await client.commit(Txn((), (Put(key, b""),)))


async def read(client: EtcdClient, within: float) -> list[str]:
    """The written keys in order. Fails if the current revision is not reached in time."""
    found = []
    async with asyncio.timeout(within):
        async for step in HistoryReader(client, "k", "l").steps():
            if isinstance(step, Revision):
                found += [change.kv.key for change in step.changes]
    return found


async def follow(client: EtcdClient, steps: list[str]) -> None:
    async for step in HistoryReader(client, "k", "l", follow=True).steps():
        steps += ["present" if isinstance(step, CaughtUp) else "step"]


def link_of(cluster: SimCluster) -> Link:
    (link,) = cluster.network.links()
    return link


def test_the_current_revision_is_reached_although_the_last_write_was_elsewhere(cluster: SimCluster) -> None:
    """No event shows this: the reader sends a progress request."""

    async def work(client: EtcdClient) -> None:
        await write(client, "k1", "k2", "z")
        cluster.sent_on_watches(10)
        assert await read(client, within=5.0) == ["k1", "k2"]

    cluster.run(work)


def test_a_server_that_refuses_the_watch_for_good_is_reported(cluster: SimCluster) -> None:
    async def work(client: EtcdClient) -> None:
        await write(client, "k1")
        cluster.etcd.watching.refuses = DENIED
        with pytest.raises(EtcdRejected, match="rejected the watch of its history: .*permission denied"):
            await read(client, within=30.0)

    cluster.run(work)


@pytest.mark.parametrize("seconds", [5.0, 15.0])
def test_the_reader_waits_for_a_slow_server(cluster: SimCluster, seconds: float) -> None:
    """The server starts again for each stream, so repeatedly opening a new one would never end."""

    async def work(client: EtcdClient) -> None:
        await write(client, "k1", "k2")
        cluster.network.block(link_of(cluster), slow={"Watch": seconds})
        assert await read(client, within=120.0) == ["k1", "k2"]

    cluster.run(work)


@pytest.mark.parametrize("silent_until", [25.0, 400.0])
def test_a_server_is_read_within_minutes_after_its_silence(cluster: SimCluster, silent_until: float) -> None:
    """Its streams stay open without events. The reader opens new ones, with a bounded back-off."""

    async def work(client: EtcdClient) -> None:
        await write(client, "k1", "k2")
        server, mute = cluster.etcd.watching, cluster.loop.now + silent_until
        create = server.create
        server.create = lambda *asked: create(*asked) if cluster.loop.now > mute else None  # type: ignore[method-assign]
        cluster.etcd.watching.progress = lambda *asked: None  # type: ignore[method-assign]
        assert await read(client, within=silent_until + 100.0) == ["k1", "k2"]

    cluster.run(work)


def test_a_broken_stream_is_reopened_soon_but_not_at_once(cluster: SimCluster) -> None:
    async def work(client: EtcdClient) -> None:
        await write(client, "k1", "k2")
        sent = cluster.sent_on_watches(25)
        block = cluster.network.block(link_of(cluster), answers=("k",))
        reading = asyncio.ensure_future(read(client, within=60.0))
        for _ in range(60):
            await asyncio.sleep(0.1)
            cluster.network.cut(link_of(cluster))
        cluster.network.unblock([block])
        assert await reading == ["k1", "k2"]
        assert len(sent) > 3

    cluster.run(work)


def test_a_follower_notices_a_watch_that_the_server_has_forgotten(cluster: SimCluster) -> None:
    """Without events it opens a new stream every few seconds at most."""

    async def work(client: EtcdClient) -> None:
        await write(client, "k1")
        sent = cluster.sent_on_watches(30)
        steps: list[str] = []

        following = asyncio.ensure_future(follow(client, steps))
        await asyncio.sleep(120.0)
        assert steps == ["step", "present"]
        assert len(sent) <= 10
        cluster.etcd.watching._watches.clear()
        await write(client, "k2")
        await asyncio.sleep(60.0)
        assert steps == ["step", "present", "step"]
        following.cancel()

    cluster.run(work)


def test_a_follower_ends_with_its_client(cluster: SimCluster) -> None:
    async def work(client: EtcdClient) -> None:
        steps: list[str] = []
        async with EtcdClient(client.config) as own:
            following = asyncio.ensure_future(follow(own, steps))
            await asyncio.sleep(10.0)
        with pytest.raises(EtcdUnavailable, match="closed"):
            async with asyncio.timeout(120.0):
                await following
        assert steps == ["present"]

    cluster.run(work)


def test_a_follower_continues_soon_after_a_short_break_even_after_a_long_one(cluster: SimCluster) -> None:
    async def work(client: EtcdClient) -> None:
        steps: list[str] = []
        following = asyncio.ensure_future(follow(client, steps))
        await asyncio.sleep(1.0)
        cluster.stop(0, 1, 2)
        await asyncio.sleep(60.0)
        cluster.start(0, 1, 2)
        await write(client, "k1")
        await asyncio.sleep(10.0)
        assert steps == ["present", "step"]
        cluster.network.cut(link_of(cluster))
        await write(client, "k2")
        await asyncio.sleep(0.5)
        assert steps == ["present", "step", "step"]
        following.cancel()

    cluster.run(work)
