"""Starts with ids, on the model of etcd: each policy for duplicates, and each race."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from distop.clock import time
from distop.decide.due_operations import ended_waiting
from distop.errors import Incompatible, InvalidArgument, OperationStartError, UnreadableRecord
from distop.invariants.checker import check
from distop.protocol import operation_finish as f
from distop.protocol import operation_transitions as t
from distop.protocol import pending_operations as w
from distop.protocol.behavior_declaration import Declaration, Rules
from distop.protocol.dependencies import Edge, Hold
from distop.protocol.identity import Takes, id_releases
from distop.protocol.json_codec import dumps, loads, rfc3339
from distop.protocol.keys import Keys
from distop.protocol.records import Cancel, History, Node, OperationRef, Spec, State, TableRecord
from distop.protocol.txn import MAX_OPERATIONS, Delete, Put, Txn, TxnResult
from distop.services.submission.graph_start import in_one, start_graph
from distop.services.submission.insertion import Started
from distop.services.submission.option_values import After, Every
from distop.services.submission.start_batches import Starts
from distop.services.submission.start_options import StartOptions
from distop.services.submission.start_request import FOLLOW, Request, request
from distop.services.submission.submit import submit
from tests.unit.support.modelclient import ModelClient

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from distop.protocol.txn import TxnOperation

KEYS = Keys()
TABLE = "t"
TIME = "2013-01-01T00:00:00.000Z"
LATER = "2113-01-01T00:00:00.000Z"
SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "files": {"type": "array", "maxItems": 5, "default": []},
        "depth": {"type": "integer", "default": 1},
    },
    "additionalProperties": False,
}


class Etcd(ModelClient):
    """With a table, the types ``purge``, whose id is its ``path``, and ``plain``, without ids, and coordinators."""

    def __init__(self) -> None:
        super().__init__()
        put = [
            Declaration("purge", SCHEMA, id_fields=("path",), combine={"files": "union"}, conflicts_with=("purge",)),
            Declaration("clean", SCHEMA, id_fields=()),
            Declaration("plain", SCHEMA),
        ]
        self.store.apply(Txn((), tuple(Put(KEYS.behavior(one.type_name), one.encode()) for one in put)))
        self.store.apply(Txn((), (Put(KEYS.table(TABLE), TableRecord(TABLE, "parquet", "/data").encode()),)))
        self.store.apply(Txn((), (Put(KEYS.node("n"), Node("e", "h", 1, ("purge", "plain", "clean")).encode()),)))
        for one in put:
            self.store.apply(t.elect(KEYS, TABLE, one.type_name, "n", 0, ""))
        self.starts = Starts(self, KEYS)  # type: ignore[arg-type]

    async def start(self, path: str = "a", policy: str | None = None, **options: Any) -> Started:
        return await self.starts.start(wanted(path, policy, **options))

    def election(self, ref: OperationRef) -> Any:
        return t.election_guard(KEYS, ref.table, ref.type, self.store.mod(KEYS.coordinator(ref.table, ref.type)))

    def state(self, ref: OperationRef) -> str | None:
        kv = self.store.get(KEYS.of(ref, "state"))
        return kv.value.decode() if kv is not None else None

    def arg(self, ref: OperationRef) -> Any:
        kv = self.store.get(KEYS.of(ref, "arg"))
        return loads(kv.value) if kv is not None else None

    def spec(self, ref: OperationRef) -> Spec:
        kv = self.store.get(KEYS.of(ref, "spec"))
        assert kv is not None
        return Spec.decode(kv.value)

    def ids(self) -> dict[str, str]:
        return {str(KEYS.parse(kv.key).id): kv.value.decode() for kv in self.store.range(*KEYS.family("distOpUnique"))}

    def holder(self) -> str | None:
        return next(iter(self.ids().values()), None)

    def apply(self, txn: Txn) -> TxnResult:
        result = self.store.apply(txn)
        assert result.succeeded, txn.label
        return result

    def finish_txn(self, ref: OperationRef, state: State = State.CANCELLED) -> Txn:
        """The end of a running operation: cancelled, since that needs no plan."""
        spec, run_ops = self.spec(ref), self.store.get(KEYS.run_ops(TABLE))
        assert run_ops is not None
        history = History(
            str(ref), state, TIME, TIME, 0, 0, 0, None, (), "", spec.request_id, id=spec.id, follows=spec.follows
        )
        final = f.Final(ref, self.store.mod(KEYS.of(ref, "state")), 0, history, False)
        return f.finish(KEYS, self.election(ref), loads(run_ops.value), run_ops.mod_revision, [final])

    def end(self, ref: OperationRef) -> None:
        """End a running operation, up to the last page of its cleanup."""
        self.apply(t.cancel(KEYS, ref, self.store.mod(KEYS.of(ref, "state")), Cancel("user")))
        self.apply(self.finish_txn(ref))
        self.signal(ref)
        self.clean(ref)

    def clean(self, ref: OperationRef) -> None:
        """The last page of its cleanup."""
        spec = self.spec(ref)
        id_ = spec.id if spec.series is not None else ""
        self.apply(f.end(KEYS, ref, self.election(ref), self.store.mod(KEYS.of(ref, "state")), id_))

    def succeed(self, ref: OperationRef, ago: float = 0.0) -> None:
        """End a pending operation as a success, as a join ends."""
        history = ended_waiting(ref, self.spec(ref), State.SUCCESS, rfc3339(time.time() - ago), None)
        mod = self.store.mod(KEYS.of(ref, "state"))
        self.apply(w.end_waiting(KEYS, ref, mod, history, None, self.election(ref)))

    def signal(self, ref: OperationRef) -> None:
        edges = {
            KEYS.parse(kv.key).id: Edge.decode(kv.value) for kv in self.store.range(*KEYS.edges_range(ref, "next"))
        }
        mod = self.store.mod(KEYS.of(ref, "state"))
        self.apply(w.signal(KEYS, ref, self.election(ref), mod, State(self.state(ref) or ""), edges))

    def cancel_waiting_txn(self, ref: OperationRef) -> Txn:
        why = Cancel("user", "not wanted")
        history = ended_waiting(ref, self.spec(ref), State.CANCELLED, TIME, why)
        return w.end_waiting(KEYS, ref, self.store.mod(KEYS.of(ref, "state")), history, why)

    def begin_txn(self, ref: OperationRef) -> Txn:
        run_ops = self.store.get(KEYS.run_ops(TABLE))
        counts, mod = (loads(run_ops.value), run_ops.mod_revision) if run_ops is not None else ({}, 0)
        one = w.Beginning(ref, self.store.mod(KEYS.of(ref, "state")), False)
        return w.begins(KEYS, self.election(ref), counts, mod, [one])


def wanted(
    path: str | None = "a",
    policy: str | None = None,
    type_name: str = "purge",
    files: list[Any] | None = None,
    depth: int | None = None,
    partitions: list[str] | None = None,
    request_id: str | None = None,
    **options: Any,
) -> Request:
    arg = {"path": path, "files": files, "depth": depth}
    given = dumps({name: value for name, value in arg.items() if value is not None})
    chosen = StartOptions(partitions=partitions, request_id=request_id, on_duplicate=policy, **options)
    return request(type_name, TABLE, given, chosen, "me")


def run(work: Callable[[Etcd], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        etcd = Etcd()
        answer = await work(etcd)
        assert [str(found) for found in check(KEYS, etcd.store.history)] == []
        return answer

    return asyncio.run(main())


# ------------------------------------------------------------------------ join


def test_P16_a_duplicate_joins_the_active_operation_in_each_state() -> None:
    async def work(etcd: Etcd) -> None:
        first = await etcd.start(delay=60)
        assert (first.earlier, etcd.holder()) == (False, str(first.ref))
        assert await etcd.start() == Started(first.ref, earlier=True), "while it waits"
        etcd.apply(etcd.begin_txn(first.ref))
        assert await etcd.start() == Started(first.ref, earlier=True), "though its type excludes itself"
        etcd.apply(t.pause(KEYS, first.ref, etcd.store.mod(KEYS.of(first.ref, "state"))))
        assert await etcd.start() == Started(first.ref, earlier=True)
        etcd.end(first.ref)
        assert etcd.ids() == {}
        again = await etcd.start()
        assert (again.ref.instance, again.earlier) == (2, False)

    run(work)


def test_fifty_starts_of_one_id_by_several_clients_start_one_operation() -> None:
    async def work(etcd: Etcd) -> None:
        other = Starts(etcd, KEYS)  # type: ignore[arg-type]
        calls = [
            (etcd.starts if n % 2 else other).start(wanted(path=f"p{n % 3}", type_name="clean")) for n in range(50)
        ]
        started = await asyncio.gather(*calls, return_exceptions=True)
        refs = {one.ref for one in started if isinstance(one, Started)}
        assert len(refs) == 1, "the type alone is the id"
        assert sum(not one.earlier for one in started if isinstance(one, Started)) == 1
        assert all(isinstance(one, Started) for one in started)

    run(work)


def test_starts_of_many_ids_at_once_share_transactions_within_etcds_limits() -> None:
    async def work(etcd: Etcd) -> None:
        seen: list[Txn] = etcd.committed
        calls = (etcd.starts.start(wanted(type_name="plain", id=f"id-{n}")) for n in range(60))
        started = await asyncio.gather(*calls)
        assert len({one.ref for one in started}) == 60
        assert len(etcd.ids()) == 60
        assert max(max(len(txn.compares), len(txn.success), len(txn.failure)) for txn in seen) <= MAX_OPERATIONS
        assert len(seen) < 10

    run(work)


def test_L9_a_caller_may_choose_an_id_or_none() -> None:
    async def work(etcd: Etcd) -> None:
        nightly = await etcd.start(type_name="plain", id="nightly")
        assert etcd.ids() == {"nightly": str(nightly.ref)}
        assert (await etcd.start(type_name="plain", id="nightly")).ref == nightly.ref
        assert (await etcd.start(type_name="plain")).ref != nightly.ref, "without an id"
        other = await etcd.start(type_name="clean", id="nightly")
        assert other.ref != nightly.ref, "of another type"
        computed = await etcd.start(type_name="clean")
        once = await etcd.start(type_name="clean", one_off=True)
        assert len({other.ref, computed.ref, once.ref}) == 3
        assert etcd.spec(once.ref).id == ""

    run(work)


def test_a_request_joins_only_an_operation_with_the_same_argument() -> None:
    async def work(etcd: Etcd) -> None:
        first = await etcd.start(type_name="plain", id="nightly", depth=1)
        assert (await etcd.start(type_name="plain", id="nightly")).ref == first.ref, "the default is 1"
        with pytest.raises(
            Incompatible, match=r"t/plain/1 has the id 'nightly' and is running with another argument \(dep"
        ):
            await etcd.start(type_name="plain", id="nightly", depth=2)
        with pytest.raises(Incompatible, match="over other partitions"):
            await etcd.start(type_name="plain", id="nightly", partitions=["x"])
        computed = await etcd.start()
        assert (await etcd.start(depth=2)).ref == computed.ref, "by the behavior, the depth makes no other operation"
        with pytest.raises(Incompatible, match="t/purge/1 has the same id and is running over other partitions"):
            await etcd.start(partitions=["x"])

    run(work)


def test_a_request_with_an_invalid_argument_joins_nothing() -> None:
    async def work(etcd: Etcd) -> None:
        await etcd.start()
        with pytest.raises(InvalidArgument, match="is invalid"):
            await etcd.start(depth="deep")

    run(work)


# ------------------------------------------------------------ refuse, replace


def test_L19_refuse_names_the_holder() -> None:
    async def work(etcd: Etcd) -> None:
        first = await etcd.start()
        before = etcd.store.revision
        with pytest.raises(
            Incompatible, match=f"purge on t was not started: {first.ref} has the same id and is running"
        ):
            await etcd.start(policy="refuse")
        assert etcd.store.revision == before
        etcd.end(first.ref)
        assert not (await etcd.start(policy="refuse")).earlier

    run(work)


def test_L20_a_pending_operation_is_replaced_in_one_transaction() -> None:
    async def work(etcd: Etcd) -> None:
        first = await etcd.start(delay=60, files=[1])
        behind = await etcd.start(path="z", type_name="plain", after=[first.ref])
        before = etcd.store.revision
        second = await etcd.start(policy="replace", delay=60, files=[2])
        assert etcd.store.revision == before + 1
        assert (etcd.state(first.ref), etcd.state(second.ref)) == ("cancelled", "pending")
        kv = etcd.store.get(KEYS.history(first.ref))
        assert kv is not None
        record = History.decode(kv.value)
        why = Cancel("aborted", f"replaced by {second.ref}", str(second.ref), "me", record.finished)
        assert (record.state, record.cancel) == (State.CANCELLED, why)
        assert etcd.holder() == str(second.ref)
        etcd.signal(first.ref)
        edge = etcd.store.range(*KEYS.edges_range(behind.ref, "after"))[0]
        assert b"cancelled" in edge.value, "what waited for it is told that it ended"

    run(work)


def test_L20_several_are_replaced_in_one_transaction() -> None:
    async def work(etcd: Etcd) -> None:
        old = [(await etcd.start(path, delay=60)).ref for path in "ab"]
        new = [one.ref for one in await asyncio.gather(*(etcd.start(path, "replace", delay=60) for path in "ab"))]
        assert etcd.numbered()[-1] == 2
        for former, ref in zip(old, new, strict=True):
            record, cancel = etcd.store.get(KEYS.history(former)), etcd.store.get(KEYS.of(former, "cancel"))
            assert record is not None
            assert cancel is not None
            history = History.decode(record.value)
            assert history.cancel == Cancel.decode(cancel.value)
            assert (history.state, history.cancel.replaced_by) == (State.CANCELLED, str(ref))

    run(work)


@pytest.mark.parametrize("moved", ["begun", "cancelled", "replaced"])
def test_L20_replace_is_refused_after_a_concurrent_change(moved: str) -> None:
    async def work(etcd: Etcd) -> None:
        first = await etcd.start(delay=60)

        async def beside(txn: Txn) -> TxnResult:
            if moved == "begun":
                etcd.apply(etcd.begin_txn(first.ref))
            elif moved == "cancelled":
                etcd.apply(etcd.cancel_waiting_txn(first.ref))
            else:
                await submit(etcd, KEYS, wanted(policy="replace", delay=60))  # type: ignore[arg-type]
            return etcd.store.apply(txn)

        etcd.fates.append(beside)
        if moved == "begun":
            with pytest.raises(
                Incompatible,
                match="is running, and it has started: only operations that have not started can be replaced",
            ):
                await submit(etcd, KEYS, wanted(policy="replace"))  # type: ignore[arg-type]
            assert etcd.state(first.ref) == "running"
        else:
            second = await submit(etcd, KEYS, wanted(policy="replace", delay=60))  # type: ignore[arg-type]
            assert etcd.holder() == str(second.ref)
            assert etcd.state(first.ref) == "cancelled"

    run(work)


def replaced_at(etcd: Etcd, moment: int) -> list[Started]:
    """Another client replaces the holder of the id after this number of requests; returns its operation."""
    others: list[Started] = []
    before, ask = len(etcd.requests), etcd.request

    async def asked(what: str) -> None:
        await ask(what)
        if len(etcd.requests) - before == moment:
            etcd.request = ask  # type: ignore[method-assign]
            other = wanted(policy="replace", delay=60, files=[2])
            others.append(await submit(etcd, KEYS, other))  # type: ignore[arg-type]

    etcd.request = asked  # type: ignore[method-assign]
    return others


@pytest.mark.parametrize("policy", ["replace", "combine", "join"])
def test_L20_two_racing_replacements_are_both_started(policy: str) -> None:
    """The second caller may come between any two requests of the first."""

    async def work(etcd: Etcd, moment: int) -> bool:
        first = await etcd.start(delay=60, files=[1])
        others = replaced_at(etcd, moment)
        last = await submit(etcd, KEYS, wanted(policy=policy, delay=60, files=[3]))  # type: ignore[arg-type]
        given = [first, last, *others]
        assert [str(ref) for ref in {one.ref for one in given} if etcd.state(ref) == "pending"] == [etcd.holder()]
        assert etcd.holder() in (str(last.ref), *(str(one.ref) for one in others))
        return bool(others)

    moment = 1
    while run(lambda etcd: work(etcd, moment)):  # noqa: B023  # it is run before the next one
        moment += 1
    assert moment > 3


@pytest.mark.parametrize("on", ["success", "end"])
@pytest.mark.parametrize("policy", ["replace", "combine"])
def test_a_replacement_and_an_operation_that_waits_for_the_replaced_one_share_no_transaction(
    policy: str, on: str
) -> None:
    """Otherwise the second one waits for an operation that the first one ends, although its start succeeded."""

    async def work(etcd: Etcd) -> None:
        first = (await etcd.start(delay=60, files=[1])).ref
        takes = etcd.start(policy=policy, delay=60, files=[2])
        waits = etcd.start("b", after=[After(first, on)])
        _, last = await asyncio.gather(takes, waits, return_exceptions=True)
        if on == "success":
            assert isinstance(last, OperationStartError)
        else:
            assert isinstance(last, Started)
            assert etcd.store.range(*KEYS.edges_range(last.ref, "after")) == []
        assert etcd.state(first) == "cancelled"

    run(work)


def test_P9_an_operation_is_not_combined_in_the_transaction_that_adds_its_successors() -> None:
    async def work(etcd: Etcd) -> None:
        first = (await etcd.start(delay=60, files=[1])).ref
        waits = etcd.start("b", after=[After(first)])
        takes = etcd.start(policy="combine", delay=60, files=[2])
        second, third = await asyncio.gather(waits, takes, return_exceptions=True)
        assert isinstance(second, Started)
        assert isinstance(third, Incompatible)
        assert "other operations wait for it" in str(third)
        assert etcd.state(first) == "pending"

    run(work)


def test_a_late_copy_of_a_start_that_replaced_changes_nothing() -> None:
    async def work(etcd: Etcd) -> None:
        first = await etcd.start(delay=60)
        second = await etcd.start(policy="replace", delay=60)
        late = etcd.committed[-1]
        third = await etcd.start(policy="replace", delay=60)
        before = etcd.store.revision
        assert not etcd.store.apply(late).succeeded
        assert (etcd.store.revision, etcd.holder()) == (before, str(third.ref))
        etcd.apply(etcd.cancel_waiting_txn(third.ref))
        assert not etcd.store.apply(late).succeeded, "nor once the id is free"
        assert [etcd.state(one.ref) for one in (first, second, third)] == ["cancelled"] * 3

    run(work)


def test_a_start_whose_answer_was_lost_is_not_a_duplicate_of_itself() -> None:
    async def work(etcd: Etcd) -> None:
        etcd.fates.append(lambda txn: (etcd.store.apply(txn), replace(etcd.store.apply(txn), repeated=True))[1])
        assert await etcd.start(policy="refuse") == Started(OperationRef(TABLE, "purge", "", 1))

    run(work)


# --------------------------------------------------------------------- combine


def test_P16_combine_replaces_a_pending_operation() -> None:
    async def work(etcd: Etcd) -> None:
        before = await etcd.start(path="other", type_name="plain")
        first = await etcd.start(delay=60, files=[1, 2], after=[before.ref])
        assert (await etcd.start(policy="combine", files=[2], not_before=LATER)).ref == first.ref, "it adds nothing"
        second = await etcd.start(policy="combine", files=[2, 3], request_id="r")
        assert etcd.arg(second.ref) == {"path": "a", "files": [1, 2, 3], "depth": 1}
        assert (etcd.state(first.ref), etcd.state(second.ref)) == ("cancelled", "pending")
        assert etcd.spec(second.ref).not_before == "", "the earlier time"
        assert len(etcd.store.range(*KEYS.edges_range(second.ref, "after"))) == 1, "it waits for whom that waited for"
        again = await etcd.start(policy="combine", files=[2, 3], request_id="r")
        assert again == Started(second.ref, earlier=True), "the request is known by what it asked for"

    run(work)


def test_a_request_that_cannot_be_combined_is_refused_and_changes_nothing() -> None:
    async def work(etcd: Etcd) -> None:
        first = await etcd.start(delay=60, files=[1])
        before = etcd.store.revision
        with pytest.raises(Incompatible, match="cannot be combined with this: 'depth' differs, and purge has no rule"):
            await etcd.start(policy="combine", depth=7)
        with pytest.raises(InvalidArgument, match="is invalid"):
            await etcd.start(policy="combine", files=[2, 3, 4, 5, 6])
        with pytest.raises(Incompatible, match="over other partitions"):
            await etcd.start(policy="combine", partitions=["x"])
        with pytest.raises(InvalidArgument, match="cannot both replace t/purge/1 and wait for it"):
            await etcd.start(policy="combine", files=[2], after=[first.ref])
        assert etcd.store.revision == before
        await etcd.start(path="z", type_name="plain", after=[first.ref])
        with pytest.raises(Incompatible, match="other operations wait for it, so it cannot be replaced"):
            await etcd.start(policy="combine", files=[2])
        with pytest.raises(InvalidArgument, match="clean declares no rule"):
            await etcd.start(type_name="clean", policy="combine")
        with pytest.raises(InvalidArgument, match="plain computes no id"):
            await etcd.start(type_name="plain", policy="refuse")

    run(work)


def test_combine_with_a_running_operation_waits_for_its_end_and_takes_the_id() -> None:
    async def work(etcd: Etcd) -> None:
        first = await etcd.start(files=[1])
        second = await etcd.start(policy="combine", files=[2])
        assert etcd.arg(second.ref)["files"] == [2], "the first one has begun with what it was given"
        assert (etcd.holder(), etcd.spec(second.ref).follows) == (str(second.ref), str(first.ref))
        third = await etcd.start(policy="combine", files=[3])
        assert etcd.arg(third.ref)["files"] == [2, 3]
        assert etcd.spec(third.ref).follows == str(first.ref)
        fourth = await etcd.start(policy="replace", files=[4])
        assert not etcd.store.apply(etcd.begin_txn(fourth.ref)).succeeded, "what has its id runs still"
        etcd.end(first.ref)
        assert etcd.holder() == str(fourth.ref), "who ends gives back what is its own"
        etcd.apply(etcd.begin_txn(fourth.ref))
        etcd.end(fourth.ref)
        assert etcd.ids() == {}

    run(work)


def test_a_running_operation_regains_its_id_if_the_pending_one_is_cancelled() -> None:
    async def work(etcd: Etcd) -> None:
        first = await etcd.start(files=[1])
        second = await etcd.start(policy="combine", files=[2])
        etcd.apply(etcd.cancel_waiting_txn(second.ref))
        assert etcd.holder() == str(first.ref)
        assert (await etcd.start()).ref == first.ref
        third = await etcd.start(policy="combine", files=[3])
        etcd.end(first.ref)
        etcd.apply(etcd.cancel_waiting_txn(third.ref))
        assert etcd.ids() == {}

    run(work)


@pytest.mark.parametrize("followed", ["hr.people/apply/7", "t/other/1", "nobody"])
def test_a_record_does_not_reveal_operations_of_another_table(followed: str) -> None:
    """Otherwise a writer of one table's specs could let a coordinator compare the state of any other operation."""
    ref = OperationRef("t", "purge", "", 2)
    own, other = (
        id_releases(KEYS, ref, History(str(ref), State.CANCELLED, TIME, TIME, 0, 0, 0, id="x", follows=follows))
        for follows in ("t/purge/1", followed)
    )
    assert keys_of(own) == {KEYS.unique("t", "purge", "x"), KEYS.of(OperationRef("t", "purge", "", 1), "state")}
    assert keys_of(other) == {KEYS.unique("t", "purge", "x")}


