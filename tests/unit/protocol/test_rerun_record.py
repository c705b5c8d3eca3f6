"""The rerun record: written and deleted with the history record, read for a rerun, and bounded in size."""

from __future__ import annotations

from distop.invariants.checker import check
from distop.protocol import operation_finish, rerun_record
from distop.protocol.jobs import JobState
from distop.protocol.records import Spec
from distop.protocol.table_registry import refs
from distop.protocol.txn import GetResult
from tests.support.history_age import age_model_history
from tests.support.world import World


def failed_life() -> tuple[World, list[str]]:
    """Finish an operation with a failed and an unfinished job; returns the keys of its history."""
    world = World()
    ref = world.next_ref()
    world.join("a")
    world.do(world.start(ref))
    world.do(world.elect("a"))
    world.do(world.plan(ref, 3))
    world.do(world.claim(ref, "a", [0, 1]))
    world.do(world.report(ref, 0, JobState.SUCCESS))
    world.do(world.report(ref, 1, JobState.FAILED))
    world.do(world.cancel(ref))
    rows = rerun_record.encode_rows([(1, "p=1"), (2, "p=2")], {1})
    assert rows is not None
    spec = Spec.decode(world.store.get(world.keys.of(ref, "spec")).value)
    world.kept = rerun_record.writes(world.keys, ref, b'{"x":1}', spec, rows)
    world.do(world.finish_at_once(ref))
    world.do(world.end(ref))
    return world, [kv.key for kv in world.store.listing() if kv.key.startswith("distOpHistory.")]


def test_a_rerun_record_is_written_with_the_history_and_read_back() -> None:
    world, keys = failed_life()
    root = "distOpHistory.sales%2Eorders.noop.1"
    assert keys == [root, f"{root}.arg", f"{root}.plan.000000", f"{root}.spec"]
    assert not check(world.keys, world.store.history)
    listing = [kv for kv in world.store.listing() if kv.key in keys]
    (ref,) = refs(world.keys, listing)
    found = [GetResult(tuple(kv for kv in listing if kv.key == get.key)) for get in rerun_record.reads(world.keys, ref)]
    read = rerun_record.decode(found)
    assert read is not None
    assert (read.arg, read.failed, read.unfinished) == (b'{"x":1}', ("p=1",), ("p=2",))
    assert (read.spec.request_id, read.spec.partitions) == (f"request-{ref}", None)
    assert rerun_record.decode([found[0], GetResult(()), found[2]]) is None


def test_a_rerun_record_is_deleted_with_the_history() -> None:
    world, keys = failed_life()
    (ref,) = refs(world.keys, [kv for kv in world.store.listing() if kv.key in keys])
    old = [(ref, world.store.mod(world.keys.history(ref)), f"request-{ref}")]
    world.store.apply(operation_finish.forget(world.keys, old, age_model_history(world.store, world.keys)))
    assert not [kv.key for kv in world.store.listing() if kv.key.startswith(("distOpHistory.", "distOpRequest."))]
    assert not check(world.keys, world.store.history)


def test_several_rerun_records_are_deleted_together() -> None:
    world = World()
    old = [
        (ref, world.store.mod(world.keys.history(ref)), f"request-{ref}")
        for ref in (world.run_operation(1), world.run_operation(1))
    ]
    world.store.apply(operation_finish.forget(world.keys, old, age_model_history(world.store, world.keys)))
    assert not [kv.key for kv in world.store.listing() if kv.key.startswith(("distOpHistory.", "distOpRequest."))]
    assert not check(world.keys, world.store.history)


def test_names_that_no_start_accepts_are_not_kept() -> None:
    assert rerun_record.encode_rows([(n, "x" * 100) for n in range(6_000)], set()) is None
    assert rerun_record.encode_rows([(n, "x" * 100) for n in range(5_000)], set()) is not None
    assert rerun_record.encode_rows([(0, "no such \udcff")], {0}) is not None, (
        "a name that is no text must not stop a finish"
    )
