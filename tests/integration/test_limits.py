"""Priorities, limits, selectors and failure budgets on real daemons.

The audit of etcd's history checks limits at each revision (invariant 16) and the labels of executors (17).
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING

import pytest

from distop.errors import InvalidArgument, NotAllowed
from tests.support.daemons import distop_process

if TYPE_CHECKING:
    from distop.blocking import Operation
    from tests.support.daemons import Daemons

pytestmark = pytest.mark.etcd

TABLE = "t"
LIMIT = 90


def noop(group: Daemons, jobs: int = 1, sleep: float = 0.0, fail: tuple[str, ...] = (), **options: object) -> Operation:
    return group.client.start_operation("noop", TABLE, {"jobs": jobs, "sleep": sleep, "fail": list(fail)}, **options)


def finished(op: Operation) -> datetime:
    return datetime.fromisoformat(op.wait(LIMIT).record["finished"])


def test_L35_max_jobs_holds_after_a_kill_and_can_be_altered(group: Daemons) -> None:
    first, _ = group.start("e1", "e2")
    op = noop(group, jobs=16, sleep=0.2, max_jobs=2, retry_attempts=9)
    seen = []

    def enough_jobs_ended(ended: int) -> bool:
        status = op.status()
        seen.append(status.jobs["running"])
        return status.ended or (status.jobs["success"] or 0) >= ended

    group.eventually(lambda: enough_jobs_ended(3), "three jobs have ended")
    assert max(seen) <= 2
    op.alter(max_jobs=1)
    first.kill()
    group.eventually(lambda: enough_jobs_ended(6), "six jobs have ended")
    first.start()
    op.alter(max_jobs=0, max_jobs_per_executor=2, priority=3)
    assert op.status().options == {"priority": 3, "max_jobs_per_executor": 2}
    assert op.wait(LIMIT).state == "success"
    with pytest.raises(NotAllowed, match="ended as success"):
        op.alter(max_jobs=3)


def test_L35_an_operation_with_higher_priority_runs_first(group: Daemons) -> None:
    group.start("e1")
    blockers = [noop(group, sleep=5.0) for _ in range(2)]
    group.eventually(lambda: all(op.status().jobs["running"] for op in blockers), "both slots are taken")
    low = [noop(group, sleep=0.5) for _ in range(6)]
    high = noop(group, sleep=0.5, priority=9)
    lower = noop(group, sleep=0.5, priority=-1)
    waiting = (*low, high, lower)
    group.eventually(lambda: all(op.status().stage == "open" or op.status().ended for op in waiting), "all are open")
    end = finished(high)
    assert sum(finished(op) > end for op in low) >= 4
    assert finished(lower) > end


def test_an_operation_with_a_selector_runs_only_on_executors_with_the_label(group: Daemons) -> None:
    group.start("e1", options=("--label", "zone=a"))
    op = noop(group, jobs=4, where={"zone": "b"})
    cluster_operation = group.client.start_operation("noop", "@cluster", {}, where={"zone": "b"})
    for one in (op, cluster_operation):
        reason = "an executor that offers `noop` and has the labels zone=b"
        group.eventually(
            lambda one=one, reason=reason: one.status().waiting_for == reason, "status reports the missing label"
        )
    anywhere = noop(group, jobs=2)
    assert anywhere.wait(LIMIT).state == "success", "another operation does not wait for it"
    group.start("e2", options=("--label", "zone=b"))
    assert op.wait(LIMIT).state == "success"
    assert cluster_operation.wait(LIMIT).state == "success"
    both = [noop(group, jobs=2, where={"zone": zone}) for zone in "abab"]
    assert [one.wait(LIMIT).state for one in both] == ["success"] * 4


def test_an_operation_fails_once_more_than_max_failed_jobs_have_failed(group: Daemons) -> None:
    group.start("e1")
    within_budget = noop(group, jobs=10, fail=("1", "4"), max_failed="20%", failure_policy="fail_fast").wait(LIMIT)
    assert (within_budget.state, within_budget.jobs) == ("failed", {"total": 10, "success": 8, "failed": 2})
    over_budget = noop(group, jobs=200, sleep=0.05, fail=("0", "1", "2"), max_failed=1, max_jobs=2).wait(LIMIT)
    assert over_budget.state == "failed"
    assert over_budget.record["cancel"]["reason"] == "failed"
    assert over_budget.record["cancel"]["text"].endswith("of 200 jobs failed, where 1 may")
    assert over_budget.jobs["success"] < 197


def test_invalid_input_is_refused_in_one_line_and_changes_nothing(group: Daemons) -> None:
    group.start("e1")
    op = noop(group, jobs=2, sleep=0.1, max_jobs=1)
    for options in (("--max-jobs", "-1"), ("--priority", "high"), ("--max-failed", "few"), ()):
        ran = distop_process(group, "alter", op.ref, *options)
        assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1), ran.stderr
    for options in (("--where", "zone"), ("--where", "z=a", "--where", "z=b"), ("--max-jobs", "x")):
        ran = distop_process(group, "start", "noop", TABLE, *options)
        assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1), ran.stderr
    with pytest.raises(InvalidArgument, match="there is nothing to alter"):
        op.alter()
    assert op.wait(LIMIT).state == "success"
    ran = distop_process(group, "alter", op.ref, "--max-jobs", "4", "--priority", "9")
    assert (ran.returncode, ran.stderr.count("\n")) == (5, 1)
    assert "can no longer be altered" in ran.stderr
    assert len(group.client.history(TABLE)) == 1


def test_a_pending_operation_is_altered_from_the_command_line(group: Daemons) -> None:
    group.start("e1")
    ran = distop_process(
        group, "start", "noop", TABLE, "--delay", "3600", "--priority", "2", "--max-jobs", "3", "--json"
    )
    op = group.client.operation(json.loads(ran.stdout)["op"])
    ran = distop_process(group, "alter", op.ref, "--max-jobs", "4", "--priority", "9")
    assert (ran.returncode, ran.stdout) == (0, f"{op.ref} is altered: priority 9, max jobs 4\n"), ran.stderr
    assert op.status().options == {"priority": 9, "max_jobs": 4}
    op.cancel()
    assert op.wait(LIMIT).state == "cancelled"
