"""Access to etcd: users, tokens and TLS certificates."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from distop.errors import EtcdUnavailable, PermissionDenied
from distop.protocol.txn import Put, Txn
from distop.store import server_clock
from distop.store import transport as wire
from distop.store._proto import rpc_pb2 as rpc
from distop.store.client import EtcdClient
from distop.store.connection_settings import EtcdConfig
from distop.store.embedded import EmbeddedEtcd
from distop.store.session import Session
from distop.store.watch import Feed
from tests.conformance.mirror import Mirror
from tests.support.certificates import Certificates, make_certificates
from tests.support.etcd import CHEAP_PASSWORDS, connected, until
from tests.support.proxy import TcpProxy
from tests.support.users import ROOT, WORKER, admin, enable_users

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.etcd


async def test_a_user_without_password_or_permission_is_denied() -> None:
    async with EmbeddedEtcd(compaction=None, arguments=CHEAP_PASSWORDS) as server:
        # The client gives a user name while etcd has no users yet; they are enabled while it is connected.
        async with connected(server.endpoint, **WORKER) as early, connected(server.endpoint) as nobody:
            await early.commit(Txn((), (Put("ours.a", b"1"),)))
            await enable_users(server.endpoint)
            await early.commit(Txn((), (Put("ours.a", b"2"),)))
            with pytest.raises(PermissionDenied):
                await nobody.commit(Txn((), (Put("ours.a", b"3"),)))
        with pytest.raises(PermissionDenied, match="requires a user name"):
            await EtcdClient(EtcdConfig((server.endpoint,))).connect()
        with pytest.raises(PermissionDenied, match="'worker' with this password"):
            await EtcdClient(EtcdConfig((server.endpoint,), username="worker", password="wasp")).connect()
        async with connected(server.endpoint, **WORKER) as client:
            await client.commit(Txn((), (Put("ours.a", b"4"),)))
            with pytest.raises(PermissionDenied):
                await client.commit(Txn((), (Put("theirs.a", b""),)))
            with pytest.raises(
                PermissionDenied, match="the user 'worker' permission for the read: .* all keys with the prefix distOp "
            ):
                await client.get("theirs.a")
            with pytest.raises(PermissionDenied):
                await Feed(client, "theirs.", "theirs/", lambda batch: None).start()
            status = await client.status()
            assert status.denied or status.version
        async with connected(server.endpoint, **ROOT) as root:
            assert (await root.status()).version


async def test_sessions_and_watches_survive_expired_and_forgotten_tokens() -> None:
    """The server's token TTL is one second, and a restart of the server drops its simple tokens."""
    async with EmbeddedEtcd(compaction=None, arguments=["--auth-token-ttl", "1", *CHEAP_PASSWORDS]) as server:
        await enable_users(server.endpoint)
        async with TcpProxy(server.port) as proxy, connected(proxy.endpoint, **WORKER) as client:
            mirror = Mirror()
            feed = Feed(client, "ours.", "ours/", mirror.apply)
            await feed.start()
            session = Session(client, "ours.node", b"", 6)
            await session.start()
            probe = rpc.RangeRequest(key=b"ours.a")

            async def until_the_token_is_refused() -> None:
                while True:  # without using the token, because use prolongs it
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(asyncio.shield(session.lost), 2.1)
                    try:
                        await client.transport.unary(wire.RANGE, probe, 5.0)
                    except wire.RequestFailed as error:
                        assert "token" in error.failure.detail
                        return

            await until_the_token_is_refused()
            written = await client.commit(Txn((), (Put("ours.a", b"1"),)))
            await feed.reached(written.revision)
            proxy.cut()  # the streams reopen with a new token
            written = await client.commit(Txn((), (Put("ours.a", b"2"),)))
            await feed.reached(written.revision)
            server.kill()
            await asyncio.to_thread(server.restart)
            written = await client.commit(Txn((), (Put("ours.a", b"3"),)))
            await feed.reached(written.revision)
            assert mirror.values["ours.a"] == b"3"
            before = session.deadline
            await until(lambda: session.deadline > before)
            assert session.alive
            await session.close()
            await feed.close()


async def test_a_watch_resumes_when_its_permission_is_restored() -> None:
    """F11: an open watch continues without the role. A new watch is cancelled at once and retried until the role
    returns.
    """
    async with EmbeddedEtcd(compaction=None, arguments=CHEAP_PASSWORDS) as server:
        await enable_users(server.endpoint)
        async with (
            TcpProxy(server.port) as proxy,
            connected(proxy.endpoint, **WORKER) as client,
            connected(server.endpoint, **ROOT) as root,
        ):
            mirror = Mirror()
            feed = Feed(client, "ours.", "ours/", mirror.apply)
            await feed.start()
            await admin(root, "UserRevokeRole", rpc.AuthUserRevokeRoleRequest(name="worker", role="ours"))
            proxy.cut()
            await until(lambda: "permission denied" in feed.problem, "the watch is refused")
            written = await root.commit(Txn((), (Put("ours.a", b"1"),)))
            assert not mirror.values
            await admin(root, "UserGrantRole", rpc.AuthUserGrantRoleRequest(user="worker", role="ours"))
            await feed.reached(written.revision)
            assert mirror.values == {"ours.a": b"1"}
            await feed.close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls_etcd(certificates: Certificates) -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd(scheme="https", arguments=certificates.server_arguments, compaction=None) as server:
        yield server


