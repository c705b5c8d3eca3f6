"""Starts of graphs on the model of etcd: lost answers, dead and concurrent callers, and many predecessors."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from distop import Start, chord
from distop.client.async_operation import Operation
from distop.client.graphs import requests
from distop.decide.due_operations import ended_waiting
from distop.errors import EtcdRejected, InvalidArgument, NotAllowed, OperationStartError, OutcomeUnknown
from distop.invariants.checker import check
from distop.protocol import operation_transitions as t
from distop.protocol import pending_operations as w
from distop.protocol.dependencies import Edge, Hold, HoldState
from distop.protocol.json_codec import dumps
from distop.protocol.records import Cancel, History, Node, OperationRef, Spec, State
from distop.protocol.schedule import Series
from distop.protocol.txn import Delete, Get, Put, Txn, TxnResult
from distop.services.submission.option_values import After
from distop.services.submission.start_batches import Starts
from distop.testing import ModelStore
from tests.unit.support.model_submission import KEYS, TABLE, Etcd, noop, run
from tests.unit.support.virtualtime import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Iterable

MANY = 100
"""Operations of more than one transaction."""
WHY = Cancel("aborted", "what it waited for failed")


def spec_of(etcd: Etcd, ref: str) -> Spec:
    return Spec.decode(etcd.value(KEYS.of(OperationRef.parse(ref), "spec")) or b"")


def state_of(etcd: Etcd, ref: str) -> str:
    return (etcd.value(KEYS.of(OperationRef.parse(ref), "state")) or b"").decode()


def holds(etcd: Etcd) -> dict[str, Hold]:
    found = etcd.store.range(*KEYS.family("distOpHold"))
    return {KEYS.parse(kv.key).id: Hold.decode(kv.value) for kv in found}


def going_on(etcd: Etcd) -> list[str]:
    """Existing operations, except those of abandoned graphs."""
    denied = {id_ for id_, one in holds(etcd).items() if one.state is HoldState.DENIED}
    return [ref for ref in etcd.operations() if spec_of(etcd, ref).hold not in denied]


def lost(etcd: Etcd, meanwhile: Any = None) -> Any:
    """A fate of a transaction: it is applied, its answer is lost, ``meanwhile`` runs, and it is sent again."""

    async def fate(txn: Txn) -> TxnResult:
        assert etcd.store.apply(txn).succeeded
        if meanwhile is not None:
            etcd.fates.extendleft([etcd.store.apply] * 10)
            await meanwhile()
            etcd.fates.clear()
        return replace(etcd.store.apply(txn), repeated=True)

    return fate


def each_alone_refuses(etcd: Etcd, txn: Txn, keys: Iterable[str], value: bytes | None = None) -> None:
    """Check that a change of any of these keys refuses the transaction. ``value``: the written one."""
    for key in keys:
        store = ModelStore.holding(etcd.store.revision, etcd.store.listing())
        store.apply(Txn((), (Put(key, value if value is not None else etcd.value(key) or b"1"),)))
        assert not store.apply(txn).succeeded, key


def unknown(txn: Txn) -> TxnResult:
    raise OutcomeUnknown("etcd stopped answering")


async def end_for_good(etcd: Etcd, ref: OperationRef) -> None:
    """Cancel a pending operation, and delete its keys."""
    if not etcd.value(KEYS.coordinator(TABLE, "noop")):
        etcd.put(KEYS.node("n"), Node("e", "h", 1, ("noop",)).encode())
        etcd.store.apply(t.elect(KEYS, TABLE, "noop", "n", 0, ""))
    await etcd.client.operation(ref).cancel("not wanted")
    guard = t.election_guard(KEYS, TABLE, "noop", etcd.store.mod(KEYS.coordinator(TABLE, "noop")))
    edges = {KEYS.parse(kv.key).id: Edge.decode(kv.value) for kv in etcd.store.range(*KEYS.edges_range(ref, "next"))}
    mod = etcd.store.mod(KEYS.of(ref, "state"))
    assert etcd.store.apply(w.signal(KEYS, ref, guard, mod, State.CANCELLED, edges)).succeeded
    left = [kv.key for kv in etcd.store.range(*KEYS.type_range(TABLE, "noop")) if KEYS.parse(kv.key).ref == ref]
    etcd.store.apply(Txn((), tuple(Delete(key) for key in (*left, KEYS.pending(ref)))))


# ------------------------------------------------------------ in one transaction


def test_a_graph_with_a_lost_answer_is_not_started_again_after_its_first_operation_ended() -> None:
    """The specs alone do not show the earlier start: that of the first operation is deleted."""

    async def work(etcd: Etcd) -> None:
        first = OperationRef(TABLE, "noop", "", 1)
        etcd.fates.append(lost(etcd, lambda: end_for_good(etcd, first)))
        started = await etcd.client.start_operations([noop(), noop()])
        assert [one.ref for one in started] == ["t/noop/1", "t/noop/2"]
        assert etcd.operations() == ["t/noop/2"]

    run(work)


def test_a_graph_takes_the_next_instances_if_its_own_are_taken() -> None:
    async def work(etcd: Etcd) -> None:
        def beside(txn: Txn) -> TxnResult:
            etcd.change_counter()
            return replace(etcd.store.apply(txn), repeated=True)

        etcd.fates.append(beside)
        started = await etcd.client.start_operations([noop(), noop()], request_id="mine")
        assert [one.ref for one in started] == ["t/noop/1", "t/noop/2"]
        assert len(etcd.operations()) == 2

    run(work)


@pytest.mark.parametrize("how", ["graph", "transaction"])
def test_each_table_counter_and_predecessor_of_a_graph_alone_refuses_it(how: str) -> None:
    async def work(etcd: Etcd) -> None:
        tables = ("a", "b", "c")
        for table in tables:
            etcd.put(KEYS.table(table), etcd.value(KEYS.table(TABLE)) or b"")
        before = await some(etcd, 3)
        wanted = [Start("noop", table, {}, after=before) for table in tables]

        def refused(txn: Txn) -> TxnResult:
            for named in (KEYS.table, lambda table: KEYS.next_instance(table, "noop")):
                each_alone_refuses(etcd, txn, map(named, tables))
            each_alone_refuses(etcd, txn, (KEYS.of(OperationRef.parse(ref), "state") for ref in before))
            return etcd.store.apply(txn)

        etcd.fates.append(refused)
        if how == "graph":
            await etcd.client.start_operations(wanted)
        else:
            await etcd.client.transaction(start=wanted)
        assert not etcd.fates

    run(work)


@pytest.mark.parametrize("many", [3, MANY])
def test_each_edge_of_a_graph_is_written_at_both_ends(many: int) -> None:
    async def work(etcd: Etcd) -> None:
        *parts, last = await etcd.client.start_operations(chord([noop() for _ in range(many)], noop()))
        found = [Edge.decode(kv.value).op for kv in etcd.store.range(*KEYS.edges_range(last.parts, "after"))]
        assert sorted(found) == sorted(part.ref for part in parts)
        for part in parts:
            (edge,) = etcd.store.range(*KEYS.edges_range(part.parts, "next"))
            assert Edge.decode(edge.value).op == last.ref

    run(work)


@pytest.mark.parametrize("many", [2, MANY])
def test_each_operation_of_a_graph_has_its_own_argument(many: int) -> None:
    async def work(etcd: Etcd) -> None:
        started = await etcd.client.start_operations([Start("noop", TABLE, {"n": n}) for n in range(many)])
        args = [etcd.value(KEYS.of(one.parts, "arg")) for one in started]
        assert args == [dumps({"n": n}) for n in range(many)]

    run(work)


@pytest.mark.parametrize("many", [2, MANY])
def test_an_unknown_outcome_of_a_graph_names_a_request_id_by_which_it_is_started_once(many: int) -> None:
    async def work(etcd: Etcd) -> None:
        def answer_lost(txn: Txn) -> TxnResult:
            etcd.store.apply(txn)
            return unknown(txn)

        graph_of = [noop() for _ in range(many)]
        etcd.fates.append(answer_lost if many == 2 else unknown)
        with pytest.raises(OutcomeUnknown, match="call again with request_id='") as raised:
            await etcd.client.start_operations(graph_of)
        name = str(raised.value).partition("request_id='")[2].partition("'")[0]
        again = await etcd.client.start_operations(graph_of, request_id=name)
        assert len(going_on(etcd)) == len(again) == many
        assert again[0].already_started is (many == 2)

    run(work)


def test_a_start_of_a_graph_keeps_the_request_id_of_its_own() -> None:
    """The transaction has no request id. Its start's own one must not be treated as a generated one."""

    async def work(etcd: Etcd) -> None:
        first = await etcd.client.transaction(start=noop(request_id="mine"))
        second = await etcd.client.transaction(start=noop(request_id="mine"))
        assert second.earlier
        assert [one.ref for one in first.operations] == [one.ref for one in second.operations]

    run(work)


