"""Pending operations, on the model of etcd: events of them and of their holds come in any order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from distop.daemon.action_log import ActionLog
from distop.daemon.coordinator import due_times, pending_starts
from distop.daemon.coordinator.coordinator_role import Coordinator as Role
from distop.daemon.coordinator.election import Callbacks, Election
from distop.daemon.coordinator.pending_starts import Waiters
from distop.daemon.rejected_writes import RejectedWrites
from distop.decide.due_operations import Blocked, EndJoin, EndWaiting, start_decision
from distop.decide.view import ClusterView, TypeView
from distop.errors import EtcdUnavailable, MalformedRequest, PermissionDenied
from distop.protocol import pending_operations as w
from distop.protocol import prepared_operations as p
from distop.protocol.behavior_declaration import Declaration, Rules
from distop.protocol.dependencies import Edge, Hold, HoldState
from distop.protocol.json_codec import dumps
from distop.protocol.records import Cancel, OperationRef, Spec
from distop.protocol.revisioned import Change
from distop.protocol.size_limits import DEFAULT
from distop.protocol.txn import MAX_OPERATIONS, Delete, KeyValue, Txn, TxnResult, operations, value_is
from distop.runtime import logs
from tests.unit.support.model_submission import KEYS, TABLE, Etcd
from tests.unit.support.virtualtime import in_virtual_time

REF = OperationRef(TABLE, "noop", "", 1)
HOLD = KEYS.hold(p.hold_id("tx-17"))


class Coordinator:
    """An elected coordinator; its views advance with ``sees_operations`` and ``sees_holds``."""

    def __init__(self, etcd: Etcd) -> None:
        election = KEYS.coordinator(TABLE, "noop")
        etcd.put(election, b"e1")
        self.etcd = etcd
        self.done = asyncio.Event()
        """A transaction was applied, or a rejected write reported."""
        self.view = TypeView(KEYS, TABLE, "noop", DEFAULT.outcomes_ahead)
        self.cluster = ClusterView(KEYS)
        log = logs.get("distop.test")
        self.ctx: Any = SimpleNamespace(
            client=etcd, keys=KEYS, cluster=self.cluster, log=log, limits=DEFAULT,
            config=SimpleNamespace(poll=30.0), commit=self._send, executor_id="ex",
            rejected_writes=RejectedWrites(log, self.done.set),
        )  # fmt: skip
        call: Any = None
        elected = Election(self.ctx, value_is(election, b"e1"), self.view, self._commit, self._reached, call)
        self.waiters = Waiters(elected, ActionLog(log))

    async def _send(self, txn: Txn) -> TxnResult:
        result = await self.etcd.commit(txn)
        if result.succeeded:
            self.done.set()
        return result

    async def _commit(self, txn: Txn) -> bool:
        return (await self._send(txn)).succeeded

    async def _reached(self, revision: int) -> None:
        self.sees_operations()

    def listed(self) -> list[Change]:
        return [Change(kv) for kv in self.etcd.store.range(*KEYS.type_range(TABLE, "noop"))]

    def role(self) -> Role:
        """The whole role, without its watches."""
        self.ctx.lost = asyncio.get_running_loop().create_future()
        fence = self.etcd.store.mod(KEYS.coordinator(TABLE, "noop"))
        return Role(self.ctx, TABLE, "noop", fence, Callbacks(lambda _: None, lambda: None, lambda: False))

    def sees_operations(self) -> None:
        self.view.replace(self.listed(), claims=False)
        self.waiters.look([REF])

    def sees_holds(self, *changed: str) -> None:
        self.cluster.replace(["distOpHold"], [Change(kv) for kv in self.etcd.store.range(*KEYS.family("distOpHold"))])
        self.waiters.holds_changed(changed or None)


@pytest.mark.parametrize("confirmed", [True, False])
def test_an_operation_that_is_seen_before_its_hold_begins_or_ends_by_that(
    confirmed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are watched separately. If the hold was denied, the begin was retried forever."""
    monkeypatch.setattr(pending_starts, "EXCLUDED_PAUSE", (0.001, 0.001))

    async def main() -> str:
        etcd = Etcd()
        await etcd.client.prepare_operation("noop", TABLE, {}, external_id="tx-17")
        coordinator = Coordinator(etcd)
        coordinator.sees_operations()
        await etcd.until(lambda: etcd.requests.count("begin") == 2)
        assert etcd.value(KEYS.of(REF, "state")) == b"pending", "the hold is in etcd"
        coordinator.sees_holds()
        if confirmed:
            await etcd.client.confirm("tx-17")
        else:
            terms = p.PreparedTerms.of(Hold.decode(etcd.value(HOLD) or b""))
            assert terms is not None
            etcd.put(HOLD, terms.hold(HoldState.DENIED, "no").encode())
        coordinator.sees_holds()
        if confirmed:  # confirming has written the state again
            await etcd.until(lambda: etcd.requests.count("begin") == 3)
            coordinator.sees_operations()
        async with asyncio.timeout(20):
            await coordinator.done.wait()
        coordinator.waiters.close()
        return (etcd.value(KEYS.of(REF, "state")) or b"").decode()

    assert asyncio.run(main()) == ("running" if confirmed else "cancelled")


