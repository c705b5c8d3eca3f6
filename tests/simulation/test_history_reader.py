"""The reader of etcd's history, on watches that are silent, slow, refused or broken."""

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
    from tests.simulation.worlds import World
    from tests.simulator.server_links import Link


async def write(client: EtcdClient, *keys: str) -> None:
    for key in keys:
        await client.commit(Txn((), (Put(key, b""),)))


async def read(client: EtcdClient, within: float) -> list[str]:
    """The keys that were written, in order; the present has to be reached in time."""
    found = []
    async with asyncio.timeout(within):
        async for step in HistoryReader(client, "k", "l").steps():
            if isinstance(step, Revision):
                found += [change.kv.key for change in step.changes]
    return found


async def follow(client: EtcdClient, told: list[str]) -> None:
    async for step in HistoryReader(client, "k", "l", follow=True).steps():
        told += ["present" if isinstance(step, CaughtUp) else "step"]


def link_of(world: World) -> Link:
    (link,) = world.network.links()
    return link


def test_the_present_is_reached_though_the_last_write_was_elsewhere(world: World) -> None:
    """No event tells so: etcd is asked how far it has come."""

    async def work(client: EtcdClient) -> None:
        await write(client, "k1", "k2", "z")
        world.sent_on_watches(10)
        assert await read(client, within=5.0) == ["k1", "k2"]

    world.run(work)


def test_a_server_that_refuses_the_watch_for_good_is_reported(world: World) -> None:
    async def work(client: EtcdClient) -> None:
        await write(client, "k1")
        world.etcd.watching.refuses = DENIED
        with pytest.raises(EtcdRejected, match="rejected the watch of its history: .*permission denied"):
            await read(client, within=30.0)

    world.run(work)


@pytest.mark.parametrize("seconds", [5.0, 15.0])
def test_a_server_that_takes_long_to_send_is_waited_for(world: World, seconds: float) -> None:
    """It starts anew for each stream, so to open another one each time would never end."""

    async def work(client: EtcdClient) -> None:
        await write(client, "k1", "k2")
        world.network.hold(link_of(world), slow={"Watch": seconds})
        assert await read(client, within=120.0) == ["k1", "k2"]

    world.run(work)


@pytest.mark.parametrize("silent_until", [25.0, 400.0])
def test_a_server_that_was_silent_is_read_within_minutes(world: World, silent_until: float) -> None:
    """Its streams stay open, and bring nothing. Another one is opened, later each time, but never much later."""

    async def work(client: EtcdClient) -> None:
        await write(client, "k1", "k2")
        server, mute = world.etcd.watching, world.loop.now + silent_until
        create = server.create
        server.create = lambda *asked: create(*asked) if world.loop.now > mute else None  # type: ignore[method-assign]
        world.etcd.watching.progress = lambda *asked: None  # type: ignore[method-assign]
        assert await read(client, within=silent_until + 100.0) == ["k1", "k2"]

    world.run(work)


def test_a_stream_that_breaks_is_opened_again_soon_and_not_at_once(world: World) -> None:
    async def work(client: EtcdClient) -> None:
        await write(client, "k1", "k2")
        sent = world.sent_on_watches(25)
        hold = world.network.hold(link_of(world), muted=("k",))
        reading = asyncio.ensure_future(read(client, within=60.0))
        for _ in range(60):
            await asyncio.sleep(0.1)
            world.network.cut(link_of(world))
        world.network.release([hold])
        assert await reading == ["k1", "k2"]
        assert len(sent) > 3

    world.run(work)


def test_a_follower_notices_a_watch_that_the_server_has_forgotten(world: World) -> None:
    """And while nothing happens it opens another stream every few seconds at most."""

    async def work(client: EtcdClient) -> None:
        await write(client, "k1")
        sent = world.sent_on_watches(30)
        told: list[str] = []

        following = asyncio.ensure_future(follow(client, told))
        await asyncio.sleep(120.0)
        assert told == ["step", "present"]
        assert len(sent) <= 10
        world.etcd.watching._watches.clear()
        await write(client, "k2")
        await asyncio.sleep(60.0)
        assert told == ["step", "present", "step"]
        following.cancel()

    world.run(work)


def test_a_follower_ends_with_its_client(world: World) -> None:
    async def work(client: EtcdClient) -> None:
        told: list[str] = []
        async with EtcdClient(client.config) as own:
            following = asyncio.ensure_future(follow(own, told))
            await asyncio.sleep(10.0)
        with pytest.raises(EtcdUnavailable, match="closed"):
            async with asyncio.timeout(120.0):
                await following
        assert told == ["present"]

    world.run(work)


def test_a_follower_reads_on_soon_after_a_short_break_though_an_earlier_one_was_long(world: World) -> None:
    async def work(client: EtcdClient) -> None:
        told: list[str] = []
        following = asyncio.ensure_future(follow(client, told))
        await asyncio.sleep(1.0)
        world.stop(0, 1, 2)
        await asyncio.sleep(60.0)
        world.start(0, 1, 2)
        await write(client, "k1")
        await asyncio.sleep(10.0)
        assert told == ["present", "step"]
        world.network.cut(link_of(world))
        await write(client, "k2")
        await asyncio.sleep(0.5)
        assert told == ["present", "step", "step"]
        following.cancel()

    world.run(work)
