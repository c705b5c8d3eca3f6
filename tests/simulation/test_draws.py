"""What seeds stand for, over many of them: clusters that are large enough, sizes that divide, faults that strike."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from distop.protocol.records import CLUSTER_TABLE
from distop.protocol.size_limits import DEFAULT, Limits
from tests.simulator import Simulation, scenario
from tests.simulator.run import Report, quietly
from tests.simulator.scenario import CROWD, FORMS, Fault, Scenario, Wish, expected, plain
from tests.simulator.scenes import SCENES, Scene, plainly
from tests.simulator.slow_graphs import MINUTE

SEEDS = range(1, 2001)


@pytest.fixture(scope="module")
def drawn() -> list[Scenario]:
    """What is drawn piece by piece: without scenes."""
    return [scenario(seed, scenes=False) for seed in SEEDS]


def run(wanted: Scenario) -> Report:
    with quietly():
        report = Simulation(wanted).run()
    assert report.breaches == []
    return report


def wish(partitions: int, **more: object) -> Wish:
    arg = {"seed": 1, "pace": 0.1, "trouble": 0.0, "chunk": 200, "calls": 0.05, "partitions": partitions, **more}
    return Wish(0, 0.3, "check", "a", arg, None, None, ())


def test_most_executors_offer_what_is_started(drawn: list[Scenario]) -> None:
    assert statistics.median(wanted.executors for wanted in drawn) >= 3
    assert {wanted.executors for wanted in drawn} == {1, 2, 3, 4, 5}
    assert statistics.median(wanted.workers for wanted in drawn) >= 3
    assert sum(wanted.workers == len(wanted.hosts) for wanted in drawn) > 0.75 * len(drawn)
    assert {1, 2, 3} <= {wanted.workers for wanted in drawn if len(wanted.hosts) > wanted.workers}


def test_sizes_are_small_in_half_of_the_seeds(drawn: list[Scenario]) -> None:
    besides = ("finish_room", "gone", "overdue", "history_kept")  # these are drawn besides
    alike = {name: getattr(DEFAULT, name) for name in besides}
    small = [wanted for wanted in drawn if replace(wanted.limits, **alike) != DEFAULT]
    assert 0.45 * len(drawn) < len(small) < 0.55 * len(drawn)
    # Many partitions on one side or the other: what is divided is not only what is small anyway.
    assert sum(wanted.partitions > wanted.limits.cleaned for wanted in small) > 0.4 * len(small)
    assert any(wanted.namespace for wanted in drawn)
    assert any(wanted.past > wanted.history_limit for wanted in drawn)
    assert any(wish.table == CLUSTER_TABLE for wanted in drawn for wish in wanted.wishes)


def test_a_sixth_of_the_seeds_have_a_series(drawn: list[Scenario]) -> None:
    """docs/internals/testing.md says so; half of them have an id."""
    series = [wish for wanted in drawn for wish in wanted.wishes if wish.every]
    assert 0.15 * len(drawn) < len(series) < 0.185 * len(drawn)
    assert 0.4 * len(series) < sum(wish.id == "series" for wish in series) < 0.6 * len(series)
    assert {wish.times for wish in series} == {2, 3, 4}


def test_executors_die_after_a_limit_was_lowered(drawn: list[Scenario]) -> None:
    """Their claims are more than each claim compares."""
    few = [wanted for wanted in drawn if wanted.limits.gone < 2 and wanted.limits.overdue < DEFAULT.overdue]
    assert len(few) > 0.1 * len(drawn)
    lowered = [w for w in few if any(one.acts and one.acts[0].what.startswith("alter max_jobs=") for one in w.wishes)]
    killed = [wanted for wanted in lowered if sum(fault.kind == "crash" for fault in wanted.faults) >= 3]
    assert len(killed) > 0.03 * len(drawn)


def test_both_branches_of_client_transactions_run(drawn: list[Scenario]) -> None:
    """Each branch runs first in some seeds, and compares change while copies are late."""
    turning = [wish for wanted in drawn for wish in wanted.wishes if wish.turns]
    assert sum(any(wish.turns for wish in wanted.wishes) for wanted in drawn) > 0.1 * len(drawn)
    assert sum(wish.turns[0] < wish.after for wish in turning) > 0.2 * len(turning)
    assert sum(len(wish.turns) > 1 for wish in turning) > 0.6 * len(turning)


def test_clients_race_to_replace_a_pending_operation(drawn: list[Scenario]) -> None:
    """Several clients race, since the starts of one client share transactions."""
    races = [[wish for wish in wanted.wishes if wish.id == "hourly"] for wanted in drawn]
    clients = [{wish.client for wish in race} for race in races if race]
    assert len(clients) > 0.08 * len(drawn)
    assert all(len(racing) >= 3 for racing in clients)
    assert {wish.on_duplicate for race in races for wish in race} == {"replace", "combine"}
    assert all(wish.client < wanted.clients for wanted in drawn for wish in wanted.wishes)


def test_graphs_are_inserted_slowly_and_dependencies_are_added_late(drawn: list[Scenario]) -> None:
    slow = [wish.pause for wanted in drawn for wish in wanted.wishes if wish.pause]
    assert len(slow) > 0.03 * len(drawn)
    assert sum(4 * pause > MINUTE - 10.0 for pause in slow) > 0.3 * len(slow)
    added = [any(act.what.startswith("behind") for wish in wanted.wishes for act in wish.acts) for wanted in drawn]
    assert sum(added) > 0.05 * len(drawn)
    assert sum(any(fault.kind == "view-late" for fault in wanted.faults) for wanted in drawn) > 0.05 * len(drawn)


def test_graphs_of_each_form_succeed_or_fail_in_part_or_as_a_whole(drawn: list[Scenario]) -> None:
    graphs = [wish for wanted in drawn for wish in wanted.wishes if wish.graph]
    assert {wish.form for wish in graphs} == set(FORMS)
    assert sum(wish.failing == 0 for wish in graphs) > 50
    assert sum(0 < wish.failing < wish.graph for wish in graphs) > 50
    together = [wish for wish in graphs if wish.alike and wish.form == "chord" and wish.failing >= 2]
    assert len(together) > 100
    assert {wish.table == CLUSTER_TABLE for wish in together} == {True, False}
    crowds = [wanted for wanted in drawn if any(wish.graph == CROWD for wish in wanted.wishes)]
    assert {wanted.limits.finish_room for wanted in crowds} == {20, 40, DEFAULT.finish_room}
    assert sum(wanted.limits.finishes == DEFAULT.finishes for wanted in crowds) > len(crowds) / 2


def test_most_faults_begin_while_operations_are_expected_to_run(drawn: list[Scenario]) -> None:
    inside = total = 0
    for wanted in drawn:
        times = expected(wanted.wishes, wanted.hosts)
        inside += sum(any(begin <= fault.at <= end for begin, end in times) for fault in wanted.faults)
        total += len(wanted.faults)
    assert inside > 0.9 * total


def test_a_fault_counts_where_it_strikes_while_an_operation_is_open() -> None:
    jobs = wish(8, pace=2.0)
    begun = run(plain(1, 2, [jobs], Fault("clock", 2.0, 0.0, (0.0, 0.5, 0.0, 0.0))))
    over = run(plain(1, 2, [jobs], Fault("clock", 100.0, 0.0, (0.0, 0.5, 0.0, 0.0))))
    assert (begun.faults, over.faults) == ({"clock": 1}, {})
    assert begun.claimed == 2


def test_small_limits_take_the_courses_of_large_operations() -> None:
    wanted = replace(plain(1, 2, [wish(30, pace=0.01)], slots=4, calm=5.0), past=9, history_limit=5)
    usual = run(wanted)
    assert (usual.courses["chunk"], usual.courses["page of a cleanup"], usual.courses["own plan"]) == (0, 0, 0)
    assert usual.courses["forgotten history"] == 5
    small = Limits(plan_bytes=1, claims=2, reports=2, cleaned=7, outcomes=4, outcomes_ahead=0, pruned=2)
    divided = run(replace(wanted, limits=small))
    assert divided.courses["chunk"] >= 8
    assert divided.courses["page of a cleanup"] == 4
    assert divided.courses["forgotten history"] == 5


def test_a_start_that_brings_its_own_plan() -> None:
    own = replace(wish(1), type="noop", table=CLUSTER_TABLE)
    report = run(replace(plain(1, 2, [own]), namespace="prod"))
    assert (report.ended, report.courses["own plan"], report.claimed) == (1, 1, 1)


def test_a_seventh_of_the_seeds_are_scenes_and_each_scene_is_drawn(drawn: list[Scenario]) -> None:
    arranged = [one for one in drawn if scenario(one.seed) != one]
    assert 0.13 * len(drawn) < len(arranged) < 0.17 * len(drawn)
    missing = [
        scene.__name__ for scene in SCENES if not any(scenario(one.seed) == scene(plainly(one)) for one in arranged)
    ]
    assert missing == []


def test_scenes_come_with_faults_that_nobody_chose_alone() -> None:
    for seed in SEEDS[:200]:
        assert scenario(seed, focus=("crash",)) == scenario(seed, focus=("crash",), scenes=False)
        assert scenario(seed, faults=False) == scenario(seed, faults=False, scenes=False)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_a_scene_without_a_planted_bug_breaches_nothing(scene: Scene) -> None:
    run(scene(plainly(scenario(3, scenes=False))))
