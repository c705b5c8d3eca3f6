"""Bugs that the simulator found, each as the scenario that shows it, whatever the seed makes of the rest."""

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
from tests.simulator.network import CLOSED, Fate
from tests.simulator.reference_runs import references
from tests.simulator.run import quietly
from tests.simulator.scenario import CROWD, Act, DrainAct, Fault, Wish, plain
from tests.simulator.sim_worker import ANSWER
from tests.simulator.simulated_behaviors import Script
from tests.simulator.strikes import Strike, one_strike
from tests.simulator.virtual_loop import Process
from tests.support.further import with_further


def small(seed: int, hosts: int, wish: Wish, *faults: Fault, slots: int = 2) -> Scenario:
    """Some executors, one operation, no more than these faults."""
    return plain(seed, hosts, [wish], *faults, slots=slots)


def argument(seed: int, partitions: int, pace: float) -> dict[str, object]:
    return {"seed": seed, "partitions": partitions, "pace": pace, "trouble": 0.0, "chunk": 100_000, "calls": 0.05}


def enumerate_writes(wanted: Scenario) -> list[tuple[int, str]]:
    """The revisions of a run that nobody disturbs, with the last part of the first key that each wrote."""
    sim = Simulation(wanted)
    sim.run()
    return [(revision, changes[0].kv.key.rpartition(".")[2]) for revision, changes in sim.etcd.store.history]


def checkpoints(sim: Simulation) -> dict[str, list[int]]:
    """What was saved at each key, in order."""
    values: dict[str, list[int]] = {}
    for _, changes in sim.etcd.store.history:
        for change in changes:
            if change.kv.key.endswith(".progress") and not change.deleted:
                values.setdefault(change.kv.key, []).append(int(change.kv.value))
    return values


@pytest.mark.parametrize("seed", with_further(range(30), 10))
def test_a_cancelled_operation_is_decided_by_all_jobs_that_ended(seed: int) -> None:
    """One job failed, so the others were told to stop. The claims were seen to be gone, and the state of the last job,
    of which another watch tells, was not yet seen: decision and history counted one job too few.
    """
    wish = Wish(0, 0.5, "check", "a", {**argument(seed, 40, 0.1), "trouble": 1.0}, None, "fail_fast", ())
    assert simulate(seed, wanted=small(seed, 3, wish, slots=20)).breaches == []


@pytest.mark.parametrize("seed", with_further(range(12), 6))
def test_nobody_cleans_up_after_a_holder_that_only_is_not_seen_yet(seed: int) -> None:
    """An executor began while another one's watch was silent. To that one the new holder of a job seemed to be gone,
    and where a lost job fails it was cleaned up after, before the transaction that would have told.
    """
    silent = Fault("one-way", 0.6, 9.0, (0.8, 0.9, 0.9, 0.6))  # exec-1 hears nothing from its watches
    restart = Fault("crash", 0.7, 0.2, (0.0, 0.0, 0.0, 0.0))  # exec-0, as a new incarnation
    wish = Wish(0, 0.3, "lone", "a", argument(seed, 40, 0.3), None, "collect_all", ())
    assert simulate(seed, wanted=small(seed, 2, wish, silent, restart)).breaches == []


