"""The coordinator on real daemons: failing planners and completions, follow-up operations, and orphaned claims."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distop.protocol.executor_nodes import WAITS_FOR_STORE
from tests.support.behaviors import ROOT, install, python_path
from tests.support.contract import dump
from tests.support.coordinator_behaviors import BUSY, ENTRY_POINTS
from tests.support.replay import read_history

if TYPE_CHECKING:
    from tests.support.daemons import Daemon, Daemons

TABLE = "t"


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the operation types ``stumbling``, ``reporting`` and ``alone`` for the daemons of the test."""
    site = tmp_path / "site"
    site.mkdir()
    install(site, "distop-stumbling", ENTRY_POINTS)
    monkeypatch.setenv("PYTHONPATH", python_path(site, ROOT)["PYTHONPATH"])


def diary(tmp_path: Path) -> list[str]:
    path = tmp_path / "diary"
    return path.read_text().splitlines() if path.exists() else []


def argument(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {"diary": str(tmp_path / "diary"), **more}


def test_an_operation_whose_planner_hangs_can_be_cancelled(group: Daemons, tmp_path: Path) -> None:
    group.start("ann")
    operation = group.client.start_operation("stumbling", TABLE, argument(tmp_path, plan="hang"))
    group.eventually(lambda: diary(tmp_path), "planning has started")
    operation.cancel()
    result = operation.wait(60)
    assert result.state == "cancelled", group.tails()
    assert diary(tmp_path) == ["plan"]
    # The node works again, and the hung planner does not count as a failure of the next operation.
    assert group.client.start_operation("stumbling", TABLE, argument(tmp_path)).wait(60).state == "success"


def test_a_paused_planner_starts_again_on_resume(group: Daemons, tmp_path: Path) -> None:
    group.start("ann")
    operation = group.client.start_operation("stumbling", TABLE, argument(tmp_path, plan="wait"))
    group.eventually(lambda: len(diary(tmp_path)) == 1, "planning has started")
    for tries in (2, 3, 4):  # more often than a planner may fail
        operation.pause()
        operation.resume()
        group.eventually(lambda n=tries: len(diary(tmp_path)) == n, "planning has started again")  # type: ignore[misc]
    assert not dump(group.endpoint, f"distOp.{TABLE}.stumbling.1.planning")
    operation.cancel()
    assert operation.wait(60).state == "cancelled", group.tails()


def test_planning_and_completion_that_wait_for_a_busy_store_say_so(group: Daemons, tmp_path: Path) -> None:
    """Only the log of the executor said it. Each call would count as a failed attempt, of which two are allowed."""
    group.start("ann")
    actions = {what: f"busy {tmp_path / what}" for what in ("plan", "complete")}
    operation = group.client.start_operation("stumbling", TABLE, argument(tmp_path, **actions))
    reason, doing = f"the store of its table, on ann ({BUSY})", f"{WAITS_FOR_STORE}: {BUSY}"

    def shown() -> tuple[str, str | None, tuple[str, ...]]:
        status = operation.status()
        return status.stage, status.waiting_for, tuple(one["text"] for one in status.doing)

    for what, stage in (("plan", "planning"), ("complete", "completing")):
        expected = stage, reason, (doing,)
        group.eventually(lambda expected=expected: shown() == expected, f"{stage}: the reason is shown")  # type: ignore[misc]
        assert reason in [one.text for one in group.client.why(operation.ref).reasons]
        (tmp_path / what).touch()
    assert operation.wait(120).state == "success", group.tails()
    assert {call: diary(tmp_path).count(call) > 1 for call in ("plan", "complete")} == {"plan": True, "complete": True}
    group.eventually(lambda: "doing" not in str(dump(group.endpoint, "distOpNode.")), "the executor reports no more")


@pytest.mark.parametrize(
    ("arg", "calls", "text"),
    [
        ({"plan": "error"}, ["plan", "plan"], "no listing today"),
        pytest.param({"plan": "wrong"}, ["plan"], "the location is wrong", marks=pytest.mark.rotating),
        ({"complete": "error"}, ["plan", "complete", "complete"], "no report today"),
        pytest.param({"complete": "wrong"}, ["plan", "complete"], "the report is wrong", marks=pytest.mark.rotating),
    ],
)
def test_an_error_of_planning_or_completion_fails_the_operation(
    group: Daemons, tmp_path: Path, arg: dict[str, str], calls: list[str], text: str
) -> None:
    group.start("ann")
    result = group.client.start_operation("stumbling", TABLE, argument(tmp_path, **arg)).wait(60)
    assert result.state == "failed", group.tails()
    assert diary(tmp_path) == calls
    assert text in str(result.errors)


def has_decision(group: Daemons, number: int) -> bool:
    """Whether a decision was ever written for this operation of type ``reporting``."""
    key = f"distOp.{TABLE}.reporting.{number}.decision"
    return any(change.kv.key == key for _, changes in read_history(group.endpoint) for change in changes)


@pytest.mark.parametrize(
    ("arg", "calls", "text", "after_decision"),
    [
        ({}, ["plan", "complete"], "", False),
        ({"complete": "error"}, ["plan", "complete", "complete"], "no report today", True),
        pytest.param(
            {"complete": "wrong"}, ["plan", "complete"], "the report is wrong", True, marks=pytest.mark.rotating
        ),
    ],
)
def test_a_completion_that_only_reports_runs_before_the_decision(
    group: Daemons, tmp_path: Path, arg: dict[str, str], calls: list[str], text: str, after_decision: bool
) -> None:
    group.start("ann")
    result = group.client.start_operation("reporting", TABLE, argument(tmp_path, **arg)).wait(60)
    assert result.state == ("failed" if text else "success"), group.tails()
    assert diary(tmp_path) == calls
    assert text in str(result.errors)
    assert has_decision(group, 1) is after_decision


def test_a_report_with_a_follow_up_operation_has_a_decision(group: Daemons, tmp_path: Path) -> None:
    group.start("ann")
    gate = tmp_path / "gate"
    gate.touch()
    leader = group.client.start_operation("reporting", TABLE, argument(tmp_path, complete="follow", gate=str(gate)))
    assert leader.wait(60).state == "success", group.tails()
    history_key = f"distOpHistory.{TABLE}.alone.1"
    group.eventually(lambda: history_key in dump(group.endpoint, "distOpHistory."), "the follow-up operation has ended")
    assert diary(tmp_path) == ["plan", "complete"]
    assert has_decision(group, 1)


def test_a_cancel_during_a_report_cancels_the_operation(group: Daemons, tmp_path: Path) -> None:
    group.start("ann")
    operation = group.client.start_operation("reporting", TABLE, argument(tmp_path, complete="hang"))
    group.eventually(lambda: "complete" in diary(tmp_path), "the report is being made")
    operation.cancel()
    assert operation.wait(60).state == "cancelled", group.tails()
    assert diary(tmp_path) == ["plan", "complete", "complete"], (
        "the report of a cancelled operation is made after the decision"
    )
    assert has_decision(group, 1)


def test_a_drained_executor_finishes_a_report_in_progress(group: Daemons, tmp_path: Path) -> None:
    """There is no other executor, and all jobs have ended, so that the drained executor holds none."""
    group.start("ann")
    gate = tmp_path / "gate"
    operation = group.client.start_operation("reporting", TABLE, argument(tmp_path, complete=f"until {gate}"))
    group.eventually(lambda: "complete" in diary(tmp_path), "the report is being made")
    group.client.drain("ann")
    group.eventually(lambda: all(node.state == "draining" for node in group.client.nodes().values()), "ann drains")
    gate.touch()
    assert operation.wait(60).state == "success", group.tails()
    assert diary(tmp_path) == ["plan", "complete"]


def test_a_completion_with_effects_runs_after_the_decision(group: Daemons, tmp_path: Path) -> None:
    """The operation was started by a daemon whose completion only reported."""
    (ann,) = group.start("ann")
    gate = tmp_path / "gate"
    operation = group.client.start_operation("reporting", TABLE, argument(tmp_path, gate=str(gate)))
    group.eventually(lambda: "plan" in diary(tmp_path), "the operation is planned")
    ann.kill()
    group.start("bob", env={"EFFECTS": "1"})
    gate.touch()
    assert operation.wait(60).state == "success", group.tails()
    assert has_decision(group, 1)


STUMBLES = {"STUMBLES": "1"}
CALLS = pytest.mark.parametrize(
    ("call", "calls"),
    [("plan", ["plan"]), pytest.param("complete", ["plan", "complete"], marks=pytest.mark.rotating)],
)


def led_by_ann(group: Daemons, tmp_path: Path) -> Daemon:
    """The coordinator: a node on which planning and completion fail if the argument says ``node``."""
    (ann,) = group.start("ann", env=STUMBLES)
    arg = {"diary": str(tmp_path / "before")}
    assert group.client.start_operation("stumbling", TABLE, arg).wait(60).state == "success"
    return ann


def coordinator(group: Daemons) -> str:
    (leader,) = dump(group.endpoint, f"distOpCoordinator.{TABLE}.stumbling").values()
    return group.client.nodes()[leader].executor


@CALLS
def test_a_call_that_fails_on_one_node_is_retried_on_another(
    group: Daemons, tmp_path: Path, call: str, calls: list[str]
) -> None:
    """Of two allowed attempts, the second runs on another node."""
    led_by_ann(group, tmp_path)
    group.start("bob")
    result = group.client.start_operation("stumbling", TABLE, argument(tmp_path, **{call: "node"})).wait(60)
    assert result.state == "success", group.tails()
    assert diary(tmp_path) == [*calls, *calls[-1:], *(["complete"] if call == "plan" else [])]
    assert coordinator(group) == "bob"


@CALLS
def test_a_call_that_fails_on_every_node_has_the_same_number_of_attempts(
    group: Daemons, tmp_path: Path, call: str, calls: list[str]
) -> None:
    ann = led_by_ann(group, tmp_path)
    group.start("bob", env=STUMBLES)
    result = group.client.start_operation("stumbling", TABLE, argument(tmp_path, **{call: "node"})).wait(60)
    assert result.state == "failed", group.tails()
    assert diary(tmp_path) == [*calls, *calls[-1:]]
    assert "Resigning as coordinator of stumbling on t: a call failed here" in ann.log.read_text()


def test_a_follow_up_operation_waits_for_a_conflicting_operation(group: Daemons, tmp_path: Path) -> None:
    (ann,) = group.start("ann")
    gate = tmp_path / "gate"
    first = group.client.start_operation("alone", TABLE, {"gate": str(gate)})
    leader = group.client.start_operation("stumbling", TABLE, argument(tmp_path, complete="follow", gate=str(gate)))
    assert leader.wait(60).state == "success"
    group.eventually(
        lambda: "Cannot start a follow-up operation; retrying" in ann.log.read_text(), "the start was refused"
    )
    ann.kill()
    ann.start()
    gate.touch()
    assert first.wait(60).state == "success"
    history_key = f"distOpHistory.{TABLE}.alone.2"
    group.eventually(
        lambda: history_key in dump(group.endpoint, "distOpHistory."), "the follow-up operation has ended", seconds=60
    )
    group.eventually(lambda: not dump(group.endpoint, "distOpPending."), "all keys are cleaned up")
    assert sorted(dump(group.endpoint, f"distOpHistory.{TABLE}.alone.")) == [
        f"distOpHistory.{TABLE}.alone.1",
        history_key,
    ]


def test_the_claims_of_a_dead_executor_are_removed(group: Daemons) -> None:
    daemons = group.start("ann", "bob")
    operation = group.client.start_operation("noop", TABLE, {"jobs": 800, "sleep": 600.0})

    def held(name: str) -> int:
        claims = dump(group.endpoint, f"distOpClaim.{TABLE}.noop.1.").values()
        return sum(f'"executor":"{name}"' in claim for claim in claims)

    group.eventually(lambda: held("ann") > 150 and held("bob") > 150, "both hold many claims")
    (leader,) = dump(group.endpoint, f"distOpCoordinator.{TABLE}.noop").values()
    victim = next(d for d in daemons if d.name != group.client.nodes()[leader].executor)
    victim.kill()
    operation.cancel()
    assert operation.wait(60).state == "cancelled", group.tails()
    group.eventually(lambda: not dump(group.endpoint, f"distOp.{TABLE}.noop.1."), "all keys are cleaned up")
    assert not dump(group.endpoint, "distOpClaim.")
