"""Which operation a request of the caller's has started is one look at a key, whatever else there is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from distop.decide.due_operations import ended_waiting
from distop.errors import EtcdRejected, InvalidArgument, OutcomeUnknown
from distop.protocol import operation_finish
from distop.protocol import operation_transitions as t
from distop.protocol import pending_operations as w
from distop.protocol.behavior_declaration import Rules
from distop.protocol.identity import MADE
from distop.protocol.keys import MAX_COMPONENT_BYTES, Keys
from distop.protocol.records import Cancel, Node, OperationRef, Spec, State
from distop.protocol.txn import MAX_OPERATIONS, Delete, Get, Txn, TxnResult, operations
from distop.services.submission.idempotency import find_earlier
from distop.services.submission.start_options import StartOptions
from distop.services.submission.start_request import Request, request
from distop.services.submission.submit import submit
from distop.testing import ModelStore
from tests.support.history_age import age_model_history
from tests.support.world import World
from tests.unit.support.model_submission import KEYS, TABLE, Etcd, noop, run

LONG = "é" * 200


def asked(request_id: str | None, arg: bytes = b"{}") -> Request:
    return request("noop", TABLE, arg, StartOptions(request_id=request_id, delay=3_600.0), "me")


async def end(etcd: Etcd, ref: OperationRef, *, void: bool = False) -> None:
    """It is cancelled, and cleaned up."""
    spec = Spec.decode(etcd.value(KEYS.of(ref, "spec")) or b"")
    why = Cancel("user")
    history = ended_waiting(ref, spec, State.CANCELLED, "2013-01-01T00:00:00.000Z", why, void=void)
    etcd.put(KEYS.node("n1"), Node("ex", "host", 1, ("noop",)).encode())
    etcd.put(KEYS.coordinator(TABLE, "noop"), b"n1")
    mod = etcd.store.mod(KEYS.of(ref, "state"))
    assert etcd.store.apply(w.end_waiting(KEYS, ref, mod, history, why)).succeeded
    gone = [Delete(KEYS.of(ref, name)) for name in ("arg", "spec", "state", "cancel")]
    assert etcd.store.apply(Txn((), (*gone, Delete(KEYS.pending(ref))))).succeeded


def forget(etcd: Etcd, ref: OperationRef, request_id: str) -> None:
    """Its history record is too old."""
    old = [(ref, etcd.store.mod(KEYS.history(ref)), request_id)]
    assert etcd.store.apply(operation_finish.forget(KEYS, old, age_model_history(etcd.store, KEYS))).succeeded


def test_a_record_and_its_request_id_are_kept_while_its_operation_still_has_keys() -> None:
    """Its cleanup may be late, because the coordinator's watch lost an event: seed 1511019 of the simulator."""
    world = World()
    world.run_operation(1)  # executors and a coordinator
    ref = world.next_ref()
    world.do(world.start(ref))
    world.do(world.plan(ref, 0))
    world.do(world.decide(ref))
    world.do(world.finish(ref))
    old = [(ref, world.store.mod(world.keys.history(ref)), f"request-{ref}")]
    forgotten = operation_finish.forget(world.keys, old, age_model_history(world.store, world.keys))
    world.store.apply(forgotten)
    assert world.store.get(world.keys.history(ref))
    world.do(world.end(ref))
    world.store.apply(forgotten)
    assert not world.store.get(world.keys.history(ref))


def named(etcd: Etcd) -> dict[str, str]:
    return {kv.key: kv.value.decode() for kv in etcd.store.range(*KEYS.family("distOpRequest"))}


@pytest.mark.parametrize("request_id", ["r", "nightly/2013-01-01 18:00", LONG, "sha256:x", f"{MADE}mine"])
def test_a_request_starts_one_operation_while_its_records_exist(request_id: str) -> None:
    async def work(etcd: Etcd) -> None:
        first = await submit(etcd, KEYS, asked(request_id))  # type: ignore[arg-type]
        assert not first.earlier
        for key, value in named(etcd).items():
            assert value == str(first.ref)
            assert len(key.rpartition(".")[2]) <= MAX_COMPONENT_BYTES
            assert KEYS.parse(key).type == "noop"
        assert len(named(etcd)) == (not request_id.startswith(MADE)), "one that was made here is looked for"
        again = await submit(etcd, KEYS, asked(request_id))  # type: ignore[arg-type]
        assert (again.ref, again.earlier) == (first.ref, True)
        with pytest.raises(InvalidArgument, match="with another argument"):
            await submit(etcd, KEYS, asked(request_id, b'{"x":1}'))  # type: ignore[arg-type]
        await end(etcd, first.ref)
        again = await submit(etcd, KEYS, asked(request_id))  # type: ignore[arg-type]
        assert (again.ref, again.earlier) == (first.ref, True)
        forget(etcd, first.ref, request_id)
        assert named(etcd) == {}
        anew = await submit(etcd, KEYS, asked(request_id))  # type: ignore[arg-type]
        assert (anew.ref.instance, anew.earlier) == (2, False)

    run(work)


