"""A plan that removes its table's record: all or nothing, once, and never a record that was registered later."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from distop.protocol import operation_transitions as t
from distop.protocol import table_registry
from distop.protocol.behavior_declaration import Declaration
from distop.protocol.etcd_roles import submitter
from distop.protocol.keys import Keys
from distop.protocol.plan import Plan
from distop.protocol.records import OperationRef, Spec, TableRecord
from distop.protocol.txn import Delete, Put, Txn
from distop.protocol.user_actions import Action, Actions
from distop.testing import ModelStore
from distop.worker.daemon_side.requests import WorkerError
from distop.worker.daemon_side.table_verification import TableRecordCheck

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

KEYS, REF = Keys(), OperationRef("t", "purge", "", 1)
RECORD = TableRecord("t", "parquet", "/data/t")
DONE = Actions((Action("2026-01-01T00:00:00.000Z", "remove_table", str(REF)),))


def planned() -> tuple[ModelStore, Txn]:
    """A store with an operation that is being planned, and the transaction that writes its plan."""
    store = ModelStore()
    coordinator = KEYS.coordinator("t", "purge")
    for key, value in (
        (KEYS.table("t"), RECORD.encode()),
        (KEYS.run_ops("t"), b'{"purge":1}'),
        (coordinator, b"inc"),
        (KEYS.of(REF, "state"), b"running"),
        (KEYS.pending(REF), b"planning"),
    ):
        store.apply(Txn((), (Put(key, value),)))
    election = t.election_guard(KEYS, "t", "purge", store.mod(coordinator))
    record, run_ops = store.get(KEYS.table("t")), store.get(KEYS.run_ops("t"))
    assert record is not None
    assert run_ops is not None
    removal = table_registry.removal(KEYS, REF, record, run_ops, DONE)
    plan = Plan(0, "", "", 0, removes_table=True)
    return store, t.write_plan(KEYS, REF, election, plan, [], removal=removal)


def test_the_record_goes_with_the_plan_and_its_copy_stays() -> None:
    store, txn = planned()
    before = store.get(KEYS.run_ops("t"))
    assert store.apply(txn).succeeded
    assert store.get(KEYS.table("t")) is None
    found = {key: store.get(key) for key in (KEYS.removed_table(REF), KEYS.of(REF, "plan"), KEYS.table_actions("t"))}
    copy, plan, actions = found.values()
    assert copy is not None
    assert plan is not None
    assert actions is not None
    assert (copy.value, Plan.decode(plan.value).removes_table) == (RECORD.encode(), True)
    assert Actions.decode(actions.value) == DONE
    after = store.get(KEYS.run_ops("t"))
    assert before is not None
    assert after is not None
    assert (after.value, after.mod_revision > before.mod_revision) == (before.value, True)


@pytest.mark.parametrize("change", ["record", "record again", "runOps", "no record", "plan"])
def test_a_plan_changes_nothing_if_the_record_or_the_running_operations_have_changed(change: str) -> None:
    store, txn = planned()
    writes = {
        "record": (Put(KEYS.table("t"), TableRecord("t", "parquet", "/other").encode()),),
        "record again": (Put(KEYS.table("t"), RECORD.encode()),),
        "runOps": (Put(KEYS.run_ops("t"), b'{"purge":1,"apply":1}'),),
        "no record": (Delete(KEYS.table("t")),),
        "plan": (Put(KEYS.of(REF, "plan"), Plan(0, "", "", 0).encode()),),
    }
    store.apply(Txn((), writes[change]))
    before = store.revision
    assert not store.apply(txn).succeeded
    assert store.revision == before


def test_a_late_copy_of_the_plan_does_not_remove_a_record_that_is_registered_later() -> None:
    store, txn = planned()
    assert store.apply(txn).succeeded
    store.apply(Txn((), (Put(KEYS.table("t"), RECORD.encode()),)))
    assert not store.apply(txn).succeeded
    assert store.get(KEYS.table("t")) is not None


def test_submitters_cannot_write_the_copy() -> None:
    assert not submitter(KEYS, "t").may_write(KEYS.removed_table(REF))


def test_the_removed_record_counts_as_registered_for_its_operation_alone() -> None:
    """A submitter may write the operation's own copy, and anybody may register another table under the name."""
    registered: dict[str, TableRecord | None] = {"t": None}

    async def find(names: Collection[str]) -> Mapping[str, TableRecord | None]:
        return {name: registered.get(name) for name in names}

    async def find_removed(op: str) -> TableRecord | None:
        return RECORD if op == str(REF) else None

    check = TableRecordCheck(find, find_removed)
    forged = TableRecord("t", "parquet", "/etc")
    for there in (None, forged):
        registered["t"] = there
        asyncio.run(check.check(str(REF), RECORD.to_json()))
        for op, copy in ((str(REF), TableRecord("t", "parquet", "/var")), ("t/purge/2", RECORD)):
            with pytest.raises(WorkerError, match="changed or removed"):
                asyncio.run(check.check(op, copy.to_json()))


def test_a_type_that_removes_its_table_excludes_all_others() -> None:
    own = Declaration("purge", conflicts_with=("*",), removes_table=True)
    assert Declaration.decode(own.encode()) == own
    assert table_registry.excluded_by("purge", ("*",), {"noop": (), "purge": ("*",)}) == ["noop", "purge"]
    assert table_registry.excluded_by("noop", (), {"purge": ("*",), "apply": ("compact",)}) == ["purge"]


def test_a_spec_keeps_the_revision_of_the_record() -> None:
    spec = Spec("r", "", "me", Declaration("purge").rules(), RECORD, table_revision=7)
    assert Spec.decode(spec.encode()) == spec