# ------------------------------------------------------------------ given up


async def give_up(etcd: Etcd, pages: int, name: str = "nightly") -> list[str]:
    """Start a graph, and stop after this number of pages; returns its operations."""

    def refuse(txn: Txn) -> TxnResult:
        raise EtcdRejected("no", code="INTERNAL", detail="no")

    etcd.fates.extend([etcd.store.apply] * (1 + pages) + [refuse])
    with pytest.raises(EtcdRejected):
        await etcd.client.start_operations([noop() for _ in range(MANY)], request_id=name)
    etcd.fates.clear()
    assert [one.state for one in holds(etcd).values()] == [HoldState.DENIED]
    return etcd.operations()


@pytest.mark.parametrize("pages", [1, 4])
def test_the_request_id_of_an_abandoned_graph_starts_it_again(pages: int) -> None:
    """Otherwise the operations of the abandoned graph would be returned as already started."""

    async def work(etcd: Etcd) -> None:
        denied = await give_up(etcd, pages)
        started = await etcd.client.start_operations([noop() for _ in range(MANY)], request_id="nightly")
        assert not any(one.already_started for one in started)
        assert not {one.ref for one in started} & set(denied)
        assert sorted(going_on(etcd)) == sorted(one.ref for one in started)
        again = await etcd.client.start_operations([noop() for _ in range(MANY)], request_id="nightly")
        assert [one.ref for one in again] == [one.ref for one in started]

    run(work)


