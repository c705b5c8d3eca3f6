"""Starts of one client that share transactions, on the model of etcd: verdicts, and the sent requests."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from distop.errors import (
    EtcdRejected,
    EtcdUnavailable,
    Incompatible,
    InvalidArgument,
    NotFound,
    OperationStartError,
    OutcomeUnknown,
    UnreadableRecord,
)
from distop.invariants.checker import check
from distop.protocol import table_registry
from distop.protocol.behavior_declaration import Declaration
from distop.protocol.json_codec import dumps, loads
from distop.protocol.keys import Keys
from distop.protocol.records import CLUSTER_TABLE, OperationRef, Spec, TableRecord
from distop.protocol.txn import Put, Txn, TxnResult
from distop.services.submission import insertion
from distop.services.submission.idempotency import BeingInserted
from distop.services.submission.insertion import Started
from distop.services.submission.start_batches import Starts
from distop.services.submission.start_options import StartOptions
from distop.services.submission.start_request import Request, request
from distop.services.submission.submit import cut_off, submit
from tests.unit.support.modelclient import ModelClient

T = TypeVar("T")
TABLE = "t"
KEYS = Keys()
SCHEMA = {"type": "object", "properties": {"column": {"type": "string"}, "n": {"type": "integer"}}}


class Etcd(ModelClient):
    """The model of etcd with a table and some behaviors."""

    def __init__(self) -> None:
        super().__init__()
        self.publish("noop", arg_schema=SCHEMA)
        self.store.apply(Txn((), (Put(KEYS.table(TABLE), TableRecord(TABLE, "parquet", "/data").encode()),)))
        self.starts = Starts(self, KEYS)  # type: ignore[arg-type]

    def publish(self, name: str, **fields: Any) -> None:
        self.store.apply(Txn((), (Put(KEYS.behavior(name), Declaration(name, **fields).encode()),)))

    async def start(self, n: int = 0, request_id: str | None = None, type_name: str = "noop", **arg: Any) -> str:
        return str((await self.starts.start(wanted(n, request_id, type_name, **arg))).ref)

    async def behind(self, *calls: Coroutine[Any, Any, T]) -> list[asyncio.Task[T]]:
        """The first call, after its start is sent, and the others, which wait in the queue."""
        before = len(self.requests)
        first = asyncio.ensure_future(calls[0])
        await self.until(lambda: len(self.requests) > before)
        return [first, *map(asyncio.ensure_future, calls[1:])]

    def args(self) -> dict[str, Any]:
        """The argument of each operation."""
        listing = self.store.range("distOp.", "distOp/")
        return {str(KEYS.parse(kv.key).ref): loads(kv.value)["n"] for kv in listing if kv.key.endswith(".arg")}

    def request_ids(self) -> set[str]:
        """The request ids of the starts."""
        listing = self.store.range("distOp.", "distOp/")
        return {loads(kv.value)["request_id"] for kv in listing if kv.key.endswith(".spec")}

    def breaches(self) -> list[str]:
        return [str(found) for found in check(KEYS, self.store.history)]


def wanted(
    n: int = 0, request_id: str | None = None, type_name: str = "noop", table: str = TABLE, **arg: Any
) -> Request:
    return request(type_name, table, dumps({"n": n, **arg}), StartOptions(request_id=request_id), "me")


def identified(name: str) -> Request:
    return request("noop", TABLE, dumps({}), StartOptions(id=name), "me")


def run(work: Callable[[Etcd], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        etcd = Etcd()
        answer = await work(etcd)
        await asyncio.sleep(0)  # callers that have just got their answers may start others
        assert etcd.starts._queues == {}
        assert etcd.breaches() == []
        return answer

    return asyncio.run(main())


def ref(number: int, type_name: str = "noop") -> str:
    return f"{TABLE}/{type_name}/{number}"


def test_a_single_start_takes_one_read_and_one_transaction_and_leaves_no_task() -> None:
    async def alone(etcd: Etcd) -> None:
        before = asyncio.all_tasks()
        assert await etcd.start() == ref(1)
        assert etcd.requests == ["read", "start"]
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before

    run(alone)


def test_a_hundred_concurrent_starts_take_one_read_and_two_transactions() -> None:
    async def hundred(etcd: Etcd) -> None:
        started = await asyncio.gather(*(etcd.start(n) for n in range(100)))
        assert started == [ref(n) for n in range(1, 101)], "in the order of the calls"
        assert etcd.numbered() == [64, 36]
        assert etcd.requests == ["read", "start", "start"], "the first tells the next one what it needs to know"
        assert etcd.args() == {name: n for n, name in enumerate(started)}

    run(hundred)


@pytest.mark.parametrize("delay", [None, 60.0])
def test_a_start_is_refused_if_its_table_is_removed_concurrently(delay: float | None) -> None:
    async def removed(etcd: Etcd) -> None:
        def beside(txn: Txn) -> TxnResult:
            seen, run_ops = etcd.store.get(KEYS.table(TABLE)), etcd.store.get(KEYS.run_ops(TABLE))
            assert seen is not None
            assert etcd.store.apply(table_registry.remove_table(KEYS, TABLE, seen, run_ops)).succeeded
            return etcd.store.apply(txn)

        etcd.fates.append(beside)
        with pytest.raises(NotFound, match="there is no table 't'"):
            await etcd.starts.start(request("noop", TABLE, b'{"n":1}', StartOptions(delay=delay), "me"))
        assert etcd.args() == {}

    run(removed)


def test_other_types_and_tables_do_not_wait() -> None:
    async def others(etcd: Etcd) -> None:
        etcd.publish("other")
        held = asyncio.Event()

        async def hold(txn: Txn) -> TxnResult:
            await held.wait()
            return etcd.store.apply(txn)

        etcd.fates.append(hold)
        slow, behind = await etcd.behind(etcd.start(), etcd.start())
        assert await etcd.start(type_name="other") == ref(1, "other")
        assert not slow.done()
        assert not behind.done()
        held.set()
        # The compare of runOps failed, so both starts are in the next transaction.
        assert await asyncio.gather(slow, behind) == [ref(1), ref(2)]
        assert etcd.numbered() == [1, 2]

    run(others)


def test_a_refusal_concerns_one_start_and_has_the_same_message() -> None:
    async def one_bad(etcd: Etcd) -> None:
        with pytest.raises(InvalidArgument) as alone:
            await etcd.start(7, column=5)
        first, *answers = await asyncio.gather(
            etcd.start(0), etcd.start(1), etcd.start(7, column=5), etcd.start(3), return_exceptions=True
        )
        assert (first, answers[0], answers[2]) == (ref(1), ref(2), ref(3))
        assert type(answers[1]) is InvalidArgument
        assert str(answers[1]) == str(alone.value)

    run(one_bad)


def test_each_start_of_a_failed_group_gets_its_own_exception() -> None:
    async def no_table(etcd: Etcd) -> None:
        calls = [etcd.starts.start(wanted(n, table="elsewhere")) for n in range(4)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(one) for one in answers] == [NotFound] * 4
        assert len({id(one) for one in answers}) == 4
        assert len({str(one) for one in answers}) == 1

    run(no_table)


def test_two_starts_of_one_request_id_in_a_group_start_one_operation() -> None:
    async def twins(etcd: Etcd) -> None:
        started = await asyncio.gather(
            etcd.start(0), etcd.start(1, "x"), etcd.start(2), etcd.start(1, "x"), etcd.start(3, "y")
        )
        assert started == [ref(1), ref(2), ref(3), ref(2), ref(4)]
        assert etcd.numbered() == [4]
        answers = await asyncio.gather(
            etcd.start(0), etcd.start(4, "z"), etcd.start(5, "z"), etcd.start(1, "x"), return_exceptions=True
        )
        assert answers[:2] == [ref(5), ref(6)]
        assert answers[3] == ref(2), "which was started long before"
        assert type(answers[2]) is InvalidArgument
        assert f"the request id 'z' has started {ref(6)} with another argument" in str(answers[2])

    run(twins)


def test_one_operation_at_a_time_runs_on_each_object() -> None:
    async def objects(etcd: Etcd) -> None:
        etcd.publish("one", instances="one", object_field="column", arg_schema=SCHEMA)
        calls = [etcd.start(n, type_name="one", column=column) for n, column in enumerate("abacba")]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [answers[n] for n in (0, 1, 3)] == [f"{TABLE}/one/a/1", f"{TABLE}/one/b/2", f"{TABLE}/one/c/3"]
        assert [type(answers[n]) for n in (2, 4, 5)] == [Incompatible] * 3
        for n, column, holder in ((2, "a", 1), (4, "b", 2), (5, "a", 1)):
            assert str(answers[n]) == (
                f"one on {TABLE} for {column} cannot start while {TABLE}/one/{column}/{holder} runs: "
                "one runs one at a time for each object"
            )
        assert len(etcd.committed) <= 3

    run(objects)


def test_a_type_that_excludes_itself_is_started_once() -> None:
    async def selfish(etcd: Etcd) -> None:
        etcd.publish("selfish", conflicts_with=("selfish",))
        answers = await asyncio.gather(*(etcd.start(n, None, "selfish") for n in range(5)), return_exceptions=True)
        assert answers[0] == ref(1, "selfish")
        assert [str(one) for one in answers[1:]] == [
            f"selfish on {TABLE} cannot start while {ref(1, 'selfish')} runs: operations of type selfish exclude "
            "each other"
        ] * 4
        assert etcd.numbered() == [1]

    run(selfish)


def test_a_refusal_by_the_own_type_and_another_names_each_type_once() -> None:
    async def both(etcd: Etcd) -> None:
        etcd.publish("selfish", conflicts_with=("selfish", "noop"))
        await etcd.start()
        # Only an operation that was started before its type excluded the other one can run beside it.
        etcd.publish("selfish", conflicts_with=("selfish",))
        await etcd.start(0, None, "selfish")
        etcd.publish("selfish", conflicts_with=("selfish", "noop"))
        with pytest.raises(Incompatible) as refused:
            await submit(etcd, KEYS, wanted(1, None, "selfish"))  # type: ignore[arg-type]
        assert str(refused.value) == (
            f"selfish on {TABLE} cannot start while {ref(1)} and {ref(1, 'selfish')} run: selfish and noop exclude "
            "each other; operations of type selfish exclude each other"
        )

    run(both)


def test_starts_with_plans_share_a_transaction() -> None:
    async def planned(etcd: Etcd) -> None:
        calls = [etcd.starts.start(wanted(n, table=CLUSTER_TABLE)) for n in range(30)]
        started = [one.ref for one in await asyncio.gather(*calls)]
        assert started == [OperationRef(CLUSTER_TABLE, "noop", "", n) for n in range(1, 31)]
        assert etcd.numbered() == [30], "six keys of each, in parcels"

    run(planned)


def test_fewer_starts_with_large_arguments_share_a_transaction() -> None:
    async def large(etcd: Etcd) -> None:
        await asyncio.gather(*(etcd.start(n, column="x" * 300_000) for n in range(6)))
        assert etcd.numbered() == [3, 3]

    run(large)


def test_an_invalid_record_of_a_request_id_concerns_only_starts_with_that_id(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unreadable(*_: Any) -> None:
        raise UnreadableRecord("the record at k cannot be read")

    async def group(etcd: Etcd) -> None:
        await etcd.start(0)
        calls = (etcd.start(n, "own" if n == 2 else None) for n in (1, 2, 3))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(one) for one in answers] == [str, UnreadableRecord, str]
        assert sorted(etcd.args().values()) == [0, 1, 3]

    monkeypatch.setattr("distop.services.submission.insertion.find_earlier", unreadable)
    run(group)


def test_an_unreadable_record_concerns_only_the_starts_that_need_it() -> None:
    async def group(etcd: Etcd) -> None:
        await etcd.start(1, "r1")
        with_id = await etcd.starts.start(identified("i1"))
        for one in (ref(1), str(with_id.ref)):
            etcd.store.apply(Txn((), (Put(KEYS.of(OperationRef.parse(one), "spec"), b"[]"),)))
        calls = (etcd.start(1, "r1"), etcd.start(2, "r2"), etcd.start(3, "r3"), etcd.start(4))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert answers[1:] == [ref(3), ref(4), ref(5)]
        assert isinstance(answers[0], UnreadableRecord)
        starts = (etcd.starts.start(identified(one)) for one in ("i1", "i2", "i3"))
        found = await asyncio.gather(*starts, return_exceptions=True)
        assert [type(one) for one in found] == [UnreadableRecord, Started, Started]
        etcd.store.history.clear()

    run(group)


@pytest.mark.parametrize("damaged", ["state", "history"])
def test_an_unreadable_predecessor_concerns_only_the_starts_that_wait_for_it(damaged: str) -> None:
    async def group(etcd: Etcd) -> None:
        broken, sound = OperationRef.parse(await etcd.start(1)), OperationRef.parse(await etcd.start(2))
        key = KEYS.of(broken, "state") if damaged == "state" else KEYS.history(broken)
        etcd.store.apply(Txn((), (Put(key, b"?"),)))
        after = [[str(broken)], [str(sound)], None, [str(broken)]]
        later = (request("noop", TABLE, dumps({}), StartOptions(after=one), "me") for one in after)
        answers = await asyncio.gather(*map(etcd.starts.start, later), return_exceptions=True)
        assert [type(one) for one in answers] == [UnreadableRecord, Started, Started, UnreadableRecord]
        assert key in str(answers[0])
        assert answers[0] is not answers[3]
        etcd.store.history.clear()

    run(group)


def test_a_running_operation_excludes_only_the_starts_of_a_group_that_do_not_wait() -> None:
    async def mixed(etcd: Etcd) -> None:
        etcd.publish("selfish", conflicts_with=("selfish",))
        await etcd.start(0, None, "selfish")
        later = [request("selfish", TABLE, dumps({"n": n}), StartOptions(delay=60), "me") for n in (1, 2)]
        calls = [etcd.start(3, None, "selfish"), *(etcd.starts.start(one) for one in later)]
        refused, *started = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(refused, Incompatible)
        assert [str(getattr(one, "ref", one)) for one in started] == [ref(2, "selfish"), ref(3, "selfish")]

    run(mixed)


def test_an_unreadable_running_type_refuses_only_the_starts_of_a_group_that_do_not_wait() -> None:
    async def mixed(etcd: Etcd) -> None:
        etcd.publish("other")
        await etcd.start(0, None, "other")
        etcd.store.apply(Txn((), (Put(KEYS.behavior("other"), b"?"),)))
        later = [request("noop", TABLE, dumps({"n": n}), StartOptions(delay=60), "me") for n in (1, 2)]
        at_once = [wanted(n) for n in (3, 4)]
        calls = [etcd.starts.start(one) for one in (at_once[0], *later, at_once[1])]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(one) for one in answers] == [UnreadableRecord, Started, Started, UnreadableRecord]
        assert KEYS.behavior("other") in str(answers[0])
        assert answers[0] is not answers[3]

    run(mixed)


def test_queued_starts_read_a_reregistered_table_again() -> None:
    """A refusal returns the counters, but not the table's record."""

    async def changed(etcd: Etcd) -> None:
        moved = TableRecord(TABLE, "parquet", "/moved")

        def beside(txn: Txn) -> TxnResult:
            seen, run_ops = etcd.store.get(KEYS.table(TABLE)), etcd.store.get(KEYS.run_ops(TABLE))
            assert etcd.store.apply(table_registry.put_table(KEYS, moved, seen, run_ops)).succeeded
            return etcd.store.apply(txn)

        etcd.fates += [etcd.store.apply, beside]
        await asyncio.gather(*await etcd.behind(*(etcd.start(n) for n in range(3))))
        assert etcd.requests == ["read", "start", "start", "read", "start"]
        specs = [kv for kv in etcd.store.range("distOp.", "distOp/") if kv.key.endswith(".spec")]
        tables = {str(KEYS.parse(kv.key).ref): Spec.decode(kv.value).table for kv in specs}
        first = TableRecord(TABLE, "parquet", "/data")
        assert tables == {ref(1): first, ref(2): moved, ref(3): moved}

    run(changed)


