"""Self-fencing: all processes of a daemon's child die before its lease can expire, whatever happens to the daemon.

The tests print the time left. The deadline and its margin come from the daemon's log, the end of the lease from another
client, and the death of the last process from /proc. All times are from CLOCK_BOOTTIME.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distop.protocol.records import OperationRef
from distop.worker.guardian import boottime, session_members
from tests.conftest import FIGURES
from tests.faults.recording import Recorder, formatted
from tests.integration.test_daemons import holders
from tests.support.daemons import SPARK, eventually
from tests.support.needs import need
from tests.support.processes import children, children_of_guardian
from tests.support.replay import Written, read_history
from tests.support.writing import Journal, assert_data

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.store.embedded import EmbeddedEtcd
    from tests.support.daemons import Daemon, Daemons
    from tests.support.replay import History

    RecordProperty = Callable[[str, object], None]

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(180), pytest.mark.rotating]

TABLE = "t"
DEBUG = ("--debug",)
DESCRIPTIONS = {"freeze": "frozen", "kill": "killed", "freeze_both": "frozen with its child"}


def child_of(daemon: Daemon) -> int:
    """The pid and session id of the daemon's child, which its guardian started."""
    for guardian in children(daemon.pid):
        for child in children_of_guardian(guardian):
            return child
    raise AssertionError("the daemon has no child")


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def deadline(daemon: Daemon) -> tuple[float, float]:
    """The last deadline in the daemon's log, and the seconds from it to the earliest end of the lease."""
    found = re.findall(r"Deadline .* moved to ([0-9.]+), margin ([0-9.]+)", daemon.log.read_text())
    return float(found[-1][0]), float(found[-1][1])


class EndWatcher:
    """Records when the last process of a session died, and when the node key of its incarnation was removed."""

    def __init__(self, group: Daemons, session: int, incarnation: str) -> None:
        self.died = 0.0
        self.gone = 0.0
        self._session = session
        self._group = group
        self._incarnation = incarnation
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._processes, self._node)]
        for thread in self._threads:
            thread.start()

    def _processes(self) -> None:
        pause = threading.Event()
        while session_members(self._session):
            pause.wait(0.002)
        self.died = boottime()

    def _node(self) -> None:
        pause = threading.Event()
        while True:
            before = boottime()
            if self._incarnation not in self._group.client.nodes():
                self.gone = before
                return
            pause.wait(0.01)

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(60)
        assert self.died, "some processes of the child are alive"
        assert self.gone, "the session never ended"


def assert_dead_in_time(
    what: str, watcher: EndWatcher, known: tuple[float, float], record_property: RecordProperty
) -> None:
    """Assert that all processes died before the earliest end of the lease and before its real end; print the times."""
    watcher.wait()
    at, margin = known
    earliest = at + margin
    record_property(
        FIGURES,
        f"{what}: the last process died {watcher.died - at:+.3f} s from the deadline, {earliest - watcher.died:.3f} s "
        f"before the lease could end, {watcher.gone - watcher.died:.3f} s before it did",
    )
    assert watcher.died < earliest
    assert watcher.died < watcher.gone


def freeze(daemon: Daemon, etcd: EmbeddedEtcd) -> None:
    daemon.freeze()


def kill(daemon: Daemon, etcd: EmbeddedEtcd) -> None:
    daemon.process.kill()


def freeze_both(daemon: Daemon, etcd: EmbeddedEtcd) -> None:
    """F32: freeze the daemon and the first process of its child, but not that process's children, such as a JVM."""
    os.kill(child_of(daemon), signal.SIGSTOP)
    daemon.freeze()