def test_an_operation_of_an_abandoned_graph_can_be_cancelled_and_its_request_id_is_free() -> None:
    async def work(etcd: Etcd) -> None:
        for ref in await give_up(etcd, 1):
            await end_for_good(etcd, OperationRef.parse(ref))
        assert etcd.operations() == []
        records = etcd.store.range(*KEYS.family("distOpHistory"))
        assert {History.decode(kv.value).void for kv in records} == {True}
        started = await etcd.client.start_operations([noop() for _ in range(MANY)], request_id="nightly")
        assert len(going_on(etcd)) == len(started) == MANY

    run(work)


def test_while_a_graph_is_inserted_its_operations_cannot_be_cancelled() -> None:
    async def work(etcd: Etcd) -> None:
        async def first_page(txn: Txn) -> TxnResult:
            result = etcd.store.apply(txn)
            with pytest.raises(NotAllowed, match="belongs to a graph that is still being inserted"):
                await etcd.client.operation("t/noop/1").cancel()
            return result

        etcd.fates.extend([etcd.store.apply, first_page])
        await etcd.client.start_operations([noop() for _ in range(MANY)])

    run(work)


@pytest.mark.parametrize("waits", [True, False])
def test_while_a_graph_is_inserted_its_operations_get_no_dependencies(waits: bool) -> None:
    """``waits``: an operation of the graph would wait for another operation. Otherwise the other one would wait."""

    async def work(etcd: Etcd) -> None:
        other = await etcd.client.start_operation("noop", TABLE, {}, delay=60.0)

        async def first_page(txn: Txn) -> TxnResult:
            result = etcd.store.apply(txn)
            pair = (other.ref, "t/noop/2") if waits else ("t/noop/2", other.ref)
            with pytest.raises(NotAllowed, match="t/noop/2 belongs to a graph that is still being inserted"):
                await etcd.client.add_dependencies([pair])
            return result

        etcd.fates.extend([etcd.store.apply, first_page])
        await etcd.client.start_operations([noop() for _ in range(MANY)])
        assert not etcd.fates

    run(work)


