"""Users without their role or with an invalid token: the behavior that the simulator models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from distop.errors import PermissionDenied
from distop.protocol.txn import Get, Put, Txn
from distop.store import transport as wire
from distop.store._proto import rpc_pb2 as rpc
from distop.store.session import Session, new_lease_id
from distop.store.watch import Feed
from tests.conformance.mirror import Mirror
from tests.simulator.etcd_users import checks_renewals
from tests.support.etcd import connected, until
from tests.support.users import ROOT, WORKER, admin, enable_users

if TYPE_CHECKING:
    from distop.store.embedded import EmbeddedEtcd

pytestmark = pytest.mark.etcd
WRITE = Txn((), (Put("ours.a", b"1"),))
REFUSED_RENEWAL = "failed; retrying: etcdserver: permission denied (PERMISSION_DENIED)"


class ServerUsers:
    """Enables users on an etcd, and grants and revokes the worker's role and tokens."""

    def __init__(self, server: EmbeddedEtcd) -> None:
        self._server = server

    @property
    def endpoint(self) -> str:
        return self._server.endpoint

    async def enable(self) -> None:
        await enable_users(self.endpoint)

    async def take_role(self) -> None:
        async with connected(self.endpoint, **ROOT) as root:
            await admin(root, "UserRevokeRole", rpc.AuthUserRevokeRoleRequest(name="worker", role="ours"))

    async def give_role(self) -> None:
        async with connected(self.endpoint, **ROOT) as root:
            await admin(root, "UserGrantRole", rpc.AuthUserGrantRoleRequest(user="worker", role="ours"))

    async def end_tokens(self) -> None:
        """Turn authentication off and on, which drops all tokens. A restart keeps them: they are in etcd's log."""
        async with connected(self.endpoint, **ROOT) as root:
            await admin(root, "AuthDisable", rpc.AuthDisableRequest())
        async with connected(self.endpoint) as anybody:
            await admin(anybody, "AuthEnable", rpc.AuthEnableRequest())


@pytest.fixture
async def users(own_etcd: EmbeddedEtcd) -> ServerUsers:
    return ServerUsers(own_etcd)


async def test_an_invalid_token_is_refused_and_replaced(users: ServerUsers) -> None:
    await users.enable()
    async with connected(users.endpoint, **WORKER) as client:
        assert (await client.commit(WRITE)).succeeded
        await users.end_tokens()
        refused: list[str] = []

        async def token_is_refused() -> bool:
            try:
                await client.transport.unary(wire.RANGE, rpc.RangeRequest(key=b"ours.a"), 5.0)
            except wire.RequestFailed as error:
                refused.append(f"{error.failure.code}: {error.failure.detail}")
            return bool(refused) and not refused[-1].startswith("UNAVAILABLE")

        while not await token_is_refused():
            assert refused, "etcd accepted a dropped token"
        assert refused[-1] == "UNAUTHENTICATED: etcdserver: invalid auth token"
        assert (await client.commit(WRITE)).succeeded


async def test_sessions_and_watches_survive_dropped_tokens(users: ServerUsers) -> None:
    await users.enable()
    async with connected(users.endpoint, **WORKER) as client:
        mirror = Mirror()
        feed = Feed(client, "ours.", "ours/", mirror.apply)
        await feed.start()
        session = Session(client, "ours.node", b"", 6)
        await session.start()
        await users.end_tokens()
        written = await client.commit(WRITE)
        await feed.reached(written.revision)
        assert mirror.values["ours.a"] == b"1"
        before = session.deadline
        await until(lambda: session.deadline > before, "the lease is renewed")
        await session.close()
        await feed.close()


async def test_a_user_without_its_role_reads_and_writes_no_key(
    users: ServerUsers, caplog: pytest.LogCaptureFixture
) -> None:
    await users.enable()
    async with connected(users.endpoint, **WORKER) as client:
        mirror = Mirror()
        session = Session(client, "ours.node", b"", 6)
        await session.start()
        await client.commit(WRITE)
        await users.take_role()
        for request in (
            client.commit(WRITE),
            client.get("ours.a"),
            client.read(Get("ours.a")),
            client.list("ours.", "ours/"),
        ):
            with pytest.raises(PermissionDenied):
                await request
        with pytest.raises(PermissionDenied):
            await Feed(client, "ours.", "ours/", mirror.apply).start()
        before = session.deadline
        if checks_renewals(await client.version()):
            await until(lambda: REFUSED_RENEWAL in caplog.text, "the renewal of a lease with a key needs the role")
            assert session.alive
            before = session.deadline
            await users.give_role()
            await until(lambda: session.deadline > before, "the lease is renewed with the role")
        else:
            await until(lambda: session.deadline > before, "a lease is renewed without a role")
            await users.give_role()
        assert (await client.commit(WRITE)).succeeded
        await session.close()


async def test_a_watch_is_refused_until_the_role_is_granted_again(users: ServerUsers) -> None:
    await users.enable()
    async with connected(users.endpoint, **WORKER) as client:
        mirror = Mirror()
        feed = Feed(client, "ours.", "ours/", mirror.apply)
        await feed.start()
        await users.take_role()
        feed._want_listing()
        await until(lambda: "denies" in feed.problem or "permission denied" in feed.problem, "the watch is refused")
        await users.give_role()
        written = await client.commit(WRITE)
        await feed.reached(written.revision)
        assert mirror.values == {"ours.a": b"1"}
        await feed.close()


@pytest.mark.parametrize("attached", [False, True])
async def test_revoking_a_lease_needs_write_permission_for_its_keys(users: ServerUsers, attached: bool) -> None:
    """Any user may grant a lease, and revoke a lease without keys."""
    await users.enable()
    async with connected(users.endpoint, **WORKER) as client:
        lease = new_lease_id()
        if attached:
            await client.transport.unary(wire.GRANT, rpc.LeaseGrantRequest(ID=lease, TTL=60), 5.0)
            await client.commit(Txn((), (Put("ours.node", b"", lease),)))
        await users.take_role()
        revoke = rpc.LeaseRevokeRequest(ID=lease)
        if attached:
            with pytest.raises(wire.RequestFailed, match="permission denied"):
                await client.transport.unary(wire.REVOKE, revoke, 5.0)
            await users.give_role()
        else:
            await client.transport.unary(wire.GRANT, rpc.LeaseGrantRequest(ID=lease, TTL=60), 5.0)
        await client.transport.unary(wire.REVOKE, revoke, 5.0)
