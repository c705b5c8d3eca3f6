"""Faults in which a session and its lease end at different times, each caused deterministically on the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from distop.protocol import keys as K
from distop.protocol.jobs import JobState, Outcome
from distop.protocol.txn import Get, Txn
from tests.simulation.test_found_bugs import argument, jobs_of, small
from tests.simulation.test_rare_timings import incarnations, is_outcome, runs, times, written
from tests.simulator import Simulation, simulated_behaviors
from tests.simulator.machine import Machine
from tests.simulator.run import without_logs
from tests.simulator.scenario import Submission
from tests.simulator.server_links import Block
from tests.simulator.sim_worker import SimWorker
from tests.simulator.simulated_behaviors import Script
from tests.simulator.virtual_loop import Process


def could_change(asked: object) -> bool:
    """Whether a request is a transaction with a write."""
    return isinstance(asked, Txn) and any(not isinstance(op, Get) for op in (*asked.success, *asked.failure))


def outcomes(sim: Simulation) -> dict[int, list[str]]:
    """Partition → the incarnations that wrote an outcome, for the only operation."""
    found: dict[int, list[str]] = {}
    for _, changes in sim.etcd.store.history:
        for change in changes:
            if is_outcome(change.kv.key) and not change.deleted:
                by = Outcome.decode(change.kv.value).incarnation
                found.setdefault(sim.keys.parse(change.kv.key).partition, []).append(by)
    return found


def machine_of(sim: Simulation, process: object) -> Machine | None:
    """The host of a daemon process."""
    return next((machine for machine in sim.machines if machine.process is process), None)


def block(
    sim: Simulation, machine: Machine, requests: tuple[str, ...] = (), answers: tuple[str, ...] = ()
) -> list[Block]:
    """``Network.block`` on all links of a machine's daemon."""
    assert machine.process is not None
    return [sim.network.block(link, requests, answers) for link in sim.network.links(machine.process)]


ONE_WAY = pytest.mark.parametrize("way", ["requests", "answers"])


def blocked(way: str, kind: str) -> dict[str, tuple[str, ...]]:
    """Arguments of ``block`` for the requests or the answers of one kind."""
    return {"requests": (kind,)} if way == "requests" else {"answers": (kind,)}


@ONE_WAY
def test_renewals_are_blocked_while_transactions_pass(way: str) -> None:
    """F6: the session ends at its deadline, before its lease, although all other requests are answered.

    Its jobs stop, and nothing more is sent for them. They are taken over once the lease has ended.
    """
    submission = Submission(0, 0.5, "check", "a", argument(3, 60, 0.5), None, "collect_all", ())
    with without_logs():
        sim = Simulation(replace(small(3, 2, submission), calm=16.0))
        workers: list[SimWorker] = []
        sent: list[float] = []

        def block_renewals() -> None:
            struck = sim.machines[0]
            assert struck.worker is not None
            workers.append(struck.worker)
            block(sim, struck, **blocked(way, "Lease"))

        def sending(process: Process, path: str, asked: Any) -> float:
            if workers and process.label == workers[0].config.incarnation and could_change(asked):
                sent.append(sim.loop.now)
            return 0.0

        sim.loop.world_at(1.5, block_renewals)
        sim.network.sending = sending
        report = sim.run()
    struck, other = sim.machines
    first = workers[0].config.incarnation
    deadline = struck.deadline_of(workers[0]) - struck.source.boottime() + sim.loop.now
    (gone,) = times(sim, sim.keys.node(first), deleted=True)
    assert 1.5 < deadline < gone < 16.0
    assert any(1.5 < at < deadline and who == first for at, _, who, _ in sim.log), "its transactions were blocked"
    assert max(sent) <= deadline
    assert max(at for at, _, who, _ in sim.log if who == first) < gone
    theirs = [effect for effect in sim.effects.all if effect.incarnation == first]
    stopped = {effect.partition for effect in theirs if effect.how.startswith("killed")}
    assert stopped
    assert all(effect.ended is not None and effect.ended < gone for effect in theirs)
    assert report.breaches == []
    assert (len(struck.incarnations), len(other.incarnations)) == (2, 1)
    assert {p for p, ran in runs(sim).items() if len(ran) == 2} == stopped
    assert {p: by for p, by in outcomes(sim).items() if len(by) != 1 or (p in stopped and by == [first])} == {}
    assert jobs_of(sim) == ([JobState.SUCCESS] * 60, 1)


@ONE_WAY
def test_transactions_are_blocked_while_renewals_pass(way: str) -> None:
    """F6, the reverse: the session continues for any time. Reports and claims wait; no job is run again."""
    submission = Submission(0, 0.5, "check", "a", argument(3, 60, 0.5), None, "collect_all", ())
    with without_logs():
        sim = Simulation(replace(small(3, 2, submission), calm=16.0))
        sim.loop.world_at(1.5, lambda: block(sim, sim.machines[0], **blocked(way, "KV")))
        report = sim.run()
    assert report.breaches == []
    assert len(incarnations(sim)) == 2, "a session was lost"
    waited = [effect for effect in sim.effects.all if effect.incarnation == sim.machines[0].incarnations[0]]
    assert any(effect.begun < 1.5 < (effect.ended or 0.0) < 16.0 for effect in waited), "there was nothing to report"
    assert all(len(ran) == 1 for ran in runs(sim).values())
    assert jobs_of(sim) == ([JobState.SUCCESS] * 60, 0)


