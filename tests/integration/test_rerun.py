"""Reruns: a new operation that runs the failed or unfinished partitions only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from distop.errors import NotAllowed, NotFound
from distop.protocol.keys import Keys
from distop.protocol.records import OperationRef
from tests.support.behaviors import sample_env  # noqa: F401
from tests.support.command import distop_command  # noqa: F401
from tests.support.contract import dump

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.command import Ran
    from tests.support.daemons import Daemons

TABLE = "t"


def starts(diary: Path) -> list[str]:
    """The started partitions, sorted by name."""
    return sorted(line.removeprefix("start ") for line in diary.read_text().splitlines() if line.startswith("start "))


def test_a_rerun_runs_the_failed_partitions_only(
    group: Daemons,
    tmp_path: Path,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    group.start("ann", env=sample_env)
    diary = tmp_path / "diary.txt"
    arg = {"names": ["a", "b", "c", "d"], "does": {"b": "fail-once", "d": "fail-once"}, "diary": str(diary)}
    first = group.client.start_operation("sample", TABLE, arg, failure_policy="collect_all")
    assert (first.wait(60).state, first.wait(1).jobs) == ("failed", {"total": 4, "success": 2, "failed": 2})
    diary.unlink()
    again = group.client.rerun(first.ref, request_id="once")
    assert again.ref == f"{TABLE}/sample/2"
    result = again.wait(60)
    assert (result.state, result.jobs) == ("success", {"total": 2, "success": 2, "failed": 0})
    assert result.record["rerun_of"] == first.ref
    assert starts(diary) == ["b", "d"]
    assert group.client.rerun(first.ref, request_id="once").ref == again.ref, "the same request id has the same rerun"
    with pytest.raises(NotAllowed, match="succeeded: it has no partition to rerun"):
        again.rerun()


def test_keys_for_a_rerun_are_kept_beside_the_history_record_of_a_failure(group: Daemons) -> None:
    group.start("ann", options=("--history-limit", "1"))
    first = group.client.start_operation("noop", TABLE, {"jobs": 3, "fail": ["1"]})
    first.wait(60)
    key = Keys().history(OperationRef.parse(first.ref))
    assert set(dump(group.endpoint, key)) == {key, f"{key}.arg", f"{key}.spec", f"{key}.plan.000000"}
    assert [r.op for r in group.client.history()] == [first.ref], "keys beside a record are no records"
    ended = group.client.start_operation("noop", TABLE, {"jobs": 1})
    ended.wait(60)
    key = Keys().history(OperationRef.parse(ended.ref))
    assert set(dump(group.endpoint, f"{key}")) == {key}, "an operation that succeeded keeps only its record"


def test_a_rerun_after_fail_fast_omits_unfinished_partitions_by_default(
    group: Daemons,
    sample_env: dict[str, str],  # noqa: F811
    distop_command: Callable[..., Ran],  # noqa: F811
) -> None:
    group.start("ann", env=sample_env)
    arg = {"names": ["a", "b", "c", "d", "e"], "does": {"a": "wait", "b": "fail-once"}}
    first = group.client.start_operation("sample", TABLE, arg, failure_policy="fail_fast")
    jobs = first.wait(60).jobs
    assert jobs["failed"] == 1
    left = jobs["total"] - jobs["success"] - 1
    assert left >= 1, "at least a was stopped"
    ran = distop_command("rerun", first.ref, "--wait", "--etcd", group.endpoint, "--json")
    assert ran.code == 0, ran.err
    assert ran.json["jobs"] == {"total": 1, "success": 1, "failed": 0}
    assert f"{left} partitions of {first.ref} that had no end are left out" in ran.err
    ran = distop_command("rerun", first.ref, "--unfinished", "--etcd", group.endpoint, "--json")
    assert ran.json == {"op": f"{TABLE}/sample/3", "instance": 3, "state": "running", "rerun_of": first.ref}
    group.eventually(
        lambda: group.client.operation(ran.json["op"]).status().jobs["total"] == 1 + left,
        "the rerun has failed and unfinished partitions",
    )
    group.client.operation(ran.json["op"]).cancel()
    assert group.client.operation(ran.json["op"]).wait(60).state == "cancelled"


def test_a_rerun_of_a_cancelled_operation_runs_all_unfinished_partitions(
    group: Daemons,
    tmp_path: Path,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    group.start("ann", env=sample_env)
    diary = tmp_path / "diary.txt"
    arg = {"names": ["a", "b", "c", "d"], "does": {"b": "wait-once", "c": "wait-once"}, "diary": str(diary)}
    first = group.client.start_operation("sample", TABLE, arg)
    group.eventually(lambda: diary.exists() and starts(diary) == ["a", "b", "c"], "both slots wait")
    first.cancel()
    result = first.wait(60)
    assert (result.state, result.jobs["success"]) == ("cancelled", 1)
    diary.unlink()
    assert first.rerun().wait(60).jobs == {"total": 3, "success": 3, "failed": 0}
    assert starts(diary) == ["b", "c", "d"]


def test_an_impossible_rerun_is_refused_with_the_reason(
    group: Daemons,
    sample_env: dict[str, str],  # noqa: F811
    distop_command: Callable[..., Ran],  # noqa: F811
) -> None:
    group.start("ann", env=sample_env)
    with pytest.raises(NotFound, match="there is no operation"):
        group.client.rerun(f"{TABLE}/sample/9")
    running = group.client.start_operation("sample", TABLE, {"names": ["a"], "does": {"a": "wait"}})
    ran = distop_command("rerun", running.ref, "--etcd", group.endpoint)
    assert (ran.code, ran.sentence) == (5, f"{running.ref} has not ended: wait for it, or cancel it first")
    unplanned = group.client.start_operation("sample", TABLE, {"names": ["a"], "does": {"wrong": "yes"}})
    assert unplanned.wait(60).state == "failed"
    with pytest.raises(NotAllowed, match="it had no plan: it has no partition to rerun"):
        unplanned.rerun()
    running.cancel()
    running.wait(60)
