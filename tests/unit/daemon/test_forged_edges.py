"""Forged edges: no coordinator writes keys of another table because of them."""

from __future__ import annotations

import pytest

from distop.protocol import pending_operations as w
from distop.protocol.dependencies import Edge
from distop.protocol.identity import edge_id
from distop.protocol.records import OperationRef, State
from distop.protocol.txn import Put, Txn
from tests.support.world import TYPE, World

VICTIM = OperationRef("victims", TYPE, "", 7)
SUCCESSOR = OperationRef("victims", TYPE, "", 8)


def ended() -> tuple[World, OperationRef]:
    world = World()
    world.join("a")
    world.do(world.elect("a"))
    ref = world.next_ref()
    world.do(world.start(ref))
    world.do(world.plan(ref, 0))
    return world, ref


def put(world: World, key: str, edge: Edge) -> None:
    world.do(Txn((), (Put(key, edge.encode()),), (), "forged"))


@pytest.mark.parametrize("on", ["success", "end"])
@pytest.mark.parametrize("state", [State.SUCCESS, State.FAILED])
def test_a_forged_edge_does_not_end_the_wait_of_an_operation_on_another_table(on: str, state: State) -> None:
    world, ref = ended()
    keys = world.keys
    edge = edge_id(VICTIM, SUCCESSOR)
    waits = keys.edge(SUCCESSOR, "after", edge)
    put(world, waits, Edge(str(VICTIM)))
    before = world.store.mod(waits)
    put(world, keys.edge(ref, "next", edge), Edge(str(SUCCESSOR), on))
    world.do(world.finish_at_once(ref))
    view = world.op(ref)
    signal = w.signal(keys, ref, world.election, view.state_mod, state, view.next)
    assert {op.key for op in signal.success} == {keys.edge(ref, "next", edge)}  # type: ignore[union-attr]
    assert world.do(signal).succeeded
    assert world.store.mod(waits) == before
    assert not world.op(ref).next


def test_an_edge_that_names_no_operation_does_not_block_the_end() -> None:
    world, ref = ended()
    put(world, world.keys.edge(ref, "next", "0" * 20), Edge("no operation"))
    world.do(world.finish_at_once(ref))
    assert world.do(world.signal(ref)).succeeded
    assert not world.op(ref).next


def test_an_edge_that_both_operations_name_is_followed_to_another_table() -> None:
    world, ref = ended()
    keys, edge = world.keys, edge_id(ref, SUCCESSOR)
    for of, name, other in ((SUCCESSOR, "after", ref), (ref, "next", SUCCESSOR)):
        put(world, keys.edge(of, name, edge), Edge(str(other)))
    world.do(world.finish_at_once(ref))
    assert world.do(world.signal(ref)).succeeded
    assert not world.store.mod(keys.edge(SUCCESSOR, "after", edge))
