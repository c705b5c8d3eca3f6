"""Several members, and a cluster that is not the one seen before."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from distop.core.txn import Put, Txn, absent
from distop.errors import ClusterChanged, EtcdRejected, EtcdUnavailable, OutcomeUnknown
from distop.store.client import EtcdClient
from distop.store.config import EtcdConfig
from distop.store.embedded import EmbeddedEtcd, free_ports
from distop.store.session import Session
from distop.store.watch import Feed
from tests.support.etcd import EtcdCluster, Mirror, connected, until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.etcd


@pytest.fixture
def cluster() -> Iterator[EtcdCluster]:
    with EtcdCluster() as cluster:
        yield cluster


async def test_failover(cluster: EtcdCluster) -> None:
    async with EtcdClient(EtcdConfig(cluster.endpoints, request_timeout=1.0)) as client:
        assert len(await client.members()) == 3
        mirror = Mirror()
        feed = Feed(client, "t.", "t/", mirror.apply)
        await feed.start()
        session = Session(client, "node", b"", 8)
        await session.start()
        if (3, 5, 0) <= await client.version() <= (3, 5, 2):
            with pytest.raises(EtcdRejected, match="13766"):
                await client.check_server()
        used = client.transport.address
        member = next(member for member in cluster.members if member.endpoint == used)

        member.kill()  # the member in use; perhaps the leader
        result = await client.commit(Txn((absent("t.a"),), (Put("t.a", b"1"),)))
        assert result.succeeded or result.repeated
        await feed.reached(result.revision)
        assert mirror.values == {"t.a": b"1"}
        assert client.transport.address != used
        before = session.deadline
        await until(lambda: session.deadline > before or session.lost.done())
        assert session.alive

        await asyncio.to_thread(member.restart)
        used = client.transport.address
        member = next(member for member in cluster.members if member.endpoint == used)
        member.pause()  # a member that neither answers nor closes
        result = await client.commit(Txn((absent("t.b"),), (Put("t.b", b"2"),)))
        assert result.succeeded or result.repeated
        await feed.reached(result.revision)
        assert mirror.values == {"t.a": b"1", "t.b": b"2"}
        member.resume()
        await session.close()

        # Without a quorum nothing is decided, and that is told truly.
        others = [one for one in cluster.members if one is not member]
        for one in others:
            one.kill()
        with pytest.raises((OutcomeUnknown, EtcdUnavailable)):
            await client.commit(Txn((absent("t.c"),), (Put("t.c", b"3"),)), deadline=1.5)
        await feed.close()


async def test_another_cluster_behind_the_endpoint(own_etcd: EmbeddedEtcd) -> None:
    async with connected(own_etcd.endpoint) as client:
        mirror = Mirror()
        feed = Feed(client, "t.", "t/", mirror.apply)
        await feed.start()
        await client.commit(Txn((), (Put("t.a", b"1"),)))
        port = own_etcd.port
        own_etcd.kill()
        async with EmbeddedEtcd(port=port, compaction=None):
            with pytest.raises(ClusterChanged, match="another cluster"):
                await client.get("t.a")
            with pytest.raises(ClusterChanged):  # and from then on: fail closed
                await client.commit(Txn((), (Put("t.a", b"2"),)))
            with pytest.raises(ClusterChanged):
                await feed.wait()
            await feed.close()


async def test_a_store_that_went_back() -> None:
    """A snapshot restored under the same names has the same cluster id, but an older revision."""
    port, peer_port = free_ports(2)
    async with EmbeddedEtcd(port=port, peer_port=peer_port, compaction=None) as server:
        client = EtcdClient(EtcdConfig((server.endpoint,)))
        await client.connect()
        for _ in range(3):
            await client.commit(Txn((), (Put("a", b""),)))
    async with EmbeddedEtcd(port=port, peer_port=peer_port, compaction=None):
        with pytest.raises(ClusterChanged, match="went back from revision 4 to 1"):
            await client.get("a")
    await client.close()
