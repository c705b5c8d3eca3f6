"""Submission in two phases, on the model of etcd: prepare, confirm, abandon, and verification by executors."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from distop.daemon.upkeep.prepared_verification import Verifying
from distop.decide.due_operations import EndWaiting, ended_waiting, start_decision
from distop.decide.operation_view import OperationView
from distop.errors import Incompatible, InvalidArgument, NotAllowed, NotFound, OutcomeUnknown
from distop.invariants.checker import check
from distop.protocol import pending_operations as w
from distop.protocol import prepared_operations as p
from distop.protocol.behavior_declaration import Declaration, Rules
from distop.protocol.dependencies import Hold, HoldState
from distop.protocol.keys import Keys
from distop.protocol.records import Cancel, History, OperationRef, Spec, State, TableRecord
from distop.protocol.revisioned import Seen
from distop.protocol.txn import Delete, Get, GetResult, Put, Txn, TxnResult, unchanged
from distop.protocol.user_actions import NO_ACTIONS, Action, Actions
from distop.services.submission.start_request import whoami
from distop.worker.daemon_side.requests import Verified, WorkerError
from tests.unit.support.model_submission import TABLE, Etcd, noop, run

if TYPE_CHECKING:
    from distop.client.async_operation import Operation

KEYS = Keys()
TIME = "2026-01-01T00:00:00.000Z"
ID = "tx-17"
HOLD, RECEIPT = KEYS.hold(p.hold_id(ID)), KEYS.hold(p.receipt_id(ID))
REF = OperationRef(TABLE, "noop", "", 1)


async def prepare(etcd: Etcd, external_id: str = ID, arg: Any = None, **options: Any) -> Operation:
    return await etcd.client.prepare_operation("noop", TABLE, arg or {}, external_id=external_id, **options)


def hold(etcd: Etcd) -> tuple[p.PreparedTerms, Hold, int]:
    kv = etcd.store.get(HOLD)
    assert kv is not None
    record = Hold.decode(kv.value)
    terms = p.PreparedTerms.of(record)
    assert terms is not None
    return terms, record, kv.mod_revision


# ------------------------------------------------------------- prepare, confirm


def test_C13_a_preparation_inserts_a_held_operation_in_one_transaction() -> None:
    async def work(etcd: Etcd) -> None:
        op = await prepare(etcd, arg={"a": 1}, verify="orders", verify_after=30)
        assert op.ref == "t/noop/1"
        assert etcd.value(KEYS.of(REF, "arg")) == b'{"a":1}'
        assert len(etcd.committed) == 1
        terms, record, _ = hold(etcd)
        assert (terms.op, terms.external_id, terms.verify, terms.verify_after) == ("t/noop/1", ID, "orders", 30)
        assert record.state is HoldState.HELD
        spec = Spec.decode(etcd.value(KEYS.of(REF, "spec")) or b"")
        assert spec.hold == p.hold_id(ID)
        assert etcd.value(KEYS.of(REF, "state")) == b"pending"

    run(work)


def test_C13_a_repeated_preparation_returns_the_operation_and_a_different_one_is_refused() -> None:
    async def work(etcd: Etcd) -> None:
        op = await prepare(etcd, arg={"a": 1, "b": 2})
        again = await prepare(etcd, arg={"b": 2, "a": 1})
        assert (again.ref, again.already_started) == (op.ref, True)
        for other in (
            {"arg": {"a": 2}},
            {"arg": {"a": 1, "b": 2}, "verify": "x"},
            {"arg": {"a": 1, "b": 2}, "verify_after": 5},
        ):
            with pytest.raises(InvalidArgument, match="has prepared t/noop/1 by another request"):
                await prepare(etcd, **other)
        etcd.put(KEYS.table("other"), TableRecord("other", "parquet", "/data").encode())
        with pytest.raises(InvalidArgument, match="has prepared another operation by another request"):
            await etcd.client.prepare_operation("noop", "other", {}, external_id=ID)
        await etcd.client.confirm(ID)
        assert (await prepare(etcd, arg={"a": 1, "b": 2})).ref == op.ref
        with pytest.raises(InvalidArgument, match="by another request"):
            await prepare(etcd, arg={"a": 2})
        etcd.store.apply(Txn((), (Delete(RECEIPT),)))
        assert (await prepare(etcd, arg={"a": 1, "b": 2})).ref == op.ref, "found by its request id"
        assert etcd.operations() == ["t/noop/1"]

    run(work)


def test_the_transaction_of_a_confirmation_records_the_action() -> None:
    async def work(etcd: Etcd) -> None:
        op = await prepare(etcd)
        await op.alter(priority=3)
        before = len(etcd.committed)
        await etcd.client.confirm(ID)
        await op.confirm()
        assert len(etcd.committed) == before + 1
        await op.alter(priority=4)
        actions = Actions.decode(etcd.value(KEYS.of(REF, "actions")) or b"")
        assert [one.action for one in actions.kept] == ["alter", "confirm", "alter"]
        assert {one.by for one in actions.kept} == {whoami()}

    run(work)


def test_a_confirmation_keeps_an_action_that_is_recorded_concurrently() -> None:
    async def work(etcd: Etcd) -> None:
        op = await prepare(etcd)
        terms, _, mod = hold(etcd)
        confirmed = NO_ACTIONS.and_then(Action(TIME, "confirm", "ann"))
        late = p.confirm(KEYS, REF, terms, mod, confirmed, etcd.store.mod(KEYS.of(REF, "state")))
        await op.alter(priority=3)
        assert not etcd.store.apply(late).succeeded
        await etcd.client.confirm(ID)
        actions = Actions.decode(etcd.value(KEYS.of(REF, "actions")) or b"")
        assert [one.action for one in actions.kept] == ["alter", "confirm"]

    run(work)


def test_the_record_of_a_confirmed_operation_contains_the_confirmation() -> None:
    async def work(etcd: Etcd) -> None:
        op = await prepare(etcd)
        await etcd.client.confirm(ID)
        await op.cancel("not wanted")
        record = History.decode(etcd.value(KEYS.history(REF)) or b"")
        assert [one.action for one in record.actions.kept] == ["confirm"]

    run(work)


def test_C13_two_concurrent_preparations_insert_one_operation() -> None:
    async def work(etcd: Etcd) -> None:
        found = await asyncio.gather(*(prepare(etcd) for _ in range(5)))
        assert {op.ref for op in found} == {"t/noop/1"}
        assert etcd.operations() == ["t/noop/1"]

    run(work)


NIGHTLY = KEYS.unique(TABLE, "noop", "nightly")


def test_L9_a_prepared_operation_has_its_id_from_its_preparation_to_its_end() -> None:
    async def work(etcd: Etcd) -> None:
        op = await prepare(etcd, id="nightly")
        assert (len(etcd.committed), etcd.value(NIGHTLY)) == (1, b"t/noop/1")
        assert (await prepare(etcd, id="nightly")).ref == op.ref, "the same preparation"
        with pytest.raises(Incompatible, match="t/noop/1 has the id 'nightly' and is pending, and this start"):
            await prepare(etcd, "tx-18", id="nightly")
        assert etcd.value(KEYS.hold(p.hold_id("tx-18"))) is None
        joined = await etcd.client.start_operation("noop", TABLE, {}, id="nightly")
        assert (joined.ref, joined.already_started) == (op.ref, True)
        await op.abandon("the order was withdrawn")
        assert etcd.value(NIGHTLY) is None
        other = await prepare(etcd, "tx-19", id="nightly")
        assert etcd.value(NIGHTLY) == other.ref.encode()
        await etcd.client.confirm("tx-19")
        assert etcd.value(NIGHTLY) == other.ref.encode()

    run(work)


def test_L9_a_preparation_is_refused_if_a_running_operation_regains_the_id() -> None:
    """The pending operation with the id is cancelled after the preparation has read it."""

    async def work(etcd: Etcd) -> None:
        etcd.put(KEYS.behavior("noop"), Declaration("noop", combine={"a": "max"}).encode())
        running = await etcd.client.start_operation("noop", TABLE, {"a": 1}, id="nightly")
        following = await etcd.client.start_operation("noop", TABLE, {"a": 2}, id="nightly", on_duplicate="combine")
        assert etcd.value(NIGHTLY) == following.ref.encode()
        read = etcd.read

        async def cancelled_before(*gets: Get) -> tuple[GetResult, ...]:
            if gets[0].key == KEYS.of(following.parts, "state"):
                etcd.read = read  # type: ignore[method-assign]
                await following.cancel()
            return await read(*gets)

        etcd.read = cancelled_before  # type: ignore[method-assign]
        with pytest.raises(Incompatible, match=f"{running.ref} has the id 'nightly' and is running"):
            await prepare(etcd, id="nightly")
        assert etcd.operations() == [running.ref, following.ref]
        assert etcd.value(NIGHTLY) == running.ref.encode()

    run(work)


@pytest.mark.parametrize("policy", [None, "join", "refuse"])
def test_L9_a_preparation_is_refused_if_another_operation_has_the_id(policy: str | None) -> None:
    async def work(etcd: Etcd) -> None:
        first = await etcd.client.start_operation("noop", TABLE, {"a": 1}, id="nightly")
        revision = etcd.store.revision
        with pytest.raises(Incompatible, match=f"noop on t was not started: {first.ref} has the id 'nightly'"):
            await prepare(etcd, id="nightly", on_duplicate=policy)
        assert etcd.store.revision == revision
        for unfit in ("replace", "combine"):
            with pytest.raises(InvalidArgument, match=f"cannot {unfit} a duplicate: start noop on t by itself"):
                await prepare(etcd, id="nightly", on_duplicate=unfit)

    run(work)


def test_L9_concurrent_preparations_of_an_id_are_refused_unless_they_are_the_same_request() -> None:
    async def work(etcd: Etcd) -> None:
        same = (prepare(etcd, "tx-1", id="nightly") for _ in range(4))
        others = (prepare(etcd, f"tx-{n}", id="weekly") for n in range(2, 6))
        found = await asyncio.gather(*same, *others, return_exceptions=True)
        assert len({str(one.ref) for one in found[:4]}) == 1  # type: ignore[union-attr]
        assert sum(isinstance(one, Incompatible) for one in found[4:]) == 3
        assert len(etcd.operations()) == 2

    run(work)


def test_L20_a_prepared_operation_is_not_replaced() -> None:
    async def work(etcd: Etcd) -> None:
        op = await prepare(etcd, id="nightly")
        with pytest.raises(Incompatible, match="t/noop/1 has the id 'nightly' and is pending, and it is held until"):
            await etcd.client.start_operation("noop", TABLE, {"a": 2}, id="nightly", on_duplicate="replace")
        assert (await etcd.client.confirm(ID)).ref == op.ref
        after = await etcd.client.start_operation("noop", TABLE, {}, id="nightly", on_duplicate="replace")
        assert etcd.value(NIGHTLY) == after.ref.encode()
        assert etcd.value(KEYS.of(REF, "state")) == b"cancelled"

    run(work)


def test_C13_confirming_is_idempotent() -> None:
    async def work(etcd: Etcd) -> None:
        op = await prepare(etcd)
        assert (await etcd.client.confirm(ID)).ref == op.ref
        assert etcd.value(HOLD) is None
        revision = etcd.store.revision
        await etcd.client.confirm(ID)
        await op.confirm()
        assert etcd.store.revision == revision
        with pytest.raises(NotAllowed, match="was confirmed: to stop it, cancel it"):
            await op.abandon()
        with pytest.raises(NotFound, match="no operation is prepared under the external id 'tx-18'"):
            await etcd.client.confirm("tx-18")

    run(work)


def test_C13_an_abandoned_or_cancelled_operation_cannot_be_confirmed() -> None:
    async def work(etcd: Etcd) -> None:
        op = await prepare(etcd)
        await op.abandon("the order was withdrawn")
        await op.abandon()
        for _ in range(2):
            with pytest.raises(NotAllowed, match="will never run: the order was withdrawn"):
                await etcd.client.confirm(ID)
        with pytest.raises(NotAllowed, match="will never run: the order was withdrawn"):
            await op.confirm()
        history = History.decode(etcd.value(KEYS.history(REF)) or b"")
        assert (history.state, history.alarm) == (State.CANCELLED, "")
        other = await prepare(etcd, "tx-18")
        await other.cancel()
        with pytest.raises(NotAllowed, match="will never run: it was cancelled"):
            await other.confirm()
        plain = etcd.client.operation("t/noop/3")
        with pytest.raises(NotFound):
            await plain.confirm()

    run(work)


def test_C13_a_confirmation_succeeds_after_a_late_copy_has_started_the_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seed 1965 of the simulator: the confirmation was refused because the operation was no longer pending."""

    async def work(etcd: Etcd) -> None:
        await prepare(etcd)
        former = etcd.read

        async def read(*gets: Any) -> Any:
            monkeypatch.setattr(etcd, "read", former)
            answer = await former(*gets)
            terms, _, mod = hold(etcd)
            assert etcd.store.apply(p.confirm(KEYS, REF, terms, mod)).succeeded
            etcd.store.apply(Txn((), (Put(KEYS.of(REF, "state"), b"running"),)))
            return answer

        monkeypatch.setattr(etcd, "read", read)
        assert (await etcd.client.confirm(ID)).ref == "t/noop/1"

    async def main() -> None:
        await work(Etcd())  # a state written by hand, which no history of distop contains

    asyncio.run(main())