def test_pending_operations_do_not_slow_requests_down() -> None:
    """The specs of all that is active were read for each start with a request id, a hundred at once."""

    async def work(etcd: Etcd) -> None:
        for _ in range(10):
            await etcd.client.start_operations([noop(delay=3_600.0) for _ in range(31)])
        counts = []
        for request_id in ("one", "two", "two"):
            etcd.requests.clear()
            await submit(etcd, KEYS, asked(request_id))  # type: ignore[arg-type]
            counts.append(len(etcd.requests))
        assert max(counts) <= 5
        assert counts[2] <= counts[1]

    run(work)


def test_a_request_with_a_generated_id_writes_no_key() -> None:
    async def work(etcd: Etcd) -> None:
        await submit(etcd, KEYS, asked(None))  # type: ignore[arg-type]
        await etcd.client.start_operations([noop(), noop()])
        assert named(etcd) == {}

    run(work)


def test_a_generated_id_with_an_unknown_outcome_is_found_without_a_key() -> None:
    async def work(etcd: Etcd) -> None:
        def lost(txn: Txn) -> TxnResult:
            etcd.store.apply(txn)
            raise OutcomeUnknown("no answer")

        await submit(etcd, KEYS, asked(None))  # type: ignore[arg-type]
        etcd.fates.append(lost)
        wanted = asked(None)
        with pytest.raises(OutcomeUnknown, match=wanted.request_id):
            await submit(etcd, KEYS, wanted)  # type: ignore[arg-type]
        again = await submit(etcd, KEYS, asked(wanted.request_id))  # type: ignore[arg-type]
        assert (again.ref.instance, again.earlier) == (2, True)
        await end(etcd, again.ref)
        again = await submit(etcd, KEYS, asked(wanted.request_id))  # type: ignore[arg-type]
        assert (again.ref.instance, again.earlier) == (2, True)

    run(work)


@pytest.mark.parametrize("delays", range(8))
def test_concurrent_starts_of_one_request_start_one_operation(delays: int) -> None:
    async def work(etcd: Etcd) -> None:
        async def later() -> Any:
            for _ in range(delays):
                await asyncio.sleep(0)
            return await submit(etcd, KEYS, asked("r"))  # type: ignore[arg-type]

        one, two = await asyncio.gather(submit(etcd, KEYS, asked("r")), later())  # type: ignore[arg-type]
        assert one.ref == two.ref
        assert len(etcd.operations()) == 1

    run(work)


@pytest.mark.malformed
def test_one_transaction_cannot_start_a_request_twice() -> None:
    """They would write the same key: what would start both is refused, not noticed afterwards."""
    spec = Spec("r", "2013-01-01T00:00:00.000Z", "me", Rules())
    new = [t.NewOperation(OperationRef(TABLE, "noop", "", n), spec, b"{}", named=True) for n in (1, 2)]
    with pytest.raises(EtcdRejected, match="twice"):
        ModelStore().apply(t.starts(KEYS, t.Counters({}, 0, 1, 0), new))


def test_the_request_of_a_given_up_graph_can_be_started_again() -> None:
    """And when its record is forgotten, the key of the next one stays."""

    async def work(etcd: Etcd) -> None:
        first = await submit(etcd, KEYS, asked("r"))  # type: ignore[arg-type]
        await end(etcd, first.ref, void=True)
        second = await submit(etcd, KEYS, asked("r"))  # type: ignore[arg-type]
        assert (second.ref.instance, second.earlier) == (2, False)
        forget(etcd, first.ref, "r")
        assert list(named(etcd).values()) == [str(second.ref)]
        assert await find_earlier(etcd, KEYS, [asked("r")]) == [second.ref]  # type: ignore[arg-type]

    async def main() -> None:
        await work(Etcd())  # the audit knows that no graph was given up here

    asyncio.run(main())


def test_the_largest_starts_with_request_keys_fit_into_a_transaction() -> None:
    async def work(etcd: Etcd) -> None:
        ops = await etcd.client.start_operations([noop(delay=60.0) for _ in range(31)], request_id="g")
        assert len(ops) == 31
        assert all(operations(txn) <= MAX_OPERATIONS for txn in etcd.committed)
        assert len(named(etcd)) == 31
        again = await etcd.client.start_operations([noop(delay=60.0) for _ in range(31)], request_id="g")
        assert [op.ref for op in again] == [op.ref for op in ops]

    run(work)


def test_a_request_id_is_unique_for_a_type_on_a_table() -> None:
    keys = Keys("ns")
    found = {keys.request(*place, "r") for place in (("t", "a"), ("t", "b"), ("u", "a"))}
    assert len(found) == 3
    assert Get(keys.request("t", "a", "r")).key == "ns/distOpRequest.t.a.r"
