"""Faults of etcd, and the behavior of daemons. conftest.py checks history and data after each test."""

from __future__ import annotations

import asyncio
import json
import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from distop.protocol.records import OperationRef, TableRecord
from distop.protocol.txn import Put, Txn
from distop.store import embedded
from distop.store.embedded import EmbeddedEtcd
from distop.store.ports import reserve
from distop.worker.guardian import boottime
from scripts import etcd_servers
from tests.faults.recording import Recorder
from tests.integration.test_daemons import holders
from tests.support.command import distop_command
from tests.support.contract import dump, etcdctl, revision_and_keys
from tests.support.daemons import Daemons, daemons, eventually
from tests.support.etcd import CHEAP_PASSWORDS, EtcdCluster, compacted, connected
from tests.support.proxy import Mode, ThreadedProxy
from tests.support.replay import Written, audited
from tests.support.users import admin
from tests.support.writing import assert_data

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from distop.blocking import Operation
    from tests.support.command import Ran
    from tests.support.daemons import Daemon
    from tests.support.writing import Journal

__all__ = ["distop_command"]

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(180), pytest.mark.rotating]

TABLE = "t"
JOBS, ROWS = 12, 10


def start(group: Daemons, journal: Journal, **arg: Any) -> Operation:
    """Start an operation whose jobs write rows."""
    settings = {"jobs": JOBS, "rows": ROWS, "pause": 0.1, "journal": str(journal.path), **arg}
    return group.client.start_operation("writing", TABLE, settings)


def assert_success(group: Daemons, operation: Operation, journal: Journal, **options: bool) -> None:
    """Assert that the operation succeeds with the right data."""
    result = operation.wait(120)
    assert result.state == "success", group.tails()
    written = Written(group.endpoint, OperationRef.parse(operation.ref))
    assert_data(written, journal, JOBS, ROWS, **options)


def incarnations(group: Daemons) -> set[str]:
    return set(group.client.nodes())


def with_store_client(endpoint: str, work: Callable[..., Any], **options: Any) -> Any:
    """Run a coroutine function with a store client."""

    async def run() -> Any:
        async with connected(endpoint, **options) as client:
            return await work(client)

    return asyncio.run(run())


def test_an_outage_of_twice_the_ttl_costs_each_running_job_one_failure(
    group: Daemons, etcd: EmbeddedEtcd, journal: Journal, sample_env: dict[str, str]
) -> None:
    """All daemons stop before their leases could expire, and retry. Once etcd is back, they continue as new
    incarnations. The outage counts as one failure of each job that ran, and of no other job.
    """
    ttl = 3.0
    both = group.start("ann", "bob", ttl=ttl, env={**sample_env, "DISTOP_CONNECT_TIMEOUT": "1"})
    before = incarnations(group)
    assert len(before) == 2
    operation = start(group, journal, pause=0.2)
    group.eventually(lambda: len(holders(group)) == 2, "both hold claims")
    etcd.kill()
    killed = boottime()
    for daemon in both:
        group.eventually(partial(logged, daemon, "Session lost"), "it has lost its session", daemon.name)
        group.eventually(partial(logged, daemon, "Waiting for etcd"), "it waits for etcd", daemon.name)
    lines_before_return = len(journal.lines())
    eventually(lambda: boottime() > killed + 2 * ttl, "twice the TTL has passed")
    assert not etcd.running
    assert len(journal.lines()) == lines_before_return, "no job writes between the deadline and the return of etcd"
    etcd.restart()
    assert_success(group, operation, journal)
    after = incarnations(group)
    assert len(after) == 2
    assert not before & after
    assert_interrupted_jobs_failed_once(before, Written(group.endpoint, OperationRef.parse(operation.ref)))


def assert_interrupted_jobs_failed_once(ended_incarnations: set[str], written: Written) -> None:
    """Assert that exactly the jobs interrupted by the end of these incarnations had a failure and a second attempt."""
    lost = 0
    for partition, claims in written.claims.items():
        attempts = [json.loads(claim) for claim in claims]
        (outcome,) = [json.loads(text) for text in written.outcomes[partition]]
        interrupted = (
            attempts[0]["incarnation"] in ended_incarnations and outcome["incarnation"] not in ended_incarnations
        )
        expected = [(1, 0), (2, 1)] if interrupted else [(1, 0)]
        assert [(claim["attempt"], claim["failures"]) for claim in attempts] == expected, attempts
        lost += interrupted
    assert lost, "some jobs were interrupted"


