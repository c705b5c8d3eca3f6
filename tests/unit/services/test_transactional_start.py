"""Starts in a caller's transaction, on the model of etcd: the sent requests, and the effect of late copies."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from distop import Start, chain
from distop.errors import Incompatible, InvalidArgument, NotFound, OperationStartError, OutcomeUnknown, UnknownBehavior
from distop.invariants.checker import check
from distop.protocol.behavior_declaration import Declaration
from distop.protocol.json_codec import dumps
from distop.protocol.records import Spec
from distop.protocol.txn import (
    Delete,
    Get,
    GetResult,
    KeyValue,
    Put,
    Txn,
    TxnResult,
    absent,
    operations,
    unchanged,
    value_is,
)
from tests.unit.support.model_submission import KEYS, TABLE, Etcd, noop, run

if TYPE_CHECKING:
    pass


class Mod:
    """A compare of etcd3: the comparison operator sets its value."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, key: str) -> None:
        self.key = key
        self.value: object = None

    def __eq__(self, other: object) -> Mod:  # type: ignore[override]
        self.value = other
        return self

    def __gt__(self, other: object) -> Mod:
        self.value = other
        return self


def test_C8_a_submission_reads_and_writes_nothing() -> None:
    async def work(etcd: Etcd) -> None:
        before = etcd.store.revision
        found = await etcd.client.submission(chain(noop(), noop()))
        assert etcd.store.revision == before
        assert etcd.committed == []
        assert [str(ref) for ref in found.refs] == ["t/noop/1", "t/noop/2"]
        assert await found.stale() is False
        etcd.store.apply(Txn(found.compares, found.puts))
        assert etcd.operations() == ["t/noop/1", "t/noop/2"]
        assert await found.stale() is True
        assert await found.committed() is True

    run(work)


def test_C8_a_submission_compares_only_the_instance_counter_and_the_table() -> None:
    async def work(etcd: Etcd) -> None:
        found = await etcd.client.submission(noop())
        assert {one.key for one in found.compares} == {KEYS.next_instance(TABLE, "noop"), KEYS.table(TABLE)}
        assert etcd.value(KEYS.of(found.refs[0], "state")) is None
        assert Put(KEYS.of(found.refs[0], "state"), b"pending") in found.puts

    run(work)


def test_C9_starts_and_writes_of_the_caller_are_committed_together() -> None:
    async def work(etcd: Etcd) -> None:
        etcd.put("mine", b"1")
        done = await etcd.client.transaction(
            compare=[value_is("mine", b"1")], success=[Put("mine", b"2"), Get("mine")], start=noop()
        )
        assert done.committed
        assert [op.ref for op in done.operations] == etcd.operations() == ["t/noop/1"]
        assert isinstance(done.answers[1], GetResult)
        assert etcd.value("mine") == b"2"
        assert len(etcd.committed) == 1

    run(work)


def test_C10_a_failed_compare_of_the_caller_starts_nothing_and_is_not_retried() -> None:
    async def work(etcd: Etcd) -> None:
        done = await etcd.client.transaction(
            compare=[absent(KEYS.table(TABLE))], success=[Put("mine", b"2")], failure=[Get(KEYS.table(TABLE))],
            start=noop(),
        )  # fmt: skip
        assert (done.committed, list(done.operations)) == (False, [])
        assert isinstance(done.answers[0], GetResult)
        assert done.answers[0].kv is not None
        assert etcd.operations() == []
        assert etcd.value("mine") is None
        assert len(etcd.committed) == 1

    run(work)


def test_C9_a_changed_counter_causes_a_retry_without_the_callers_failure_branch() -> None:
    async def work(etcd: Etcd) -> None:
        def moved(txn: Txn) -> TxnResult:
            etcd.change_counter()
            return etcd.store.apply(txn)

        etcd.fates.extend([moved, moved])
        done = await etcd.client.transaction(success=[Put("mine", b"2")], failure=[Put("lost", b"")], start=noop())
        assert done.committed
        assert len(etcd.committed) == 3
        assert etcd.value("lost") is None

    run(work)


