"""Collects all data about one operation and its partitions for its HTML page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.clock import time
from distop.protocol.behavior_declaration import Declaration
from distop.protocol.frozen import frozen
from distop.protocol.txn import Get
from distop.services.inspection.partitions import look
from distop.services.inspection.status import live_nodes, status
from distop.services.readable_records import readable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distop.protocol.keys import Keys
    from distop.protocol.records import Node, OperationRef
    from distop.services.inspection.partitions import Account
    from distop.services.operation_results import OperationStatus
    from distop.store.client import EtcdClient


@frozen
class Gathered:
    """The data as read at ``time``. ``nodes``: the live executors, by incarnation."""

    ref: OperationRef
    status: OperationStatus
    account: Account
    nodes: Mapping[str, Node]
    declaration: Declaration | None
    time: float


async def gather(etcd: EtcdClient, keys: Keys, ref: OperationRef) -> Gathered:
    """Collect the data of an operation. Raises NotFound, UnreadableRecord."""
    while True:
        seen = await status(etcd, keys, ref)
        account = await look(etcd, keys, ref)
        if account.ended == seen.ended:
            break  # else it ended in between, which happens once
    nodes = await live_nodes(etcd, keys)
    (published,) = await etcd.read(Get(keys.behavior(ref.type)))
    declared = readable(etcd, Declaration.decode, published.kvs)
    return Gathered(ref, seen, account, nodes, declared[0][1] if declared else None, time.time())
