"""The coordinator on real daemons: planners that hang and fail, what follows an operation, and claims nobody holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.behaviors import ROOT, install, python_path
from tests.support.contract import dump
from tests.support.coordinator_behaviors import ENTRY_POINTS
from tests.support.replay import read_history

if TYPE_CHECKING:
    from tests.support.daemons import Daemon, Daemons

TABLE = "t"


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operation types ``stumbling``, ``reporting`` and ``alone``, for the daemons of the test."""
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
    group.eventually(lambda: diary(tmp_path), "planning goes on")
    operation.cancel()
    result = operation.wait(60)
    assert result.state == "cancelled", group.tails()
    assert diary(tmp_path) == ["plan"]
    # The node is of use again, and the hung planner was not held against the next operation.
    assert group.client.start_operation("stumbling", TABLE, argument(tmp_path)).wait(60).state == "success"


def test_a_paused_planner_begins_anew(group: Daemons, tmp_path: Path) -> None:
    group.start("ann")
    operation = group.client.start_operation("stumbling", TABLE, argument(tmp_path, plan="wait"))
    group.eventually(lambda: len(diary(tmp_path)) == 1, "planning goes on")
    for tries in (2, 3, 4):  # more often than failures are allowed
        operation.pause()
        operation.resume()
        group.eventually(lambda n=tries: len(diary(tmp_path)) == n, "planning goes on again")  # type: ignore[misc]
    assert not dump(group.endpoint, f"distOp.{TABLE}.stumbling.1.planning")
    operation.cancel()
    assert operation.wait(60).state == "cancelled", group.tails()


@pytest.mark.parametrize(
    ("told", "written", "text"),
    [
        ({"plan": "error"}, ["plan", "plan"], "no listing today"),
        ({"plan": "wrong"}, ["plan"], "the location is wrong"),
        ({"complete": "error"}, ["plan", "complete", "complete"], "no report today"),
        ({"complete": "wrong"}, ["plan", "complete"], "the report is wrong"),
    ],
)
def test_planning_and_completion_fail_though_jobs_cannot(
    group: Daemons, tmp_path: Path, told: dict[str, str], written: list[str], text: str
) -> None:
    group.start("ann")
    result = group.client.start_operation("stumbling", TABLE, argument(tmp_path, **told)).wait(60)
    assert result.state == "failed", group.tails()
    assert diary(tmp_path) == written
    assert text in str(result.errors)


def decided(group: Daemons, number: int) -> bool:
    """A decision was written of this operation of the type ``reporting``, at any time."""
    key = f"distOp.{TABLE}.reporting.{number}.decision"
    return any(change.kv.key == key for _, changes in read_history(group.endpoint) for change in changes)


@pytest.mark.parametrize(
    ("told", "written", "text", "after_decision"),
    [
        ({}, ["plan", "complete"], "", False),
        ({"complete": "error"}, ["plan", "complete", "complete"], "no report today", True),
        ({"complete": "wrong"}, ["plan", "complete"], "the report is wrong", True),
    ],
)
def test_a_report_alone_is_made_before_the_decision(
    group: Daemons, tmp_path: Path, told: dict[str, str], written: list[str], text: str, after_decision: bool
) -> None:
    group.start("ann")
    result = group.client.start_operation("reporting", TABLE, argument(tmp_path, **told)).wait(60)
    assert result.state == ("failed" if text else "success"), group.tails()
    assert diary(tmp_path) == written
    assert text in str(result.errors)
    assert decided(group, 1) is after_decision


def test_what_follows_a_report_is_decided_with_it(group: Daemons, tmp_path: Path) -> None:
    group.start("ann")
    gate = tmp_path / "gate"
    gate.touch()
    leader = group.client.start_operation("reporting", TABLE, argument(tmp_path, complete="follow", gate=str(gate)))
    assert leader.wait(60).state == "success", group.tails()
    ended = f"distOpHistory.{TABLE}.alone.1"
    group.eventually(lambda: ended in dump(group.endpoint, "distOpHistory."), "what follows has followed")
    assert diary(tmp_path) == ["plan", "complete"]
    assert decided(group, 1)


def test_a_cancel_while_a_report_is_made_is_not_overlooked(group: Daemons, tmp_path: Path) -> None:
    group.start("ann")
    operation = group.client.start_operation("reporting", TABLE, argument(tmp_path, complete="hang"))
    group.eventually(lambda: "complete" in diary(tmp_path), "the report is being made")
    operation.cancel()
    assert operation.wait(60).state == "cancelled", group.tails()
    assert diary(tmp_path) == ["plan", "complete", "complete"], "of a cancelled operation it is made after the decision"
    assert decided(group, 1)