def test_C9_after_a_lost_answer_the_outcome_is_found_and_the_callers_writes_are_applied_once() -> None:
    """Its own compare fails for the second copy: the first has changed the key."""

    async def work(etcd: Etcd) -> None:
        def twice(txn: Txn) -> TxnResult:
            etcd.store.apply(txn)
            return replace(etcd.store.apply(txn), repeated=True)

        etcd.fates.append(twice)
        done = await etcd.client.transaction(
            compare=[absent("mine")], success=[Put("mine", b"2")], failure=[Put("lost", b"")], start=noop()
        )
        assert done.committed
        assert done.answers == ()
        assert [op.ref for op in done.operations] == etcd.operations() == ["t/noop/1"]
        assert etcd.value("lost") is None

    run(work)


def test_C10_a_late_copy_of_a_refused_transaction_never_applies() -> None:
    async def work(etcd: Etcd) -> None:
        etcd.put("mine", b"taken")

        def repeated(txn: Txn) -> TxnResult:
            return replace(etcd.store.apply(txn), repeated=True)

        etcd.fates.append(repeated)
        done = await etcd.client.transaction(compare=[absent("mine")], success=[Put("mine", b"2")], start=noop())
        assert not done.committed
        etcd.store.apply(Txn((), (Delete("mine"),)))
        assert not etcd.store.apply(etcd.committed[0]).succeeded, "the first copy comes now"
        assert etcd.operations() == []

    run(work)


def test_C9_C10_a_repetition_does_not_run_success_after_the_first_copy_ran_failure() -> None:
    """The first answer was lost, and the compare held when the second copy arrived."""

    async def work(etcd: Etcd, request_id: str | None) -> None:
        def twice(txn: Txn) -> TxnResult:
            etcd.store.apply(txn)
            etcd.put("mine", b"1")
            return replace(etcd.store.apply(txn), repeated=True)

        etcd.fates.append(twice)
        done = await etcd.client.transaction(
            compare=[value_is("mine", b"1")], success=[Put("won", b"")], failure=[Put("lost", b"")], start=noop(),
            request_id=request_id,
        )  # fmt: skip
        assert (done.committed, list(done.operations), done.answers) == (False, [], ())
        assert (etcd.value("won"), etcd.value("lost")) == (None, b"")
        assert etcd.operations() == []

    run(lambda etcd: work(etcd, None))
    run(lambda etcd: work(etcd, "mine"))


def test_C10_a_repeated_request_is_refused_after_its_failure_branch_has_written() -> None:
    async def work(etcd: Etcd) -> None:
        async def call() -> Any:
            return await etcd.client.transaction(
                compare=[value_is("mine", b"1")], success=[Put("won", b"")], failure=[Put("lost", b""), Get("mine")],
                start=noop(), request_id="mine",
            )  # fmt: skip

        first = await call()
        assert (first.committed, first.earlier, len(first.answers)) == (False, False, 2)
        etcd.put("mine", b"1")
        again = await call()
        assert (again.committed, again.earlier, again.answers) == (False, True, ())
        assert etcd.value("won") is None
        assert etcd.operations() == []

    run(work)


def test_C10_a_failure_branch_that_is_applied_during_a_repetition_decides_it() -> None:
    """The repetition has not found a record of the request before. It reads the counters that the first call left."""

    async def work(etcd: Etcd) -> None:
        async def call() -> Any:
            return await etcd.client.transaction(
                compare=[value_is("mine", b"1")], success=[Put("won", b"")], failure=[Put("lost", b"")],
                start=noop(), request_id="mine",
            )  # fmt: skip

        get = etcd.get

        async def applied_after(key: str) -> KeyValue | None:
            found = await get(key)
            etcd.get = get  # type: ignore[method-assign]
            assert not (await call()).earlier
            etcd.put("mine", b"1")
            return found

        etcd.get = applied_after  # type: ignore[method-assign]
        again = await call()
        assert (again.committed, again.earlier) == (False, True)
        assert etcd.value("won") is None
        assert etcd.operations() == []

    run(work)


