"""A node without a behavior neither coordinates its operations nor runs their jobs."""

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


def coordinator_of_steps(group: Daemons) -> str:
    """The live executor that coordinates ``steps``, or "" if there is none."""
    node = group.client.nodes().get(dump(group.endpoint, ELECTION).get(ELECTION, ""))
    return node.executor if node is not None else ""


def test_an_operation_waits_for_the_only_node_that_has_its_behavior(
    group: Daemons,
    tmp_path: Path,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    """F39: the coordinator is killed, and the other node lacks the code for planning and completion."""
    steps = Steps(tmp_path / "steps")
    group.start("ann")
    (bob,) = group.start("bob", env=sample_env)
    operation = group.client.start_operation("steps", TABLE, steps.arg("a", hold=[3]))
    group.eventually(lambda: steps.at("a", 2), "bob runs the job")
    assert coordinator_of_steps(group) == "bob"
    bob.kill()
    group.eventually(lambda: group.live() == {"ann"}, "bob's session has ended")
    # A whole operation on ann shows that ann had the time to take over the other one.
    assert group.client.start_operation("noop", TABLE, {"jobs": 5}).wait(60).state == "success"
    assert coordinator_of_steps(group) == ""
    assert operation.status().state == "running"
    steps.go("a", 3)
    bob.start()
    assert operation.wait(60).state == "success", group.tails()
    assert coordinator_of_steps(group) in ("bob", "")
    assert steps.output("a") == ALL