def test_a_cancel_of_an_operation_that_ends_concurrently_names_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 22409 of the simulator: its keys were deleted between two reads, and the error was NotFound."""

    async def work(etcd: Etcd) -> None:
        op = await prepare(etcd)
        former = etcd.get

        async def ends_first(key: str) -> Any:
            if key == KEYS.of(REF, "spec") and etcd.store.get(KEYS.history(REF)) is None:
                await etcd.client.operation("t/noop/1").cancel("by somebody else")
                first, after = KEYS.type_range(TABLE, "noop")
                kept = etcd.value(KEYS.next_instance(TABLE, "noop")) or b""
                etcd.store.apply(Txn((), (Delete(first, after), Delete(KEYS.pending(REF)))))
                etcd.put(KEYS.next_instance(TABLE, "noop"), kept)
            return await former(key)

        async def once(key: str) -> Any:
            monkeypatch.setattr(etcd, "get", former)
            return await ends_first(key)

        monkeypatch.setattr(etcd, "get", once)
        with pytest.raises(NotAllowed, match="ended as cancelled"):
            await op.cancel()

    async def main() -> None:
        await work(Etcd())  # keys deleted by hand, which no history of distop contains

    asyncio.run(main())


def test_C13_an_operation_without_preparation_cannot_be_confirmed_or_abandoned() -> None:
    async def work(etcd: Etcd) -> None:
        (op,) = (await etcd.client.transaction(start=noop())).operations
        for call in (op.confirm, op.abandon):
            with pytest.raises(NotAllowed, match="was not prepared"):
                await call()

    run(work)


def test_C13_repeating_the_call_settles_an_unknown_outcome() -> None:
    async def work(etcd: Etcd) -> None:
        def cut(txn: Txn) -> TxnResult:
            etcd.store.apply(txn)
            raise OutcomeUnknown("etcd stopped answering")

        def twice(txn: Txn) -> TxnResult:
            etcd.store.apply(txn)
            return replace(etcd.store.apply(txn), repeated=True)

        etcd.fates.append(cut)
        with pytest.raises(OutcomeUnknown, match="prepare it again with the external id 'tx-17'"):
            await prepare(etcd)
        assert (await prepare(etcd)).ref == "t/noop/1"
        etcd.fates.append(cut)
        with pytest.raises(OutcomeUnknown, match="confirm it again"):
            await etcd.client.confirm(ID)
        await etcd.client.confirm(ID)
        etcd.fates.append(twice)
        assert (await prepare(etcd, "tx-18")).ref == "t/noop/2"
        etcd.fates.append(twice)
        assert (await etcd.client.confirm("tx-18")).ref == "t/noop/2"
        assert etcd.operations() == ["t/noop/1", "t/noop/2"]

    run(work)


def test_C13_either_a_confirmation_or_a_denial_applies_and_late_copies_are_refused() -> None:
    async def work(etcd: Etcd) -> None:
        await prepare(etcd)
        terms, _, mod = hold(etcd)
        confirm, deny = p.confirm(KEYS, REF, terms, mod), p.write(KEYS, p.alarm(terms), mod, HoldState.DENIED, "no")
        assert etcd.store.apply(deny).succeeded
        assert not etcd.store.apply(confirm).succeeded
        assert not etcd.store.apply(deny).succeeded
        with pytest.raises(NotAllowed, match="will never run: no"):
            await etcd.client.confirm(ID)
        await prepare(etcd, "tx-18")

    run(work)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"external_id": ""}, "1 to 200 characters"),
        ({"external_id": 7}, "must be a text"),
        ({"external_id": "ä" * 100}, "bytes in a key"),
        ({"verify": "https://me:secret@host/x"}, "neither a user"),
        ({"verify": "https://token@host/x"}, "neither a user"),
        ({"verify": "https://host/x?token=1"}, "nor parameters"),
        ({"verify": "https://host/x#y"}, "nor parameters"),
        ({"verify": "ftp://host/x"}, "by http or https"),
        ({"verify": "file:///etc/passwd"}, "by http or https"),
        ({"verify": "http:///x"}, "https://host:port/path"),
        ({"verify": "http://host:99999/"}, "cannot be read"),
        ({"verify": "http://[::1/"}, "cannot be read"),
        ({"verify": "http://host/a b"}, "printable ASCII"),
        ({"verify": "http://host/" + "a" * 1000}, "at most 1000"),
        ({"verify": "no such name"}, "is not a verifier"),
        ({"verify": 7}, "must be a text"),
        ({"verify_after": 0}, "above 0"),
        ({"verify_after": float("inf")}, "a hundred years"),
        ({"verify_after": "soon"}, "number of seconds"),
        ({"verify_attempts": 0}, "1 to 1000"),
        ({"verify_attempts": True}, "1 to 1000"),
        ({"verify_pause": -1}, "0 or more"),
        ({"verify_pause": 301}, "from 0 to 300"),
        ({"every": 5}, "'every' is not an option"),
        ({"request_id": "x"}, "'request_id' is not an option"),
        ({"colour": "red"}, "'colour' is not an option"),
        ({"after": "t/noop/7"}, "after must be a list"),
        ({"after": 7}, "after must be a list"),
    ],
    ids=str,
)
def test_C13_an_invalid_preparation_is_refused_with_a_one_sentence_error(given: dict[str, Any], sentence: str) -> None:
    async def work(etcd: Etcd) -> None:
        with pytest.raises(InvalidArgument, match=sentence) as caught:
            await prepare(etcd, **given)
        assert "secret" not in str(caught.value)
        assert etcd.committed == []

    run(work)


# ------------------------------------------------------------------ decisions

TERMS = p.PreparedTerms(ID, str(REF), "", "orders", 60.0, attempts=3, pause=2.0)


def test_a_decoded_hold_equals_the_encoded_one() -> None:
    terms = replace(TERMS, asked=2, asker="e1", failed=1, error="x", alarm=True)
    assert p.PreparedTerms.of(Hold.decode(terms.hold().encode())) == terms


@pytest.mark.parametrize(
    "options", [None, {}, {"op": 7, "external_id": "x"}, {"op": "x", "external_id": "y", "verify_after": "soon"},
                {"op": "x", "external_id": "y", "verify_after": "nan"}, {"op": "x", "external_id": "y", "asked": []}]
)  # fmt: skip
def test_a_hold_with_other_content_is_ignored(options: dict[str, Any] | None) -> None:
    assert p.PreparedTerms.of(Hold(p.KIND, options=options)) is None


def test_C14_attempts_back_off_and_another_executor_asks_if_the_first_one_stops() -> None:
    assert p.due_after(TERMS, 0, asking=False) == 60.0
    assert p.due_after(TERMS, 2, asking=False) == 60.0 + 2 * p.TURN
    assert p.due_after(replace(TERMS, asked=1, asker="e1"), 0, asking=True) == p.ASKING
    assert p.due_after(replace(TERMS, asked=1, asker="e1"), 0, asking=False) == 2.0, "it is dead"
    assert [p.due_after(replace(TERMS, asked=n, failed=n), 0, asking=False) for n in (1, 2, 3, 40)] == [
        2.0,
        4.0,
        8.0,
        p.LONGEST_PAUSE,
    ]
    assert 60.0 < p.due_after(replace(TERMS, asked=1, asker="e1"), 0, asking=True) < 300.0, "it may take 60"
    assert 60.0 < p.due_after(replace(TERMS, asked=40, failed=40), 0, asking=False) < 3600.0
    assert 61.0 < p.due_after(TERMS, 1, asking=False) < 90.0, "the first may be out of reach, and has its own turn"
    nodes = [f"node-{n}" for n in range(5)]
    for terms in (TERMS, replace(TERMS, asked=1)):
        assert sorted(p.rank(terms, one, nodes) for one in nodes) == [0, 1, 2, 3, 4], "all know the same order"
    firsts = {min(nodes, key=lambda one, n=n: p.rank(replace(TERMS, asked=n), one, nodes)) for n in range(20)}  # type: ignore[misc]
    assert len(firsts) > 2, "not always the same one"


def test_C14_attempts_are_limited_even_if_the_asking_executors_die() -> None:
    assert p.begun(replace(TERMS, verify=""), "e1") is None
    terms, asked = TERMS, 0
    while (begun := p.begun(terms, "e1")) is not None:
        terms, asked = p.without_answer(begun, p.Unanswered.TIMEOUT), asked + 1
    assert asked == TERMS.attempts
    terms, asked = TERMS, 0
    while (begun := p.begun(terms, "e1")) is not None:
        terms, asked = begun, asked + 1
    assert asked == p.LOST_ASKERS * TERMS.attempts


def test_C14_a_denied_operation_ends_with_an_alarm_and_an_abandoned_one_without() -> None:
    view = OperationView(REF)
    view.spec = Spec("a request", TIME, "tester", Rules(), hold=p.hold_id(ID))
    for terms, alarm in ((p.alarm(TERMS), "never"), (TERMS, "")):
        seen = {p.hold_id(ID): Seen(terms.hold(HoldState.DENIED, "never"), 5)}
        decided = start_decision(view, seen, 0.0)
        assert decided == EndWaiting(Cancel("aborted", "never"), alarm)
        record = ended_waiting(REF, view.spec, State.CANCELLED, "", decided.why, decided.alarm)
        assert History.decode(record.encode()).alarm == alarm


# ------------------------------------------------------------------- executors


class Node:
    """The part of a daemon that its verifications use."""

    def __init__(self, etcd: Etcd, *answers: Verified | WorkerError) -> None:
        self.client, self.keys, self.incarnation = etcd, KEYS, "e1"
        self.log: Any = logging.getLogger("distop.test")
        self.cluster = SimpleNamespace(nodes={"e1": None})
        self.worker = self
        self.answers = list(answers)
        self.asked: list[tuple[str, str]] = []

    async def commit(self, txn: Txn) -> TxnResult:
        return await self.client.commit(txn)

    async def verify(self, op: str, external_id: str, verify: str, limit: float) -> Verified:
        self.asked.append((op, external_id))
        answer = self.answers.pop(0)
        if isinstance(answer, WorkerError):
            raise answer
        return answer

    async def see_to(self, etcd: Etcd) -> None:
        terms, _, mod = hold(etcd)
        await Verifying(self)._see_to(p.hold_id(ID), terms, mod)  # type: ignore[arg-type]


def test_C14_an_operation_runs_if_its_verifier_confirms() -> None:
    async def work(etcd: Etcd) -> None:
        await prepare(etcd, verify="orders")
        node = Node(etcd, Verified(True))
        await node.see_to(etcd)
        assert node.asked == [("t/noop/1", ID)]
        assert etcd.value(HOLD) is None
        await etcd.client.confirm(ID)

    run(work)


def test_C14_an_operation_ends_if_its_verifier_denies(caplog: pytest.LogCaptureFixture) -> None:
    async def work(etcd: Etcd) -> None:
        await prepare(etcd, verify="orders")
        await Node(etcd, Verified(False)).see_to(etcd)
        terms, record, _ = hold(etcd)
        assert (record.state, terms.alarm) == (HoldState.DENIED, True)
        assert "orders reports that its sender's transaction was not completed" in record.text

    run(work)
    assert [one.levelname for one in caplog.records] == ["ERROR"]


def test_C14_an_operation_is_denied_after_the_last_attempt_without_an_answer() -> None:
    async def work(etcd: Etcd) -> None:
        await prepare(etcd, verify="orders", verify_attempts=3)
        died = WorkerError("crash", "the child died")
        node = Node(etcd, Verified(None, "timeout"), died, Verified(None, "status 5xx"))
        for n in (1, 2):
            await node.see_to(etcd)
            terms, record, _ = hold(etcd)
            assert (record.state, terms.failed, terms.asker) == (HoldState.HELD, n, "")
        await node.see_to(etcd)
        terms, record, _ = hold(etcd)
        assert (record.state, terms.alarm) == (HoldState.DENIED, True)
        assert record.text.endswith(
            "asked 3 times, did not answer whether its sender's transaction was completed (last attempt: status 5xx)"
        )

    run(work)


def test_C14_an_unconfirmed_operation_without_a_verifier_ends_with_an_alarm() -> None:
    async def work(etcd: Etcd) -> None:
        await prepare(etcd, verify_after=7)
        await Node(etcd).see_to(etcd)
        _, record, _ = hold(etcd)
        assert record.text == "'tx-17' was not confirmed within 7 s, and it names no verifier to ask"

    run(work)


def test_C14_a_confirmation_during_a_verification_overrules_its_answer() -> None:
    async def work(etcd: Etcd) -> None:
        op = await prepare(etcd, verify="orders")

        class Slow(Node):
            async def verify(self, *args: Any) -> Verified:
                await op.confirm()
                return Verified(False)

        await Slow(etcd).see_to(etcd)
        assert etcd.value(HOLD) is None
        assert etcd.value(RECEIPT) is not None

    run(work)


def test_C14_one_of_two_due_executors_asks_the_verifier() -> None:
    async def work(etcd: Etcd) -> None:
        await prepare(etcd, verify="orders")
        nodes = [Node(etcd, Verified(True)) for _ in range(3)]
        terms, _, mod = hold(etcd)
        seen = p.hold_id(ID), terms, mod
        await asyncio.gather(*(Verifying(node)._see_to(*seen) for node in nodes))  # type: ignore[arg-type]
        assert sum(len(node.asked) for node in nodes) == 1

    run(work)


def test_C14_no_verifier_is_asked_about_an_ended_operation() -> None:
    """A client of an older release ended the operation, and so did not deny its hold."""

    async def work(etcd: Etcd) -> None:
        await prepare(etcd, verify="orders")
        spec = Spec.decode(etcd.value(KEYS.of(REF, "spec")) or b"")
        why = Cancel("user", "")
        state = etcd.store.get(KEYS.of(REF, "state"))
        assert state is not None
        history = ended_waiting(REF, spec, State.CANCELLED, "", why)
        etcd.store.apply(w.end_waiting(KEYS, REF, state.mod_revision, history, why))
        node = Node(etcd, Verified(True))
        await node.see_to(etcd)
        assert node.asked == []
        terms, record, _ = hold(etcd)
        assert (record.state, terms.alarm) == (HoldState.DENIED, False)

    run(work)


# ------------------------------------------------------------------ invariant 15


def breaches(etcd: Etcd) -> list[str]:
    return [f"{found.invariant}: {found.text}" for found in check(KEYS, etcd.store.history)]


@pytest.mark.parametrize(
    ("write", "text"),
    [
        (lambda terms: Put(HOLD, terms.hold().encode()), "the denied hold was written as held"),
        (lambda terms: Put(HOLD, terms.hold(HoldState.CONFIRMED).encode()), "was written as confirmed"),
        (lambda terms: Delete(HOLD), "was deleted while t/noop/1 was still pending under it"),
    ],
    ids=["held", "confirmed", "gone"],
)
def test_the_checker_finds_an_operation_that_starts_from_a_denied_hold(write: Any, text: str) -> None:
    async def main() -> list[str]:
        etcd = Etcd()
        await prepare(etcd)
        terms, _, mod = hold(etcd)
        etcd.store.apply(p.write(KEYS, terms, mod, HoldState.DENIED, "no"))
        assert breaches(etcd) == []
        etcd.store.apply(Txn((), (write(terms),)))
        return breaches(etcd)

    found = asyncio.run(main())
    assert len(found) == 1
    assert found[0].startswith("15: ")
    assert text in found[0]


def test_the_checker_finds_an_operation_that_starts_while_it_is_held() -> None:
    async def main() -> list[str]:
        etcd = Etcd()
        await prepare(etcd)
        state = KEYS.of(REF, "state")
        etcd.store.apply(
            Txn(
                (unchanged(KEYS.run_ops(TABLE), 0),),
                (Put(state, b"running"), Put(KEYS.run_ops(TABLE), b'{"noop":1}'), Put(KEYS.pending(REF), b"planning")),
            )
        )
        return breaches(etcd)

    assert asyncio.run(main()) == ["15: the operation began while its hold prepared:tx-17 existed"]


@pytest.mark.parametrize("request_id", ["prepared:tx-17", "t/noop/1#next", "t/noop/1#0"])
def test_a_caller_cannot_use_a_request_id_that_distop_derives(request_id: str) -> None:
    """Otherwise a start with it would return a prepared operation, or end a series."""

    async def work(etcd: Etcd) -> None:
        with pytest.raises(InvalidArgument, match="has a form reserved for distop"):
            await etcd.client.start_operation("noop", TABLE, {}, request_id=request_id)
        with pytest.raises(InvalidArgument, match="has a form reserved for distop"):
            await etcd.client.start_operations([noop(request_id=request_id)])
        for fine in ("PR#17", "#1", "prepare:1", "2024/05/17#retry-1"):
            await etcd.client.start_operation("noop", TABLE, {}, request_id=fine, delay=60.0)
        for fine in ("nightly/2024/12", "PR"):
            await etcd.client.start_operations([noop(delay=60.0)], request_id=fine)
        with pytest.raises(InvalidArgument, match="with the number of a part, the request id of a graph"):
            await etcd.client.start_operations([noop(delay=60.0)], request_id="sales/validate/12")
        await prepare(etcd, "x" * 200)
        with pytest.raises(InvalidArgument, match="the external id .* takes too many bytes in a key"):
            await prepare(etcd, "\u00e4" * 200)

    run(work)


def test_a_digest_of_a_request_id_is_not_accepted_as_a_request_id() -> None:
    """Otherwise the operation of the long request id would be started again."""

    async def work(etcd: Etcd) -> None:
        await etcd.client.start_operation("noop", TABLE, {}, delay=60.0)
        long = "\u00e4" * 200
        first = await etcd.client.start_operation("noop", TABLE, {}, request_id=long, delay=60.0)
        (key,) = [kv.key for kv in etcd.store.range("distOpRequest.", "distOpRequest/") if "sha256" in kv.key]
        text = f"sha256:{key[-64:]}"
        await etcd.client.start_operation("noop", TABLE, {}, request_id=text, delay=60.0)
        again = await etcd.client.start_operation("noop", TABLE, {}, request_id=long, delay=60.0)
        assert again.ref == first.ref

    run(work)
