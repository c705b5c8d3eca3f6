"""Statistics of drawn scenarios: sizes of clusters, small limits, effective faults, and coverage of all situations."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import replace

import pytest

from distop.protocol.operation_options import fits
from distop.protocol.records import CLUSTER_TABLE
from distop.protocol.size_limits import DEFAULT, Limits
from scripts import etcd_servers
from tests.simulator import Simulation, draw_scenario
from tests.simulator.departures import needs_departing
from tests.simulator.run import Report, without_logs
from tests.simulator.scenario import CROWD, FORMS, VERSIONS, Fault, Scenario, Submission, expected, plain
from tests.simulator.scenes import (
    FOCUSED,
    POLICY_SCENES,
    SCENES,
    Focus,
    Scene,
    drawn_scene,
    in_scene,
    simplified,
    three_members,
)
from tests.simulator.slow_graphs import MINUTE

SEEDS = range(1, 2001)


@pytest.fixture(scope="module")
def drawn() -> list[Scenario]:
    """Scenarios without scenes."""
    return [draw_scenario(seed, scenes=False) for seed in SEEDS]


def run(scenario: Scenario) -> Report:
    with without_logs():
        report = Simulation(scenario).run()
    assert report.breaches == []
    return report


def submission(partitions: int, **more: object) -> Submission:
    arg = {"seed": 1, "pace": 0.1, "trouble": 0.0, "chunk": 200, "calls": 0.05, "partitions": partitions, **more}
    return Submission(0, 0.3, "check", "a", arg, None, None, ())


def test_most_executors_offer_the_started_types(drawn: list[Scenario]) -> None:
    assert statistics.median(scenario.executors for scenario in drawn) >= 3
    assert {scenario.executors for scenario in drawn} == {1, 2, 3, 4, 5}
    assert statistics.median(scenario.workers for scenario in drawn) >= 3
    assert sum(scenario.workers == len(scenario.hosts) for scenario in drawn) > 0.75 * len(drawn)
    assert {1, 2, 3} <= {scenario.workers for scenario in drawn if len(scenario.hosts) > scenario.workers}


def test_each_label_selector_fits_an_executor_that_can_run_the_type(drawn: list[Scenario]) -> None:
    """Otherwise the operation waits for such an executor for ever, rightly.

    Seed 171773 drew the labels for one type, and replaced the type.
    """
    for scenario in (*drawn, draw_scenario(171773)):
        for one in scenario.submissions:
            where = one.options.get("where", {})
            if where and not needs_departing(one.type, one.table, where):
                able = [h for h in scenario.hosts if one.type in h.types and one.type not in h.unable]
                assert any(fits(where, host.labels) for host in able), (scenario.seed, one)


def test_sizes_are_small_in_half_of_the_seeds(drawn: list[Scenario]) -> None:
    separate = ("finish_room", "gone", "overdue", "history_kept")  # drawn separately
    default = {name: getattr(DEFAULT, name) for name in separate}
    small = [scenario for scenario in drawn if replace(scenario.limits, **default) != DEFAULT]
    assert 0.45 * len(drawn) < len(small) < 0.55 * len(drawn)
    # In many of them the limit divides the largest operation.
    assert sum(scenario.partitions > scenario.limits.cleaned for scenario in small) > 0.4 * len(small)
    assert any(scenario.namespace for scenario in drawn)
    assert any(scenario.past > scenario.history_limit for scenario in drawn)
    assert any(submission.table == CLUSTER_TABLE for scenario in drawn for submission in scenario.submissions)


def test_the_etcd_version_of_tests_and_deployments_is_drawn_most_often(drawn: list[Scenario]) -> None:
    found = Counter(scenario.version for scenario in drawn)
    assert found.keys() == VERSIONS.keys()
    assert found[etcd_servers.DEFAULT] > 0.5 * len(drawn)


def test_a_sixth_of_the_seeds_have_a_series(drawn: list[Scenario]) -> None:
    """As docs/internals/testing.md says; half of the series have an id."""
    series = [submission for scenario in drawn for submission in scenario.submissions if submission.every]
    assert 0.15 * len(drawn) < len(series) < 0.185 * len(drawn)
    assert 0.4 * len(series) < sum(submission.id == "series" for submission in series) < 0.6 * len(series)
    assert {submission.times for submission in series} == {2, 3, 4}


def test_executors_die_after_a_limit_was_lowered(drawn: list[Scenario]) -> None:
    """There are more lost claims than each claim compares."""
    few = [scenario for scenario in drawn if scenario.limits.gone < 2 and scenario.limits.overdue < DEFAULT.overdue]
    assert len(few) > 0.1 * len(drawn)
    lowered = [
        w
        for w in few
        if any(one.actions and one.actions[0].what.startswith("alter max_jobs=") for one in w.submissions)
    ]
    killed = [scenario for scenario in lowered if sum(fault.kind == "crash" for fault in scenario.faults) >= 3]
    assert len(killed) > 0.03 * len(drawn)


def test_both_branches_of_client_transactions_run(drawn: list[Scenario]) -> None:
    """In some seeds each branch is the first one, and compares change while copies are late."""
    turning = [submission for scenario in drawn for submission in scenario.submissions if submission.toggles]
    assert sum(any(submission.toggles for submission in scenario.submissions) for scenario in drawn) > 0.1 * len(drawn)
    assert sum(submission.toggles[0] < submission.after for submission in turning) > 0.2 * len(turning)
    assert sum(len(submission.toggles) > 1 for submission in turning) > 0.6 * len(turning)


def test_clients_race_to_replace_a_pending_operation(drawn: list[Scenario]) -> None:
    """Several clients, since the starts of one client share transactions."""
    races = [[submission for submission in scenario.submissions if submission.id == "hourly"] for scenario in drawn]
    clients = [{submission.client for submission in race} for race in races if race]
    assert len(clients) > 0.08 * len(drawn)
    assert all(len(racing) >= 3 for racing in clients)
    assert {submission.on_duplicate for race in races for submission in race} == {"replace", "combine"}
    assert all(submission.client < scenario.clients for scenario in drawn for submission in scenario.submissions)


def test_graphs_are_inserted_slowly_and_dependencies_are_added_late(drawn: list[Scenario]) -> None:
    slow = [submission.pause for scenario in drawn for submission in scenario.submissions if submission.pause]
    assert len(slow) > 0.03 * len(drawn)
    assert sum(4 * pause > MINUTE - 10.0 for pause in slow) > 0.3 * len(slow)
    added = [
        any(action.what.startswith("depend-on") for submission in scenario.submissions for action in submission.actions)
        for scenario in drawn
    ]
    assert sum(added) > 0.05 * len(drawn)
    assert sum(any(fault.kind == "view-late" for fault in scenario.faults) for scenario in drawn) > 0.05 * len(drawn)


def test_graphs_of_each_form_succeed_or_fail_in_part_or_as_a_whole(drawn: list[Scenario]) -> None:
    graphs = [submission for scenario in drawn for submission in scenario.submissions if submission.graph]
    assert {submission.form for submission in graphs} == set(FORMS)
    assert sum(submission.failing == 0 for submission in graphs) > 50
    assert sum(0 < submission.failing < submission.graph for submission in graphs) > 50
    together = [
        submission
        for submission in graphs
        if submission.same_type and submission.form == "chord" and submission.failing >= 2
    ]
    assert len(together) > 100
    assert {submission.table == CLUSTER_TABLE for submission in together} == {True, False}
    crowds = [scenario for scenario in drawn if any(submission.graph == CROWD for submission in scenario.submissions)]
    assert {scenario.limits.finish_room for scenario in crowds} == {20, 40, DEFAULT.finish_room}
    assert sum(scenario.limits.finishes == DEFAULT.finishes for scenario in crowds) > len(crowds) / 2


def test_most_faults_begin_while_operations_are_expected_to_run(drawn: list[Scenario]) -> None:
    inside = total = 0
    for scenario in drawn:
        times = expected(scenario.submissions, scenario.hosts)
        inside += sum(any(begin <= fault.at <= end for begin, end in times) for fault in scenario.faults)
        total += len(scenario.faults)
    assert inside > 0.9 * total


def test_a_fault_counts_only_while_an_operation_is_open() -> None:
    jobs = submission(8, pace=2.0)
    begun = run(plain(1, 2, [jobs], Fault("clock", 2.0, 0.0, (0.0, 0.5, 0.0, 0.0))))
    over = run(plain(1, 2, [jobs], Fault("clock", 100.0, 0.0, (0.0, 0.5, 0.0, 0.0))))
    assert (begun.faults, over.faults) == ({"clock": 1}, {})
    assert begun.claimed == 2


def test_small_limits_take_the_paths_of_large_operations() -> None:
    scenario = replace(plain(1, 2, [submission(30, pace=0.01)], slots=4, calm=5.0), past=9, history_limit=5)
    usual = run(scenario)
    assert (usual.paths["chunk"], usual.paths["page of a cleanup"], usual.paths["start with a plan"]) == (0, 0, 0)
    assert usual.paths["deleted history"] == 5
    small = Limits(plan_bytes=1, claims=2, reports=2, cleaned=7, outcomes=4, outcomes_ahead=0, pruned=2)
    divided = run(replace(scenario, limits=small))
    assert divided.paths["chunk"] >= 8
    assert divided.paths["page of a cleanup"] == 4
    assert divided.paths["deleted history"] == 5


def test_a_start_with_its_plan() -> None:
    own = replace(submission(1), type="noop", table=CLUSTER_TABLE)
    report = run(replace(plain(1, 2, [own]), namespace="prod"))
    assert (report.ended, report.paths["start with a plan"], report.claimed) == (1, 1, 1)


def test_a_seventh_of_the_seeds_are_scenes_and_each_scene_is_drawn(drawn: list[Scenario]) -> None:
    changed = [one for one in drawn if drawn_scene(one.seed) in [(scene, ()) for scene in SCENES]]
    assert 0.13 * len(drawn) < len(changed) < 0.17 * len(drawn)
    missing = [
        scene.__name__
        for scene in SCENES
        if not any(draw_scenario(one.seed) == scene(simplified(one)) for one in changed)
    ]
    assert missing == []


def test_one_in_forty_seeds_is_a_focused_scene_and_each_is_drawn() -> None:
    found = [seed for seed in range(1, 10_001) if drawn_scene(seed) in FOCUSED]
    assert 0.02 * 10_000 < len(found) < 0.03 * 10_000
    assert {drawn_scene(seed) for seed in found} == set(FOCUSED)
    seed = next(seed for seed in SEEDS if drawn_scene(seed) == (three_members, ("lag", "cut")))
    scenario = draw_scenario(seed)
    assert scenario.members == 3
    assert {fault.kind for fault in scenario.faults} == {"lag", "cut"}


def test_one_in_twenty_five_seeds_is_a_scene_of_policies_and_each_is_drawn() -> None:
    found = [seed for seed in range(1, 10_001) if drawn_scene(seed) in POLICY_SCENES]
    assert 0.03 * 10_000 < len(found) < 0.05 * 10_000
    assert {drawn_scene(seed) for seed in found} == set(POLICY_SCENES)


def test_scenes_are_drawn_only_with_unrestricted_faults() -> None:
    for seed in SEEDS[:200]:
        assert draw_scenario(seed, focus=("crash",)) == draw_scenario(seed, focus=("crash",), scenes=False)
        assert draw_scenario(seed, faults=False) == draw_scenario(seed, faults=False, scenes=False)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_a_scene_without_a_planted_bug_breaches_nothing(scene: Scene) -> None:
    run(in_scene(3, scene, ()))


@pytest.mark.parametrize(("scene", "focus"), FOCUSED)
def test_a_focused_scene_without_a_planted_bug_breaches_nothing(scene: Scene | None, focus: Focus) -> None:
    run(in_scene(3, scene, focus))