def test_a_hold_that_changed_twice_is_handled_once() -> None:
    """A watch that lags brings both changes at once; the error ended the session."""

    async def main() -> str:
        etcd = Etcd()
        await etcd.client.prepare_operation("noop", TABLE, {}, external_id="tx-17")
        coordinator = Coordinator(etcd)
        coordinator.sees_operations()
        coordinator.sees_holds()
        await etcd.client.confirm("tx-17")
        coordinator.sees_operations()
        coordinator.sees_holds(p.hold_id("tx-17"), p.hold_id("tx-17"))
        async with asyncio.timeout(20):
            await coordinator.done.wait()
        coordinator.waiters.close()
        return (etcd.value(KEYS.of(REF, "state")) or b"").decode()

    assert asyncio.run(main()) == "running"


# ------------------------------------------------------------------- many


class Many(Coordinator):
    """A coordinator of many pending operations, written with their spec."""

    def add(self, number: int, joins: bool = False, **spec: Any) -> OperationRef:
        ref = OperationRef(TABLE, "noop", "", number)
        record = Spec(f"r{number}", "2013-01-01T00:00:00.000Z", "me", Rules(joins=joins), **spec)
        self.etcd.put(KEYS.of(ref, "spec"), record.encode())
        self.etcd.put(KEYS.of(ref, "state"), b"pending")
        self.etcd.put(KEYS.pending(ref), b"waiting")
        if record.id:
            self.etcd.put(KEYS.unique(TABLE, "noop", record.id), str(ref).encode())
        return ref

    def sees_operations(self) -> None:
        self.view.replace(self.listed(), claims=False)
        self.waiters.look(list(self.view.operations))

    async def until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            self.done.clear()
            await self.done.wait()

    def in_state(self, state: str) -> int:
        listing = self.etcd.store.range(*KEYS.type_range(TABLE, "noop"))
        return sum(kv.key.endswith(".state") and kv.value == state.encode() for kv in listing)

    def runs(self, *types: str) -> None:
        """Write that operations of these types run on the table; the waiters are not notified."""
        self.etcd.put(KEYS.run_ops(TABLE), dumps(dict.fromkeys(types, 1)))

    def break_edge(self, ref: OperationRef) -> None:
        before = OperationRef(TABLE, "noop", "", 9_000)
        (put, _) = w.link(KEYS, before, ref, "success")
        self.etcd.put(put.key, Edge(str(before), "success", "failed").encode())


def run_many(work: Any) -> None:
    async def main() -> None:
        coordinator = Many(Etcd())
        try:
            async with asyncio.timeout(20):
                await work(coordinator)
        finally:
            coordinator.waiters.close()

    asyncio.run(main())


@pytest.mark.parametrize("joins", [True, False])
def test_joins_and_aborts_end_many_in_one_transaction(joins: bool) -> None:
    async def work(coordinator: Many) -> None:
        for n in range(1, 101):
            ref = coordinator.add(n, joins, id=f"id-{n}")
            if not joins:
                coordinator.break_edge(ref)
        other = OperationRef(TABLE, "noop", "", 200)  # it has taken the id of one of them
        coordinator.etcd.put(KEYS.unique(TABLE, "noop", "id-50"), str(other).encode())
        coordinator.sees_operations()
        state = "success" if joins else "cancelled"
        await coordinator.until(lambda: coordinator.in_state(state) == 100)
        sent = [txn for txn in coordinator.etcd.committed if txn.label in ("join", "end_waiting")]
        assert len(sent) <= 6
        assert all(operations(txn) <= MAX_OPERATIONS for txn in sent)
        assert len(coordinator.etcd.store.range(*KEYS.family("distOpHistory"))) == 100
        assert {kv.value for kv in coordinator.etcd.store.range(*KEYS.family("distOpPending"))} == {b"cleaning"}
        assert [kv.value for kv in coordinator.etcd.store.range(*KEYS.family("distOpUnique"))] == [str(other).encode()]

    run_many(work)