@pytest.mark.parametrize("end", [freeze, kill], ids=["frozen", "killed"])
def test_all_processes_of_a_child_die_before_its_lease_can_end(
    end: Callable[..., None],
    group: Daemons,
    etcd: EmbeddedEtcd,
    journal: Journal,
    sample_env: dict[str, str],
    record_property: RecordProperty,
) -> None:
    """The jobs ignore cancels, and the child has no Spark."""
    (ann,) = group.start("ann", ttl=4, env=sample_env, options=DEBUG)
    arg = {"jobs": 2, "journal": str(journal.path), "does": {"p=0": "deaf", "p=1": "deaf"}}
    operation = group.client.start_operation("writing", TABLE, arg)
    group.eventually(lambda: len(journal.lines()) > 10, "the jobs write")
    (incarnation,) = group.client.nodes()
    watcher = EndWatcher(group, child_of(ann), incarnation)
    end(ann, etcd)
    known = deadline(ann)
    assert_dead_in_time(f"daemon {DESCRIPTIONS[end.__name__]}", watcher, known, record_property)
    last = max(when for *_, when in journal.lines())
    assert last <= watcher.died
    operation.cancel()  # before ann is back, because the jobs would run again
    ann.thaw() if end is freeze else ann.start()
    group.eventually(lambda: "ann" in group.live(), "ann is live again", "ann")
    assert operation.wait(60).state == "cancelled"
    assert not journal.overlaps()


@pytest.mark.spark
@pytest.mark.parametrize(
    "end",
    [
        pytest.param(freeze, id="frozen"),
        pytest.param(kill, id="killed", marks=pytest.mark.slow),
        pytest.param(freeze_both, id="child-stopped", marks=pytest.mark.slow),
    ],
)
def test_spark_and_its_workers_die_before_the_lease_can_end(
    end: Callable[..., None],
    group: Daemons,
    etcd: EmbeddedEtcd,
    journal: Journal,
    sample_env: dict[str, str],
    tmp_path: Path,
    record_property: RecordProperty,
) -> None:
    """This includes the JVM and PySpark's Python workers, which leave the process group."""
    need(shutil.which("java"), "Java 17 or newer: install openjdk-17-jre-headless")
    hold = tmp_path / "go"
    (ann,) = group.start("ann", ttl=4, env=sample_env, options=(*DEBUG, *SPARK))
    arg = {"jobs": 2, "rows": 3, "journal": str(journal.path), "hold": str(hold)}
    operation = group.client.start_operation("sparkwriting", TABLE, arg)
    group.eventually(lambda: len({p for p, *_ in journal.lines()}) == 2, "Spark's workers write", seconds=90)
    (incarnation,) = group.client.nodes()
    session = child_of(ann)
    commands = [command(pid) for pid in session_members(session)]
    assert any("java" in c for c in commands), commands
    assert any("pyspark.daemon" in c or "pyspark/daemon" in c for c in commands), commands
    watcher = EndWatcher(group, session, incarnation)
    end(ann, etcd)
    what = f"with Spark ({len(commands)} processes), daemon {DESCRIPTIONS[end.__name__]}"
    assert_dead_in_time(what, watcher, deadline(ann), record_property)
    hold.touch()
    ann.start() if end is kill else ann.thaw()
    result = operation.wait(120)
    assert result.state == "success", group.tails()
    assert_data(Written(group.endpoint, OperationRef.parse(operation.ref)), journal, 2, 3)


def test_all_processes_of_a_child_die_before_its_lease_can_end_without_etcd(
    group: Daemons, etcd: EmbeddedEtcd, journal: Journal, sample_env: dict[str, str], record_property: RecordProperty
) -> None:
    """A healthy daemon cannot renew its lease, because etcd does not answer."""
    (ann,) = group.start("ann", ttl=4, env=sample_env, options=DEBUG)
    arg = {"jobs": 2, "journal": str(journal.path), "does": {"p=0": "deaf", "p=1": "deaf"}}
    operation = group.client.start_operation("writing", TABLE, arg)
    group.eventually(lambda: len(journal.lines()) > 10, "the jobs write")
    child = child_of(ann)
    etcd.pause()
    try:
        eventually(lambda: not session_members(child), "all processes of the child are dead", tail=group.tails)
        died, (at, margin) = boottime(), deadline(ann)
        measured = f"etcd frozen: the last process died {died - at:+.3f} s from the deadline, "
        record_property(FIGURES, f"{measured}{at + margin - died:.3f} s before the lease could end")
        assert died < at + margin
    finally:
        etcd.resume()
    operation.cancel()  # before ann is back, as above
    group.eventually(lambda: "ann" in group.live(), "ann is live again", "ann")
    assert operation.wait(60).state == "cancelled"
    assert not journal.overlaps()


