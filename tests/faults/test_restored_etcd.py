"""A daemon whose etcd was replaced or restored ends with an error that says what to do, also after a restart."""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import distop
from distop.protocol.records import TableRecord
from distop.store.embedded import EmbeddedEtcd
from distop.store.ports import reserve
from tests.support.contract import revision_and_keys
from tests.support.daemons import Daemons, daemons, eventually
from tests.support.step_control import Steps

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from distop.blocking import Operation
    from tests.support.daemons import Daemon
    from tests.support.writing import Journal

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(180), pytest.mark.rotating]

TABLE = "t"
EMPTY: tuple[int, dict[str, str]] = (1, {})
"""The revision and content of a new etcd."""


class Restorable:
    """An etcd with a copy of its data from before the first daemon."""

    def __init__(self, folder: Path, copy: Path) -> None:
        port, peer = reserve(2)
        self.server = EmbeddedEtcd(folder, port=port, peer_port=peer, compaction=None)
        self._data, self._copy = folder / "data", copy
        self.untouched: tuple[int, dict[str, str]] = (0, {})
        """The revision and content of the copy."""

    def copy(self) -> None:
        self.untouched = revision_and_keys(self.server.endpoint)
        self.server.halt()
        shutil.copytree(self._data, self._copy)
        self.server.restart()

    def restore(self) -> None:
        """Replace the data of the stopped etcd by the copy."""
        shutil.rmtree(self._data)
        shutil.copytree(self._copy, self._data)


@contextmanager
def restorable(tmp_path: Path) -> Iterator[tuple[Restorable, Daemons]]:
    etcd = Restorable(tmp_path / "etcd", tmp_path / "older")
    with etcd.server, daemons(etcd.server.endpoint, tmp_path) as group:
        group.client.add_table(TableRecord(TABLE, "parquet", str(tmp_path)), check=False)
        etcd.copy()
        yield etcd, group


def start(group: Daemons, journal: Journal, **arg: Any) -> Operation:
    settings = {"jobs": 6, "rows": 200, "pause": 0.1, "journal": str(journal.path), **arg}
    return group.client.start_operation("writing", TABLE, settings)


@pytest.fixture
def steps(tmp_path: Path) -> Steps:
    return Steps(tmp_path / "steps")


def start_blocked_job(group: Daemons, steps: Steps) -> list[Path]:
    """Start a job that blocks, and return its records in the work directory."""
    group.client.start_operation("steps", TABLE, steps.arg("a", hold=[3]))
    group.eventually(lambda: steps.at("a", 2), "ann holds a")
    return run_records(group)


def run_records(group: Daemons) -> list[Path]:
    found = sorted((group.folder / "ann" / "runs").iterdir())
    assert found
    return found


def remembered_cluster(daemon: Daemon) -> dict[str, Any]:
    """The cluster record in the work directory; revision 0 before the first session."""
    file = daemon.log.with_suffix("") / "cluster.json"
    return json.loads(file.read_text()) if file.exists() else {"revision": 0}


def assert_refused(daemon: Daemon, *words: str) -> None:
    """Assert that the daemon ends by itself with a one-line error."""
    assert daemon.process.wait(60) == 3, daemon.log.read_text()
    last = daemon.log.read_text().splitlines()[-1]
    assert last.startswith("error: ")
    assert all(word in last for word in (*words, str(daemon.log.with_suffix("")))), last
    assert "Traceback" not in daemon.log.read_text()


def start_again(daemon: Daemon) -> None:
    """Start the daemon again with a new log, as a service manager does."""
    daemon.log.unlink()
    daemon.start()