def test_a_report_that_is_being_made_is_brought_to_its_end_by_a_drained_executor(
    group: Daemons, tmp_path: Path
) -> None:
    """Nobody else could; and its jobs have all ended, so that it holds nothing."""
    group.start("ann")
    gate = tmp_path / "gate"
    operation = group.client.start_operation("reporting", TABLE, argument(tmp_path, complete=f"until {gate}"))
    group.eventually(lambda: "complete" in diary(tmp_path), "the report is being made")
    group.client.drain("ann")
    group.eventually(lambda: all(node.state == "draining" for node in group.client.nodes().values()), "ann drains")
    gate.touch()
    assert operation.wait(60).state == "success", group.tails()
    assert diary(tmp_path) == ["plan", "complete"]


def test_code_that_does_more_than_a_report_runs_after_the_decision(group: Daemons, tmp_path: Path) -> None:
    """The operation was started when the installed code made a report only."""
    (ann,) = group.start("ann")
    gate = tmp_path / "gate"
    operation = group.client.start_operation("reporting", TABLE, argument(tmp_path, gate=str(gate)))
    group.eventually(lambda: "plan" in diary(tmp_path), "it is planned")
    ann.kill()
    group.start("bob", env={"EFFECTS": "1"})
    gate.touch()
    assert operation.wait(60).state == "success", group.tails()
    assert decided(group, 1)


STUMBLES = {"STUMBLES": "1"}
CALLS = pytest.mark.parametrize(("call", "written"), [("plan", ["plan"]), ("complete", ["plan", "complete"])])


def led_by_ann(group: Daemons, tmp_path: Path) -> Daemon:
    """A node on which planning and completion fail if they are told to, and which coordinates."""
    (ann,) = group.start("ann", env=STUMBLES)
    arg = {"diary": str(tmp_path / "before")}
    assert group.client.start_operation("stumbling", TABLE, arg).wait(60).state == "success"
    return ann


def coordinator(group: Daemons) -> str:
    (leader,) = dump(group.endpoint, f"distOpCoordinator.{TABLE}.stumbling").values()
    return group.client.nodes()[leader].executor


@CALLS
def test_what_fails_on_one_node_is_tried_on_another(
    group: Daemons, tmp_path: Path, call: str, written: list[str]
) -> None:
    """Two attempts are allowed: the second is not made where the first has failed."""
    led_by_ann(group, tmp_path)
    group.start("bob")
    result = group.client.start_operation("stumbling", TABLE, argument(tmp_path, **{call: "node"})).wait(60)
    assert result.state == "success", group.tails()
    assert diary(tmp_path) == [*written, *written[-1:], *(["complete"] if call == "plan" else [])]
    assert coordinator(group) == "bob"


@CALLS
def test_what_fails_on_every_node_fails_after_as_many_attempts_as_on_one(
    group: Daemons, tmp_path: Path, call: str, written: list[str]
) -> None:
    ann = led_by_ann(group, tmp_path)
    group.start("bob", env=STUMBLES)
    result = group.client.start_operation("stumbling", TABLE, argument(tmp_path, **{call: "node"})).wait(60)
    assert result.state == "failed", group.tails()
    assert diary(tmp_path) == [*written, *written[-1:]]
    assert "Resigning as coordinator of stumbling on t: a call failed here" in ann.log.read_text()


def test_what_follows_waits_for_what_excludes_it(group: Daemons, tmp_path: Path) -> None:
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
    ended = f"distOpHistory.{TABLE}.alone.2"
    group.eventually(lambda: ended in dump(group.endpoint, "distOpHistory."), "the second one followed", seconds=60)
    group.eventually(lambda: not dump(group.endpoint, "distOpPending."), "everything is cleaned up")
    assert sorted(dump(group.endpoint, f"distOpHistory.{TABLE}.alone.")) == [f"distOpHistory.{TABLE}.alone.1", ended]


def test_the_claims_of_a_dead_executor_are_reaped_together(group: Daemons) -> None:
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
    group.eventually(lambda: not dump(group.endpoint, f"distOp.{TABLE}.noop.1."), "everything is cleaned up")
    assert not dump(group.endpoint, "distOpClaim.")
