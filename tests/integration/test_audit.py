"""``distop audit`` on real histories: clean ones pass, and it reports violations and lost revisions."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from distop.protocol.jobs import JobState
from distop.protocol.txn import Delete, Put, Txn
from distop.store.client import EtcdClient
from tests.support.certificates import make_certificates
from tests.support.command import distop_command
from tests.support.contract import etcdctl
from tests.support.daemons import eventually
from tests.support.etcd import CHEAP_PASSWORDS, compacted, connected, own_etcd, shared_etcd
from tests.support.users import admin
from tests.support.world import World
from tests.unit.invariants.plants import opened

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from distop.store.embedded import EmbeddedEtcd
    from tests.support.command import Ran
    from tests.support.daemons import Daemons


__all__ = ["distop_command", "own_etcd", "shared_etcd"]

pytestmark = pytest.mark.etcd


async def copy_history_to(world: World, client: EtcdClient, after: int = 0) -> int:
    """Write the world's history after its revision ``after`` to etcd, and return etcd's new revision."""
    revision = 0
    for number, changes in world.store.history:
        if number > after:
            ops = [Delete(c.kv.key) if c.deleted else Put(c.kv.key, c.kv.value) for c in changes]
            revision = (await client.commit(Txn((), tuple(ops)))).revision
    return revision


Command = "Callable[..., Ran]"
ROOT = "distOp.sales%2Eorders.noop.1"


def copy_history(endpoint: str, world: World, after: int = 0, **options: Any) -> int:
    """Copy the world's history after its revision ``after`` to etcd, and return etcd's new revision."""

    async def write() -> int:
        async with connected(endpoint, **options) as client:
            return await copy_history_to(world, client, after)

    return asyncio.run(write())


def etcdctl_put(endpoint: str, key: str, value: str) -> None:
    words = [etcdctl(), "--endpoints", endpoint, "put", key, value]
    subprocess.run(words, check=True, capture_output=True, env={"ETCDCTL_API": "3"})


def compact(endpoint: str, revision: int) -> None:
    async def compact_etcd() -> None:
        async with connected(endpoint) as client:
            await compacted(client, revision)

    asyncio.run(compact_etcd())


def test_the_history_of_real_daemons_is_clean(
    group: Daemons, etcd: EmbeddedEtcd, distop_command: Callable[..., Ran]
) -> None:
    group.start("ann", "bob")
    ref = group.client.start_operation("noop", "t", {"jobs": 20, "fail": ["3"]}).ref
    group.client.operation(ref).wait(30)
    group.client.start_operation("noop", "t", {"jobs": 5}).wait(30)
    ran = distop_command("audit", "--etcd", etcd.endpoint)
    assert (ran.code, ran.err) == (0, ""), ran.out
    assert ran.out.endswith("2 operations, 25 jobs, 19 invariants; no violation\n")
    one = distop_command("audit", ref, "--json", "--etcd", etcd.endpoint)
    assert (one.code, one.json["operations"], one.json["jobs"]) == (0, 1, 20)


def test_a_violation_is_reported_with_its_history(own_etcd: EmbeddedEtcd, distop_command: Callable[..., Ran]) -> None:
    world, ref = opened()
    world.do(world.claim(ref, "a", [0]))
    world.do(world.report(ref, 0, JobState.SUCCESS))
    copy_history(own_etcd.endpoint, world)
    etcdctl_put(own_etcd.endpoint, f"{ROOT}.000000.state", "failed")
    ran = distop_command("audit", "--all", "--etcd", own_etcd.endpoint)
    assert ran.code == 1
    assert ran.err == ""
    assert "the job's state was written twice: first success, then failed" in ran.out
    violation_report = ran.out.splitlines()[2:]
    assert [line.split(" = ")[1] for line in violation_report if ".000000.state" in line] == ["success", "failed"]
    assert distop_command("audit", str(ref), "--etcd", own_etcd.endpoint).code == 1
    other = distop_command("audit", "sales.orders/noop/77", "--etcd", own_etcd.endpoint)
    assert (other.code, "no operation 'sales.orders/noop/77'" in other.sentence) == (4, True)


def test_invalid_arguments_and_an_unreachable_etcd_have_exit_codes(distop_command: Callable[..., Ran]) -> None:
    assert distop_command("audit", "t/noop/1", "--all", "--etcd", "127.0.0.1:1").code == 2
    assert distop_command("audit", "t/noop", "--etcd", "127.0.0.1:1").code == 2
    assert distop_command("audit", "--etcd", "127.0.0.1:1", "--connect-timeout", "0.3").code == 3


def test_the_audit_reports_compacted_revisions(own_etcd: EmbeddedEtcd, distop_command: Callable[..., Ran]) -> None:
    world, ref = opened()
    at = copy_history(own_etcd.endpoint, world)
    compact(own_etcd.endpoint, at)
    before = world.store.revision
    world.do(world.claim(ref, "a", [0]))
    world.do(world.report(ref, 0, JobState.SUCCESS))
    copy_history(own_etcd.endpoint, world, before)
    ran = distop_command("audit", "--json", "--etcd", own_etcd.endpoint)
    assert (ran.code, ran.json["first_revision"], ran.json["lost"]) == (0, at + 1, [[1, at]])
    assert f"up to revision {at} is compacted" in ran.err
    assert distop_command("audit", str(ref), "--json", "--etcd", own_etcd.endpoint).json["jobs"] == 1


def test_the_audit_works_over_tls_with_read_permission_only(tmp_path: Path, distop_command: Callable[..., Ran]) -> None:
    from distop.protocol.keys import Keys
    from distop.store._proto import auth_pb2
    from distop.store._proto import rpc_pb2 as rpc
    from distop.store.embedded import EmbeddedEtcd

    certificates = make_certificates(tmp_path)
    arguments = [*certificates.server_arguments, *CHEAP_PASSWORDS]
    with EmbeddedEtcd(compaction=None, scheme="https", arguments=arguments) as server:
        world = World(keys=Keys("prod"))
        world.run_operation(3)
        copy_history(server.endpoint, world, ca_cert=certificates.ca)

        async def enable_users() -> None:
            async with connected(server.endpoint, ca_cert=certificates.ca) as client:
                for name in ("root", "eve"):
                    await admin(client, "UserAdd", rpc.AuthUserAddRequest(name=name, password="secret"))
                    await admin(client, "RoleAdd", rpc.AuthRoleAddRequest(name=name))
                    await admin(client, "UserGrantRole", rpc.AuthUserGrantRoleRequest(user=name, role=name))
                permission = auth_pb2.Permission(
                    permType=auth_pb2.Permission.READ, key=b"prod/distOp", range_end=b"prod/distOq"
                )
                await admin(
                    client, "RoleGrantPermission", rpc.AuthRoleGrantPermissionRequest(name="eve", perm=permission)
                )
                await admin(client, "AuthEnable", rpc.AuthEnableRequest())

        asyncio.run(enable_users())
        (tmp_path / "password").write_text("secret\n")
        options = ("--etcd", server.endpoint, "--cacert", certificates.ca)
        options += ("--user", "eve", "--password-file", str(tmp_path / "password"))
        ran = distop_command("audit", "--json", "--namespace", "prod", *options)
        assert (ran.code, ran.json["operations"], ran.json["jobs"]) == (0, 1, 3), ran.err
        denied = distop_command("audit", "--namespace", "theirs", *options)
        assert (denied.code, "denies the user 'eve'" in denied.sentence) == (3, True)


class FollowingAudit:
    """A process that runs ``distop audit --follow --json``."""

    def __init__(self, endpoint: str) -> None:
        words = [sys.executable, "-m", "distop.cli", "audit", "--follow", "--json", "--etcd", endpoint]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.documents: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.documents.append(json.loads(line))

    def end(self) -> tuple[int, str]:
        """Wait for the end of the process, and return its exit code and stderr."""
        code = self.process.wait(30)
        self._reader.join(10)
        assert self.process.stderr is not None
        return code, self.process.stderr.read()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def test_a_following_audit_reports_a_violation_at_once(own_etcd: EmbeddedEtcd) -> None:
    world, ref = opened()
    copy_history(own_etcd.endpoint, world)
    following = FollowingAudit(own_etcd.endpoint)
    try:
        eventually(lambda: following.documents, "the audit has caught up")
        assert following.documents[0]["ok"]
        before = world.store.revision
        world.do(world.claim(ref, "a", [0]))
        copy_history(own_etcd.endpoint, world, before)
        etcdctl_put(own_etcd.endpoint, f"{ROOT}.000000.state", "success")
        code, err = following.end()
        assert (code, err) == (1, "")
        last = following.documents[-1]
        assert (last["ok"], last["violation"]["key"]) == (False, f"{ROOT}.000000.state")
    finally:
        following.kill()


def test_an_interrupted_audit_reports_the_checked_revisions(own_etcd: EmbeddedEtcd) -> None:
    world = World()
    world.run_operation(2)
    copy_history(own_etcd.endpoint, world)
    following = FollowingAudit(own_etcd.endpoint)
    try:
        eventually(lambda: following.documents, "the audit has caught up")
        following.process.send_signal(signal.SIGINT)
        code, err = following.end()
        assert code == 130
        assert err.startswith("interrupted: checked revisions 1 to ")
        assert "no violation" in err
    finally:
        following.kill()
