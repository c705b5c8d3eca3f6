"""Reads what is beside an operation: its argument, its table's location, and its neighbours in the graph."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop.errors import Compacted
from distop.protocol.dependencies import Edge
from distop.protocol.frozen import frozen
from distop.protocol.json_codec import loads
from distop.protocol.record_reading import read
from distop.protocol.records import History, Spec
from distop.protocol.txn import Get
from distop.services.readable_records import readable

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef
    from distop.store.client import EtcdClient

MOST = 100
"""Neighbours of each side that are shown."""


@frozen
class OperationLinks:
    """``before`` and ``then``: operations that it waits for, and that wait for it, each with the condition.

    ``gone``: etcd has compacted them.
    """

    argument: Any = None
    location: str = ""
    partitions: tuple[str, ...] | None = None
    before: tuple[Edge, ...] = ()
    then: tuple[Edge, ...] = ()
    gone: bool = False

    def visible(self, may: Callable[[str], bool]) -> OperationLinks:
        """Without the operations that may not be seen."""
        return replace(
            self,
            before=tuple(one for one in self.before if may(one.op)),
            then=tuple(one for one in self.then if may(one.op)),
        )


async def read_links(etcd: EtcdClient, keys: Keys, ref: OperationRef) -> OperationLinks:
    """Read them; of an ended operation at the revision before its history record. Raises UnreadableRecord."""
    (history,) = await etcd.read(Get(keys.history(ref)))
    revision = history.kv.mod_revision - 1 if history.kv is not None else 0
    if history.kv is not None:
        read(History.decode, history.kv)

    async def edges(side: str, at: int) -> tuple[Edge, ...]:
        listing = await etcd.list(*keys.edges_range(ref, side), revision=at)
        return tuple(edge for _, edge in readable(etcd, Edge.decode, listing.kvs))

    try:
        spec, argument = [
            (await etcd.list(key, f"{key}\0", revision=revision)).kvs
            for key in (keys.of(ref, "spec"), keys.of(ref, "arg"))
        ]
        before, then = await edges("after", revision), await edges("next", revision)
    except Compacted:
        return OperationLinks(gone=True)
    if spec:
        with contextlib.suppress(Compacted):  # its edges go when it begins: those of its start are shown, too
            first = await edges("after", spec[0].create_revision)
            before = tuple({one.op: one for one in (*first, *before)}.values())
    known = read(Spec.decode, spec[0]) if spec else None
    return OperationLinks(
        _value(argument[0].value) if argument else None,
        known.table.location if known is not None and known.table is not None else "",
        known.partitions if known is not None else None,
        before[:MOST],
        then[:MOST],
    )


def _value(value: bytes) -> Any:
    try:
        return loads(value)
    except (ValueError, RecursionError):
        return None
