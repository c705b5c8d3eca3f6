"""The backlog of an executor: events in, instructions out."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distop.decide import work_shares
from distop.decide.backlog import FIRST_LOOK, ROUND, Backlog
from distop.decide.backlog_entries import (
    BACKLOG_TABLE,
    FIRST_PAUSE,
    LONGEST_PAUSES,
    REPORTED_PAUSE,
    Accepted,
    BackOffReason,
    ClaimableJobs,
    Entry,
    EntryEvent,
    EntryState,
    Forget,
    Grant,
    InvalidEvent,
    ReleaseJobs,
    Round,
    RoundResult,
    RunJobs,
    Stop,
    Wait,
)
from distop.decide.circuit_breaker import IN_A_ROW, PAUSE
from distop.decide.fresh_operations import HEAD_STARTS
from distop.protocol.batch_claims import PLANNED_PER_CLAIM
from distop.protocol.operation_options import AGING, Options
from distop.protocol.plan import Gate
from distop.protocol.records import ALL_OPERATIONS, OperationRef
from distop.protocol.revisioned import Seen
from distop.protocol.size_limits import DEFAULT

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from distop.decide.backlog_entries import Instruction

POLL = 30.0
A, B = OperationRef("t", "a", "", 1), OperationRef("t", "b", "", 1)
NOT_NEW = Gate()
"""Of a gate that does not tell how many jobs there are."""


class Here:
    """One of some executors, which all serve the same."""

    def __init__(self, name: str = "ann", names: tuple[str, ...] = ("ann",)) -> None:
        self.executor_id, self.names = name, names
        self.caught_up_at = 4
        self.limits = DEFAULT
        self.draining = False
        self.unable: set[str] = set()
        self.gates: dict[OperationRef, Seen[Gate]] = {}

    def others(self, type_name: str, tables: Collection[str], where: Mapping[str, str] | None = None) -> list[str]:
        return [name for name in self.names if name != self.executor_id]

    def serves(self, type_name: str, tables: Collection[str]) -> bool:
        return type_name not in self.unable

    def fits(self, where: Mapping[str, str]) -> bool:
        return not where


class Driven:
    """A backlog to which events happen; the invariants are checked after each."""

    def __init__(self, here: Here | None = None, slots: int = 2) -> None:
        self.here = here or Here()
        self.backlog = Backlog(self.here, slots, POLL)
        self.now = 0.0
        self.mod = 5
        self.under_way: list[Round] = []

    def open(self, *refs: OperationRef, gate: Gate = NOT_NEW) -> list[Instruction]:
        self.mod += 1
        for ref in refs:
            self.here.gates[ref] = Seen(gate, self.mod)
        return self.changed(*refs)

    def close(self, *refs: OperationRef) -> list[Instruction]:
        for ref in refs:
            del self.here.gates[ref]
        return self.changed(*refs)

    def changed(self, *refs: OperationRef) -> list[Instruction]:
        return self.checked(self.backlog.changed(self.here.gates, refs or None, self.now))

    def checked(self, out: list[Instruction]) -> list[Instruction]:
        self.backlog.check_invariants()
        return out

    def next(self) -> list[Round]:
        """The rounds that begin."""
        out = self.checked(self.backlog.next(self.now))
        *rounds, wait = out
        assert isinstance(wait, Wait)
        self.pause = wait.seconds
        begun = [one for one in rounds if isinstance(one, Round)]
        assert len(begun) == len(rounds)
        self.under_way += begun
        return begun

    def looked(self, under: Round, look: ClaimableJobs) -> Grant | None:
        self.backlog.read(under.refs[0], 40, batch=self.backlog.entries[under.refs[0]].batch)
        found = self.backlog.looked(under, look, self.now, 1.0)
        self.backlog.check_invariants()
        return found

    def end(self, under: Round, **got: RoundResult) -> list[Instruction]:
        """The round is over; ``got`` of its only operation as ``one``, or of each by its place."""
        results = {ref: got[name] for n, ref in enumerate(under.refs) if (name := f"n{n}") in got}
        if "one" in got:
            results = {under.refs[0]: got["one"]}
        out = self.backlog.claimed(under, results, self.now, 1.0)
        out += self.backlog.round_over(under, self.now)
        self.under_way.remove(under)
        return self.checked(out)

    def serve(self, look: ClaimableJobs, *won: int, **got: Any) -> tuple[Grant | None, list[Instruction]]:
        """One round from its begin to its end, with the next operation."""
        (under,) = self.next()
        grant = self.looked(under, look)
        if grant is None:
            self.under_way.remove(under)
            return None, self.checked(self.backlog.round_over(under, self.now))
        return grant, self.end(under, one=RoundResult(tuple(won), **got))

    def settle(self, ref: OperationRef, *jobs: int, ended: bool = True) -> list[Instruction]:
        """Jobs end, each in a slot of its own."""
        out = []
        for p in jobs:
            out += self.backlog.settled(ref, p, ended=ended)
            self.backlog.run_over()
        return self.checked(out)

    def state(self, ref: OperationRef) -> EntryState:
        entry = self.backlog.entries.get(ref)
        return entry.state if entry is not None else EntryState.ABSENT


FULL_LOOK = ClaimableJobs(40, 40)


# ------------------------------------------------------------------ the table


@pytest.mark.parametrize("state", EntryState)
@pytest.mark.parametrize("event", EntryEvent)
def test_events_follow_the_backlog_table(state: EntryState, event: EntryEvent) -> None:
    entry = Entry(A, Gate(), 5, 0.0, state)
    if (after := BACKLOG_TABLE[state].get(event)) is not None:
        entry.happens(event)
        assert entry.state is after
    else:
        with pytest.raises(InvalidEvent, match=f"t/a/1 is {state}"):
            entry.happens(event)
        assert entry.state is state


def test_the_table_names_all_states_and_events_and_each_state_is_reached_and_left() -> None:
    assert set(BACKLOG_TABLE) == set(EntryState)
    assert {event for events in BACKLOG_TABLE.values() for event in events} == set(EntryEvent)
    assert {after for events in BACKLOG_TABLE.values() for after in events.values()} == set(EntryState)
    assert all(BACKLOG_TABLE.values())


# ------------------------------------------------------------- one at a time


def test_an_operation_is_read_claimed_and_run() -> None:
    one = Driven()
    one.open(A)
    (under,) = one.next()
    assert (under.refs, under.fresh, under.slots) == ((A,), False, 1)
    assert one.state(A) is EntryState.CLAIMING
    assert one.looked(under, FULL_LOOK) == Grant(2)
    assert one.end(under, one=RoundResult((0, 1), open_jobs=38)) == [RunJobs(((A, (0,)),)), RunJobs(((A, (1,)),))]
    assert (one.backlog.free, one.state(A), one.next()) == (0, EntryState.READY, [])
    assert one.settle(A, 0) == []
    assert one.backlog.free == 1
    assert [under.refs for under in one.next()] == [(A,)]


def test_an_operation_runs_one_batch_at_a_time_in_one_slot() -> None:
    one = Driven()
    one.open(A)
    (under,) = one.next()
    one.backlog.read(A, 40, batch=True)
    assert one.backlog.looked(under, FULL_LOOK, 0.0, 1.0) == Grant(1)
    assert one.end(under, one=RoundResult((0, 1, 2), open_jobs=37)) == [RunJobs(((A, (0, 1, 2)),))]
    assert one.next() == []
    assert one.backlog.free == 1, "for others"


def test_an_operation_without_claimable_jobs_is_checked_after_a_hint_when_due_or_at_the_poll() -> None:
    one = Driven()
    one.open(A)
    one.serve(ClaimableJobs(0, 40))
    assert (one.state(A), one.next(), one.pause) == (EntryState.DRY, [], POLL)
    one.backlog.hint()
    assert one.state(A) is EntryState.READY
    one.serve(ClaimableJobs(0, 40, due=7.0))
    assert (one.next(), one.pause) == ([], 7.0)
    one.now = 7.0
    assert len(one.next()) == 1


@pytest.mark.parametrize("meanwhile", ["returned", "hint", "altered", "nothing"])
def test_a_hint_during_an_empty_round_causes_another_check(meanwhile: str) -> None:
    """Without it a retry waited for the next poll, because the round had read an older state."""
    one = Driven()
    one.open(A)
    one.serve(FULL_LOOK, 0, open_jobs=39)
    (under,) = one.next()
    if meanwhile == "returned":
        one.settle(A, 0, ended=False)
    elif meanwhile == "hint":
        one.backlog.hint()
    elif meanwhile == "altered":
        one.open(A, gate=Gate(0, Options(priority=1)))
    one.looked(under, ClaimableJobs(0, 40))
    one.end(under, one=RoundResult())
    assert one.state(A) is (EntryState.DRY if meanwhile == "nothing" else EntryState.READY)


def test_operations_without_claimable_jobs_are_not_ranked_at_each_wake() -> None:
    """Each wake asked for all open operations whether this executor serves them, and sorted them."""

    asked: list[str] = []

    class Counted(Here):
        def serves(self, type_name: str, tables: Collection[str]) -> bool:
            asked.append(type_name)
            return True

    one = Driven(Counted(), slots=20)
    refs = [OperationRef("t", f"a{n}", "", 1) for n in range(20)]
    one.open(*refs)
    for under in one.next():
        one.looked(under, ClaimableJobs(0, 40, due=7.0 if under.refs == (refs[2],) else None))
        one.end(under, one=RoundResult())
    asked.clear()
    assert (one.next(), one.pause, asked) == ([], 7.0, [])


def test_unserved_operations_wait_for_the_poll() -> None:
    one = Driven()
    one.here.unable = {"a"}
    one.open(A, B)
    assert [under.refs for under in one.next()] == [(B,)]


def test_operations_with_all_jobs_held_or_ended_here_are_not_checked() -> None:
    one = Driven(slots=40)
    one.open(A)
    one.serve(FULL_LOOK, *range(40))
    assert one.state(A) is EntryState.TAKEN
    one.backlog.hint()
    assert one.next() == []
    one.settle(A, *range(39))
    assert one.state(A) is EntryState.TAKEN
    one.settle(A, 39, ended=False)
    assert one.state(A) is EntryState.READY, "its job waits again"


# ------------------------------------------------------------------- closing


def test_a_closed_operation_is_stopped_until_no_job_is_held() -> None:
    """A run may have been on its way to the child when it was told first."""
    one = Driven()
    one.open(A)
    one.serve(FULL_LOOK, 0, open_jobs=39)
    assert one.close(A) == [Stop(A)]
    assert one.changed() == [Stop(A)]
    assert one.settle(A, 0, ended=False) == [Forget(A)]
    assert (one.backlog.entries, one.backlog.busy) == ({}, False)


def test_claims_of_an_operation_closed_meanwhile_are_released() -> None:
    one = Driven()
    one.open(A)
    (under,) = one.next()
    one.looked(under, FULL_LOOK)
    assert one.close(A) == []
    assert one.state(A) is EntryState.CLOSING
    assert one.end(under, one=RoundResult((0, 1))) == [ReleaseJobs(A, (0, 1)), Stop(A)]
    assert one.backlog.free == 2
    one.backlog.settled(A, 0, ended=False)
    assert one.backlog.settled(A, 1, ended=False) == [Forget(A)]


def test_an_operation_resumed_before_its_jobs_ended_continues() -> None:
    one = Driven()
    one.open(A)
    one.serve(FULL_LOOK, 0, open_jobs=39)
    one.close(A)
    one.open(A)
    assert one.state(A) is EntryState.READY
    assert not one.backlog.stopping(A)
    assert one.settle(A, 0) == []


@pytest.mark.parametrize("how", ["draining", "leaving"])
def test_a_stopping_executor_begins_nothing_and_releases_its_claims(how: str) -> None:
    one = Driven()
    one.open(A, B)
    under = one.next()[0]
    one.looked(under, FULL_LOOK)
    setattr(one.here if how == "draining" else one.backlog, how, True)
    assert one.end(under, one=RoundResult((0,), open_jobs=39)) == [ReleaseJobs(A, (0,))]
    assert (one.next(), one.pause) == ([], None)


def test_a_drain_stops_held_jobs_and_forgets_rejected_claims() -> None:
    one = Driven()
    one.open(A)
    one.serve(FULL_LOOK, 0, open_jobs=39)
    one.backlog.failed(A, BackOffReason.REJECTED, 0.0, 1.0, pause=9.0)
    one.here.draining = True
    assert one.changed() == [Accepted(A), Stop(A, draining=True)]
    assert one.changed() == [Stop(A, draining=True)]


# ------------------------------------------------------------------ back-off


def pauses(one: Driven, ref: OperationRef, reason: BackOffReason, times: int) -> list[float]:
    return [one.backlog.failed(ref, reason, one.now, 1.0) for _ in range(times)]


@pytest.mark.parametrize("reason", LONGEST_PAUSES)
def test_operations_that_cannot_be_served_are_retried_with_back_off(reason: BackOffReason) -> None:
    one = Driven()
    one.open(A)
    found = pauses(one, A, reason, 12)
    assert found[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert found[-1] == LONGEST_PAUSES[reason]
    assert (one.next(), one.pause) == ([], LONGEST_PAUSES[reason])
    one.now = LONGEST_PAUSES[reason]
    one.serve(FULL_LOOK, 0, open_jobs=39)
    assert one.backlog.wait(A, one.now) <= 0
    assert pauses(one, A, reason, 1) == [FIRST_PAUSE], "it was served"


def test_a_refused_operation_is_retried_later_without_affecting_others() -> None:
    one = Driven()
    one.open(A, B)
    under, other = one.next()
    one.looked(under, FULL_LOOK)
    one.end(under, one=RoundResult(refused=True))
    assert (one.state(A), one.backlog.wait(A, one.now)) == (EntryState.READY, FIRST_PAUSE)
    assert one.backlog.wait(B, one.now) <= 0
    one.looked(other, ClaimableJobs(0, 40))
    one.end(other, one=RoundResult())
    assert one.pause != 0


def test_failing_runs_are_retried_with_back_off() -> None:
    one = Driven()
    one.open(A)
    for wait in (0.5, 1.0, 2.0):
        assert one.backlog.failed(A, BackOffReason.ERROR, one.now, 1.0, run=True) == wait
        one.now += wait
        one.serve(FULL_LOOK, open_jobs=0)
        one.backlog.hint()
    one.backlog.ran(A)
    assert pauses(one, A, BackOffReason.ERROR, 1) == [0.5]


def test_a_rejected_claim_is_forgotten_once_accepted_or_when_its_operation_ends() -> None:
    one = Driven()
    one.open(A)
    assert one.backlog.failed(A, BackOffReason.REJECTED, 0.0, 1.0, pause=9.0) == 9.0
    one.backlog.ran(A)
    assert one.backlog.wait(A, 0.0) == 9.0, "an end of another job tells nothing of it"
    one.now = 9.0
    _, out = one.serve(FULL_LOOK, 0, open_jobs=39)
    assert out == [Accepted(A), RunJobs(((A, (0,)),))]
    one.backlog.failed(A, BackOffReason.REJECTED, 0.0, 1.0, pause=9.0)
    assert one.close(A) == [Accepted(A), Stop(A)]


def test_a_rejected_claim_beside_granted_ones_stays_rejected() -> None:
    one = Driven()
    one.open(A)
    one.backlog.failed(A, BackOffReason.REJECTED, 0.0, 1.0, pause=9.0)
    one.now = 9.0
    _, out = one.serve(FULL_LOOK, 0, failed=True)
    assert out == [RunJobs(((A, (0,)),))]


def test_hole_9_gates_without_records_have_no_priority() -> None:
    """Thousands of forged gates, each of a high priority, had no other operation get a slot."""
    one = Driven(slots=1)
    one.open(A, gate=Gate(options=Options(priority=100)))
    one.open(B)
    (under,) = one.next()
    assert under.refs == (A,)
    one.now = 5.0
    one.backlog.failed(A, BackOffReason.MISSING, one.now, 1.0)
    one.checked(one.backlog.round_over(under, one.now))
    one.now = 100.0
    assert [under.refs for under in one.next()] == [(B,)]


def test_operations_that_are_gone_take_no_memory() -> None:
    one = Driven()
    for n in range(1, 51):
        ref = OperationRef("t", "a", "", n)
        one.open(ref)
        one.backlog.failed(ref, BackOffReason.MISSING, 0.0, 1.0)
        assert one.close(ref) == [Forget(ref)]
        assert one.backlog.failed(ref, BackOffReason.MISSING, 0.0, 1.0) == 0.0
    assert one.backlog.entries == {}


def skipped(one: Driven, most: int = 8) -> tuple[dict[str, str], int]:
    return one.backlog.skipped(one.now, most)


def test_an_operation_is_reported_as_skipped_once_its_pauses_are_long() -> None:
    one = Driven()
    one.open(A)
    while (pause := one.backlog.failed(A, BackOffReason.UNREADABLE, one.now, 1.0, text="no plan")) < REPORTED_PAUSE:
        assert skipped(one) == ({}, 0), f"a pause of {pause} s"
    assert skipped(one) == ({str(A): "it cannot read the operation: no plan; it tries again within 16 s"}, 0)
    for _ in range(4):
        one.backlog.failed(A, BackOffReason.UNREADABLE, one.now, 0.5, text="no plan")
    longest = {str(A): "it cannot read the operation: no plan; it tries again within 120 s"}
    assert skipped(one) == (longest, 0)
    one.now += 1_000.0
    (under,) = one.next()
    assert skipped(one) == (longest, 0), "the next try does not change the report"
    one.backlog.failed(A, BackOffReason.UNREADABLE, one.now, 0.7, text="no plan")
    one.checked(one.backlog.round_over(under, one.now))
    assert skipped(one) == (longest, 0)


@pytest.mark.parametrize("reason", LONGEST_PAUSES)
def test_each_long_back_off_has_a_text(reason: BackOffReason) -> None:
    one = Driven()
    one.open(A)
    pauses(one, A, reason, 12)
    ((_, text),) = skipped(one)[0].items()
    assert text.startswith("it")
    assert text.endswith(f"; it tries again within {LONGEST_PAUSES[reason]:g} s")


def test_a_rejected_claim_is_not_reported_as_skipped() -> None:
    """The node record names it among the rejected writes."""
    one = Driven()
    one.open(A)
    one.backlog.failed(A, BackOffReason.REJECTED, 0.0, 1.0, pause=300.0)
    assert skipped(one) == ({}, 0)


@pytest.mark.parametrize("how", ["claimed", "nothing left", "no room", "closed", "drained"])
def test_an_operation_is_not_skipped_any_more(how: str) -> None:
    one = Driven()
    one.open(A)
    pauses(one, A, BackOffReason.ERROR, 9)
    assert skipped(one)[0]
    one.now += 100.0
    if how == "claimed":
        one.serve(FULL_LOOK, 0, open_jobs=39)
    elif how == "nothing left":
        one.serve(ClaimableJobs(0, 40))
    elif how == "no room":
        one.serve(ClaimableJobs(4, 0))
    elif how == "closed":
        one.close(A)
    else:
        one.here.draining = True
        one.changed()
    assert skipped(one) == ({}, 0)
    one.backlog.hint()
    assert skipped(one) == ({}, 0)


def test_an_operation_whose_runs_cannot_begin_is_skipped_until_one_ends() -> None:
    one = Driven()
    one.open(A)
    for _ in range(9):
        one.backlog.failed(A, BackOffReason.ERROR, one.now, 1.0, run=True, text="no space")
    reasons = {str(A): "it could not run jobs of the operation: no space; it tries again within 30 s"}
    one.now += 100.0
    one.serve(FULL_LOOK, 0, open_jobs=39)
    assert skipped(one) == (reasons, 0)
    one.backlog.ran(A)
    assert skipped(one) == ({}, 0)


def test_some_skipped_operations_are_named_and_the_others_are_counted() -> None:
    one = Driven()
    refs = [OperationRef("t", "a", "", n) for n in range(5)]
    one.open(*refs)
    for ref in refs:
        pauses(one, ref, BackOffReason.ERROR, 9)
    named, more = skipped(one, 3)
    assert (list(named), more) == ([str(ref) for ref in refs[:3]], 2)
    one.close(refs[0])
    named, more = skipped(one, 3)
    assert (list(named), more) == ([str(ref) for ref in refs[1:4]], 1)


@pytest.mark.parametrize("operations", [1, 2])
def test_an_open_circuit_breaker_is_reported_until_it_closes(operations: int) -> None:
    one = Driven(Here(names=("ann", "bob")))
    one.open(A, B)
    for n in range(IN_A_ROW):
        one.backlog.job_failed((A, B)[n % operations], one.now)
    ((name, text),) = skipped(one)[0].items()
    assert name == (str(A) if operations == 1 else ALL_OPERATIONS)
    assert text.startswith("its circuit breaker is open")
    assert text.endswith("it tries again within 30 s")
    pauses(one, A, BackOffReason.ERROR, 9)
    assert len(skipped(one)[0]) == operations, "an operation is named once"
    one.now += PAUSE
    assert name == str(A) or name not in skipped(one)[0]
    one.here.names = ("ann",)
    assert ALL_OPERATIONS not in skipped(one)[0]


def test_an_open_circuit_breaker_leaves_an_operation_to_others() -> None:
    one = Driven(Here("ann", ("ann", "ben")))
    one.open(A, B)
    for _ in range(IN_A_ROW):
        one.backlog.breaker.job_ended(B)
        one.backlog.job_failed(A, one.now)
    assert [under.refs for under in one.next()] == [(B,)]
    assert one.backlog.wait(A, one.now) == PAUSE
    one.now = PAUSE
    assert [under.refs for under in one.next()] == [(A,)]


# ---------------------------------------------------------------- priorities


def test_L35_an_executor_serves_the_more_urgent_first_and_waits_for_its_round() -> None:
    one = Driven()
    one.open(A)
    one.open(B, gate=Gate(options=Options(priority=5)))
    (under,) = one.next()
    assert (under.refs, one.pause) == ((B,), ROUND)
    one.now = ROUND
    assert [other.refs for other in one.next()] == [(A,)], "a round that lasts holds nobody up"


def test_L35_the_longest_waiting_operation_comes_first() -> None:
    one = Driven(slots=1)
    one.open(A)
    one.now = 6 * AGING
    one.open(B, gate=Gate(options=Options(priority=5)))
    (under,) = one.next()
    assert under.refs == (A,)
    one.looked(under, ClaimableJobs(0, 40))
    one.end(under, one=RoundResult())
    one.backlog.hint()
    assert [under.refs for under in one.next()] == [(B,)], "who was served waits anew"


@pytest.mark.parametrize("named", [True, False])
def test_the_waiting_time_of_a_reopened_operation_starts_again(named: bool) -> None:
    one = Driven(slots=1)
    one.open(A, B)
    one.now = 3 * AGING
    gate = one.here.gates.pop(A)
    one.changed(*([A] if named else []))
    one.here.gates[A] = gate
    one.changed(*([A] if named else []))
    assert [under.refs for under in one.next()] == [(B,)]


def test_an_operation_at_its_limit_is_checked_with_growing_intervals() -> None:
    one = Driven()
    one.open(A)
    found = []
    for _ in range(10):
        one.serve(ClaimableJobs(3, 0))
        assert one.next() == []
        found.append(one.pause)
        one.now += one.pause or 0.0
    assert found[:3] == [FIRST_LOOK, 2 * FIRST_LOOK, 4 * FIRST_LOOK]
    assert found[-1] == POLL
    one.serve(FULL_LOOK, 0, open_jobs=3)
    one.serve(ClaimableJobs(3, 0))
    one.next()
    assert one.pause == FIRST_LOOK, "one has ended: others may soon"


def test_an_executor_holds_no_more_jobs_of_an_operation_than_it_may() -> None:
    one = Driven(slots=4)
    one.open(A, gate=Gate(0, Options(max_jobs_per_executor=2)))
    one.serve(ClaimableJobs(40, 2), 0, 1, open_jobs=38)
    assert one.next() == []
    one.settle(A, 0)
    assert len(one.next()) == 1


# -------------------------------------------------------------------- alone

NAMES = ("ann", "ben", "cat")


def suspects(seconds: float = 0.0) -> ClaimableJobs:
    return ClaimableJobs(0, 40, {3: seconds})


def test_an_idle_executor_takes_a_suspect_at_once_and_nothing_beside_it() -> None:
    one = Driven(Here("ann", NAMES))
    one.open(A)
    grant, out = one.serve(suspects(600.0), 3)
    assert grant == Grant(1, alone=True)
    assert out == [RunJobs(((A, (3,)),))]
    one.open(B)
    assert (one.next(), one.pause) == ([], None)
    one.settle(A, 3)
    one.serve(ClaimableJobs(0, 40))  # there may be more to run alone
    assert {under.refs for under in one.next()} == {(B,)}


def test_an_executor_becomes_quiet_on_its_turn_until_nothing_else_runs() -> None:
    one = Driven(Here("ann", NAMES))
    one.open(A, B)
    first, other = one.next()
    one.looked(other, FULL_LOOK)
    one.end(other, one=RoundResult((0,), open_jobs=39))
    assert one.looked(first, suspects(0.0)) is None
    one.under_way.remove(first)
    one.checked(one.backlog.round_over(first, one.now))
    assert one.backlog.exclusive == A
    one.backlog.hint()
    (under,) = one.next()
    assert (under.refs, under.slots) == ((A,), 0), "somebody else may have run what it is quiet for"
    assert one.looked(under, suspects(0.0)) is None
    one.under_way.remove(under)
    one.checked(one.backlog.round_over(under, one.now))
    assert one.next() == []
    one.settle(B, 0)
    (under,) = one.next()
    assert one.looked(under, suspects(0.0)) == Grant(1, alone=True)


def test_quiet_ends_when_a_check_finds_no_suspect() -> None:
    one = Driven(Here("ann", NAMES))
    one.open(A, B)
    first, other = one.next()
    one.looked(other, FULL_LOOK)
    one.end(other, one=RoundResult((0,), open_jobs=39))
    one.looked(first, suspects(0.0))
    one.under_way.remove(first)
    one.checked(one.backlog.round_over(first, one.now))
    one.backlog.hint()
    one.serve(ClaimableJobs(0, 40))
    assert one.backlog.exclusive is None


def test_a_suspect_is_left_to_others_until_my_turn_or_until_idle() -> None:
    one = Driven(Here("ann", NAMES))
    one.open(A, B)
    first, other = one.next()
    one.looked(other, FULL_LOOK)
    one.end(other, one=RoundResult((0,), open_jobs=39))
    assert one.looked(first, suspects(work_shares.QUIET_TURN)) is None
    one.under_way.remove(first)
    one.checked(one.backlog.round_over(first, one.now))
    assert one.backlog.exclusive is None
    assert one.backlog.entries[A].due == work_shares.QUIET_TURN
    one.settle(B, 0, ended=False)
    (under,) = one.next()
    assert under.refs == (A,), "nothing runs here"


def test_quiet_ends_when_the_operation_of_the_suspect_is_gone() -> None:
    one = Driven(Here("ann", NAMES))
    one.open(A)
    one.serve(suspects(), 3)
    one.close(A)
    assert one.backlog.exclusive == A, "it runs on while the operation is paused, and alone"
    assert one.settle(A, 3, ended=False) == [Forget(A)]
    assert one.backlog.exclusive is None


def test_a_round_in_progress_claims_nothing_beside_a_job_that_runs_alone() -> None:
    """A round for B was under way when the executor found itself alone with a suspect of A."""
    one = Driven(Here("ann", NAMES))
    one.open(A, B)
    for ref in (A, B):
        one.backlog.read(ref, 40, batch=False)
    first, other = one.next()
    assert (first.slots, other.slots) == (0, 0)
    one.backlog.free -= 1
    first.slots = 1
    assert one.looked(first, suspects()) == Grant(1, alone=True)
    assert one.looked(other, FULL_LOOK) is None


# ----------------------------------------------------------- new, of one job


def new(number: int, type_name: str = "noop") -> OperationRef:
    return OperationRef("@cluster", type_name, "", number)


def with_new(count: int, here: Here | None = None, seconds: float | None = 0.0) -> Driven:
    one = Driven(here)
    one.open(*(new(n) for n in range(1, count + 1)), gate=Gate(1))
    if seconds is not None:
        for _ in range(10):
            one.backlog.ran_together("noop", [seconds])
    return one


def all_taken(one: Driven) -> list[OperationRef]:
    """In one slot at a time."""
    taken: list[OperationRef] = []
    one.backlog.free, one.backlog.slots = 1, 1
    while begun := one.next():
        (under,) = begun
        assert len(under.refs) <= DEFAULT.together
        taken += under.refs
        one.end(under)
    return taken


def test_several_new_operations_are_claimed_together_and_run_in_sequence_in_one_slot() -> None:
    one = with_new(5)
    first, second = one.next()
    assert (first.refs, first.fresh, first.slots) == ((new(1), new(2), new(3)), True, 1)
    assert second.refs == (new(4), new(5))
    for ref in first.refs:
        one.backlog.read(ref, 1, batch=False)
    out = one.end(first, n0=RoundResult((0,)), n2=RoundResult((0,)))
    assert out == [RunJobs(((new(1), (0,)), (new(3), (0,))))]
    assert [one.state(new(n)) for n in (1, 2, 3)] == [EntryState.TAKEN, EntryState.LEFT, EntryState.TAKEN]
    one.backlog.hint()
    assert [one.state(new(n)) for n in (1, 2, 3)] == [EntryState.TAKEN, EntryState.READY, EntryState.TAKEN]


def test_each_new_operation_is_assigned_to_one_executor_which_has_a_head_start() -> None:
    each = {name: with_new(200, Here(name, NAMES)) for name in NAMES}
    taken = {name: all_taken(one) for name, one in each.items()}
    assert sorted(ref for some in taken.values() for ref in some) == [new(n) for n in range(1, 201)]
    assert all(len(some) > 40 for some in taken.values())
    ann = each["ann"]
    assert ann.pause == HEAD_STARTS[0]
    ann.now += HEAD_STARTS[0]
    last = max(taken["ben"] + taken["cat"])
    assert ann.next()[0].refs[0] == last, "from the end: those to whom they fall come to it last"


def test_the_group_size_is_learned_from_job_durations() -> None:
    one = with_new(500, seconds=None)
    one.backlog.slots = one.backlog.free = 1
    sizes = []
    for _ in range(7):
        (under,) = one.next()
        sizes.append(len(under.refs))
        one.end(under)
        one.backlog.ran_together("noop", [0.001] * len(under.refs))
    assert sizes == [1, 2, 4, 8, 16, 32, DEFAULT.together], "at first nobody knows"
    one.backlog.ran_together("noop", [0.1 / 3])
    (under,) = one.next()
    assert len(under.refs) == 3
    one.end(under)
    one.backlog.took_long("noop")
    assert len(one.next()[0].refs) == 1


def test_groups_of_operations_on_tables_are_smaller() -> None:
    one = with_new(0)
    one.backlog.slots = one.backlog.free = 1
    refs = [OperationRef("t", "noop", "", n) for n in range(1, 60)]
    one.open(*refs, gate=Gate(1))
    (under,) = one.next()
    assert list(under.refs) == refs[:PLANNED_PER_CLAIM]


def test_a_waiting_type_delays_no_other() -> None:
    one = with_new(3)
    one.here.unable = {"noop"}
    one.open(new(9, "other"), gate=Gate(1))
    assert [under.refs for under in one.next()] == [(new(9, "other"),)]
    assert one.pause == POLL


@pytest.mark.parametrize(
    "gate", [Gate(2), Gate(0), Gate(1, Options(priority=5)), Gate(1, Options(max_jobs=1)), Gate(1, where={"zone": "a"})]
)
def test_large_operations_and_those_with_options_are_served_on_their_own(gate: Gate) -> None:
    one = Driven()
    one.open(new(1), gate=gate)
    assert one.state(new(1)) is EntryState.READY


def test_old_and_altered_operations_are_served_on_their_own() -> None:
    one = Driven()
    one.here.caught_up_at = 99
    one.open(new(1), gate=Gate(1))
    assert one.state(new(1)) is EntryState.READY
    one.here.caught_up_at = 4
    one.open(new(2), gate=Gate(1))
    assert one.state(new(2)) is EntryState.NEW
    one.open(new(2), gate=Gate(1, Options(priority=5)))
    assert one.state(new(2)) is EntryState.READY


def test_urgent_operations_come_before_new_ones() -> None:
    one = with_new(4)
    one.backlog.slots = one.backlog.free = 1
    one.open(A, gate=Gate(2, Options(priority=1)))
    assert [under.refs for under in one.next()] == [(A,)]


def test_new_operations_of_a_rejected_group_are_served_on_their_own() -> None:
    one = with_new(2)
    one.backlog.slots = one.backlog.free = 1
    (under,) = one.next()
    one.backlog.apart(under)
    one.checked(one.backlog.round_over(under, one.now))
    assert [one.state(ref) for ref in under.refs] == [EntryState.READY, EntryState.READY]


def test_operations_of_a_lost_node_are_assigned_to_another() -> None:
    here = Here("ann", ("ann", "ben"))
    one = with_new(40, here)
    mine = all_taken(one)
    assert 0 < len(mine) < 40
    here.names = ("ann",)
    one.backlog.nodes_changed(one.now)
    assert sorted(mine + all_taken(one)) == [new(n) for n in range(1, 41)]


def test_an_operation_claimed_by_others_is_read_before_the_next_claim() -> None:
    one = with_new(1)
    (under,) = one.next()
    one.end(under)
    assert one.state(new(1)) is EntryState.LEFT
    one.backlog.hint()
    (under,) = one.next()
    assert not under.fresh


# --------------------------------------------------------------- at random


@given(st.integers(0, 2**32), st.integers(1, 5))
def test_the_invariants_of_the_backlog_hold_for_random_events(seed: int, slots: int) -> None:
    """No more runs than slots, what runs alone is alone, nothing begins before its time, nothing is forgotten."""
    Random(seed, slots).go(120)


class Random:
    """Events at random; what runs and is held is counted here again."""

    def __init__(self, seed: int, slots: int) -> None:
        self.chance = random.Random(seed)
        self.one = Driven(Here("ann", self.chance.choice((("ann",), NAMES))), slots)
        self.runs: list[tuple[tuple[OperationRef, tuple[int, ...]], ...]] = []
        self.held: set[tuple[OperationRef, int]] = set()
        self.ended: set[tuple[OperationRef, int]] = set()
        self.counts: dict[OperationRef, int] = {}
        self.released: list[tuple[OperationRef, int]] = []
        self.looked: dict[Round, Grant] = {}
        self.number = 0

    def go(self, steps: int) -> None:
        events = (self.opens, self.closes, self.alters, self.begins, self.looks, self.claims, self.fails)
        more = (self.job_ends, self.hints, self.time_goes, self.lets_go, self.drains, self.breaks)
        for _ in range(steps):
            self.chance.choice((*events, *more, self.begins, self.looks, self.claims, self.job_ends))()
            self.one.backlog.check_invariants()
            assert len(self.runs) <= self.one.backlog.slots
            known = {(ref, p) for ref, entry in self.one.backlog.entries.items() for p in entry.held}
            assert known == self.held
            assert set(self.one.here.gates) <= set(self.one.backlog.entries), "an open operation is forgotten"
        self.drained_of_all()

    def drained_of_all(self) -> None:
        """Once all has ended, nothing is kept."""
        while self.one.under_way:
            self.claims(self.one.under_way[0])
        while self.runs or self.released:
            self.job_ends()
            self.lets_go()
        for ref in list(self.one.here.gates):
            self.perform(self.one.close(ref))
        assert (self.one.backlog.entries, self.one.backlog.free) == ({}, self.one.backlog.slots)
        assert not self.one.backlog.busy

    def perform(self, out: list[Instruction]) -> None:
        for one in out:
            if isinstance(one, RunJobs):
                self.runs.append(one.jobs)
            elif isinstance(one, ReleaseJobs):
                self.released += [(one.ref, p) for p in one.jobs]
            elif isinstance(one, Forget):
                assert not any(ref == one.ref for ref, _ in self.held)

    def some(self) -> OperationRef | None:
        return self.chance.choice(list(self.one.here.gates)) if self.one.here.gates else None

    def opens(self) -> None:
        if len(self.one.here.gates) < 8:
            self.number += 1
            ref = OperationRef("t", self.chance.choice("ab"), "", self.number)
            count = self.chance.choice((0, 1, 1, 1, 3))
            options = Options(self.chance.choice((0, 0, 3)), 0, self.chance.choice((0, 0, 1)))
            self.counts[ref] = count or self.chance.randrange(1, 9)
            self.perform(self.one.open(ref, gate=Gate(count, options)))

    def closes(self) -> None:
        if (ref := self.some()) is not None and self.chance.random() < 0.5:
            self.perform(self.one.close(ref))

    def alters(self) -> None:
        known = list(self.one.backlog.entries)
        if known:
            ref = self.chance.choice(known)
            gate = self.one.backlog.entries[ref].gate
            self.perform(self.one.open(ref, gate=replace(gate, options=Options(self.chance.randrange(3)))))

    def begins(self) -> None:
        before = {ref: self.one.backlog.wait(ref, self.one.now) for ref in self.one.backlog.entries}
        quiet = self.one.backlog.running_alone
        for begun in self.one.next():
            assert not quiet, "it begins beside a job that runs alone"
            assert all(before[ref] <= 0 for ref in begun.refs), "it begins before its time"

    def looks(self) -> None:
        waiting = [one for one in self.one.under_way if len(one.refs) == 1 and not one.fresh and one not in self.looked]
        if not waiting:
            return
        under = self.chance.choice(waiting)
        (ref,) = under.refs
        self.one.backlog.read(ref, self.counts[ref], batch=self.number % 3 == 0)
        kind = self.chance.randrange(4)
        look = ClaimableJobs(self.chance.randrange(4), self.chance.randrange(3), due=self.one.now + 3)
        if kind == 0 and self.free_jobs(ref):
            look = ClaimableJobs(0, 3, {self.free_jobs(ref)[0]: self.chance.choice((0.0, 300.0))})
        grant = self.one.backlog.looked(under, look, self.one.now, 1.0)
        self.one.backlog.check_invariants()
        if grant is None:
            self.one.under_way.remove(under)
            self.perform(self.one.checked(self.one.backlog.round_over(under, self.one.now)))
        else:
            self.looked[under] = grant

    def free_jobs(self, ref: OperationRef) -> list[int]:
        taken = {p for one, p in self.held | self.ended if one == ref}
        return [p for p in range(self.counts[ref]) if p not in taken]

    def claims(self, under: Round | None = None) -> None:
        ready = [one for one in self.one.under_way if one.fresh or one in self.looked]
        if under is None and not ready:
            return
        under = under or self.chance.choice(ready)
        grant = self.looked.pop(under, None)
        got: dict[OperationRef, RoundResult] = {}
        for ref in under.refs:
            if under.fresh and self.chance.random() < 0.8:
                won = (0,) if 0 in self.free_jobs(ref) else ()
                self.one.backlog.read(ref, self.counts[ref], batch=False)
                got[ref] = RoundResult(won)
            elif grant is not None:
                most = 1 if grant.alone else grant.slots
                won = tuple(self.free_jobs(ref)[: self.chance.randrange(most + 1)])
                got[ref] = RoundResult(won, refused=self.chance.random() < 0.2, open_jobs=self.chance.randrange(2))
        self.held |= {(ref, p) for ref, one in got.items() for p in one.won}
        out = self.one.backlog.claimed(under, got, self.one.now, 1.0)
        out += self.one.backlog.round_over(under, self.one.now)
        self.one.under_way.remove(under)
        self.perform(out)

    def fails(self) -> None:
        served = [ref for ref, entry in self.one.backlog.entries.items() if entry.state is not EntryState.NEW]
        if served:
            ref = self.chance.choice(served)
            self.one.backlog.failed(ref, self.chance.choice(list(LONGEST_PAUSES)), self.one.now, 1.0)
        named, more = self.one.backlog.skipped(self.one.now, 1)
        assert len(named) + more <= len(self.one.backlog.entries) + 1

    def job_ends(self) -> None:
        if self.runs:
            run = self.runs.pop(self.chance.randrange(len(self.runs)))
            for ref, block in run:
                for p in block:
                    self.settles(ref, p, ended=self.chance.random() < 0.7)
            self.one.backlog.run_over()

    def lets_go(self) -> None:
        if self.released:
            ref, p = self.released.pop()
            self.settles(ref, p, ended=False)

    def settles(self, ref: OperationRef, p: int, *, ended: bool) -> None:
        self.held.discard((ref, p))
        if ended:
            self.ended.add((ref, p))
        self.perform(self.one.backlog.settled(ref, p, ended=ended))

    def hints(self) -> None:
        self.one.backlog.hint()

    def time_goes(self) -> None:
        self.one.now += self.chance.choice((0.1, 1.0, 40.0))

    def drains(self) -> None:
        self.one.here.draining = self.chance.random() < 0.3
        self.perform(self.one.changed())

    def breaks(self) -> None:
        if (ref := self.some()) is not None:
            for _ in range(5):
                self.one.backlog.job_failed(ref, self.one.now)