async def test_a_client_commits_and_watches_over_tls(tls_etcd: EmbeddedEtcd, certificates: Certificates) -> None:
    assert tls_etcd.endpoint.startswith("https://")
    async with connected(tls_etcd.endpoint, ca_cert=certificates.ca) as client:
        mirror = Mirror()
        feed = Feed(client, "a", "b", mirror.apply)
        await feed.start()
        written = await client.commit(Txn((), (Put("a", b"1"),)))
        await feed.reached(written.revision)
        assert mirror.values == {"a": b"1"}
        await feed.close()


async def test_an_error_names_each_tls_mismatch(
    tls_etcd: EmbeddedEtcd, shared_etcd: EmbeddedEtcd, certificates: Certificates
) -> None:
    async def connection_error(endpoint: str, **options: str) -> str:
        # The client diagnoses the cause in the last part of the time-out, which takes a second on a busy machine.
        client = EtcdClient(EtcdConfig((endpoint,), connect_timeout=3, **options))  # type: ignore[arg-type]
        with pytest.raises(EtcdUnavailable) as caught:
            await client.connect()
        await client.close()
        return str(caught.value)

    plain, secure, refused = await asyncio.gather(
        connection_error(f"127.0.0.1:{tls_etcd.port}"),
        connection_error(f"https://127.0.0.1:{shared_etcd.port}", ca_cert=certificates.ca),
        connection_error(tls_etcd.endpoint, ca_cert=certificates.other_ca),
    )
    assert "the server uses TLS: use https://" in plain
    assert "does not use TLS" in secure
    assert "was rejected" in refused


async def test_etcd_with_mutual_tls_rejects_a_client_without_a_certificate(certificates: Certificates) -> None:
    async with EmbeddedEtcd(scheme="https", arguments=certificates.mutual_arguments, compaction=None) as server:
        ours = {"ca_cert": certificates.ca, "cert": certificates.client_cert, "key": certificates.client_key}
        async with connected(server.endpoint, **ours) as client:
            assert await client.get("a") is None
            assert await server_clock.ahead(client.config, client.transport.address) == 0.0
        stranger = EtcdClient(EtcdConfig((server.endpoint,), ca_cert=certificates.ca, connect_timeout=3))
        with pytest.raises(EtcdUnavailable, match="certificate"):
            await stranger.connect()
        await stranger.close()
        with pytest.raises(server_clock.ClockUnreadable):
            await server_clock.ahead(stranger.config, stranger.transport.address)


def test_the_command_line_reports_a_tls_mismatch_in_one_line(
    tls_etcd: EmbeddedEtcd, shared_etcd: EmbeddedEtcd, certificates: Certificates
) -> None:
    """In a separate process, because gRPC writes to the real stderr and is silenced before it is loaded."""
    for endpoint, options, code, words in (
        (tls_etcd.endpoint, ("--cacert", certificates.other_ca), 3, "was rejected"),
        (tls_etcd.endpoint, ("--cacert", certificates.server_key), 2, certificates.server_key),
        (f"https://127.0.0.1:{shared_etcd.port}", ("--cacert", certificates.ca), 3, "does not use TLS"),
        (f"127.0.0.1:{tls_etcd.port}", (), 3, "the server uses TLS: use https://"),
    ):
        command = [sys.executable, "-m", "distop.cli", "ls", "--etcd", endpoint, "--connect-timeout", "1", *options]
        env = {name: value for name, value in os.environ.items() if not name.startswith(("DISTOP_", "GRPC_"))}
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)
        assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (code, "", 1), ran
        assert words in ran.stderr


async def test_a_denied_command_names_the_permission_that_the_role_needs() -> None:
    async with EmbeddedEtcd(compaction=None, arguments=CHEAP_PASSWORDS) as server:
        await enable_users(server.endpoint)
        options = ["--etcd", server.endpoint, "--namespace", "prod", "--user", WORKER["username"]]
        env = {name: value for name, value in os.environ.items() if not name.startswith(("DISTOP_", "GRPC_"))}
        ran = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "distop.cli", "table", "ls", *options],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**env, "DISTOP_PASSWORD": WORKER["password"]},
        )
        assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (3, "", 1), ran
        assert "the user 'worker'" in ran.stderr
        assert "all keys with the prefix prod/distOp" in ran.stderr
