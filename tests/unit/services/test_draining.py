"""The request to drain: guarded by its record alone, and in one watched range with nodes and gates."""

from __future__ import annotations

import asyncio
from typing import Any

from distop.decide.view import ClusterView
from distop.protocol import keys as K
from distop.protocol.executor_nodes import Drain, NodeState, node_state, put_drain
from distop.protocol.keys import Keys
from distop.protocol.records import Node
from distop.protocol.revisioned import Change
from distop.services.draining import drain
from distop.testing import ModelStore
from tests.support.world import World
from tests.unit.support.modelclient import ModelClient
from tests.unit.support.virtualtime import in_virtual_time, now


def test_a_late_copy_of_a_request_does_not_come_back_after_it_was_undone() -> None:
    store, keys = ModelStore(), Keys()
    asked = put_drain(keys, "ann", 0, Drain(True))
    assert store.apply(asked).succeeded
    undone = put_drain(keys, "ann", store.mod(keys.drain("ann")), Drain(False))
    assert store.apply(undone).succeeded
    assert not store.apply(asked).succeeded
    assert not store.apply(undone).succeeded
    assert not Drain.decode(store.get(keys.drain("ann")).value).drain


def test_one_range_contains_nodes_drains_gates_and_pending_keys() -> None:
    for keys in (Keys(), Keys("prod")):
        first, last = keys.family(K.NODE)[0], keys.family(K.PENDING)[1]
        assert first <= keys.drain("a~z") < keys.family(K.OPEN)[0] < last
        assert not keys.drain("x").startswith(keys.family(K.NODE)[0])
        assert keys.parse(keys.drain("a.b")).id == "a.b"


def test_a_drained_node_is_alive_but_not_capable() -> None:
    store, keys = ModelStore(), Keys()
    view = ClusterView(keys)
    for incarnation in ("a", "b"):
        node = Node(f"ex-{incarnation}", "h", 1, ("noop",))
        view.apply([Change(store_kv(store, keys.node(incarnation), node.encode()))])
    view.apply([Change(store_kv(store, keys.drain("ex-a"), Drain(True).encode()))])
    assert (view.capable("noop"), view.live("a")) == (["b"], True)
    view.apply([Change(store_kv(store, keys.drain("ex-a"), Drain(False).encode()))])
    assert view.capable("noop") == ["a", "b"]
    view.apply([Change(store_kv(store, keys.drain("ex-a"), Drain(True).encode()))])
    view.replace([K.NODE_DRAIN], [])
    assert view.capable("noop") == ["a", "b"]


def store_kv(store: ModelStore, key: str, value: bytes):
    from distop.protocol.txn import Put, Txn

    store.apply(Txn((), (Put(key, value),)))
    return store.get(key)


def test_a_node_reports_its_drain_state() -> None:
    assert node_state(False, True) is NodeState.ACTIVE
    assert node_state(True, True) is NodeState.DRAINING
    assert node_state(True, False) is NodeState.DRAINED
    node = Node("e", "h", 1, (), state=NodeState.DRAINED)
    assert Node.decode(node.encode()) == node
    assert Node.decode(b'{"executor":"e"}').state is NodeState.ACTIVE


def test_waiting_for_a_drain_polls_after_a_short_pause() -> None:
    async def main() -> None:
        world, client = World(), ModelClient()
        client.store = world.store
        world.join("a")
        asyncio.get_running_loop().call_later(5.0, world.die, "a")
        etcd: Any = client
        assert await drain(etcd, world.keys, "ex-a", wait=True) is NodeState.DRAINED
        assert 5.0 <= now() <= 6.0
        assert len(client.requests) < 1_000

    in_virtual_time(main)
