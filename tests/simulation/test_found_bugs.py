"""Bugs that the simulator found, each with a scenario that shows it without random draws."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from distop.daemon.coordinator.orphaned_jobs import Reaper
from distop.daemon.executor.job_runs import DISK_PAUSE
from distop.protocol.jobs import Claim, JobState
from distop.protocol.records import CLUSTER_TABLE
from distop.protocol.size_limits import DEFAULT
from distop.protocol.txn import Put, Txn
from tests.simulator import Scenario, Simulation, simulate, simulated_behaviors
from tests.simulator.crash_points import discover
from tests.simulator.network import CLOSED, RequestFault
from tests.simulator.reference_runs import references
from tests.simulator.run import without_logs
from tests.simulator.scenario import CROWD, Action, DrainAction, Fault, Submission, plain
from tests.simulator.sim_worker import ANSWER
from tests.simulator.simulated_behaviors import Script
from tests.simulator.strikes import Strike, run_strike
from tests.simulator.virtual_loop import Process
from tests.support.slow_cases import mostly_slow


def small(seed: int, hosts: int, submission: Submission, *faults: Fault, slots: int = 2) -> Scenario:
    """Some executors, one operation, only these faults."""
    return plain(seed, hosts, [submission], *faults, slots=slots)


def argument(seed: int, partitions: int, pace: float) -> dict[str, object]:
    return {"seed": seed, "partitions": partitions, "pace": pace, "trouble": 0.0, "chunk": 100_000, "calls": 0.05}


def enumerate_writes(scenario: Scenario) -> list[tuple[int, str]]:
    """The revisions of a run, each with the last part of the first key that it wrote."""
    sim = Simulation(scenario)
    sim.run()
    return [(revision, changes[0].kv.key.rpartition(".")[2]) for revision, changes in sim.etcd.store.history]


def checkpoints(sim: Simulation) -> dict[str, list[int]]:
    """Key → the saved checkpoints in order."""
    values: dict[str, list[int]] = {}
    for _, changes in sim.etcd.store.history:
        for change in changes:
            if change.kv.key.endswith(".progress") and not change.deleted:
                values.setdefault(change.kv.key, []).append(int(change.kv.value))
    return values


@pytest.mark.parametrize("seed", mostly_slow(range(30), 10))
def test_a_cancelled_operation_is_decided_by_all_jobs_that_ended(seed: int) -> None:
    """One job failed, so the others were stopped. All claims were seen to be gone before the state of the last job,
    which arrives by another watch: decision and history counted one job too few.
    """
    submission = Submission(0, 0.5, "check", "a", {**argument(seed, 40, 0.1), "trouble": 1.0}, None, "fail_fast", ())
    assert simulate(seed, scenario=small(seed, 3, submission, slots=20)).breaches == []


@pytest.mark.parametrize("seed", mostly_slow(range(12), 6))
def test_no_cleanup_after_a_holder_that_is_not_seen_yet(seed: int) -> None:
    """An executor started while another one's watch was silent. To the latter the new holder of a job seemed to be
    dead, and it cleaned up after the lost job before its transaction showed the mistake.
    """
    silent = Fault("one-way", 0.6, 9.0, (0.8, 0.9, 0.9, 0.6))  # exec-1 gets nothing from its watches
    restart = Fault("crash", 0.7, 0.2, (0.0, 0.0, 0.0, 0.0))  # exec-0, as a new incarnation
    submission = Submission(0, 0.3, "lone", "a", argument(seed, 40, 0.3), None, "collect_all", ())
    assert simulate(seed, scenario=small(seed, 2, submission, silent, restart)).breaches == []


def test_claims_of_dead_holders_are_revoked_before_a_coordinator_cleans_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cancelled operation, a holder that seemed dead had another claim by then, or its report of a success
    arrived while the cleanup removed the output.
    """
    name = "cancel"
    reports = [p for p in discover(references()[name]).points if p.label == "report"]
    frozen = [Strike(name, p.number, action, "before") for p in reports for action in ("freeze", "overtake")]
    assert [text for strike in frozen for text in run_strike(strike).timelines] == []

    async def careless(self: Reaper, op: Any, claims: Any) -> Any:
        return list(claims)

    monkeypatch.setattr(Reaper, "_revoke", careless)
    found = "".join(text for strike in frozen for text in run_strike(strike).timelines)
    assert "is reported as a success, but its output had been cleaned up" in found


