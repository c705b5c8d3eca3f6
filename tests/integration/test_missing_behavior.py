"""A node that lacks a behavior takes no part in its operations: it neither coordinates them nor runs their jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.behaviors import sample_env  # noqa: F401
from tests.support.contract import dump
from tests.support.step_control import ALL, Steps

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.daemons import Daemons

TABLE = "t"
ELECTION = f"distOpCoordinator.{TABLE}.steps"


def coordinates(group: Daemons) -> str:
    """The executor that coordinates ``steps``, empty for one that is gone."""
    node = group.client.nodes().get(dump(group.endpoint, ELECTION).get(ELECTION, ""))
    return node.executor if node is not None else ""


def test_an_operation_waits_for_the_only_node_that_has_its_behavior(
    group: Daemons,
    tmp_path: Path,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    """The coordinator is killed, and who is left has not the code to plan or to complete with (F39)."""
    steps = Steps(tmp_path / "steps")
    group.start("ann")
    (bob,) = group.start("bob", env=sample_env)
    operation = group.client.start_operation("steps", TABLE, steps.arg("a", hold=[3]))
    group.eventually(lambda: steps.at("a", 2), "bob runs it")
    assert coordinates(group) == "bob"
    bob.kill()
    group.eventually(lambda: group.live() == {"ann"}, "bob is gone")
    # One that ann serves from its start to its end shows that she had the time to take up the other.
    assert group.client.start_operation("noop", TABLE, {"jobs": 5}).wait(60).state == "success"
    assert coordinates(group) == ""
    assert operation.status().state == "running"
    steps.go("a", 3)
    bob.start()
    assert operation.wait(60).state == "success", group.tails()
    assert coordinates(group) in ("bob", "")
    assert steps.output("a") == ALL
