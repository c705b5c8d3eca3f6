"""What a snapshot of an operation is judged to mean."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from distop.protocol.behavior_declaration import Rules
from distop.protocol.jobs import Claim
from distop.protocol.json_codec import rfc3339
from distop.protocol.plan import Plan
from distop.protocol.records import Attempts, Cancel, Decision, History, Node, OperationRef, Phase, Spec, State
from distop.services.inspection.status import Pace, Snapshot, judge

REF = OperationRef("t", "noop", "", 1)
STARTED = 1_000_000.0
CAPABLE = {"i1": Node("e1", "h", 2, ("noop",))}
HELD = Claim("e1", "i1", 1, 0)
WAITS = Claim("e1", "", 2, 1, rfc3339(STARTED + 50), "disk full")
DECIDED = Decision(State.SUCCESS, 10, 10, 0)
BROKEN = replace(DECIDED, attempts=2, error="no")
BEGIN = "its coordinator to start it, and operations on t that exclude it to end"
TRIED = "{}, attempt {} (the last one failed: {})"

RUNNING = Snapshot(REF, State.RUNNING, Phase.PLANNING, Spec("r", rfc3339(STARTED), "me", Rules()))
OPEN = replace(RUNNING, phase=None, plan=Plan(10, "", "", 1))


@pytest.mark.parametrize(
    ("snapshot", "stage", "words"),
    [
        (RUNNING, "planning", "planning"),
        (replace(RUNNING, planning=Attempts(1, "gone\nat x")), "planning", TRIED.format("planning", 2, "gone")),
        (OPEN, "open", "free slots"),
        (replace(OPEN, claims={0: HELD}), "open", None),
        (replace(OPEN, claims={0: WAITS}), "open", "free slots"),
        (replace(OPEN, success=9, claims={9: WAITS}), "open", f"retry of 1 job, the next at {rfc3339(STARTED + 50)}"),
        (replace(OPEN, success=8, failed=2), "open", "completion"),
        (replace(OPEN, state=State.PAUSED), "paused", "resume"),
        (replace(OPEN, state=State.PAUSED, claims={0: HELD}), "pausing", "1 job to finish"),
        (replace(OPEN, state=State.PAUSED, phase=Phase.HALTED, claims={0: HELD}), "pausing", "1 job to stop"),
        (replace(OPEN, state=State.CANCELLING, claims={0: HELD}), "cancelling", "its running jobs to stop"),
        (replace(OPEN, state=State.CANCELLING), "cancelling", "completion"),
        (replace(OPEN, decision=DECIDED), "completing", "completion"),
        (replace(OPEN, decision=BROKEN), "completing", TRIED.format("completion", 3, "no")),
        (replace(RUNNING, state=State.PENDING), "waiting", BEGIN),
    ],
)  # fmt: skip
def test_each_stage_has_its_reason_to_wait(snapshot: Snapshot, stage: str, words: str | None) -> None:
    seen = judge(snapshot, CAPABLE, STARTED + 10)
    assert (seen.stage, seen.waiting_for) == (stage, words)


def test_a_status_has_the_fields_of_the_later_history_record() -> None:
    record = History("t/noop/1", State.SUCCESS, "", "", 0, 0, 0).to_json()
    for snapshot in (RUNNING, OPEN, replace(OPEN, state=State.PAUSED), replace(OPEN, decision=DECIDED)):
        found = judge(snapshot, CAPABLE, STARTED).to_json()
        assert set(record) <= set(found)
        assert (found["finished"], found["report"], found["request_id"], found["submitter"]) == (None, None, "r", "me")
    again = replace(RUNNING, spec=Spec("r", "", "me", Rules(), rerun_of="t/noop/1"))
    assert judge(again, CAPABLE, STARTED).to_json()["rerun_of"] == "t/noop/1"


def test_the_jobs_failed_so_far_are_listed_as_ranges() -> None:
    snapshot = replace(OPEN, success=7, failed=3, failed_ranges="3,7-8")
    assert judge(snapshot, CAPABLE, STARTED).to_json()["failed"] == "3,7-8"
    decided = replace(DECIDED, failed=3, failed_ranges="1-2", failed_truncated=True)
    status = judge(replace(OPEN, decision=decided), CAPABLE, STARTED).to_json()
    assert (status["failed"], status["failed_truncated"]) == ("1-2", True)


@pytest.mark.parametrize("nodes", [{}, {"i2": Node("e2", "h", 2, ("other",))}])
def test_an_operation_without_a_capable_executor_waits_for_one(nodes: dict[str, Any]) -> None:
    for snapshot in (RUNNING, OPEN, replace(OPEN, claims={0: HELD})):
        assert judge(snapshot, nodes, STARTED).waiting_for == "an executor that offers `noop`"
    ends = "; if none starts within a minute, it ends without running its completion code" if nodes else ""
    cancelled = replace(OPEN, state=State.CANCELLING)
    assert judge(cancelled, nodes, STARTED).waiting_for == f"an executor that offers `noop`{ends}"


def test_the_reason_names_an_executor_that_cannot_run_the_type() -> None:
    unable = {"i1": Node("e1", "h", 2, (), unable={"noop": "Java 17 or newer is needed"})}
    reason = "an executor that offers `noop` (e1 cannot: Java 17 or newer is needed)"
    assert judge(OPEN, unable, STARTED).waiting_for == reason


def test_numbers() -> None:
    counted = replace(
        OPEN, success=4, failed=1, claims={5: HELD, 6: WAITS}, cancel=Cancel("user", "x"), pace=Pace(STARTED, 5)
    )
    seen = judge(counted, CAPABLE, STARTED + 20)
    assert seen.cancel == {"reason": "user", "text": "x"}
    assert seen.jobs == {"total": 10, "success": 4, "failed": 1, "running": 1, "waiting": 1}
    assert seen.progress == 0.5
    assert seen.eta_seconds == 20.0
    assert judge(OPEN, CAPABLE, STARTED + 20).eta_seconds is None
    assert judge(counted, CAPABLE, STARTED - 3600).eta_seconds == 0.0, "a clock behind the executors'"
    empty = judge(replace(OPEN, plan=Plan(0, "", "", 0)), CAPABLE, STARTED)
    assert (empty.progress, empty.waiting_for) == (1.0, "completion")
    assert not seen.ended
    assert seen.to_json()["errors"] == [{"partition": "6", "text": "disk full"}], "its name was not to be had"
    named = judge(replace(counted, names={6: "day=6"}), CAPABLE, STARTED + 20)
    assert named.errors == ({"partition": "day=6", "text": "disk full"},)


def test_the_remaining_time_follows_the_pace_of_running_jobs() -> None:
    paced = replace(OPEN, success=6, claims={6: HELD}, pace=Pace(STARTED + 100, 2))
    assert judge(paced, CAPABLE, STARTED + 110).eta_seconds == 20.0, "2 jobs took 10 s; 4 are left"
    assert judge(replace(paced, pace=Pace()), CAPABLE, STARTED + 110).eta_seconds is None, "none has ended since"
    for waits, nodes in (
        (paced, {}),
        (replace(paced, claims={}), CAPABLE),
        (replace(paced, state=State.PAUSED), CAPABLE),
    ):
        seen = judge(waits, nodes, STARTED + 110)
        assert seen.waiting_for is not None
        assert seen.eta_seconds is None, seen.waiting_for


def test_every_operation_waits_for_a_full_etcd() -> None:
    assert (judge(OPEN, CAPABLE, STARTED, ("NOSPACE",)).waiting_for or "").startswith("etcd to have space again")
    assert "space" not in (judge(OPEN, CAPABLE, STARTED, ("CORRUPT",)).waiting_for or "")


def test_reports_come_from_executors_that_hold_jobs_of_the_operation() -> None:
    saying = replace(CAPABLE["i1"], doing={str(REF): "scanning 9 files: 2 of 8 Spark tasks", "t/noop/2": "else"})
    nodes = {"i1": saying, "i2": replace(saying, executor="e2"), "i3": Node("e3", "h", 2, ("noop",))}
    held = replace(OPEN, claims={0: HELD, 1: replace(HELD, incarnation="i3"), 2: WAITS})
    statuses = [{"executor": "e1", "text": "scanning 9 files: 2 of 8 Spark tasks"}]
    assert judge(held, nodes, STARTED).to_json()["doing"] == statuses, "e2 holds none any more, and e3 says nothing"
    assert judge(OPEN, nodes, STARTED).doing == ()


def test_a_coordinator_reports_about_planning_and_completion() -> None:
    nodes = {"i1": replace(CAPABLE["i1"], doing={str(REF): "listing files"})}
    statuses = ({"executor": "e1", "text": "listing files"},)
    all_ended = replace(OPEN, success=10)
    for snapshot in (replace(OPEN, phase=Phase.PLANNING, plan=None), all_ended):
        assert judge(snapshot, nodes, STARTED).doing == statuses