def keys_of(operations: Iterable[TxnOperation]) -> set[str]:
    """All keys that these requests read, compare or write."""
    found: set[str] = set()
    for one in operations:
        if isinstance(one, Txn):
            found |= {compare.key for compare in one.compares} | keys_of((*one.success, *one.failure))
        else:
            found.add(one.key)
    return found


def test_follow_leaves_the_id_to_another_series() -> None:
    async def work(etcd: Etcd) -> None:
        async def follow() -> Started:
            return await submit(etcd, KEYS, replace(wanted(), on_duplicate=FOLLOW))  # type: ignore[arg-type]

        first = await etcd.start()
        second = await follow()
        assert etcd.spec(second.ref).follows == str(first.ref)
        with pytest.raises(Incompatible, match="is pending, and it is not part of a series"):
            await follow()
        etcd.apply(etcd.cancel_waiting_txn(second.ref))
        etcd.end(first.ref)
        series = await etcd.start(every=60, delay=60)
        assert await follow() == Started(series.ref, earlier=True)

    run(work)


@pytest.mark.parametrize("policy", [None, "refuse", "replace", "combine", FOLLOW])
@pytest.mark.parametrize("state", [State.PENDING, State.RUNNING])
def test_a_forged_id_reaches_no_operation_on_another_table(policy: str | None, state: State) -> None:
    """Neither by a client nor by the coordinator of a series."""

    async def work() -> None:
        etcd, victim = Etcd(), OperationRef("victims", "purge", "", 7)
        first = await etcd.start()
        ((id_, _),) = etcd.ids().items()
        spec = replace(etcd.spec(first.ref), table=TableRecord("victims", "parquet", "/theirs"))
        theirs = (Put(KEYS.of(victim, "spec"), spec.encode()), Put(KEYS.of(victim, "state"), state.encode()))
        forged = Put(KEYS.unique(TABLE, "purge", id_), str(victim).encode())
        etcd.apply(Txn((), (*theirs, Put(KEYS.of(victim, "arg"), dumps({"path": "a", "files": [1]})), forged)))
        before = etcd.store.revision
        with pytest.raises(UnreadableRecord, match=r"names victims/purge/7, which is not of type purge on table t"):
            await submit(etcd, KEYS, replace(wanted(), on_duplicate=policy or ""))  # type: ignore[arg-type]
        assert etcd.store.revision == before

    asyncio.run(work())


