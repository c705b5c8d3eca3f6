"""What a start compares and writes, for each way to submit it (model of etcd)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from distop import Start
from distop.errors import NotAllowed, NotFound
from distop.invariants.checker import check
from distop.protocol.behavior_declaration import Declaration
from distop.protocol.dependencies import Edge
from distop.protocol.operation_options import Options
from distop.protocol.records import TableRecord
from distop.protocol.txn import Txn, TxnResult
from tests.unit.support.model_submission import KEYS, TABLE, Etcd, run

if TYPE_CHECKING:
    from distop.protocol.records import OperationRef

HOW = pytest.mark.parametrize("how", ["start", "graph", "transaction", "prepare"])
REQUEST = "mine"


async def submit(etcd: Etcd, how: str, **options: Any) -> OperationRef:
    """Submit an operation in this way; returns it, or of a graph the second of two."""
    if how == "start":
        return (await etcd.client.start_operation("noop", TABLE, {}, request_id=REQUEST, **options)).parts
    if how == "prepare":
        return (await etcd.client.prepare_operation("noop", TABLE, {}, external_id=REQUEST, **options)).parts
    given = {"after": options.pop("after")} if "after" in options else {}
    wanted = Start("noop", TABLE, {}, options=options, **given)
    if how == "graph":
        first = Start("noop", TABLE, {}, after=given.get("after", ()))
        return (await etcd.client.start_operations([first, wanted], request_id=REQUEST))[1].parts
    started: OperationRef = (await etcd.client.transaction(start=wanted, request_id=REQUEST)).operations[0].parts
    return started


@HOW
def test_no_operation_starts_on_a_table_that_is_removed_concurrently(how: str) -> None:
    async def work(etcd: Etcd) -> None:
        async def removed(txn: Txn) -> TxnResult:
            etcd.fates.clear()
            await etcd.client.remove_table(TABLE)
            return etcd.store.apply(txn)

        etcd.fates.append(removed)
        with pytest.raises(NotFound, match="there is no table 't'"):
            await submit(etcd, how, delay=60.0)
        assert etcd.operations() == []

    run(work)


def test_a_table_is_not_removed_if_an_operation_starts_concurrently() -> None:
    async def work(etcd: Etcd) -> None:
        async def began(txn: Txn) -> TxnResult:
            etcd.fates.clear()
            await etcd.client.start_operation("noop", TABLE, {})
            return etcd.store.apply(txn)

        etcd.fates.append(began)
        with pytest.raises(NotAllowed):
            await etcd.client.remove_table(TABLE)
        assert etcd.value(KEYS.table(TABLE)) is not None

    run(work)


def test_registering_a_table_again_keeps_operations_that_start_concurrently() -> None:
    """The registration writes the table's runOps again."""

    async def work(etcd: Etcd) -> None:
        async def began(txn: Txn) -> TxnResult:
            etcd.fates.clear()
            await etcd.client.start_operation("noop", TABLE, {})
            return etcd.store.apply(txn)

        etcd.fates.append(began)
        await etcd.client.add_table(TableRecord(TABLE, "parquet", "/elsewhere"), check=False, replace=True)
        assert etcd.value(KEYS.run_ops(TABLE)) == b'{"noop":1}'

    run(work)


@HOW
def test_an_operation_waits_for_each_of_its_dependencies(how: str) -> None:
    async def work(etcd: Etcd) -> None:
        before = [await etcd.client.start_operation("noop", TABLE, {}, delay=60.0) for _ in range(3)]
        ref = await submit(etcd, how, after=before)
        edges = etcd.store.range(*KEYS.edges_range(ref, "after"))
        assert sorted(Edge.decode(kv.value).op for kv in edges) == [one.ref for one in before]
        for one in before:
            successors = [Edge.decode(kv.value).op for kv in etcd.store.range(*KEYS.edges_range(one.parts, "next"))]
            assert str(ref) in successors

    run(work)


def test_an_operation_waits_for_each_dependency_that_is_added_later() -> None:
    async def work(etcd: Etcd) -> None:
        first, second, last = [await etcd.client.start_operation("noop", TABLE, {}, delay=60.0) for _ in range(3)]
        await etcd.client.add_dependencies([(first, last), (second, last)])
        edges = etcd.store.range(*KEYS.edges_range(last.parts, "after"))
        assert sorted(Edge.decode(kv.value).op for kv in edges) == [first.ref, second.ref]
        for one in (first, second):
            (edge,) = etcd.store.range(*KEYS.edges_range(one.parts, "next"))
            assert Edge.decode(edge.value).op == last.ref

    run(work)


@HOW
def test_a_start_writes_its_options_and_its_request_id_in_one_transaction(how: str) -> None:
    async def work(etcd: Etcd) -> None:
        ref = await submit(etcd, how, priority=7)
        assert Options.decode(etcd.value(KEYS.of(ref, "options")) or b"") == Options(priority=7)
        named = [kv.value.decode() for kv in etcd.store.range(*KEYS.family("distOpRequest"))]
        assert str(ref) in named
        assert check(KEYS, etcd.store.history) == []

    run(work)


@pytest.mark.parametrize("replaces", [True, False])
def test_concurrent_declarations_of_a_type_see_each_other(replaces: bool) -> None:
    async def work(etcd: Etcd) -> None:
        async def declared(txn: Txn) -> TxnResult:
            etcd.fates.clear()
            await etcd.client.register_type("copy", description="the first")
            return etcd.store.apply(txn)

        etcd.fates.append(declared)
        if replaces:
            await etcd.client.register_type("copy", description="the second", replace=True)
        else:
            with pytest.raises(NotAllowed, match="is already registered"):
                await etcd.client.register_type("copy", description="the second")
        found = Declaration.decode(etcd.value(KEYS.behavior("copy")) or b"")
        assert found.description == ("the second" if replaces else "the first")
        assert etcd.requests.count("register") == (3 if replaces else 2)

    run(work)
