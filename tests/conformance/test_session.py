"""Sessions: the deadline that is known without asking, and each way to lose one (L1–L6)."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest

from distop.errors import PermissionDenied, SessionLost
from distop.protocol.txn import Delete, Put, Txn, TxnResult, exists
from distop.store.session import Session, boottime, new_lease_id
from distop.store.watch import Feed
from tests.conformance.mirror import Mirror
from tests.support.etcd import connected, until
from tests.support.proxy import Mode, TcpProxy

if TYPE_CHECKING:
    from distop.store.client import EtcdClient
    from distop.store.embedded import EmbeddedEtcd

pytestmark = pytest.mark.etcd


async def test_renewal_moves_the_deadline(client: EtcdClient, prefix: str) -> None:
    moved: list[float] = []
    begun = boottime()
    session = Session(client, f"{prefix}node", b"{}", 4, margin=0.5, on_deadline_moved=moved.append)
    await session.start()
    assert session.alive
    assert begun + session.ttl - 0.5 <= moved[0] <= boottime() + session.ttl - 0.5
    await until(lambda: len(moved) >= 3)
    assert moved == sorted(moved)
    assert session.deadline == moved[-1] <= boottime() + session.ttl - 0.5
    node = await client.get(f"{prefix}node")
    assert node is not None
    assert node.lease == session.lease_id
    assert node.create_revision == session.create_revision
    await session.update(b'{"slots": 4}')
    node = await client.get(f"{prefix}node")
    assert node is not None
    assert (node.value, node.lease, node.create_revision) == (
        b'{"slots": 4}',
        session.lease_id,
        session.create_revision,
    )
    await session.close()
    assert not session.alive
    assert session.lost.done()
    assert await client.get(f"{prefix}node") is None
    assert await client.time_to_live(session.lease_id) == (0, -1)


async def test_the_granted_ttl_counts(client: EtcdClient, prefix: str) -> None:  # L2, L7
    session = Session(client, f"{prefix}node", b"", 1)
    await session.start()
    granted, _ = await client.time_to_live(session.lease_id)
    assert session.ttl == granted
    await session.close()


async def test_the_revocation_of_the_lease_ends_the_session(client: EtcdClient, prefix: str) -> None:
    session = Session(client, f"{prefix}node", b"", 2)
    await session.start()
    await client.revoke(session.lease_id)
    await session.lost
    assert not session.alive
    with pytest.raises(SessionLost):
        await session.update(b"x")
    await session.close()


async def test_the_deletion_of_the_node_key_ends_the_session(client: EtcdClient, prefix: str) -> None:  # L2
    session = Session(client, f"{prefix}node", b"", 2)
    await session.start()
    await client.commit(Txn((), (Delete(f"{prefix}node"),)))
    assert "was deleted" in await session.lost
    await session.close()
    told = Session(client, f"{prefix}told", b"", 60)
    await told.start()
    told.node_key_gone()
    assert "was deleted" in await told.lost
    updated = Session(client, f"{prefix}updated", b"", 60)
    await updated.start()
    await client.commit(Txn((), (Delete(f"{prefix}updated"),)))
    with pytest.raises(SessionLost, match="was deleted"):
        await updated.update(b"x")
    await told.close()
    await updated.close()


async def test_a_late_copy_of_an_update_does_not_undo_later_ones(
    client: EtcdClient, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node said that it was drained, and then stood there as draining for ever: T9."""
    session = Session(client, f"{prefix}node", b"active", 60)
    await session.start()
    sent: list[Txn] = []
    commit = client.commit

    async def noted(txn: Txn, **options: Any) -> TxnResult:
        sent.append(txn)
        return await commit(txn, **options)

    monkeypatch.setattr(client, "commit", noted)
    await session.update(b"draining")
    await session.update(b"drained")
    assert not (await commit(sent[0])).succeeded
    node = await client.get(f"{prefix}node")
    assert node is not None
    assert node.value == b"drained"
    await session.close()


