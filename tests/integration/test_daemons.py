"""Executor daemons as processes: they share work, and each job runs to its end exactly once when daemons fail."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

import pytest

import distop
from distop.protocol.records import OperationRef
from tests.support.behaviors import sample_env
from tests.support.contract import dump
from tests.support.replay import Written

if TYPE_CHECKING:
    from distop.store.embedded import EmbeddedEtcd
    from tests.support.daemons import Daemons

__all__ = ["sample_env"]

TABLE = "t"


def holders(group: Daemons) -> Counter[str]:
    """The number of claims that each executor holds."""
    claims = [json.loads(value) for value in dump(group.endpoint, "distOpClaim.").values()]
    return Counter(claim["executor"] for claim in claims if "incarnation" in claim)


def coordinator(group: Daemons, table: str, kind: str) -> str:
    """The executor that coordinates a type on a table."""
    incarnation = dump(group.endpoint, f"distOpCoordinator.{table}.{kind}").popitem()[1]
    return group.client.nodes()[incarnation].executor


def assert_each_once(group: Daemons, ref: str, jobs: int) -> Written:
    """Assert that each job's state and outcome were written exactly once."""
    written = Written(group.endpoint, OperationRef.parse(ref))
    assert {p: len(w) for p, w in written.states.items()} == dict.fromkeys(range(jobs), 1)
    assert {p: len(w) for p, w in written.outcomes.items()} == dict.fromkeys(range(jobs), 1)
    return written


def test_two_executors_share_the_work(group: Daemons) -> None:
    group.start("ann", "bob")
    operation = group.client.start_operation("noop", TABLE, {"jobs": 40, "sleep": 0.05})
    result = operation.wait(60)
    assert (result.state, result.jobs) == ("success", {"total": 40, "success": 40, "failed": 0})
    written = assert_each_once(group, operation.ref, 40)
    by = Counter(json.loads(outcome[0])["executor"] for outcome in written.outcomes.values())
    assert by["ann"] >= 10
    assert by["bob"] >= 10


def test_an_operation_continues_after_its_caller_disconnects(group: Daemons) -> None:
    """No client watches it or reads its status before it ends."""
    group.start("ann")
    with distop.connect(group.endpoint) as caller:
        ref = caller.start_operation("noop", TABLE, {"jobs": 4, "sleep": 0.2}, submitter="ann from afar").ref
    group.eventually(lambda: group.client.history(TABLE), "the operation has ended")
    (result,) = group.client.history(TABLE)
    assert (result.op, result.state, result.record["submitter"]) == (ref, "success", "ann from afar")


def test_the_jobs_of_a_killed_executor_are_taken_over(group: Daemons) -> None:
    _, bob = group.start("ann", "bob")
    operation = group.client.start_operation("noop", TABLE, {"jobs": 30, "sleep": 0.2})
    group.eventually(lambda: holders(group)["bob"] > 3, "bob holds claims")
    bob.kill()
    result = operation.wait(90)
    assert result.state == "success", group.tails()
    written = assert_each_once(group, operation.ref, 30)
    again = [claims for claims in written.claims.values() if len(claims) > 1]
    assert again, "no job was taken over"
    for claims in again:
        first, second = json.loads(claims[0]), json.loads(claims[1])
        assert (first["executor"], second["executor"], second["attempt"]) == ("bob", "ann", 2)


def test_an_operation_survives_a_killed_coordinator(group: Daemons) -> None:
    first = group.start("ann", "bob")
    operation = group.client.start_operation("noop", TABLE, {"jobs": 30, "sleep": 0.1})
    group.eventually(lambda: len(holders(group)) == 2, "both hold claims")
    leader = coordinator(group, TABLE, "noop")
    victim = next(d for d in first if d.name == leader)
    victim.kill()
    result = operation.wait(90)
    assert result.state == "success", group.tails()
    assert_each_once(group, operation.ref, 30)
    assert coordinator(group, TABLE, "noop") != leader


