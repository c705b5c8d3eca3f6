"""The transactions of policies: each event in each stage, late copies, and the bounds of records."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import pytest

from distop.errors import InvalidArgument
from distop.protocol import policy as p
from distop.protocol.json_codec import dumps
from distop.protocol.keys import Keys
from distop.protocol.operation_options import Options
from distop.protocol.policy import (
    Evaluation,
    Policy,
    PolicyEvent,
    PolicyStage,
    PolicyState,
    PolicyVerdict,
    SeenPolicy,
    WaitingEvents,
)
from distop.protocol.record_reading import read_policy
from distop.protocol.records import Node, TableRecord
from distop.protocol.txn import Put, Txn
from distop.protocol.user_actions import NO_ACTIONS, Action
from distop.testing import ModelStore

if TYPE_CHECKING:
    from collections.abc import Callable

KEYS = Keys()
TABLE, NAME = "sales.orders", "nightly"
POLICY = Policy("compact", "u1", {"dry_run": True}, 3_600.0, ("version", "event:loaded"), "files > 5", Options(3))
RESUMED = NO_ACTIONS.and_then(Action("2013-01-01T00:00:00.000Z", "resume_policy", "ann"))


class Place:
    """A table with a policy in one of the stages, and an elected evaluator."""

    def __init__(self, stage: PolicyStage) -> None:
        self.store = ModelStore()
        lease = self.store.grant(1)
        assert lease
        self.put(KEYS.table(TABLE), TableRecord(TABLE, "iceberg", "/data").encode())
        self.put(KEYS.node("inc"), Node("ex", "h", 1, ()).encode())
        assert self.store.apply(p.elect(KEYS, TABLE, "inc", 0, "")).succeeded
        self.fence = self.store.mod(KEYS.policy_evaluator(TABLE))
        if stage is not PolicyStage.ABSENT:
            assert self.store.apply(self.txn(PolicyEvent.SET)).succeeded
        if stage is PolicyStage.PAUSED:
            assert self.store.apply(self.txn(PolicyEvent.PAUSE)).succeeded

    def put(self, key: str, value: bytes) -> None:
        assert self.store.apply(Txn((), (Put(key, value),))).succeeded

    @property
    def seen(self) -> SeenPolicy:
        return read_policy(*(self.store.get(get.key) for get in p.policy_reads(KEYS, TABLE, NAME)))

    @property
    def stage(self) -> PolicyStage:
        return self.seen.stage

    def txn(self, event: PolicyEvent, seen: SeenPolicy | None = None) -> Txn:
        """The transaction of an event, from what is there or from ``seen``."""
        seen = seen or self.seen
        mark = self.store.mod(KEYS.policy_mark())
        after = replace(seen.state, version="v2")
        made: dict[PolicyEvent, Callable[[], Txn]] = {
            PolicyEvent.SET: lambda: p.set_policies(
                KEYS, TABLE, {NAME: (POLICY, seen)}, mark, self.store.mod(KEYS.table(TABLE))
            ),
            PolicyEvent.CHANGE: lambda: p.set_policies(
                KEYS, TABLE, {NAME: (replace(POLICY, when=""), seen)}, mark, self.store.mod(KEYS.table(TABLE))
            ),
            PolicyEvent.PAUSE: lambda: p.pause(KEYS, TABLE, NAME, seen, NO_ACTIONS),
            PolicyEvent.RESUME: lambda: p.resume(KEYS, TABLE, NAME, seen, RESUMED),
            PolicyEvent.EMIT: lambda: p.emit(KEYS, TABLE, p.EmittedEvent("e1", "loaded", "now"), {NAME: seen}),
            PolicyEvent.EVALUATE: lambda: p.evaluate(KEYS, TABLE, NAME, seen, after, self.fence),
            PolicyEvent.START: lambda: p.start(
                KEYS, TABLE, NAME, seen, after, self.fence, Txn((), (Put("distOp.started", b""),))
            ),
            PolicyEvent.REMOVE: lambda: p.remove(KEYS, TABLE, NAME, seen.mod),
        }
        return made[event]()


@pytest.mark.parametrize(("stage", "event"), list(product(PolicyStage, PolicyEvent)))
def test_each_event_happens_only_in_the_stages_of_the_table(stage: PolicyStage, event: PolicyEvent) -> None:
    place = Place(stage)
    leads_to = p.POLICY_TABLE[stage].get(event)
    if leads_to is not None:
        assert place.store.apply(place.txn(event)).succeeded
        assert place.stage is leads_to
        return
    before = place.store.listing()
    if (stage, event) in ((PolicyStage.ABSENT, PolicyEvent.REMOVE), (PolicyStage.ABSENT, PolicyEvent.CHANGE)):
        return  # without a policy there is nothing to remove or to change: `set` makes one
    if (stage, event) in ((PolicyStage.ACTIVE, PolicyEvent.SET), (PolicyStage.PAUSED, PolicyEvent.SET)):
        return  # it is a change
    with pytest.raises(ValueError, match=f"{event} does not happen to a policy that is {stage}"):
        place.txn(event)
    assert place.store.listing() == before


@pytest.mark.parametrize(
    ("stage", "event"), [(stage, event) for stage, events in p.POLICY_TABLE.items() for event in events]
)
def test_a_refused_transaction_stays_refused(stage: PolicyStage, event: PolicyEvent) -> None:
    """Whatever happened since: a second copy of each event never applies."""
    place = Place(stage)
    late = place.txn(event)
    assert place.store.apply(late).succeeded
    for _ in range(2):
        for other in PolicyEvent:
            assert not place.store.apply(late).succeeded
            if other in p.POLICY_TABLE[place.stage]:
                assert place.store.apply(place.txn(other)).succeeded


@pytest.mark.parametrize("event", [PolicyEvent.PAUSE, PolicyEvent.REMOVE, PolicyEvent.CHANGE])
@pytest.mark.parametrize("late", [PolicyEvent.START, PolicyEvent.EVALUATE])
def test_no_evaluation_applies_after_a_command(event: PolicyEvent, late: PolicyEvent) -> None:
    place = Place(PolicyStage.ACTIVE)
    decided = place.txn(late)
    assert place.store.apply(place.txn(event)).succeeded
    assert not place.store.apply(decided).succeeded
    assert place.store.get("distOp.started") is None


def test_one_of_two_evaluations_applies() -> None:
    place = Place(PolicyStage.ACTIVE)
    first, second = place.txn(PolicyEvent.START), place.txn(PolicyEvent.EVALUATE)
    assert place.store.apply(first).succeeded
    assert not place.store.apply(second).succeeded


@pytest.mark.parametrize("event", [PolicyEvent.START, PolicyEvent.EVALUATE])
def test_an_evaluator_that_was_replaced_writes_nothing(event: PolicyEvent) -> None:
    place = Place(PolicyStage.ACTIVE)
    decided = place.txn(event)
    place.store.apply(p.resign(KEYS, TABLE, place.fence))
    assert place.store.apply(p.elect(KEYS, TABLE, "inc", 0, "")).succeeded
    assert not place.store.apply(decided).succeeded


def test_one_of_two_candidates_is_elected_and_a_late_resignation_ends_no_later_election() -> None:
    place = Place(PolicyStage.ABSENT)
    place.put(KEYS.node("other"), Node("ex2", "h", 1, ()).encode())
    assert not place.store.apply(p.elect(KEYS, TABLE, "other", 0, "")).succeeded
    late = p.resign(KEYS, TABLE, place.fence)
    assert place.store.apply(late).succeeded
    assert place.store.apply(p.elect(KEYS, TABLE, "other", 0, "")).succeeded
    assert not place.store.apply(late).succeeded


@pytest.mark.parametrize("stage", [PolicyStage.ABSENT, PolicyStage.ACTIVE])
def test_no_policy_is_set_on_a_table_that_was_replaced(stage: PolicyStage) -> None:
    place = Place(stage)
    decided = place.txn(PolicyEvent.SET if stage is PolicyStage.ABSENT else PolicyEvent.CHANGE)
    place.put(KEYS.table(TABLE), TableRecord(TABLE, "iceberg", "/other").encode())
    assert not place.store.apply(decided).succeeded


def test_an_event_is_not_added_to_a_policy_that_was_changed() -> None:
    place = Place(PolicyStage.ACTIVE)
    decided = place.txn(PolicyEvent.EMIT)
    assert place.store.apply(place.txn(PolicyEvent.CHANGE)).succeeded
    assert not place.store.apply(decided).succeeded


def test_an_evaluation_does_not_refuse_an_event() -> None:
    place = Place(PolicyStage.ACTIVE)
    decided = place.txn(PolicyEvent.EMIT)
    assert place.store.apply(place.txn(PolicyEvent.EVALUATE)).succeeded
    assert place.store.apply(decided).succeeded


def test_an_election_needs_a_live_candidate_and_a_dead_holder() -> None:
    place = Place(PolicyStage.ABSENT)
    assert not place.store.apply(p.elect(KEYS, TABLE, "other", place.fence, "inc")).succeeded
    place.put(KEYS.node("other"), b"{}")
    assert not place.store.apply(p.elect(KEYS, TABLE, "other", place.fence, "inc")).succeeded


def test_a_copy_of_set_does_not_bring_a_removed_policy_back() -> None:
    place = Place(PolicyStage.ABSENT)
    late = place.txn(PolicyEvent.SET)
    assert place.store.apply(late).succeeded
    assert place.store.apply(place.txn(PolicyEvent.REMOVE)).succeeded
    assert not place.store.apply(late).succeeded
    assert place.stage is PolicyStage.ABSENT


def test_a_change_keeps_the_state_and_the_pause() -> None:
    place = Place(PolicyStage.PAUSED)
    place.put(KEYS.policy_state(TABLE, NAME), PolicyState(version="v7").encode())
    assert place.store.apply(place.txn(PolicyEvent.CHANGE)).succeeded
    assert (place.stage, place.seen.state.version) == (PolicyStage.PAUSED, "v7")


def test_a_removal_leaves_nothing_of_the_policy() -> None:
    place = Place(PolicyStage.ACTIVE)
    assert place.store.apply(place.txn(PolicyEvent.EMIT)).succeeded
    assert place.store.apply(place.txn(PolicyEvent.REMOVE)).succeeded
    left = [kv.key for kv in place.store.listing() if "olicy" in kv.key and "Evaluator" not in kv.key]
    assert left == []
    assert place.store.get(KEYS.policy_mark()) is not None


def test_an_evaluation_consumes_the_events_that_it_saw() -> None:
    place = Place(PolicyStage.ACTIVE)
    assert place.store.apply(place.txn(PolicyEvent.EMIT)).succeeded
    seen = place.seen
    after = replace(seen.state, consumed=("e1",))
    assert place.store.apply(p.evaluate(KEYS, TABLE, NAME, seen, after, place.fence)).succeeded
    assert (place.seen.events, place.seen.state.consumed) == (WaitingEvents(), ("e1",))


def test_an_event_that_comes_during_an_evaluation_is_not_lost() -> None:
    place = Place(PolicyStage.ACTIVE)
    seen = place.seen
    assert place.store.apply(place.txn(PolicyEvent.EMIT)).succeeded
    assert not place.store.apply(p.evaluate(KEYS, TABLE, NAME, seen, seen.state, place.fence)).succeeded
    assert [one.id for one in place.seen.events.waiting] == ["e1"]


def test_waiting_events_and_evaluations_are_bounded() -> None:
    events = WaitingEvents()
    for n in range(p.MOST_WAITING + 5):
        events = events.with_one(p.EmittedEvent(str(n), "loaded", "now"))
    assert [events.waiting[0].id, len(events.waiting)] == ["5", p.MOST_WAITING]
    state = PolicyState()
    for n in range(p.MOST_EVALUATIONS + 5):
        state = state.and_then(Evaluation("now", PolicyVerdict.NO, f"reason {n}"))
    assert (len(state.kept), state.dropped, state.kept[-1].why) == (p.MOST_EVALUATIONS, 5, "reason 24")
    for n in range(30):
        state = state.and_then(Evaluation("now", PolicyVerdict.NO, f"{n}", inputs={"x": "y" * 3_000}))
    assert len(dumps([one.to_json() for one in state.kept])) <= p.MOST_BYTES
    assert state.dropped + len(state.kept) == p.MOST_EVALUATIONS + 5 + 30


def test_a_repeated_verdict_replaces_the_last_one() -> None:
    one = Evaluation("09:00", PolicyVerdict.WAITS, "busy", ("version@v1",))
    state = PolicyState().and_then(one).and_then(replace(one, time="10:00"))
    assert [each.time for each in state.kept] == ["10:00"]
    started = Evaluation("11:00", PolicyVerdict.STARTED, "", ("version@v1",), op="t/compact/1")
    assert len(state.and_then(started).and_then(started).kept) == 3


@pytest.mark.parametrize(
    "record",
    [
        POLICY,
        replace(POLICY, paused=True, actions=RESUMED),
        PolicyState(
            1.5, "v1", ("a",), "t/compact/1", 3, (Evaluation("t", PolicyVerdict.NO, "w", ("x",), {"files": 1}),), 2
        ),
        WaitingEvents((p.EmittedEvent("a", "loaded", "t", "ann"),)),
    ],
)
def test_records_are_read_as_they_were_written(record: Policy | PolicyState | WaitingEvents) -> None:
    assert type(record).decode(record.encode()) == record


@pytest.mark.parametrize(
    "changes",
    [
        {"every": 0, "on": []},
        {"every": 0.5},
        {"on": ["versions"]},
        {"on": ["event:"]},
        {"on": ["event:a"] * 21},
        {"start": "1st"},
        {"when": "files > "},
        {"uid": 5},
    ],
)
def test_a_wrong_policy_is_unreadable(changes: dict[str, object]) -> None:
    with pytest.raises((ValueError, TypeError, InvalidArgument)):
        Policy.decode(dumps({**POLICY.to_json(), **changes}))


def test_a_request_id_follows_from_policy_trigger_and_state() -> None:
    one = p.request_id("u1", ("version@v1", "event:a@1"), 7)
    assert one == p.request_id("u1", ("event:a@1", "version@v1"), 7)
    assert len({one, p.request_id("u2", ("version@v1", "event:a@1"), 7), p.request_id("u1", ("version@v1",), 7)}) == 3
    assert one != p.request_id("u1", ("version@v1", "event:a@1"), 8)
