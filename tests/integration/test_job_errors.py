"""A failed job has the error of each attempt, and does not fail other jobs."""

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


def test_a_partition_that_kills_executors_fails_alone_with_its_attempts(
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

    group.eventually(ended, "the operation has ended", seconds=120)
    result = op.wait(1)
    assert (result.state, result.jobs) == ("failed", {"total": 6, "success": 5, "failed": 1})
    (error,) = result.errors
    assert error["partition"] == "p"
    assert [attempt["attempt"] for attempt in error["attempts"]] == [1, 2, 3]
    assert {attempt["text"] for attempt in error["attempts"]} == {"the executor was lost while it ran the job"}
    assert [steps.output(name) for name in names[1:]] == [ALL] * 5
    shown = distop_command("show", op.ref, "--etcd", group.endpoint).out
    assert "attempt 3 on" in shown


def test_the_error_of_each_failed_attempt_is_reported(
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
    errors = {error["partition"]: error for error in result.errors}
    assert [attempt["attempt"] for attempt in errors["a"]["attempts"]] == [1, 2]
    assert all("something went wrong" in attempt["text"] for attempt in errors["a"]["attempts"])
    assert all("exit code 3" in attempt["text"] or "died" in attempt["text"] for attempt in errors["b"]["attempts"])
    assert not any("attempts" in errors[name] for name in "cde"), "fatal errors are not retried"
    assert [errors[name]["text"] for name in "cd"] == ["this cannot work", "no retry mends this"]
    assert errors["e"]["text"].startswith("ZeroDivisionError: nor this")