def test_C9_a_transaction_writes_all_records_of_all_its_operations() -> None:
    async def work(etcd: Etcd) -> None:
        starts = [Start("noop", table, {"n": n}) for n, table in enumerate((TABLE, TABLE, "@cluster"))]
        done = await etcd.client.transaction(start=starts)
        assert [op.ref for op in done.operations] == ["t/noop/1", "t/noop/2", "@cluster/noop/1"]
        for n, ref in enumerate(op.parts for op in done.operations):
            assert Spec.decode(etcd.value(KEYS.of(ref, "spec")) or b"").version
            assert etcd.value(KEYS.of(ref, "arg")) == dumps({"n": n})
            assert (etcd.value(KEYS.of(ref, "state")), etcd.value(KEYS.pending(ref))) == (b"pending", b"waiting")
        after = await etcd.client.transaction(start=starts)
        assert [op.ref for op in after.operations] == ["t/noop/3", "t/noop/4", "@cluster/noop/2"]

    run(work)


def test_C10_the_request_id_of_any_start_decides_a_repetition() -> None:
    async def work(etcd: Etcd) -> None:
        async def call() -> Any:
            return await etcd.client.transaction(
                compare=[value_is("mine", b"1")], success=[Put("won", b"")], failure=[Put("lost", b"")],
                start=[noop(), Start("noop", "@cluster", options={"request_id": "mine"})],
            )  # fmt: skip

        assert not (await call()).committed
        etcd.put("mine", b"1")
        again = await call()
        assert (again.committed, again.earlier) == (False, True)
        assert etcd.value("won") is None
        assert etcd.operations() == []

    run(work)


def test_C10_a_request_may_be_retried_if_its_failure_branch_has_written_nothing() -> None:
    async def work(etcd: Etcd) -> None:
        for value, committed in ((b"0", False), (b"1", True)):
            etcd.put("mine", value)
            done = await etcd.client.transaction(
                compare=[value_is("mine", b"1")], failure=[Get("mine")], start=noop(), request_id="mine"
            )
            assert (done.committed, done.earlier) == (committed, False)
        assert etcd.operations() == ["t/noop/1"]

    run(work)


def test_C10_a_failure_branch_writes_no_key_for_a_generated_request_id() -> None:
    async def work(etcd: Etcd) -> None:
        done = await etcd.client.transaction(compare=[absent(KEYS.table(TABLE))], failure=[Put("k", b"")], start=noop())
        assert not done.committed
        assert etcd.store.range("distOpHold.", "distOpHold/") == []

    run(work)


def test_C9_repeating_the_request_settles_an_unknown_outcome() -> None:
    async def work(etcd: Etcd, applied: bool) -> None:
        def cut(txn: Txn) -> TxnResult:
            if applied:
                etcd.store.apply(txn)
            raise OutcomeUnknown("etcd stopped answering")

        etcd.fates.append(cut)
        with pytest.raises(OutcomeUnknown, match="request_id='mine'"):
            await etcd.client.transaction(success=[Put("n", b"1")], start=noop(), request_id="mine")
        etcd.put("n", b"0")
        again = await etcd.client.transaction(success=[Put("n", b"2")], start=noop(), request_id="mine")
        assert (again.committed, again.earlier) == (True, applied)
        assert etcd.operations() == ["t/noop/1"]
        assert etcd.value("n") == (b"0" if applied else b"2")
        assert again.operations[0].already_started is applied

    run(lambda etcd: work(etcd, applied=True))
    run(lambda etcd: work(etcd, applied=False))