@pytest.mark.parametrize("policy", ["join", "refuse", "replace"])
def test_P3_the_id_of_a_series_is_not_free_between_two_operations(policy: str) -> None:
    """Otherwise another start could take the id. The series would wait behind that operation, or end."""

    async def work(etcd: Etcd) -> None:
        first = await etcd.start(every=60, delay=60)
        etcd.succeed(first.ref)
        assert etcd.holder() == str(first.ref), "until the next one has it"
        between = asyncio.ensure_future(etcd.start(policy=policy, delay=60))
        asked = len(etcd.requests)
        await etcd.until(lambda: len(etcd.requests) > asked + 20)
        assert not between.done()
        following = replace(wanted(every=60, delay=60), on_duplicate=FOLLOW)
        second = await submit(etcd, KEYS, following)  # type: ignore[arg-type]
        etcd.clean(first.ref)
        if policy == "refuse":
            with pytest.raises(Incompatible, match=f"{second.ref} has the same id"):
                await between
        elif policy == "join":
            assert await between == Started(second.ref, earlier=True)
        else:
            assert (await between).ref.instance == 3
            assert etcd.state(second.ref) == "cancelled"

    run(work)


def test_P3_an_ended_series_releases_its_id_with_its_last_keys() -> None:
    async def work(etcd: Etcd) -> None:
        first = await etcd.start(every=Every(60, times=1), delay=60)
        etcd.succeed(first.ref)
        after = asyncio.ensure_future(etcd.start(delay=60))
        etcd.clean(first.ref)
        assert etcd.ids() == {}
        assert (await after).ref.instance == 2
        third = await etcd.start("b", every=60, delay=60)
        etcd.apply(etcd.cancel_waiting_txn(third.ref))
        assert list(etcd.ids().values()) == [f"{TABLE}/purge/2"], "a cancel ends the series at once"

    run(work)


