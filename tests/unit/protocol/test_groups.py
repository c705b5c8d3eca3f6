"""Transactions that start, or finish, several operations: what single ones would have written, all or none, and no
guard of any of them is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from distop.invariants.checker import check
from distop.protocol import job_transitions, rerun_record
from distop.protocol import operation_finish as f
from distop.protocol import operation_transitions as t
from distop.protocol import pending_operations as w
from distop.protocol.dependencies import Edge
from distop.protocol.jobs import JobState
from distop.protocol.json_codec import dumps
from distop.protocol.operation_options import Options
from distop.protocol.records import History, OperationRef, State
from distop.protocol.state_tables import Stage
from distop.protocol.txn import MAX_OPERATIONS, Compare, Delete, KeyValue, Put, Txn, operations
from tests.support.world import TABLE, TIME, TYPE, World, planned


def refs(*numbers: int) -> list[OperationRef]:
    return [OperationRef(TABLE, TYPE, "", n) for n in numbers]


def without(txn: Txn, *dropped: Compare) -> Txn:
    return replace(txn, compares=tuple(one for one in txn.compares if one not in dropped))


def contents(world: World) -> dict[str, bytes]:
    return {kv.key: kv.value for kv in world.store.listing()}


# --------------------------------------------------------------------- starts


def test_grouped_starts_equal_single_starts() -> None:
    together, apart = World(), World()
    together.do(together.starts(5))
    for _ in range(5):
        apart.do(apart.start(apart.next_ref()))
    assert contents(together) == contents(apart)
    assert together.store.revision == 2
    assert not check(together.keys, together.store.history)
    assert together.next_ref().instance == 6


def test_refused_starts_never_apply_later() -> None:
    world = World()
    late = world.starts(3)
    world.do(world.start(world.next_ref()))
    assert not world.store.apply(late).succeeded
    again = world.starts(3)
    world.do(again)
    for txn in (late, again):
        refused = world.store.apply(txn)
        assert not refused.succeeded
    found = t.found_instead(refused)
    assert [one.history for one in found] == [None] * 3
    assert [one.spec.key for one in found if one.spec] == [world.keys.of(ref, "spec") for ref in refs(2, 3, 4)]


@pytest.mark.parametrize("broken", range(4))
def test_each_guard_refuses_a_group_of_starts_on_its_own(broken: int) -> None:
    """runOps, nextInstanceId, and that each of the two objects is free."""
    world = World(one_at_a_time=True)
    world.do(world.starts(1, ["z"]))
    txn = world.starts(2, ["a", "b"])
    keys = world.keys
    key, value = (
        (keys.run_ops(TABLE), dumps({TYPE: 1})),
        (keys.next_instance(TABLE, TYPE), b"2"),
        (keys.current(TABLE, TYPE, "a"), b"1"),
        (keys.current(TABLE, TYPE, "b"), b"1"),
    )[broken]
    assert len(txn.compares) == 4
    world.tamper(Put(key, value))
    before = world.store.listing()
    refused = world.store.apply(txn)
    assert not refused.succeeded
    assert world.store.listing() == before
    held = [one.current is not None for one in t.found_instead(refused)]
    assert held == [broken == 2, broken == 3]
    assert world.store.apply(without(txn, txn.compares[broken])).succeeded, "nothing else would have"


def test_starts_without_consecutive_instances_raise_an_error() -> None:
    world = World()
    seen, spec = world.counters(), world.spec(world.next_ref())
    for wrong in (refs(1, 3), refs(2, 1), refs(2), [*refs(1), OperationRef(TABLE, "other", "", 2)]):
        with pytest.raises(ValueError, match="the next instance is 1"):
            t.starts(world.keys, seen, [t.NewOperation(ref, spec, b"{}") for ref in wrong])
    world.one_at_a_time = True
    with pytest.raises(ValueError, match="one at a time"):
        world.starts(2, ["a", "a"])


@pytest.mark.parametrize(("objects", "brings_plan", "flat"), [(False, False, 31), (True, False, 25), (False, True, 21)])
def test_the_largest_group_of_starts_fits_into_a_transaction(objects: bool, brings_plan: bool, flat: int) -> None:
    world = World(one_at_a_time=objects)
    new = [
        t.NewOperation(ref, world.spec(ref), b"{}", planned(1) if brings_plan else None)
        for ref in (OperationRef(TABLE, TYPE, f"o{n}" if objects else "", n) for n in range(1, 100))
    ]
    for count, nested in ((flat, False), (flat + 1, True)):
        txn = t.starts(world.keys, world.counters(), new[:count])
        assert operations(txn) <= MAX_OPERATIONS
        assert any(isinstance(op, Txn) for op in txn.success) is nested, "in parcels where one list is too short"
    assert t.fitting_starts(world.keys, new) == t.STARTS_PER_TXN
    txn = t.starts(world.keys, world.counters(), new[: t.STARTS_PER_TXN])
    assert operations(txn) <= MAX_OPERATIONS
    world.do(txn)
    assert len(world.view().operations) == t.STARTS_PER_TXN
    refused = world.store.apply(txn)
    assert not refused.succeeded
    assert [one.spec.key for one in t.found_instead(refused) if one.spec] == [
        world.keys.of(one.ref, "spec") for one in new[: t.STARTS_PER_TXN]
    ]
    assert not check(world.keys, world.store.history)


def test_the_largest_group_of_starts_fits_into_a_request() -> None:
    world = World()
    new = [t.NewOperation(ref, world.spec(ref), b'"' + b"x" * 400_000 + b'"') for ref in refs(*range(1, 6))]
    assert t.fitting_starts(world.keys, new) == 2
    huge = [replace(new[0], arg=b'"' + b"x" * 2 * t.START_BYTES_PER_TXN + b'"'), *new[1:]]
    assert t.fitting_starts(world.keys, huge) == 1, "one at least"


# ------------------------------------------------------------------- finishes


def running(count: int, *, decided: bool = True, one_at_a_time: bool = False) -> tuple[World, list[OperationRef]]:
    """So many operations whose jobs have ended."""
    world = World(one_at_a_time=one_at_a_time)
    world.join("a")
    world.do(world.starts(count, [f"o{n}" for n in range(count)] if one_at_a_time else ()))
    world.do(world.elect("a"))
    ops = sorted(world.view().operations)
    for ref in ops:
        world.do(world.plan(ref, 1))
        world.do(world.claim(ref, "a", [0]))
        world.do(world.report(ref, 0, JobState.SUCCESS))
        if decided:
            world.do(world.decide(ref))
    return world, ops


@pytest.mark.parametrize("decided", [True, False])
@pytest.mark.parametrize("one_at_a_time", [True, False])
def test_grouped_finishes_equal_single_finishes(decided: bool, one_at_a_time: bool) -> None:
    together, ops = running(4, decided=decided, one_at_a_time=one_at_a_time)
    apart, _ = running(4, decided=decided, one_at_a_time=one_at_a_time)
    txn = together.finish_all(ops)
    together.do(txn)
    for ref in ops:
        apart.do(apart.finish_all([ref]))
    assert contents(together) == contents(apart)
    assert together.store.get(together.keys.run_ops(TABLE)).value == b"{}"
    assert not together.store.apply(txn).succeeded
    for ref in ops:
        together.do(together.end(ref))
    assert not check(together.keys, together.store.history)


def cancelled(world: World, ref: OperationRef) -> None:
    world.do(world.cancel(ref))


def paused(world: World, ref: OperationRef) -> None:
    world.do(world.pause(ref))


def decided_now(world: World, ref: OperationRef) -> None:
    world.do(world.decide(ref))


def decided_anew(world: World, ref: OperationRef) -> None:
    world.do(world.complete_attempt(ref))


def claimed(world: World, ref: OperationRef) -> None:
    world.tamper(Put(world.keys.claim(ref, 0), b'{"executor":"x","incarnation":"x","attempt":2,"failures":0}'))


def recorded(world: World, ref: OperationRef) -> None:
    world.tamper(Put(world.keys.history(ref), world.history(ref).encode()))


def replaced(world: World, ref: OperationRef) -> None:
    world.die("a")
    world.join("b")
    world.do(world.elect("b"))


def another_begins(world: World, ref: OperationRef) -> None:
    world.do(world.start(world.next_ref()))


MOVES: list[tuple[bool, Callable[[World, OperationRef], None], int, bool]] = [
    (False, cancelled, 1, True),
    (False, paused, 1, True),
    (False, decided_now, 1, False),
    (False, claimed, 1, False),
    (True, decided_anew, 1, False),
    (True, recorded, 1, False),
    (False, replaced, 1, False),
    (True, replaced, 1, False),
    (True, another_begins, 1, False),
]
"""With a decision or without one; what happens to the second of three; how many guards it breaks; and whether the
refusal names it."""


@pytest.mark.parametrize(("decided", "happens", "guards", "named"), MOVES)
def test_each_guard_refuses_a_group_of_finishes_on_its_own(
    decided: bool, happens: Callable[[World, OperationRef], None], guards: int, named: bool
) -> None:
    world, ops = running(3, decided=decided)
    txn, seen = world.finish_all(ops), world.counters()
    finals = [world._final(ref, world.mod(ref, "decision")) for ref in ops]
    happens(world, ops[1])
    before = world.store.listing()
    result = world.store.apply(txn)
    assert not result.succeeded
    assert world.store.listing() == before
    refused = f.finish_refused(result, seen.run_ops_mod, finals)
    assert refused.gone == (False, named, False)
    assert refused.moved is (happens is another_begins)
    assert refused.run_ops == world.store.get(world.keys.run_ops(TABLE))
    broken = [one for one in txn.compares if not world.store.apply(Txn((one,))).succeeded]
    assert len(broken) == guards
    assert world.store.apply(without(txn, *broken)).succeeded, "nothing else would have refused it"


def test_a_changed_operation_does_not_prevent_others_from_finishing() -> None:
    world, ops = running(3, decided=False)
    world.do(world.cancel(ops[1]))
    world.do(world.finish_all([ops[0], ops[2]]))
    assert [world.stage(ref) for ref in ops] == [Stage.CLEANING, Stage.CANCELLING, Stage.CLEANING]
    assert not check(world.keys, world.store.history)


def test_operations_of_two_types_are_not_finished_together() -> None:
    world, ops = running(1)
    one = world._final(ops[0], 1)
    with pytest.raises(ValueError, match="several types"):
        f.finish(world.keys, world.election, {}, 0, [one, replace(one, ref=replace(one.ref, type="other"))])


@pytest.mark.parametrize(("decision_mod", "gate_mod", "most"), [(0, 0, 25), (7, 0, 42), (0, 5, 42)])
def test_the_largest_group_of_finishes_fits_into_a_transaction(decision_mod: int, gate_mod: int, most: int) -> None:
    world = World()
    history = History("x", State.SUCCESS, TIME, TIME, 1, 1, 0, None, (), [], "r")
    finals = [f.Final(ref, 5, decision_mod, history, False, gate_mod=gate_mod) for ref in refs(*range(1, 60))]
    count = world.finish_together(finals)
    assert count == most
    fits, larger = (f.finish(world.keys, world.election, {TYPE: 60}, 3, finals[:n]) for n in (count, count + 1))
    assert operations(fits) <= MAX_OPERATIONS < operations(larger)
    world.store.apply(fits)  # the store counts for itself
    large = replace(history, report={"x": "y" * 400_000})
    assert world.finish_together([replace(one, history=large) for one in finals]) == 2
    huge = replace(finals[0], history=replace(large, report="y" * 2_000_000))
    assert world.finish_together([huge, finals[1]]) == 1


# ------------------------------------------------------------------ any of them


def test_operations_finished_together_each_keep_their_rerun_record() -> None:
    world, ops = running(3, decided=False)
    finals = [
        replace(final, kept=rerun_record.writes(world.keys, ref, b"{}", world.own_spec(ref), b"[]"))
        for ref, final in zip(ops, world.finals(ops), strict=True)
    ]
    seen = world.counters()
    world.do(f.finish(world.keys, world.election, seen.run_ops, seen.run_ops_mod, finals))
    names = [{world.keys.parse(kv.key).name for kv in world.store.range(*beside(world, ref))} for ref in ops]
    assert names == [{"arg", "plan", "spec"}] * 3


def beside(world: World, ref: OperationRef) -> tuple[str, str]:
    """The range of the keys beside a history record."""
    key = world.keys.history(ref)
    return f"{key}.", f"{key}/"


def test_operations_that_begin_together_equal_single_begins() -> None:
    """Of two objects, where one of each runs at a time."""
    together, apart = World(one_at_a_time=True), World(one_at_a_time=True)
    for world in (together, apart):
        world.join("a")
        world.do(world.elect("a"))
        for number, obj in enumerate("xyz", 1):
            world.do(world.submit(OperationRef(TABLE, TYPE, obj, number)))
    ops = sorted(together.view().operations)
    begin_of(together, *ops)
    for ref in ops:
        begin_of(apart, ref)
    assert contents(together) == contents(apart)
    assert not check(together.keys, together.store.history)


def begin_of(world: World, *ops: OperationRef) -> None:
    seen = world.counters()
    new = [w.Beginning(ref, world.mod(ref, "state"), one_at_a_time=True) for ref in ops]
    world.do(w.begins(world.keys, world.election, seen.run_ops, seen.run_ops_mod, new))


def after_of(world: World, ref: OperationRef, pred: OperationRef) -> list[KeyValue]:
    """The edges by which one operation waits for another."""
    return [
        kv for kv in world.store.range(*world.keys.edges_range(ref, "after")) if Edge.decode(kv.value).op == str(pred)
    ]


def several() -> tuple[World, list[job_transitions.Guarded], list[job_transitions.Guarded]]:
    """Two writes of each kind that a coordinator, and that an executor, groups."""
    world, ops = running(6, decided=False)
    for ref in ops[2:]:
        world.do(world.submit(world.next_ref(), ref))
    for ref in ops[4:]:
        world.do(world.cancel(ref))
    for ref in ops:
        world.do(world.finish_at_once(ref))
    world.tamper(*(Put(world.keys.permit(ref, 0), b"free") for ref in ops[:2]))
    (gone,) = (kv.key for ref in world.view().operations for kv in after_of(world, ref, ops[5]))
    world.tamper(Delete(gone))  # who waited for it was cancelled, and is gone
    goes_on = world.next_ref()
    world.do(world.start(goes_on))
    world.do(world.plan(goes_on, 6))
    world.do(world.alter(goes_on, Options(max_jobs=6)))
    world.do(world.claim(goes_on, "a", range(6)))
    ends = [*(world.end(ref) for ref in ops[:2]), *(world.signal(ref) for ref in ops[2:])]
    sentences = [
        *(world.report(goes_on, p, JobState.SUCCESS) for p in (0, 1)),
        *(world.wait_again(goes_on, p, failed=True) for p in (2, 3)),
        *(world.checkpoint(goes_on, p, b"1") for p in (4, 5)),
    ]
    return world, [job_transitions.guarded(txn) for txn in ends], [job_transitions.guarded(txn) for txn in sentences]


@pytest.mark.parametrize("first", [0, 2, 4])
@pytest.mark.parametrize("whose", [1, 2], ids=["coordinator", "executor"])
@pytest.mark.parametrize("how", [job_transitions.group, job_transitions.one_by_one], ids=["group", "one_by_one"])
def test_grouped_writes_of_each_kind_equal_single_writes(how: Callable[..., Txn], whose: int, first: int) -> None:
    found, apart = several(), several()[0]
    together, writes = found[0], found[whose]
    writes = [*writes[first:], *writes[:first]]
    together.do(how(writes))
    for one in writes:
        apart.do(job_transitions.alone(one))
    assert contents(together) == contents(apart)


@pytest.mark.parametrize("first", range(0, 6, 2))
@pytest.mark.parametrize("how", [job_transitions.group, job_transitions.one_by_one], ids=["group", "one_by_one"])
def test_a_former_coordinator_writes_none_of_several(how: Callable[..., Txn], first: int) -> None:
    world, writes, _ = several()
    world.do(world.resign())
    world.do(world.elect("a"))
    before = world.store.listing()
    world.store.apply(how([*writes[first:], *writes[:first]]))
    assert world.store.listing() == before


@pytest.mark.parametrize("first", range(2))
def test_an_end_with_an_uninformed_successor_refuses_its_group(first: int) -> None:
    world, (one, other) = running(2, decided=False)
    for ref in (one, other):
        world.do(world.submit(world.next_ref(), ref))
        world.do(world.finish_at_once(ref))
    writes = [job_transitions.guarded(world.signal(one)), job_transitions.guarded(world.end(other))]
    assert not world.store.apply(job_transitions.group([*writes[first:], *writes[:first]])).succeeded
    world.do(job_transitions.alone(writes[0]))


@pytest.mark.parametrize("first", range(3))
def test_an_outdated_checkpoint_refuses_its_group_and_is_refused_alone(first: int) -> None:
    world, _ = running(1, decided=False)
    ref = world.next_ref()
    world.do(world.start(ref))
    world.do(world.plan(ref, 3))
    world.do(world.claim(ref, "a", range(3)))
    txns = [
        world.report(ref, 0, JobState.SUCCESS),
        world.wait_again(ref, 1, failed=True),
        world.checkpoint(ref, 2, b"1"),
    ]
    writes = [job_transitions.guarded(txn) for txn in (*txns[first:], *txns[:first])]
    world.do(world.checkpoint(ref, 2, b"2"))
    before = world.store.listing()
    assert not world.store.apply(job_transitions.group(writes)).succeeded
    assert world.store.listing() == before
    applied = world.do(job_transitions.one_by_one(writes)).responses
    assert [one.succeeded for one in applied] == [txn.label != "progress" for txn in (*txns[first:], *txns[:first])]
    progress = world.store.get(world.keys.job(ref, 2, "progress"))
    assert progress is not None
    assert progress.value == b"2"