def test_a_stopped_executor_releases_its_claims(group: Daemons) -> None:
    _, bob = group.start("ann", "bob", ttl=30)
    operation = group.client.start_operation("noop", TABLE, {"jobs": 30, "sleep": 0.2})
    group.eventually(lambda: holders(group)["bob"] > 3, "bob holds claims")
    assert bob.stop() == 0
    assert "bob" not in group.live(), "its session ended at once, before its lease expired"
    result = operation.wait(60)
    assert result.state == "success", group.tails()
    written = assert_each_once(group, operation.ref, 30)
    failures = [json.loads(claim)["failures"] for claims in written.claims.values() for claim in claims]
    assert not any(failures), "a release does not count as a failure of a job"


def test_a_frozen_executor_wakes_up_with_a_new_incarnation(group: Daemons) -> None:
    _, bob = group.start("ann", "bob")
    before = {inc for inc, node in group.client.nodes().items() if node.executor == "bob"}
    operation = group.client.start_operation("noop", TABLE, {"jobs": 20, "sleep": 0.2})
    group.eventually(lambda: holders(group)["bob"] > 3, "bob holds claims")
    bob.freeze()
    result = operation.wait(90)
    assert result.state == "success", group.tails()
    bob.thaw()
    group.await_ready("bob")
    after = {inc for inc, node in group.client.nodes().items() if node.executor == "bob"}
    assert not before & after, "it has a new incarnation"
    assert_each_once(group, operation.ref, 20)


def test_an_operation_succeeds_after_its_only_executor_restarts(group: Daemons) -> None:
    (ann,) = group.start("ann")
    operation = group.client.start_operation("noop", TABLE, {"jobs": 20, "sleep": 0.2})
    group.eventually(lambda: holders(group)["ann"] > 3, "ann holds claims")
    ann.kill()
    ann.start()
    result = operation.wait(90)
    assert result.state == "success", group.tails()
    assert_each_once(group, operation.ref, 20)


def test_an_operation_survives_a_restart_of_etcd(group: Daemons, etcd: EmbeddedEtcd) -> None:
    group.start("ann", "bob")
    operation = group.client.start_operation("noop", TABLE, {"jobs": 20, "sleep": 0.2})
    group.eventually(lambda: len(holders(group)) == 2, "both hold claims")
    etcd.kill()
    etcd.restart()
    result = operation.wait(120)
    assert result.state == "success", group.tails()
    assert_each_once(group, operation.ref, 20)


def test_a_daemon_started_before_etcd_waits_for_it(etcd: EmbeddedEtcd, group: Daemons) -> None:
    etcd.kill()
    late = group.spawn("late", "--connect-timeout", "1")
    group.eventually(lambda: "Waiting for etcd" in late.log.read_text(), "the daemon logs that it waits", "late")
    etcd.restart()
    group.await_ready("late")


