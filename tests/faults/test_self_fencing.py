"""Whatever happens to a daemon, all that its child started is dead before its lease can expire; by how much is printed.

The deadline and its margin are the daemon's own, from its log; when the lease ended is what etcd's history tells to
somebody else; when the last process died is seen in /proc. All three are read from one clock, CLOCK_BOOTTIME.
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
from tests.faults.recording import Recorder, told
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

    Note = Callable[[str, object], None]

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(180), pytest.mark.rotating]

TABLE = "t"
DEBUG = ("--debug",)
TOLD = {"freeze": "frozen", "kill": "killed", "freeze_both": "frozen with its child"}


def child_of(daemon: Daemon) -> int:
    """The session of the daemon's child: the process that its guardian started."""
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
    """The last deadline that the daemon knew, and the seconds from it to the earliest end of the lease."""
    found = re.findall(r"Deadline .* moved to ([0-9.]+), margin ([0-9.]+)", daemon.log.read_text())
    return float(found[-1][0]), float(found[-1][1])


class Watcher:
    """Notes when the last process of a session died, and when a key of etcd went."""

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
            asked = boottime()
            if self._incarnation not in self._group.client.nodes():
                self.gone = asked
                return
            pause.wait(0.01)

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(60)
        assert self.died, "some of the child's processes live on"
        assert self.gone, "the session never ended"


