"""Draining an executor: it releases its jobs without failures, others take over, and it stays drained until undone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from distop.errors import NotFound
from distop.protocol.records import OperationRef
from tests.support.behaviors import sample_env  # noqa: F401
from tests.support.command import distop_command  # noqa: F401
from tests.support.contract import dump
from tests.support.replay import Written
from tests.support.step_control import ALL, Steps

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.command import Ran
    from tests.support.daemons import Daemons

pytestmark = pytest.mark.rotating

TABLE = "t"


@pytest.fixture
def steps(tmp_path: Path) -> Steps:
    return Steps(tmp_path / "steps")


def claims(group: Daemons) -> dict[str, int]:
    """The number of claims that each executor holds."""
    held: dict[str, int] = {}
    for value in dump(group.endpoint, "distOpClaim.").values():
        claim = json.loads(value)
        if "incarnation" in claim:
            held[claim["executor"]] = held.get(claim["executor"], 0) + 1
    return held


def node_state(group: Daemons, executor: str) -> str:
    """The state in an executor's node record."""
    nodes = [json.loads(value) for value in dump(group.endpoint, "distOpNode.").values()]
    return next(node["state"] for node in nodes if node["executor"] == executor)


def test_other_executors_continue_from_the_checkpoints_of_a_drained_executor(
    group: Daemons,
    steps: Steps,
    sample_env: dict[str, str],  # noqa: F811
    distop_command: Callable[..., Ran],  # noqa: F811
) -> None:
    etcd_options = ("--etcd", group.endpoint)
    group.start("ann", ttl=30, env=sample_env)
    op = group.client.start_operation("steps", TABLE, steps.arg("a", "b", hold=[3]))
    group.eventually(lambda: steps.at("a", 2) and steps.at("b", 2), "ann holds both")
    group.start("bob", ttl=30, env=sample_env)
    ran = distop_command("drain", "ann", "--wait", "--timeout", "30", "--json", *etcd_options)
    assert (ran.code, ran.json) == (0, {"executor": "ann", "state": "drained"})
    assert node_state(group, "ann") == "drained"
    nodes = distop_command("nodes", "--json", *etcd_options).json
    assert {node["executor"]: node["state"] for node in nodes} == {"ann": "drained", "bob": "active"}
    group.eventually(lambda: claims(group) == {"bob": 2}, "bob took over at once")
    incarnation = dump(group.endpoint, f"distOpCoordinator.{TABLE}.steps").popitem()[1]
    assert group.client.nodes()[incarnation].executor == "bob"
    steps.go("a", 3)
    steps.go("b", 3)
    assert op.wait(60).state == "success"
    assert (steps.starts("a"), steps.output("a"), steps.output("b")) == ([0, 2], ALL, ALL)
    written = Written(group.endpoint, OperationRef.parse(op.ref))
    assert not any(json.loads(claim)["failures"] for attempts in written.claims.values() for claim in attempts)


def test_a_drain_survives_the_executor_and_ends_when_undone(
    group: Daemons,
    distop_command: Callable[..., Ran],  # noqa: F811
) -> None:
    etcd_options = ("--etcd", group.endpoint)
    (ann,) = group.start("ann")
    assert group.client.drain("ann", wait=True, timeout=30) == "drained"
    assert ann.stop() == 0
    ann.start()
    group.await_ready("ann")
    op = group.client.start_operation("noop", TABLE, {"jobs": 2})
    group.eventually(lambda: node_state(group, "ann") == "drained", "its node record says that it is drained")
    waiting_for = "an executor that offers `noop` and is not drained (`distop drain ann --undo`)"
    assert op.status().waiting_for == waiting_for
    assert waiting_for in distop_command("show", op.ref, *etcd_options).out
    ran = distop_command("drain", "ann", "--undo", *etcd_options)
    assert (ran.code, ran.out) == (0, "ann runs jobs again\n")
    assert op.wait(60).state == "success"
    group.eventually(lambda: node_state(group, "ann") == "active", "its node record says that it is active")
    ran = distop_command("drain", "ann", "--undo", *etcd_options)
    assert (ran.code, ran.out) == (0, "ann is not drained: nothing to undo\n")


def test_a_cancel_ends_when_the_only_executor_is_drained(
    group: Daemons,
    steps: Steps,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    group.start("ann", env=sample_env)
    op = group.client.start_operation("steps", TABLE, steps.arg("a", "b", "c", hold=[2]))
    group.eventually(lambda: steps.at("a", 1) and steps.at("b", 1), "two of three hold")
    group.client.drain("ann", wait=True, timeout=30)
    assert steps.output("a") == ["1"]
    op.cancel()
    assert op.wait(60).state == "cancelled"
    assert steps.output("a") == [], "the output of a released job was cleaned up"
    group.eventually(lambda: node_state(group, "ann") == "drained", "it is drained again")


def test_a_drained_node_does_not_reduce_the_shares_of_others(group: Daemons) -> None:
    group.start("ann", "bob", "eve")
    group.client.drain("eve", wait=True, timeout=30)
    op = group.client.start_operation("noop", TABLE, {"jobs": 40, "sleep": 0.01})
    assert op.wait(60).state == "success"
    written = Written(group.endpoint, OperationRef.parse(op.ref))
    by = [json.loads(attempts[0])["executor"] for attempts in written.claims.values()]
    assert (by.count("ann"), by.count("bob"), by.count("eve")) == (20, 20, 0)


def test_draining_an_unknown_executor_is_refused(
    group: Daemons,
    distop_command: Callable[..., Ran],  # noqa: F811
) -> None:
    group.start("ann")
    ran = distop_command("drain", "eve", "--etcd", group.endpoint)
    assert (ran.code, ran.sentence) == (4, "there is no executor 'eve' (alive: ann); see `distop nodes`")
    with pytest.raises(NotFound):
        group.client.undrain("eve")
    group.client.undrain("ann")  # it is not drained, which is no error
    assert node_state(group, "ann") == "active"
    assert distop_command("drain", "ann", "--undo", "--wait", "--etcd", group.endpoint).code == 2


@pytest.mark.parametrize("ends", ["drained", "stopped"])
def test_a_drain_during_planning_leaves_no_unretrieved_error(
    ends: str,
    group: Daemons,
    tmp_path: Path,
    sample_env: dict[str, str],  # noqa: F811
    distop_command: Callable[..., Ran],  # noqa: F811
) -> None:
    """The fixture ``daemons`` checks the executor's log after its end."""
    (ann,) = group.start("ann", ttl=30, env=sample_env)
    op = group.client.start_operation("sample", TABLE, {"does": {"once": ""}, "names": ["a"]})
    planning = tmp_path / "ann" / "ops" / op.ref / "once"
    group.eventually(planning.exists, "ann has started planning")
    group.start("bob", ttl=30, env=sample_env)
    if ends == "drained":
        ran = distop_command("drain", "ann", "--wait", "--timeout", "60", "--etcd", group.endpoint)
        assert ran.code == 0, ran
    else:
        assert ann.stop() == 0
    # Bob plans the operation for the first time, which blocks, too.
    group.eventually((tmp_path / "bob" / "ops" / op.ref / "once").exists, "bob has started planning")
    op.cancel()
    assert op.wait(60).state == "cancelled", group.tails()