def test_the_keys_of_a_running_operation_match_the_contract(group: Daemons) -> None:
    group.start("ann")
    operation = group.client.start_operation("noop", TABLE, {"jobs": 3, "sleep": 1.0, "fail": ["2"]})
    root = f"distOp.{TABLE}.noop.1"
    group.eventually(lambda: f"{root}.000000.state" in dump(group.endpoint), "the first job ended")
    found = dump(group.endpoint)
    assert found[f"distOp.{TABLE}.runOps"] == '{"noop":1}'
    assert found[f"distOp.{TABLE}.noop.nextInstanceId"] == "2"
    assert json.loads(found[f"{root}.arg"])["jobs"] == 3
    assert found[f"{root}.state"] == "running"
    assert found[f"{root}.000000.state"] == "success"
    outcome = json.loads(found[f"{root}.000000.outcome"])
    assert {"v", "name", "executor", "incarnation", "attempt", "started", "finished"} <= outcome.keys()
    plan = json.loads(found[f"{root}.plan"])
    assert (plan["v"], plan["count"]) == (1, 3)
    assert {"version", "digest"} <= plan.keys()
    chunk = json.loads(found[f"{root}.plan.000000"])
    assert [(row["partition"], row["name"]) for row in chunk] == [(0, "0"), (1, "1"), (2, "2")]
    claim = json.loads(found[f"distOpClaim.{TABLE}.noop.1.000002"])
    assert (claim["v"], claim["executor"], claim["attempt"], claim["failures"]) == (1, "ann", 1, 0)
    incarnation = claim["incarnation"]
    assert found[f"distOpCoordinator.{TABLE}.noop"] == incarnation
    node = json.loads(found[f"distOpNode.{incarnation}"])
    assert {"v", "executor", "host", "slots", "behaviors", "labels", "version"} <= node.keys()
    assert f"distOpOpen.{TABLE}.noop.1" in found
    assert f"distOpPending.{TABLE}.noop.1" not in found
    assert json.loads(found["distOpBehavior.noop"])["type_name"] == "noop"
    result = operation.wait(30)
    assert result.state == "failed"
    group.eventually(lambda: f"distOpPending.{TABLE}.noop.1" not in dump(group.endpoint), "cleanup ended")
    left = [key for key in dump(group.endpoint) if ".noop.1" in key]
    record = f"distOpHistory.{TABLE}.noop.1"
    assert left == [record, f"{record}.arg", f"{record}.plan.000000", f"{record}.spec"]
    history = json.loads(dump(group.endpoint)[left[0]])
    assert history["jobs"] == {"total": 3, "success": 2, "failed": 1}
    assert (history["op"], history["state"], history["failed"]) == (f"{TABLE}/noop/1", "failed", "2")
    assert history["errors"] == [{"partition": "2", "text": "partition 2 fails as the argument demands"}]


def test_a_cancel_stops_running_and_waiting_jobs(group: Daemons) -> None:
    """The jobs would run far longer than the time limit of this test."""
    group.start("ann", "bob")
    operation = group.client.start_operation("noop", TABLE, {"jobs": 20, "sleep": 600.0})
    group.eventually(lambda: len(holders(group)) == 2, "both hold claims")
    operation.cancel("not needed any more")
    result = operation.wait(60)
    assert result.state == "cancelled", group.tails()
    assert result.jobs == {"total": 20, "success": 0, "failed": 0}
    group.eventually(lambda: not dump(group.endpoint, "distOpClaim."), "no claim is left")
    assert operation.ref in str(result.record)


def test_pause_lets_running_jobs_finish(group: Daemons) -> None:
    """The jobs are one batch, and only the behavior knows which of them have started."""
    group.start("ann")
    operation = group.client.start_operation("noop", TABLE, {"jobs": 10, "sleep": 0.3})
    group.eventually(lambda: operation.status().jobs["success"], "the batch has started")
    operation.pause()
    assert operation.wait(60).state == "success", group.tails()


def test_an_operation_paused_before_its_plan_continues_on_resume(group: Daemons) -> None:
    (ann,) = group.start("ann")
    ann.stop()
    operation = group.client.start_operation("noop", TABLE, {"jobs": 4})
    assert "an executor" in (operation.status().waiting_for or "")
    operation.pause()
    ann.start()
    group.await_ready("ann")
    other = group.client.start_operation("noop", TABLE, {"jobs": 4})
    assert other.wait(30).state == "success"
    assert operation.status().state == "paused"
    operation.resume()
    assert operation.wait(30).jobs["success"] == 4


def test_an_operation_paused_during_retries_continues_on_resume(group: Daemons, sample_env: dict[str, str]) -> None:
    group.start("ann", env=sample_env)
    operation = group.client.start_operation(
        "rough", TABLE, {"jobs": 6, "sleep": 0.3, "error": ["0"]}, retry_attempts=4
    )
    group.eventually(lambda: holders(group)["ann"] > 0, "ann holds claims")
    operation.pause()
    operation.resume()
    result = operation.wait(90)
    assert result.state == "failed", group.tails()
    assert result.jobs == {"total": 6, "success": 5, "failed": 1}


