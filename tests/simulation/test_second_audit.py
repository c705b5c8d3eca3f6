"""The second auditor on simulated clusters: it accepts clean histories.

It finds planted bugs.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from auditing.auditor import SecondAuditor
from auditing.history import Revision

from distop.testing.simulation import Scenario, Simulation, scenario
from distop.testing.simulation.run import quietly
from tests.simulation.searching import BUGS, require_recorded, seeds_from

if TYPE_CHECKING:
    from auditing.auditor import Violation

SEEDS = range(1, 13)
LOOKED_AT = 80
"""Schedules in which a planted bug is looked for."""
VISIBLE = {
    "drop_the_gate_compare": 47,
    "take_over_a_live_incarnation": 1,
    "elect_while_another_lives": 3,
    "reap_the_claims_of_live_holders": 46,
    "report_without_its_fence": 26,
    "drop_the_fence_compare_of_a_release": 74,
    "complete_on_a_stale_count": 78,
    "finish_without_comparing_run_ops": 64,
    "count_no_failure_at_a_takeover": 10,
    "retry_an_unknown_outcome_with_a_new_transaction": 10,
    "finish_a_group_under_the_guards_of_its_first": 25,
    "clean_up_before_the_history_is_written": 1,
    "successors_go_on_however_it_ended": 1,
    "what_waits_for_others_begins": 1,
    "it_is_cleaned_up_before_its_successors_are_told": 1,
    "claim_a_permit_without_comparing_it": 2,
    "a_report_that_keeps_its_permit": 1,
    "an_end_keeps_the_id": 1,
    "what_shall_follow_begins_at_once": 1,
    "the_last_keys_of_one_of_a_series_take_the_id_of_the_next_along": 1,
}
"""Planted bugs of all kinds of rules, whose effect stands in etcd's history. Each has its first seed: a cheap one that
shows the bug. The search continues through the other seeds.
"""


def audited(wanted: Scenario) -> tuple[SecondAuditor, list[Violation]]:
    """Run a scenario, and audit its history from the moment on at which it begins."""
    simulation = Simulation(wanted)
    first = simulation.etcd.revision
    before = {kv.key: kv.value.decode() for kv in simulation.etcd.store.listing()}
    simulation.run()
    auditor = SecondAuditor(wanted.namespace, clock=None)
    auditor.begin(before)
    for number, changes in simulation.etcd.store.history:
        if number > first:
            written = {one.kv.key: None if one.deleted else one.kv.value.decode() for one in changes}
            auditor.feed(Revision(number, written))
    return auditor, auditor.violations


def test_histories_under_faults_break_no_rule() -> None:
    operations = 0
    with quietly():
        for seed in SEEDS:
            auditor, found = audited(scenario(seed))
            assert found == [], f"seed {seed}"
            operations += auditor.operations
    assert operations > 10 * len(SEEDS)


@pytest.mark.parametrize("name", VISIBLE)
def test_a_planted_bug_breaks_a_rule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (planted,) = (bug for bug in BUGS if bug.name == name)
    planted.plant(monkeypatch)
    with quietly():
        for looked, seed in enumerate(islice(seeds_from(VISIBLE[name]), LOOKED_AT), 1):
            if audited(planted.scenario(seed))[1]:
                require_recorded(name, seed, looked, "VISIBLE")
                return
    pytest.fail(f"{name} breaks no rule in {LOOKED_AT} schedules")


def test_the_documentation_tells_how_many_are_planted() -> None:
    text = " ".join((Path(__file__).parents[2] / "docs/architecture.md").read_text().split())
    assert f"plants {len(VISIBLE)} of the simulator's {len(BUGS)} bugs" in text