def test_a_retry_reuses_the_spec_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    make = insertion.make_spec

    def counted(wanted: Request, *given: Any) -> Spec:
        made.append(wanted.request_id)
        return make(wanted, *given)

    monkeypatch.setattr(insertion, "make_spec", counted)

    async def raced(etcd: Etcd) -> None:
        def beside(txn: Txn) -> TxnResult:
            key = KEYS.run_ops(TABLE)
            run_ops = etcd.store.get(key)
            assert run_ops is not None
            etcd.store.apply(Txn((), (Put(key, run_ops.value),)))
            return etcd.store.apply(txn)

        etcd.fates += [etcd.store.apply, beside, beside]
        await asyncio.gather(*await etcd.behind(*(etcd.start(n) for n in range(4))))
        assert etcd.requests.count("start") == 4
        assert sorted(made) == sorted(etcd.request_ids())
        assert etcd.args() == {ref(n + 1): n for n in range(4)}

    run(raced)


def test_a_new_declaration_of_a_type_checks_the_arguments_of_queued_starts_again() -> None:
    async def changed(etcd: Etcd) -> None:
        def beside(txn: Txn) -> TxnResult:
            etcd.publish("noop", arg_schema={"type": "object", "properties": {"n": {"type": "integer", "maximum": 1}}})
            key = KEYS.run_ops(TABLE)
            run_ops = etcd.store.get(key)
            assert run_ops is not None
            etcd.store.apply(Txn((), (Put(key, run_ops.value),)))
            return etcd.store.apply(txn)

        etcd.fates += [etcd.store.apply, beside]
        answers = await asyncio.gather(*await etcd.behind(*(etcd.start(n) for n in range(4))), return_exceptions=True)
        assert answers[:2] == [ref(1), ref(2)]
        assert [type(answer) for answer in answers[2:]] == [InvalidArgument, InvalidArgument]

    run(changed)


