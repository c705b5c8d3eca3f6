"""The second auditor on simulated clusters: it accepts clean histories.

It finds planted bugs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from auditing.auditor import SecondAuditor
from auditing.history import Revision

from distop.testing.simulation import Scenario, Simulation, scenario
from distop.testing.simulation.run import quietly
from tests.simulation.searching import BUGS

if TYPE_CHECKING:
    from auditing.auditor import Violation

SEEDS = range(1, 41)
LOOKED_AT = 80
"""Schedules in which a planted bug is looked for."""
VISIBLE = (
    "drop_the_gate_compare",
    "take_over_a_live_incarnation",
    "elect_while_another_lives",
    "reap_the_claims_of_live_holders",
    "report_without_its_fence",
    "drop_the_fence_compare_of_a_release",
    "complete_on_a_stale_count",
    "finish_without_comparing_run_ops",
    "count_no_failure_at_a_takeover",
    "retry_an_unknown_outcome_with_a_new_transaction",
    "finish_a_group_under_the_guards_of_its_first",
    "clean_up_before_the_history_is_written",
    "successors_go_on_however_it_ended",
    "what_waits_for_others_begins",
    "it_is_cleaned_up_before_its_successors_are_told",
    "claim_a_permit_without_comparing_it",
    "a_report_that_keeps_its_permit",
    "an_end_keeps_the_id",
    "what_shall_follow_begins_at_once",
)
"""Planted bugs of all kinds of rules, whose effect stands in etcd's history."""


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
        found = (audited(planted.scenario(seed))[1] for seed in range(planted.first, planted.first + LOOKED_AT))
        assert any(found)
