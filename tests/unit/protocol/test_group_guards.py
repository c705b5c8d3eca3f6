"""A transaction of several operations or jobs is refused where one of them has changed, be it the first, the last, or
one between; without any change it is applied.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from distop.invariants.checker import check
from distop.protocol import batch_claims, job_transitions, prepared_operations
from distop.protocol import operation_finish as f
from distop.protocol import operation_transitions as t
from distop.protocol import pending_operations as w
from distop.protocol import user_transaction as u
from distop.protocol.dependencies import Edge
from distop.protocol.identity import Takes
from distop.protocol.jobs import Claim, JobState
from distop.protocol.json_codec import word
from distop.protocol.operation_options import Options
from distop.protocol.plan import Plan
from distop.protocol.records import OperationRef, Phase, State
from distop.protocol.schedule import Series
from distop.protocol.txn import Delete, Put, Txn
from distop.testing.model_store import ModelStore
from tests.support.world import TABLE, TYPE, World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

FIRST = Claim("ex-a", "a", 1, 0)


def copied(world: World) -> World:
    """The keys of this moment, without leases, which no transaction here writes with."""
    return replace(world, store=ModelStore.holding(world.store.revision, world.store.listing()))


def each_alone_refuses(world: World, txn: Txn, changes: Iterable[Put | Delete]) -> None:
    for change in changes:
        changed = copied(world)
        changed.tamper(change)
        before = changed.store.listing()
        assert not changed.store.apply(txn).succeeded, change
        assert changed.store.listing() == before
    assert copied(world).store.apply(txn).succeeded


def each_alone_refuses_anew(world: World, build: Callable[[World], Txn], changes: Iterable[Put | Delete]) -> None:
    """The same if the builder had the new revision, but decided from the old value."""
    for change in changes:
        changed = copied(world)
        changed.tamper(change)
        assert not changed.store.apply(build(changed)).succeeded, change
    assert copied(world).store.apply(build(world)).succeeded


def written_again(world: World, refs: Sequence[OperationRef], name: str = "state") -> list[Put]:
    """The same values, with other revisions."""
    found = [(world.keys.of(ref, name), world.store.get(world.keys.of(ref, name))) for ref in refs]
    return [Put(key, kv.value if kv is not None else b"{}") for key, kv in found]


def set_to(world: World, refs: Sequence[OperationRef], state: State) -> list[Put]:
    return [Put(world.keys.of(ref, "state"), word(state)) for ref in refs]


def edges(world: World, refs: Sequence[OperationRef], which: str) -> list[Put]:
    return [Put(world.keys.edge(ref, which, "0" * 20), Edge(str(ref), "end").encode()) for ref in refs]


def claims(world: World, refs: Sequence[OperationRef], partition: int = 0) -> list[Put]:
    return [Put(world.keys.claim(ref, partition), FIRST.encode()) for ref in refs]


def elected() -> World:
    world = World()
    for incarnation in ("a", "b", "c", "d"):
        world.join(incarnation)
    world.do(world.elect("a"))
    return world


def waiting(count: int = 3, *, held: bool = False) -> tuple[World, list[OperationRef]]:
    """Operations that wait for nothing, each of an object of its own."""
    world = elected()
    refs = [OperationRef(TABLE, TYPE, f"o{n}", n) for n in range(1, count + 1)]
    for ref in refs:
        world.do(world.submit(ref, hold=f"h{ref.instance}" if held else ""))
    return world, refs


def opened(count: int = 3, jobs: int = 1) -> tuple[World, list[OperationRef]]:
    world = elected()
    world.do(world.starts(count))
    refs = sorted(world.view().operations)
    for ref in refs:
        world.do(world.plan(ref, jobs))
    return world, refs


def done(*, decided: bool) -> tuple[World, list[OperationRef]]:
    world, refs = opened()
    for ref in refs:
        world.do(world.claim(ref, "a", [0]))
        world.do(world.report(ref, 0, JobState.SUCCESS))
        if decided:
            world.do(world.decide(ref))
    return world, refs


def grouped(txns: Iterable[Txn]) -> Txn:
    return job_transitions.group([job_transitions.guarded(txn) for txn in txns])


# ---------------------------------------------------------- operations that wait


def test_the_guards_of_each_beginning_operation_are_needed() -> None:
    world, refs = waiting(held=True)

    def build(now: World) -> Txn:
        seen = now.counters()
        new = [w.Beginning(ref, now.mod(ref, "state"), True, f"h{ref.instance}") for ref in refs]
        return w.begins(now.keys, now.election, seen.run_ops, seen.run_ops_mod, new)

    each_alone_refuses(
        world,
        build(world),
        [
            *written_again(world, refs),
            *edges(world, refs, "after"),
            *(Put(world.keys.current(TABLE, TYPE, ref.object), b"9") for ref in refs),
            *(Put(world.keys.hold(f"h{ref.instance}"), b"{}") for ref in refs),
        ],
    )
    each_alone_refuses_anew(world, build, set_to(world, refs, State.RUNNING))


def test_the_guards_of_each_pending_operation_that_ends_are_needed() -> None:
    world, refs = waiting(held=True)

    def ends(now: World) -> Txn:
        return grouped(now.end_waiting(ref) for ref in refs)

    def joins(now: World) -> Txn:
        return grouped(now.joined(ref) for ref in refs)

    holds = [Put(world.keys.hold(f"h{ref.instance}"), b"{}") for ref in refs]
    each_alone_refuses(world, ends(world), [*written_again(world, refs), *holds])
    each_alone_refuses(world, joins(world), [*edges(world, refs, "after"), *holds])
    for build in (ends, joins):
        each_alone_refuses_anew(world, build, set_to(world, refs, State.RUNNING))


def test_the_guards_of_each_successor_and_predecessor_of_new_edges_are_needed() -> None:
    world, refs = waiting(5)
    first, second, *preds, above = refs

    def build(now: World) -> Txn:
        seen = {ref: w.SeenState(ref, State.PENDING, now.mod(ref, "state")) for ref in refs}
        links = [(seen[pred], seen[run], "success") for pred in preds for run in (first, second)]
        return w.add_dependencies(now.keys, links, [seen[above]])

    each_alone_refuses(world, build(world), written_again(world, refs))
    each_alone_refuses_anew(world, build, set_to(world, [first, second], State.RUNNING))
    world.do(build(world))
    assert {world.mod(ref, "state") for ref in (first, second)} == {world.store.revision}
    for ref in (first, second):
        found = [Edge.decode(kv.value).op for kv in world.store.range(*world.keys.edges_range(ref, "after"))]
        assert sorted(found) == sorted(map(str, preds))
    assert [len(world.store.range(*world.keys.edges_range(pred, "next"))) for pred in preds] == [2, 2]


@pytest.mark.parametrize("how", ["start", "prepare", "transaction"])
def test_the_guard_of_each_predecessor_of_a_start_is_needed(how: str) -> None:
    world, preds = opened()
    txn = world.submit(world.next_ref(), *preds)
    if how == "prepare":
        terms = prepared_operations.PreparedTerms("x", str(world.next_ref()), "")
        txn = prepared_operations.under_hold(world.keys, txn, terms)
        held = (prepared_operations.hold_id("x"), prepared_operations.receipt_id("x"))
        each_alone_refuses(world, txn, [Put(world.keys.hold(name), b"{}") for name in held])
    if how == "transaction":
        caller = u.CallerTransaction(world.next_ref(), "r", world.counters().next_instance, False, (), (), ())
        txn = u.combined(world.keys, txn, caller)
    each_alone_refuses(world, txn, written_again(world, preds))


def test_the_guards_of_each_replaced_operation_are_needed() -> None:
    world, refs = elected(), []
    for id_ in "xyz":
        refs.append(world.next_ref())
        world.do(world.start_of(id_, waits=True))

    def build(now: World) -> Txn:
        new = [replace(now.new_operation_with_id(id_, skipped=n), waits=True) for n, id_ in enumerate("xyz")]
        return t.starts(now.keys, now.counters(), new)

    ids = [Put(world.keys.unique(TABLE, TYPE, id_), word(str(world.next_ref()))) for id_ in "xyz"]
    each_alone_refuses(world, build(world), [*written_again(world, refs), *ids])
    replaced = [
        (now.takes.holder, now.takes.replaced) for id_ in "xyz" if (now := world.new_operation_with_id(id_)).takes
    ]

    def unseen(now: World) -> Txn:
        """The view of a builder that has not seen their start."""
        takes = [Takes(id_, ref, now.mod(ref, "state"), end) for id_, (ref, end) in zip("xyz", replaced, strict=True)]
        new = [
            replace(world.new_operation_with_id(id_, skipped=n), takes=taken)
            for n, (id_, taken) in enumerate(zip("xyz", takes, strict=True))
        ]
        return t.starts(now.keys, now.counters(), new)

    each_alone_refuses_anew(world, unseen, set_to(world, refs, State.RUNNING))

    first = world.next_ref()
    world.do(build(world))
    for n, (id_, former) in enumerate(zip("xyz", refs, strict=True)):
        cancelled, holder = (world.store.get(key) for key in (world.keys.of(former, "cancel"), ids[n].key))
        assert cancelled is not None, "each is told why it has ended"
        assert holder is not None
        assert holder.value == word(str(replace(first, instance=first.instance + n))), f"the new one has the id {id_}"


@pytest.mark.parametrize("ended", [state for state in State if state.terminal])
def test_an_id_is_not_given_back_to_an_ended_operation(ended: State) -> None:
    world = elected()
    before, ref = world.next_ref(), replace(world.next_ref(), instance=2)
    world.do(world.start_of("x", waits=False))
    world.do(world.start_of("x", waits=True))
    key = world.keys.unique(TABLE, TYPE, "x")
    after = world.keys.edges_range(ref, "after")
    world.tamper(Delete(*after))
    for txn in (world.end_waiting(ref), world.joined(ref)):
        apart = copied(world)
        apart.tamper(Put(world.keys.of(before, "state"), word(ended)))
        apart.do(txn)
        assert apart.store.get(key) is None
    world.do(world.begin(ref))
    world.do(world.plan(ref, 0))
    finish = world.finish_at_once(ref)
    world.tamper(Put(world.keys.of(before, "state"), word(ended)))
    world.do(finish)
    assert world.store.get(key) is None


# -------------------------------------------------------------------------- ends


def test_the_guards_of_each_finishing_operation_are_needed() -> None:
    world, refs = done(decided=True)
    records = [Put(world.keys.history(ref), b"{}") for ref in refs]
    decisions = written_again(world, refs, "decision")
    each_alone_refuses(world, world.finish_all(refs), [*written_again(world, refs), *decisions, *records])
    world, refs = done(decided=False)
    plans = [Delete(world.keys.of(ref, "plan")) for ref in refs]
    changes = [*written_again(world, refs), *decisions, *records, *claims(world, refs), *plans]
    each_alone_refuses(world, world.finish_all(refs), changes)


def test_the_guards_of_each_operation_that_finishes_and_ends_are_needed() -> None:
    world, refs = done(decided=False)
    seen = world.counters()
    finals = [world.final_and_end(ref) for ref in refs]
    txn = f.finish(world.keys, world.election, seen.run_ops, seen.run_ops_mod, finals)
    gates = [kv for ref in refs if (kv := world.store.get(world.keys.gate(ref)))]
    changes = [*(Put(kv.key, kv.value) for kv in gates), *claims(world, refs), *edges(world, refs, "next")]
    each_alone_refuses(world, txn, changes)


@pytest.mark.parametrize("signals", [False, True])
def test_the_guards_of_each_cleaned_operation_are_needed(signals: bool) -> None:
    """``signals``: the first one also signals its successors in this transaction."""
    world, refs = done(decided=True)
    world.do(world.finish_all(refs))
    ends = refs[1:] if signals else refs
    txn = grouped([*(world.signal(ref) for ref in refs if ref not in ends), *(world.end(ref) for ref in ends)])
    pending = [Put(world.keys.pending(ref), word(Phase.COMPLETING)) for ref in refs]
    each_alone_refuses(world, txn, [*pending, *edges(world, ends, "next")])


@pytest.mark.parametrize("how", [job_transitions.group, job_transitions.one_by_one], ids=["group", "one_by_one"])
def test_each_of_several_ends_releases_its_id_unless_the_next_operation_of_the_series_holds_it(
    how: Callable[[Sequence[job_transitions.Guarded]], Txn],
) -> None:
    world, refs = elected(), []
    for id_ in "xyz":
        refs.append(world.next_ref())
        start = world.new_operation_with_id(id_)
        start = replace(start, spec=replace(start.spec, series=Series(60.0).to_json()), waits=False)
        world.do(t.starts(world.keys, world.counters(), [start]))
        world.do(world.plan(refs[-1], 0))
        (final,), seen = world.finals(refs[-1:]), world.counters()
        final = replace(final, history=replace(final.history, series=str(refs[-1])))
        world.do(f.finish(world.keys, world.election, seen.run_ops, seen.run_ops_mod, [final]))
    following = world.next_ref()
    world.do(world.start_of("y", waits=False))
    ends = [
        f.end(world.keys, ref, world.election, world.mod(ref, "state"), id_)
        for id_, ref in zip("xyz", refs, strict=True)
    ]
    world.do(how([job_transitions.guarded(txn) for txn in ends]))
    holders = [world.store.get(world.keys.unique(TABLE, TYPE, id_)) for id_ in "xyz"]
    assert [kv.value if kv is not None else None for kv in holders] == [None, word(str(following)), None]
    assert not check(world.keys, world.store.history)


# -------------------------------------------------------------------------- jobs


def test_the_guard_of_each_chunk_of_a_plan_is_needed() -> None:
    world = elected()
    ref = world.next_ref()
    world.do(world.start(ref))
    for n in range(3):
        world.do(world.chunk(ref, n, b"[]"))
    mods = [world.store.mod(world.keys.chunk(ref, n)) for n in range(3)]
    txn = t.write_plan(world.keys, ref, world.election, Plan(3, "v1", "", 3), mods)
    each_alone_refuses(world, txn, [Put(world.keys.chunk(ref, n), b"[1]") for n in range(3)])


def test_the_guards_of_each_run_of_jobs_in_a_claim_are_needed() -> None:
    world, (ref,) = opened(1, 9)
    gate = world.store.mod(world.keys.gate(ref))
    txn = batch_claims.claim_runs(world.keys, ref, gate, "a", ((0, 2), (3, 5), (6, 9)), FIRST)
    taken = [Put(world.keys.claim(ref, p), FIRST.encode()) for p in (1, 4, 8)]
    ended = [Put(world.keys.job(ref, p, "state"), word(JobState.SUCCESS)) for p in (0, 3, 6)]
    each_alone_refuses(world, txn, [*taken, *ended])


def test_the_guards_of_each_operation_in_a_batch_claim_are_needed() -> None:
    world, refs = opened()
    gates = [kv for ref in refs if (kv := world.store.get(world.keys.gate(ref)))]
    listed = [batch_claims.Untouched(ref, kv.mod_revision) for ref, kv in zip(refs, gates, strict=True)]
    txn = batch_claims.claim_together(world.keys, "a", listed, FIRST)
    ended = [Put(world.keys.job(ref, 0, "state"), word(JobState.SUCCESS)) for ref in refs]
    changes = [*(Put(kv.key, kv.value) for kv in gates), *claims(world, refs), *ended]
    each_alone_refuses(world, txn, changes)


def test_the_guard_of_each_dead_executor_in_a_takeover_is_needed() -> None:
    world, (ref,) = opened(1, 3)
    holders = ("b", "c", "d")
    for p, holder in enumerate(holders):
        world.do(world.claim(ref, holder, [p]))
    nodes = [kv for holder in holders if (kv := world.store.get(world.keys.node(holder)))]
    taken = world.claim(ref, "a", range(3))
    for holder in holders:
        world.die(holder)
    each_alone_refuses(world, taken, [Put(kv.key, kv.value) for kv in nodes])


@pytest.mark.parametrize("lost", [False, True])
def test_the_guard_of_each_overdue_claim_is_needed(lost: bool) -> None:
    """An extended claim counts against the limit again. ``lost``: the holder of the job to claim is dead."""
    world, (ref,) = opened(1, 4)
    for p in range(3):
        world.do(world.own(ref, "w", p))
    if lost:
        world.do(world.claim(ref, "b", [3]))
        world.die("b")
    world.do(world.alter(ref, Options(max_jobs=1)))
    gate, overdue = world.store.mod(world.keys.gate(ref)), [(p, world.fence(ref, p)) for p in range(3)]
    claim = replace(FIRST, attempt=1 + lost, failures=int(lost), permit=0)
    want = job_transitions.Want(3, claim, world.fence(ref, 3), permit_mod=0)
    txn = job_transitions.claim(world.keys, ref, gate, "a", [want], ["b"] if lost else [], overdue=overdue)
    extended = [kv for p in range(3) if (kv := world.store.get(world.keys.claim(ref, p)))]
    each_alone_refuses(world, txn, [Put(kv.key, kv.value) for kv in extended])


@pytest.mark.parametrize("what", ["report", "retry", "progress"])
def test_the_guard_of_each_claim_in_a_group_is_needed(what: str) -> None:
    world, (ref,) = opened(1, 3)
    world.do(world.claim(ref, "a", range(3)))
    for p in range(3):
        world.do(world.checkpoint(ref, p, b"1"))
    built = {
        "report": lambda p: world.report(ref, p, JobState.SUCCESS),
        "retry": lambda p: world.wait_again(ref, p, failed=True),
        "progress": lambda p: world.checkpoint(ref, p, b"2"),
    }
    again = [Put(world.keys.claim(ref, p), FIRST.encode()) for p in range(3)]
    each_alone_refuses(world, grouped(map(built[what], range(3))), again)
    saves = [world.checkpoint(ref, p, b"2") for p in range(3)]
    after = 0 if what == "progress" else 1
    saved = [Put(world.keys.job(ref, p, "progress"), b"3") for p in range(after, 3)]
    each_alone_refuses(world, grouped([*map(built[what], range(after)), *saves[after:]]), saved)
