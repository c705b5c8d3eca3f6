"""A job that fails in the end tells what went wrong in each attempt, and no neighbour fails for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

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


def test_a_partition_that_kills_every_executor_fails_with_its_story_and_no_neighbour_does(
    group: Daemons,
    steps: Steps,
    sample_env: dict[str, str],  # noqa: F811
    distop_command: Callable[..., Ran],  # noqa: F811
) -> None:
    both = group.start("ann", "bob", env=sample_env)
    names = ("p", "b", "c", "d", "e", "f")
    op = group.client.start_operation("restarting", TABLE, steps.arg(*names, kills={"p": 2}))

    def ended() -> bool:
        for daemon in both:
            if daemon.process.poll() is not None:
                daemon.start()
        return op.status().ended

    group.eventually(ended, "it ended", seconds=120)
    result = op.wait(1)
    assert (result.state, result.jobs) == ("failed", {"total": 6, "success": 5, "failed": 1})
    (error,) = result.errors
    assert error["partition"] == "p"
    assert [tried["attempt"] for tried in error["attempts"]] == [1, 2, 3]
    assert {tried["text"] for tried in error["attempts"]} == {"the executor was lost while it ran the job"}
    assert [steps.output(name) for name in names[1:]] == [ALL] * 5
    shown = distop_command("show", op.ref, "--etcd", group.endpoint).out
    assert "attempt 3 on" in shown


def test_each_attempt_that_broke_is_told_of(
    group: Daemons,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    group.start("ann", env=sample_env)
    arg = {
        "names": ["a", "b", "c", "d", "e"],
        "does": {"a": "error", "b": "die", "c": "wrong", "d": "hopeless", "e": "known"},
    }
    op = group.client.start_operation("sample", TABLE, arg, retry_attempts=2, failure_policy="collect_all")
    result = op.wait(60)
    told = {error["partition"]: error for error in result.errors}
    assert [tried["attempt"] for tried in told["a"]["attempts"]] == [1, 2]
    assert all("something went wrong" in tried["text"] for tried in told["a"]["attempts"])
    assert all("exit code 3" in tried["text"] or "died" in tried["text"] for tried in told["b"]["attempts"])
    assert not any("attempts" in told[name] for name in "cde"), "what no retry mends was tried once"
    assert [told[name]["text"] for name in "cd"] == ["this cannot work", "no retry mends this"]
    assert told["e"]["text"].startswith("ZeroDivisionError: nor this")