def test_no_edge_leads_to_an_operation_of_the_graph_that_has_ended() -> None:
    """A person deletes its keys while the graph is inserted."""

    async def work(etcd: Etcd) -> None:
        gone = KEYS.own_range(OperationRef.parse("t/noop/1"))

        def ended(txn: Txn) -> TxnResult:
            etcd.store.apply(Txn((), (Delete(*gone), Delete(KEYS.pending(OperationRef.parse("t/noop/1"))))))
            return etcd.store.apply(txn)

        etcd.fates.extend([etcd.store.apply] * 5 + [ended])  # the hold, and four pages of operations
        parts = [noop() for _ in range(MANY)]
        with pytest.raises(OperationStartError, match="ended before the graph was inserted completely"):
            await etcd.client.start_operations(chord(parts, noop()))
        assert etcd.store.range(*gone) == []
        assert [one.state for one in holds(etcd).values()] == [HoldState.DENIED]
        etcd.store.history.clear()  # the deletion violates the invariants

    run(work)


# ------------------------------------------------------------------ invariants


def breaches(etcd: Etcd) -> list[str]:
    return [f"{found.invariant}: {found.text}" for found in check(KEYS, etcd.store.history)]


@pytest.mark.parametrize("gone", [False, True])
def test_the_checker_finds_an_edge_to_an_ended_operation(gone: bool) -> None:
    async def main() -> list[str]:
        etcd = Etcd()
        first, second = [await etcd.client.start_operation("noop", TABLE, {}, delay=60.0) for _ in range(2)]
        edges = w.link(KEYS, first.parts, second.parts, "end")
        etcd.store.apply(Txn((), edges))
        assert breaches(etcd) == []
        etcd.store.apply(Txn((), tuple(Delete(put.key) for put in edges)))
        before = breaches(etcd)
        await (end_for_good(etcd, first.parts) if gone else first.cancel())
        etcd.store.apply(Txn((), (edges[0],)))
        return [one for one in breaches(etcd) if one not in before]

    found = asyncio.run(main())
    assert [one for one in found if one.startswith("15: ")] == [
        f"15: the new edge waits for t/noop/1, which is {'absent' if gone else 'cancelled'}"
    ]


def test_the_checker_finds_an_edge_to_an_operation_that_ends_in_the_same_transaction() -> None:
    async def main() -> list[str]:
        etcd = Etcd()
        first, second = [await etcd.client.start_operation("noop", TABLE, {}, delay=60.0) for _ in range(2)]
        history = ended_waiting(first.parts, spec_of(etcd, first.ref), State.CANCELLED, "2013-01-01T00:00:00.000Z", WHY)
        mod = etcd.store.mod(KEYS.of(first.parts, "state"))
        end = w.end_waiting(KEYS, first.parts, mod, history, WHY)
        edges = w.link(KEYS, first.parts, second.parts, "end")
        assert etcd.store.apply(replace(end, success=(*end.success, *edges))).succeeded
        return breaches(etcd)

    assert "15: the new edge waits for t/noop/1, which ends in the same transaction" in asyncio.run(main())