def test_C9_an_unknown_outcome_names_the_generated_request_id() -> None:
    async def work(etcd: Etcd) -> None:
        def cut(txn: Txn) -> TxnResult:
            etcd.store.apply(txn)
            raise OutcomeUnknown("etcd stopped answering")

        etcd.fates.append(cut)
        with pytest.raises(OutcomeUnknown) as caught:
            await etcd.client.transaction(start=noop())
        name = str(caught.value).partition("request_id='")[2].partition("'")[0]
        again = await etcd.client.transaction(start=noop(), request_id=name)
        assert again.earlier
        assert etcd.operations() == ["t/noop/1"]

    run(work)


@pytest.mark.parametrize("applied", [True, False])
def test_C12_committed_settles_a_lasting_unknown_outcome(applied: bool) -> None:
    async def work(etcd: Etcd) -> None:
        found = await etcd.client.submission(noop())
        copy = Txn(found.compares, found.puts)
        if applied:
            etcd.store.apply(copy)
        assert await found.committed() is applied
        assert not etcd.store.apply(copy).succeeded
        assert await found.committed() is applied
        assert await found.stale()
        assert etcd.operations() == (["t/noop/1"] if applied else [])

    run(work)


def test_C12_committed_is_false_if_another_operation_has_the_number() -> None:
    async def work(etcd: Etcd) -> None:
        first, second = await etcd.client.submission(noop()), await etcd.client.submission(noop())
        etcd.store.apply(Txn(second.compares, second.puts))
        assert await first.committed() is False
        assert await second.committed() is True

    run(work)


def test_C12_a_submission_converts_to_objects_of_etcd3() -> None:
    async def work(etcd: Etcd) -> None:
        found = await etcd.client.submission(noop())
        compares, puts = found.etcd3(
            SimpleNamespace(transactions=SimpleNamespace(mod=Mod, create=Mod, put=lambda *put: put))
        )
        assert [(one.key, one.value) for one in compares] == [(c.key, c.value) for c in found.compares]
        assert puts == [(put.key, put.value) for put in found.puts]

    run(work)


def test_C8_a_request_that_has_already_started_operations_is_refused() -> None:
    async def work(etcd: Etcd) -> None:
        found = await etcd.client.submission(noop(), request_id="mine")
        etcd.store.apply(Txn(found.compares, found.puts))
        with pytest.raises(OperationStartError, match="t/noop/1 was started by an earlier transaction"):
            await etcd.client.submission(noop(), request_id="mine")

    run(work)


NIGHTLY = KEYS.unique(TABLE, "noop", "nightly")


def test_L9_the_transaction_takes_a_free_id_for_its_operation() -> None:
    async def work(etcd: Etcd) -> None:
        found = await etcd.client.submission([noop(id="nightly"), noop()])
        assert absent(NIGHTLY) in found.compares
        assert Put(NIGHTLY, b"t/noop/1") in found.puts
        beside = await etcd.client.submission(noop(id="nightly"))
        assert etcd.store.apply(Txn(found.compares, found.puts)).succeeded
        assert Spec.decode(etcd.value(KEYS.of(found.refs[0], "spec")) or b"").id == "nightly"
        assert await beside.stale()
        assert not etcd.store.apply(Txn(beside.compares, beside.puts)).succeeded
        # The counter alone does not show this: the operation with the id may have an earlier number.
        only = tuple(one for one in beside.compares if one.key == NIGHTLY)
        assert not etcd.store.apply(Txn(only, ())).succeeded
        await etcd.client.operation("t/noop/1").cancel()
        assert etcd.value(NIGHTLY) is None
        assert (await etcd.client.transaction(start=noop(id="nightly"))).committed

    run(work)


@pytest.mark.parametrize("policy", [None, "join", "refuse"])
def test_L9_the_transaction_is_refused_with_the_name_of_the_operation_that_has_the_id(policy: str | None) -> None:
    async def work(etcd: Etcd) -> None:
        first = await etcd.client.start_operation("noop", TABLE, {}, id="nightly")
        revision = etcd.store.revision
        another = noop(id="nightly", on_duplicate=policy)
        own = [Put("k", b"")]
        for submit in (etcd.client.submission(another), etcd.client.transaction(success=own, start=another)):
            with pytest.raises(Incompatible, match=f"{first.ref} has the id 'nightly' and is running"):
                await submit
        assert etcd.store.revision == revision
        other = await etcd.client.transaction(success=[Put("k", b"")], start=noop(id="weekly"))
        assert (other.committed, other.operations[0].ref) == (True, "t/noop/2")

    run(work)