def test_queued_starts_are_refused_if_the_table_is_removed() -> None:
    async def removed(etcd: Etcd) -> None:
        def beside(txn: Txn) -> TxnResult:
            seen, run_ops = etcd.store.get(KEYS.table(TABLE)), etcd.store.get(KEYS.run_ops(TABLE))
            assert seen is not None
            assert etcd.store.apply(table_registry.remove_table(KEYS, TABLE, seen, run_ops)).succeeded
            return etcd.store.apply(txn)

        etcd.fates += [etcd.store.apply, beside]
        answers = await asyncio.gather(*await etcd.behind(*(etcd.start(n) for n in range(3))), return_exceptions=True)
        assert answers[0] == ref(1)
        assert [type(answer) for answer in answers[1:]] == [NotFound, NotFound]

    run(removed)


def test_a_start_that_is_cancelled_in_the_queue_is_not_sent() -> None:
    async def cancelled(etcd: Etcd) -> None:
        calls = await etcd.behind(*(etcd.start(n) for n in range(6)))
        await asyncio.sleep(0)
        for n in (2, 4):
            calls[n].cancel()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [answers[n] for n in (0, 1, 3, 5)] == [ref(1), ref(2), ref(3), ref(4)]
        assert sorted(etcd.args().values()) == [0, 1, 3, 5]

    run(cancelled)


