"""The client's part of draining executors: request, undo, and wait until an executor is empty."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from distop.clock import time
from distop.errors import NotFound, WaitTimeout
from distop.protocol.caller_values import seconds, text
from distop.protocol.executor_nodes import Drain, NodeState, put_drain
from distop.protocol.json_codec import rfc3339
from distop.protocol.record_reading import read
from distop.protocol.texts import did_you_mean, shown
from distop.protocol.txn import Get
from distop.services.inspection.status import live_nodes
from distop.services.submission.start_request import acting
from distop.store.connection_settings import WRITE_LIMIT

if TYPE_CHECKING:
    from distop.protocol.keys import Keys
    from distop.protocol.txn import KeyValue
    from distop.store.client import EtcdClient

_LOOK = 0.1
"""Seconds between two checks whether an executor is empty."""


async def drain(
    etcd: EtcdClient, keys: Keys, executor: str, *, wait: bool = False, timeout: float | None = None
) -> NodeState:
    """Let an executor release its jobs, and claim nothing until :func:`undo`. Idempotent.

    ``wait``: wait until it is empty, or not alive, at most ``timeout`` seconds. Returns the state: draining or drained.
    Raises NotFound if no such executor is alive or drained, InvalidArgument, OutcomeUnknown, WaitTimeout.
    """
    if timeout is not None:
        seconds(timeout, "the timeout")
    await _ask(etcd, keys, executor)
    try:
        async with asyncio.timeout(timeout):
            while True:
                drained = (await _known(etcd, keys)).get(executor, NodeState.DRAINED) is NodeState.DRAINED
                if drained or not wait:
                    return NodeState.DRAINED if drained else NodeState.DRAINING
                await asyncio.sleep(_LOOK)
    except TimeoutError:
        raise WaitTimeout(f"{executor} is not empty after {timeout:g} s; it continues draining") from None


async def _ask(etcd: EtcdClient, keys: Keys, executor: str) -> None:
    key = keys.drain(text(executor, "the id of an executor"))
    while True:
        seen, known = (await etcd.read(Get(key)))[0].kv, await _known(etcd, keys)
        if seen is not None and read(Drain.decode, seen).drain:
            return
        if executor not in known:
            alive = did_you_mean(executor, sorted(known), "alive")
            raise NotFound(f"there is no executor {shown(executor)}{alive}; see `distop nodes`")
        if await _put(etcd, keys, executor, seen, True):
            return


async def undo(etcd: EtcdClient, keys: Keys, executor: str) -> bool:
    """Let an executor work again; returns whether it was drained. Raises NotFound, OutcomeUnknown."""
    key = keys.drain(text(executor, "the id of an executor"))
    undone = False
    while True:
        seen = (await etcd.read(Get(key)))[0].kv
        if seen is None or not read(Drain.decode, seen).drain:
            if seen is None and not undone and executor not in await _known(etcd, keys):
                raise NotFound(f"there is no executor {shown(executor)}; see `distop nodes`")
            return undone
        if await _put(etcd, keys, executor, seen, False):
            return True
        undone = True  # by an earlier copy of ours, or by another client with the same effect


async def _known(etcd: EtcdClient, keys: Keys) -> dict[str, NodeState]:
    """The live executors with their states; for two incarnations of one executor the busier state."""
    found: dict[str, NodeState] = {}
    order = list(NodeState)
    for node in (await live_nodes(etcd, keys)).values():
        before = found.get(node.executor, node.state)
        found[node.executor] = min(before, node.state, key=order.index)
    return found


async def _put(etcd: EtcdClient, keys: Keys, executor: str, seen: KeyValue | None, wanted: bool) -> bool:
    before, mod = (read(Drain.decode, seen), seen.mod_revision) if seen is not None else (Drain(False), 0)
    record = before.then(wanted, rfc3339(time.time()), acting(etcd))
    return (await etcd.commit(put_drain(keys, executor, mod, record), deadline=WRITE_LIMIT)).succeeded
