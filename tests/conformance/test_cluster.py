"""A cluster of several members, and a client whose endpoint now serves another cluster."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from distop.errors import ClusterChanged, EtcdRejected, EtcdUnavailable, OutcomeUnknown
from distop.protocol.supported_versions import orders_requested_progress
from distop.protocol.txn import Put, Txn, absent
from distop.store import transport as wire
from distop.store import watch
from distop.store._proto import rpc_pb2 as rpc
from distop.store.client import EtcdClient
from distop.store.connection_settings import EtcdConfig
from distop.store.embedded import EmbeddedEtcd
from distop.store.ports import reserve
from distop.store.session import Session, boottime, new_lease_id
from distop.store.watch import Feed, WatchStream, decode_response
from tests.conformance.mirror import Mirror
from tests.support.etcd import EtcdCluster, connected, until
from tests.support.proxy import Mode, TcpProxy

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.etcd


@pytest.fixture
def cluster() -> Iterator[EtcdCluster]:
    with EtcdCluster() as cluster:
        yield cluster


async def test_a_watch_on_an_idle_cluster_changes_no_member(
    cluster: EtcdCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """W8a: an idle server leaves a progress request for a future revision unanswered, which is no member failure.

    Old servers get no progress requests: the client replaces their streams instead.
    """
    caplog.set_level(logging.INFO, "distop.store")
    monkeypatch.setattr(watch, "PATIENCE", 1.5)
    monkeypatch.setattr(watch, "OLD_PATIENCE", 1.5)
    async with connected(",".join(cluster.endpoints)) as client:
        await client.commit(Txn((), (Put("t.a", b"1"),)))
        feed = Feed(client, "t.", "t/", Mirror().apply)
        await feed.start()
        await until(lambda: feed._stream is not None, "the watch is open")
        stream, heard = feed._stream, set[float]()
        await until(lambda: heard.add(feed._received_at) or len(heard) == 5)  # type: ignore[func-returns-value]
        assert "failed; using" not in caplog.text
        assert (feed._stream is stream) == orders_requested_progress(await client.version())
        await feed.close()


async def test_a_commit_a_watch_and_a_session_survive_a_killed_or_paused_member(cluster: EtcdCluster) -> None:
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

        # Without a quorum, a commit fails or its outcome is unknown.
        others = [one for one in cluster.members if one is not member]
        for one in others:
            one.kill()
        with pytest.raises((OutcomeUnknown, EtcdUnavailable)):
            await client.commit(Txn((absent("t.c"),), (Put("t.c", b"3"),)), deadline=1.5)
        await feed.close()


async def leader_first(cluster: EtcdCluster) -> list[EmbeddedEtcd]:
    """The members of the cluster, the leader first."""
    for member in cluster.members:
        async with connected(member.endpoint) as client:
            status = await client.status()
            if status.leader == status.member_id:
                return [member, *(other for other in cluster.members if other is not member)]
    raise AssertionError("the cluster has no leader")


async def test_a_new_leader_gives_every_lease_a_whole_ttl(cluster: EtcdCluster) -> None:  # L4
    lease, ttl = new_lease_id(), 30
    leader, follower, _ = await leader_first(cluster)
    async with connected(follower.endpoint) as client:
        await client.grant(ttl, lease)
        granted = boottime()
        await until(lambda: boottime() > granted + 5, "five seconds of the lease have passed")
        leader.kill()
        asked = boottime()
        granted_ttl, left = await client.time_to_live(lease)
        assert granted_ttl == ttl
        assert asked + left > granted + ttl, "the lease now ends later than the old leader would have ended it"


async def renewed(client: EtcdClient, lease: int) -> int:
    """The time to live with which this member answers a renewal of the lease."""
    call, _ = await client.transport.stream(wire.KEEP_ALIVE)
    await call.write(rpc.LeaseKeepAliveRequest(ID=lease))
    answer = await call.read()
    call.cancel()
    assert isinstance(answer, rpc.LeaseKeepAliveResponse)
    return int(answer.TTL)


async def test_each_member_reports_a_revoked_lease_on_renewal(cluster: EtcdCluster) -> None:  # L2
    lease, ttl = new_lease_id(), 30
    leader, *followers = await leader_first(cluster)
    async with connected(leader.endpoint) as client, AsyncExitStack() as stack:
        others = [await stack.enter_async_context(connected(member.endpoint)) for member in followers]
        await client.grant(ttl, lease)
        assert [await renewed(one, lease) for one in (client, *others)] == [ttl] * 3
        await client.revoke(lease)
        assert [await renewed(one, lease) for one in (client, *others)] == [0] * 3


async def test_a_watch_through_a_lagging_member_reports_each_revision_once_and_in_order(cluster: EtcdCluster) -> None:
    """F18: reads through a lagging member are current, and its watches report the missed revisions later."""
    leader, behind, _ = await leader_first(cluster)
    async with connected(leader.endpoint) as near, connected(behind.endpoint) as far:
        mirror = Mirror()
        feed = Feed(far, "t.", "t/", mirror.apply)
        await feed.start()
        await feed.reached((await near.commit(Txn((), (Put("t.a", b""),)))).revision)
        behind.pause()
        revisions = [(await near.commit(Txn((), (Put("t.a", b"%d" % n),)))).revision for n in range(50)]
        assert mirror.revision < revisions[0], "the paused member reported new revisions"
        behind.resume()
        found = await far.get("t.a")
        assert found is not None
        assert found.mod_revision == revisions[-1]
        await feed.reached(revisions[-1])
        assert mirror.mod_revisions[1:] == revisions
        assert mirror.listings == 1

        # W9: a watch from a future revision gets no older events; a watch from a past revision gets all since then.
        for start, wanted in ((revisions[-1] + 2, [revisions[-1] + 2]), (revisions[20], revisions[20:])):
            stream = WatchStream(far, "t.", "t/", start)
            await stream.open(5.0)
            reported = list[int]()
            while not reported or reported[-1] < wanted[-1]:
                if start > revisions[-1]:
                    await near.commit(Txn((), (Put("t.a", b"later"),)))
                message = await stream.read()
                assert message is not None
                reported += [event.kv.mod_revision for event in decode_response(message).events]
            stream.cut()
            assert reported[: len(wanted)] == wanted
        await feed.close()


async def test_a_session_survives_a_member_that_answers_nothing(cluster: EtcdCluster) -> None:  # F7
    """With the default TTL: a renewal without an answer within a third of the TTL goes to another member."""
    first, *others = cluster.members
    async with TcpProxy(first.port) as proxy:
        endpoints = (proxy.endpoint, *(member.endpoint for member in others))
        async with EtcdClient(EtcdConfig(endpoints)) as client:
            session = Session(client, "node", b"", 10)
            await session.start()
            granted = session.deadline
            await until(lambda: session.deadline > granted, "the first renewal has been answered")
            proxy.set(Mode.BLACK_HOLE)
            before = session.deadline
            await until(lambda: session.deadline > before or session.lost.done(), "another member has answered")
            assert session.alive
            assert client.transport.address != proxy.endpoint
            await session.close()


async def test_a_client_fails_once_its_endpoint_serves_another_cluster(own_etcd: EmbeddedEtcd) -> None:
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
            with pytest.raises(ClusterChanged):  # every later request fails, too
                await client.commit(Txn((), (Put("t.a", b"2"),)))
            with pytest.raises(ClusterChanged):
                await feed.wait()
            await feed.close()


async def test_a_client_detects_that_the_revision_decreased() -> None:
    """A restored snapshot with the same member names has the same cluster id, but an older revision."""
    port, peer_port = reserve(2)
    async with EmbeddedEtcd(port=port, peer_port=peer_port, compaction=None) as server:
        client = EtcdClient(EtcdConfig((server.endpoint,)))
        await client.connect()
        for _ in range(3):
            await client.commit(Txn((), (Put("a", b""),)))
    async with EmbeddedEtcd(port=port, peer_port=peer_port, compaction=None):
        with pytest.raises(ClusterChanged, match="went back from revision 4 to 1"):
            await client.get("a")
    await client.close()
