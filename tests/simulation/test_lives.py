"""What is drawn besides: clients that are run again with the same request ids, machines that stand still as a whole,
tables that are removed and added again; and whom a lease that somebody ends forsakes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from distop.protocol.keys import Keys
from distop.protocol.records import OperationRef
from distop.protocol.revisioned import Change
from distop.protocol.txn import KeyValue
from distop.testing.model_store import ModelStore
from tests.simulation.test_scenarios import argument, small
from tests.simulator import Simulation, scenario
from tests.simulator.job_effects import Effects
from tests.simulator.removed_tables import Registry
from tests.simulator.run import Report, quietly
from tests.simulator.scenario import Act, Fault, Removal, Scenario, Wish

REF = OperationRef("a", "check", "", 1)


def run(wanted: Scenario) -> tuple[Simulation, Report]:
    with quietly():
        sim = Simulation(wanted)
        return sim, sim.run()


# --------------------------------------------------------------------- clients


@pytest.mark.parametrize("at", [0.301, 0.31, 0.33, 0.36, 0.5, 1.0, 40.0])
@pytest.mark.parametrize("after", [0.01, 3.0])
def test_a_client_that_is_run_again_is_told_of_the_same_operation(at: float, after: float) -> None:
    """Whenever it ends: before and after its start is answered, while the operation runs, and once that is over."""
    wish = Wish(0, 0.3, "check", "a", argument(3, 8, 0.2), None, None, (Act(0.1, "pause"), Act(0.2, "resume")))
    sim, report = run(small(3, 2, wish, Fault("client-again", at, after, (0.0, 0.0, 0.0, 0.0))))
    assert report.breaches == []
    assert [client.name for client in sim.clients] == ["client-0", "client-0#2"]
    assert (report.ended, sim.told.started) == (1, {"request-0": str(REF)})


def test_a_client_that_was_done_when_it_was_killed_does_not_stand_for_another() -> None:
    """A run ended while the other client had yet to begin."""
    first = Wish(0, 0.3, "check", "a", argument(3, 2, 0.1), None, None, ())
    wanted = small(3, 2, first, Fault("client-crash", 4.0, 0.0, (0.0, 0.0, 0.0, 0.0)))
    _, report = run(replace(wanted, clients=2, wishes=(first, replace(first, client=1, after=8.0))))
    assert report.breaches == []
    assert report.ended == 2


def test_a_rerun_that_is_asked_for_again_is_the_same() -> None:
    wish = Wish(0, 0.3, "check", "a", {**argument(35, 6, 0.1), "trouble": 1.0}, None, "collect_all", (), "failed")
    calm = small(35, 2, wish)
    sim, _ = run(calm)
    assert "request-0-again" in sim.told.started, "there is nothing to be run again"
    again = Fault("client-again", sim.loop.now + 1.0, 0.5, (0.0, 0.0, 0.0, 0.0))
    sim, report = run(replace(calm, faults=(again,), calm=again.at + again.lasts))
    assert report.breaches == []
    assert len(sim.clients) == 2
    assert report.ended == 2


def test_who_is_told_of_the_operation_of_another_request_is_noticed() -> None:
    sim, report = run(small(3, 2, Wish(0, 0.3, "check", "a", argument(3, 2, 0.1), None, None, ())))
    assert report.breaches == []
    sim.told.started["request-1"] = str(REF)
    sim._look_back()
    assert [breach.kind for breach in sim.breaches] == ["told of another's"]


# -------------------------------------------------------------------- machines

STANDS_STILL = Fault("suspend", 1.0, 12.0, (0.0, 0.0, 0.0, 0.0))  # exec-0, three times its time to live
LONG = small(3, 2, Wish(0, 0.3, "check", "a", argument(3, 4, 20.0), None, "collect_all", ()), STANDS_STILL, slots=4)


def test_a_machine_that_stood_still_changes_nothing_when_it_goes_on() -> None:
    """F20, F34: its jobs were taken over, and are killed as soon as it goes on; its next incarnation works on."""
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


def test_nothing_is_promised_of_the_side_effects_of_such_a_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Effects, "forsake", lambda self, incarnation: None)
    _, report = run(LONG)
    assert {breach.kind for breach in report.breaches} == {"stopped too late", "two at once"}


def test_a_machine_that_stands_still_for_less_than_its_time_to_live_is_judged_as_ever() -> None:
    sim, report = run(replace(LONG, faults=(replace(STANDS_STILL, lasts=1.0),)))
    assert report.breaches == []
    assert len(sim.machines[0].incarnations) == 1
    assert not sim.effects._forsaken


# ---------------------------------------------------------------------- tables


@pytest.mark.parametrize("at", [0.2, 0.31, 0.5, 1.0])
def test_a_table_that_is_removed_and_added_again_counts_on(at: float) -> None:
    """F42: it goes once nothing runs on it; the next start waits until it is back, and gets the next number."""
    first = Wish(0, 0.3, "check", "a", argument(3, 4, 0.1), None, None, ())
    sim, report = run(
        replace(small(3, 2, first), wishes=(first, replace(first, after=1.2)), removals=(Removal(at, "a", 2.0),))
    )
    assert report.breaches == []
    assert sim.registry.removed == 1
    assert sorted(sim.told.started.values()) == ["a/check/1", "a/check/2"]


class Fold:
    """A registry, and what it finds."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._registry = Registry(lambda kind, *more: self.found.append(kind))

    def put(self, key: str, value: bytes = b"{}") -> Fold:
        return self._step(key, value, deleted=False)

    def delete(self, key: str) -> Fold:
        return self._step(key, b"", deleted=True)

    def _step(self, key: str, value: bytes, *, deleted: bool) -> Fold:
        change = Change(KeyValue(key, value, 7), deleted)
        self._registry.step([(Keys().parse(key), change)])
        return self