def test_a_start_that_is_cancelled_while_its_group_reads_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distop.services.submission.submit.CACHED_FOR", 0.0)  # each try reads again

    async def cancelled(etcd: Etcd) -> None:
        calls = await etcd.behind(*(etcd.start(n) for n in range(4)))
        await etcd.until(lambda: etcd.requests == ["read", "start", "read"])
        calls[2].cancel()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [answers[n] for n in (0, 1, 3)] == [ref(1), ref(2), ref(3)]
        assert isinstance(answers[2], asyncio.CancelledError)
        assert cut_off(answers[2]) is None
        assert sorted(etcd.args().values()) == [0, 1, 3]

    run(cancelled)


def test_a_start_that_is_cancelled_between_two_attempts_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    paused = asyncio.Event()

    def pause(lost: int, took: float) -> float:
        paused.set()
        return 0.01

    monkeypatch.setattr("distop.services.submission.start_batches.pause", pause)

    async def cancelled(etcd: Etcd) -> None:
        other = Starts(etcd, KEYS)  # type: ignore[arg-type]

        async def beaten(txn: Txn) -> TxnResult:
            await other.start(wanted(9))
            return etcd.store.apply(txn)

        etcd.fates.append(beaten)
        calls = [asyncio.ensure_future(etcd.start(n)) for n in range(2)]
        await paused.wait()
        calls[0].cancel()
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await calls[0]
        assert cut_off(cancelled.value) is None
        assert await calls[1] == ref(2)
        assert sorted(etcd.args().values()) == [1, 9]

    run(cancelled)