def test_the_claims_of_the_gone_are_revoked_before_a_coordinator_cleans_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a cancelled operation. A holder that seemed gone was one of another claim by then; or its report of a success
    came while the cleanup removed the output.
    """
    name = "cancel"
    reports = [p for p in discover(references()[name]).points if p.label == "report"]
    frozen = [Strike(name, p.number, action, "before") for p in reports for action in ("freeze", "overtake")]
    assert [story for strike in frozen for story in one_strike(strike).stories] == []

    async def careless(self: Reaper, op: Any, claims: Any) -> Any:
        return list(claims)

    monkeypatch.setattr(Reaper, "_revoke", careless)
    found = "".join(story for strike in frozen for story in one_strike(strike).stories)
    assert "is reported as a success, and its output had been cleaned up" in found


@pytest.mark.parametrize("late", [0.15, 0.2, 0.35])
def test_a_late_copy_of_a_checkpoint_does_not_undo_later_ones(late: float) -> None:
    """The first checkpoint was sent twice, and its first copy arrived after the second checkpoint: under the same
    fence, so it was applied, and who took over went on from it.
    """
    wish = Wish(0, 0.3, "lone", "a", argument(7, 6, 0.1), None, "collect_all", ())
    with quietly():
        sim = Simulation(small(7, 1, wish))
        once: list[str] = []

        def fate(process: object, path: str) -> Fate | None:
            if path.endswith("/Txn") and sim.etcd.store.revision > seen[0] and not once:
                once.append(path)
                return Fate("late", before=late, silent=True, error=("UNAVAILABLE", CLOSED))
            return None

        seen = [next(r for r, kind in enumerate_writes(small(7, 1, wish)) if kind == "progress") - 1]
        sim.network.fate = fate
        report = sim.run()
    assert once
    assert report.breaches == []
    values = checkpoints(sim)
    assert values
    assert all(saved == sorted(saved) for saved in values.values()), values


def jobs_of(sim: Simulation) -> tuple[list[str], int]:
    """The states that jobs got, and the most failures that a claim counted."""
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
    """A rolling upgrade: at each moment some executor is being emptied, or stands empty."""
    wish = Wish(0, 0.3, "index", "a", {**argument(seed, 20, 0.3), "name": "x"}, None, None, ())
    acts = tuple(DrainAct(1.0 + 0.7 * n, f"exec-{n % 3}", 0.4, n % 2 == 0) for n in range(6))
    with quietly():
        sim = Simulation(replace(small(seed, 3, wish), drains=acts))
        report = sim.run()
    assert report.breaches == []
    assert jobs_of(sim) == ([JobState.SUCCESS] * 20, 0)
    asked = [changes[0].kv.key for _, changes in sim.etcd.store.history if changes[0].kv.key.startswith("distOpNodeDr")]
    assert sorted(asked) == sorted(2 * [f"distOpNodeDrain.exec-{n % 3}" for n in range(6)])


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_node_whose_disk_is_full_starts_nothing_and_blames_no_job(hosts: int, slots: int) -> None:
    """What it cannot write down it lets go of; it claims nothing more for a while, and others do, or it does later."""
    full = Fault("disk", 0.1, 8.0, (0.0, 0.0, 0.0, 0.0))  # of exec-0
    wish = Wish(0, 0.5, "check", "a", argument(3, 6, 0.3), None, "collect_all", ())
    with quietly():
        sim = Simulation(small(3, hosts, wish, full, slots=slots))
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
    assert released, "it had won some"
    again = [at for at in claimed if at > released[0]]
    assert all(at > released[0] + 0.9 * DISK_PAUSE for at in again)
    assert bool(again) is (hosts == 1)


@pytest.mark.parametrize("seed", range(6))
def test_what_one_node_cannot_run_is_done_by_the_other(seed: int) -> None:
    wanted = small(seed, 2, Wish(0, 0.3, "check", "a", argument(seed, 12, 0.1), None, None, ()))
    able, unable = wanted.hosts
    with quietly():
        sim = Simulation(replace(wanted, hosts=(able, replace(unable, unable=("check",)))))
        report = sim.run()
    assert report.breaches == []
    assert jobs_of(sim) == ([JobState.SUCCESS] * 12, 0)


def test_what_no_node_can_run_fails_and_says_why() -> None:
    wanted = small(3, 2, Wish(0, 0.3, "check", "a", argument(3, 12, 0.1), None, None, ()))
    with quietly():
        sim = Simulation(replace(wanted, hosts=tuple(replace(host, unable=("check",)) for host in wanted.hosts)))
        report = sim.run()
    assert report.breaches == []
    history = sim.etcd.store.get("distOpHistory.a.check.1")
    assert history is not None
    assert b"failed" in history.value
    assert b"this node lacks what the type needs" in history.value


@pytest.mark.parametrize("trying", [0.0, 40.0])
@pytest.mark.parametrize("where", [{}, {"zone": "a"}])
def test_a_job_that_no_node_can_run_now_fails_with_the_cause(trying: float, where: dict[str, str]) -> None:
    """Two nodes whose Spark hangs at its start handed the job to each other for ever.

    The start takes longer than the pause for which a node leaves the type out. A single node with the labels did the
    same.
    """
    wish = Wish(
        0, 0.3, "check", "a", argument(3, 2, 0.1) | {"trying": trying}, None, None, (), options={"where": where}
    )
    one, two = small(3, 2, wish).hosts
    broken = replace(one, unable=("check",), recovers=1e9, labels={"zone": "a"})
    hosts = (broken, two if where else replace(two, unable=("check",), recovers=1e9))
    with quietly():
        sim = Simulation(replace(small(3, 2, wish), hosts=hosts))
        report = sim.run()
    assert report.breaches == []
    history = sim.etcd.store.get("distOpHistory.a.check.1")
    assert history is not None
    assert b"this node lacks what the type needs" in history.value


def test_a_cancel_while_the_finish_is_prepared_is_not_overlooked() -> None:
    """All jobs of an operation without completion code had succeeded. While its coordinator read runOps for the finish,
    a cancel was seen, and the finish was written under the state as it was by then: a success of what was cancelled.
    """
    wish = Wish(0, 0.3, "quick", "a", argument(1, 2, 4.0), None, None, ())
    with quietly():
        sim = Simulation(small(1, 1, wish))
        sim.run()
        ended = next(at for at, revision, _, _ in sim.log if revision == writes_of(sim, "distOpHistory.a.quick.1")[0])
        began = next(at for at, revision, _, _ in sim.log if revision == writes_of(sim, "distOp.a.quick.1.spec")[0])
        for n in range(24):
            cancel = Act(ended - began - 0.0005 * n, "cancel")
            assert Simulation(small(1, 1, replace(wish, acts=(cancel,)))).run().breaches == [], n


def writes_of(sim: Simulation, key: str) -> list[int]:
    """The revisions that put a key."""
    return [revision for revision, changes in sim.etcd.store.history if any(one.kv.key == key for one in changes)]


def test_a_claim_that_was_won_and_not_told_is_known_once_its_repetition_is_refused() -> None:
    """The answer to a claim was lost. Before it was repeated, the operation was paused: the repetition was refused
    because of the gate, and the executor said that it was drained, with claims that it did not know of.
    """
    acts = (Act(0.7, "pause-now"), Act(7.0, "resume"))
    wish = Wish(0, 0.3, "quick", "a", argument(1, 5, 0.3), None, None, acts)
    with quietly():
        sim = Simulation(replace(small(1, 1, wish), drains=(DrainAct(1.2, "exec-0", 8.0, False),)))
        claims: list[Txn] = []

        def sending(process: Process, path: str, asked: object) -> float:
            if isinstance(asked, Txn) and any(isinstance(op, Put) and "Claim." in op.key for op in asked.success):
                claims.append(asked)
            return 0.0

        sim.network.sending = sending
        answered: list[Txn] = []

        def fate(process: Process, path: str) -> Fate | None:
            if claims and not answered:
                answered.append(claims[0])
                return Fate("lost", silent=True)
            return None

        sim.network.fate = fate
        report = sim.run()
    won, released = writes_of(sim, "distOpClaim.a.quick.1.000000")[:2]
    assert won < writes_of(sim, "distOpPending.a.quick.1")[2] < released, "it was paused before the claim was repeated"
    assert report.breaches == []
    assert jobs_of(sim) == ([JobState.SUCCESS] * 5, 0)


@pytest.mark.parametrize("late", [ANSWER + 0.5, ANSWER + 1.2])
def test_a_checkpoint_that_the_child_gave_up_on_does_not_block_later_ones(
    late: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It arrived after the child had saved the next one. That was refused, since it followed the same checkpoint, and
    so were all after it.
    """
    monkeypatch.setattr(simulated_behaviors, "script", lambda *_: Script(0.3, 12, "success"))
    wish = Wish(0, 0.3, "lone", "a", argument(7, 1, 0.1), None, "collect_all", ())
    wanted = small(7, 1, wish)
    first = next(r for r, kind in enumerate_writes(wanted) if kind == "progress")
    with quietly():
        sim = Simulation(wanted)
        once: list[str] = []

        def fate(process: object, path: str) -> Fate | None:
            if path.endswith("/Txn") and sim.etcd.store.revision == first - 1 and not once:
                once.append(path)
                return Fate("slow", before=late)
            return None

        sim.network.fate = fate
        report = sim.run()
    assert once
    assert report.breaches == []
    (saved,) = checkpoints(sim).values()
    assert saved == sorted(saved)
    assert saved[0] == 1
    assert saved[-4:] == [8, 9, 10, 11]