def test_the_checker_finds_an_end_during_the_insertion_of_a_graph() -> None:
    async def main() -> list[str]:
        etcd = Etcd()

        def ended(txn: Txn) -> TxnResult:
            ref = OperationRef.parse("t/noop/1")
            history = ended_waiting(ref, spec_of(etcd, str(ref)), State.CANCELLED, "2013-01-01T00:00:00.000Z", WHY)
            mod = etcd.store.mod(KEYS.of(ref, "state"))
            assert etcd.store.apply(w.end_waiting(KEYS, ref, mod, history, WHY)).succeeded
            return etcd.store.apply(txn)

        etcd.fates.extend([etcd.store.apply] * 5 + [ended])
        await etcd.client.start_operations([noop() for _ in range(MANY)])
        return breaches(etcd)

    found = asyncio.run(main())
    assert (
        sum(
            one.startswith("15: the operation ended while its graph was being inserted under the hold ")
            for one in found
        )
        == 1
    )


# ---------------------------------------------------------------- two callers


def test_L19_two_callers_of_one_request_id_start_one_graph() -> None:
    """A page of one caller must not count as a late copy of the other caller's page."""

    async def work(etcd: Etcd) -> None:
        answers = await asyncio.gather(
            *(etcd.client.start_operations([noop() for _ in range(MANY)], request_id="nightly") for _ in range(2))
        )
        one, two = ([op.ref for op in answer] for answer in answers)
        assert one == two
        assert sorted(going_on(etcd)) == sorted(one)
        assert len({spec_of(etcd, ref).hold for ref in one}) == 1
        assert [answer[0].already_started for answer in answers].count(True) == 1

    run(work)


@pytest.mark.parametrize("alone", [True, False])
def test_a_repeated_request_waits_for_the_insertion_under_way(alone: bool) -> None:
    """Until the hold is released, all operations may exist and still never begin."""

    async def work(etcd: Etcd) -> None:
        repeated: list[asyncio.Future[Any]] = []
        graph_of = [noop() for _ in range(MANY)]

        async def repeat(txn: Txn) -> TxnResult:
            """Repeat the request before the release of the hold."""
            assert txn.label == "release_hold"
            if alone:
                etcd.renew_client()
                again: Any = etcd.client.start_operation("noop", TABLE, {}, request_id="nightly#3")
            else:
                again = etcd.client.start_operations(graph_of, request_id="nightly")
            repeated.append(asyncio.ensure_future(again))
            reads = len(etcd.requests)
            await etcd.until(lambda: len(etcd.requests) > reads + 20)
            assert not repeated[0].done()
            return etcd.store.apply(txn)

        etcd.fates.extend([etcd.store.apply] * 5 + [repeat])
        started = await etcd.client.start_operations(graph_of, request_id="nightly")
        answer = await repeated[0]
        found = [answer] if alone else answer
        assert all(one.already_started for one in found)
        assert [one.ref for one in found] == [one.ref for one in started][3 if alone else 0 :][: len(found)]
        assert len(etcd.operations()) == MANY

    run(work)


def test_a_graph_of_a_dead_caller_is_reported_as_still_being_inserted() -> None:
    """The error comes after one to two minutes of polling etcd a few times a second."""

    async def main() -> None:
        etcd = Etcd()
        await give_up(etcd, 1)
        (id_,) = holds(etcd)
        etcd.put(KEYS.hold(id_), Hold("graph").encode())
        before = etcd.store.revision

        async def read(*gets: Get) -> Any:
            assert len(etcd.requests) < 2_000, "it is looked at without a pause"
            return await former(*gets)

        former, etcd.read = etcd.read, read  # type: ignore[method-assign]
        with pytest.raises(OperationStartError, match="is still inserting these operations, or it died"):
            await etcd.client.start_operations([noop() for _ in range(MANY)], request_id="nightly")
        with pytest.raises(OperationStartError, match="is still inserting these operations, or it died"):
            await etcd.client.submission(noop(), request_id="nightly")
        assert etcd.store.revision == before

    in_virtual_time(main, limit=300.0)


