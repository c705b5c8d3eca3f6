"""T9: after a lost answer, only an identical transaction resolves the unknown outcome."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from grpc.aio import AioRpcError

from distop.errors import EtcdUnavailable, OutcomeUnknown
from distop.protocol.txn import Get, GetResult, Put, Txn, absent, unchanged
from distop.store._proto import rpc_pb2 as rpc
from distop.store.client import EtcdClient
from distop.store.connection_settings import EtcdConfig
from distop.store.grpc_failures import Failure, FailureKind
from distop.store.transport import RANGE, WATCH, RequestFailed
from tests.support.etcd import connected, until
from tests.support.proxy import Mode, TcpProxy

if TYPE_CHECKING:
    from distop.store.embedded import EmbeddedEtcd

pytestmark = pytest.mark.etcd


def claim(key: str, who: bytes) -> Txn:
    return Txn((absent(key),), (Put(key, who),), (Get(key),), label="claim")


async def test_a_commit_with_a_lost_answer_is_repeated(
    shared_etcd: EmbeddedEtcd, client: EtcdClient, prefix: str
) -> None:
    async with TcpProxy(shared_etcd.port) as proxy, connected(proxy.endpoint, request_timeout=0.5) as lossy:
        proxy.set(Mode.DROP_ANSWERS)
        commit = asyncio.ensure_future(lossy.commit(claim(f"{prefix}c", b"me")))
        while await client.get(f"{prefix}c") is None:  # the first copy is applied
            pass
        assert not commit.done()
        proxy.set(Mode.PASS)
        result = await commit
        assert result.repeated
        assert not result.succeeded
        (found,) = result.responses
        assert isinstance(found, GetResult)
        assert found.kv is not None
        assert found.kv.value == b"me"  # the refusal was caused by our own earlier copy
        assert found.kv.version == 1


async def test_a_late_copy_of_a_repeated_transaction_changes_nothing(
    shared_etcd: EmbeddedEtcd, client: EtcdClient, prefix: str
) -> None:
    key = f"{prefix}key"
    before = await client.commit(Txn((), (Put(key, b"0"),)))
    async with TcpProxy(shared_etcd.port) as proxy, connected(proxy.endpoint, request_timeout=0.5) as slow:
        txn = Txn((unchanged(key, before.revision),), (Put(key, b"slow"),), (Get(key),))
        proxy.set(Mode.HOLD_REQUESTS)
        with pytest.raises(OutcomeUnknown):
            await slow.commit(txn, deadline=0.6)
        repeated = await client.commit(txn)
        assert repeated.succeeded
        again = await client.commit(Txn((unchanged(key, repeated.revision),), (Put(key, b"later"),)))
        assert again.succeeded
        sent = proxy.requested
        proxy.cut_clients()
        proxy.set(Mode.PASS)  # the first copy reaches etcd only now
        await slow.get(key)
        assert proxy.requested > sent
        found = await client.get(key)
        assert found is not None
        assert found.value == b"later"


async def test_a_commit_past_its_deadline_has_an_unknown_outcome(shared_etcd: EmbeddedEtcd, prefix: str) -> None:
    async with TcpProxy(shared_etcd.port) as proxy, connected(proxy.endpoint, request_timeout=0.3) as lossy:
        proxy.set(Mode.DROP_ANSWERS)
        with pytest.raises(OutcomeUnknown, match="identical"):
            await lossy.commit(claim(f"{prefix}c", b"me"), deadline=0.7)


async def test_the_loss_of_the_session_ends_the_retries(shared_etcd: EmbeddedEtcd, prefix: str) -> None:
    async with TcpProxy(shared_etcd.port) as proxy, connected(proxy.endpoint) as lossy:
        proxy.set(Mode.DROP_ANSWERS)
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        sent = proxy.requested
        commit = asyncio.ensure_future(lossy.commit(claim(f"{prefix}c", b"me"), until=lost))
        await until(lambda: proxy.requested > sent)
        lost.set_result("gone")
        with pytest.raises(OutcomeUnknown):
            await commit


async def test_a_write_during_a_close_has_an_unknown_outcome(shared_etcd: EmbeddedEtcd, prefix: str) -> None:
    async with TcpProxy(shared_etcd.port) as proxy, connected(proxy.endpoint) as lossy:
        proxy.set(Mode.DROP_ANSWERS)
        sent = proxy.requested
        commit = asyncio.ensure_future(lossy.commit(claim(f"{prefix}c", b"me")))
        await until(lambda: proxy.requested > sent)
        await lossy.close()
        with pytest.raises(OutcomeUnknown, match="the etcd client was closed"):
            await commit


async def test_a_write_between_repetitions_during_a_close_has_an_unknown_outcome(
    shared_etcd: EmbeddedEtcd, prefix: str
) -> None:
    async with TcpProxy(shared_etcd.port) as proxy, connected(proxy.endpoint, request_timeout=0.1) as lossy:
        proxy.set(Mode.DROP_ANSWERS)
        failed: list[RequestFailed] = []
        send = lossy.transport.unary

        async def noted(*args: Any) -> Any:
            # Only here can the test see that a copy was not answered and the next one is not sent yet.
            try:
                return await send(*args)
            except RequestFailed as error:
                failed.append(error)
                raise

        lossy.transport.unary = noted  # type: ignore[method-assign]
        commit = asyncio.ensure_future(lossy.commit(claim(f"{prefix}c", b"me")))
        await until(lambda: bool(failed))
        await lossy.close()
        with pytest.raises(OutcomeUnknown):
            await commit


async def test_a_read_during_a_close_is_unavailable(shared_etcd: EmbeddedEtcd, prefix: str) -> None:
    async with TcpProxy(shared_etcd.port) as proxy, connected(proxy.endpoint) as lossy:
        proxy.set(Mode.DROP_ANSWERS)
        sent = proxy.requested
        get = asyncio.ensure_future(lossy.get(prefix))
        await until(lambda: proxy.requested > sent)
        await lossy.close()
        with pytest.raises(EtcdUnavailable, match="the etcd client is closed"):
            await get


async def test_a_request_that_was_never_sent_has_a_known_outcome(own_etcd: EmbeddedEtcd) -> None:  # T7
    async with connected(own_etcd.endpoint, request_timeout=0.5) as client:
        own_etcd.kill()
        with pytest.raises((EtcdUnavailable, OutcomeUnknown)):
            await client.commit(claim("c", b"me"), deadline=0.5)  # the connection may have failed during this one
        with pytest.raises(EtcdUnavailable, match="did not accept the claim"):
            await client.commit(claim("c", b"me"), deadline=0.5)
        waiting = asyncio.ensure_future(client.commit(claim("d", b"me")))
        await asyncio.to_thread(own_etcd.restart)
        result = await waiting
        assert result.succeeded
        assert not result.repeated


async def test_a_request_pending_at_a_server_crash_is_repeated(own_etcd: EmbeddedEtcd) -> None:
    async with connected(own_etcd.endpoint, request_timeout=1.0) as client:
        own_etcd.pause()
        commit = asyncio.ensure_future(client.commit(claim("c", b"me")))
        with pytest.raises(OutcomeUnknown):
            await client.commit(claim("other", b""), deadline=0.5)
        own_etcd.kill()
        await asyncio.to_thread(own_etcd.restart)
        result = await commit
        assert result.repeated


async def test_a_repeated_grant_returns_the_existing_lease(shared_etcd: EmbeddedEtcd, client: EtcdClient) -> None:  # L6
    async with TcpProxy(shared_etcd.port) as proxy, connected(proxy.endpoint, request_timeout=0.5) as lossy:
        proxy.set(Mode.DROP_ANSWERS)
        grant = asyncio.ensure_future(lossy.grant(30, 0x7157))
        while (await client.time_to_live(0x7157))[0] == 0:
            pass
        proxy.set(Mode.PASS)
        assert await grant == 30
        await client.revoke(0x7157)
        await client.revoke(0x7157)  # revoking again is no error
        assert await client.time_to_live(0x7157) == (0, -1)


async def test_an_unreachable_etcd_is_reported_in_one_sentence() -> None:
    client = EtcdClient(EtcdConfig(("127.0.0.1:1",), connect_timeout=0.3))
    with pytest.raises(EtcdUnavailable, match=r"could not be reached within 0.3 s at 127.0.0.1:1 \(connection refused"):
        await client.connect()
    await client.close()
    with pytest.raises(EtcdUnavailable, match="closed"):
        await client.get("a")


async def failure_of(client: EtcdClient, key: str) -> Failure:
    """The failure of one request, which takes until gRPC closes a silent connection."""
    with pytest.raises(RequestFailed) as failed:
        await client.transport.unary(RANGE, rpc.RangeRequest(key=key.encode()), 12.0)
    return failed.value.failure


async def test_a_request_that_cannot_connect_was_never_sent(
    shared_etcd: EmbeddedEtcd, client: EtcdClient, prefix: str
) -> None:
    """T7: a request sent before the connection fell silent may have been applied. After gRPC closes the connection,
    attempts to connect time out, and requests and streams fail without being sent.
    """
    async with TcpProxy(shared_etcd.port) as proxy, connected(proxy.endpoint) as far:
        await far.get(prefix)
        proxy.set(Mode.BLACK_HOLE)
        failures: list[Failure] = []
        while not failures or failures[-1].kind is FailureKind.UNKNOWN:  # gRPC may still use the dead connection
            failures.append(await failure_of(far, prefix))
        failures += [await failure_of(far, prefix) for _ in range(2)]
        assert failures[0].kind is FailureKind.UNKNOWN
        for failure in failures[-3:]:
            assert (failure.kind, failure.code, failure.elsewhere) == (FailureKind.NOT_DONE, "UNAVAILABLE", True)
            assert "failed to connect to all addresses" in failure.detail
        stream, _ = await far.transport.stream(WATCH)
        with pytest.raises(AioRpcError, match="failed to connect to all addresses"):
            await stream.write(rpc.WatchRequest(create_request=rpc.WatchCreateRequest(key=prefix.encode())))
        with pytest.raises(EtcdUnavailable, match="did not accept the claim"):
            await far.commit(claim(f"{prefix}c", b"me"), deadline=0.5)
        assert await client.get(f"{prefix}c") is None
        proxy.set(Mode.PASS)
        result = await far.commit(claim(f"{prefix}c", b"me"))
        assert (result.succeeded, result.repeated) == (True, False)