def test_operations_with_one_id_end_in_separate_transactions() -> None:
    """Both would write the key of the id."""

    async def work(coordinator: Many) -> None:
        for n in (1, 2, 3):
            coordinator.add(n, joins=True, id="nightly" if n < 3 else "")
        coordinator.sees_operations()
        await coordinator.until(lambda: coordinator.in_state("success") == 3)
        assert coordinator.etcd.requests.count("join") == 2

    run_many(work)


def test_thousands_of_ends_do_not_delay_a_begin() -> None:
    async def work(coordinator: Many) -> None:
        for n in range(1, 1_001):
            coordinator.add(n, joins=True)
        begins = coordinator.add(1_001)
        coordinator.sees_operations()
        await coordinator.until(lambda: coordinator.etcd.value(KEYS.of(begins, "state")) == b"running")
        assert coordinator.in_state("success") < 100

    run_many(work)


def test_an_operation_whose_end_is_rejected_blocks_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_starts, "TROUBLE_PAUSE", (0.001, 0.001))
    monkeypatch.setattr(pending_starts, "EXCLUDED_PAUSE", (0.001, 0.001))

    async def work(coordinator: Many) -> None:
        bad = coordinator.add(1, joins=True)
        for n in range(2, 12):
            coordinator.add(n, joins=True)
        begins = coordinator.add(12)
        apply = coordinator.etcd.store.apply

        def picky(txn: Txn) -> TxnResult:
            if any(getattr(op, "key", "") == KEYS.history(bad) for op in txn.success):
                raise MalformedRequest("no", code="INVALID_ARGUMENT", detail="no")
            return apply(txn)

        coordinator.etcd.usual = picky
        coordinator.sees_operations()
        await coordinator.until(
            lambda: (
                coordinator.in_state("success") == 10 and coordinator.etcd.value(KEYS.of(begins, "state")) == b"running"
            )
        )
        assert coordinator.etcd.value(KEYS.of(bad, "state")) == b"pending"

    run_many(work)


