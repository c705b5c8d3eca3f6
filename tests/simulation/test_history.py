"""How long history records and request ids are kept where clocks are wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distop.daemon.clock_check import ClockCheck
from distop.protocol import keys as K
from distop.protocol.records import Node
from distop.protocol.size_limits import DEFAULT, Limits
from distop.protocol.txn import Put, Txn
from distop.store.connection_settings import Endpoint, EtcdConfig
from distop.store.server_clock import ClockUnreadable
from tests.simulator import Scenario, Simulation, scenario
from tests.simulator.machine import Machine
from tests.simulator.run import Report, quietly
from tests.simulator.scenario import FEW_RECORDS, Fault, Wish, plain
from tests.simulator.virtual_loop import Process


def wishes(count: int, every: float) -> tuple[Wish, ...]:
    arg = {"seed": 5, "partitions": 2, "pace": 0.1, "calls": 0.05, "trouble": 0.0, "chunk": 200}
    return tuple(Wish(0, 0.3 + n * every, "check", "a", arg, None, "collect_all", ()) for n in range(count))


def run(wanted: Scenario, *skews: float) -> Report:
    hosts = tuple(replace(host, skew=skew) for host, skew in zip(wanted.hosts, skews, strict=True))
    with quietly():
        return Simulation(replace(wanted, hosts=hosts)).run()


@pytest.mark.parametrize("skews", [(0.0, 7200.0), (-7200.0, 0.0)])
def test_a_coordinator_whose_clock_is_hours_wrong_forgets_nothing_within_the_hour(skews: tuple[float, float]) -> None:
    """The first one is killed: the second one finds records that are hours old by its clock."""
    killed = Fault("crash", 5.0, 3.0, (0.1, 0.1, 0.5, 0.5))
    limits = Limits(prune_every=0.5)
    done = run(replace(plain(1, 2, wishes(16, 1.0), killed), history_limit=1, limits=limits), *skews)
    assert list(map(str, done.breaches)) == []
    assert (done.ended, done.courses["forgotten history"]) == (16, 0)


@pytest.mark.parametrize("seed", range(1, 5))
def test_records_are_deleted_after_their_hour_whatever_the_clocks(seed: int) -> None:
    """The hour takes ten seconds; executors are killed, and etcd gets a new leader."""
    limits = Limits(prune_every=0.5, history_kept=10.0)
    faults = (Fault("crash", 12.0, 3.0, (0.1, 0.5, 0.5, 0.5)), Fault("leader", 31.0, 1.0, (0.5, 0.5, 0.5, 0.5)))
    wanted = replace(plain(seed, 2, wishes(30, 3.0), *faults), history_limit=3, limits=limits)
    done = run(wanted, 7200.0, -7200.0)
    assert list(map(str, done.breaches)) == []
    assert done.ended == 30
    assert done.courses["forgotten history"] >= 15


def test_a_watermark_that_etcd_applies_late_makes_nothing_old_that_was_written_meanwhile() -> None:
    """Each put of one takes eight of the ten seconds for which its lease lasts, and its sender gives it up."""
    limits = Limits(prune_every=0.5, history_kept=10.0)
    with quietly():
        sim = Simulation(replace(plain(1, 2, wishes(30, 1.5)), history_limit=1, limits=limits))
        first, after = sim.keys.family(K.WATERMARK)

        def sending(process: Process, path: str, asked: object) -> float:
            puts = [op for op in asked.success if isinstance(op, Put)] if isinstance(asked, Txn) else []
            return 8.0 if any(first <= put.key < after for put in puts) else 0.0

        sim.network.sending = sending
        done = sim.run()
    assert list(map(str, done.breaches)) == []
    assert done.courses["forgotten history"] >= 10


def test_a_record_is_kept_for_an_hour() -> None:
    """By default, whatever ``distop.protocol.size_limits`` says: docs/contract.md promises it."""
    assert DEFAULT.history_kept >= 3600.0
    assert Limits().history_kept >= 3600.0
    granted: list[int] = []
    with quietly():
        sim = Simulation(replace(plain(1, 2, wishes(16, 1.0)), history_limit=1, limits=Limits(prune_every=0.5)))

        def sending(process: Process, path: str, asked: object) -> float:
            puts = [op for op in asked.success if isinstance(op, Put)] if isinstance(asked, Txn) else []
            young = [put for put in puts if sim.keys.parse(put.key).name == "young"]
            granted.extend(sim.etcd.leases[put.lease].ttl for put in young)
            return 0.0

        sim.network.sending = sending
        done = sim.run()
    assert list(map(str, done.breaches)) == []
    assert granted
    assert set(granted) == {3600}


def by_age(ahead: float) -> Simulation:
    """The only executor, whose clock is so far ahead; its records go half a minute after their end."""
    limits = Limits(history_kept=10.0)
    wanted = replace(plain(1, 1, wishes(30, 3.0)), history_age=30.0, limits=limits)
    return Simulation(replace(wanted, hosts=(replace(wanted.hosts[0], skew=ahead),)))


@pytest.mark.parametrize("ahead", [0.0, 20.0, -20.0])
def test_records_are_deleted_by_their_age(ahead: float) -> None:
    with quietly():
        done = by_age(ahead).run()
    assert list(map(str, done.breaches)) == []
    assert done.ended == 30
    assert done.courses["forgotten history"] >= 3


@pytest.mark.parametrize("ahead", [7200.0, -7200.0])
def test_a_clock_that_is_wrong_deletes_nothing_by_age(ahead: float) -> None:
    with quietly():
        done = by_age(ahead).run()
    assert list(map(str, done.breaches)) == []
    assert (done.ended, done.courses["forgotten history"]) == (30, 0)


@pytest.mark.parametrize("ahead", [0.0, 7200.0])
def test_a_clock_that_cannot_be_compared_deletes_nothing_by_age(ahead: float) -> None:
    with quietly():
        sim = by_age(ahead)

        async def unreadable(config: EtcdConfig, endpoint: Endpoint, limit: float) -> float:
            raise ClockUnreadable("no HTTP")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Machine, "_read_clock", lambda self, *asked: unreadable(*asked))
            done = sim.run()
    assert list(map(str, done.breaches)) == []
    assert (done.ended, done.courses["forgotten history"]) == (30, 0)


def test_a_record_that_goes_before_its_age_is_a_breach(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor that does not compare its clock deletes records that it wrote before the clock went wrong."""

    async def agrees(self: ClockCheck) -> bool:
        return True

    monkeypatch.setattr(ClockCheck, "agrees", agrees)
    with quietly():
        sim = by_age(0.0)
        sim.loop.world_at(40.0, lambda: setattr(sim.machines[0].source, "skew", 3600.0))
        done = sim.run()
    assert {breach.kind for breach in done.breaches} == {"forgotten"}


