"""Faults and actions that are drawn separately: repeated clients, suspended machines, removed tables, users; and which
work is exempt from checks after a revoked lease.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from distop.protocol import table_registry
from distop.protocol.keys import Keys
from distop.protocol.records import OperationRef
from distop.protocol.revisioned import Change
from distop.protocol.txn import KeyValue
from distop.testing.model_store import ModelStore
from tests.simulation.test_found_bugs import argument, small
from tests.simulator import Simulation, draw_scenario
from tests.simulator.job_effects import Effects
from tests.simulator.removed_tables import TableRemovals
from tests.simulator.run import Report, without_logs
from tests.simulator.scenario import Action, Fault, Removal, Scenario, Submission

REF = OperationRef("a", "check", "", 1)


def run(scenario: Scenario) -> tuple[Simulation, Report]:
    with without_logs():
        sim = Simulation(scenario)
        return sim, sim.run()


# --------------------------------------------------------------------- clients


@pytest.mark.parametrize("at", [0.301, 0.31, 0.33, 0.36, 0.5, 1.0, 40.0])
@pytest.mark.parametrize("after", [0.01, 3.0])
def test_a_client_that_is_run_again_gets_the_same_operation(at: float, after: float) -> None:
    """It is killed before or after the answer to its start, while the operation runs, or after the end."""
    submission = Submission(
        0, 0.3, "check", "a", argument(3, 8, 0.2), None, None, (Action(0.1, "pause"), Action(0.2, "resume"))
    )
    sim, report = run(small(3, 2, submission, Fault("client-again", at, after, (0.0, 0.0, 0.0, 0.0))))
    assert report.breaches == []
    assert [client.name for client in sim.clients] == ["client-0", "client-0#2"]
    assert (report.ended, sim.answers.started) == (1, {"request-0": str(REF)})


def test_a_client_that_was_killed_after_its_end_does_not_count_for_another() -> None:
    """A run ended before the second client had started."""
    first = Submission(0, 0.3, "check", "a", argument(3, 2, 0.1), None, None, ())
    scenario = small(3, 2, first, Fault("client-crash", 4.0, 0.0, (0.0, 0.0, 0.0, 0.0)))
    _, report = run(replace(scenario, clients=2, submissions=(first, replace(first, client=1, after=8.0))))
    assert report.breaches == []
    assert report.ended == 2


def test_a_repeated_request_for_a_rerun_gets_the_same_operation() -> None:
    submission = Submission(
        0, 0.3, "check", "a", {**argument(35, 6, 0.1), "trouble": 1.0}, None, "collect_all", (), "failed"
    )
    calm = small(35, 2, submission)
    sim, _ = run(calm)
    assert "request-0-again" in sim.answers.started, "there is nothing to be run again"
    again = Fault("client-again", sim.loop.now + 1.0, 0.5, (0.0, 0.0, 0.0, 0.0))
    sim, report = run(replace(calm, faults=(again,), calm=again.at + again.lasts))
    assert report.breaches == []
    assert len(sim.clients) == 2
    assert report.ended == 2


def test_an_answer_with_the_operation_of_another_request_is_reported() -> None:
    sim, report = run(small(3, 2, Submission(0, 0.3, "check", "a", argument(3, 2, 0.1), None, None, ())))
    assert report.breaches == []
    sim.answers.started["request-1"] = str(REF)
    sim._check_at_end()
    assert [breach.kind for breach in sim.breaches] == ["wrong operation"]


# -------------------------------------------------------------------- machines

STANDS_STILL = Fault("suspend", 1.0, 12.0, (0.0, 0.0, 0.0, 0.0))  # exec-0, three times its time to live
LONG = small(
    3, 2, Submission(0, 0.3, "check", "a", argument(3, 4, 20.0), None, "collect_all", ()), STANDS_STILL, slots=4
)


def test_a_suspended_machine_changes_nothing_when_it_resumes() -> None:
    """F20, F34: its jobs were taken over, and are killed as soon as it resumes; its next incarnation works."""
    sim, report = run(LONG)
    assert report.breaches == []
    assert report.ended == 1
    first, *later = sim.machines[0].incarnations
    assert later
    end = STANDS_STILL.at + STANDS_STILL.lasts
    done = [effect for effect in sim.effects.all if effect.incarnation == first]
    stood = [effect for effect in done if (effect.ended or 0.0) >= end]
    assert all((effect.ended or 0.0) < end + 0.5 for effect in stood)
    assert any(effect.how.startswith("killed") for effect in stood)
    assert all(effect.begun < end for effect in done)
    others = [effect for effect in sim.effects.all if effect.incarnation in sim.machines[1].incarnations]
    taken = {(effect.op, effect.partition) for effect in others if effect.begun < end}
    assert taken & {(effect.op, effect.partition) for effect in stood}, "nothing was taken over meanwhile"


def test_side_effects_of_a_suspended_machine_are_exempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Effects, "exempt", lambda self, incarnation: None)
    _, report = run(LONG)
    assert {breach.kind for breach in report.breaches} == {"stopped too late", "two attempts at once"}


def test_a_machine_that_is_suspended_within_its_time_to_live_is_not_exempt() -> None:
    sim, report = run(replace(LONG, faults=(replace(STANDS_STILL, lasts=1.0),)))
    assert report.breaches == []
    assert len(sim.machines[0].incarnations) == 1
    assert not sim.effects._exempt


# ---------------------------------------------------------------------- tables


@pytest.mark.parametrize("at", [0.2, 0.31, 0.5, 1.0])
def test_instance_numbers_continue_after_a_table_is_removed_and_added(at: float) -> None:
    """F42: it is removed once nothing runs on it; the next start waits until it is back, and gets the next number."""
    first = Submission(0, 0.3, "check", "a", argument(3, 4, 0.1), None, None, ())
    sim, report = run(
        replace(small(3, 2, first), submissions=(first, replace(first, after=1.2)), removals=(Removal(at, "a", 2.0),))
    )
    assert report.breaches == []
    assert sim.table_removals.removed == 1
    assert sorted(sim.answers.started.values()) == ["a/check/1", "a/check/2"]


def series_without_table(lost_after: int) -> tuple[Simulation, Report]:
    """A series of three operations, whose table is removed when operation ``lost_after`` has ended."""
    series = replace(Submission(0, 0.3, "check", "a", argument(3, 2, 0.1), None, None, ()), every=0.1, times=3)
    with without_logs():
        sim = Simulation(small(3, 2, series))
        committed, keys = sim.etcd.committed, sim.keys
        assert committed is not None
        last = keys.history(replace(REF, instance=lost_after))

        def remove() -> None:
            table, run_ops = (sim.etcd.store.get(key) for key in (keys.table("a"), keys.run_ops("a")))
            assert table is not None
            sim.etcd.preset(table_registry.remove_table(keys, "a", table, run_ops))

        def watched(revision: int, changes: tuple[Change, ...], sender: str) -> None:
            committed(revision, changes, sender)
            if any(change.kv.key == last for change in changes):
                sim.loop.world_at(sim.loop.now, remove)

        sim.etcd.committed = watched
        return sim, sim.run()


@pytest.mark.parametrize("lost_after", [1, 2])
def test_P3_a_series_ends_with_the_removal_of_its_table(lost_after: int) -> None:
    """Between two of its operations nothing runs, so the removal is not refused (seed 1116868)."""
    sim, report = series_without_table(lost_after)
    assert report.breaches == []
    assert (report.ended, sim.table_removals.removed) == (lost_after, 1)


def test_a_series_that_ends_for_want_of_a_table_that_was_not_removed_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TableRemovals, "step", lambda self, parsed: None)
    _, report = series_without_table(1)
    assert [breach.kind for breach in report.breaches] == ["unexpected error"]


class Fold:
    """The check of table removals, and the kinds of breaches that it finds."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._registry = TableRemovals(lambda kind, *more: self.found.append(kind))

    def put(self, key: str, value: bytes = b"{}") -> Fold:
        return self._step(key, value, deleted=False)

    def delete(self, key: str) -> Fold:
        return self._step(key, b"", deleted=True)

    def _step(self, key: str, value: bytes, *, deleted: bool) -> Fold:
        change = Change(KeyValue(key, value, 7), deleted)
        self._registry.step([(Keys().parse(key), change)])
        return self


