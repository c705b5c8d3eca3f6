"""Pausing: its two phases, restarts while paused, and checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from distop.errors import NotAllowed
from tests.support.behaviors import sample_env  # noqa: F401
from tests.support.command import distop_command  # noqa: F401
from tests.support.step_control import ALL, Steps

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.command import Ran
    from tests.support.daemons import Daemons

TABLE = "t"


@pytest.fixture
def steps(tmp_path: Path) -> Steps:
    return Steps(tmp_path / "steps")


def test_a_pause_lets_running_jobs_finish_and_reports_its_completion(
    group: Daemons,
    steps: Steps,
    sample_env: dict[str, str],  # noqa: F811
    distop_command: Callable[..., Ran],  # noqa: F811
) -> None:
    group.start("ann", env=sample_env)
    op = group.client.start_operation("steps", TABLE, steps.arg("a", "b", "c", hold=[3]))
    group.eventually(lambda: steps.at("a", 2) and steps.at("b", 2), "both slots hold a job")
    etcd_options = ("--etcd", group.endpoint)
    ran = distop_command("pause", op.ref, *etcd_options)
    assert (ran.code, ran.out) == (0, f"{op.ref} is pausing: 2 jobs still run\n")
    late = distop_command("pause", op.ref, "--wait", "--timeout", "0.1", "--json", *etcd_options)
    assert (late.code, late.json) == (6, {"op": op.ref, "state": "paused", "stage": "pausing", "running": 2})
    assert f"time-out after 0.1 s: jobs of {op.ref} still run" in late.err
    assert "waits for   2 jobs to finish" in distop_command("show", op.ref, *etcd_options).out
    steps.go("a", 3)
    group.eventually(lambda: op.status().jobs["running"] == 1, "a has ended")
    assert op.status().stage == "pausing"
    steps.go("b", 3)
    ran = distop_command("pause", op.ref, "--wait", "--json", *etcd_options)
    assert ran.json == {"op": op.ref, "state": "paused", "stage": "paused", "running": 0}
    assert (op.status().jobs["success"], steps.starts("c")) == (2, [])
    op.resume()
    steps.go("c", 3)
    assert op.wait(60).state == "success"
    assert (steps.starts("a"), steps.output("a")) == ([0], ALL)


def test_pause_now_keeps_checkpoints_across_restarts(
    group: Daemons,
    steps: Steps,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    (ann,) = group.start("ann", env=sample_env)
    op = group.client.start_operation("steps", TABLE, steps.arg("a", hold=[2, 4]))
    group.eventually(lambda: steps.at("a", 1), "a holds at its second step")
    op.pause(now=True)
    group.eventually(lambda: op.status().stage == "paused", "a was stopped")
    ann.kill()
    ann.start()
    group.await_ready("ann")
    assert op.status().stage == "paused"
    op.resume()
    steps.go("a", 2)
    group.eventually(lambda: steps.at("a", 3), "a holds at its fourth step")
    op.pause(now=True)
    group.eventually(lambda: op.status().stage == "paused", "a was stopped again")
    assert ann.stop() == 0
    group.start("bob", env=sample_env)
    op.resume()
    steps.go("a", 4)
    assert op.wait(60).state == "success"
    assert (steps.starts("a"), steps.output("a")) == ([0, 1, 3], ALL)
    assert "clean a" not in steps.diary(), "a job with a checkpoint is not cleaned up"


def test_a_rate_limited_checkpoint_is_saved_when_the_job_is_stopped(
    group: Daemons,
    steps: Steps,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    group.start("ann", env=sample_env)
    op = group.client.start_operation("steps", TABLE, steps.arg("a", hold=[4], forced=False))
    group.eventually(lambda: steps.at("a", 3), "a holds at its fourth step")
    op.pause(now=True)
    group.eventually(lambda: op.status().stage == "paused", "a was stopped")
    steps.go("a", 4)
    op.resume()
    assert op.wait(60).state == "success"
    assert (steps.starts("a"), steps.output("a")) == ([0, 3], ALL)


def test_pause_now_after_pause_stops_running_jobs_and_cleans_up_restarting_ones(
    group: Daemons,
    steps: Steps,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    group.start("ann", env=sample_env)
    op = group.client.start_operation("restarting", TABLE, steps.arg("a", hold=[3]))
    group.eventually(lambda: steps.at("a", 2), "a holds at its third step")
    op.pause()
    assert op.status().stage == "pausing"
    op.pause(now=True)
    group.eventually(lambda: op.status().stage == "paused", "a was stopped")
    assert (steps.diary()[-1], steps.output("a")) == ("clean a", [])
    op.pause(now=True)
    op.pause()
    steps.go("a", 3)
    op.resume()
    assert op.wait(60).state == "success"
    assert (steps.starts("a"), steps.output("a")) == ([0, 0], ALL)


def test_a_cancel_of_a_paused_operation_cleans_up_released_jobs(
    group: Daemons,
    steps: Steps,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    group.start("ann", env=sample_env)
    op = group.client.start_operation("steps", TABLE, steps.arg("a", "b", "c", hold=[2]))
    group.eventually(lambda: steps.at("a", 1) and steps.at("b", 1), "two of three hold")
    op.pause(now=True)
    group.eventually(lambda: op.status().stage == "paused", "both were stopped")
    assert steps.output("a") == ["1"]
    op.cancel()
    assert op.wait(60).state == "cancelled"
    assert [steps.output(name) for name in "abc"] == [[], [], []]


def test_the_private_directory_of_a_cancelled_paused_operation_is_removed(
    group: Daemons,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    """None of its jobs was running on the executor when it ended."""
    group.start("ann", env=sample_env)
    arg = {"names": list("abc"), "does": dict.fromkeys("abc", "hold")}
    op = group.client.start_operation("sample", TABLE, arg)
    private = group.folder / "ann" / "ops" / op.ref
    group.eventually(private.exists, "two of three run")
    op.pause()
    (private / "go").touch()
    group.eventually(lambda: op.status().stage == "paused", "both have ended")
    assert private.exists(), "the operation may be resumed"
    op.cancel()
    assert op.wait(60).state == "cancelled"
    group.eventually(lambda: not private.exists(), "its private directory is removed")


def test_each_command_on_an_ended_operation_is_refused_with_its_state(
    group: Daemons,
    distop_command: Callable[..., Ran],  # noqa: F811
) -> None:
    group.start("ann")
    op = group.client.start_operation("noop", TABLE, {"jobs": 1})
    op.wait(60)
    done = (("cancel", "cancelled"), ("pause", "paused"), ("pause --now", "paused"), ("resume", "resumed"))
    for command, word in done:
        name, *options = command.split()
        ran = distop_command(name, op.ref, *options, "--etcd", group.endpoint)
        assert ran.code == 5
        assert f"{op.ref} ended as success" in ran.sentence
        assert f"it can no longer be {word}" in ran.sentence
    assert distop_command("rerun", op.ref, "--etcd", group.endpoint).code == 5
    with pytest.raises(NotAllowed):
        op.pause(now=True)