def test_a_start_that_is_cancelled_after_sending_does_not_affect_its_group() -> None:
    async def cancelled(etcd: Etcd) -> None:
        held = asyncio.Event()

        async def hold(txn: Txn) -> TxnResult:
            await held.wait()
            return etcd.store.apply(txn)

        etcd.fates += [etcd.store.apply, hold]
        calls = await etcd.behind(*(etcd.start(n) for n in range(4)))
        await etcd.until(lambda: len(etcd.committed) == 2)
        calls[2].cancel()
        held.set()
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await calls[2]
        assert [await calls[n] for n in (0, 1, 3)] == [ref(1), ref(2), ref(4)]
        assert cut_off(cancelled.value) in etcd.request_ids(), "it was sent by then"
        assert sorted(etcd.args().values()) == [0, 1, 2, 3]

    run(cancelled)


@pytest.mark.parametrize("first", [True, False], ids=["alone", "in a group"])
def test_a_time_out_around_a_sent_start_raises_a_time_out(first: bool) -> None:
    """The text about the start that a cancellation carries does not change the exception's class."""

    async def limited(etcd: Etcd) -> None:
        held = asyncio.Event()

        async def hold(txn: Txn) -> TxnResult:
            await held.wait()
            return etcd.store.apply(txn)

        etcd.fates += [hold] if first else [etcd.store.apply, hold]
        before = [] if first else await etcd.behind(etcd.start(0))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await etcd.start(1)
        held.set()
        assert await asyncio.gather(*before) == [ref(1)][: len(before)]

    run(limited)