def test_L9_a_behavior_computes_the_ids_of_operations_in_a_transaction() -> None:
    async def work(etcd: Etcd) -> None:
        etcd.put(KEYS.behavior("noop"), Declaration("noop", id_fields=()).encode())
        assert (await etcd.client.transaction(start=noop())).committed
        with pytest.raises(Incompatible, match="t/noop/1 has the same id and is pending"):
            await etcd.client.transaction(start=noop())
        assert (await etcd.client.transaction(start=noop(one_off=True))).committed
        with pytest.raises(InvalidArgument, match="have the same id"):
            await etcd.client.submission([noop(id="a"), noop(id="a")])

    run(work)


def test_L9_the_transaction_is_refused_if_its_id_is_taken_before_it_arrives() -> None:
    async def work(etcd: Etcd) -> None:
        async def beside(txn: Txn) -> TxnResult:
            await etcd.client.start_operation("noop", TABLE, {}, id="nightly")
            return etcd.store.apply(txn)

        etcd.fates.append(beside)
        with pytest.raises(Incompatible, match="t/noop/1 has the id 'nightly'"):
            await etcd.client.transaction(success=[Put("mine", b"2")], start=noop(id="nightly"))
        assert etcd.operations() == ["t/noop/1"]
        assert etcd.value("mine") is None

    run(work)


def test_L9_a_repeated_call_is_not_a_duplicate_of_itself() -> None:
    async def work(etcd: Etcd) -> None:
        calls = (etcd.client.transaction(start=noop(id="nightly"), request_id="mine") for _ in range(5))
        done = await asyncio.gather(*calls)
        assert all(one.committed for one in done)
        assert {op.ref for one in done for op in one.operations} == {"t/noop/1"}
        assert etcd.operations() == ["t/noop/1"]

    run(work)


@pytest.mark.parametrize("policy", ["replace", "combine"])
def test_L20_a_transaction_cannot_replace_or_combine(policy: str) -> None:
    async def work(etcd: Etcd) -> None:
        with pytest.raises(InvalidArgument, match=f"cannot {policy} a duplicate: start noop on t by itself"):
            await etcd.client.transaction(start=noop(id="nightly", on_duplicate=policy))
        assert etcd.committed == []

    run(work)


def test_L9_the_id_of_an_ended_operation_is_taken_over_also_with_objects_of_etcd3() -> None:
    """An executor of a release without ids has ended the operation, and left the key."""

    async def work(etcd: Etcd) -> None:
        first = await etcd.client.transaction(start=noop(id="nightly"))
        await first.operations[0].cancel()
        etcd.put(NIGHTLY, b"t/noop/1")
        found = await etcd.client.submission(noop(id="nightly"))
        assert value_is(NIGHTLY, b"t/noop/1") in found.compares
        assert not await found.stale()
        kinds = SimpleNamespace(mod=Mod, create=Mod, value=Mod, put=lambda *put: put)
        compares, _ = found.etcd3(SimpleNamespace(transactions=kinds))
        assert [(one.key, one.value) for one in compares] == [(c.key, c.value) for c in found.compares]
        assert etcd.store.apply(Txn(found.compares, found.puts)).succeeded
        assert etcd.value(NIGHTLY) == b"t/noop/2"
        assert await found.stale()
        assert {one.invariant for one in check(KEYS, etcd.store.history)} == {18}, "by that release"
        etcd.store.history.clear()

    run(work)


