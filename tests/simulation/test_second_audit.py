"""The second auditor on simulated clusters: it accepts histories without a bug, and finds planted bugs."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from auditing.auditor import SecondAuditor
from auditing.history import Revision

from tests.simulation.bug_search import BUGS, require_recorded, seeds_from
from tests.simulator import Scenario, Simulation, draw_scenario
from tests.simulator.run import without_logs
from tests.simulator.scenario import Fault

if TYPE_CHECKING:
    from auditing.auditor import Violation

    from tests.simulation.bug_planting import Planted

SEEDS = range(1, 13)
LOOKED_AT = 80
"""Maximum schedules of the search for a planted bug."""


def ended_late(scenario: Scenario) -> Scenario:
    """Completions take seconds, coordinators die, and their last requests arrive late."""
    model = replace(
        scenario.submissions[0], client=0, names=None, rerun="", graph=0, delay=0.0, callers=1, predecessors=(),
        actions=(), id="", type="check", on_duplicate="join", prepared="", verifier="", in_transaction=False,
        options={},
    )  # fmt: skip
    arg = {**model.arg, "partitions": 1, "calls": 4.0, "pace": 0.1, "trouble": 0.0, "follows": False, "objects": False}
    tables = scenario.tables
    submissions = tuple(
        replace(model, after=0.5 + 0.02 * n, table=tables[n % len(tables)], arg={**arg, "seed": n}) for n in range(6)
    )
    hosts = tuple(replace(host, types=("check",), slots=8, unable=(), skew=0.0, labels={}) for host in scenario.hosts)
    late = Fault("requests-late", 1.5, 8.0, (0.5, 0.99, 0.5, 0.5))
    dies = 3.0 + 0.1 * (scenario.seed % 25)
    die = [Fault("crash", dies + 0.1 * n, 30.0, ((n + 0.5) / len(hosts), 0.5, 0.5, 0.5)) for n in range(len(hosts) - 1)]
    return replace(
        scenario,
        hosts=hosts,
        submissions=submissions,
        drains=(),
        removals=(),
        clients=1,
        actors=0,
        faults=(late, *die),
        calm=10.0,
    )


OTHER_SHAPES = {"drop_the_election_compare": ended_late}
"""Bugs whose usual schedules show the effect only in data that history lacks: the sender of a failed planning attempt.
"""
FIRST = {
    "drop_the_gate_compare": 53,
    "drop_the_election_compare": 3048,
    "plan_without_comparing_its_chunks": 38,
    "complete_on_a_stale_count": 95,
    "finish_a_group_with_the_guards_of_its_first_operation": 25,
    "claim_a_permit_without_comparing_it": 2,
    "claim_with_the_limit_of_a_former_gate": 3,
    "an_id_is_not_returned_to_the_running_operation": 2,
    "reap_the_claims_of_live_holders": 2,
    "a_series_whose_next_operation_a_new_coordinator_skips": 14,
    "make_a_report_before_the_last_job_has_ended": 119,
}
"""The first seeds of bugs whose recorded seed shows the effect only to the simulator."""
ALSO_SEEN = (
    "reap_the_claims_of_live_holders",
    "make_a_report_before_the_last_job_has_ended",
    "an_operation_is_cleaned_up_before_its_successors_are_informed",
    "a_watermark_without_its_lease",
)
"""Bugs that break a rule of the contract, although the simulator finds them by other breaches than invariants."""
SEEN = [one for one in BUGS if any("invariant" in kind for kind in one.expected) or one.name in ALSO_SEEN]
"""Each bug that breaks an invariant, and ``ALSO_SEEN``: etcd's history shows all of them."""
UNSEEN = {
    "liveness": "A history has no time by which something must have happened.",
    "liveness: endless": "A history has no time by which something must have happened.",
    "not stopped": "A history has no clock to measure how long a job continued.",
    "not drained": "A history has no clock to measure how long a job continued.",
    "graph abandoned too early": "A history has no clock to measure the age of a hold.",
    "record deleted too early": "A history has no clock to measure the age of a record, beyond its first hour.",
    "two attempts at once": "Which processes run is not in etcd.",
    "stopped too late": "Which processes run is not in etcd.",
    "not the coordinator": "Most writes of a coordinator do not name their sender.",
    "outcomes lost": "What completion code was given is not in etcd.",
    "checkpoint lost": "The work of a job, and the checkpoint from which it resumed, are not in etcd.",
    "output not cleaned up": "The files of executors and tables are not in etcd.",
    "job not on disk": "The files of executors and tables are not in etcd.",
    "completion before decision": "When completion code runs is not in etcd.",
    "wrongly blamed": "Who caused an error is not in etcd.",
    "drained but busy": "The executor may be undrained while its record is in flight.",
    "wrong rerun partitions": "The partitions that the caller of a rerun requested are not in etcd.",
    "not served": "The actions of an executor other than claims are not in etcd.",
    "transaction branches": "The content of a caller's transaction is not in etcd.",
    "invalid transaction": "A transaction that etcd refuses leaves no revision.",
    "unexpected error": "Errors of distop's code are only in logs.",
    "policy missed a version": "Of which version the statistics are that an evaluation looked at is not in etcd.",
    "wrong removal": "Removals by plans are judged by the simulator; the second auditor knows none.",
    "uncaught error": "Errors of distop's code are only in logs.",
}
"""Kind of breach of the other bugs → why history does not show them."""