def test_P3_the_audit_sees_an_id_that_is_kept_beyond_the_last_of_a_series() -> None:
    async def main() -> list[int]:
        etcd = Etcd()
        first = await etcd.start(every=Every(60, times=1), delay=60)
        etcd.succeed(first.ref)
        etcd.apply(f.end(KEYS, first.ref, etcd.election(first.ref), etcd.store.mod(KEYS.of(first.ref, "state"))))
        return [found.invariant for found in check(KEYS, etcd.store.history)]

    assert asyncio.run(main()) == [18]


def test_P3_the_id_of_a_series_stays_reserved_for_a_while_without_a_cleanup() -> None:
    async def work(etcd: Etcd) -> None:
        first = await etcd.start(every=60, delay=60)
        etcd.succeed(first.ref, ago=60.0)
        second = await etcd.start(delay=60)
        assert (second.ref.instance, second.earlier) == (2, False)
        etcd.clean(first.ref)
        assert etcd.holder() == str(second.ref)

    run(work)


def test_an_id_key_that_names_an_ended_operation_blocks_no_start() -> None:
    """An executor of a release without ids has ended the operation, and left the key."""

    async def work(etcd: Etcd) -> None:
        first = await etcd.start()
        ((id_, holder),) = etcd.ids().items()
        etcd.end(first.ref)
        key = Put(KEYS.unique(TABLE, "purge", id_), holder.encode())
        etcd.store.apply(Txn((), (key,)))
        second = await etcd.start(policy="refuse")
        assert etcd.holder() == str(second.ref)
        broken = {found.invariant for found in check(KEYS, etcd.store.history)}
        assert broken == {18}
        etcd.store.history.clear()

    run(work)