def test_a_cancelled_first_start_does_not_delay_the_next_ones() -> None:
    async def cancelled(etcd: Etcd) -> None:
        etcd.fates.append(lambda _: asyncio.Event().wait())
        calls = await etcd.behind(*(etcd.start(n) for n in range(3)))
        await etcd.until(lambda: bool(etcd.committed))
        calls[0].cancel()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(answers[0], asyncio.CancelledError)
        assert answers[1:] == [ref(1), ref(2)]

    run(cancelled)


def test_an_unknown_outcome_names_the_request_id_of_each_start() -> None:
    async def unknown(etcd: Etcd) -> None:
        def silent(txn: Txn) -> TxnResult:
            raise OutcomeUnknown("etcd said nothing")

        etcd.fates += [etcd.store.apply, silent]
        calls = await etcd.behind(*(etcd.start(n, f"r{n}") for n in range(3)))
        await etcd.until(lambda: len(etcd.committed) == 2)
        late = asyncio.ensure_future(etcd.start(3))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert answers[0] == ref(1)
        for n in (1, 2):
            assert type(answers[n]) is OutcomeUnknown
            again = f"call again with request_id='r{n}' (--request-id), which starts it at most once"
            assert again in str(answers[n])
            assert isinstance(answers[n].__cause__, OutcomeUnknown)
        assert await late == ref(2)
        assert await asyncio.gather(etcd.start(1, "r1"), etcd.start(2, "r2")) == [ref(3), ref(4)]

    run(unknown)


def test_a_late_copy_of_a_group_is_found_by_its_request_ids() -> None:
    """The identical transaction is sent again after a lost answer, and refused (T9).

    The reads after the refusal show that the first copy was applied.
    """

    async def twice(etcd: Etcd) -> None:
        def again(txn: Txn) -> TxnResult:
            assert etcd.store.apply(txn).succeeded
            return replace(etcd.store.apply(txn), repeated=True)

        etcd.fates += [again, again]
        calls = await etcd.behind(*(etcd.start(n) for n in range(4)))
        assert await asyncio.gather(*calls) == [ref(n) for n in range(1, 5)]
        assert etcd.numbered() == [1, 3]

    run(twice)