def audited(scenario: Scenario) -> tuple[SecondAuditor, list[Violation]]:
    """Run a scenario, and audit its history from the start of the run."""
    simulation = Simulation(scenario)
    first = simulation.etcd.revision
    before = {kv.key: kv.value.decode() for kv in simulation.etcd.store.listing()}
    simulation.run()
    auditor = SecondAuditor(scenario.namespace, clock=None)
    auditor.begin(before)
    for number, changes in simulation.etcd.store.history:
        if number > first:
            written = {one.kv.key: None if one.deleted else one.kv.value.decode() for one in changes}
            auditor.feed(Revision(number, written))
    return auditor, auditor.violations


def test_histories_under_faults_break_no_rule() -> None:
    operations = 0
    with without_logs():
        for seed in SEEDS:
            auditor, found = audited(draw_scenario(seed))
            assert found == [], f"seed {seed}"
            operations += auditor.operations
    assert operations > 10 * len(SEEDS)


@pytest.mark.parametrize("planted", SEEN, ids=lambda planted: planted.name)
def test_a_planted_bug_violates_a_rule(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.plant(monkeypatch)
    shaped = replace(planted, shape=OTHER_SHAPES.get(planted.name, planted.shape))
    with without_logs():
        for looked, seed in enumerate(islice(seeds_from(FIRST.get(planted.name, planted.first)), LOOKED_AT), 1):
            if audited(shaped.scenario(seed))[1]:
                require_recorded(planted.name, seed, looked, "FIRST")
                return
    pytest.fail(f"{planted.name} breaks no rule in {LOOKED_AT} schedules")


def test_schedules_made_for_a_bug_break_no_rule_without_it() -> None:
    with without_logs():
        for planted in SEEN:
            if (shape := OTHER_SHAPES.get(planted.name)) is not None:
                scenario = replace(planted, shape=shape).scenario(FIRST[planted.name])
                assert audited(scenario)[1] == []


def test_each_bug_is_tried_or_explained() -> None:
    left = [planted for planted in BUGS if planted not in SEEN]
    assert {kind for planted in left for kind in planted.expected} == UNSEEN.keys()
    assert {*FIRST, *ALSO_SEEN, *OTHER_SHAPES} <= {planted.name for planted in SEEN}


def test_the_documentation_states_how_many_bugs_are_planted() -> None:
    text = " ".join((Path(__file__).parents[2] / "docs/internals/architecture.md").read_text().split())
    invariants = len(SEEN) - len(ALSO_SEEN)
    assert f"plants {len(SEEN)} of the simulator's {len(BUGS)} bugs" in text
    assert f"all {invariants} that break an invariant above, and {len(ALSO_SEEN)} others" in text
    assert f"explains for each kind of the other {len(BUGS) - len(SEEN)} why" in text