def test_an_operation_is_not_joined_before_its_graph_is_inserted() -> None:
    async def work(etcd: Etcd) -> None:
        etcd.apply(w.hold(KEYS, "g", Hold("graph"), 0))
        held = await in_one(etcd, KEYS, [wanted()], (), "g")  # type: ignore[arg-type]
        etcd.apply(held.txn)
        joining = asyncio.ensure_future(etcd.start())
        with pytest.raises(Incompatible, match="has the same id and is pending"):
            await etcd.start(policy="refuse")
        etcd.store.apply(Txn((), (Delete(KEYS.hold("g")),)))
        assert (await joining).ref == held.refs[0]
        etcd.apply(w.hold(KEYS, "p", Hold("prepared"), 0))
        etcd.apply((await in_one(etcd, KEYS, [wanted(path="b")], (), "p")).txn)  # type: ignore[arg-type]
        with pytest.raises(Incompatible, match="it is held until it is confirmed"):
            await etcd.start(path="b", policy="combine", files=[1])

    run(work)


# ---------------------------------------------------------------------- graphs


async def graph(etcd: Etcd, *requests: Request, links: tuple[tuple[int, int], ...] = ()) -> list[Started]:
    return await start_graph(etcd, KEYS, requests, [(a, b, "success") for a, b in links])  # type: ignore[arg-type]