@pytest.mark.parametrize("joins", [True, False])
def test_a_rejected_begin_or_end_is_retried_and_blocks_no_other(joins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation whose begin was rejected was always tried first.

    None after it ever began.
    """
    monkeypatch.setattr("distop.daemon.rejected_writes.PAUSE", (0.001, 0.001))
    monkeypatch.setattr(pending_starts, "EXCLUDED_PAUSE", (0.001, 0.001))

    async def work(coordinator: Many) -> None:
        etcd, wanted = coordinator.etcd, b"success" if joins else b"running"
        refs = [coordinator.add(n, joins=joins) for n in range(1, 13)]
        bad, refused = refs[0], [True]
        refusals = coordinator.waiters._ctx.rejected_writes

        def picky(txn: Txn) -> TxnResult:
            if refused[0] and any(getattr(op, "key", "") == KEYS.of(bad, "state") for op in txn.success):
                raise MalformedRequest("etcd rejected the write: request is too large")
            return etcd.store.apply(txn)

        etcd.usual = picky
        coordinator.sees_operations()
        await coordinator.until(lambda: [etcd.value(KEYS.of(ref, "state")) for ref in refs[1:]] == [wanted] * 11)
        assert etcd.value(KEYS.of(bad, "state")) == b"pending"
        await coordinator.until(lambda: str(bad) in refusals.published)
        assert refusals.published[str(bad)] == "begin or end: etcd rejected the write: request is too large"
        refused[0] = False
        await coordinator.until(lambda: etcd.value(KEYS.of(bad, "state")) == wanted)
        await coordinator.until(lambda: not refusals.published)

    run_many(work)


def test_the_due_times_of_cancelled_operations_are_forgotten() -> None:
    async def work(coordinator: Many) -> None:
        for n in range(1, 501):
            coordinator.add(n, not_before="2113-01-01T00:00:00.000Z")
        coordinator.sees_operations()
        assert len(coordinator.waiters._times) == 500
        for n in range(1, 500):
            ref = OperationRef(TABLE, "noop", "", n)
            coordinator.etcd.put(KEYS.of(ref, "state"), b"cancelled")
        coordinator.sees_operations()
        assert len(coordinator.waiters._times._heap) <= 2 + due_times.FEW
        assert list(coordinator.waiters._times.come(1e11)) == [("", 500)]

    run_many(work)


def test_a_delayed_operation_has_one_due_time_after_repeated_listings() -> None:
    async def work(coordinator: Many) -> None:
        coordinator.add(1, not_before="2113-01-01T00:00:00.000Z")
        coordinator.sees_operations()
        coordinator.sees_operations()
        assert list(coordinator.waiters._times.come(1e11)) == [("", 1)]

    run_many(work)


def test_the_edges_of_a_wide_join_are_not_scanned_for_each_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 50,000 ends is an event of the join."""
    monkeypatch.setattr("distop.decide.operation_view.EDGES_AT_REST", 0)

    class Edges(dict[str, str]):
        def values(self) -> Any:
            raise AssertionError("scanned")

        __iter__ = items = values  # type: ignore[assignment]

    view = TypeView(KEYS, TABLE, "noop", 0)
    ref, before = OperationRef(TABLE, "noop", "", 9), [OperationRef(TABLE, "noop", "", n) for n in (1, 2)]
    spec = Spec("r", "", "me", Rules(joins=True))
    (one, _), (two, _) = (w.link(KEYS, pred, ref, "success") for pred in before)
    kvs = [KeyValue(KEYS.of(ref, "spec"), spec.encode(), 1), KeyValue(KEYS.of(ref, "state"), b"pending", 1)]
    view.apply([Change(kv) for kv in (*kvs, KeyValue(one.key, one.value, 1), KeyValue(two.key, two.value, 1))])
    op = view.operations[ref]
    op.after = Edges(op.after)
    assert start_decision(op, {}, 0.0) == Blocked()
    failed = Edge(str(before[0]), "success", "failed").encode()
    view.apply([Change(KeyValue(one.key, failed, 2))])
    assert start_decision(op, {}, 0.0) == EndWaiting(Cancel("aborted", f"{before[0]} ended as failed"))
    view.apply([Change(KeyValue(one.key, b"", 3), deleted=True)])
    assert start_decision(op, {}, 0.0) == Blocked()
    view.apply([Change(KeyValue(two.key, b"", 4), deleted=True)])
    assert start_decision(op, {}, 0.0) == EndJoin()


def test_a_stopping_coordinator_waits_for_its_transactions() -> None:
    """A transaction continued after the coordinator had stopped."""

    async def main() -> None:
        etcd = Etcd()
        coordinator = Many(etcd)
        coordinator.add(1)
        begun, ended = asyncio.Event(), asyncio.Event()

        async def slow(txn: Txn) -> TxnResult:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                ended.set()
            raise AssertionError

        etcd.fates.append(slow)
        role = coordinator.role()
        role._view.replace(coordinator.listed(), claims=False)
        role._waiters.look(list(role._view.operations))
        await begun.wait()
        async with asyncio.timeout(20):
            await role.stop()
        assert ended.is_set()

    asyncio.run(main())


@pytest.mark.parametrize("comes", [True, False])
def test_a_broken_edge_ends_no_operation_under_an_unseen_hold(comes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graph is still being inserted.

    Others of the graph will wait for it, and would never learn of its end.
    """
    monkeypatch.setattr(pending_starts, "EXCLUDED_PAUSE", (0.001, 0.001))

    async def work(coordinator: Many) -> None:
        etcd, ref = coordinator.etcd, coordinator.add(1, hold="g")
        etcd.put(KEYS.hold("g"), Hold("graph").encode())
        coordinator.break_edge(ref)
        coordinator.sees_operations()
        await etcd.until(lambda: etcd.requests.count("end_waiting") == 2)
        assert etcd.value(KEYS.of(ref, "state")) == b"pending"
        if comes:
            coordinator.sees_holds()
            await asyncio.gather(*coordinator.waiters.under_way())
        etcd.store.apply(Txn((), (Delete(KEYS.hold("g")),)))
        coordinator.sees_holds()
        await coordinator.until(lambda: etcd.value(KEYS.of(ref, "state")) == b"cancelled")

    run_many(work)


def test_a_join_that_is_seen_before_its_hold_ends_once_the_hold_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was forgotten when its hold was seen, until the next listing."""
    monkeypatch.setattr(pending_starts, "EXCLUDED_PAUSE", (0.001, 0.001))

    async def work(coordinator: Many) -> None:
        etcd, ref = coordinator.etcd, coordinator.add(1, joins=True, hold="g")
        etcd.put(KEYS.hold("g"), Hold("graph").encode())
        coordinator.sees_operations()
        await etcd.until(lambda: etcd.requests.count("join") == 2)
        coordinator.sees_holds()
        await asyncio.gather(*coordinator.waiters.under_way())
        etcd.store.apply(Txn((), (Delete(KEYS.hold("g")),)))
        coordinator.sees_holds()
        await coordinator.until(lambda: etcd.value(KEYS.of(ref, "state")) == b"success")

    run_many(work)


# --------------------------------------------------------------- retries


def run_for_minutes(work: Callable[[Many], Any]) -> None:
    """Run a test in virtual time."""

    async def main() -> None:
        coordinator = Many(Etcd())
        try:
            await work(coordinator)
        finally:
            coordinator.waiters.close()

    in_virtual_time(main)


async def one_begins(coordinator: Many, refs: set[OperationRef], within: float) -> OperationRef:
    """Wait until one of the operations runs, ``within`` virtual seconds at most; which one."""

    def begun() -> list[OperationRef]:
        return [ref for ref in refs if coordinator.etcd.value(KEYS.of(ref, "state")) == b"running"]

    async with asyncio.timeout(within):
        while not begun():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return begun()[0]


async def begins(coordinator: Many, ref: OperationRef, within: float) -> None:
    await one_begins(coordinator, {ref}, within)


def test_an_excluded_operation_is_retried_soon_after_another_one_began() -> None:
    """It waits for the new one now, which may end soon. No event reports ends here."""

    async def work(coordinator: Many) -> None:
        excludes = Declaration("noop", conflicts_with=("noop", "apply"))
        coordinator.etcd.put(KEYS.behavior("noop"), excludes.encode())
        coordinator.runs("apply")
        both = {coordinator.add(1), coordinator.add(2)}
        coordinator.sees_operations()
        await asyncio.sleep(60.0)
        coordinator.runs()
        first = await one_begins(coordinator, both, within=5.0)
        (second,) = both - {first}
        await asyncio.sleep(0.1)
        assert coordinator.etcd.value(KEYS.of(second, "state")) == b"pending"
        coordinator.runs()
        await one_begins(coordinator, {second}, within=0.5)

    run_for_minutes(work)


def test_a_short_outage_delays_a_begin_by_a_second_at_most_though_an_earlier_one_was_long() -> None:
    async def work(coordinator: Many) -> None:
        etcd, ref = coordinator.etcd, coordinator.add(1)
        etcd.put(KEYS.behavior("noop"), Declaration("noop", conflicts_with=("apply",)).encode())

        def away(txn: Txn) -> TxnResult:
            raise EtcdUnavailable("etcd is away")

        usual, etcd.usual = etcd.usual, away
        coordinator.sees_operations()
        await asyncio.sleep(60.0)
        etcd.usual = usual
        coordinator.runs("apply")
        await asyncio.sleep(30.0)
        etcd.fates.append(away)
        coordinator.runs()
        await etcd.until(lambda: not etcd.fates)
        await begins(coordinator, ref, within=1.0)

    run_for_minutes(work)


@pytest.mark.parametrize("refused", ["begin", "join"])
def test_rejected_begins_do_not_block_joins_and_rejected_joins_do_not_block_begins(refused: str) -> None:
    async def work(coordinator: Many) -> None:
        etcd, joins, plain = coordinator.etcd, coordinator.add(1, joins=True), coordinator.add(2)
        apply = etcd.usual

        def picky(txn: Txn) -> TxnResult:
            if txn.label == refused:
                raise PermissionDenied("etcd denies permission")
            return apply(txn)  # type: ignore[no-any-return]

        etcd.usual = picky
        coordinator.sees_operations()
        await asyncio.sleep(60.0)
        states = [etcd.value(KEYS.of(ref, "state")) for ref in (joins, plain)]
        assert states == ([b"success", b"pending"] if refused == "begin" else [b"pending", b"running"])

    run_for_minutes(work)


@pytest.mark.parametrize("what", ["begin", "join", "end_waiting"])
def test_an_executor_that_lost_its_election_begins_and_ends_no_operation(what: str) -> None:
    """It may not know yet that it lost it."""

    async def work(coordinator: Many) -> None:
        etcd, ref = coordinator.etcd, coordinator.add(1, joins=what == "join")
        if what == "end_waiting":
            coordinator.break_edge(ref)
        etcd.put(KEYS.coordinator(TABLE, "noop"), b"e2")
        coordinator.sees_operations()
        await asyncio.sleep(60.0)
        assert what in etcd.requests
        assert etcd.value(KEYS.of(ref, "state")) == b"pending"

    run_for_minutes(work)
