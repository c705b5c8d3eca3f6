"""Jobs that fail, ignore a cancel, or leave files behind, on real executors."""

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

pytestmark = pytest.mark.rotating

TABLE = "t"


@pytest.fixture
def diary(tmp_path: Path) -> Path:
    """The file in which the sample behaviors record their calls."""
    return tmp_path / "diary.txt"


def job_calls(diary: Path) -> list[str]:
    """The calls for jobs in the diary: ``start NAME`` and ``clean NAME``."""
    written = diary.read_text().splitlines() if diary.exists() else []
    return [line for line in written if line.startswith(("start ", "clean "))]


def test_a_retry_starts_when_due_while_another_job_runs(
    group: Daemons,
    diary: Path,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    """The slot becomes free before the claim is set to waiting: the executor must look for work again after that."""
    group.start("ann", ttl=10, env=sample_env, options=("--poll", "600"))
    arg = {"names": ["a", "b"], "does": {"a": "wait", "b": "error"}, "diary": str(diary)}
    operation = group.client.start_operation("sample", TABLE, arg, retry_attempts=3, failure_policy="collect_all")
    group.eventually(lambda: job_calls(diary).count("start b") == 3, "b was tried three times")
    written = Written(group.endpoint, OperationRef.parse(operation.ref))
    assert [json.loads(claim)["failures"] for claim in written.claims[1]][:3:2] == [0, 1]
    operation.cancel()
    assert operation.wait(30).state in ("cancelled", "failed")


def test_the_last_attempt_is_cleaned_up_before_its_failure_is_reported(
    group: Daemons,
    diary: Path,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    group.start("ann", ttl=10, env=sample_env)
    arg = {"names": ["a"], "does": {"a": "error"}, "diary": str(diary)}
    result = group.client.start_operation("sample", TABLE, arg, retry_attempts=2).wait(60)
    assert result.state == "failed"
    assert job_calls(diary) == ["start a", "clean a", "start a", "clean a"]


@pytest.mark.slow  # each run has the test of a deaf job in tests/faults/test_self_fencing.py
def test_a_job_that_ignores_its_stop_is_dead_before_another_executor_starts_it(
    group: Daemons,
    diary: Path,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    (ann,) = group.start("ann", ttl=60, env=sample_env)
    arg = {"names": ["a"], "does": {"a": "deaf"}, "diary": str(diary)}
    operation = group.client.start_operation("sample", TABLE, arg)
    group.eventually(lambda: job_calls(diary) == ["start a"], "a runs")
    group.start("bob", ttl=60, env=sample_env)
    assert ann.stop(60) == 0
    group.eventually(lambda: job_calls(diary).count("start a") == 2, "bob runs it")
    claim = json.loads(dump(group.endpoint, "distOpClaim.").popitem()[1])
    assert (claim["executor"], claim["attempt"], claim["failures"]) == ("bob", 2, 0)
    operation.cancel()
    assert operation.wait(60).state == "cancelled", group.tails()


def test_a_cancel_ends_with_a_job_that_ignores_it_and_unclaimed_jobs(
    group: Daemons,
    diary: Path,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    group.start("ann", ttl=60, env=sample_env)
    arg = {"names": ["a", "b", "c", "d"], "does": {"a": "deaf", "b": "wait"}, "diary": str(diary)}
    operation = group.client.start_operation("sample", TABLE, arg)
    group.eventually(lambda: sorted(job_calls(diary)) == ["start a", "start b"], "both slots are taken")
    operation.cancel("not needed")
    result = operation.wait(30)
    assert (result.state, result.jobs) == ("cancelled", {"total": 4, "success": 0, "failed": 0})
    assert {"clean a", "clean b"} <= set(job_calls(diary)), "both jobs are cleaned up, also that of the killed worker"
    assert not {"start c", "start d"} & set(job_calls(diary))


def test_a_job_with_a_fatal_error_is_cleaned_up_before_its_failure_is_reported(
    group: Daemons,
    diary: Path,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    group.start("ann", ttl=10, env=sample_env)
    arg = {"names": ["a"], "does": {"a": "hopeless"}, "diary": str(diary)}
    assert group.client.start_operation("sample", TABLE, arg).wait(60).state == "failed"
    assert job_calls(diary) == ["start a", "clean a"]


def test_a_follow_up_operation_is_started_once(
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