def test_a_daemon_detects_a_restore_after_its_session_was_lost(
    tmp_path: Path, journal: Journal, sample_env: dict[str, str]
) -> None:
    """A restore takes longer than the TTL, so the next incarnation must detect it."""
    with restorable(tmp_path) as (etcd, group):
        (ann,) = group.start("ann", ttl=4, env=sample_env)
        start(group, journal)
        group.eventually(lambda: len(journal.lines()) > 6, "the jobs write")
        assert revision_and_keys(etcd.server.endpoint) != etcd.untouched
        etcd.server.kill()
        group.eventually(lambda: "Session lost" in ann.log.read_text(), "ann has lost its session", "ann")
        etcd.restore()
        etcd.server.restart()
        assert_refused(ann, "went back from revision", "move the work directory")
        assert revision_and_keys(etcd.server.endpoint) == etcd.untouched


def test_a_restarted_daemon_detects_a_restore_from_its_work_directory(
    tmp_path: Path, steps: Steps, journal: Journal, sample_env: dict[str, str]
) -> None:
    """Further restarts detect it, too, until an operator moves the work directory."""
    with restorable(tmp_path) as (etcd, group):
        (ann,) = group.start("ann", env=sample_env)
        bound = remembered_cluster(ann)["revision"]
        kept_records = start_blocked_job(group, steps)
        group.eventually(
            lambda: remembered_cluster(ann)["revision"] > bound, "the work directory has etcd's newest revision", "ann"
        )
        ann.kill()
        etcd.server.kill()
        etcd.restore()
        etcd.server.restart()
        for _ in range(2):
            start_again(ann)
            assert_refused(ann, "went back from revision", "move the work directory")
            assert run_records(group) == kept_records, "no run record was removed because of the restored etcd"
        assert revision_and_keys(etcd.server.endpoint) == etcd.untouched
        ann.log.with_suffix("").rename(tmp_path / "set-aside")
        start_again(ann)
        group.client.close()
        group.client = distop.connect(etcd.server.endpoint)  # the previous client fails, too
        group.await_ready("ann")
        assert start(group, journal, rows=1).wait(60).state == "success", group.tails()


def test_another_cluster_is_not_served_with_the_same_work_directory(
    etcd: EmbeddedEtcd, group: Daemons, steps: Steps, sample_env: dict[str, str]
) -> None:
    (ann,) = group.start("ann", env=sample_env)
    kept_records = start_blocked_job(group, steps)
    port = etcd.port
    ann.kill()
    etcd.halt()
    with EmbeddedEtcd(port=port, compaction=None) as other:
        start_again(ann)
        assert_refused(ann, "is another cluster than before", "--work-dir")
        assert run_records(group) == kept_records, "run records of the previous cluster are kept"
        assert revision_and_keys(other.endpoint) == EMPTY
    etcd.restart()


def test_a_running_daemon_ends_when_its_etcd_becomes_another_cluster(
    etcd: EmbeddedEtcd, group: Daemons, journal: Journal, sample_env: dict[str, str]
) -> None:
    (ann,) = group.start("ann", ttl=10, env=sample_env)
    start(group, journal)
    group.eventually(lambda: len(journal.lines()) > 6, "the jobs write")
    port = etcd.port
    etcd.kill()
    with EmbeddedEtcd(port=port, compaction=None) as other:
        assert_refused(ann, "is another cluster than before", "--work-dir")
        assert revision_and_keys(other.endpoint) == EMPTY
    etcd.restart()


def test_another_namespace_is_not_served_with_the_same_work_directory(
    group: Daemons, tmp_path: Path, sample_env: dict[str, str]
) -> None:
    (ann,) = group.start("ann", env=sample_env)
    assert ann.stop() == 0
    other = group.spawn("ann", "--namespace", "other", env=sample_env)
    assert other.process.wait(60) == 5
    assert other.log.read_text().splitlines()[-1] == (
        f"error: the work directory {tmp_path / 'ann'} belongs to no namespace, but this executor serves "
        "the namespace 'other': give another --work-dir, or move this directory away"
    )
    restarted = group.spawn("ann", env=sample_env)
    eventually(
        lambda: "ready: " in restarted.log.read_text().rpartition("error: ")[2],
        "it is ready with its previous namespace",
        tail=group.tails,
    )
