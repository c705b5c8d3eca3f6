"""Who did what: to operations, to tables and to executors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from distop.protocol import keys as K
from distop.protocol.json_codec import parse_time
from distop.protocol.user_actions import Actions, of_operation
from distop.services.inspection import filters
from distop.services.inspection.history_pages import newest_first
from distop.services.inspection.status import status
from distop.services.readable_records import readable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef
    from distop.store.client import EtcdClient


async def of_registry(etcd: EtcdClient, keys: Keys, table: str | None = None) -> list[dict[str, Any]]:
    """The actions on tables and executors, or on one ``table``, newest first.

    Raises InvalidArgument.
    """
    if table is not None:
        kv = await etcd.get(keys.table_actions(filters.table_of(table) or ""))
        return newest_first(readable(etcd, Actions.decode, [kv] if kv is not None else []), keys)
    tables = await etcd.list(*keys.family(K.TABLE_ACTIONS))
    drains = await etcd.list(*keys.family(K.NODE_DRAIN))
    return newest_first(readable(etcd, Actions.decode, [*tables.kvs, *drains.kvs]), keys)


def within(actions: Iterable[dict[str, Any]], since: float | None, until: float | None) -> list[dict[str, Any]]:
    """The actions from ``since`` on and before ``until``."""
    first, after = since or 0.0, until if until is not None else math.inf
    return [one for one in actions if first <= parse_time(one["time"]) < after]


async def listed(
    etcd: EtcdClient,
    keys: Keys,
    records: Iterable[Mapping[str, Any]],
    others: Iterable[dict[str, Any]] = (),
    op: OperationRef | None = None,
) -> list[dict[str, Any]]:
    """The actions on these operations, and ``others``, newest first.

    ``records``: their history records. ``op``: an operation that was asked for by name, and may have no record yet.
    """
    found = list(records)
    if op is not None and not found:
        found = [(await status(etcd, keys, op)).to_json()]
    own = [one for record in found for one in reversed(of_operation(record))]
    return sorted([*own, *others], key=lambda one: str(one["time"]), reverse=True)