def test_L20_a_graph_joins_the_final_holder_of_the_id() -> None:
    """Another client replaces the holder of the id between any two requests of the graph's start."""

    async def work(etcd: Etcd, moment: int) -> bool:
        await etcd.start(delay=60, files=[1])
        others = replaced_at(etcd, moment)
        _, last = await graph(etcd, wanted(policy="join", delay=60, files=[3]), wanted("b"), links=((0, 1),))
        assert etcd.state(last.ref) in ("pending", "cancelled"), "cancelled: what it waited for was replaced afterwards"
        return bool(others)

    moment = 1
    while run(lambda etcd: work(etcd, moment)):  # noqa: B023  # it is run before the next one
        moment += 1
    assert moment > 5


def test_each_operation_of_a_large_graph_waits_for_its_predecessor() -> None:
    """Edges are written in several transactions. The last edge of each is written as well."""

    async def work(etcd: Etcd) -> None:
        links = tuple((n, n + 1) for n in range(199))
        started = await graph(etcd, *(wanted(f"m{n}") for n in range(200)), links=links)
        for before, after in itertools.pairwise(started):
            (edge,) = etcd.store.range(*KEYS.edges_range(after.ref, "after"))
            assert loads(edge.value)["op"] == str(before.ref)
            assert len(etcd.store.range(*KEYS.edges_range(before.ref, "next"))) == 1

    run(work)