def test_records_that_go_within_the_hour_are_a_breach_whatever_the_limits_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors that forget after a second by default are found: the judge has an hour of its own."""
    monkeypatch.setattr(DEFAULT, "history_kept", 1.0)
    limits = replace(DEFAULT, prune_every=0.5)
    with quietly():
        done = Simulation(replace(plain(1, 2, wishes(16, 1.0)), history_limit=1, limits=limits)).run()
    assert {breach.kind for breach in done.breaches} == {"forgotten"}


def test_a_daemon_whose_clock_is_wrong_says_so_in_its_node_record() -> None:
    wanted = plain(1, 2, wishes(2, 1.0))
    hosts = (replace(wanted.hosts[0], skew=-7200.0), replace(wanted.hosts[1], skew=20.0))
    with quietly():
        sim = Simulation(replace(wanted, hosts=hosts))
        assert sim.run().breaches == []
    found = [Node.decode(kv.value) for kv in sim.etcd.store.range(*sim.keys.family(K.NODE))]
    assert {node.executor: node.clock for node in found} == {"exec-0": -7200, "exec-1": 0}


def test_clocks_that_are_hours_wrong_and_records_beyond_the_limit_are_drawn() -> None:
    drawn = [scenario(seed) for seed in range(1, 301)]
    wrong = [host.skew for wanted in drawn for host in wanted.hosts if abs(host.skew) > 3600.0]
    assert min(wrong) < -7200.0
    assert max(wrong) > 7200.0
    assert {wanted.history_limit for wanted in drawn} > set(FEW_RECORDS)
    aged = [wanted for wanted in drawn if wanted.history_age is not None]
    assert len(aged) > 0.05 * len(drawn)
    assert {wanted.history_limit for wanted in aged} == {1000}
