"""Faults at moments that are too short to hit from outside, each caused deterministically on the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from distop.protocol import keys as K
from distop.protocol.jobs import Claim, JobState
from distop.protocol.txn import Put, Txn
from tests.simulation.test_found_bugs import argument, jobs_of, small
from tests.simulator import Simulation, simulated_behaviors
from tests.simulator.network import CLOSED, RequestFault
from tests.simulator.run import without_logs
from tests.simulator.scenario import Fault, Submission, plain
from tests.simulator.simulated_behaviors import Script


def incarnations(sim: Simulation) -> list[str]:
    """All incarnations that ever existed, by their node keys."""
    written = [
        change.kv.key
        for _, changes in sim.etcd.store.history
        for change in changes
        if change.kv.key.startswith(f"{K.NODE}.") and not change.deleted
    ]
    return list(dict.fromkeys(written))


def begun(txn: Any) -> int:
    """The number of operations that a request starts."""
    return sum(isinstance(op, Put) and op.key.endswith(".spec") for op in txn.success) if isinstance(txn, Txn) else 0


def writes(txn: Txn) -> bool:
    return any(isinstance(op, Put) for op in txn.success)


def written(asked: object, what: Callable[[str], bool]) -> list[str]:
    """The keys accepted by ``what`` that a transaction puts."""
    ops = asked.success if isinstance(asked, Txn) else ()
    return [op.key for op in ops if isinstance(op, Put) and what(op.key)]


def is_outcome(key: str) -> bool:
    return key.endswith(".outcome")


def is_spec(key: str) -> bool:
    return key.endswith(".spec")


def is_history(key: str) -> bool:
    return key.startswith(f"{K.HISTORY}.")


def times(sim: Simulation, key: str, *, deleted: bool = False) -> list[float]:
    """The times at which a key was written, or deleted."""
    when = {revision: at for at, revision, _, _ in sim.log if revision}
    return [
        when[revision]
        for revision, changes in sim.etcd.store.history
        if any(change.kv.key == key and change.deleted is deleted for change in changes)
    ]


def after_first(n: int) -> float:
    """The moment of the nth of several starts: the first is under way when the others are made."""
    return 0.5005 if n else 0.5


def runs(sim: Simulation) -> dict[int, list[str]]:
    """Partition → the incarnations that ran the job, for the only operation."""
    found: dict[int, list[str]] = {}
    for effect in sim.effects.all:
        if effect.kind == "job":
            found.setdefault(effect.partition, []).append(effect.incarnation)
    return found


def test_an_operation_that_ends_before_its_start_is_answered() -> None:
    """F29: the answer to a start is lost. The operation has ended and is cleaned up before the client's retry.

    The history shows the client that its request has started an operation.
    """
    submission = Submission(0, 0.5, "quick", "a", argument(5, 2, 0.02), None, "collect_all", ())
    with without_logs():
        sim = Simulation(small(5, 1, submission))
        starts: list[float] = []
        sent = [False]

        def sending(process: object, path: str, asked: Any) -> float:
            sent[0] = process is sim.clients[0] and isinstance(asked, Txn) and writes(asked)
            if sent[0]:
                starts.append(sim.loop.now)
            return 0.0

        def request_fault(process: object, path: str) -> RequestFault | None:
            return RequestFault("lost", silent=True) if sent[0] and len(starts) == 1 else None

        sim.network.sending, sim.network.request_fault = sending, request_fault
        report = sim.run()
    assert len(starts) == 2, "the client did not retry exactly once"
    gone = {
        revision
        for revision, changes in sim.etcd.store.history
        for change in changes
        if change.deleted and change.kv.key.startswith(f"{K.PENDING}.")
    }
    cleaned = max(at for at, revision, _, _ in sim.log if revision in gone)
    assert starts[0] < cleaned < starts[1], "the operation was not cleaned up before the retry"
    assert report.breaches == []
    assert sim.answers.started == {"request-0": "a/quick/1"}
    assert sim.answers.ended == {"a/quick/1": "success"}


@pytest.mark.parametrize("late", [0.005, 0.2, 1.0])
def test_a_group_of_starts_whose_first_copy_is_late(late: float) -> None:
    """F2: it arrives before or after its repetition; each request is started once, and its client learns so.

    No operation ends meanwhile, since that would be a race for the counters.
    """
    submissions = [
        Submission(0, after_first(n), "quick", "a", argument(n, 1, 3.0), None, "collect_all", ()) for n in range(6)
    ]
    with without_logs():
        sim = Simulation(plain(5, 1, submissions))
        sent: list[Txn] = []
        now = [False]

        def sending(process: object, path: str, asked: Any) -> float:
            now[0] = process is sim.clients[0] and begun(asked) > 1
            if now[0]:
                sent.append(asked)
            return 0.0

        def request_fault(process: object, path: str) -> RequestFault | None:
            lost = now[0] and len(sent) == 1
            return RequestFault("late", before=late, silent=True, error=("UNAVAILABLE", CLOSED)) if lost else None

        sim.network.sending, sim.network.request_fault = sending, request_fault
        report = sim.run()
    assert [begun(txn) for txn in sent] == [5, 5], "five starts were not sent together twice"
    assert sent[0] == sent[1]
    assert report.breaches == []
    assert report.paths["group of starts"] == 1
    assert sim.answers.started == {f"request-{n}": f"a/quick/{n + 1}" for n in range(6)}


@pytest.mark.parametrize(("done", "started"), [(False, 2), (True, 7)])
def test_a_client_that_is_killed_with_a_group_under_way(done: bool, started: int) -> None:
    """All operations of the group start or none; started ones end; another client gets the next numbers."""
    times = enumerate([*map(after_first, range(6)), 1.5])
    submissions = [
        Submission(n // 6, at, "quick", "a", argument(n, 1, 0.02), None, "collect_all", ()) for n, at in times
    ]
    with without_logs():
        sim = Simulation(replace(plain(5, 1, submissions), clients=2))

        def kill(process: object, asked: Any) -> None:
            if process is sim.clients[0] and begun(asked) == 5:
                sim.loop.kill(sim.clients[0])
                sim.network.died(sim.clients[0])

        def sending(process: object, path: str, asked: Any) -> float:
            if not done:
                kill(process, asked)
            return 0.0

        sim.network.sending, sim.network.applied = sending, lambda process, path, asked: kill(process, asked)
        report = sim.run()
    assert sim.clients[0].dead
    assert report.breaches == []
    assert sim.answers.started == {"request-0": "a/quick/1", "request-6": f"a/quick/{started}"}
    assert report.ended == started


@pytest.mark.parametrize("seed", range(5))
def test_renewals_that_a_deposed_leader_answers_with_unknown(seed: int) -> None:
    """F13: "not a primary lessor" arrives as UNKNOWN and says nothing about the lease.

    The renewal is repeated, and the session continues.
    """
    deposed = Fault("deposed", 1.0, 2.0, (0.0, 0.0, 0.0, 0.0))
    submission = Submission(0, 0.5, "check", "a", argument(seed, 12, 0.3), None, "collect_all", ())
    with without_logs():
        sim = Simulation(small(seed, 2, submission, deposed))
        answered: list[float] = []
        error = sim.network.renewal_error

        def renewal_error() -> object:
            found = error()
            if found is not None:
                answered.append(sim.loop.now)
            return found

        sim.network.renewal_error = renewal_error  # type: ignore[method-assign,assignment]
        report = sim.run()
    assert answered, "no renewal was answered with the error"
    assert report.breaches == []
    assert len(incarnations(sim)) == 2, "a session was lost"


@pytest.mark.parametrize("applied", [False, True], ids=["refused", "applied"])
@pytest.mark.parametrize("what", [is_spec, is_outcome, is_history], ids=["starts", "reports", "finishes"])
def test_etcd_is_full_in_the_middle_of_a_group_commit(
    what: Callable[[str], bool], applied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F15, T8: the group is refused, or applied and answered with the same error.

    It is sent again unchanged until there is room. Then each write is there once, and nothing is done twice.
    """
    monkeypatch.setattr(simulated_behaviors, "script", lambda *_: Script(1.0, 1, "success"))
    submissions = [Submission(0, 0.5, "quick", "a", argument(0, 3, 0.0), None, "collect_all", ()) for _ in range(6)]
    with without_logs():
        sim = Simulation(plain(5, 1, submissions, slots=20))
        sim.network.latency = (0.02, 0.02)  # so that several items are ready when etcd answers
        sent: list[Txn] = []
        room: list[float] = []

        def free() -> None:
            sim.etcd.space.empty()
            room.append(sim.loop.now)

        def sending(process: object, path: str, asked: Any) -> float:
            if not sent and len(written(asked, what)) > 1:
                sim.etcd.space.fill(late=0.5 if applied else 0.0)
                sim.loop.world_at(sim.loop.now + 3.0, free)
                sent.append(asked)
            elif sent and asked == sent[0]:
                sent.append(asked)
            return 0.0

        sim.network.sending = sending
        report = sim.run()
    keys = written(sent[0], what)
    assert len(sent) > 1, "the group was not sent again"
    put = [times(sim, key) for key in keys]
    assert all(len(at) == 1 for at in put)
    assert all((at < room[0]) is applied for (at,) in put)
    assert report.breaches == []
    assert len(incarnations(sim)) == 1
    assert sorted(sim.answers.started.values()) == [f"a/quick/{n + 1}" for n in range(6)]
    assert sim.answers.ended == {f"a/quick/{n + 1}": "success" for n in range(6)}
    assert jobs_of(sim) == ([JobState.SUCCESS] * 18, 0)
    assert len([effect for effect in sim.effects.all if effect.kind == "job"]) == 18