@pytest.mark.parametrize("taken_over", [False, True])
def test_a_lease_that_expires_while_a_report_is_under_way(taken_over: bool) -> None:
    """F12: a report is sent in time, but arrives after the end of the lease.

    It counts if the job was not taken over yet; otherwise it is refused. Either way there is one outcome.
    """
    submission = Submission(0, 0.5, "check", "a", argument(3, 4, 0.5), None, "collect_all", ())
    with without_logs():
        sim = Simulation(replace(small(3, 2, submission), calm=16.0))
        sim.network.latency = (0.001, 0.001)  # a takeover needs two messages once the lease has ended
        late: list[Txn] = []
        arrived: list[float] = []
        blocks: list[Block] = []

        def sending(process: object, path: str, asked: Any) -> float:
            if not late and written(asked, is_outcome):
                machine = machine_of(sim, process)
                assert machine is not None
                late.append(asked)
                block(sim, machine, requests=("Lease",))
                blocks.extend(block(sim, machine, requests=("KV",)))
            return 0.0

        committed = sim.etcd.committed
        assert committed is not None

        def looked(revision: int, changes: tuple[Any, ...], sender: str) -> None:
            committed(revision, changes, sender)
            for change in changes if late else ():
                ended = change.deleted and change.kv.key.startswith(f"{K.NODE}.")
                took = change.kv.key == late[0].compares[0].key and not change.deleted
                if took if taken_over else ended:
                    sim.network.unblock(blocks)

        def applied(process: object, path: str, asked: Any) -> None:
            if late and asked == late[0]:
                arrived.append(sim.loop.now)

        sim.etcd.committed, sim.network.sending, sim.network.applied = looked, sending, applied
        report = sim.run()
    holder = next(machine for machine in sim.machines if len(machine.incarnations) == 2)
    other = next(machine for machine in sim.machines if machine is not holder)
    first, (then,) = holder.incarnations[0], other.incarnations
    (partition,) = {sim.keys.parse(key).partition for key in written(late[0], is_outcome)}
    (gone,) = times(sim, sim.keys.node(first), deleted=True)
    assert gone < arrived[0] < 16.0
    assert report.breaches == []
    assert outcomes(sim)[partition] == [then if taken_over else first]
    assert runs(sim)[partition] == ([first, then] if taken_over else [first])
    assert jobs_of(sim)[0] == [JobState.SUCCESS] * 4


@pytest.mark.parametrize("acknowledged", [False, True])
def test_a_lease_that_is_lost_within_a_batch_of_jobs(acknowledged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """F13, F36: a lease is revoked once the first job of a batch has its outcome.

    The holder learns of it not by a watch, but by a renewal, or (if an old server still acknowledges renewals) by its
    missing node key. The other jobs of the batch are taken over, and its reports of them are refused.
    """

    def script(kind: str, arg: object, partition: int, attempt: int) -> Script:
        return Script(0.05 if partition % 2 else 0.3 + 0.15 * partition, 1, "success")

    monkeypatch.setattr(simulated_behaviors, "script", script)
    submission = Submission(0, 0.5, "quick", "a", argument(3, 8, 0.0), None, "collect_all", ())
    with without_logs():
        sim = Simulation(replace(small(3, 2, submission, slots=8), calm=16.0))
        sim.etcd.renews_revoked = acknowledged
        struck: list[str] = []
        at: list[float] = []
        reported: list[int] = []
        before: list[str] = []

        def applied(process: Process, path: str, asked: Any) -> None:
            partitions = [sim.keys.parse(key).partition for key in written(asked, is_outcome)]
            if not struck and 0 in partitions:  # the other executor's batch, the odd partitions, has ended
                machine = machine_of(sim, process)
                assert machine is not None
                struck.append(process.label)
                before.extend(incarnations(sim))
                at.append(sim.loop.now)
                block(sim, machine, answers=("Watch",))
                sim.effects.exempt(process.label)
                node = sim.keys.node(process.label)
                (lease,) = (lease for lease, keys in sim.etcd.store.leases.items() if node in keys)
                sim.etcd.end_lease(lease)
            elif struck and process.label == struck[0]:
                reported.extend(partitions)

        sim.network.applied = applied
        report = sim.run()
    (first,) = struck
    done = {p for p, by in outcomes(sim).items() if by == [first]}
    batch = {p for p, ran in runs(sim).items() if ran[0] == first}
    assert len(done) == 1, "the lease was not lost within the batch"
    assert done < batch
    assert set(reported) & (batch - done), "no report was sent after the loss"
    assert report.breaches == []
    assert all(who != first for when, _, who, _ in sim.log if when > at[0]), "a write after the loss was applied"
    (then,) = set(incarnations(sim)) - set(before)
    assert times(sim, then)[0] < 16.0, "the loss was not noticed without the watch"
    assert all(len(ran) == (2 if p in batch - done else 1) for p, ran in runs(sim).items())
    assert jobs_of(sim) == ([JobState.SUCCESS] * 8, 1)