def test_L9_each_operation_of_a_graph_takes_its_id() -> None:
    async def work(etcd: Etcd) -> None:
        started = await graph(etcd, wanted("a"), wanted("b"), links=((0, 1),))
        again = [await etcd.start("a"), await etcd.start("b")]
        assert [one.ref for one in again] == [one.ref for one in started]

    run(work)


def test_L19_a_graph_with_two_operations_of_one_id_is_refused_whole() -> None:
    async def work(etcd: Etcd) -> None:
        before = etcd.store.revision
        with pytest.raises(InvalidArgument, match="both purge on t, have the same id"):
            await graph(etcd, wanted("b"), wanted("a"), wanted("a"))
        with pytest.raises(InvalidArgument, match="of a graph.* cannot replace a duplicate"):
            await graph(etcd, wanted("b"), wanted("a", "replace"))
        assert etcd.store.revision == before

    run(work)


def test_L19_a_duplicate_that_is_refused_refuses_the_graph() -> None:
    async def work(etcd: Etcd) -> None:
        first = await etcd.start("a")
        before = etcd.store.revision
        with pytest.raises(Incompatible, match=str(first.ref)):
            await graph(etcd, wanted("b"), wanted("a", "refuse"))
        assert etcd.store.revision == before

    run(work)


@pytest.mark.parametrize("many", [0, 80])
def test_L9_a_duplicate_in_a_graph_joins_the_active_operation(many: int) -> None:
    async def work(etcd: Etcd) -> None:
        first = await etcd.start("a")
        more = [wanted(f"m{n}") for n in range(many)]
        started = await graph(etcd, wanted("a"), wanted("b"), *more, links=((0, 1),))
        assert [one.ref == first.ref for one in started] == [True] + [False] * (1 + many)
        assert started[0].earlier
        assert etcd.state(started[1].ref) == "pending"
        (edge,) = etcd.store.range(*KEYS.edges_range(started[1].ref, "after"))
        assert loads(edge.value)["op"] == str(first.ref)
        assert len(etcd.ids()) == 2 + many
        with pytest.raises(
            Incompatible, match="cannot wait for other operations of the graph: it already exists as t/pu"
        ):
            await graph(etcd, wanted("c"), wanted("a"), links=((0, 1),))
        assert await graph(etcd, wanted("a")) == [Started(first.ref, earlier=True)]

        def again() -> Awaitable[list[Started]]:
            return graph(etcd, wanted("a", request_id="r#0"), wanted("y", request_id="r#1"), links=((0, 1),))

        one, two = await again(), await again()
        assert [s.ref for s in one] == [s.ref for s in two] == [first.ref, one[1].ref]
        assert all(s.earlier for s in two)

    run(work)