def assert_no_writes_under_old_session(recorder: Recorder, thawed: float) -> None:
    """Assert that a daemon behind the recorder sent no writes between its thaw and its request for a new session."""
    assert any(request.writes for request in recorder.requests if request.at < thawed), "writes are recorded"
    late = recorder.writes_until_grant(thawed)
    assert not late, f"writes under an ended session:\n{formatted(late)}"


def assert_incarnation_not_named_after_its_end(history: History, incarnation: str) -> None:
    """Assert that no value names this incarnation after its node key was removed."""
    node = f"distOpNode.{incarnation}"
    (ended,) = [n for n, changes in history for c in changes if c.kv.key == node and c.deleted]
    late = [
        (n, c.kv.key, c.kv.value)
        for n, changes in history
        for c in changes
        if n > ended and not c.deleted and (c.kv.key == node or incarnation.encode() in c.kv.value)
    ]
    assert not late, "values written under an ended session"


def test_a_thawed_daemon_writes_nothing_under_its_old_session(
    group: Daemons, etcd: EmbeddedEtcd, journal: Journal, sample_env: dict[str, str], tmp_path: Path
) -> None:
    """A coordinator is frozen for longer than its TTL, and its jobs end in the meantime. After the thaw, it receives
    these events first.
    """
    hold = tmp_path / "go"
    with Recorder(etcd.endpoint) as recorder:
        bob = group.spawn("bob", "--etcd", recorder.endpoint, env=sample_env)
        group.await_ready("bob")
        (old,) = group.client.nodes()
        arg = {"jobs": 8, "rows": 5, "journal": str(journal.path), "hold": str(hold)}
        operation = group.client.start_operation("writing", TABLE, arg)
        group.eventually(lambda: holders(group)["bob"] == 2, "bob holds claims")
        group.start("ann", env=sample_env)
        group.eventually(lambda: len(holders(group)) == 2, "both hold claims")
        group.eventually(lambda: len({p for p, *_ in journal.lines()}) == 4, "the jobs of both write")
        bob.freeze()
        hold.touch()
        assert operation.wait(90).state == "success", group.tails()
        thawed = boottime()
        bob.thaw()
        group.eventually(
            lambda: "bob" in group.live() and old not in group.client.nodes(), "bob has a new session", "bob"
        )
        assert_no_writes_under_old_session(recorder, thawed)
        assert bob.stop() == 0
    history = read_history(group.endpoint)
    led = [c.kv.key for _, changes in history for c in changes if c.kv.value == old.encode()]
    assert led == ["distOpCoordinator.t.writing"], "bob was the coordinator"
    assert_incarnation_not_named_after_its_end(history, old)
    assert_data(Written(group.endpoint, OperationRef.parse(operation.ref)), journal, 8, 5)


def test_cancelling_a_deaf_job_kills_its_child_without_failing_other_jobs(
    group: Daemons, journal: Journal, sample_env: dict[str, str], tmp_path: Path
) -> None:
    """The jobs of another operation in the killed child run again, and the kill does not count as their failure."""
    hold = tmp_path / "go"
    (ann,) = group.start("ann", ttl=30, env=sample_env)
    child = child_of(ann)
    other = Journal(tmp_path / "other.jsonl")
    deaf = group.client.start_operation(
        "writing", TABLE, {"jobs": 1, "journal": str(journal.path), "does": {"p=0": "deaf"}}
    )
    group.eventually(lambda: journal.lines(), "the deaf job runs")
    arg: dict[str, Any] = {"jobs": 1, "rows": 3, "journal": str(other.path), "hold": str(hold)}
    neighbour = group.client.start_operation("writing", TABLE, arg)
    group.eventually(lambda: other.lines(), "the job of the other operation runs")
    deaf.cancel()
    assert deaf.wait(60).state == "cancelled", group.tails()
    assert not session_members(child), "the child was killed"
    hold.touch()
    assert neighbour.wait(60).state == "success", group.tails()
    written = Written(group.endpoint, OperationRef.parse(neighbour.ref))
    assert all('"failures":0' in claim for claims in written.claims.values() for claim in claims), written.claims
    assert_data(written, other, 1, 3)
    assert len(list(Path(tmp_path, "ann").glob("**/*.log"))) > 0
