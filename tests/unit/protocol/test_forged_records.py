"""Forged records: a decoder returns a value that the deciding functions accept, or reports it as unreadable."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distop.decide import next_steps
from distop.decide.due_operations import record_of, start_decision
from distop.decide.view import TypeView
from distop.errors import InvalidArgument, UnreadableRecord
from distop.protocol.behavior_declaration import Declaration, Rules
from distop.protocol.dependencies import Edge, Hold
from distop.protocol.executor_nodes import Drain
from distop.protocol.jobs import Claim, Outcome, Tried
from distop.protocol.json_codec import UNREADABLE, from_ranges, parse_time, rfc3339
from distop.protocol.keys import Keys
from distop.protocol.operation_options import Options, allowance, usable_permits
from distop.protocol.operation_transitions import election_guard
from distop.protocol.plan import Gate, Plan
from distop.protocol.record_reading import read
from distop.protocol.records import Attempts, Cancel, Decision, History, Node, OperationRef, Spec, State, TableRecord
from distop.protocol.revisioned import Change
from distop.protocol.schedule import Series, following
from distop.protocol.txn import KeyValue
from distop.protocol.user_actions import Action, Actions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEYS = Keys()
REF = OperationRef("t", "noop", "", 1)
TIME = "2024-05-01T00:00:00.000Z"
SERIES = Series(60.0, 1.0, "start", "any", TIME, 5, TIME, str(REF))
ACTIONS = Actions((Action(TIME, "pause", "ann", {"priority": 1}, {"priority": 2}),), 1)
TABLE = TableRecord("t", "parquet", "/data/t", {"a": 1})
RECORDS: dict[str, tuple[bytes, Callable[[bytes], Any]]] = {
    "spec": (
        Spec(
            *("r", TIME, "ann", Rules(time_limit=5.0), TABLE, ("a", "b")),
            not_before=TIME,
            hold="0123456789abcdef",
            series=SERIES.to_json(),
            labels={"a": "b"},
            where={"zone": "a"},
            id="i",
            follows=str(REF),
            rerun_of=str(REF),
            by="ann",
        ).encode(),
        Spec.decode,
    ),
    "plan": (Plan(3, "v", "d", 1, 1, {"a": 1}, ("u",)).encode(), Plan.decode),
    "planning": (Attempts(1, "e", TIME).encode(), Attempts.decode),
    "cancel": (Cancel("user", "no", str(REF), "ann", TIME).encode(), Cancel.decode),
    "decision": (
        Decision(State.FAILED, 3, 1, 2, "0-1", 1, "e", TIME, ({"type": "noop", "table": "t"},), True).encode(),
        Decision.decode,
    ),
    "options": (Options(5, 2, 1, "2%").encode(), Options.decode),
    "actions": (ACTIONS.encode(), Actions.decode),
    "after.0123456789abcdef": (Edge(str(REF), "end", "failed").encode(), Edge.decode),
    "next.0123456789abcdef": (Edge(str(REF), "end", "failed").encode(), Edge.decode),
}
OTHERS: dict[str, tuple[bytes, Callable[[bytes], Any]]] = {
    "claim": (Claim("e", "i", 1, 1, TIME, "x", 1, (Tried(1, "e", "x"),), permit=3).encode(), Claim.decode),
    "actor's claim": (Claim("a", "", 1, 0, actor="a", duration=5.0, grant="g", since=TIME).encode(), Claim.decode),
    "outcome": (Outcome("p", "e", "i", 1, TIME, TIME, {"n": 1}, "x", (Tried(1, "e", "x"),)).encode(), Outcome.decode),
    "node": (Node("e", "h", 2, ("noop",), {"a": "b"}, unable={"x": "y"}, clock=-3).encode(), Node.decode),
    "drain": (Drain(True, TIME, "ann", ACTIONS).encode(), Drain.decode),
    "hold": (Hold("prepared", options={"op": str(REF), "external_id": "x", "pause": 5.0}).encode(), Hold.decode),
    "gate": (Gate(3, Options(1), {"zone": "a"}, ("u",)).encode(), Gate.decode),
    "declaration": (Declaration("noop", id_fields=("a",), combine={"a": "sum"}).encode(), Declaration.decode),
    "table": (TABLE.encode(), TableRecord.decode),
    "history": (
        History(
            *(str(REF), State.FAILED, TIME, TIME, 3, 1, 2, {"n": 1}, ({"partition": "a", "text": "x"},), "0-1"),
            cancel=Cancel("failed"), labels={"a": "b"}, actions=ACTIONS,
        ).encode(),
        History.decode,
    ),
}  # fmt: skip
ALL = RECORDS | OTHERS

VALUES: tuple[str, ...] = (
    *("null", "[]", "{}", '""', '"x"', "-1", "0", "1e308", "1e999", "NaN", "-Infinity", "true", '"\\ud800"', "9" * 400),
    *('["a", {}]', '{"a": null}', "[1]", "[null]", "9" * 5000, "1e300", "-0.5", '"-5%"', '"1.2.3%"', '"0-99999999999"'),
    *('"9999-12-31T23:59:59+14:00"', '"9999-12-31T23:59:59-14:00"', '"0001-01-01T00:00:00"', '"0001-01-01T00:00:00Z"'),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        for name in value:
            yield from places(value[name], (*path, name))
    if isinstance(value, list):
        for n, one in enumerate(value):
            yield from places(one, (*path, n))


def forged(record: bytes, path: tuple[Any, ...], text: str) -> bytes:
    """The record with this JSON in one place."""
    if not path:
        return text.encode()
    value = json.loads(record)
    inner = value
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = "@HERE@"
    return json.dumps(value).replace('"@HERE@"', text).encode()


def decided(records: dict[str, bytes]) -> None:
    """Fold these records of an operation, and decide everything that a coordinator decides of it."""
    view = TypeView(KEYS, "t", "noop", 100)
    root = KEYS.root(REF)
    view.apply([Change(KeyValue(f"{root}.{name}", value, 1, 2), False) for name, value in records.items()])
    op = view.operations.get(REF)
    guard = election_guard(KEYS, "t", "noop", 1)
    if op is None:
        return
    for now in (0.0, 1.7e9):
        start_decision(op, {}, now)
        step = next_steps.next_step(KEYS, op, {}, guard, now, 30.0)
        if isinstance(step, next_steps.WakeAt):
            assert step.time >= 0
    if op.spec is not None:
        KEYS.hold(op.spec.hold or "none").encode()
        record_of(REF, op.spec, State.SUCCESS, TIME, total=0, success=0, failed=0).encode()
        assert op.spec.rules.retry.delay(3) >= 0
        rfc3339(1.7e9 + op.spec.rules.retry.delay(60))
        if op.spec.series is not None:
            after = following(Series.from_json(op.spec.series), str(REF), State.SUCCESS, 1.7e9, 1.7e9, 0.5)
            assert after is None or parse_time(after.not_before) > 0
    if op.plan is not None:
        options = op.terms.options
        assert allowance(options.max_failed, True, op.plan.count) >= 0
        assert usable_permits(options.max_jobs, {}, 0) == options.max_jobs
    if op.decision is not None:
        with suppress(ValueError):
            from_ranges(op.decision.value.failed_ranges)


@pytest.mark.parametrize("name", ALL)
def test_a_field_of_a_wrong_type_or_size_is_unreadable_or_harmless(name: str) -> None:
    """Each field of each record, with each of these values."""
    record, decode = ALL[name]
    decode(record)
    for path in places(json.loads(record)):
        for text in VALUES:
            value = forged(record, path, text)
            try:
                found = read(decode, KeyValue("key", value, 1, 1))
            except UnreadableRecord:
                continue
            found.encode()


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("name", RECORDS)
def test_a_coordinator_survives_forged_records(name: str, state: State) -> None:
    whole = {each: record for each, (record, _) in RECORDS.items() if not each.startswith("after")}
    record, _ = RECORDS[name]
    for others in (whole, {"spec": whole["spec"]}):
        for path in places(json.loads(record)):
            for text in VALUES:
                decided({"state": state.encode(), **others, name: forged(record, path, text)})


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(ALL)), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=5,
), st.data())  # fmt: skip
def test_any_json_in_any_field_is_a_record_or_unreadable(name: str, value: Any, data: st.DataObject) -> None:
    record, decode = ALL[name]
    path = data.draw(st.sampled_from(list(places(json.loads(record)))))
    try:
        decode(forged(record, path, json.dumps(value)))
    except (InvalidArgument, *UNREADABLE):
        return


@pytest.mark.parametrize("known", [False, True], ids=["listed", "watched"])
def test_an_unreadable_claim_is_skipped(*, known: bool) -> None:
    spec, _ = RECORDS["spec"]
    view = TypeView(KEYS, "t", "noop", 100)
    records = {KEYS.of(REF, "spec"): spec, KEYS.of(REF, "state"): b"cancelling"}
    view.apply([Change(KeyValue(key, value, 1, 2)) for key, value in records.items()])
    readable = Change(KeyValue(KEYS.claim(REF, 0), Claim("e", "i", 1, 0).encode(), 1, 2))
    view.replace([readable] if known else [], claims=True)
    forgery = Change(KeyValue(KEYS.claim(REF, 0), b'{"attempt":-1}', 1, 3))
    view.apply([forgery])
    assert list(view.foreign) == [KEYS.claim(REF, 0)]
    guard = election_guard(KEYS, "t", "noop", 1)
    step = next_steps.next_step(KEYS, view.operations[REF], {}, guard, 0.0, 30.0)
    assert isinstance(step, next_steps.Commit), "etcd refuses it while the claim is there"
    view.apply([readable])
    assert not view.foreign
    assert list(view.operations[REF].claims) == [0]


def test_an_invalid_time_delays_no_other_operation() -> None:
    """``not_before`` of -1 ended the coordinator of the table."""
    spec, _ = RECORDS["spec"]
    decided({"state": b"pending", "spec": forged(spec, ("not_before",), "-1")})