@pytest.mark.parametrize("place", [0, -1])
def test_a_graph_is_refused_if_another_caller_starts_one_of_its_operations(place: int) -> None:
    """The transaction is refused for its first and for its last operation."""

    async def work(etcd: Etcd) -> None:
        refused: list[str] = []

        async def another_comes_first(txn: Txn) -> TxnResult:
            begun = [op for part in txn.success if isinstance(part, Txn) for op in part.success] or list(txn.success)
            specs = [op for op in begun if isinstance(op, Put) and op.key.endswith(".spec")]
            assert len(refused) < 50, "it is sent again and again"
            if specs and not refused:
                refused.append(Spec.decode(specs[place].value).request_id)
                etcd.renew_client()
                await etcd.client.start_operation("noop", TABLE, {}, request_id=refused[0])
            elif specs:
                refused.append("")
            return etcd.store.apply(txn)

        etcd.usual = another_comes_first
        with pytest.raises(OperationStartError, match="an earlier call has started 1 of these 100 operations"):
            await etcd.client.start_operations([noop(request_id=f"mine {n}") for n in range(MANY)])

    run(work)


# ---------------------------------------------------------------- very many


async def some(etcd: Etcd, count: int) -> list[str]:
    etcd.renew_client()
    return [one.ref for one in await etcd.client.start_operations([noop() for _ in range(count)])]


@pytest.mark.parametrize("count", [61, 62, 200])
@pytest.mark.parametrize("in_graph", [True, False])
def test_L26_an_operation_may_wait_for_more_than_one_transaction_compares(count: int, in_graph: bool) -> None:
    """Otherwise etcd would refuse a transaction with too many compares."""

    async def work(etcd: Etcd) -> None:
        before = await some(etcd, count)
        if in_graph:
            last = (await etcd.client.start_operations([noop(), Start("noop", TABLE, {}, after=before)]))[1]
        else:
            last = await etcd.client.start_operation("noop", TABLE, {}, after=before, request_id="mine")
            again = await etcd.client.start_operation("noop", TABLE, {}, after=before, request_id="mine")
            assert (again.ref, again.already_started) == (last.ref, True)
        edges = etcd.store.range(*KEYS.edges_range(last.parts, "after"))
        assert sorted(Edge.decode(kv.value).op for kv in edges) == sorted(before)
        assert all(etcd.store.range(*KEYS.edges_range(OperationRef.parse(ref), "next")) for ref in before)
        assert holds(etcd) == {}

    run(work)


@pytest.mark.parametrize("inside", [True, False])
def test_each_operation_that_very_many_edges_join_alone_refuses_a_page_of_them(inside: bool) -> None:
    """``inside``: edges between operations of one graph. Otherwise the predecessors are outside of it."""

    async def work(etcd: Etcd) -> None:
        pages = 0

        def looked_at(txn: Txn) -> TxnResult:
            nonlocal pages
            if txn.label == "edges":
                pages += 1
                edges = [KEYS.parse(op.key) for op in txn.success if isinstance(op, Put)]
                ends = [KEYS.of(edge.ref, "state") for edge in edges if edge.ref and (inside or edge.name == "next")]
                assert len(ends) > 1
                each_alone_refuses(etcd, txn, ends, b"success" if inside else None)
            return etcd.store.apply(txn)

        before = [] if inside else await some(etcd, MANY)
        etcd.usual = looked_at
        if inside:
            await etcd.client.start_operations(chord([noop() for _ in range(MANY)], noop()))
        else:
            await etcd.client.start_operation("noop", TABLE, {}, after=before)
        assert pages > 1

    run(work)


