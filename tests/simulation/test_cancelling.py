"""Cancels of operations whose type or labels no live executor has."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from distop.protocol.records import History
from tests.simulator import Scenario, Simulation, draw_scenario, simulated_behaviors
from tests.simulator.departures import AWAY, AWAY_TABLE, with_departure
from tests.simulator.run import without_logs
from tests.simulator.scenario import Action, Fault, Host, Submission, plain
from tests.simulator.simulated_behaviors import Script

ARG = {"seed": 7, "partitions": 3, "pace": 60.0, "calls": 0.1, "trouble": 0.0, "chunk": 1000}


def run(scenario: Scenario) -> Simulation:
    with without_logs():
        sim = Simulation(scenario)
        sim.breaches += sim.run().breaches[len(sim.breaches) :]
    assert list(map(str, sim.breaches)) == []
    return sim


def record(sim: Simulation) -> History:
    (kv,) = sim.etcd.store.range(*sim.keys.history_range("a"))[:1]
    return History.decode(kv.value)


def cancelled(kind: str, cancel: float, host: Host, *faults: Fault, **options: object) -> Scenario:
    """A scenario with a cancelled operation of this type, this host, and another one that offers ``check-all``."""
    submission = Submission(0, 0.3, kind, "a", ARG, None, None, (Action(cancel, "cancel"),), options=options)
    scenario = plain(1, 1, (submission,), *faults, types=("check-all",))
    return replace(scenario, hosts=(replace(scenario.hosts[0], types=("check-all",)), host))


@pytest.mark.parametrize("cancel", [1.0, 6.0])
def test_a_cancel_ends_if_no_live_executor_has_the_labels(cancel: float) -> None:
    """The cancel comes before or after the executor leaves."""
    host = Host("exec-1", ("check-all",), 1, 0.0, labels={"zone": AWAY}, leaves=1.35 if cancel < 5 else 3.0)
    ended = record(run(cancelled("check-all", cancel, host, where={"zone": AWAY})))
    assert ended.state == "cancelled"
    reason = "the completion code did not run: no live executor offers `check-all` and has the labels zone=away"
    assert [error["text"] for error in ended.errors] == [reason]


def test_a_cancel_ends_if_no_executor_offers_the_type() -> None:
    host = Host("exec-1", ("rare",), 1, 0.0, leaves=3.0)
    ended = record(run(cancelled("rare", 6.0, host)))
    assert ended.state == "cancelled"
    assert [error["text"] for error in ended.errors] == [
        "the completion code did not run: no live executor offers `rare`"
    ]


@pytest.mark.parametrize(("kind", "where"), [("check-all", {"zone": AWAY}), ("rare", {})])
def test_an_executor_that_comes_back_soon_still_runs_the_completion_code(kind: str, where: dict[str, str]) -> None:
    host = Host("exec-1", (kind,), 1, 0.0, labels={"zone": AWAY})
    restart = Fault("crash", 2.0, 30.0, (0.9, 0.1, 0.5, 0.0))
    ended = record(run(cancelled(kind, 4.0, host, restart, where=where)))
    assert (ended.state, ended.errors) == ("cancelled", ())


@pytest.mark.parametrize(("kind", "where"), [("check-all", {"zone": AWAY}), ("rare", {})])
def test_an_operation_that_failed_fast_waits_for_its_completion_code(
    kind: str, where: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its only executor restarts, but later than a cancelled operation would wait."""

    def script(type_name: str, arg: object, partition: int, attempt: int) -> Script:
        return Script(0.2, 1, "failed") if partition == 0 else Script(60.0, 1, "success")

    monkeypatch.setattr(simulated_behaviors, "script", script)
    host = Host("exec-1", (kind,), 1, 0.0, labels={"zone": AWAY})
    submission = Submission(0, 0.3, kind, "a", {**ARG, "calls": 4.0}, None, "fail_fast", (), options={"where": where})

    def with_faults(*faults: Fault) -> Scenario:
        scenario = plain(1, 1, (submission,), *faults, types=("check-all",))
        return replace(scenario, hosts=(replace(scenario.hosts[0], types=("check-all",)), host))

    undisturbed = run(with_faults())
    decided = next(r for r, changes in undisturbed.etcd.store.history if changes[0].kv.key.endswith(".decision"))
    (at,) = [at for at, revision, _, _ in undisturbed.log if revision == decided]
    ended = record(run(with_faults(Fault("crash", at + 0.1, 100.0, (0.9, 0.1, 0.5, 0.0)))))
    assert ended.state == "failed"
    assert "the completion code did not run" not in str(ended.errors)


def test_an_operation_that_is_not_cancelled_waits_for_an_executor_of_its_type() -> None:
    """An executor without the type neither plans, starts nor ends it."""
    host = Host("exec-1", ("rare",), 1, 0.0)
    short = {**ARG, "pace": 0.1}
    actions = (Action(2.0, "cancel"),)
    submissions = (
        Submission(0, 0.3, "rare", "a", ARG, None, None, actions),
        Submission(0, 0.3, "rare", "a", short, None, None, (), delay=4.0),
    )
    scenario = plain(1, 1, submissions, Fault("crash", 1.5, 120.0, (0.9, 0.1, 0.5, 0.0)), types=("check-all",))
    sim = run(replace(scenario, hosts=(replace(scenario.hosts[0], types=("check-all",)), host)))
    found = sim.etcd.store.range(*sim.keys.history_range("a"))
    records = [History.decode(kv.value) for kv in found if not sim.keys.parse(kv.key).name]
    assert sorted(str(one.state) for one in records) == ["cancelled", "success"]


def test_a_successor_of_a_cancelled_operation_ends_although_no_executor_offers_its_type() -> None:
    """So does its own successor."""
    submissions = (
        Submission(0, 0.3, "check-all", "a", ARG, None, None, (Action(6.0, "cancel"),)),
        Submission(0, 0.6, "rare", "a", ARG, None, None, (), predecessors=((0, "success"),)),
        Submission(0, 0.9, "check-all", "a", ARG, None, None, (), predecessors=((1, "success"),)),
    )
    scenario = plain(1, 1, submissions, types=("check-all",))
    departing = Host("exec-1", ("rare",), 1, 0.0, leaves=3.0)
    sim = run(replace(scenario, hosts=(replace(scenario.hosts[0], types=("check-all",)), departing)))
    found = sim.etcd.store.range(*sim.keys.history_range("a"))
    records = [History.decode(kv.value) for kv in found if not sim.keys.parse(kv.key).name]
    assert [str(one.state) for one in records] == 3 * ["cancelled"]


def test_seeds_draw_departing_executors() -> None:
    drawn = [draw_scenario(seed) for seed in range(1, 301)]
    assert {host.types[0] for scenario in drawn for host in scenario.hosts if host.leaves} == {"check-all", "rare"}
    assert 10 < sum(any(host.leaves for host in scenario.hosts) for scenario in drawn) < 50
    assert any(submission.table == AWAY_TABLE for scenario in drawn for submission in scenario.submissions)
    more = [with_departure(random.Random(n), drawn[0].submissions, drawn[0].hosts, labels=False) for n in range(9)]
    assert {len(hosts) - len(drawn[0].hosts) for _, hosts in more} == {1}
    assert {
        (len(submissions) - len(drawn[0].submissions), len(submissions[-1].predecessors)) for submissions, _ in more
    } == {(1, 0), (2, 1)}
