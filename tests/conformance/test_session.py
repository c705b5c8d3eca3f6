"""Sessions: the deadline, which needs no request, and each way to lose a session (L1–L6)."""

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
    started = boottime()
    session = Session(client, f"{prefix}node", b"{}", 4, margin=0.5, on_deadline_moved=moved.append)
    await session.start()
    assert session.alive
    assert started + session.ttl - 0.5 <= moved[0] <= boottime() + session.ttl - 0.5
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


async def test_a_session_has_the_ttl_that_etcd_granted(client: EtcdClient, prefix: str) -> None:  # L2, L7
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
    notified = Session(client, f"{prefix}notified", b"", 60)
    await notified.start()
    notified.node_key_gone()
    assert "was deleted" in await notified.lost
    updated = Session(client, f"{prefix}updated", b"", 60)
    await updated.start()
    await client.commit(Txn((), (Delete(f"{prefix}updated"),)))
    with pytest.raises(SessionLost, match="was deleted"):
        await updated.update(b"x")
    await notified.close()
    await updated.close()


async def test_a_late_copy_of_an_update_does_not_undo_later_ones(
    client: EtcdClient, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T9: a late copy of "draining" once overwrote "drained", so that a node seemed to drain for ever."""
    session = Session(client, f"{prefix}node", b"active", 60)
    await session.start()
    sent: list[Txn] = []
    commit = client.commit

    async def recorded(txn: Txn, **options: Any) -> TxnResult:
        sent.append(txn)
        return await commit(txn, **options)

    monkeypatch.setattr(client, "commit", recorded)
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

    async def apply_then_fail(txn: Txn, **options: Any) -> TxnResult:
        await commit(txn, **options)
        raise PermissionDenied("etcd denies us permission for the node update")

    with monkeypatch.context() as patch:
        patch.setattr(client, "commit", apply_then_fail)
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
            pass  # the session no longer renews its lease
        assert session.deadline == deadline
        await session.close()


async def test_a_session_survives_a_dead_connection(shared_etcd: EmbeddedEtcd, client: EtcdClient, prefix: str) -> None:
    """F7 with one endpoint, thus without another member: the connection silently drops everything, but a new
    connection works. Session, watch and requests each reconnect before the deadline.
    """
    async with TcpProxy(shared_etcd.port) as proxy, connected(proxy.endpoint) as far:
        session = Session(far, f"{prefix}node", b"", 10)
        await session.start()
        mirror = Mirror()
        feed = Feed(far, prefix, f"{prefix}~", mirror.apply)
        await feed.start()
        proxy.drop_connections_silently()
        revision = (await client.commit(Txn((), (Put(f"{prefix}a", b"1"),)))).revision
        await until(lambda: mirror.revision >= revision, "the watch continues")
        before = session.deadline
        await until(lambda: session.deadline > before or session.lost.done(), "the session is renewed")
        assert session.alive
        assert (await far.commit(Txn((exists(f"{prefix}a"),)))).succeeded
        assert mirror.listings == 1, "the watch listed again instead of resuming"
        await feed.close()
        await session.close()


async def test_renewals_with_lost_answers_do_not_extend_the_session(shared_etcd: EmbeddedEtcd, prefix: str) -> None:
    """A renewal whose answer is lost keeps the lease alive, but not the session."""
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
    """No lease expires while etcd is down, however long, and afterwards each lease has its whole TTL left."""
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
            pass  # it expires without renewals
        assert await client.time_to_live(lease) == (0, -1)


async def test_failed_renewals_in_an_outage_are_logged_once(
    own_etcd: EmbeddedEtcd, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "distop.store")

    def renewal_attempts() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.message.startswith("Renewal of session ")]

    async with connected(own_etcd.endpoint) as client:
        session = Session(client, "outage/node", b"", 10, margin=1.5)
        await session.start()
        own_etcd.kill()
        await until(lambda: len(renewal_attempts()) >= 8, "the session has retried eight times")
        await session.close()
    notified = [record.message for record in renewal_attempts() if record.levelno == logging.WARNING]
    assert 0 < len(notified) < 4
    assert len(set(notified)) == len(notified)


async def test_an_event_loop_stalled_beyond_the_deadline_ends_the_session(client: EtcdClient, prefix: str) -> None:
    """A renewal's answer that is read after the deadline does not revive the session."""
    session = Session(client, f"{prefix}node", b"", 3, margin=1.5)
    await session.start()
    while boottime() < session.deadline:
        pass  # blocks the event loop, as a long GIL hold or a SIGSTOP does
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


async def test_a_session_starts_although_the_answer_to_its_start_was_lost(
    shared_etcd: EmbeddedEtcd, client: EtcdClient, prefix: str
) -> None:
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


async def test_closing_a_session_deletes_the_keys_on_its_lease(client: EtcdClient, prefix: str) -> None:
    session = Session(client, f"{prefix}node", b"", 5)
    await session.start()
    await client.commit(Txn((), (Put(f"{prefix}claim", b"", session.lease_id),)))
    await session.close()
    assert await client.get(f"{prefix}claim") is None
