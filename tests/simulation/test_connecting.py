"""A client that connects while etcd is away, or while its token ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from distop.store.client import EtcdClient

if TYPE_CHECKING:
    from tests.simulation.worlds import World
    from tests.simulator.virtual_loop import Process

USER = {"username": "me", "password": "a secret"}


def test_a_client_connects_soon_after_etcd_has_come_back(world: World) -> None:
    """And asks it no more often than is of use."""

    async def work(client: EtcdClient) -> None:
        world.stop(0, 1, 2)
        own, before = EtcdClient(client.config), world.network.requests
        connecting = asyncio.ensure_future(own.connect())
        while world.loop.now < 4.0:
            await asyncio.sleep(0.1)
            assert world.network.requests < before + 100
        assert world.network.requests > before + 2
        world.start(0, 1, 2)
        async with asyncio.timeout(4.0):
            await connecting
        await own.close()

    world.run(work)


def test_a_client_whose_token_ends_while_it_connects_gets_another_one(world: World) -> None:
    users = world.etcd.users
    users.enabled = True
    ended: list[str] = []

    def applied(process: Process, path: str, asked: object) -> None:
        if path.endswith("/Authenticate") and not ended:
            ended.append(path)
            world.loop.world_at(world.loop.now, users.end_tokens)

    async def work(client: EtcdClient) -> None:
        assert ended
        assert users.refused == 1

    world.network.applied = applied
    world.run(work, **USER)
