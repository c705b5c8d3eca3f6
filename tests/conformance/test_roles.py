"""Each role of ``distop access`` permits its tasks on an etcd with users, and nothing else."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

import distop
from distop.errors import EtcdRejected, PermissionDenied
from distop.protocol import etcd_roles
from distop.protocol.keys import Keys
from distop.protocol.records import OperationRef, TableRecord
from distop.protocol.txn import Delete, Put, Txn
from distop.store import role_grants as store
from distop.store import transport as wire
from distop.store._proto import auth_pb2
from distop.store._proto import rpc_pb2 as rpc
from distop.store.session import new_lease_id
from tests.simulator.etcd_users import checks_renewals
from tests.support.command import Ran, distop_command
from tests.support.daemons import Daemons, daemons
from tests.support.etcd import connected
from tests.support.users import ROOT, admin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from distop.blocking import Client
    from distop.store.embedded import EmbeddedEtcd

__all__ = ["distop_command"]

pytestmark = pytest.mark.etcd
NS = "prod"
MINE, OTHERS = "a", ("a.b", "ab")
KEYS = Keys(NS)
ROLES = {role.kind: role for role in etcd_roles.roles(KEYS, [MINE])}
OUTSIDE = ("distOp.a.noop.1.arg", "prod2/distOp.a.noop.1.arg", "prod/other", "prod/distOq", "z")


def login(kind: str) -> dict[str, Any]:
    """The user name and password of the user with this role."""
    return ROOT if kind == "root" else {"username": kind, "password": f"of {kind}"}


async def enable_roles(endpoint: str) -> None:
    """Enable authentication, with one user for each role that distop defines."""
    async with connected(endpoint) as client:
        await admin(client, "UserAdd", rpc.AuthUserAddRequest(name="root", password=ROOT["password"]))
        await admin(client, "RoleAdd", rpc.AuthRoleAddRequest(name="root"))
        await admin(client, "UserGrantRole", rpc.AuthUserGrantRoleRequest(user="root", role="root"))
        await admin(client, "AuthEnable", rpc.AuthEnableRequest())
    async with connected(endpoint, **ROOT) as root:
        await store.apply(root, tuple(ROLES.values()))
        for kind, role in ROLES.items():
            await admin(root, "UserAdd", rpc.AuthUserAddRequest(name=kind, password=login(kind)["password"]))
            await admin(root, "UserGrantRole", rpc.AuthUserGrantRoleRequest(user=kind, role=role.name))


def client_of(endpoint: str, kind: str) -> Client:
    """A client that is logged in as the user with this role."""
    return distop.connect(endpoint, namespace=NS, **login(kind))


@pytest.fixture
def etcd(own_etcd: EmbeddedEtcd) -> EmbeddedEtcd:
    """An etcd with a user for each role, and three tables."""
    asyncio.run(enable_roles(own_etcd.endpoint))
    with client_of(own_etcd.endpoint, "root") as root:
        for table in (MINE, *OTHERS):
            root.add_table(TableRecord(table, "parquet", "/tmp"), check=False)
    return own_etcd


@pytest.fixture
def group(etcd: EmbeddedEtcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemons]:
    """A daemon group with one executor, which has the executor role; ``group.client`` is logged in as root."""
    monkeypatch.setenv("DISTOP_NAMESPACE", NS)
    monkeypatch.setenv("DISTOP_USER", ROOT["username"])
    monkeypatch.setenv("DISTOP_PASSWORD", ROOT["password"])
    with daemons(etcd.endpoint, tmp_path) as found:
        mine = {"DISTOP_USER": "executor", "DISTOP_PASSWORD": login("executor")["password"]}
        found.start("ann", options=("--history-age", "1h"), env=mine)
        yield found


def every_key(table: str) -> list[str]:
    """A key of each family of this table, and of each family that belongs to no table."""
    ref = OperationRef(table, "noop", "", 999)
    return [
        *(KEYS.run_ops(table), KEYS.next_instance(table, "noop"), KEYS.of(ref, "arg"), KEYS.of(ref, "decision")),
        *(KEYS.job(ref, 0, "outcome"), KEYS.gate(ref), KEYS.pending(ref), KEYS.unique(table, "noop", "i")),
        *(KEYS.request(table, "noop", "r"), KEYS.claim(ref, 0), KEYS.permit(ref, 0), KEYS.coordinator(table, "noop")),
        *(KEYS.history(ref), KEYS.beside_history(ref, "arg"), KEYS.table(table), KEYS.table_actions(table)),
        *(KEYS.behavior("noop"), KEYS.node("n"), KEYS.drain("e"), KEYS.hold("h"), KEYS.space()),
        *(KEYS.watermark(1), KEYS.young_watermark(1), KEYS.policy_mark(), KEYS.policy_evaluator(table)),
        *(KEYS.policy(table, "p"), KEYS.policy_state(table, "p"), KEYS.policy_event(table, "p")),
    ]


async def allowed(request: Any) -> bool:
    """Whether etcd permits the request."""
    try:
        await request
    except PermissionDenied:
        return False
    return True


@pytest.mark.parametrize("kind", ["viewer", "submitter", "maintainer", "executor"])
def test_a_user_has_exactly_the_permissions_of_its_role(etcd: EmbeddedEtcd, kind: str) -> None:
    async def check() -> None:
        role = ROLES[kind]
        async with connected(etcd.endpoint, **login(kind)) as client:
            for key in [*OUTSIDE, *(key for table in (MINE, *OTHERS) for key in every_key(table))]:
                lease = new_lease_id()
                await client.transport.unary(wire.GRANT, rpc.LeaseGrantRequest(ID=lease, TTL=60), 5.0)
                permitted = [
                    await allowed(client.get(key)),
                    await allowed(client.commit(Txn((), (Put(key, b"x"),)))),
                    await allowed(client.commit(Txn((), (Put(key, b"x", lease),)))),
                    await allowed(client.commit(Txn((), (Delete(key),)))),
                ]
                assert permitted == [role.may_read(key), *[role.may_write(key)] * 3], key

    asyncio.run(check())


def test_a_submitter_works_on_its_own_table_only(group: Daemons) -> None:
    theirs = group.client.start_operation("noop", "a.b", {"jobs": 1, "sleep": 30.0})
    with client_of(group.endpoint, "submitter") as client:
        done = client.start_operation("noop", MINE, {"jobs": 3}, request_id="r1", labels={"k": "v"})
        assert done.wait(60).state == "success"
        assert len(list(done.results())) == 3
        assert client.start_operation("noop", MINE, {"jobs": 3}, request_id="r1").ref == done.ref
        assert [one.op for one in client.history(MINE)] == [done.ref]
        after = client.start_operation("noop", MINE, {"jobs": 1}, after=[done.ref], id="mine", priority=3)
        assert after.wait(60).state == "success"
        running = client.start_operation("noop", MINE, {"jobs": 20, "sleep": 30.0})
        group.eventually(lambda: running.status().jobs.get("running"), "it runs")
        assert [one.op for one in client.operations(MINE)] == [running.ref]
        assert client.counts(MINE)[0].operations == 1
        assert [one["name"] for one in client.actions(MINE)] == [MINE]
        running.alter(priority=7)
        running.pause()
        assert running.why().status.state == "paused"
        running.resume()
        running.cancel("enough")
        assert list(running.watch())[-1].state == "cancelled"
        denied: list[Callable[[], Any]] = [
            lambda: client.start_operation("noop", "a.b", {"jobs": 1}),
            lambda: client.start_operation("noop", MINE, {"jobs": 1}, after=[theirs.ref]),
            lambda: client.operation(theirs.ref).cancel(),
            lambda: client.operation(theirs.ref).status(),
            lambda: client.history("a.b"),
            lambda: client.actions("a.b"),
            client.actions,
            lambda: client.operations(),
            client.tables,
            lambda: client.add_table(TableRecord(MINE, "parquet", "/etc"), replace=True, check=False),
            lambda: client.remove_table(MINE),
            lambda: client.drain("ann"),
            lambda: client.register_type("copy"),
            lambda: client.own_jobs("me", ["noop"]),
            lambda: client.prepare_operation("noop", MINE, {"jobs": 1}, external_id="x"),
        ]
        for call in denied:
            with pytest.raises(PermissionDenied):
                call()
        # The end of a pending operation writes a history record, which only executors and operators may write.
        pending = client.start_operation("noop", MINE, {"jobs": 1}, delay=3600)
        with pytest.raises(PermissionDenied):
            pending.cancel()
    group.client.operation(pending.ref).cancel()
    theirs.cancel()


def test_a_maintainer_makes_the_policies_of_its_own_table_only(group: Daemons) -> None:
    group.client.set_policy("theirs", "a.b", "noop", {"jobs": 1}, on="event:loaded")
    with client_of(group.endpoint, "maintainer") as client:
        client.set_policy("mine", MINE, "noop", {"jobs": 1}, on="event:loaded")
        client.set_policy("mine", MINE, "noop", {"jobs": 2}, on="event:loaded", priority=3)
        assert client.pause_policy(MINE, "mine").stage == "paused"
        assert client.resume_policy(MINE, "mine").stage == "active"
        assert client.emit(MINE, "loaded") == ["mine"]
        group.eventually(lambda: client.policy(MINE, "mine").state.op, "the policy starts an operation")
        assert client.operation(client.policy(MINE, "mine").state.op).wait(60).state == "success"
        assert client.autopilot(MINE, dry_run=True).written is False
        denied: list[Callable[[], Any]] = [
            lambda: client.set_policy("mine", "a.b", "noop", on="version"),
            lambda: client.pause_policy("a.b", "theirs"),
            lambda: client.remove_policy("a.b", "theirs"),
            lambda: client.emit("a.b", "loaded"),
            lambda: client.policies("a.b"),
            client.policies,
        ]
        for call in denied:
            with pytest.raises(PermissionDenied):
                call()
    with client_of(group.endpoint, "submitter") as client:
        assert [one.name for one in client.policies(MINE)] == ["mine"]
        assert client.emit(MINE, "loaded", event_id="two") == ["mine"]
        group.eventually(lambda: len(client.policy(MINE, "mine").state.consumed) == 2, "the event is evaluated")
        denied = [
            lambda: client.set_policy("mine", MINE, "noop", on="version"),
            lambda: client.pause_policy(MINE, "mine"),
            lambda: client.remove_policy(MINE, "mine"),
            lambda: client.emit("a.b", "loaded"),
        ]
        for call in denied:
            with pytest.raises(PermissionDenied):
                call()
    with client_of(group.endpoint, "maintainer") as client:
        client.remove_policy(MINE, "mine")
        assert client.policies(MINE) == []
    assert [one.name for one in group.client.policies()] == ["theirs"]
    group.client.remove_policy("a.b", "theirs")


def test_an_executor_has_the_permissions_for_all_of_its_tasks(group: Daemons) -> None:
    """It plans, claims, runs and completes operations, starts those of a series, prunes history and drains."""
    for _ in range(3):
        assert group.client.start_operation("noop", MINE, {"jobs": 2}).wait(60).state == "success"
    every = distop.Every(0.1, times=2)
    first = group.client.start_operation("noop", "ab", {"jobs": 1}, every=every)
    assert first.wait(60).state == "success"
    group.eventually(lambda: len(group.client.history("ab")) == 2, "the series")

    async def watermarks() -> int:
        async with connected(group.endpoint, **login("viewer")) as viewer:
            return await viewer.count(*KEYS.family("distOpWatermark"))

    group.eventually(lambda: asyncio.run(watermarks()), "it writes watermarks for the age of history")
    assert group.client.drain("ann", wait=True, timeout=30) == "drained"
    assert not [line for line in group.lines() if "etcd denies" in line or "permission denied" in line]


def test_a_viewer_reads_everything_and_changes_nothing(group: Daemons, distop_command: Callable[..., Ran]) -> None:
    running = group.client.start_operation("noop", MINE, {"jobs": 2, "sleep": 30.0})
    done = group.client.start_operation("noop", "ab", {"jobs": 1})
    assert done.wait(60).state == "success"
    with client_of(group.endpoint, "viewer") as client:
        assert [one.op for one in client.operations()] == [running.ref]
        assert [one.op for one in client.history()] == [done.ref]
        assert len(client.tables()) == 3
        assert len(client.nodes()) == 1
        assert client.behaviors()
        assert client.operation(done.ref).wait(5).state == "success"
        assert len(list(client.operation(done.ref).results())) == 1
        client.operation(running.ref).why()
        denied: list[Callable[[], Any]] = [
            lambda: client.start_operation("noop", MINE, {"jobs": 1}),
            lambda: client.operation(running.ref).cancel(),
            lambda: client.operation(running.ref).pause(),
            lambda: client.operation(running.ref).alter(priority=1),
            lambda: client.remove_table("ab"),
            lambda: client.drain("ann"),
            lambda: client.register_type("copy"),
            lambda: client.prepare_operation("noop", MINE, {"jobs": 1}, external_id="x"),
        ]
        for call in denied:
            with pytest.raises(PermissionDenied):
                call()
    running.cancel()


def test_etcd_permits_these_requests_without_any_role(etcd: EmbeddedEtcd) -> None:
    """docs/security.md describes the requests that etcd permits to a user without any role."""

    async def check() -> None:
        async with connected(etcd.endpoint, **ROOT) as root:
            version = await root.version()
            await admin(root, "UserAdd", rpc.AuthUserAddRequest(name="nobody", password="n"))
            theirs = new_lease_id()
            await root.transport.unary(wire.GRANT, rpc.LeaseGrantRequest(ID=theirs, TTL=600), 5.0)
            await root.commit(Txn((), (Put(KEYS.node("n"), b"x", theirs),)))
        async with connected(etcd.endpoint, username="nobody", password="n") as nobody:

            async def permits(method: Any, request: Any) -> bool:
                try:
                    await nobody.transport.unary(method, request, 5.0)
                except (wire.RequestFailed, EtcdRejected):
                    return False
                return True

            assert await permits(wire.GRANT, rpc.LeaseGrantRequest(ID=new_lease_id(), TTL=60))
            assert not await permits(wire.REVOKE, rpc.LeaseRevokeRequest(ID=theirs))
            # Raising an alarm would stop all writes; compaction drops results of ended operations.
            restricted = checks_renewals(version)
            assert await permits(wire.COMPACT, rpc.CompactionRequest(revision=1)) is not restricted
            alarm = rpc.AlarmRequest(action=rpc.AlarmRequest.ACTIVATE, memberID=1, alarm=rpc.NOSPACE)
            assert await permits(wire.ALARM, alarm) is not restricted

    asyncio.run(check())


def test_apply_creates_missing_roles_and_removes_extra_permissions(
    etcd: EmbeddedEtcd, distop_command: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["access", "--apply", MINE, "a.b", "--namespace", NS, "--etcd", etcd.endpoint]
    monkeypatch.setenv("DISTOP_PASSWORD", ROOT["password"])
    first = distop_command(*words, "--json", "--user", "root").json
    created = {change["role"] for change in first["changes"] if change["change"] == "created"}
    assert created == {"prod/distop.submitter.a%2Eb", "prod/distop.maintainer.a%2Eb"}
    assert {change["role"] for change in first["changes"]} == created
    again = distop_command(*words, "--user", "root")
    assert (again.code, again.out) == (0, "nothing to change: all 6 roles are correct\n")

    async def grant_too_much() -> None:
        async with connected(etcd.endpoint, **ROOT) as root:
            much = auth_pb2.Permission(permType=auth_pb2.Permission.READWRITE, key=b"\0", range_end=b"\0")
            name = "prod/distop.viewer"
            await admin(root, "RoleGrantPermission", rpc.AuthRoleGrantPermissionRequest(name=name, perm=much))

    asyncio.run(grant_too_much())
    corrected = distop_command(*words, "--json", "--user", "root").json["changes"]
    assert corrected == [
        {
            "role": "prod/distop.viewer",
            "change": "revoked",
            "access": "readwrite",
            "key": "\x00",
            "range_end": "\x00",
        }
    ]
    monkeypatch.setenv("DISTOP_PASSWORD", login("executor")["password"])
    denied = distop_command(*words, "--user", "executor")
    assert denied.code == 3
    assert "only etcd's root may" in denied.sentence


def test_apply_reports_that_etcd_has_no_authentication(
    own_etcd: EmbeddedEtcd, distop_command: Callable[..., Ran]
) -> None:
    ran = distop_command("access", "--apply", "--json", "--etcd", own_etcd.endpoint)
    assert ran.code == 0
    assert json.loads(ran.out)["enabled"] is False
    assert "roles have no effect" in ran.err
