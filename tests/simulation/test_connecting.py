"""A client that connects while etcd is down, or while its token expires."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from distop.store.client import EtcdClient

if TYPE_CHECKING:
    from tests.simulation.simulated_cluster import SimCluster
    from tests.simulator.virtual_loop import Process

USER = {"username": "me", "password": "a secret"}


def test_a_client_connects_soon_after_etcd_has_come_back(cluster: SimCluster) -> None:
    """Meanwhile it sends few requests."""

    async def work(client: EtcdClient) -> None:
        cluster.stop(0, 1, 2)
        own, before = EtcdClient(client.config), cluster.network.requests
        connecting = asyncio.ensure_future(own.connect())
        while cluster.loop.now < 4.0:
            await asyncio.sleep(0.1)
            assert cluster.network.requests < before + 100
        assert cluster.network.requests > before + 2
        cluster.start(0, 1, 2)
        async with asyncio.timeout(4.0):
            await connecting
        await own.close()

    cluster.run(work)


def test_a_client_whose_token_ends_while_it_connects_gets_another_one(cluster: SimCluster) -> None:
    users = cluster.etcd.users
    users.enabled = True
    ended: list[str] = []

    def applied(process: Process, path: str, asked: object) -> None:
        if path.endswith("/Authenticate") and not ended:
            ended.append(path)
            cluster.loop.world_at(cluster.loop.now, users.end_tokens)

    async def work(client: EtcdClient) -> None:
        assert ended
        assert users.refused == 1

    cluster.network.applied = applied
    cluster.run(work, **USER)
