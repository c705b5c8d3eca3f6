"""How long history records and request ids are kept when clocks are wrong."""

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
from tests.simulator import Scenario, Simulation, draw_scenario
from tests.simulator.machine import Machine
from tests.simulator.run import Report, without_logs
from tests.simulator.scenario import FEW_RECORDS, Fault, Submission, plain
from tests.simulator.virtual_loop import Process


def submissions(count: int, every: float) -> tuple[Submission, ...]:
    arg = {"seed": 5, "partitions": 2, "pace": 0.1, "calls": 0.05, "trouble": 0.0, "chunk": 200}
    return tuple(Submission(0, 0.3 + n * every, "check", "a", arg, None, "collect_all", ()) for n in range(count))


def run(scenario: Scenario, *skews: float) -> Report:
    hosts = tuple(replace(host, skew=skew) for host, skew in zip(scenario.hosts, skews, strict=True))
    with without_logs():
        return Simulation(replace(scenario, hosts=hosts)).run()


@pytest.mark.parametrize("skews", [(0.0, 7200.0), (-7200.0, 0.0)])
def test_a_coordinator_whose_clock_is_hours_wrong_deletes_nothing_within_the_hour(skews: tuple[float, float]) -> None:
    """The first coordinator is killed; the second one finds records that are hours old by its clock."""
    killed = Fault("crash", 5.0, 3.0, (0.1, 0.1, 0.5, 0.5))
    limits = Limits(prune_every=0.5)
    done = run(replace(plain(1, 2, submissions(16, 1.0), killed), history_limit=1, limits=limits), *skews)
    assert list(map(str, done.breaches)) == []
    assert (done.ended, done.paths["deleted history"]) == (16, 0)


@pytest.mark.parametrize("seed", range(1, 5))
def test_records_are_deleted_after_their_hour_whatever_the_clocks(seed: int) -> None:
    """Here the hour lasts ten seconds; executors are killed, and etcd elects a new leader."""
    limits = Limits(prune_every=0.5, history_kept=10.0)
    faults = (Fault("crash", 12.0, 3.0, (0.1, 0.5, 0.5, 0.5)), Fault("leader", 31.0, 1.0, (0.5, 0.5, 0.5, 0.5)))
    scenario = replace(plain(seed, 2, submissions(30, 3.0), *faults), history_limit=3, limits=limits)
    done = run(scenario, 7200.0, -7200.0)
    assert list(map(str, done.breaches)) == []
    assert done.ended == 30
    assert done.paths["deleted history"] >= 15


def test_a_late_watermark_does_not_age_records_written_meanwhile() -> None:
    """Each watermark is written eight seconds late, of the ten seconds of its lease, after its sender has timed out."""
    limits = Limits(prune_every=0.5, history_kept=10.0)
    with without_logs():
        sim = Simulation(replace(plain(1, 2, submissions(30, 1.5)), history_limit=1, limits=limits))
        first, after = sim.keys.family(K.WATERMARK)

        def sending(process: Process, path: str, asked: object) -> float:
            puts = [op for op in asked.success if isinstance(op, Put)] if isinstance(asked, Txn) else []
            return 8.0 if any(first <= put.key < after for put in puts) else 0.0

        sim.network.sending = sending
        done = sim.run()
    assert list(map(str, done.breaches)) == []
    assert done.paths["deleted history"] >= 10


def test_a_record_is_kept_for_an_hour() -> None:
    """By default, as docs/contract.md guarantees, whatever ``distop.protocol.size_limits`` says."""
    assert DEFAULT.history_kept >= 3600.0
    assert Limits().history_kept >= 3600.0
    granted: list[int] = []
    with without_logs():
        sim = Simulation(replace(plain(1, 2, submissions(16, 1.0)), history_limit=1, limits=Limits(prune_every=0.5)))

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
    """One executor with a clock that is ahead; records are deleted half a minute after the end."""
    limits = Limits(history_kept=10.0)
    scenario = replace(plain(1, 1, submissions(30, 3.0)), history_age=30.0, limits=limits)
    return Simulation(replace(scenario, hosts=(replace(scenario.hosts[0], skew=ahead),)))


@pytest.mark.parametrize("ahead", [0.0, 20.0, -20.0])
def test_records_are_deleted_by_their_age(ahead: float) -> None:
    with without_logs():
        done = by_age(ahead).run()
    assert list(map(str, done.breaches)) == []
    assert done.ended == 30
    assert done.paths["deleted history"] >= 3


@pytest.mark.parametrize("ahead", [7200.0, -7200.0])
def test_a_clock_that_is_wrong_deletes_nothing_by_age(ahead: float) -> None:
    with without_logs():
        done = by_age(ahead).run()
    assert list(map(str, done.breaches)) == []
    assert (done.ended, done.paths["deleted history"]) == (30, 0)


@pytest.mark.parametrize("ahead", [0.0, 7200.0])
def test_a_clock_that_cannot_be_compared_deletes_nothing_by_age(ahead: float) -> None:
    with without_logs():
        sim = by_age(ahead)

        async def unreadable(config: EtcdConfig, endpoint: Endpoint, limit: float) -> float:
            raise ClockUnreadable("no HTTP")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Machine, "_read_clock", lambda self, *asked: unreadable(*asked))
            done = sim.run()
    assert list(map(str, done.breaches)) == []
    assert (done.ended, done.paths["deleted history"]) == (30, 0)


def test_a_record_deleted_before_its_age_is_a_breach(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor that does not check its clock deletes records that it wrote before a jump of the clock."""

    async def agrees(self: ClockCheck) -> bool:
        return True

    monkeypatch.setattr(ClockCheck, "agrees", agrees)
    with without_logs():
        sim = by_age(0.0)
        sim.loop.world_at(40.0, lambda: setattr(sim.machines[0].source, "skew", 3600.0))
        done = sim.run()
    assert {breach.kind for breach in done.breaches} == {"record deleted too early"}


def test_records_deleted_within_the_hour_are_a_breach_whatever_the_limits_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors with a wrong default of one second are found: the check has its own hour."""
    monkeypatch.setattr(DEFAULT, "history_kept", 1.0)
    limits = replace(DEFAULT, prune_every=0.5)
    with without_logs():
        done = Simulation(replace(plain(1, 2, submissions(16, 1.0)), history_limit=1, limits=limits)).run()
    assert {breach.kind for breach in done.breaches} == {"record deleted too early"}


def test_a_daemon_writes_its_clock_error_to_its_node_record() -> None:
    scenario = plain(1, 2, submissions(2, 1.0))
    hosts = (replace(scenario.hosts[0], skew=-7200.0), replace(scenario.hosts[1], skew=20.0))
    with without_logs():
        sim = Simulation(replace(scenario, hosts=hosts))
        assert sim.run().breaches == []
    found = [Node.decode(kv.value) for kv in sim.etcd.store.range(*sim.keys.family(K.NODE))]
    assert {node.executor: node.clock for node in found} == {"exec-0": -7200, "exec-1": 0}


def test_seeds_draw_wrong_clocks_and_records_beyond_the_limit() -> None:
    drawn = [draw_scenario(seed) for seed in range(1, 301)]
    wrong = [host.skew for scenario in drawn for host in scenario.hosts if abs(host.skew) > 3600.0]
    assert min(wrong) < -7200.0
    assert max(wrong) > 7200.0
    assert {scenario.history_limit for scenario in drawn} > set(FEW_RECORDS)
    aged = [scenario for scenario in drawn if scenario.history_age is not None]
    assert len(aged) > 0.05 * len(drawn)
    assert {scenario.history_limit for scenario in aged} == {1000}