def assert_dead_in_time(what: str, watcher: Watcher, known: tuple[float, float], note: Note) -> None:
    """All were dead before the lease could end by what the daemon knew, and before it did end. The margin is told."""
    watcher.wait()
    at, margin = known
    earliest = at + margin
    note(
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
    """The daemon and the first process of its child, and not what that started: a JVM works on (F32)."""
    os.kill(child_of(daemon), signal.SIGSTOP)
    daemon.freeze()


@pytest.mark.parametrize("end", [freeze, kill], ids=["frozen", "killed"])
def test_all_of_a_child_is_dead_before_its_lease_can_end(
    end: Callable[..., None],
    group: Daemons,
    etcd: EmbeddedEtcd,
    journal: Journal,
    sample_env: dict[str, str],
    record_property: Note,
) -> None:
    """Jobs that do not listen, in a child without Spark."""
    (ann,) = group.start("ann", ttl=4, env=sample_env, options=DEBUG)
    arg = {"jobs": 2, "journal": str(journal.path), "does": {"p=0": "deaf", "p=1": "deaf"}}
    operation = group.client.start_operation("writing", TABLE, arg)
    group.eventually(lambda: len(journal.lines()) > 10, "the jobs write")
    (incarnation,) = group.client.nodes()
    watcher = Watcher(group, child_of(ann), incarnation)
    end(ann, etcd)
    known = deadline(ann)
    assert_dead_in_time(f"daemon {TOLD[end.__name__]}", watcher, known, record_property)
    last = max(when for *_, when in journal.lines())
    assert last <= watcher.died
    operation.cancel()  # before ann is back: jobs that do not listen would run again
    ann.thaw() if end is freeze else ann.start()
    group.eventually(lambda: "ann" in group.live(), "ann is back", "ann")
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
def test_spark_and_its_workers_are_dead_before_the_lease_can_end(
    end: Callable[..., None],
    group: Daemons,
    etcd: EmbeddedEtcd,
    journal: Journal,
    sample_env: dict[str, str],
    tmp_path: Path,
    record_property: Note,
) -> None:
    """The JVM, and PySpark's Python workers, which leave the process group."""
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
    watcher = Watcher(group, session, incarnation)
    end(ann, etcd)
    what = f"with Spark ({len(commands)} processes), daemon {TOLD[end.__name__]}"
    assert_dead_in_time(what, watcher, deadline(ann), record_property)
    hold.touch()
    ann.start() if end is kill else ann.thaw()
    result = operation.wait(120)
    assert result.state == "success", group.tails()
    assert_data(Written(group.endpoint, OperationRef.parse(operation.ref)), journal, 2, 3)


def test_etcd_that_does_not_answer(
    group: Daemons, etcd: EmbeddedEtcd, journal: Journal, sample_env: dict[str, str], record_property: Note
) -> None:
    """The daemon is well and cannot renew: the child is dead before any lease could end, wherever etcd may be."""
    (ann,) = group.start("ann", ttl=4, env=sample_env, options=DEBUG)
    arg = {"jobs": 2, "journal": str(journal.path), "does": {"p=0": "deaf", "p=1": "deaf"}}
    operation = group.client.start_operation("writing", TABLE, arg)
    group.eventually(lambda: len(journal.lines()) > 10, "the jobs write")
    child = child_of(ann)
    etcd.pause()
    try:
        eventually(lambda: not session_members(child), "all of the child is dead", tail=group.tails)
        died, (at, margin) = boottime(), deadline(ann)
        told = f"etcd frozen: the last process died {died - at:+.3f} s from the deadline, "
        record_property(FIGURES, f"{told}{at + margin - died:.3f} s before the lease could end")
        assert died < at + margin
    finally:
        etcd.resume()
    operation.cancel()  # before ann is back, as above
    group.eventually(lambda: "ann" in group.live(), "ann is back", "ann")
    assert operation.wait(60).state == "cancelled"
    assert not journal.overlaps()


def assert_nothing_was_written(recorder: Recorder, thawed: float) -> None:
    """By a daemon that reaches etcd through the recorder alone, from the time at which it went on until it asked for a
    new session: no request that could have changed any key was even sent.
    """
    assert any(asked.writes for asked in recorder.requests if asked.at < thawed), "what it writes is recorded"
    late = recorder.writes_until_grant(thawed)
    assert not late, f"written under a session that was over:\n{told(late)}"


def assert_never_named_again(history: History, incarnation: str) -> None:
    """Once its node key was gone, no value named this incarnation."""
    node = f"distOpNode.{incarnation}"
    (ended,) = [n for n, changes in history for c in changes if c.kv.key == node and c.deleted]
    late = [
        (n, c.kv.key, c.kv.value)
        for n, changes in history
        for c in changes
        if n > ended and not c.deleted and (c.kv.key == node or incarnation.encode() in c.kv.value)
    ]
    assert not late, "written under a session that was over"


def test_a_daemon_that_wakes_up_writes_nothing_under_its_old_session(
    group: Daemons, etcd: EmbeddedEtcd, journal: Journal, sample_env: dict[str, str], tmp_path: Path
) -> None:
    """A coordinator that is frozen for longer than its time to live. Its jobs end meanwhile: it hears of that when it
    goes on, before anything else.
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
        group.eventually(lambda: len({p for p, *_ in journal.lines()}) == 4, "their jobs write")
        bob.freeze()
        hold.touch()
        assert operation.wait(90).state == "success", group.tails()
        thawed = boottime()
        bob.thaw()
        group.eventually(lambda: "bob" in group.live() and old not in group.client.nodes(), "bob begins anew", "bob")
        assert_nothing_was_written(recorder, thawed)
        assert bob.stop() == 0
    history = read_history(group.endpoint)
    led = [c.kv.key for _, changes in history for c in changes if c.kv.value == old.encode()]
    assert led == ["distOpCoordinator.t.writing"], "bob coordinated"
    assert_never_named_again(history, old)
    assert_data(Written(group.endpoint, OperationRef.parse(operation.ref)), journal, 8, 5)


def test_a_deaf_job_loses_its_child_and_its_neighbours_are_not_blamed(
    group: Daemons, journal: Journal, sample_env: dict[str, str], tmp_path: Path
) -> None:
    """Cancelling an operation whose job does not listen kills the child; another operation's jobs in it are run
    again, and nothing is held against them."""
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
    group.eventually(lambda: other.lines(), "its neighbour runs")
    deaf.cancel()
    assert deaf.wait(60).state == "cancelled", group.tails()
    assert not session_members(child), "the child was killed"
    hold.touch()
    assert neighbour.wait(60).state == "success", group.tails()
    written = Written(group.endpoint, OperationRef.parse(neighbour.ref))
    assert all('"failures":0' in claim for claims in written.claims.values() for claim in claims), written.claims
    assert_data(written, other, 1, 3)
    assert len(list(Path(tmp_path, "ann").glob("**/*.log"))) > 0
