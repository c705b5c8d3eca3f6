"""Bad days of the executor role: jobs that do not stop, that break at the wrong moment, that leave things behind."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from distop.protocol.records import OperationRef
from tests.support.behaviors import sample_env  # noqa: F401
from tests.support.contract import dump
from tests.support.replay import Written

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.daemons import Daemons

TABLE = "t"


@pytest.fixture
def diary(tmp_path: Path) -> Path:
    """Where the sample behaviors write down what they do."""
    return tmp_path / "diary.txt"


def lines(diary: Path) -> list[str]:
    """What was done with jobs: ``start NAME``, ``clean NAME``."""
    written = diary.read_text().splitlines() if diary.exists() else []
    return [line for line in written if line.startswith(("start ", "clean "))]


def test_a_retry_comes_when_it_is_due_while_a_neighbour_still_runs(
    group: Daemons,
    diary: Path,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    """The claim is set to waiting after the slot became free: the look in between must not be the last one."""
    group.start("ann", ttl=10, env=sample_env, options=("--poll", "600"))
    arg = {"names": ["a", "b"], "does": {"a": "wait", "b": "error"}, "diary": str(diary)}
    operation = group.client.start_operation("sample", TABLE, arg, retry_attempts=3, failure_policy="collect_all")
    group.eventually(lambda: lines(diary).count("start b") == 3, "b was tried three times")
    written = Written(group.endpoint, OperationRef.parse(operation.ref))
    assert [json.loads(claim)["failures"] for claim in written.claims[1]][:3:2] == [0, 1]
    operation.cancel()
    assert operation.wait(30).state in ("cancelled", "failed")


def test_what_the_last_attempt_left_is_cleaned_up_before_it_is_reported(
    group: Daemons,
    diary: Path,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    group.start("ann", ttl=10, env=sample_env)
    arg = {"names": ["a"], "does": {"a": "error"}, "diary": str(diary)}
    result = group.client.start_operation("sample", TABLE, arg, retry_attempts=2).wait(60)
    assert result.state == "failed"
    assert lines(diary) == ["start a", "clean a", "start a", "clean a"]


@pytest.mark.slow  # at each change: that of a deaf job in tests/faults/test_self_fencing.py
def test_a_job_that_does_not_stop_is_dead_before_its_neighbour_may_start_it(
    group: Daemons,
    diary: Path,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    (ann,) = group.start("ann", ttl=60, env=sample_env)
    arg = {"names": ["a"], "does": {"a": "deaf"}, "diary": str(diary)}
    operation = group.client.start_operation("sample", TABLE, arg)
    group.eventually(lambda: lines(diary) == ["start a"], "a runs")
    group.start("bob", ttl=60, env=sample_env)
    assert ann.stop(60) == 0
    group.eventually(lambda: lines(diary).count("start a") == 2, "bob runs it")
    claim = json.loads(dump(group.endpoint, "distOpClaim.").popitem()[1])
    assert (claim["executor"], claim["attempt"], claim["failures"]) == ("bob", 2, 0)
    operation.cancel()
    assert operation.wait(60).state == "cancelled", group.tails()


def test_a_cancel_ends_although_a_job_ignores_it_and_others_were_never_claimed(
    group: Daemons,
    diary: Path,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    group.start("ann", ttl=60, env=sample_env)
    arg = {"names": ["a", "b", "c", "d"], "does": {"a": "deaf", "b": "wait"}, "diary": str(diary)}
    operation = group.client.start_operation("sample", TABLE, arg)
    group.eventually(lambda: sorted(lines(diary)) == ["start a", "start b"], "both slots are taken")
    operation.cancel("not needed")
    result = operation.wait(30)
    assert (result.state, result.jobs) == ("cancelled", {"total": 4, "success": 0, "failed": 0})
    assert {"clean a", "clean b"} <= set(lines(diary)), "also after the one whose worker had to be killed"
    assert not {"start c", "start d"} & set(lines(diary))


def test_a_fatal_error_is_cleaned_up_after_before_it_is_reported(
    group: Daemons,
    diary: Path,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    group.start("ann", ttl=10, env=sample_env)
    arg = {"names": ["a"], "does": {"a": "hopeless"}, "diary": str(diary)}
    assert group.client.start_operation("sample", TABLE, arg).wait(60).state == "failed"
    assert lines(diary) == ["start a", "clean a"]


def test_what_follows_is_started_once(
    group: Daemons,
    diary: Path,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    group.start("ann", ttl=10, env=sample_env)
    arg = {"names": ["a"], "does": {"follow": "yes"}, "diary": str(diary)}
    first = group.client.start_operation("sample", TABLE, arg)
    assert first.wait(30).state == "success"
    group.eventually(lambda: len(group.client.history(TABLE)) == 2, "the second one ended")
    assert group.client.operation(f"{TABLE}/sample/2").wait(30).state == "success"
    group.eventually(lambda: not group.client.operations(), "both were cleaned up")
    assert len(group.client.history(TABLE)) == 2