@pytest.mark.parametrize("late", [0.15, 0.2, 0.35])
def test_a_late_copy_of_a_checkpoint_does_not_undo_later_ones(late: float) -> None:
    """The first copy of a repeated checkpoint arrived after the second checkpoint. It was applied, since the fence was
    the same, and the next holder resumed from it.
    """
    submission = Submission(0, 0.3, "lone", "a", argument(7, 6, 0.1), None, "collect_all", ())
    with without_logs():
        sim = Simulation(small(7, 1, submission))
        once: list[str] = []

        def request_fault(process: object, path: str) -> RequestFault | None:
            if path.endswith("/Txn") and sim.etcd.store.revision > seen[0] and not once:
                once.append(path)
                return RequestFault("late", before=late, silent=True, error=("UNAVAILABLE", CLOSED))
            return None

        seen = [next(r for r, kind in enumerate_writes(small(7, 1, submission)) if kind == "progress") - 1]
        sim.network.request_fault = request_fault
        report = sim.run()
    assert once
    assert report.breaches == []
    values = checkpoints(sim)
    assert values
    assert all(saved == sorted(saved) for saved in values.values()), values


def jobs_of(sim: Simulation) -> tuple[list[str], int]:
    """The final states of jobs, and the highest number of failures in a claim."""
    states, failures = [], 0
    for _, changes in sim.etcd.store.history:
        for key, value in ((change.kv.key, change.kv.value) for change in changes if not change.deleted):
            if key.startswith("distOpClaim."):
                failures = max(failures, Claim.decode(value).failures)
            elif key.endswith(".state") and key.split(".")[-2].isdigit() and len(key.split(".")[-2]) == 6:
                states.append(value.decode())
    return states, failures


@pytest.mark.parametrize("seed", range(6))
def test_executors_drained_one_after_the_other_fail_nothing(seed: int) -> None:
    """As in a rolling upgrade, one executor is always draining or drained."""
    submission = Submission(0, 0.3, "index", "a", {**argument(seed, 20, 0.3), "name": "x"}, None, None, ())
    actions = tuple(DrainAction(1.0 + 0.7 * n, f"exec-{n % 3}", 0.4, n % 2 == 0) for n in range(6))
    with without_logs():
        sim = Simulation(replace(small(seed, 3, submission), drains=actions))
        report = sim.run()
    assert report.breaches == []
    assert jobs_of(sim) == ([JobState.SUCCESS] * 20, 0)
    asked = [changes[0].kv.key for _, changes in sim.etcd.store.history if changes[0].kv.key.startswith("distOpNodeDr")]
    assert sorted(asked) == sorted(2 * [f"distOpNodeDrain.exec-{n % 3}" for n in range(6)])


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_node_with_a_full_disk_starts_nothing_and_counts_no_failure(hosts: int, slots: int) -> None:
    """It releases the jobs whose run it cannot write, and claims nothing for a while; others do, or it does later."""
    full = Fault("disk", 0.1, 8.0, (0.0, 0.0, 0.0, 0.0))  # the disk of exec-0
    submission = Submission(0, 0.5, "check", "a", argument(3, 6, 0.3), None, "collect_all", ())
    with without_logs():
        sim = Simulation(small(3, hosts, submission, full, slots=slots))
        report = sim.run()
    assert report.breaches == []
    assert jobs_of(sim) == ([JobState.SUCCESS] * 6, 0)
    (struck,) = sim.machines[0].incarnations
    began = {here: [e.begun for e in sim.effects.all if (e.incarnation == struck) is here] for here in (True, False)}
    assert all(at > full.at + full.lasts for at in began[True])
    assert len(began[True]) + len(began[False]) == 6
    assert any(at < full.at + full.lasts for at in began[False]) is (hosts == 2)
    when = {revision: at for at, revision, _, _ in sim.log}
    claims = [
        (when[revision], Claim.decode(change.kv.value))
        for revision, changes in sim.etcd.store.history
        for change in changes
        if change.kv.key.startswith("distOpClaim.") and not change.deleted
    ]
    claimed = sorted({at for at, claim in claims if claim.incarnation == struck})
    released = [at for at, claim in claims if claim.waiting and claim.executor == "exec-0"]
    assert released, "exec-0 released no job"
    again = [at for at in claimed if at > released[0]]
    assert all(at > released[0] + 0.9 * DISK_PAUSE for at in again)
    assert bool(again) is (hosts == 1)