def test_a_late_copy_of_a_refused_group_is_refused() -> None:
    """Another client committed first, so the repetition was refused. A late first copy is refused as well."""

    async def dead(etcd: Etcd) -> None:
        other = Starts(etcd, KEYS)  # type: ignore[arg-type]

        async def beaten(txn: Txn) -> TxnResult:
            await other.start(wanted(9))
            return etcd.store.apply(txn)

        etcd.fates += [etcd.store.apply, beaten]
        started = await asyncio.gather(*await etcd.behind(*(etcd.start(n) for n in range(3))))
        assert sorted(started) == [ref(1), ref(3), ref(4)]
        assert etcd.numbered() == [1, 1, 2]
        for txn in etcd.committed:
            assert not etcd.store.apply(txn).succeeded

    run(dead)


def test_each_start_of_a_refused_group_is_looked_up_separately() -> None:
    """A late copy of an earlier call has started one of them before. This does not settle the others."""

    async def one_of_them(etcd: Etcd) -> None:
        other = Starts(etcd, KEYS)  # type: ignore[arg-type]

        async def late(txn: Txn) -> TxnResult:
            await other.start(wanted(1, "x"))
            return etcd.store.apply(txn)

        etcd.fates += [etcd.store.apply, late]
        calls = await etcd.behind(etcd.start(0), etcd.start(1, "x"), etcd.start(2))
        assert await asyncio.gather(*calls) == [ref(1), ref(2), ref(3)]
        assert etcd.args() == {ref(1): 0, ref(2): 1, ref(3): 2}

    run(one_of_them)


def test_the_retry_of_a_refused_group_includes_new_starts() -> None:
    async def beaten(etcd: Etcd) -> None:
        other = Starts(etcd, KEYS)  # type: ignore[arg-type]
        late: list[asyncio.Future[str]] = []

        async def first(txn: Txn) -> TxnResult:
            await other.start(wanted(9))
            late.append(asyncio.ensure_future(etcd.start(5)))
            await asyncio.sleep(0)
            return etcd.store.apply(txn)

        etcd.fates.append(first)
        assert await etcd.start() == ref(2)
        assert await late[0] == ref(3)
        assert etcd.numbered() == [1, 2]

    run(beaten)


def test_only_a_refused_start_pauses_and_reads_again() -> None:
    """If other clients start and end operations all the time, the answer of a refusal is soon outdated."""

    async def beaten(etcd: Etcd) -> None:
        other = Starts(etcd, KEYS)  # type: ignore[arg-type]
        late: list[asyncio.Future[Any]] = []

        def start(n: int) -> asyncio.Future[Any]:
            return asyncio.ensure_future(etcd.starts.start(wanted(n, table=CLUSTER_TABLE)))

        async def first(txn: Txn) -> TxnResult:
            late.append(start(1))
            await other.start(wanted(9, table=CLUSTER_TABLE))
            return etcd.store.apply(txn)

        async def more(txn: Txn) -> TxnResult:
            late.append(start(2))
            await asyncio.sleep(0)
            return etcd.store.apply(txn)

        etcd.fates += [first, etcd.store.apply, more]
        assert (await start(0)).ref.instance == 2
        assert [started.ref.instance for started in await asyncio.gather(*late)] == [3, 4]
        others = ["read", "start"]
        assert etcd.requests == ["read", "start", *others, "read", "start", "start"]
        assert etcd.numbered() == [1, 2, 1]

    run(beaten)


def test_a_start_that_a_running_operation_blocks_does_not_delay_others() -> None:
    async def held(etcd: Etcd) -> None:
        etcd.publish("one", instances="one", object_field="column", arg_schema=SCHEMA)
        await etcd.start(type_name="one", column="a")
        calls = [etcd.start(n, type_name="one", column=column) for n, column in enumerate("xabc")]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(one) for one in answers[:1] + answers[2:]] == [
            f"{TABLE}/one/{c}/{n}" for n, c in ((2, "x"), (3, "b"), (4, "c"))
        ]
        assert f"cannot start while {TABLE}/one/a/1 runs" in str(answers[1])

    run(held)