async def test_an_update_succeeds_after_a_failed_update_that_was_applied(
    client: EtcdClient, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(client, f"{prefix}node", b"active", 60)
    await session.start()
    commit = client.commit

    async def written(txn: Txn, **options: Any) -> TxnResult:
        await commit(txn, **options)
        raise PermissionDenied("etcd denies us permission for the node update")

    with monkeypatch.context() as patch:
        patch.setattr(client, "commit", written)
        with pytest.raises(PermissionDenied):
            await session.update(b"draining")
    for value in (b"draining", b"drained"):
        await session.update(value)
        node = await client.get(f"{prefix}node")
        assert node is not None
        assert (node.value, node.create_revision) == (value, session.create_revision)
    await session.close()


async def test_a_session_without_renewals_ends_at_the_deadline_before_the_lease_expires(
    shared_etcd: EmbeddedEtcd, client: EtcdClient, prefix: str
) -> None:
    async with TcpProxy(shared_etcd.port) as proxy, connected(proxy.endpoint) as far:
        session = Session(far, f"{prefix}node", b"", 3, margin=1.0)
        await session.start()
        proxy.set(Mode.BLACK_HOLE)
        assert "before the deadline" in await session.lost
        assert boottime() >= session.deadline
        assert not session.alive
        assert (await client.commit(Txn((exists(f"{prefix}node"),)))).succeeded  # etcd still holds the lease
        deadline = session.deadline
        proxy.set(Mode.PASS)
        while await client.get(f"{prefix}node") is not None:
            pass  # nobody renews it any more
        assert session.deadline == deadline
        await session.close()


async def test_a_session_survives_a_dead_connection(shared_etcd: EmbeddedEtcd, client: EtcdClient, prefix: str) -> None:
    """F7, with one endpoint, so that there is no other member to go on with: the connection is swallowed in silence, a
    new one would pass. Session, watch and requests find that out by themselves, before the deadline."""
    async with TcpProxy(shared_etcd.port) as proxy, connected(proxy.endpoint) as far:
        session = Session(far, f"{prefix}node", b"", 10)
        await session.start()
        mirror = Mirror()
        feed = Feed(far, prefix, f"{prefix}~", mirror.apply)
        await feed.start()
        proxy.drop_connections_silently()
        revision = (await client.commit(Txn((), (Put(f"{prefix}a", b"1"),)))).revision
        await until(lambda: mirror.revision >= revision, "the watch goes on")
        before = session.deadline
        await until(lambda: session.deadline > before or session.lost.done(), "the session goes on")
        assert session.alive
        assert (await far.commit(Txn((exists(f"{prefix}a"),)))).succeeded
        assert mirror.listings == 1, "the same watch, from its position"
        await feed.close()
        await session.close()


async def test_answers_that_are_lost_do_not_count(shared_etcd: EmbeddedEtcd, prefix: str) -> None:
    """Renewals that etcd has acknowledged, unheard, keep the lease alive but not the session."""
    async with TcpProxy(shared_etcd.port) as proxy, connected(proxy.endpoint) as far:
        session = Session(far, f"{prefix}node", b"", 2, margin=0.5)
        await session.start()
        deadline = session.deadline
        proxy.set(Mode.DROP_ANSWERS)
        await session.lost
        assert session.deadline - deadline <= session.ttl
        await session.close()


async def test_a_session_survives_an_outage_shorter_than_the_ttl(own_etcd: EmbeddedEtcd) -> None:
    async with connected(own_etcd.endpoint) as client:
        session = Session(client, "node", b"", 5)
        await session.start()
        own_etcd.kill()
        await asyncio.to_thread(own_etcd.restart)
        before = session.deadline
        await until(lambda: session.deadline > before or session.lost.done())
        assert session.alive
        await session.close()


async def test_a_restart_of_etcd_gives_every_lease_a_whole_ttl(own_etcd: EmbeddedEtcd) -> None:  # L4
    """Nothing expires while no server runs, however long that is, and nobody needs to renew in time afterwards."""
    lease, ttl = new_lease_id(), 4
    async with connected(own_etcd.endpoint) as client:
        await client.grant(ttl, lease)
        granted = boottime()
        held = await client.commit(Txn((), (Put("held", b"", lease),)))
    own_etcd.kill()
    await until(lambda: boottime() > granted + ttl + 1, "the lease would have expired")
    await asyncio.to_thread(own_etcd.restart)
    async with connected(own_etcd.endpoint) as client:
        kept, (granted_ttl, left) = await client.get("held"), await client.time_to_live(lease)
        assert kept is not None
        assert kept.mod_revision == held.revision
        assert granted_ttl == ttl
        assert left > 0
        while await client.get("held") is not None:
            pass  # it expires all the same, where nobody renews it
        assert await client.time_to_live(lease) == (0, -1)


async def test_failed_renewals_in_an_outage_are_logged_once(
    own_etcd: EmbeddedEtcd, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "distop.store")

    def tried() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.message.startswith("Renewal of session ")]

    async with connected(own_etcd.endpoint) as client:
        session = Session(client, "outage/node", b"", 10, margin=1.5)
        await session.start()
        own_etcd.kill()
        await until(lambda: len(tried()) >= 8, "renewals are tried again and again")
        await session.close()
    told = [record.message for record in tried() if record.levelno == logging.WARNING]
    assert 0 < len(told) < 4
    assert len(set(told)) == len(told)


async def test_a_loop_that_stalled_beyond_the_deadline(client: EtcdClient, prefix: str) -> None:
    """An answer that waited to be read does not revive what has had to stop."""
    session = Session(client, f"{prefix}node", b"", 3, margin=1.5)
    await session.start()
    while boottime() < session.deadline:
        pass  # the loop does not run: a long GIL hold, a SIGSTOP
    assert not session.alive
    deadline = session.deadline
    await session.lost
    assert session.deadline == deadline
    await session.close()


async def test_an_incarnation_id_is_used_only_once(client: EtcdClient, prefix: str) -> None:
    session = Session(client, f"{prefix}node", b"", 5)
    await session.start()
    other = Session(client, f"{prefix}node", b"", 5)
    with pytest.raises(SessionLost, match="exists already"):
        await other.start()
    await other.close()
    assert session.alive
    await session.close()


async def test_the_answer_to_the_start_is_lost(shared_etcd: EmbeddedEtcd, client: EtcdClient, prefix: str) -> None:
    async with TcpProxy(shared_etcd.port) as proxy, connected(proxy.endpoint, request_timeout=0.4) as lossy:
        proxy.set(Mode.DROP_ANSWERS)
        lease = new_lease_id()
        session = Session(lossy, f"{prefix}node", b"", 30, lease_id=lease)
        starting = asyncio.ensure_future(session.start())
        while (await client.time_to_live(lease))[0] == 0:
            pass
        proxy.set(Mode.PASS)
        await starting
        assert session.alive
        await session.close()


async def test_a_put_under_the_lease_needs_it(client: EtcdClient, prefix: str) -> None:
    session = Session(client, f"{prefix}node", b"", 5)
    await session.start()
    await client.commit(Txn((), (Put(f"{prefix}claim", b"", session.lease_id),)))
    await session.close()
    assert await client.get(f"{prefix}claim") is None
