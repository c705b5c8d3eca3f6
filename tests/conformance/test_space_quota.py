"""T8: the requests that a full etcd refuses and permits, and recovery once there is space again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from distop.protocol.txn import Delete, Get, Put, Txn, exists
from distop.store import transport as wire
from distop.store._proto import rpc_pb2 as rpc
from distop.store.etcd_messages import encode_txn
from distop.store.session import Session, new_lease_id
from distop.store.transport import RequestFailed
from tests.simulator.database_space import counts_nested, serves_free_requests
from tests.support.etcd import connected, fill_database, free_space, until

if TYPE_CHECKING:
    from distop.protocol.txn import TxnOperation
    from distop.store.client import EtcdClient
    from distop.store.embedded import EmbeddedEtcd
    from distop.store.transport import Method

pytestmark = pytest.mark.etcd


async def send_once(client: EtcdClient, method: Method[Any, Any], request: Any) -> bool:
    """Send one request without a retry: whether etcd applies it. Otherwise the database is full."""
    try:
        await client.transport.unary(method, request, 10.0)
    except RequestFailed as error:
        assert "database space exceeded" in error.failure.detail
        return False
    return True


async def accepts(client: EtcdClient, *operations: TxnOperation, otherwise: tuple[TxnOperation, ...] = ()) -> bool:
    """Whether etcd accepts a transaction with these operations on the condition that the key ``there`` exists."""
    return await send_once(client, wire.TXN, encode_txn(Txn((exists("there"),), operations, otherwise)))


async def test_a_full_etcd_refuses_grants_and_puts(small_etcd: EmbeddedEtcd) -> None:
    async with connected(small_etcd.endpoint) as client:
        version = await client.version()
        await client.commit(Txn((), (Put("there", b"1"), Put("other", b"1"))))
        await fill_database(client)
        assert not await send_once(client, wire.GRANT, rpc.LeaseGrantRequest(ID=new_lease_id(), TTL=60))
        assert not await accepts(client, Put("a", b""))
        assert not await accepts(client, Put("a", b""), Delete("other"))
        # etcd also counts the puts of the branch that is not taken.
        assert not await accepts(client, Get("there"), otherwise=(Put("a", b""),))
        nested = Txn((), (Put("a", b""),))
        assert not await accepts(client, nested, Put("b", b""))
        if counts_nested(version):
            assert not await accepts(client, nested)
            assert not await accepts(client, Txn((), (nested,)))
            assert await client.get("a") is None
        elif serves_free_requests(version):
            assert await accepts(client, nested)
            assert await client.get("a") is not None
        if serves_free_requests(version):
            assert await accepts(client, Delete("other"), Get("there"))
            assert await client.get("other") is None
        assert await client.get("b") is None


async def test_a_session_survives_a_full_etcd(small_etcd: EmbeddedEtcd) -> None:
    """Renewing and revoking a lease need no space. A new session starts once there is space again."""
    async with connected(small_etcd.endpoint) as client:
        session = Session(client, "node", b"", 3)
        await session.start()
        filling = new_lease_id()
        await client.grant(600, filling)
        await fill_database(client, filling)
        before = session.deadline
        await until(lambda: session.deadline > before or session.lost.done(), "a renewal is answered")
        assert session.alive
        later = Session(client, "later", b"", 30)
        starting = asyncio.ensure_future(later.start())
        await client.revoke(filling)
        assert await client.get("fill0") is None
        assert await client.alarms() == ("NOSPACE",)
        assert not starting.done()
        assert await client.get("later") is None
        await free_space(client)
        assert await client.alarms() == ()
        await starting
        assert later.alive
        assert session.alive
        await session.close()
        assert await client.get("node") is None
        await later.close()