def test_a_job_that_is_run_again_goes_on_from_what_was_being_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour killed the child, and the job was begun again under the same claim, from the checkpoint before those
    that were on their way. Then those were saved, and after them the older ones of the new run.
    """

    def script(type_name: str, arg: object, partition: int, attempt: int) -> Script:
        return Script(0.2, 8, "success") if partition == 0 else Script(3.3, 1, "crash" if attempt == 1 else "success")

    monkeypatch.setattr(simulated_behaviors, "script", script)
    wish = Wish(0, 0.3, "index", "a", {**argument(7, 2, 0.1), "name": "x"}, None, "collect_all", ())
    wanted = small(7, 1, wish)
    key = "distOp.a.index.x.1.000000.progress"
    with quietly():
        sim = Simulation(wanted)
        sim.run()
        fourth = [r for r, changes in sim.etcd.store.history if changes[0].kv.key == key][3]
        sim = Simulation(wanted)
        once: list[str] = []

        def fate(process: object, path: str) -> Fate | None:
            if path.endswith("/Txn") and sim.etcd.store.revision == fourth - 1 and not once:
                once.append(path)
                return Fate("slow", before=2.6)
            return None

        sim.network.fate = fate
        report = sim.run()
    assert once
    assert report.breaches == []
    saved = checkpoints(sim)[key]
    assert saved == sorted(saved)
    assert saved[-1] == 7


@pytest.mark.parametrize("late", [0.0, 0.4])
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_small_operation_is_claimed_once_whatever_becomes_of_the_answer(hosts: int, late: float) -> None:
    """Its jobs are claimed with the transaction that reads its records. Where the answer to that is lost, the
    repetition is refused by what stands there, and the claims are found to be the executor's own.
    """
    wish = Wish(0, 0.5, "lone", "a", argument(3, 4, 0.1), None, "collect_all", ())
    wanted = small(3, hosts, wish, slots=4)
    with quietly():
        sim = Simulation(wanted)
        sim.run()
        families = [
            (r, {change.kv.key.partition(".")[0] for change in changes}) for r, changes in sim.etcd.store.history
        ]
        claimed = next(r for r, seen in families if "distOpClaim" in seen)
        sim = Simulation(wanted)
        lost: list[str] = []

        def fate(process: object, path: str) -> Fate | None:
            if path.endswith("/Txn") and sim.etcd.store.revision == claimed - 1 and not lost:
                lost.append(path)
                return Fate("lost", before=late, silent=True, error=("UNAVAILABLE", CLOSED))
            return None

        sim.network.fate = fate
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


def test_a_job_whose_end_is_being_written_is_not_claimed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job broke, and was set to waiting; the answer to that was lost. Its executor listed it, took it for anybody's,
    and claimed it: what became of that attempt was dropped, because the end of the one before was still being written.
    When that was refused the claim was forgotten, and the poll gave it to others while the job ran.
    """

    def script(type_name: str, arg: object, partition: int, attempt: int) -> Script:
        return Script(0.05, 1, "error") if attempt == 1 else Script(12.0, 1, "success")

    monkeypatch.setattr(simulated_behaviors, "script", script)
    acts = (Act(0.4, "pause"), Act(0.4, "resume"))
    wanted = plain(4, 1, [Wish(0, 0.3, "check", "a", argument(4, 1, 0.1), None, "collect_all", acts)], poll=2.0)
    with quietly():
        sim = Simulation(wanted)
        retried: list[float] = []
        now = [False]

        def sending(process: object, path: str, asked: Any) -> float:
            puts = [op for op in asked.success if isinstance(op, Put)] if isinstance(asked, Txn) else []
            now[0] = not retried and any(b'"retry_at"' in op.value for op in puts)
            if now[0]:
                retried.append(sim.loop.now)
            return 0.0

        sim.network.sending = sending
        sim.network.fate = lambda process, path: Fate("lost", silent=True) if now[0] else None
        report = sim.run()
    assert retried
    assert report.breaches == []
    assert [effect.attempt for effect in sim.effects.of("a/check/1", 0)] == [1, 2]


