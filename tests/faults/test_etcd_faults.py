"""etcd in trouble: what daemons do. That nothing is lost or done twice is looked at after each test (conftest.py)."""

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
from tests.support.etcd import EtcdCluster, compacted, connected
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
    """An operation that writes."""
    settings = {"jobs": JOBS, "rows": ROWS, "pause": 0.1, "journal": str(journal.path), **arg}
    return group.client.start_operation("writing", TABLE, settings)


def assert_whole(group: Daemons, operation: Operation, journal: Journal, **options: bool) -> None:
    """It succeeds, and the data is what it should be."""
    result = operation.wait(120)
    assert result.state == "success", group.tails()
    written = Written(group.endpoint, OperationRef.parse(operation.ref))
    assert_data(written, journal, JOBS, ROWS, **options)


def incarnations(group: Daemons) -> set[str]:
    return set(group.client.nodes())


def do(endpoint: str, work: Callable[..., Any], **options: Any) -> Any:
    """One piece of work with a client of the store."""

    async def run() -> Any:
        async with connected(endpoint, **options) as client:
            return await work(client)

    return asyncio.run(run())


def test_etcd_is_down_for_longer_than_the_time_to_live(
    group: Daemons, etcd: EmbeddedEtcd, journal: Journal, sample_env: dict[str, str]
) -> None:
    """For twice as long. All stop before their leases could end, and try to begin anew; once etcd is back, they are new
    incarnations and go on. It counts as one failure of each job that ran, and of no other.
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
        group.eventually(partial(logged, daemon, "Session lost"), "it lost its session", daemon.name)
        group.eventually(partial(logged, daemon, "Waiting for etcd"), "it tries to begin anew", daemon.name)
    quiet = len(journal.lines())
    eventually(lambda: boottime() > killed + 2 * ttl, "the time to live has passed twice")
    assert not etcd.running
    assert len(journal.lines()) == quiet, "nothing was written between the deadline and the return of etcd"
    etcd.restart()
    assert_whole(group, operation, journal)
    after = incarnations(group)
    assert len(after) == 2
    assert not before & after
    assert_failed_once_with(before, Written(group.endpoint, OperationRef.parse(operation.ref)))


def assert_failed_once_with(gone: set[str], written: Written) -> None:
    """Each job that one of these incarnations held and did not end has had another attempt, and no other job has."""
    lost = 0
    for partition, claims in written.claims.items():
        told = [json.loads(claim) for claim in claims]
        (outcome,) = [json.loads(text) for text in written.outcomes[partition]]
        interrupted = told[0]["incarnation"] in gone and outcome["incarnation"] not in gone
        expected = [(1, 0), (2, 1)] if interrupted else [(1, 0)]
        assert [(claim["attempt"], claim["failures"]) for claim in told] == expected, told
        lost += interrupted
    assert lost, "some ran"


def logged(daemon: Daemon, words: str) -> bool:
    return words in daemon.log.read_text()


def test_a_disk_that_stalls(group: Daemons, etcd: EmbeddedEtcd, journal: Journal, sample_env: dict[str, str]) -> None:
    """etcd stands still again and again, each time for less than the time to live: SIGSTOP in the disk's place."""
    group.start("ann", "bob", ttl=6, env=sample_env)
    before = incarnations(group)
    rows = 120  # so many that all four times find jobs at work, though a busy machine takes seconds in between
    operation = start(group, journal, jobs=4, rows=rows)
    group.eventually(lambda: len(holders(group)) == 2, "both hold claims")
    for _ in range(4):
        etcd.pause()
        seen = len(journal.lines())
        eventually(lambda n=seen: len(journal.lines()) > n + 30, "the jobs write on meanwhile")
        etcd.resume()
        dump(group.endpoint)  # it answers again
    result = operation.wait(60)
    assert result.state == "success", group.tails()
    assert_data(Written(group.endpoint, OperationRef.parse(operation.ref)), journal, 4, rows)
    assert incarnations(group) == before, "nobody lost a session"