@pytest.mark.parametrize("ends_well", [True, False])
def test_a_predecessor_that_ends_while_many_edges_are_written_counts_with_its_end(ends_well: bool) -> None:
    async def work(etcd: Etcd) -> None:
        before = await some(etcd, 100)
        one = OperationRef.parse(before[-1])

        async def meanwhile(txn: Txn) -> TxnResult:
            etcd.fates.clear()
            await end_for_good(etcd, one)
            return etcd.store.apply(txn)

        after = [*before[:-1], f"{before[-1]}"]
        given: Any = after if not ends_well else [After(OperationRef.parse(ref), "end") for ref in after]
        applied = etcd.store.apply
        etcd.fates.extend([applied, applied, applied, meanwhile])
        if ends_well:
            last = await etcd.client.start_operation("noop", TABLE, {}, after=given)
            edges = etcd.store.range(*KEYS.edges_range(last.parts, "after"))
            assert sorted(Edge.decode(kv.value).op for kv in edges) == sorted(before[:-1])
        else:
            with pytest.raises(OperationStartError, match="could never start"):
                await etcd.client.start_operation("noop", TABLE, {}, after=given)
            assert [found.state for found in holds(etcd).values()] == [HoldState.DENIED]

    run(work)


@pytest.mark.parametrize("how", ["start", "graph", "transaction", "prepare"])
def test_a_dependency_that_ended_before_the_start_gets_no_edge(how: str) -> None:
    """The edge would stay: an operation informs its successors only at its end."""

    async def work(etcd: Etcd) -> None:
        (before,) = await some(etcd, 1)
        one = OperationRef.parse(before)

        async def meanwhile(txn: Txn) -> TxnResult:
            etcd.fates.clear()
            await end_for_good(etcd, one)
            return etcd.store.apply(txn)

        etcd.fates.append(meanwhile)
        wanted = Start("noop", TABLE, {}, after=[After(one, "end")])
        if how == "start":
            last = (await etcd.client.start_operation("noop", TABLE, {}, after=wanted.after)).parts
        elif how == "graph":
            last = (await etcd.client.start_operations([noop(), wanted]))[1].parts
        elif how == "transaction":
            last = (await etcd.client.transaction(start=wanted)).operations[0].parts
        else:
            prepared = await etcd.client.prepare_operation("noop", TABLE, {}, external_id="x", after=wanted.after)
            last = prepared.parts
        assert not etcd.fates
        assert etcd.store.range(*KEYS.edges_range(last, "after")) == []
        assert etcd.store.range(*KEYS.edges_range(one, "next")) == []

    run(work)


def test_a_replacement_with_too_many_predecessors_is_refused() -> None:
    async def work(etcd: Etcd) -> None:
        before = await some(etcd, 100)
        await etcd.client.start_operation("noop", TABLE, {}, delay=100.0, id="nightly")
        revision = etcd.store.revision
        with pytest.raises(
            InvalidArgument, match="would wait for 100 operations, which is too many for an operation that replaces"
        ):
            await etcd.client.start_operation("noop", TABLE, {}, after=before, id="nightly", on_duplicate="replace")
        assert etcd.store.revision == revision

    run(work)


# ---------------------------------------------------------------------- cancel


def test_a_cancel_of_a_pending_operation_with_a_lost_answer_succeeds() -> None:
    """The repeated cancel finds that the operation has ended: by the first copy of this cancel."""

    async def work(etcd: Etcd) -> None:
        (ref,) = await some(etcd, 1)
        etcd.fates.append(lost(etcd))
        await etcd.client.operation(ref).cancel("not wanted")
        assert state_of(etcd, ref) == "cancelled"
        with pytest.raises(NotAllowed, match="ended as cancelled"):
            await etcd.client.operation(ref).cancel("not wanted")

    run(work)


def test_a_cancel_after_another_cancel_is_refused() -> None:
    async def work(etcd: Etcd) -> None:
        (ref,) = await some(etcd, 1)

        async def another(txn: Txn) -> TxnResult:
            etcd.fates.clear()
            await etcd.client.operation(ref).cancel("another")
            return replace(etcd.store.apply(txn), repeated=True)

        etcd.fates.append(another)
        with pytest.raises(NotAllowed, match="ended as cancelled"):
            await etcd.client.operation(ref).cancel("not wanted")

    run(work)