@pytest.mark.slow  # each run has the test of a partition that kills every executor, in test_job_errors.py
def test_a_poison_partition_fails_without_failing_other_partitions(group: Daemons, sample_env: dict[str, str]) -> None:
    group.start("ann", "bob", env=sample_env)
    operation = group.client.start_operation("rough", TABLE, {"jobs": 12, "crash": ["5"]}, retry_attempts=2)
    result = operation.wait(90)
    assert result.state == "failed", group.tails()
    assert result.jobs == {"total": 12, "success": 11, "failed": 1}
    assert result.record["failed"] == "5"


def test_a_failed_batch_is_split_until_the_failing_partition_is_alone(
    group: Daemons, sample_env: dict[str, str]
) -> None:
    group.start("ann", env=sample_env)
    operation = group.client.start_operation("rough", TABLE, {"jobs": 16, "batch_error": ["11"]}, retry_attempts=1)
    result = operation.wait(60)
    assert result.state == "failed"
    assert result.jobs == {"total": 16, "success": 15, "failed": 1}
    assert "planned error of the batch of partition 11" in result.errors[0]["text"]


def test_fail_fast_cancels_the_rest(group: Daemons) -> None:
    group.start("ann")
    operation = group.client.start_operation(
        "noop", TABLE, {"jobs": 50, "sleep": 0.3, "fail": ["0"]}, failure_policy="fail_fast"
    )
    result = operation.wait(60)
    assert result.state == "failed", group.tails()
    assert result.jobs["failed"] == 1
    assert result.jobs["success"] < 49


def test_an_operation_without_partitions_succeeds(group: Daemons) -> None:
    group.start("ann")
    result = group.client.start_operation("noop", TABLE, {"jobs": 0}).wait(30)
    assert (result.state, result.jobs["total"]) == ("success", 0)


def test_an_operation_runs_only_its_named_partitions(group: Daemons) -> None:
    group.start("ann")
    result = group.client.start_operation("noop", TABLE, {"jobs": 10}, partitions=["3", "7"]).wait(30)
    assert (result.state, result.jobs["total"]) == ("success", 2)
    missing = group.client.start_operation("noop", TABLE, {"jobs": 10}, partitions=["3", "nowhere"]).wait(30)
    assert missing.state == "failed"
    assert "nowhere" in missing.errors[0]["text"]


def test_table_options_found_in_planning_reach_jobs_and_completion_only(
    group: Daemons, sample_env: dict[str, str]
) -> None:
    group.start("ann", "bob", env=sample_env)
    group.client.add_table(distop.TableRecord("own", "parquet", str(group.folder), {"group_files": 2}), check=False)
    wide = {"columns": {f"c{n}": ["array", "int"] for n in range(2_000)}}
    names = [str(n) for n in range(8)]
    argument = {"names": names, "does": {**dict.fromkeys(names, "options"), "table": ""}, "options": wide}
    operation = group.client.start_operation("sample", "own", argument)
    ended = operation.wait(60)
    assert ended.state == "success", group.tails()
    assert ended.report == {"group_files": 2, **wide}
    outcomes = Written(group.endpoint, OperationRef.parse(operation.ref)).outcomes
    results = [json.loads(written[0])["result"] for written in outcomes.values()]
    assert results == [{"group_files": 2, **wide}] * len(names)
    assert {"group_files": 2} in [table.options for table in group.client.tables()]


def test_table_names_with_special_characters_work(group: Daemons) -> None:
    group.start("ann")
    for name in ("a", "a.b", "ab", "sales/orders 50%", "表😀", "@cluster"):
        if name != "@cluster":
            group.client.add_table(distop.TableRecord(name, "parquet", str(group.folder)), check=False)
        operation = group.client.start_operation("noop", name)
        assert operation.wait(30).state == "success"
        assert group.client.operation(operation.ref).wait(5).jobs["total"] == 1