@pytest.mark.parametrize("after", [0.0, 0.05], ids=["before it is looked at", "afterwards"])
@pytest.mark.parametrize("jump", [-3600.0, 3600.0], ids=["back", "ahead"])
def test_clocks_that_jump_while_a_job_waits_for_another_try(
    jump: float, after: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F20: ``retry_at`` seems to be an hour ahead or past. The job is retried once, without waiting for that time.

    No session is lost, and no job is stopped, because of a wall clock.
    """

    def script(kind: str, arg: object, partition: int, attempt: int) -> Script:
        if partition == 0:
            return Script(0.1, 1, "error" if attempt == 1 else "success")
        return Script(12.0, 1, "success")

    monkeypatch.setattr(simulated_behaviors, "script", script)
    submission = Submission(0, 0.5, "check", "a", argument(3, 6, 0.0), None, "collect_all", ())
    with without_logs():
        sim = Simulation(replace(small(3, 2, submission, slots=4), poll=1000.0))  # too long for a poll to find the job
        committed = sim.etcd.committed
        assert committed is not None
        jumped: list[float] = []

        def strike() -> None:
            for machine in sim.machines:
                machine.source.skew += jump

        def looked(revision: int, changes: tuple[Any, ...], sender: str) -> None:
            committed(revision, changes, sender)
            for change in changes:
                claim = change.kv.key.startswith(f"{K.CLAIM}.") and not change.deleted
                if not jumped and claim and Claim.decode(change.kv.value).retry_at:
                    jumped.append(sim.loop.now + after)
                    sim.loop.world_at(jumped[0], strike)

        sim.etcd.committed = looked
        report = sim.run()
    assert jumped
    assert report.breaches == []
    assert len(incarnations(sim)) == 2, "a session was lost"
    others = [effect for effect in sim.effects.all if effect.partition != 0]
    (_, again) = (effect for effect in sim.effects.all if effect.partition == 0 and effect.kind == "job")
    assert again.begun < min(effect.ended or 0.0 for effect in others), "the retry waited for a hint"
    assert [len(ran) for _, ran in sorted(runs(sim).items())] == [2, 1, 1, 1, 1, 1]
    assert jobs_of(sim) == ([JobState.SUCCESS] * 6, 1)