def failing_fast(etcd: Etcd, ref: str) -> None:
    """Write the records that a coordinator writes when too many jobs have failed."""
    op = OperationRef.parse(ref)
    puts = (Put(KEYS.of(op, "state"), b"cancelling"), Put(KEYS.of(op, "cancel"), Cancel("failed", "1 of 2").encode()))
    assert etcd.store.apply(Txn((), puts)).succeeded


def test_a_cancel_of_an_operation_that_stops_after_failed_jobs_is_refused() -> None:
    """Such an operation waits for its completion code, even if no executor has it."""

    async def work(etcd: Etcd) -> None:
        etcd.renew_client()
        ref = (await etcd.client.start_operation("noop", TABLE, {})).ref
        failing_fast(etcd, ref)
        with pytest.raises(NotAllowed, match="because its jobs failed, and can no longer be cancelled"):
            await etcd.client.operation(ref).cancel()

    asyncio.run(work(Etcd()))  # without the invariants: they would report that no coordinator wrote this


# ---------------------------------------------------------------------- series


def test_P3_a_series_is_ended_through_its_first_operation_even_if_that_was_replaced() -> None:
    async def work(etcd: Etcd) -> None:
        etcd.renew_client()
        first = await etcd.client.start_operation("noop", TABLE, {}, delay=10.0, every=60.0, id="nightly")
        second = await etcd.client.start_operation(
            "noop", TABLE, {}, delay=20.0, every=60.0, id="nightly", on_duplicate="replace"
        )
        other = await etcd.client.start_operation("noop", TABLE, {}, delay=20.0, every=60.0)
        assert await first.end_series("enough") == second.ref
        assert [state_of(etcd, one.ref) for one in (first, second, other)] == ["cancelled", "cancelled", "pending"]

    run(work)


async def ended_and_followed(etcd: Etcd, first: Operation, state: State) -> None:
    """End the first operation of a series, and start the next one."""
    series = {**(spec_of(etcd, first.ref).series or {}), "first": first.ref}
    mod = etcd.store.mod(KEYS.of(first.parts, "state"))
    history = ended_waiting(first.parts, spec_of(etcd, first.ref), state, "", None)
    etcd.store.apply(w.end_waiting(KEYS, first.parts, mod, history, Cancel("user", "it ended")))
    wanted = replace(requests([noop()], None)[0][0], not_before="2113-01-01T00:00:00.000Z")
    await Starts(etcd.client.etcd, KEYS).start(replace(wanted, series=Series.from_json(series)))


def test_P3_ending_a_series_waits_for_an_operation_with_failed_jobs() -> None:
    """Otherwise the series would continue after the caller's request to end it succeeded."""

    async def work(etcd: Etcd) -> None:
        etcd.renew_client()
        first = await etcd.client.start_operation("noop", TABLE, {}, delay=10.0, every=60.0)
        failing_fast(etcd, first.ref)
        ending = asyncio.ensure_future(first.end_series())
        await asyncio.sleep(0.01)
        assert not ending.done()
        await ended_and_followed(etcd, first, State.FAILED)
        assert await ending == "t/noop/2"
        assert state_of(etcd, "t/noop/2") == "cancelled"

    asyncio.run(work(Etcd()))


def test_P3_ending_a_series_waits_for_an_operation_that_is_ending() -> None:
    async def work(etcd: Etcd) -> None:
        etcd.renew_client()
        first = await etcd.client.start_operation("noop", TABLE, {}, delay=10.0, every=60.0)
        ending = asyncio.ensure_future(first.end_series())

        async def meanwhile(txn: Txn) -> TxnResult:
            """The operation ends, and the next one starts."""
            etcd.fates.clear()
            await ended_and_followed(etcd, first, State.CANCELLED)
            etcd.fates.append(etcd.store.apply)
            return etcd.store.apply(txn)

        etcd.fates.append(meanwhile)
        assert await ending == "t/noop/2"
        assert state_of(etcd, "t/noop/2") == "cancelled"

    run(work)
