"""An executor that is killed and started again: what it had under way goes on, or is cleaned up (I17, I29)."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from distop.protocol.records import OperationRef
from tests.support.behaviors import sample_env  # noqa: F401
from tests.support.replay import Written
from tests.support.step_control import ALL, Steps

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.daemons import Daemon, Daemons

TABLE = "t"


@pytest.fixture
def steps(tmp_path: Path) -> Steps:
    return Steps(tmp_path / "steps")


def runs(group: Daemons, name: str) -> list[Path]:
    """What an executor has written down of its runs."""
    return sorted((group.folder / name / "runs").iterdir())


def private(group: Daemons, name: str, op: str) -> Path:
    """The private directory of an operation at an executor."""
    return group.folder / name / "ops" / op


def again(daemon: Daemon) -> None:
    daemon.kill()
    daemon.start()


def test_a_job_goes_on_from_its_checkpoint_where_its_state_is_through_two_kills(
    group: Daemons,
    steps: Steps,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    (ann,) = group.start("ann", ttl=10, env=sample_env)  # its session outlives its restart
    op = group.client.start_operation("steps", TABLE, steps.arg("a", hold=[3, 5]))
    group.eventually(lambda: steps.at("a", 2), "ann holds a")
    assert len(runs(group, "ann")) == 1, "it is written down"
    group.start("bob", env=sample_env)
    again(ann)
    group.eventually(lambda: len(steps.starts("a")) == 2, "a goes on")
    steps.go("a", 3)
    group.eventually(lambda: steps.at("a", 4), "a holds at its last step")
    again(ann)
    group.eventually(lambda: len(steps.starts("a")) == 3, "a goes on once more")
    steps.go("a", 5)
    result = op.wait(60)
    assert result.state == "success"
    assert (steps.starts("a"), steps.output("a")) == ([0, 2, 4], ALL)
    written = Written(group.endpoint, OperationRef.parse(op.ref))
    holders = {json.loads(claim)["executor"] for claim in written.claims[0]}
    assert holders == {"ann"}, "bob left it to the one that has its local state"
    assert not any(line.startswith("clean") for line in steps.diary())
    group.eventually(lambda: not runs(group, "ann") and not private(group, "ann", op.ref).exists(), "nothing is left")


def test_a_job_that_starts_over_is_cleaned_up_first(
    group: Daemons,
    steps: Steps,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    (ann,) = group.start("ann", env=sample_env)
    op = group.client.start_operation("restarting", TABLE, steps.arg("a", hold=[3]))
    group.eventually(lambda: steps.at("a", 2), "ann holds a")
    again(ann)
    steps.go("a", 3)
    assert op.wait(60).state == "success"
    assert (steps.starts("a"), steps.output("a")) == ([0, 0], ALL)
    assert steps.diary().index("clean a") < steps.diary().index("start a at 0 attempt 2")


@pytest.mark.parametrize("kind", ["steps", pytest.param("restarting", marks=pytest.mark.slow)])
def test_what_ran_elsewhere_meanwhile_is_cleaned_up_here_alone(
    group: Daemons,
    steps: Steps,
    sample_env: dict[str, str],  # noqa: F811
    kind: str,
) -> None:
    (ann,) = group.start("ann", env=sample_env)
    op = group.client.start_operation(kind, TABLE, steps.arg("a", "b", hold=[3]))
    group.eventually(lambda: steps.at("a", 2) and steps.at("b", 2), "ann holds both")
    group.start("bob", env=sample_env)
    ann.kill()
    assert len(runs(group, "ann")) == 2
    group.eventually(lambda: len(steps.starts("a")) == len(steps.starts("b")) == 2, "bob took both over")
    steps.go("a", 3)
    group.eventually(lambda: op.status().jobs["success"] == 1, "a has ended")
    ann.start()
    group.eventually(lambda: not runs(group, "ann"), "ann has nothing left")
    assert sorted(line for line in steps.diary() if line.startswith("clean-local")) == [
        "clean-local a",
        "clean-local b",
    ]
    assert not list(private(group, "ann", op.ref).iterdir())
    steps.go("b", 3)
    assert op.wait(60).state == "success"
    assert (steps.output("a"), steps.output("b")) == (ALL, ALL), "what bob wrote is as it was"


def test_what_is_left_of_an_operation_that_is_gone_is_cleaned_up(
    group: Daemons,
    steps: Steps,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    (ann,) = group.start("ann", env=sample_env)
    op = group.client.start_operation("steps", TABLE, steps.arg("a", hold=[3]))
    group.eventually(lambda: steps.at("a", 2), "ann holds a")
    ann.kill()
    group.start("bob", env=sample_env)
    op.cancel()
    assert op.wait(60).state == "cancelled"
    group.eventually(lambda: not group.client.operations(), "its keys are gone")
    assert private(group, "ann", op.ref).exists()
    garbage = group.folder / "ann" / "runs" / "torn-1.json"
    garbage.write_text('{"op": "t/st')
    ann.start()
    group.eventually(lambda: not runs(group, "ann") and not private(group, "ann", op.ref).exists(), "nothing is left")
    assert "clean-local a" in steps.diary()


def found(folder: Path) -> set[Path]:
    """All that jobs and their executor have put there."""
    return {path for part in ("ops", "runs") for path in (folder / part).rglob("*")}


def test_a_copy_of_a_work_directory_is_all_that_its_executor_cleans_up(
    group: Daemons,
    steps: Steps,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    """As where a machine is cloned: two executors of one id. What the copy tells of runs in the original. It is rid of
    what has ended, and leaves alone what goes on (F27).
    """
    (ann,) = group.start("ann", ttl=30, env=sample_env)
    op = group.client.start_operation("steps", TABLE, steps.arg("a", hold=[3]))
    over = group.client.start_operation("restarting", TABLE, steps.arg("b", hold=[3]))
    group.eventually(lambda: steps.at("a", 2) and steps.at("b", 2), "ann holds both")
    ann.freeze()  # no file goes while it is copied
    shutil.copytree(group.folder / "ann", group.folder / "copy")
    ann.thaw()
    over.cancel()
    assert over.wait(60).state == "cancelled"
    group.eventually(
        lambda: len(runs(group, "ann")) == 1 and not private(group, "ann", over.ref).exists(), "it is gone"
    )
    before = found(group.folder / "ann")
    assert len(runs(group, "copy")) == 2
    group.spawn("copy", "--id", "ann", ttl=30, env=sample_env)
    group.eventually(lambda: not private(group, "copy", over.ref).exists(), "it is rid of what is over", "copy")
    assert [node.executor for node in group.client.nodes().values()] == ["ann", "ann"]
    assert steps.diary().count("clean-local b") == 1
    assert not {"clean a", "clean-local a"} & set(steps.diary())
    assert found(group.folder / "ann") == before
    assert len(runs(group, "copy")) == 1
    steps.go("a", 3)
    assert op.wait(60).state == "success"
    assert (steps.starts("a"), steps.output("a")) == ([0], ALL), "it went on where it ran"
    for name in ("ann", "copy"):
        group.eventually(
            lambda n=name: not runs(group, n) and not private(group, n, op.ref).exists(), "nothing is left"
        )


def test_a_failed_checkpoint_does_not_stop_the_next(
    group: Daemons,
    steps: Steps,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    """The second checkpoint is too large to be kept, and the job goes on; the third is what counts."""
    (ann,) = group.start("ann", env=sample_env)
    op = group.client.start_operation("steps", TABLE, steps.arg("a", hold=[4], broken=[2]))
    group.eventually(lambda: steps.at("a", 3), "a holds")
    assert "not saved a 2" in steps.diary()
    again(ann)
    group.eventually(
        lambda: len(steps.starts("a")) == 2, "a goes on; until then the child of the killed daemon may live"
    )
    steps.go("a", 4)
    assert op.wait(60).state == "success"
    assert (steps.starts("a"), steps.output("a")) == ([0, 3], ALL)