def test_a_start_without_a_table_and_a_removal_under_operations_are_reported() -> None:
    spec, table, counts = Keys().of(REF, "spec"), Keys().table("a"), Keys().run_ops("a")
    assert Fold().put(spec).found == ["no such table"]
    assert Fold().put(table).put(spec).delete(spec).delete(table).found == []
    assert Fold().put(table).delete(table).put(spec).found == ["no such table"]
    assert Fold().put(table).put(counts, b'{"check": 1}').delete(table).found == ["table removed too early"]
    assert Fold().put(table).put(counts, b'{"check": 1}').put(counts).delete(table).found == []


# ----------------------------------------------------------------------- users


@pytest.mark.parametrize("at", [0.31, 0.5, 1.5, 2.5])
@pytest.mark.parametrize("kind", ["tokens", "role"])
def test_tokens_that_end_and_a_role_that_is_revoked_fail_nothing(kind: str, at: float) -> None:
    """F14: work continues, and no job counts a failure."""
    submission = Submission(0, 0.3, "check", "a", argument(3, 12, 0.8), None, None, ())
    sim, report = run(small(3, 2, submission, Fault(kind, at, 3.0, (0.0, 0.0, 0.0, 0.0))))
    assert report.breaches == []
    assert sim.answers.ended == {str(REF): "success"}
    assert sim.etcd.users.refused, "nobody was refused"