def logged(daemon: Daemon, words: str) -> bool:
    return words in daemon.log.read_text()


def test_daemons_keep_their_sessions_while_the_disk_of_etcd_stalls(
    group: Daemons, etcd: EmbeddedEtcd, journal: Journal, sample_env: dict[str, str]
) -> None:
    """SIGSTOP simulates the disk: etcd stalls four times, each time for less than the TTL."""
    group.start("ann", "bob", ttl=6, env=sample_env)
    before = incarnations(group)
    rows = 120  # enough for jobs to run during all four stalls on a busy machine
    operation = start(group, journal, jobs=4, rows=rows)
    group.eventually(lambda: len(holders(group)) == 2, "both hold claims")
    for _ in range(4):
        etcd.pause()
        lines_before = len(journal.lines())
        eventually(lambda n=lines_before: len(journal.lines()) > n + 30, "the jobs continue to write")
        etcd.resume()
        dump(group.endpoint)  # etcd answers again
    result = operation.wait(60)
    assert result.state == "success", group.tails()
    assert_data(Written(group.endpoint, OperationRef.parse(operation.ref)), journal, 4, rows)
    assert incarnations(group) == before, "no daemon lost its session"


def test_daemons_keep_their_sessions_while_etcd_answers_renewals_only(
    tmp_path: Path, journal: Journal, sample_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped followers simulate slow disks: the leader answers renewals, but commits writes late. Sessions survive.
    Each unanswered write is repeated, and its copies count once.
    """
    monkeypatch.setenv("DISTOP_ACCEPT_ETCD_DEFECTS", "1")
    monkeypatch.setenv("DISTOP_REQUEST_TIMEOUT", "1")
    patient = ("--heartbeat-interval", "500", "--election-timeout", "12000")  # so that the leader does not step down
    monkeypatch.setattr(embedded, "START_LIMIT", 90.0)  # an election with split votes takes another time-out
    with EtcdCluster(arguments=patient) as cluster:
        leader = next(m for m in cluster.members if is_leader(m))
        with daemons(leader.endpoint, tmp_path) as group:
            group.client.add_table(TableRecord(TABLE, "parquet", str(tmp_path)), check=False)
            working = group.start("ann", "bob", ttl=6, env=sample_env)
            before = incarnations(group)
            operation = start(group, journal)
            group.eventually(lambda: len(holders(group)) == 2, "both hold claims")
            for member in cluster.members:
                if member is not leader:
                    member.pause()
            for daemon in working:
                group.eventually(
                    lambda d=daemon: "did not answer the" in d.log.read_text(), "a write has no answer", daemon.name
                )
            for member in cluster.members:
                member.resume()
            assert operation.wait(90).state == "success", group.tails()
            assert_data(Written(leader.endpoint, OperationRef.parse(operation.ref)), journal, JOBS, ROWS)
            assert incarnations(group) == before, "no daemon lost its session"


def test_a_daemon_lists_again_after_a_compaction_behind_its_watch(
    etcd: EmbeddedEtcd, tmp_path: Path, journal: Journal, sample_env: dict[str, str]
) -> None:
    with ThreadedProxy(etcd.port) as proxy, daemons(etcd.endpoint, tmp_path) as group:
        group.client.add_table(TableRecord(TABLE, "parquet", str(tmp_path)), check=False)
        ann = group.spawn("ann", "--etcd", proxy.endpoint, ttl=12, env=sample_env)
        group.await_ready("ann")
        proxy.set(Mode.BLACK_HOLE)
        operation = start(group, journal, pause=0.02)
        group.client.start_operation("writing", TABLE, {"journal": str(journal.path), "jobs": 0})

        async def compact(client: Any) -> None:
            revision = (await client.commit(Txn((), (Put("somebody", b"else"),)))).revision
            await compacted(client, revision)

        with_store_client(etcd.endpoint, compact)
        proxy.set(Mode.PASS)
        result = operation.wait(60)
        assert result.state == "success", group.tails()
        assert "listing again" in ann.log.read_text(), group.tails()
    assert audited(etcd.endpoint).totals.lost, "the audit reports the compaction"


def enable_users(endpoint: str, granted: tuple[bytes, bytes]) -> None:
    from distop.store._proto import auth_pb2
    from distop.store._proto import rpc_pb2 as rpc

    async def work(client: Any) -> None:
        for user in ("root", "worker"):
            await admin(client, "UserAdd", rpc.AuthUserAddRequest(name=user, password="secret"))
            await admin(client, "RoleAdd", rpc.AuthRoleAddRequest(name=user))
            await admin(client, "UserGrantRole", rpc.AuthUserGrantRoleRequest(user=user, role=user))
        permission = auth_pb2.Permission(permType=auth_pb2.Permission.READWRITE, key=granted[0], range_end=granted[1])
        await admin(client, "RoleGrantPermission", rpc.AuthRoleGrantPermissionRequest(name="worker", perm=permission))
        await admin(client, "AuthEnable", rpc.AuthEnableRequest())

    with_store_client(endpoint, work)


@pytest.fixture
def etcd_with_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[EmbeddedEtcd, Daemons]]:
    """An etcd with users and a token TTL of one second, and daemons that log in as one of its users."""
    monkeypatch.setenv("DISTOP_USER", "worker")
    monkeypatch.setenv("DISTOP_PASSWORD", "secret")
    with EmbeddedEtcd(compaction=None, arguments=["--auth-token-ttl", "1", *CHEAP_PASSWORDS]) as server:
        enable_users(server.endpoint, (b"distOp", b"distOq"))
        with daemons(server.endpoint, tmp_path) as group:
            group.client.add_table(TableRecord(TABLE, "parquet", str(tmp_path)), check=False)
            yield server, group


ROOT = {"username": "root", "password": "secret"}


async def revoke_role(client: Any) -> None:
    from distop.store._proto import rpc_pb2 as rpc

    await admin(client, "UserRevokeRole", rpc.AuthUserRevokeRoleRequest(name="worker", role="worker"))


async def grant_role(client: Any) -> None:
    from distop.store._proto import rpc_pb2 as rpc

    await admin(client, "UserGrantRole", rpc.AuthUserGrantRoleRequest(user="worker", role="worker"))


def test_a_daemon_survives_expired_tokens(
    etcd_with_users: tuple[EmbeddedEtcd, Daemons],
    journal: Journal,
    sample_env: dict[str, str],
) -> None:
    """Use prolongs a token, and renewals need none, so that the token of an idle daemon expires. The daemon resends the
    refused request with a new token, and keeps its session.
    """
    server, group = etcd_with_users
    with Recorder(server.endpoint) as recorder:
        ann = group.spawn("ann", "--etcd", recorder.endpoint, ttl=6, env=sample_env)
        group.await_ready("ann")
        before = incarnations(group)
        for _ in range(2):
            replaced = recorder.replaced
            group.eventually(lambda n=replaced: recorder.replaced > n, "its token is refused and replaced", "ann")
            operation = start(group, journal, jobs=2, pause=0.3)
            assert operation.wait(60).state == "success", group.tails()
        assert incarnations(group) == before
        assert ann.stop() == 0


def test_reports_wait_while_the_role_of_a_daemon_is_revoked(
    etcd_with_users: tuple[EmbeddedEtcd, Daemons], journal: Journal, sample_env: dict[str, str]
) -> None:
    """The role is granted again before the session's deadline, so that no job is stopped or counts a failure."""
    server, group = etcd_with_users
    (ann,) = group.start("ann", ttl=6, env=sample_env, options=("--poll", "2"))
    before = incarnations(group)
    operation = start(group, journal, jobs=2, pause=0.2)
    group.eventually(lambda: len(journal.lines()) > 4, "the jobs write")
    with_store_client(server.endpoint, revoke_role, **ROOT)
    group.eventually(lambda: "denies the user 'worker'" in ann.log.read_text(), "it logs the denial", "ann")
    group.eventually(lambda: "Cannot write pending report" in ann.log.read_text(), "reports wait", "ann")
    with_store_client(server.endpoint, grant_role, **ROOT)
    assert operation.wait(90).state == "success", group.tails()
    assert incarnations(group) == before
    assert {attempt for _, attempt, *_ in journal.lines()} == {1}


def test_a_role_revoked_for_longer_than_the_ttl_ends_the_session(
    etcd_with_users: tuple[EmbeddedEtcd, Daemons], journal: Journal, sample_env: dict[str, str]
) -> None:
    """Since 3.5.28 and 3.6.9 etcd refuses renewals without a role for the lease's keys.

    The session and its jobs end at the deadline. Once the role is granted again, a new session finishes the operation.
    """
    server, group = etcd_with_users
    if etcd_servers.use().name == etcd_servers.PACKAGED:
        pytest.skip("needs an etcd that refuses such renewals: install Go, and run scripts/etcd")
    (ann,) = group.start("ann", ttl=4, env=sample_env, options=("--poll", "2"))
    before = incarnations(group)
    operation = start(group, journal, jobs=2, pause=0.2)
    group.eventually(lambda: len(journal.lines()) > 4, "the jobs write")
    with_store_client(server.endpoint, revoke_role, **ROOT)
    group.eventually(lambda: "Session lost" in ann.log.read_text(), "the session ends", "ann")
    with_store_client(server.endpoint, grant_role, **ROOT)
    assert operation.wait(90).state == "success", group.tails()
    assert incarnations(group) != before


def test_work_pauses_during_a_space_alarm_and_continues_after_it(
    tmp_path: Path, journal: Journal, sample_env: dict[str, str], distop_command: Callable[..., Ran]
) -> None:
    """Claims and reports wait, and the log, doctor and show report the alarm until it is cleared."""
    with EmbeddedEtcd(compaction=None, quota=16 * 1024 * 1024) as server:
        with daemons(server.endpoint, tmp_path) as group:
            group.client.add_table(TableRecord(TABLE, "parquet", str(tmp_path)), check=False)
            (ann,) = group.start("ann", ttl=6, env=sample_env)
            operation = start(group, journal, jobs=24, pause=0.05)
            group.eventually(lambda: len(journal.lines()) > 10, "the jobs write")

            async def fill(client: Any) -> None:
                for n in range(40):
                    try:
                        await client.commit(Txn((), (Put(f"fill{n}", b"x" * 1_000_000),)), deadline=0.5)
                    except Exception:
                        return

            with_store_client(server.endpoint, fill)
            alarm = "its alarm NOSPACE is raised"
            group.eventually(lambda: "NOSPACE" in ann.log.read_text(), "the alarm is logged", "ann")
            doctor = distop_command("doctor", "--json", "--etcd", server.endpoint)
            assert doctor.code == 1
            assert any(c["name"] == "space" and c["status"] == "error" for c in doctor.json["checks"])
            shown = distop_command("show", operation.ref, "--json", "--etcd", server.endpoint)
            assert (shown.code, shown.err) == (0, ""), shown
            assert alarm in shown.json["waiting_for"], shown.out
            text_output = distop_command("show", operation.ref, "--etcd", server.endpoint)
            assert alarm in text_output.out
            group.eventually(lambda: "etcd rejected the claim; retrying" in ann.log.read_text(), "claims wait", "ann")
            claimed_ever = {int(key.rpartition(".")[2]) for key in dump(server.endpoint, "distOpClaim.")}
            claimed_ever |= {
                int(key.split(".")[-2]) for key in dump(server.endpoint, "distOp.") if key.endswith(".outcome")
            }
            assert {partition for partition, *_ in journal.lines()} <= claimed_ever, "all running jobs are claimed"
            assert len(claimed_ever) < 24, "some jobs are unclaimed"
            clear_alarm(server)
            assert operation.wait(90).state == "success", group.tails()
            assert audited(server.endpoint).totals.lost, "later checks start at the compaction"


def clear_alarm(server: EmbeddedEtcd) -> None:
    """Remove data, compact, defragment and disarm, as an operator of a full etcd would."""
    import subprocess

    async def compact(client: Any) -> None:
        await compacted(client, (await client.status()).revision)

    def ctl(*words: str) -> None:
        command = [etcdctl(), "--endpoints", server.endpoint, *words]
        subprocess.run(command, check=True, capture_output=True, env={"ETCDCTL_API": "3"})

    ctl("del", "--prefix", "fill")
    with_store_client(server.endpoint, compact)
    ctl("defrag")
    ctl("alarm", "disarm")


def test_a_daemon_ends_when_etcd_is_restored_from_a_snapshot(
    tmp_path: Path, journal: Journal, sample_env: dict[str, str]
) -> None:
    """A daemon that saw a later revision ends with an error and writes nothing."""
    port, peer = reserve(2)
    folder = tmp_path / "etcd"
    with EmbeddedEtcd(folder, port=port, peer_port=peer, compaction=None) as server:
        with daemons(server.endpoint, tmp_path) as group:
            group.client.add_table(TableRecord(TABLE, "parquet", str(tmp_path)), check=False)
            untouched = revision_and_keys(server.endpoint)
            server.halt()
            shutil.copytree(folder / "data", tmp_path / "older")
            server.restart()
            (ann,) = group.start("ann", ttl=10, env=sample_env)
            start(group, journal, pause=0.2)
            group.eventually(lambda: len(journal.lines()) > 3, "the jobs write")
            assert revision_and_keys(server.endpoint) != untouched
            server.kill()
            shutil.rmtree(folder / "data")
            shutil.copytree(tmp_path / "older", folder / "data")
            server.restart()
            assert ann.process.wait(60) == 3, group.tails()
            log = ann.log.read_text()
            assert "went back from revision" in log
            assert "stop all executors, check what was lost" in log
            assert "Traceback" not in log
            assert revision_and_keys(server.endpoint) == untouched


def test_an_operation_survives_the_loss_of_the_leader_of_three_members(
    tmp_path: Path, journal: Journal, sample_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTOP_ACCEPT_ETCD_DEFECTS", "1")
    with EtcdCluster() as cluster:
        everywhere = ",".join(cluster.endpoints)
        with daemons(everywhere, tmp_path) as group:
            group.client.add_table(TableRecord(TABLE, "parquet", str(tmp_path)), check=False)
            group.start("ann", "bob", ttl=8, env=sample_env)
            operation = start(group, journal)
            group.eventually(lambda: len(journal.lines()) > 10, "the jobs write")
            leader = next(m for m in cluster.members if is_leader(m))
            leader.kill()
            result = operation.wait(120)
            assert result.state == "success", group.tails()
            written = Written(everywhere, OperationRef.parse(operation.ref))
            assert_data(written, journal, JOBS, ROWS)


def is_leader(member: EmbeddedEtcd) -> bool:
    status = with_store_client(member.endpoint, lambda client: client.status())
    return bool(status.leader == status.member_id)


def test_a_session_moves_from_a_silent_member_to_another(
    tmp_path: Path, journal: Journal, sample_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy keeps the connections to a member open, and drops everything."""
    monkeypatch.setenv("DISTOP_ACCEPT_ETCD_DEFECTS", "1")
    with EtcdCluster() as cluster, ThreadedProxy(cluster.members[0].port) as proxy:
        endpoints = ",".join([proxy.endpoint, *cluster.endpoints[1:]])
        everywhere = ",".join(cluster.endpoints)
        with daemons(everywhere, tmp_path) as group:
            group.client.add_table(TableRecord(TABLE, "parquet", str(tmp_path)), check=False)
            ann = group.spawn("ann", "--etcd", endpoints, ttl=9, env=sample_env)
            group.await_ready("ann")
            before = incarnations(group)
            operation = start(group, journal, jobs=6)  # fewer jobs for one daemon
            group.eventually(lambda: len(journal.lines()) > 10, "the jobs write")
            assert proxy.requested
            proxy.set(Mode.BLACK_HOLE)
            assert operation.wait(120).state == "success", group.tails()
            assert "failed; using" in ann.log.read_text()
            assert incarnations(group) == before, "its session continues on another member"
            proxy.set(Mode.PASS)
            written = Written(everywhere, OperationRef.parse(operation.ref))
            assert_data(written, journal, 6, ROWS)