@pytest.mark.parametrize("seed", range(6))
def test_jobs_that_one_node_cannot_run_are_done_by_the_other(seed: int) -> None:
    scenario = small(seed, 2, Submission(0, 0.3, "check", "a", argument(seed, 12, 0.1), None, None, ()))
    able, unable = scenario.hosts
    with without_logs():
        sim = Simulation(replace(scenario, hosts=(able, replace(unable, unable=("check",)))))
        report = sim.run()
    assert report.breaches == []
    assert jobs_of(sim) == ([JobState.SUCCESS] * 12, 0)


def test_an_operation_that_no_node_can_run_fails_with_the_cause() -> None:
    scenario = small(3, 2, Submission(0, 0.3, "check", "a", argument(3, 12, 0.1), None, None, ()))
    with without_logs():
        sim = Simulation(replace(scenario, hosts=tuple(replace(host, unable=("check",)) for host in scenario.hosts)))
        report = sim.run()
    assert report.breaches == []
    history = sim.etcd.store.get("distOpHistory.a.check.1")
    assert history is not None
    assert b"failed" in history.value
    assert b"this node lacks what the type needs" in history.value


@pytest.mark.parametrize("hang", [0.0, 40.0])
@pytest.mark.parametrize("where", [{}, {"zone": "a"}])
def test_a_job_that_no_node_can_run_now_fails_with_the_cause(hang: float, where: dict[str, str]) -> None:
    """Two nodes whose Spark hung at its start passed the job to each other for ever, as did one node with the labels.

    The hang lasts longer than the pause for which a node does not offer the type.
    """
    submission = Submission(
        0, 0.3, "check", "a", argument(3, 2, 0.1) | {"hang": hang}, None, None, (), options={"where": where}
    )
    one, two = small(3, 2, submission).hosts
    broken = replace(one, unable=("check",), recovers=1e9, labels={"zone": "a"})
    hosts = (broken, two if where else replace(two, unable=("check",), recovers=1e9))
    with without_logs():
        sim = Simulation(replace(small(3, 2, submission), hosts=hosts))
        report = sim.run()
    assert report.breaches == []
    history = sim.etcd.store.get("distOpHistory.a.check.1")
    assert history is not None
    assert b"this node lacks what the type needs" in history.value


def test_a_cancel_while_the_finish_is_prepared_takes_effect() -> None:
    """All jobs of an operation without completion code had succeeded. A cancel was seen while the coordinator read
    runOps for the finish. The finish compared the new state, so a cancelled operation ended as a success.
    """
    submission = Submission(0, 0.3, "quick", "a", argument(1, 2, 4.0), None, None, ())
    with without_logs():
        sim = Simulation(small(1, 1, submission))
        sim.run()
        ended = next(at for at, revision, _, _ in sim.log if revision == writes_of(sim, "distOpHistory.a.quick.1")[0])
        began = next(at for at, revision, _, _ in sim.log if revision == writes_of(sim, "distOp.a.quick.1.spec")[0])
        for n in range(24):
            cancel = Action(ended - began - 0.0005 * n, "cancel")
            assert Simulation(small(1, 1, replace(submission, actions=(cancel,)))).run().breaches == [], n


def writes_of(sim: Simulation, key: str) -> list[int]:
    """The revisions that put a key."""
    return [revision for revision, changes in sim.etcd.store.history if any(one.kv.key == key for one in changes)]