def failing_chords(seed: int, graphs: int = 3) -> Scenario:
    """Chords of two parts that fail, submitted within 0.3 s, on one executor."""
    chance = random.Random(seed)
    chords = [
        Wish(
            *(0, 0.3 + 0.3 * chance.random(), "noop", CLUSTER_TABLE, argument(seed * 100, 1, 0.001), None, None, ()),
            graph=2,
            failing=2,
            alike=True,
        )
        for _ in range(graphs)
    ]
    return plain(seed, 1, chords, slots=4)


@pytest.mark.parametrize("seed", with_further(range(1, 21), 8))
def test_two_predecessors_of_one_operation_fail_together(seed: int) -> None:
    """A successor's end and the signal of the second failure shared a transaction.

    etcd refused it for ever.
    """
    report = simulate(seed, wanted=failing_chords(seed))
    assert report.breaches == []
    assert report.ended == 9


def test_more_end_at_once_than_one_transaction_finishes() -> None:
    """Those that are beyond it go with the next ones."""
    wish = Wish(
        *(0, 0.3, "noop", CLUSTER_TABLE, argument(1, 1, 0.0), None, None, ()), graph=CROWD, alike=True, form="group"
    )
    report = simulate(1, wanted=replace(plain(1, 2, [wish], slots=4), limits=replace(DEFAULT, finish_room=20)))
    assert report.breaches == []
    assert report.ended == CROWD + 1
    assert report.courses["group of finishes"] > 5