def test_what_begins_on_no_table_and_what_is_removed_under_operations_is_noticed() -> None:
    spec, table, counts = Keys().of(REF, "spec"), Keys().table("a"), Keys().run_ops("a")
    assert Fold().put(spec).found == ["no such table"]
    assert Fold().put(table).put(spec).delete(spec).delete(table).found == []
    assert Fold().put(table).delete(table).put(spec).found == ["no such table"]
    assert Fold().put(table).put(counts, b'{"check": 1}').delete(table).found == ["removed too early"]
    assert Fold().put(table).put(counts, b'{"check": 1}').put(counts).delete(table).found == []


# ----------------------------------------------------------------------- users


@pytest.mark.parametrize("at", [0.31, 0.5, 1.5, 2.5])
@pytest.mark.parametrize("kind", ["tokens", "role"])
def test_tokens_that_end_and_a_role_that_is_revoked_fail_nothing(kind: str, at: float) -> None:
    """F14: work goes on where it was, and nothing is held against a job."""
    wish = Wish(0, 0.3, "check", "a", argument(3, 12, 0.8), None, None, ())
    sim, report = run(small(3, 2, wish, Fault(kind, at, 3.0, (0.0, 0.0, 0.0, 0.0))))
    assert report.breaches == []
    assert sim.told.ended == {str(REF): "success"}
    assert sim.etcd.users.refused, "nobody was refused"


# --------------------------------------------------------------------- effects


class Record:
    """Effects of jobs that nobody has claimed, and what is found wrong with them."""

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


def test_only_whose_lease_somebody_ended_is_not_judged() -> None:
    record = Record()
    record.effects.forsake("a")
    assert record.begin("a") == []
    assert record.begin("b") == ["job without claim"]
    assert record.begin("c") == ["job without claim", "two at once"]


def test_who_knows_that_its_lease_is_gone_is_judged_again() -> None:
    record = Record()
    record.effects.forsake("a")
    record.begin("a")
    record.effects.knows("a", 5.0)
    record.effects.knows("b", 1.0)
    record.now = 4.9
    assert record.begin("a", 1) == []
    record.now = 5.0
    assert record.begin("a", 2) == ["job without claim"]
    assert record.begin("b", 0) == ["job without claim"], "what was at work before is not held against it"


def test_what_an_attempt_leaves_is_cleaned_up_before_the_next_one_or_at_the_end() -> None:
    record = Record()
    effects, ended = record.effects, [str(REF)]

    def attempt(fence: int, how: str = "", *, cleaned: bool = False) -> list[str]:
        record.found.clear()
        effect = effects.begin(REF, 0, fence, "a", 1)
        effects.starts_over(REF, 0, effect, cleaned=cleaned)
        effects.leaves(REF, 0, effect)
        effects.end(effect, how)
        return [kind for kind in record.found if kind == "left behind"]

    assert attempt(7, "killed") == []
    assert [one.fence for one in effects.left_behind(ended)] == [7]
    assert list(effects.left_behind([])) == [], "somebody may go on with it"
    assert attempt(8, "killed") == ["left behind"]
    assert attempt(9, "error", cleaned=True) == []
    effects.cleaned(REF, 0)
    assert list(effects.left_behind(ended)) == []
    assert attempt(10, "error") == []
    effects.excuse(REF, 0)
    assert attempt(11, "verdict") == []
    assert list(effects.left_behind(ended)) == [], "its child cleans up after a verdict"
    assert attempt(12, "success") == []
    assert list(effects.left_behind(ended)) == []


@pytest.mark.parametrize("at", [0.9, 1.3])
def test_a_lease_that_somebody_ends_forsakes_one_incarnation(at: float) -> None:
    wish = Wish(0, 0.3, "check", "a", argument(3, 12, 1.0), None, "collect_all", ())
    sim, report = run(small(3, 2, wish, Fault("revoke", at, 0.0, (0.0, 0.0, 0.0, 0.0))))
    assert report.breaches == []
    (forsaken,) = sim.effects._forsaken.items()
    (machine,) = (machine for machine in sim.machines if forsaken[0] in machine.incarnations)
    assert forsaken[0] == machine.incarnations[0]
    assert forsaken[1] < sim.loop.now, "its next incarnation knows"


def test_further_faults_leave_the_others_as_they_are() -> None:
    """A seed stands for the same cluster and the same other faults, whatever is drawn besides."""
    further = {"client-again", "suspend", "tokens", "role"}
    drawn = [scenario(seed) for seed in range(1, 400)]
    some = [wanted for wanted in drawn if further & {fault.kind for fault in wanted.faults}]
    assert 0.3 * len(drawn) < len(some) < 0.5 * len(drawn)
    for kind in further:
        assert any(fault.kind == kind for wanted in some for fault in wanted.faults)
    assert not any(fault.kind in further for wanted in map(_focused, range(50)) for fault in wanted.faults)


def _focused(seed: int) -> Scenario:
    return scenario(seed, focus=("crash",))