def test_L19_an_id_that_is_taken_while_a_graph_is_inserted_refuses_it_as_a_whole() -> None:
    """Any operation of the graph may have the id, also the last one of a page."""

    async def work(etcd: Etcd, taken: str) -> None:
        def beside(txn: Txn) -> TxnResult:
            if txn.label == "start" and any(isinstance(op, Put) and op.key.endswith(".spec") for op in txn.success):
                etcd.fates.clear()
                ref, spec = OperationRef(TABLE, "purge", "", 1), Spec("r", TIME, "", Rules(), id=taken)
                mine = t.NewOperation(ref, spec, dumps({"path": taken}), waits=True, takes=Takes(taken))
                etcd.apply(t.starts(KEYS, t.Counters({}, 0, 1, 0), [mine]))
            return etcd.store.apply(txn)

        etcd.fates.extend([etcd.store.apply, beside])
        many = [wanted(f"m{n}", id=f"m{n}") for n in range(80)]
        with pytest.raises(Incompatible, match="with an id of the graph during its insertion"):
            await graph(etcd, *many)
        holds = etcd.store.range(*KEYS.family("distOpHold"))
        assert [b"denied" in kv.value for kv in holds] == [True]

    for n in range(80):
        run(lambda etcd, taken=f"m{n}": work(etcd, taken))


@pytest.mark.parametrize("value", [b"\xff", b"", b"nobody", b"{}", b"t/purge/0", b"t/purge/" + b"9" * 5000])
def test_an_error_names_an_invalid_id_key(value: bytes) -> None:
    async def work(etcd: Etcd) -> None:
        key = KEYS.unique(TABLE, "plain", "nightly")
        etcd.store.apply(Txn((), (Put(key, value),)))
        before = etcd.store.revision
        with pytest.raises(UnreadableRecord, match="distOpUnique.t.plain.nightly"):
            await etcd.start(type_name="plain", id="nightly")
        assert etcd.store.revision == before
        assert (await etcd.start(type_name="plain", id="weekly")).ref.instance == 1
        etcd.store.history.clear()

    run(work)


def test_invalid_duplicate_options_are_refused_without_reading_etcd() -> None:
    for options, words in (
        ({"id": ""}, "1 to 200 characters"),
        ({"id": 7}, "1 to 200 characters"),
        ({"id": "@x"}, "starts with @"),
        ({"id": "é" * 200}, "at most 255"),
        ({"one_off": True, "id": "x"}, "a one-off has no id"),
        ({"one_off": True, "policy": "join"}, "a one-off has no id"),
        ({"one_off": "yes"}, "one_off must be True or False"),
        ({"policy": "merge"}, "join, refuse, replace, combine, not 'merge'"),
        ({"policy": "follow"}, "combine, not 'follow'"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            wanted(**options)  # type: ignore[arg-type]
