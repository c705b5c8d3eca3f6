"""An etcd that is not the one that a daemon knew: it does nothing, says what to do, and stays so when restarted."""

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
NOTHING: tuple[int, dict[str, str]] = (1, {})
"""How a new etcd stands."""


class Restorable:
    """An etcd with a copy of what it held before any daemon knew it."""

    def __init__(self, folder: Path, copy: Path) -> None:
        port, peer = reserve(2)
        self.server = EmbeddedEtcd(folder, port=port, peer_port=peer, compaction=None)
        self._data, self._copy = folder / "data", copy
        self.untouched: tuple[int, dict[str, str]] = (0, {})
        """How it stands as long as nobody writes to what is put back."""

    def copy(self) -> None:
        self.untouched = revision_and_keys(self.server.endpoint)
        self.server.halt()
        shutil.copytree(self._data, self._copy)
        self.server.restart()

    def put_back(self) -> None:
        """While it is down: what it holds is what was copied."""
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


def hold(group: Daemons, steps: Steps) -> list[Path]:
    """A job that holds, and what is written down of it in the work directory."""
    group.client.start_operation("steps", TABLE, steps.arg("a", hold=[3]))
    group.eventually(lambda: steps.at("a", 2), "ann holds a")
    return runs(group)


def runs(group: Daemons) -> list[Path]:
    found = sorted((group.folder / "ann" / "runs").iterdir())
    assert found
    return found


def remembered(daemon: Daemon) -> dict[str, Any]:
    """What the work directory is bound to; nothing yet before its first session."""
    file = daemon.log.with_suffix("") / "cluster.json"
    return json.loads(file.read_text()) if file.exists() else {"revision": 0}


def assert_refused(daemon: Daemon, *words: str) -> None:
    """It ends by itself, with one sentence."""
    assert daemon.process.wait(60) == 3, daemon.log.read_text()
    last = daemon.log.read_text().splitlines()[-1]
    assert last.startswith("error: ")
    assert all(word in last for word in (*words, str(daemon.log.with_suffix("")))), last
    assert "Traceback" not in daemon.log.read_text()


def once_more(daemon: Daemon) -> None:
    """Start it as a service manager does; its log begins anew."""
    daemon.log.unlink()
    daemon.start()


def test_a_snapshot_restored_after_the_session_was_lost(
    tmp_path: Path, journal: Journal, sample_env: dict[str, str]
) -> None:
    """A restore takes longer than the time to live: the next incarnation notices it as well."""
    with restorable(tmp_path) as (etcd, group):
        (ann,) = group.start("ann", ttl=4, env=sample_env)
        start(group, journal)
        group.eventually(lambda: len(journal.lines()) > 6, "the jobs write")
        assert revision_and_keys(etcd.server.endpoint) != etcd.untouched
        etcd.server.kill()
        group.eventually(lambda: "Session lost" in ann.log.read_text(), "it lost its session", "ann")
        etcd.put_back()
        etcd.server.restart()
        assert_refused(ann, "went back from revision", "move the work directory")
        assert revision_and_keys(etcd.server.endpoint) == etcd.untouched


def test_a_daemon_that_is_started_again_remembers_what_it_knew(
    tmp_path: Path, steps: Steps, journal: Journal, sample_env: dict[str, str]
) -> None:
    """However often it is restarted: what unbinds the work directory is that somebody moves it away."""
    with restorable(tmp_path) as (etcd, group):
        (ann,) = group.start("ann", env=sample_env)
        bound = remembered(ann)["revision"]
        left = hold(group, steps)
        group.eventually(lambda: remembered(ann)["revision"] > bound, "it wrote down how far etcd had come", "ann")
        ann.kill()
        etcd.server.kill()
        etcd.put_back()
        etcd.server.restart()
        for _ in range(2):
            once_more(ann)
            assert_refused(ann, "went back from revision", "move the work directory")
            assert runs(group) == left, "nothing of it was judged by what another etcd says"
        assert revision_and_keys(etcd.server.endpoint) == etcd.untouched
        ann.log.with_suffix("").rename(tmp_path / "set-aside")
        once_more(ann)
        group.client.close()
        group.client = distop.connect(etcd.server.endpoint)  # the former one fails closed, too
        group.await_ready("ann")
        assert start(group, journal, rows=1).wait(60).state == "success", group.tails()


def test_another_cluster_is_not_served_with_the_same_work_directory(
    etcd: EmbeddedEtcd, group: Daemons, steps: Steps, sample_env: dict[str, str]
) -> None:
    (ann,) = group.start("ann", env=sample_env)
    left = hold(group, steps)
    port = etcd.port
    ann.kill()
    etcd.halt()
    with EmbeddedEtcd(port=port, compaction=None) as other:
        once_more(ann)
        assert_refused(ann, "is another cluster than before", "--work-dir")
        assert runs(group) == left, "what belongs to the other cluster stays"
        assert revision_and_keys(other.endpoint) == NOTHING
    etcd.restart()


def test_another_cluster_under_a_daemon_that_runs(
    etcd: EmbeddedEtcd, group: Daemons, journal: Journal, sample_env: dict[str, str]
) -> None:
    (ann,) = group.start("ann", ttl=10, env=sample_env)
    start(group, journal)
    group.eventually(lambda: len(journal.lines()) > 6, "the jobs write")
    port = etcd.port
    etcd.kill()
    with EmbeddedEtcd(port=port, compaction=None) as other:
        assert_refused(ann, "is another cluster than before", "--work-dir")
        assert revision_and_keys(other.endpoint) == NOTHING
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
    again = group.spawn("ann", env=sample_env)
    eventually(
        lambda: "ready: " in again.log.read_text().rpartition("error: ")[2], "as before it may", tail=group.tails
    )