def test_starts_that_etcd_refuses_together_are_sent_separately() -> None:
    async def small_server(etcd: Etcd) -> None:
        def too_many(txn: Txn) -> TxnResult:
            raise EtcdRejected("too many operations in txn request", code="INVALID_ARGUMENT")

        etcd.fates += [etcd.store.apply, too_many]
        started = await asyncio.gather(*await etcd.behind(*(etcd.start(n) for n in range(4))))
        assert sorted(started) == [ref(n) for n in range(1, 5)]
        assert set(etcd.numbered()) == {1}

    run(small_server)


def test_an_outage_of_etcd_fails_all_queued_starts() -> None:
    async def silent(etcd: Etcd) -> None:
        def down(txn: Txn) -> TxnResult:
            raise EtcdUnavailable("etcd did not accept the start in time")

        etcd.fates.append(down)
        answers = await asyncio.gather(*await etcd.behind(*(etcd.start(n) for n in range(3))), return_exceptions=True)
        assert type(answers[0]) is EtcdUnavailable
        assert sorted(answers[1:]) == [ref(1), ref(2)]
        assert etcd.numbered() == [1, 1]

    run(silent)


def test_a_start_that_is_always_refused_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def contended(etcd: Etcd) -> None:
        def moved(txn: Txn) -> TxnResult:
            etcd.store.apply(Txn((), (Put(KEYS.run_ops(TABLE), b"{}"),)))
            return etcd.store.apply(txn)

        etcd.fates += [moved] * 6
        answers = await asyncio.gather(etcd.start(0), etcd.start(1), return_exceptions=True)
        assert [type(one) for one in answers] == [OperationStartError] * 2
        assert str(answers[1]).startswith(
            "noop on t could not be started within 0 s, because other operations on it keep"
        )

    monkeypatch.setattr("distop.services.submission.contention.CONTENTION_LIMIT", 0.0)
    run(contended)


def test_the_end_of_the_loop_leaves_nothing_behind(recwarn: pytest.WarningsRecorder) -> None:
    async def closed() -> list[asyncio.Task[str]]:
        etcd = Etcd()
        etcd.fates += [etcd.store.apply, lambda _: asyncio.Event().wait()]
        calls = await etcd.behind(*(etcd.start(n) for n in range(4)))
        await etcd.until(lambda: len(etcd.committed) == 2)
        return calls

    calls = asyncio.run(closed())
    assert calls[0].result() == ref(1)
    assert all(call.cancelled() for call in calls[1:])
    gc.collect()
    assert [str(one.message) for one in recwarn] == []


def test_a_closed_connection_cancels_the_starts_of_its_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    async def being_inserted(*_: Any) -> list[Any]:
        return [BeingInserted(OperationRef(TABLE, "noop", "", 9), "graph")]

    async def closed(etcd: Etcd) -> None:
        def close(txn: Txn) -> TxnResult:
            raise asyncio.CancelledError

        etcd.fates.append(close)
        one, two, behind = await etcd.behind(etcd.start(0), etcd.start(1), etcd.start(2))
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await one
        assert cut_off(cancelled.value) is not None
        assert await asyncio.gather(two, behind) == [ref(1), ref(2)]
        etcd.fates.append(close)
        with monkeypatch.context() as patched:
            patched.setattr(insertion, "find_earlier", being_inserted)
            calls = etcd.start(3), etcd.start(4, "own")
            answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(one) for one in answers] == [asyncio.CancelledError] * 2, "also one that was not sent"

    run(closed)


def test_a_start_outside_of_the_queue_follows_the_same_rules() -> None:
    """Reruns and follow-up operations are such starts, and race with the queue."""

    async def beside(etcd: Etcd) -> None:
        alone = submit(etcd, KEYS, wanted(9))  # type: ignore[arg-type]
        one, *started = await asyncio.gather(alone, *(etcd.start(n) for n in range(10)))
        assert sorted([str(one.ref), *started]) == sorted(ref(n) for n in range(1, 12))

    run(beside)
