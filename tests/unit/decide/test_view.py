"""A view is what the store holds: folding events one by one equals folding the listing, at every revision."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distop.decide.view import ENDING_PHASES, MAX_KEPT_OUTCOME, ClusterView, TypeView
from distop.protocol import keys as K
from distop.protocol import pending_operations as w
from distop.protocol.behavior_declaration import Retry, Rules
from distop.protocol.dependencies import Edge
from distop.protocol.jobs import Claim, JobState
from distop.protocol.operation_options import Options
from distop.protocol.records import OperationRef, Phase, Spec, State
from distop.protocol.revisioned import Change, Seen
from distop.protocol.state_tables import Stage
from distop.protocol.txn import KeyValue
from tests.support.random_events import random_event, world_with_node
from tests.support.world import TABLE, TYPE, World

if TYPE_CHECKING:
    from collections.abc import Iterable

FAMILIES = (K.NODE, K.OPEN, K.PENDING, K.COORDINATOR)


def content(view: TypeView) -> dict[Any, Any]:
    out = {}
    for ref, op in view.operations.items():
        fields = {
            name: getattr(op, name) for name in ("state", "state_mod", "spec", "plan", "planning", "cancel", "decision")
        }
        claims = {p: (seen.value, seen.mod) for p, seen in op.claims.items()}
        out[ref] = (fields, dict(op.chunks), op.success, set(op.failed), claims)
    return out


def cluster_content(view: ClusterView) -> tuple[Any, ...]:
    return ({n: asdict(v) for n, v in view.nodes.items()}, view.gates, view.pending, view.elections)


def concerns_type(world: World, changes: Iterable[Change]) -> list[Change]:
    ranges = (world.keys.type_range(TABLE, TYPE), world.keys.type_claims(TABLE, TYPE))
    return [c for c in changes if any(start <= c.kv.key < end for start, end in ranges)]


def concerns_cluster(world: World, changes: Iterable[Change]) -> list[Change]:
    ranges = [world.keys.family(family) for family in FAMILIES]
    return [c for c in changes if any(start <= c.kv.key < end for start, end in ranges)]


@settings(max_examples=30)
@given(st.integers(0, 2**32))
def test_folding_events_equals_folding_the_listing(seed: int) -> None:
    world, rng = world_with_node(seed)
    few = rng.choice((0, 3, 100))
    view, cluster = TypeView(world.keys, TABLE, TYPE, few), ClusterView(world.keys)
    seen = 0
    for _ in range(120):
        txn = random_event(world, rng)
        if txn is not None:
            world.store.apply(txn)
        for _, changes in world.store.history[seen:]:
            view.apply(concerns_type(world, changes))
            cluster.apply(concerns_cluster(world, changes))
        seen = len(world.store.history)
        if rng.random() < 0.3:
            assert content(view) == content(world.view())
            assert cluster_content(cluster) == cluster_content(world.cluster())
            outcomes_stand_there(world, view, few)
        if rng.random() < 0.05:  # a watch was lost, and everything is listed again
            view = relisted(world, view)
            cluster.replace(FAMILIES, concerns_cluster(world, (Change(kv) for kv in world.store.listing())))
    assert content(view) == content(world.view())
    assert cluster_content(cluster) == cluster_content(world.cluster())
    assert not view.foreign
    assert not cluster.foreign


def outcomes_stand_there(world: World, view: TypeView, few: int) -> None:
    """What a view keeps of outcomes is what the store holds."""
    for ref, op in view.operations.items():
        assert not op.outcomes or (op.plan is None or op.plan.count <= few)
        for partition, kept in op.outcomes.items():
            kv = world.store.get(world.keys.job(ref, partition, "outcome"))
            assert kv is not None
            assert kv == kept


def relisted(world: World, view: TypeView) -> TypeView:
    view.replace([Change(kv) for kv in world.store.range(*world.keys.type_range(TABLE, TYPE))], claims=False)
    view.replace([Change(kv) for kv in world.store.range(*world.keys.type_claims(TABLE, TYPE))], claims=True)
    return view


def test_a_listing_removes_missing_keys() -> None:
    world = World()
    world.join("a")
    world.do(world.elect("a"))
    ref = world.next_ref()
    world.do(world.start(ref))
    world.do(world.plan(ref, 2))
    world.do(world.claim(ref, "a", [0, 1]))
    view, cluster = world.view(), world.cluster()
    assert cluster.wanted_types() == {(TABLE, TYPE)}
    assert cluster.live("a")
    assert cluster.capable(TYPE) == ["a"]
    assert cluster.capable("other") == []
    for p in (0, 1):
        world.do(world.report(ref, p, JobState.SUCCESS))
    world.do(world.finish_at_once(ref))
    world.do(world.end(ref))
    world.die("a")
    view = relisted(world, view)
    assert view.operations == {}
    cluster.replace(FAMILIES, concerns_cluster(world, (Change(kv) for kv in world.store.listing())))
    assert (cluster.nodes, cluster.gates, cluster.pending) == ({}, {}, {})
    assert not cluster.live("a")


def test_outcomes_of_small_operations_are_kept() -> None:
    world = World()
    world.join("a")
    world.do(world.elect("a"))
    view = TypeView(world.keys, TABLE, TYPE, 2)
    refs = [world.next_ref()]
    world.do(world.start(refs[0]))
    refs.append(world.next_ref())
    world.do(world.start(refs[1]))
    for ref, jobs in zip(refs, (2, 3), strict=True):
        world.do(world.plan(ref, jobs))
        world.do(world.claim(ref, "a", range(jobs)))
        for p in range(jobs):
            world.do(world.report(ref, p, JobState.SUCCESS))
    for _, changes in world.store.history:
        view.apply(concerns_type(world, changes))
    small, large = (view.operations[ref] for ref in refs)
    assert sorted(small.outcomes) == [0, 1]
    outcomes_stand_there(world, view, 2)
    assert large.outcomes == {}
    world.tamper(KVPut(world.keys.job(refs[0], 1, "outcome"), "x" * (MAX_KEPT_OUTCOME + 1)))
    view.apply(concerns_type(world, world.store.history[-1][1]))
    assert sorted(small.outcomes) == [0]
    listed = relisted(world, TypeView(world.keys, TABLE, TYPE, 2))
    assert listed.operations[refs[0]].outcomes == {}  # then they are read when they are wanted
    before = len(world.store.history)
    world.do(world.finish_at_once(refs[0]))
    for _, changes in world.store.history[before:]:
        view.apply(concerns_type(world, changes))
    assert small.outcomes == {}, "nobody asks for them any more"
    assert relisted(world, view).operations[refs[1]].outcomes == {}


def test_stages_follow_the_keys() -> None:
    world = World()
    world.join("a")
    world.do(world.elect("a"))
    ref = world.next_ref()
    stages = [world.stage(ref)]
    for txn in (
        world.start,
        world.plan,
        world.pause,
        world.resume,
        world.cancel,
        world.decide,
        world.finish,
        world.end,
    ):
        world.do(txn(ref))
        stages.append(world.stage(ref))
        op, cluster = world.op(ref), world.cluster()
        assert (ref in cluster.gates) is (op.stage is Stage.OPEN)
        if ref in cluster.pending:
            assert cluster.pending[ref].value == op.stage.value
    assert [str(s) for s in stages] == (
        "absent planning open paused open cancelling completing cleaning absent".split()
    )


def test_the_view_of_a_pending_operation() -> None:
    world = World()
    ref = world.next_ref()
    world.tamper(KVPut(world.keys.of(ref, "state"), State.PENDING), KVPut(world.keys.pending(ref), Phase.WAITING))
    assert world.stage(ref) is Stage.WAITING
    assert world.cluster().pending == {ref: Phase.WAITING}


def KVPut(key: str, word: str) -> Any:
    from distop.protocol.txn import Put

    return Put(key, str(word).encode())


@pytest.mark.parametrize(
    ("suffix", "value"),
    [
        ("state", b"dreaming"),
        ("spec", b"{"),
        ("plan", b"[]"),
        ("plan", b'{"count":1e999}'),
        ("plan", b"[" * 100_000),
        ("decision", b"{}"),
        ("xyz.state", b"success"),
    ],
    ids=["word", "cut off", "list", "infinite", "deep", "empty", "strange"],
)
def test_unreadable_keys_are_reported_and_skipped(suffix: str, value: bytes) -> None:
    world = World()
    world.join("a")
    world.do(world.elect("a"))
    ref = world.next_ref()
    world.do(world.start(ref))
    view = world.view()
    before = content(view)
    key = f"{world.keys.root(ref)}.{suffix}"
    view.apply([Change(KeyValue(key, value, 99))])
    assert set(view.foreign) == {key}
    assert content(view) == before


def test_an_invalid_claim_key_is_reported_and_skipped() -> None:
    world = World()
    ref = world.next_ref()
    world.do(world.start(ref))
    view = world.view()
    key = world.keys.claim(ref, 1)[:-6] + "abc"
    view.apply([Change(KeyValue(key, b"{}", 99))])
    assert set(view.foreign) == {key}


@pytest.mark.parametrize("how", ["deleted", "mended", "listed"])
def test_deleted_unreadable_keys_are_forgotten(how: str) -> None:
    world = World()
    world.join("a")
    ref = world.next_ref()
    world.do(world.start(ref))
    view, cluster = world.view(), world.cluster()
    spec, strange = world.keys.of(ref, "spec"), world.keys.claim(ref, 1)[:-6] + "abc"
    node = world.keys.node("b")
    bad = [Change(KeyValue(key, b"{", 98)) for key in (spec, strange, node)]
    view.apply(bad[:2])
    cluster.apply(bad[2:])
    assert set(view.foreign) | set(cluster.foreign) == {spec, strange, node}
    if how == "listed":
        view.replace((), claims=True)
        assert set(view.foreign) == {spec}
        view.replace((), claims=False)
        cluster.replace((K.NODE,), ())
    elif how == "deleted":
        gone = [Change(KeyValue(key, b"", 99), deleted=True) for key in (spec, strange, node)]
        view.apply(gone[:2])
        cluster.apply(gone[2:])
    else:
        view.apply([Change(KeyValue(strange, b"", 99), deleted=True)])
        good = world.store.get(spec)
        assert good is not None
        view.apply([Change(good)])
        mended = world.store.get(world.keys.node("a"))
        assert mended is not None
        cluster.apply([Change(replace(mended, key=node))])
    assert not view.foreign
    assert not cluster.foreign


def test_unwatched_claims_are_unknown() -> None:
    world = World()
    world.join("a")
    ref = world.next_ref()
    world.do(world.start(ref))
    view = world.view()
    claim, strange = world.keys.claim(ref, 1), world.keys.claim(ref, 1)[:-6] + "abc"
    view.apply([Change(KeyValue(key, Claim("ex", "a", 1, 0).encode(), 98)) for key in (claim, strange)])
    assert view.operations[ref].claims_known
    assert view.foreign
    view.forget_claims()
    assert not view.operations[ref].claims_known
    assert not view.operations[ref].claims
    assert not view.foreign
    view.replace([Change(kv) for kv in world.store.range(*world.keys.type_range(TABLE, TYPE))], claims=False)
    assert not view.operations[ref].claims_known
    view.replace((), claims=True)
    assert view.operations[ref].claims_known


# --------------------------------------------------------------- at rest


def waiting(world: World, number: int, obj: str = "", **spec: Any) -> list[Change]:
    """The records of an operation that waits, as they come."""
    ref = OperationRef(TABLE, TYPE, obj, number)
    due = "2113-01-01T00:00:00.000Z"
    record = Spec(f"r{number}", "2013-01-01T00:00:00.000Z", "me", Rules(), not_before=due, **spec)
    values = {"arg": b"{}", "spec": record.encode(), "state": b"pending"}
    return [Change(KeyValue(world.keys.of(ref, name), value, 7)) for name, value in values.items()]


def test_pending_operations_rest_and_look_unchanged() -> None:
    world, view = World(), None
    kinds: list[dict[str, Any]] = [
        {},
        {"labels": {"team": "a"}},
        {"id": "nightly", "follows": f"{TABLE}/{TYPE}/1", "request_digest": "0f" * 32},
        {"hold": "h", "series": {"interval": 5}, "where": {"zone": "b"}, "partitions": ("p=1",)},
        {"rules": Rules(retry=Retry(attempts=9)), "version": 2, "one_at_a_time": True},
    ]
    view = TypeView(world.keys, TABLE, TYPE)
    specs: dict[OperationRef, Spec] = {}
    for number in range(1, 101):
        kind, obj = kinds[number % len(kinds)], ("", "index 1")[number % 2]
        changes = waiting(world, number, obj) if "rules" in kind else waiting(world, number, obj, **kind)
        ref = OperationRef(TABLE, TYPE, obj, number)
        spec = replace(Spec.decode(changes[1].kv.value), **kind)
        changes[1] = Change(replace(changes[1].kv, value=spec.encode()))
        specs[ref] = spec
        assert view.apply(changes) == {ref}
    assert not view.operations.awake
    assert len(view.operations) == 100
    assert {ref: op.spec for ref, op in view.operations.items()} == specs
    assert all(op.stage is Stage.WAITING and op.state_mod == 7 for op in view.operations.values())
    assert all(view.operations.rests(ref) and ref in view.operations for ref in specs)
    other = OperationRef(TABLE, TYPE, "another", 1)
    assert other not in view.operations
    assert view.operations.get(other) is None


def test_changes_of_a_resting_operation_are_seen() -> None:
    world = World()
    view = TypeView(world.keys, TABLE, TYPE)
    view.apply([*waiting(world, 1), *waiting(world, 2)])
    one, two = (OperationRef(TABLE, TYPE, "", number) for number in (1, 2))
    edge, _ = w.link(world.keys, two, one, "success")
    options = Options(priority=7, max_jobs=3)
    values = {edge.key: edge.value, world.keys.of(one, "options"): options.encode()}
    view.apply([Change(KeyValue(key, value, 8)) for key, value in values.items()])
    assert view.operations.rests(one)
    assert list(view.operations[one].after.values()) == [""]
    assert view.operations[one].altered == Seen(options, 8)
    assert (view.operations.priority(one), view.operations.priority(two)) == (7, 0)
    broken = Edge(str(two), "success", "failed").encode()
    view.apply([Change(KeyValue(edge.key, broken, 9))])
    assert view.operations.rests(one)
    assert list((view.operations[one].broken or {}).values()) == [f"{two} ended as failed"]
    view.apply([Change(KeyValue(edge.key, b"", 10), deleted=True)])
    assert not view.operations[one].after
    assert not view.operations[one].broken
    view.apply([Change(KeyValue(world.keys.of(one, "state"), b"running", 11))])
    assert view.operations.awake.keys() == {one}
    assert (view.operations[one].state, view.operations[one].state_mod) == (State.RUNNING, 11)
    gone = [Change(KeyValue(change.kv.key, b"", 12), deleted=True) for change in waiting(world, 2)]
    assert view.apply(gone) == {two}
    assert list(view.operations) == [one]


def test_a_listing_returns_changed_resting_operations() -> None:
    world = World()
    view = TypeView(world.keys, TABLE, TYPE)
    before = {number: waiting(world, number, labels={"n": str(number % 20)}) for number in range(1, 41)}
    view.apply([change for changes in before.values() for change in changes])
    after = {**before, 3: waiting(world, 3, labels={"n": "x"}), 50: waiting(world, 50)}
    del after[7]
    ref = OperationRef(TABLE, TYPE, "", 9)
    after[9] = [*before[9][:2], Change(KeyValue(world.keys.of(ref, "state"), b"running", 9))]
    listed = view.listing()
    for changes in after.values():  # part by part
        listed.apply(changes)
    assert sorted(ref.instance for ref in view.take(listed)) == [3, 7, 9, 50]
    assert sorted(ref.instance for ref in view.operations) == [*range(1, 7), *range(8, 41), 50]
    again = view.listing()
    again.apply([change for changes in after.values() for change in changes])
    assert view.take(again) == {ref}, "one that does not rest may always have changed"
    assert len(view.operations.resting._templates) == 22
    view.listing().apply(waiting(world, 60, labels={"n": "void"}))  # it was compacted away
    view.take(view.listing())
    assert len(view.operations) == len(view.operations.resting._templates) == 0
    view.apply([change for changes in after.values() for change in changes])
    assert len(view.operations.resting._templates) == 22
    view.replace((), claims=False)
    assert len(view.operations.resting._templates) == 0


def test_two_forged_operations_with_one_number_are_both_seen() -> None:
    world = World()
    view = TypeView(world.keys, TABLE, TYPE)
    view.apply([*waiting(world, 1, "a"), *waiting(world, 1, "b")])
    assert sorted(ref.object for ref in view.operations) == ["a", "b"]
    assert all(op.stage is Stage.WAITING for op in view.operations.values())


def test_a_cluster_view_counts_a_listing_in_parts() -> None:
    world = World()
    cluster = ClusterView(world.keys)
    refs = [OperationRef(TABLE, TYPE, "", number) for number in range(1, 6)]
    cluster.apply([Change(KeyValue(world.keys.pending(ref), b"waiting", 3)) for ref in refs])
    nodes = cluster.nodes
    listed = cluster.listing()
    listed.apply([Change(KeyValue(world.keys.pending(refs[0]), b"cleaning", 4))])
    listed.apply([Change(KeyValue(world.keys.pending(refs[1]), b"waiting", 4))])
    cluster.take((K.NODE, K.OPEN, K.PENDING), listed)
    assert dict(cluster.pending) == {refs[0]: Phase.CLEANING, refs[1]: Phase.WAITING}
    assert cluster.any_in((TABLE, TYPE), ENDING_PHASES)
    assert cluster.wants((TABLE, TYPE))
    assert cluster.wanted_types() == {(TABLE, TYPE)}
    assert cluster.nodes is nodes, "somebody may be using it"
    cluster.apply([Change(KeyValue(world.keys.pending(ref), b"", 5), deleted=True) for ref in refs[:2]])
    assert not cluster.any_in((TABLE, TYPE), ENDING_PHASES)
    assert not cluster.wants((TABLE, TYPE))
    assert cluster.wanted_types() == set()