def test_C8_more_starts_than_fit_into_one_transaction_are_refused() -> None:
    async def work(etcd: Etcd) -> None:
        found = await etcd.client.submission([noop() for _ in range(31)])
        assert operations(Txn(found.compares, found.puts)) <= 128
        for count, ids, name in ((25, True, None), (25, False, "mine"), (21, True, "mine")):
            most = [noop(id=f"id-{n}") if ids else noop() for n in range(count + 1)]
            found = await etcd.client.submission(most[1:], request_id=name)
            assert operations(Txn(found.compares, found.puts)) <= 128
            with pytest.raises(InvalidArgument, match="31, 25 with request ids or ids, 21 with both"):
                await etcd.client.submission(most, request_id=name)
        for much in ([noop() for _ in range(32)], [Start("noop", TABLE, {"x": "y" * 200_000}) for _ in range(6)]):
            with pytest.raises(InvalidArgument, match="do not fit into one transaction"):
                await etcd.client.submission(much)
        with pytest.raises(InvalidArgument, match="etcd accepts at most 128"):
            await etcd.client.transaction(
                success=[Put(f"k{n}", b"") for n in range(10)], start=[noop() for _ in range(31)]
            )
        assert etcd.operations() == []

    run(work)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"compare": [("k", 1)]}, "is not a compare"),
        ({"compare": "k"}, "compare must be a list"),
        ({"success": [object()]}, "is not an operation of a transaction"),
        ({"success": [Put("distOp.t.runOps", b"")]}, "belongs to distop"),
        ({"failure": [Delete("a", "\0")]}, "belongs to distop"),
        ({"success": [Txn((), (Delete("dist", "dz"),))]}, "belongs to distop"),
        ({"start": []}, "the list is empty"),
        ({"start": 7}, "a graph must be a list"),
        ({"start": [Start("noop", TABLE, {"x": object()})]}, "JSON"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_C9_an_invalid_transaction_is_refused(given: dict[str, Any], sentence: str) -> None:
    async def work(etcd: Etcd) -> None:
        with pytest.raises(InvalidArgument, match=sentence):
            await etcd.client.transaction(**{"start": noop(), **given})
        assert etcd.committed == []

    run(work)


def test_C9_a_caller_may_write_keys_next_to_those_of_distop() -> None:
    async def work(etcd: Etcd) -> None:
        writes = [Put("distOo", b""), Put("distOq", b""), Delete("a", "b"), Delete("distOq0", "\0")]
        done = await etcd.client.transaction(compare=[unchanged("x", 0)], success=writes, start=noop())
        assert done.committed

    run(work)


def test_a_pending_start_is_refused_if_its_table_is_removed_concurrently() -> None:
    """The removal of a table compares runOps, which a pending start does not write (seed 689 of the simulator)."""

    async def work(etcd: Etcd) -> None:
        found = await etcd.client.submission(noop())

        def removed(txn: Txn) -> TxnResult:
            etcd.store.apply(Txn((), (Delete(KEYS.table(TABLE)),)))
            return etcd.store.apply(txn)

        etcd.fates.append(removed)
        with pytest.raises(NotFound, match="no table"):
            await etcd.client.transaction(start=noop())
        assert await found.stale()
        assert etcd.operations() == []

    run(work)


def test_C8_unknown_types_and_unknown_tables_are_refused() -> None:
    async def work(etcd: Etcd) -> None:
        with pytest.raises(UnknownBehavior):
            await etcd.client.submission(Start("nothing", TABLE))
        with pytest.raises(NotFound, match="no table"):
            await etcd.client.submission(Start("noop", "nowhere"))

    run(work)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ([Put("mine", b"1"), Put("mine", b"2")], "puts 'mine' twice, or puts and deletes it"),
        ([Delete("m", "n"), Txn((), (Put("mine", b"1"),))], "puts 'mine' twice"),
        ([Get("")], "has an empty key"),
    ],
)
def test_an_invalid_transaction_is_refused_before_it_is_sent(own: list[Any], words: str) -> None:
    async def work(etcd: Etcd) -> None:
        with pytest.raises(InvalidArgument, match=words):
            await etcd.client.transaction(success=own, start=noop())
        assert etcd.committed == []

    run(work)
