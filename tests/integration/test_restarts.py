"""Executors that are killed and restarted continue or clean up their previous jobs (I17, I29)."""

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


def run_records(group: Daemons, name: str) -> list[Path]:
    """The records that an executor keeps of its runs."""
    return sorted((group.folder / name / "runs").iterdir())


def private_folder(group: Daemons, name: str, op: str) -> Path:
    """The private folder of an operation on an executor."""
    return group.folder / name / "ops" / op


def restart(daemon: Daemon) -> None:
    daemon.kill()
    daemon.start()


def test_a_killed_executor_continues_its_job_from_the_checkpoint_twice(
    group: Daemons,
    steps: Steps,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    (ann,) = group.start("ann", ttl=10, env=sample_env)  # its session survives its restart
    op = group.client.start_operation("steps", TABLE, steps.arg("a", hold=[3, 5]))
    group.eventually(lambda: steps.at("a", 2), "ann holds a")
    assert len(run_records(group, "ann")) == 1, "ann has recorded the run"
    group.start("bob", env=sample_env)
    restart(ann)
    group.eventually(lambda: len(steps.starts("a")) == 2, "a has started again")
    steps.go("a", 3)
    group.eventually(lambda: steps.at("a", 4), "a holds at its last step")
    restart(ann)
    group.eventually(lambda: len(steps.starts("a")) == 3, "a has started a third time")
    steps.go("a", 5)
    result = op.wait(60)
    assert result.state == "success"
    assert (steps.starts("a"), steps.output("a")) == ([0, 2, 4], ALL)
    written = Written(group.endpoint, OperationRef.parse(op.ref))
    holders = {json.loads(claim)["executor"] for claim in written.claims[0]}
    assert holders == {"ann"}, "bob left the job to the executor with its local state"
    assert not any(line.startswith("clean") for line in steps.diary())
    group.eventually(
        lambda: not run_records(group, "ann") and not private_folder(group, "ann", op.ref).exists(),
        "ann has cleaned up",
    )


def test_a_job_without_checkpoint_is_cleaned_up_before_it_restarts(
    group: Daemons,
    steps: Steps,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    (ann,) = group.start("ann", env=sample_env)
    op = group.client.start_operation("restarting", TABLE, steps.arg("a", hold=[3]))
    group.eventually(lambda: steps.at("a", 2), "ann holds a")
    restart(ann)
    steps.go("a", 3)
    assert op.wait(60).state == "success"
    assert (steps.starts("a"), steps.output("a")) == ([0, 0], ALL)
    assert steps.diary().index("clean a") < steps.diary().index("start a at 0 attempt 2")


@pytest.mark.parametrize("kind", ["steps", pytest.param("restarting", marks=pytest.mark.slow)])
def test_jobs_taken_over_by_another_executor_are_cleaned_up_locally_only(
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
    assert len(run_records(group, "ann")) == 2
    group.eventually(lambda: len(steps.starts("a")) == len(steps.starts("b")) == 2, "bob took both over")
    steps.go("a", 3)
    group.eventually(lambda: op.status().jobs["success"] == 1, "a has ended")
    ann.start()
    group.eventually(lambda: not run_records(group, "ann"), "ann has no run records left")
    assert sorted(line for line in steps.diary() if line.startswith("clean-local")) == [
        "clean-local a",
        "clean-local b",
    ]
    assert not list(private_folder(group, "ann", op.ref).iterdir())
    steps.go("b", 3)
    assert op.wait(60).state == "success"
    assert (steps.output("a"), steps.output("b")) == (ALL, ALL), "bob's output is unchanged"


def test_a_restarted_executor_cleans_up_jobs_of_an_ended_operation(
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
    group.eventually(lambda: not group.client.operations(), "its keys are removed")
    assert private_folder(group, "ann", op.ref).exists()
    garbage = group.folder / "ann" / "runs" / "torn-1.json"
    garbage.write_text('{"op": "t/st')
    ann.start()
    group.eventually(
        lambda: not run_records(group, "ann") and not private_folder(group, "ann", op.ref).exists(),
        "ann has cleaned up",
    )
    assert "clean-local a" in steps.diary()


def job_files(folder: Path) -> set[Path]:
    """All files that jobs and their executor have written there."""
    return {path for part in ("ops", "runs") for path in (folder / part).rglob("*")}


def test_an_executor_with_a_copied_work_directory_cleans_up_only_its_copy(
    group: Daemons,
    steps: Steps,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    """F27: after cloning a machine, two executors have one id, and the copy has records of the original's runs.

    The second executor cleans up ended jobs in its copy, and leaves running jobs alone.
    """
    (ann,) = group.start("ann", ttl=30, env=sample_env)
    op = group.client.start_operation("steps", TABLE, steps.arg("a", hold=[3]))
    cancelled = group.client.start_operation("restarting", TABLE, steps.arg("b", hold=[3]))
    group.eventually(lambda: steps.at("a", 2) and steps.at("b", 2), "ann holds both")
    ann.freeze()  # so that no file is removed during the copy
    shutil.copytree(group.folder / "ann", group.folder / "copy")
    ann.thaw()
    cancelled.cancel()
    assert cancelled.wait(60).state == "cancelled"
    group.eventually(
        lambda: len(run_records(group, "ann")) == 1 and not private_folder(group, "ann", cancelled.ref).exists(),
        "ann has cleaned up the cancelled job",
    )
    before = job_files(group.folder / "ann")
    assert len(run_records(group, "copy")) == 2
    group.spawn("copy", "--id", "ann", ttl=30, env=sample_env)
    group.eventually(
        lambda: not private_folder(group, "copy", cancelled.ref).exists(),
        "the copy has cleaned up the cancelled job",
        "copy",
    )
    assert [node.executor for node in group.client.nodes().values()] == ["ann", "ann"]
    assert steps.diary().count("clean-local b") == 1
    assert not {"clean a", "clean-local a"} & set(steps.diary())
    assert job_files(group.folder / "ann") == before
    assert len(run_records(group, "copy")) == 1
    steps.go("a", 3)
    assert op.wait(60).state == "success"
    assert (steps.starts("a"), steps.output("a")) == ([0], ALL), "the job continued on the original"
    for name in ("ann", "copy"):
        group.eventually(
            lambda n=name: not run_records(group, n) and not private_folder(group, n, op.ref).exists(),
            "nothing is left",
        )


def test_a_failed_checkpoint_does_not_stop_the_next(
    group: Daemons,
    steps: Steps,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    """The second checkpoint is too large to be saved. The job continues, and restarts from the third."""
    (ann,) = group.start("ann", env=sample_env)
    op = group.client.start_operation("steps", TABLE, steps.arg("a", hold=[4], broken=[2]))
    group.eventually(lambda: steps.at("a", 3), "a holds at its fourth step")
    assert "not saved a 2" in steps.diary()
    restart(ann)
    group.eventually(lambda: len(steps.starts("a")) == 2, "a has started again, after the old child ended")
    steps.go("a", 4)
    assert op.wait(60).state == "success"
    assert (steps.starts("a"), steps.output("a")) == ([0, 3], ALL)
