"""Faults of a whole machine, simulated with all processes of one daemon: a suspension, and a restart."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from distop.protocol.records import OperationRef
from distop.worker.guardian import boottime, session_members
from tests.faults.recording import Recorder
from tests.faults.test_self_fencing import (
    assert_incarnation_not_named_after_its_end,
    assert_no_writes_under_old_session,
    child_of,
)
from tests.integration.test_daemons import holders
from tests.support.processes import children, machine, signal_all
from tests.support.replay import Written, read_history
from tests.support.step_control import ALL, Steps
from tests.support.writing import assert_data

if TYPE_CHECKING:
    from pathlib import Path

    from distop.store.embedded import EmbeddedEtcd
    from tests.support.daemons import Daemons
    from tests.support.writing import Journal

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(180), pytest.mark.rotating]

TABLE = "t"
JOBS, ROWS = 8, 10


@pytest.mark.overlaps
def test_a_suspended_machine_wakes_up_fenced(
    group: Daemons, etcd: EmbeddedEtcd, journal: Journal, sample_env: dict[str, str]
) -> None:
    """F20, F34: its jobs were taken over in the meantime. After waking up, it writes nothing under its old session, and
    its child is killed. The child may write files for a moment, which no outcome names (docs/internals/guarantees.md).
    """
    with Recorder(etcd.endpoint) as recorder:
        bob = group.spawn("bob", "--etcd", recorder.endpoint, ttl=4, env=sample_env)
        group.start("ann", ttl=4, env=sample_env)
        group.await_ready("bob")
        arg = {"jobs": JOBS, "rows": ROWS, "pause": 0.1, "journal": str(journal.path)}
        operation = group.client.start_operation("writing", TABLE, arg)
        group.eventually(lambda: len(holders(group)) == 2, "both hold claims")
        (old,) = [inc for inc, node in group.client.nodes().items() if node.executor == "bob"]
        child, guardian = child_of(bob), next(iter(children(bob.pid)))
        assert {bob.pid, guardian, child, *children(guardian), *session_members(child)} <= set(bob.suspend())
        try:
            assert operation.wait(90).state == "success", group.tails()
        finally:
            woke = boottime()
            bob.wake()
        group.eventually(lambda: not session_members(child), "its child is dead", "bob")
        group.eventually(
            lambda: "bob" in group.live() and old not in group.client.nodes(), "bob has a new session", "bob"
        )
        assert_no_writes_under_old_session(recorder, woke)
        assert bob.stop() == 0
    assert_incarnation_not_named_after_its_end(read_history(group.endpoint), old)
    written = Written(group.endpoint, OperationRef.parse(operation.ref))
    assert any('"executor":"bob"' in claims[0] for claims in written.claims.values())
    assert_data(written, journal, JOBS, ROWS, overlaps=True)


def test_a_job_continues_from_its_checkpoint_after_a_machine_restart(
    group: Daemons, tmp_path: Path, sample_env: dict[str, str]
) -> None:
    """F27: all processes are killed at once, without clean-up or reports. The disk keeps its files, and the job
    continues there from its checkpoint.
    """
    steps = Steps(tmp_path / "steps")
    (ann,) = group.start("ann", ttl=4, env=sample_env)
    operation = group.client.start_operation("steps", TABLE, steps.arg("a", hold=[3]))
    group.eventually(lambda: steps.at("a", 2), "two steps are done")
    child = child_of(ann)
    signal_all(machine(ann.pid), signal.SIGKILL)
    ann.process.wait()
    group.eventually(lambda: not session_members(child), "all processes are dead")
    steps.go("a", 3)
    ann.start()
    assert operation.wait(60).state == "success", group.tails()
    assert (steps.starts("a"), steps.output("a")) == ([0, 2], ALL)
