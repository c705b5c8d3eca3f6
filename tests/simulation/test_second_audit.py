"""The second auditor on simulated clusters: it accepts clean histories.

It finds planted bugs.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from auditing.auditor import SecondAuditor
from auditing.history import Revision

from tests.simulation.searching import BUGS, require_recorded, seeds_from
from tests.simulator import Scenario, Simulation, scenario
from tests.simulator.run import quietly
from tests.simulator.scenario import Fault

if TYPE_CHECKING:
    from auditing.auditor import Violation

    from tests.simulation.planting import Planted

SEEDS = range(1, 13)
LOOKED_AT = 80
"""Schedules in which a planted bug is looked for."""


def ended_late(wanted: Scenario) -> Scenario:
    """Completions take seconds, and coordinators die whose last requests arrive late."""
    model = replace(
        wanted.wishes[0], client=0, names=None, rerun="", graph=0, delay=0.0, callers=1, behind=(), acts=(), id="",
        type="check", on_duplicate="join", prepared="", verifier="", within=False, options={},
    )  # fmt: skip
    arg = {**model.arg, "partitions": 1, "calls": 4.0, "pace": 0.1, "trouble": 0.0, "follows": False, "objects": False}
    tables = wanted.tables
    wishes = tuple(
        replace(model, after=0.5 + 0.02 * n, table=tables[n % len(tables)], arg={**arg, "seed": n}) for n in range(6)
    )
    hosts = tuple(replace(host, types=("check",), slots=8, unable=(), skew=0.0, labels={}) for host in wanted.hosts)
    late = Fault("requests-late", 1.5, 8.0, (0.5, 0.99, 0.5, 0.5))
    dies = 3.0 + 0.1 * (wanted.seed % 25)
    die = [Fault("crash", dies + 0.1 * n, 30.0, ((n + 0.5) / len(hosts), 0.5, 0.5, 0.5)) for n in range(len(hosts) - 1)]
    return replace(
        wanted, hosts=hosts, wishes=wishes, drains=(), removals=(), clients=1, actors=0, faults=(late, *die), calm=10.0
    )


OTHER_SHAPES = {"drop_the_election_compare": ended_late}
"""Bugs whose own schedules show the effect in what history does not tell: who sent a failed planning attempt."""
FIRST = {
    "drop_the_gate_compare": 53,
    "drop_the_election_compare": 784,
    "plan_without_comparing_its_chunks": 38,
    "complete_on_a_stale_count": 95,
    "finish_a_group_under_the_guards_of_its_first": 25,
    "claim_a_permit_without_comparing_it": 2,
    "claim_behind_a_gate_by_the_limit_of_another": 3,
    "an_id_does_not_go_back_to_what_runs": 2,
    "reap_the_claims_of_live_holders": 2,
}
"""The first seeds of bugs whose recorded seed shows the effect to the simulator alone."""
ALSO_SEEN = (
    "reap_the_claims_of_live_holders",
    "make_a_report_before_the_last_job_has_ended",
    "it_is_cleaned_up_before_its_successors_are_told",
    "a_watermark_without_the_lease_of_its_hour",
)
"""Bugs that the simulator finds by no invariant, and that break a rule of the contract."""
SEEN = [one for one in BUGS if any("invariant" in kind for kind in one.expected) or one.name in ALSO_SEEN]
"""Each bug that breaks an invariant: etcd's history shows all of them."""
UNSEEN = {
    "liveness": "A history has no end by which something must have happened.",
    "liveness: still at it": "A history has no end by which something must have happened.",
    "not stopped": "A history has no clock that tells how long a job ran on.",
    "not drained": "A history has no clock that tells how long a job ran on.",
    "given up too early": "A history has no clock that tells the age of a hold.",
    "forgotten": "A history has no clock that tells the age of a record, beyond its first hour.",
    "two at once": "Which processes run is not in etcd.",
    "stopped too late": "Which processes run is not in etcd.",
    "not the coordinator": "Most writes of a coordinator do not name their sender.",
    "outcomes lost": "What completion code was given is not in etcd.",
    "checkpoint lost": "What a job has done, and what it continued from, is not in etcd.",
    "left behind": "The files of executors and tables are not in etcd.",
    "job not written down": "The files of executors and tables are not in etcd.",
    "completion before decision": "When completion code runs is not in etcd.",
    "blamed": "Who caused an error is not in etcd.",
    "drained and busy": "The executor may be allowed to work again while its record is on its way.",
    "rerun of others": "Which partitions the caller of a rerun asked for is not in etcd.",
    "not served": "What an executor does besides claims is not in etcd.",
    "two branches": "What a caller's transaction was to do is not in etcd.",
    "progress": "A transaction that etcd refuses leaves no revision.",
    "unexpected error": "Errors of distop's code are in logs alone.",
    "trouble": "Errors of distop's code are in logs alone.",
}
"""Why history does not show the other bugs: by the kind of breach that the simulator finds."""


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


@pytest.mark.parametrize("planted", SEEN, ids=lambda planted: planted.name)
def test_a_planted_bug_breaks_a_rule(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.plant(monkeypatch)
    wanted = replace(planted, shape=OTHER_SHAPES.get(planted.name, planted.shape))
    with quietly():
        for looked, seed in enumerate(islice(seeds_from(FIRST.get(planted.name, planted.first)), LOOKED_AT), 1):
            if audited(wanted.scenario(seed))[1]:
                require_recorded(planted.name, seed, looked, "FIRST")
                return
    pytest.fail(f"{planted.name} breaks no rule in {LOOKED_AT} schedules")


def test_schedules_made_for_a_bug_break_no_rule_without_it() -> None:
    with quietly():
        for planted in SEEN:
            if (shape := OTHER_SHAPES.get(planted.name)) is not None:
                wanted = replace(planted, shape=shape).scenario(FIRST[planted.name])
                assert audited(wanted)[1] == []


def test_each_bug_is_tried_or_explained() -> None:
    left = [planted for planted in BUGS if planted not in SEEN]
    assert {kind for planted in left for kind in planted.expected} == UNSEEN.keys()
    assert {*FIRST, *ALSO_SEEN, *OTHER_SHAPES} <= {planted.name for planted in SEEN}


def test_the_documentation_tells_how_many_are_planted() -> None:
    text = " ".join((Path(__file__).parents[2] / "docs/internals/architecture.md").read_text().split())
    invariants = len(SEEN) - len(ALSO_SEEN)
    assert f"plants {len(SEEN)} of the simulator's {len(BUGS)} bugs" in text
    assert f"all {invariants} that break an invariant above, and {len(ALSO_SEEN)} others" in text
