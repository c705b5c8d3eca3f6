"""The start of an operation by a policy, on the model of etcd: what may change between its reads and its commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from distop.protocol import policy as p
from distop.protocol.json_codec import parse_time
from distop.protocol.keys import Keys
from distop.protocol.policy import Evaluation, Policy, PolicyState, PolicyVerdict, SeenPolicy
from distop.protocol.record_reading import read_policy
from distop.protocol.records import Node, TableRecord
from distop.services.submission.policy_start import request_of, start_by_policy
from tests.unit.support.model_submission import TABLE, Etcd, run

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.protocol.records import OperationRef
    from distop.protocol.txn import Txn, TxnResult

KEYS, NAME = Keys(), "nightly"
AT, TRIGGERS = "2013-01-01T00:00:00.000Z", ("every@2013-01-01T00:00:00.000Z",)
POLICY = Policy("noop", "u1", every=60.0, on=("event:loaded",))


def nothing(etcd: Etcd, fence: int) -> None:
    """Nothing happens meanwhile."""


def another_evaluator(etcd: Etcd, fence: int) -> None:
    assert etcd.store.apply(p.resign(KEYS, TABLE, fence)).succeeded
    assert etcd.store.apply(p.elect(KEYS, TABLE, "inc", 0, "")).succeeded


def another_table(etcd: Etcd, fence: int) -> None:
    etcd.put(KEYS.table(TABLE), TableRecord(TABLE, "parquet", "/other").encode())


def an_event(etcd: Etcd, fence: int) -> None:
    txn = p.emit(KEYS, TABLE, p.EmittedEvent("e1", "loaded", "now"), {NAME: seen(etcd)})
    assert etcd.store.apply(txn).succeeded


@pytest.mark.parametrize(
    ("meanwhile", "started"),
    [(nothing, ["t/noop/1"]), (another_evaluator, []), (another_table, []), (an_event, [])],
)
def test_a_policy_starts_only_by_its_evaluator_and_from_what_was_read(
    meanwhile: Callable[[Etcd, int], None], started: list[str]
) -> None:
    async def work(etcd: Etcd) -> None:
        etcd.put(KEYS.node("inc"), Node("ex", "h", 1, ()).encode())
        assert etcd.store.apply(p.elect(KEYS, TABLE, "inc", 0, "")).succeeded
        fence = etcd.store.mod(KEYS.policy_evaluator(TABLE))
        table_mod = etcd.store.mod(KEYS.table(TABLE))
        assert etcd.store.apply(p.set_policies(KEYS, TABLE, {NAME: (POLICY, seen(etcd))}, 0, table_mod)).succeeded

        def record(ref: OperationRef, starts: Txn) -> Txn:
            one = Evaluation(AT, PolicyVerdict.STARTED, "", TRIGGERS, op=str(ref), evaluator="inc")
            after = PolicyState(every_at=parse_time(AT), op=str(ref)).and_then(one)
            return p.start(KEYS, TABLE, NAME, seen(etcd), after, fence, starts)

        async def commit(txn: Txn) -> TxnResult:
            meanwhile(etcd, fence)
            return etcd.store.apply(txn)

        wanted = request_of(TABLE, NAME, POLICY, p.request_id("u1", TRIGGERS, seen(etcd).state_mod))
        found = await start_by_policy(etcd, KEYS, wanted, record, commit)  # type: ignore[arg-type]
        assert ([str(found)] if found else []) == etcd.operations() == started
        assert [seen(etcd).state.op] == (started or [""])
        if started:
            assert await start_by_policy(etcd, KEYS, wanted, record, commit) is None  # type: ignore[arg-type]
            assert etcd.operations() == started, "the same request starts no second operation"

    run(work)


def seen(etcd: Etcd) -> SeenPolicy:
    return read_policy(*(etcd.store.get(get.key) for get in p.policy_reads(KEYS, TABLE, NAME)))