# --------------------------------------------------------------------- effects


class Record:
    """Side effects of jobs without a claim, and the kinds of breaches found."""

    def __init__(self) -> None:
        self.now = 0.0
        self.found: list[str] = []
        self.effects = Effects(ModelStore(), Keys(), lambda: self.now, self._found)

    def _found(self, kind: str, key: str, text: str, *where: Any) -> None:
        self.found.append(kind)

    def begin(self, incarnation: str, partition: int = 0) -> list[str]:
        self.found.clear()
        self.effects.begin(REF, partition, 7, incarnation, 1)
        return sorted(self.found)


def test_only_the_incarnation_with_a_revoked_lease_is_exempt() -> None:
    record = Record()
    record.effects.exempt("a")
    assert record.begin("a") == []
    assert record.begin("b") == ["job without claim"]
    assert record.begin("c") == ["job without claim", "two attempts at once"]


def test_an_exemption_ends_when_the_loss_of_the_lease_is_known() -> None:
    record = Record()
    record.effects.exempt("a")
    record.begin("a")
    record.effects.end_exemption("a", 5.0)
    record.effects.end_exemption("b", 1.0)
    record.now = 4.9
    assert record.begin("a", 1) == []
    record.now = 5.0
    assert record.begin("a", 2) == ["job without claim"]
    assert record.begin("b", 0) == ["job without claim"], "work from before the exemption's end was checked"


def test_output_of_an_attempt_is_cleaned_up_before_the_next_one_or_at_the_end() -> None:
    record = Record()
    effects, ended = record.effects, [str(REF)]

    def attempt(fence: int, how: str = "", *, cleaned: bool = False) -> list[str]:
        record.found.clear()
        effect = effects.begin(REF, 0, fence, "a", 1)
        effects.starts_over(REF, 0, effect, cleaned=cleaned)
        effects.writes_output(REF, 0, effect)
        effects.end(effect, how)
        return [kind for kind in record.found if kind == "output not cleaned up"]

    assert attempt(7, "killed") == []
    assert [one.fence for one in effects.not_cleaned_up(ended)] == [7]
    assert list(effects.not_cleaned_up([])) == [], "the operation may still run the job again"
    assert attempt(8, "killed") == ["output not cleaned up"]
    assert attempt(9, "error", cleaned=True) == []
    effects.cleaned(REF, 0)
    assert list(effects.not_cleaned_up(ended)) == []
    assert attempt(10, "error") == []
    effects.drop_output(REF, 0)
    assert attempt(11, "verdict") == []
    assert list(effects.not_cleaned_up(ended)) == [], "the child's cleanup after a verdict does not count"
    assert attempt(12, "success") == []
    assert list(effects.not_cleaned_up(ended)) == []


@pytest.mark.parametrize("at", [0.9, 1.3])
def test_a_revoked_lease_exempts_one_incarnation(at: float) -> None:
    submission = Submission(0, 0.3, "check", "a", argument(3, 12, 1.0), None, "collect_all", ())
    sim, report = run(small(3, 2, submission, Fault("revoke", at, 0.0, (0.0, 0.0, 0.0, 0.0))))
    assert report.breaches == []
    (forsaken,) = sim.effects._exempt.items()
    (machine,) = (machine for machine in sim.machines if forsaken[0] in machine.incarnations)
    assert forsaken[0] == machine.incarnations[0]
    assert forsaken[1] < sim.loop.now, "its next incarnation knows"


def test_separate_draws_change_no_other_fault() -> None:
    """Separate draws change neither the cluster of a seed nor its other faults."""
    further = {"client-again", "suspend", "tokens", "role"}
    drawn = [draw_scenario(seed) for seed in range(1, 400)]
    some = [scenario for scenario in drawn if further & {fault.kind for fault in scenario.faults}]
    assert 0.3 * len(drawn) < len(some) < 0.5 * len(drawn)
    for kind in further:
        assert any(fault.kind == kind for scenario in some for fault in scenario.faults)
    assert not any(fault.kind in further for scenario in map(_focused, range(50)) for fault in scenario.faults)


def _focused(seed: int) -> Scenario:
    return draw_scenario(seed, focus=("crash",))
