"""Lists registered tables and published operation types, with their executors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.errors import NotFound, UnknownBehavior
from distop.protocol import keys as K
from distop.protocol.behavior_declaration import Declaration
from distop.protocol.frozen import frozen
from distop.protocol.records import CLUSTER_TABLE, TableRecord
from distop.protocol.texts import did_you_mean
from distop.protocol.txn import Get
from distop.services.inspection.status import live_nodes
from distop.services.nearest_names import unknown_table
from distop.services.readable_records import readable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.protocol.keys import Keys
    from distop.store.client import EtcdClient


@frozen
class Offer:
    """A published operation type, and how many live executors offer it."""

    declaration: Declaration
    executors: int


async def tables(etcd: EtcdClient, keys: Keys) -> list[TableRecord]:
    """The registered tables, by name."""
    listing = await etcd.list(*keys.family(K.TABLE))
    return sorted((record for _, record in readable(etcd, TableRecord.decode, listing.kvs)), key=lambda one: one.name)


async def behaviors(etcd: EtcdClient, keys: Keys) -> list[Declaration]:
    """The operation types that executors have published, by name."""
    listing = await etcd.list(*keys.family(K.BEHAVIOR))
    found = readable(etcd, Declaration.decode, listing.kvs)
    return sorted((declaration for _, declaration in found), key=lambda one: one.type_name)


async def offers(etcd: EtcdClient, keys: Keys) -> list[Offer]:
    """The published operation types, each with its number of live executors."""
    found, nodes = await behaviors(etcd, keys), (await live_nodes(etcd, keys)).values()
    return [Offer(one, sum(one.type_name in node.behaviors for node in nodes)) for one in found]


def offer_of(type_name: str, found: Sequence[Offer]) -> Offer:
    """The offer of a type. Raises UnknownBehavior."""
    for one in found:
        if one.declaration.type_name == type_name:
            return one
    published = [one.declaration.type_name for one in found]
    raise UnknownBehavior(f"there is no behavior {type_name!r}{did_you_mean(type_name, published, 'published')}")


async def check_table_known(etcd: EtcdClient, keys: Keys, table: str | None) -> None:
    """Raises NotFound for a table that is not registered and never had an operation."""
    if table is None or table == CLUSTER_TABLE:
        return
    record, ever = await etcd.read(Get(keys.table(table)), Get(keys.run_ops(table)))
    if record.kv is None and ever.kv is None:
        sentence = await unknown_table(etcd, keys, table)
        raise NotFound(f"{sentence}, and etcd has no record of an operation on it: see `distop table ls`")