def test_a_claim_whose_answer_was_lost_is_known_after_its_refused_repetition() -> None:
    """The answer to a claim was lost, and the operation was paused before the repetition, which the gate refused. The
    executor reported that it was drained, but had claims that it did not know.
    """
    actions = (Action(0.7, "pause-now"), Action(7.0, "resume"))
    submission = Submission(0, 0.3, "quick", "a", argument(1, 5, 0.3), None, None, actions)
    with without_logs():
        sim = Simulation(replace(small(1, 1, submission), drains=(DrainAction(1.2, "exec-0", 8.0, False),)))
        claims: list[Txn] = []

        def sending(process: Process, path: str, asked: object) -> float:
            if isinstance(asked, Txn) and any(isinstance(op, Put) and "Claim." in op.key for op in asked.success):
                claims.append(asked)
            return 0.0

        sim.network.sending = sending
        answered: list[Txn] = []

        def request_fault(process: Process, path: str) -> RequestFault | None:
            if claims and not answered:
                answered.append(claims[0])
                return RequestFault("lost", silent=True)
            return None

        sim.network.request_fault = request_fault
        report = sim.run()
    won, released = writes_of(sim, "distOpClaim.a.quick.1.000000")[:2]
    assert won < writes_of(sim, "distOpPending.a.quick.1")[2] < released, "the pause did not come before the repetition"
    assert report.breaches == []
    assert jobs_of(sim) == ([JobState.SUCCESS] * 5, 0)


