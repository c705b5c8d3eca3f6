"""Moments of the fault list at which a session and its lease part ways: each is caused for certain, on the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from distop.protocol import keys as K
from distop.protocol.jobs import JobState, Outcome
from distop.protocol.txn import Get, Txn
from tests.simulation.test_moments import incarnations, is_outcome, runs, times, written
from tests.simulation.test_scenarios import argument, jobs_of, small
from tests.simulator import Simulation, simulated_behaviors
from tests.simulator.machine import Machine
from tests.simulator.run import quietly
from tests.simulator.scenario import Wish
from tests.simulator.server_links import Hold
from tests.simulator.sim_worker import SimWorker
from tests.simulator.simulated_behaviors import Script
from tests.simulator.virtual_loop import Process


def could_change(asked: object) -> bool:
    """It is a transaction that does more than to read."""
    return isinstance(asked, Txn) and any(not isinstance(op, Get) for op in (*asked.success, *asked.failure))


def outcomes(sim: Simulation) -> dict[int, list[str]]:
    """By partition: the incarnations that wrote an outcome. There is one operation."""
    found: dict[int, list[str]] = {}
    for _, changes in sim.etcd.store.history:
        for change in changes:
            if is_outcome(change.kv.key) and not change.deleted:
                by = Outcome.decode(change.kv.value).incarnation
                found.setdefault(sim.keys.parse(change.kv.key).partition, []).append(by)
    return found


def machine_of(sim: Simulation, process: object) -> Machine | None:
    """The host whose daemon this is."""
    return next((machine for machine in sim.machines if machine.process is process), None)


def hold(sim: Simulation, machine: Machine, held: tuple[str, ...] = (), muted: tuple[str, ...] = ()) -> list[Hold]:
    """As ``Network.hold``, on all that its daemon has to etcd."""
    assert machine.process is not None
    return [sim.network.hold(link, held, muted) for link in sim.network.links(machine.process)]


ONE_WAY = pytest.mark.parametrize("way", ["requests", "answers"])


def blocked(way: str, kind: str) -> dict[str, tuple[str, ...]]:
    """What holds back this kind alone: what is asked, or what is answered."""
    return {"held": (kind,)} if way == "requests" else {"muted": (kind,)}


@ONE_WAY
def test_renewals_are_blocked_while_transactions_pass(way: str) -> None:
    """F6: the session ends by its own deadline, before its lease, although all else is answered: its jobs stop, and
    nothing more is sent for them. They are taken over once the lease has ended.
    """
    wish = Wish(0, 0.5, "check", "a", argument(3, 60, 0.5), None, "collect_all", ())
    with quietly():
        sim = Simulation(replace(small(3, 2, wish), calm=16.0))
        workers: list[SimWorker] = []
        sent: list[float] = []

        def block() -> None:
            struck = sim.machines[0]
            assert struck.worker is not None
            workers.append(struck.worker)
            hold(sim, struck, **blocked(way, "Lease"))

        def sending(process: Process, path: str, asked: Any) -> float:
            if workers and process.label == workers[0].config.incarnation and could_change(asked):
                sent.append(sim.loop.now)
            return 0.0

        sim.loop.world_at(1.5, block)
        sim.network.sending = sending
        report = sim.run()
    struck, other = sim.machines
    first = workers[0].config.incarnation
    deadline = struck.deadline_of(workers[0]) - struck.source.boottime() + sim.loop.now
    (gone,) = times(sim, sim.keys.node(first), deleted=True)
    assert 1.5 < deadline < gone < 16.0
    assert any(1.5 < at < deadline and who == first for at, _, who, _ in sim.log), "its transactions passed"
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
    """F6, the reverse: the session goes on, however long that lasts. Reports and claims wait; no job is run again."""
    wish = Wish(0, 0.5, "check", "a", argument(3, 60, 0.5), None, "collect_all", ())
    with quietly():
        sim = Simulation(replace(small(3, 2, wish), calm=16.0))
        sim.loop.world_at(1.5, lambda: hold(sim, sim.machines[0], **blocked(way, "KV")))
        report = sim.run()
    assert report.breaches == []
    assert len(incarnations(sim)) == 2, "nobody lost a session"
    waited = [effect for effect in sim.effects.all if effect.incarnation == sim.machines[0].incarnations[0]]
    assert any(effect.begun < 1.5 < (effect.ended or 0.0) < 16.0 for effect in waited), "it had something to report"
    assert all(len(ran) == 1 for ran in runs(sim).values())
    assert jobs_of(sim) == ([JobState.SUCCESS] * 60, 0)


@pytest.mark.parametrize("taken_over", [False, True])
def test_a_lease_that_expires_while_a_report_is_under_way(taken_over: bool) -> None:
    """F12: it was sent in time and comes when the lease has ended. Where the job was not taken over yet, it counts;
    where it was, it is refused. There is one outcome either way.
    """
    wish = Wish(0, 0.5, "check", "a", argument(3, 4, 0.5), None, "collect_all", ())
    with quietly():
        sim = Simulation(replace(small(3, 2, wish), calm=16.0))
        sim.network.latency = (0.001, 0.001)  # a takeover needs two messages once the lease has ended
        late: list[Txn] = []
        arrived: list[float] = []
        holds: list[Hold] = []

        def sending(process: object, path: str, asked: Any) -> float:
            if not late and written(asked, is_outcome):
                machine = machine_of(sim, process)
                assert machine is not None
                late.append(asked)
                hold(sim, machine, held=("Lease",))
                holds.extend(hold(sim, machine, held=("KV",)))
            return 0.0

        committed = sim.etcd.committed
        assert committed is not None

        def looked(revision: int, changes: tuple[Any, ...], sender: str) -> None:
            committed(revision, changes, sender)
            for change in changes if late else ():
                ended = change.deleted and change.kv.key.startswith(f"{K.NODE}.")
                took = change.kv.key == late[0].compares[0].key and not change.deleted
                if took if taken_over else ended:
                    sim.network.release(holds)

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
    """F13, F36: somebody revokes it when the first job of a batch has its outcome. The holder hears of that by no
    watch, but by a renewal, or, where an old server still acknowledges these, by its node key, which is not there. The
    others of the batch are taken over; what it reports of them until then is refused.
    """

    def script(kind: str, arg: object, partition: int, attempt: int) -> Script:
        return Script(0.05 if partition % 2 else 0.3 + 0.15 * partition, 1, "success")

    monkeypatch.setattr(simulated_behaviors, "script", script)
    wish = Wish(0, 0.5, "quick", "a", argument(3, 8, 0.0), None, "collect_all", ())
    with quietly():
        sim = Simulation(replace(small(3, 2, wish, slots=8), calm=16.0))
        sim.etcd.renews_revoked = acknowledged
        struck: list[str] = []
        at: list[float] = []
        reported: list[int] = []
        before: list[str] = []

        def applied(process: Process, path: str, asked: Any) -> None:
            partitions = [sim.keys.parse(key).partition for key in written(asked, is_outcome)]
            if not struck and 0 in partitions:  # the other one's batch, the odd ones, is over
                machine = machine_of(sim, process)
                assert machine is not None
                struck.append(process.label)
                before.extend(incarnations(sim))
                at.append(sim.loop.now)
                hold(sim, machine, muted=("Watch",))
                sim.effects.forsake(process.label)
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
    assert len(done) == 1, "it was within the batch"
    assert done < batch
    assert set(reported) & (batch - done), "it reported jobs that were not its own any more"
    assert report.breaches == []
    assert all(who != first for when, _, who, _ in sim.log if when > at[0]), "it wrote nothing more"
    (then,) = set(incarnations(sim)) - set(before)
    assert times(sim, then)[0] < 16.0, "it heard of its end without that watch"
    assert all(len(ran) == (2 if p in batch - done else 1) for p, ran in runs(sim).items())
    assert jobs_of(sim) == ([JobState.SUCCESS] * 8, 1)