def test_renewals_are_answered_while_no_write_is(
    tmp_path: Path, journal: Journal, sample_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with disks that are slow: the leader answers, and nothing is committed in time, but late. Here its followers
    stand still. Sessions live on; each write that was not answered is repeated, and the copies count once.
    """
    monkeypatch.setenv("DISTOP_ACCEPT_ETCD_DEFECTS", "1")
    monkeypatch.setenv("DISTOP_REQUEST_TIMEOUT", "1")
    patient = ("--heartbeat-interval", "500", "--election-timeout", "12000")  # it does not step down meanwhile
    monkeypatch.setattr(embedded, "_START_LIMIT", 90.0)  # an election whose votes are split is repeated as late
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
                    lambda d=daemon: "did not answer the" in d.log.read_text(), "no write is answered", daemon.name
                )
            for member in cluster.members:
                member.resume()
            assert operation.wait(90).state == "success", group.tails()
            assert_data(Written(leader.endpoint, OperationRef.parse(operation.ref)), journal, JOBS, ROWS)
            assert incarnations(group) == before, "nobody lost a session"


def test_compaction_under_a_watcher_that_lags(
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

        do(etcd.endpoint, compact)
        proxy.set(Mode.PASS)
        result = operation.wait(60)
        assert result.state == "success", group.tails()
        assert "listing again" in ann.log.read_text(), group.tails()
    assert audited(etcd.endpoint).totals.lost, "the compaction is told"


def enable_users(endpoint: str, granted: tuple[bytes, bytes]) -> None:
    from distop.store._proto import auth_pb2
    from distop.store._proto import rpc_pb2 as rpc

    async def work(client: Any) -> None:
        for user in ("root", "worker"):
            await admin(client, "UserAdd", rpc.AuthUserAddRequest(name=user, password="secret"))
            await admin(client, "RoleAdd", rpc.AuthRoleAddRequest(name=user))
            await admin(client, "UserGrantRole", rpc.AuthUserGrantRoleRequest(user=user, role=user))
        may = auth_pb2.Permission(permType=auth_pb2.Permission.READWRITE, key=granted[0], range_end=granted[1])
        await admin(client, "RoleGrantPermission", rpc.AuthRoleGrantPermissionRequest(name="worker", perm=may))
        await admin(client, "AuthEnable", rpc.AuthEnableRequest())

    do(endpoint, work)


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[EmbeddedEtcd, Daemons]]:
    """An etcd with users, whose tokens live for a second, and daemons that are one of them."""
    monkeypatch.setenv("DISTOP_USER", "worker")
    monkeypatch.setenv("DISTOP_PASSWORD", "secret")
    with EmbeddedEtcd(compaction=None, arguments=["--auth-token-ttl", "1"]) as server:
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


def test_tokens_that_expire(
    guarded: tuple[EmbeddedEtcd, Daemons],
    journal: Journal,
    sample_env: dict[str, str],
) -> None:
    """Use prolongs a token, so it is that of an idle daemon that ends: renewals need none. What is refused for it is
    sent again with a fresh one, and the daemon takes up work under the session that it had.
    """
    server, group = guarded
    with Recorder(server.endpoint) as recorder:
        ann = group.spawn("ann", "--etcd", recorder.endpoint, ttl=6, env=sample_env)
        group.await_ready("ann")
        before = incarnations(group)
        for _ in range(2):
            replaced = recorder.replaced
            group.eventually(lambda n=replaced: recorder.replaced > n, "its token is refused, and replaced", "ann")
            operation = start(group, journal, jobs=2, pause=0.3)
            assert operation.wait(60).state == "success", group.tails()
        assert incarnations(group) == before
        assert ann.stop() == 0


def test_a_role_that_is_revoked(
    guarded: tuple[EmbeddedEtcd, Daemons], journal: Journal, sample_env: dict[str, str]
) -> None:
    """Reports wait until the role is back: nobody else can write them.

    It is back before the session's deadline, so no job is stopped or blamed.
    """
    server, group = guarded
    (ann,) = group.start("ann", ttl=6, env=sample_env, options=("--poll", "2"))
    before = incarnations(group)
    operation = start(group, journal, jobs=2, pause=0.2)
    group.eventually(lambda: len(journal.lines()) > 4, "the jobs write")
    do(server.endpoint, revoke_role, **ROOT)
    group.eventually(lambda: "denies the user 'worker'" in ann.log.read_text(), "it says what is wrong", "ann")
    group.eventually(lambda: "Cannot write pending report" in ann.log.read_text(), "reports wait", "ann")
    do(server.endpoint, grant_role, **ROOT)
    assert operation.wait(90).state == "success", group.tails()
    assert incarnations(group) == before
    assert {attempt for _, attempt, *_ in journal.lines()} == {1}


def test_a_role_that_is_revoked_for_longer_than_the_session(
    guarded: tuple[EmbeddedEtcd, Daemons], journal: Journal, sample_env: dict[str, str]
) -> None:
    """Since 3.5.28 and 3.6.9 etcd refuses renewals without a role for the keys.

    So the session ends at its deadline with all that it ran. Once the role is back, another session takes the
    operation to its end.
    """
    server, group = guarded
    if etcd_servers.use().name == etcd_servers.PACKAGED:
        pytest.skip("needs an etcd that refuses such renewals: install Go, and run scripts/etcd")
    (ann,) = group.start("ann", ttl=4, env=sample_env, options=("--poll", "2"))
    before = incarnations(group)
    operation = start(group, journal, jobs=2, pause=0.2)
    group.eventually(lambda: len(journal.lines()) > 4, "the jobs write")
    do(server.endpoint, revoke_role, **ROOT)
    group.eventually(lambda: "Session lost" in ann.log.read_text(), "the session ends", "ann")
    do(server.endpoint, grant_role, **ROOT)
    assert operation.wait(90).state == "success", group.tails()
    assert incarnations(group) != before


def test_space_alarm(
    tmp_path: Path, journal: Journal, sample_env: dict[str, str], distop_command: Callable[..., Ran]
) -> None:
    """Claims and reports pause, log, doctor and show tell the alarm, and work goes on once it is cleared."""
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

            do(server.endpoint, fill)
            alarm = "its alarm NOSPACE is raised"
            group.eventually(lambda: "NOSPACE" in ann.log.read_text(), "the log tells it", "ann")
            told = distop_command("doctor", "--json", "--etcd", server.endpoint)
            assert told.code == 1
            assert any(c["name"] == "space" and c["status"] == "error" for c in told.json["checks"])
            shown = distop_command("show", operation.ref, "--json", "--etcd", server.endpoint)
            assert (shown.code, shown.err) == (0, ""), shown
            assert alarm in shown.json["waiting_for"], shown.out
            quiet = distop_command("show", operation.ref, "--etcd", server.endpoint)
            assert alarm in quiet.out
            group.eventually(lambda: "etcd rejected the claim; retrying" in ann.log.read_text(), "claims wait", "ann")
            ever = {int(key.rpartition(".")[2]) for key in dump(server.endpoint, "distOpClaim.")}
            ever |= {int(key.split(".")[-2]) for key in dump(server.endpoint, "distOp.") if key.endswith(".outcome")}
            assert {partition for partition, *_ in journal.lines()} <= ever, "nothing runs that is not claimed"
            assert len(ever) < 24, "jobs are left to be claimed"
            clear(server)
            assert operation.wait(90).state == "success", group.tails()
            assert audited(server.endpoint).totals.lost, "what is looked at afterwards begins in the middle"


def clear(server: EmbeddedEtcd) -> None:
    """What a person does about a full etcd."""
    import subprocess

    async def compact(client: Any) -> None:
        await compacted(client, (await client.status()).revision)

    def ctl(*words: str) -> None:
        command = [etcdctl(), "--endpoints", server.endpoint, *words]
        subprocess.run(command, check=True, capture_output=True, env={"ETCDCTL_API": "3"})

    ctl("del", "--prefix", "fill")
    do(server.endpoint, compact)
    ctl("defrag")
    ctl("alarm", "disarm")


def test_a_restored_snapshot_stops_everything(tmp_path: Path, journal: Journal, sample_env: dict[str, str]) -> None:
    """The store goes back: a daemon that knew it later ends with a sentence, and writes nothing."""
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


def test_the_leader_of_three_is_lost(
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
    status = do(member.endpoint, lambda client: client.status())
    return bool(status.leader == status.member_id)


def test_one_member_is_cut_off_with_our_streams_on_it(
    tmp_path: Path, journal: Journal, sample_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection to it stays open, and nothing passes any more: a proxy on the loopback."""
    monkeypatch.setenv("DISTOP_ACCEPT_ETCD_DEFECTS", "1")
    with EtcdCluster() as cluster, ThreadedProxy(cluster.members[0].port) as proxy:
        endpoints = ",".join([proxy.endpoint, *cluster.endpoints[1:]])
        everywhere = ",".join(cluster.endpoints)
        with daemons(everywhere, tmp_path) as group:
            group.client.add_table(TableRecord(TABLE, "parquet", str(tmp_path)), check=False)
            ann = group.spawn("ann", "--etcd", endpoints, ttl=9, env=sample_env)
            group.await_ready("ann")
            before = incarnations(group)
            operation = start(group, journal, jobs=6)  # one daemon
            group.eventually(lambda: len(journal.lines()) > 10, "the jobs write")
            assert proxy.requested
            proxy.set(Mode.BLACK_HOLE)
            assert operation.wait(120).state == "success", group.tails()
            assert "failed; using" in ann.log.read_text()
            assert incarnations(group) == before, "its session went on by another member"
            proxy.set(Mode.PASS)
            written = Written(everywhere, OperationRef.parse(operation.ref))
            assert_data(written, journal, 6, ROWS)