@pytest.mark.parametrize("late", [ANSWER + 0.5, ANSWER + 1.2])
def test_a_checkpoint_that_the_child_gave_up_on_does_not_block_later_ones(
    late: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It arrived after the child had sent the next checkpoint. That one was refused, since it compared the one before,
    and so were all later ones.
    """
    monkeypatch.setattr(simulated_behaviors, "script", lambda *_: Script(0.3, 12, "success"))
    submission = Submission(0, 0.3, "lone", "a", argument(7, 1, 0.1), None, "collect_all", ())
    scenario = small(7, 1, submission)
    first = next(r for r, kind in enumerate_writes(scenario) if kind == "progress")
    with without_logs():
        sim = Simulation(scenario)
        once: list[str] = []

        def request_fault(process: object, path: str) -> RequestFault | None:
            if path.endswith("/Txn") and sim.etcd.store.revision == first - 1 and not once:
                once.append(path)
                return RequestFault("slow", before=late)
            return None

        sim.network.request_fault = request_fault
        report = sim.run()
    assert once
    assert report.breaches == []
    (saved,) = checkpoints(sim).values()
    assert saved == sorted(saved)
    assert saved[0] == 1
    assert saved[-4:] == [8, 9, 10, 11]


def test_a_restarted_job_resumes_from_the_checkpoint_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job killed the child, and this job was restarted under the same claim, from a checkpoint older than those
    in flight. These were applied, and then the older ones of the new run.
    """

    def script(type_name: str, arg: object, partition: int, attempt: int) -> Script:
        return Script(0.2, 8, "success") if partition == 0 else Script(3.3, 1, "crash" if attempt == 1 else "success")

    monkeypatch.setattr(simulated_behaviors, "script", script)
    submission = Submission(0, 0.3, "index", "a", {**argument(7, 2, 0.1), "name": "x"}, None, "collect_all", ())
    scenario = small(7, 1, submission)
    key = "distOp.a.index.x.1.000000.progress"
    with without_logs():
        sim = Simulation(scenario)
        sim.run()
        fourth = [r for r, changes in sim.etcd.store.history if changes[0].kv.key == key][3]
        sim = Simulation(scenario)
        once: list[str] = []

        def request_fault(process: object, path: str) -> RequestFault | None:
            if path.endswith("/Txn") and sim.etcd.store.revision == fourth - 1 and not once:
                once.append(path)
                return RequestFault("slow", before=2.6)
            return None

        sim.network.request_fault = request_fault
        report = sim.run()
    assert once
    assert report.breaches == []
    saved = checkpoints(sim)[key]
    assert saved == sorted(saved)
    assert saved[-1] == 7


@pytest.mark.parametrize("late", [0.0, 0.4])
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_small_operation_is_claimed_once_even_if_the_answer_is_lost(hosts: int, late: float) -> None:
    """The transaction that reads its records also claims its jobs. If the answer is lost, the existing claims refuse
    the repetition, and the executor recognizes them as its own.
    """
    submission = Submission(0, 0.5, "lone", "a", argument(3, 4, 0.1), None, "collect_all", ())
    scenario = small(3, hosts, submission, slots=4)
    with without_logs():
        sim = Simulation(scenario)
        sim.run()
        families = [
            (r, {change.kv.key.partition(".")[0] for change in changes}) for r, changes in sim.etcd.store.history
        ]
        claimed = next(r for r, seen in families if "distOpClaim" in seen)
        sim = Simulation(scenario)
        lost: list[str] = []

        def request_fault(process: object, path: str) -> RequestFault | None:
            if path.endswith("/Txn") and sim.etcd.store.revision == claimed - 1 and not lost:
                lost.append(path)
                return RequestFault("lost", before=late, silent=True, error=("UNAVAILABLE", CLOSED))
            return None

        sim.network.request_fault = request_fault
        report = sim.run()
    assert lost
    assert report.breaches == []
    claims = [
        (change.kv.key, Claim.decode(change.kv.value).attempt)
        for _, changes in sim.etcd.store.history
        for change in changes
        if change.kv.key.startswith("distOpClaim.") and not change.deleted
    ]
    assert sorted(claims) == [(f"distOpClaim.a.lone.1.{n:06d}", 1) for n in range(4)]


def test_a_job_whose_end_is_being_written_is_not_claimed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job failed and was set to waiting, but the answer was lost. Its executor listed the job as free and claimed it.
    The end of this attempt was dropped, because the end of the one before was still being written. When that write was
    refused, the executor lost track of the claim, and its poll released it while the job ran.
    """

    def script(type_name: str, arg: object, partition: int, attempt: int) -> Script:
        return Script(0.05, 1, "error") if attempt == 1 else Script(12.0, 1, "success")

    monkeypatch.setattr(simulated_behaviors, "script", script)
    actions = (Action(0.4, "pause"), Action(0.4, "resume"))
    scenario = plain(
        4, 1, [Submission(0, 0.3, "check", "a", argument(4, 1, 0.1), None, "collect_all", actions)], poll=2.0
    )
    with without_logs():
        sim = Simulation(scenario)
        retried: list[float] = []
        now = [False]

        def sending(process: object, path: str, asked: Any) -> float:
            puts = [op for op in asked.success if isinstance(op, Put)] if isinstance(asked, Txn) else []
            now[0] = not retried and any(b'"retry_at"' in op.value for op in puts)
            if now[0]:
                retried.append(sim.loop.now)
            return 0.0

        sim.network.sending = sending
        sim.network.request_fault = lambda process, path: RequestFault("lost", silent=True) if now[0] else None
        report = sim.run()
    assert retried
    assert report.breaches == []
    assert [effect.attempt for effect in sim.effects.of("a/check/1", 0)] == [1, 2]


def failing_chords(seed: int, graphs: int = 3) -> Scenario:
    """Chords of two failing parts each, submitted within 0.3 s, on one executor."""
    chance = random.Random(seed)
    chords = [
        Submission(
            *(0, 0.3 + 0.3 * chance.random(), "noop", CLUSTER_TABLE, argument(seed * 100, 1, 0.001), None, None, ()),
            graph=2,
            failing=2,
            same_type=True,
        )
        for _ in range(graphs)
    ]
    return plain(seed, 1, chords, slots=4)


@pytest.mark.parametrize("seed", mostly_slow(range(1, 21), 8))
def test_two_predecessors_of_one_operation_fail_together(seed: int) -> None:
    """A successor's end and the signal of the second failure shared a transaction, which etcd always refused."""
    report = simulate(seed, scenario=failing_chords(seed))
    assert report.breaches == []
    assert report.ended == 9


def test_more_operations_end_at_once_than_one_transaction_finishes() -> None:
    """The remaining ones are finished by the next transactions."""
    submission = Submission(
        *(0, 0.3, "noop", CLUSTER_TABLE, argument(1, 1, 0.0), None, None, ()), graph=CROWD, same_type=True, form="group"
    )
    report = simulate(1, scenario=replace(plain(1, 2, [submission], slots=4), limits=replace(DEFAULT, finish_room=20)))
    assert report.breaches == []
    assert report.ended == CROWD + 1
    assert report.paths["group of finishes"] > 5
