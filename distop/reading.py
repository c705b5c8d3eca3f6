"""Lists of records, in which one that cannot be read takes nothing else with it: it is left out, and that is said."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

from distop.core.records import read
from distop.errors import UnreadableRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from distop.core.txn import KeyValue
    from distop.store.client import EtcdClient

log = logging.getLogger("distop.client")

T = TypeVar("T")

_told: WeakKeyDictionary[EtcdClient, set[str]] = WeakKeyDictionary()
"""What was said of each connection: a list that is read again and again says it once."""


def left_out(etcd: EtcdClient, error: UnreadableRecord) -> None:
    """Say, once for each connection, that something is left out because a record cannot be read."""
    said = _told.setdefault(etcd, set())
    if str(error) not in said:
        said.add(str(error))
        log.warning("%s; it is left out", error)


def readable(etcd: EtcdClient, decode: Callable[[bytes], T], found: Iterable[KeyValue]) -> list[tuple[KeyValue, T]]:
    """The records that can be read, each with its key."""
    records = []
    for kv in found:
        try:
            records.append((kv, read(decode, kv)))
        except UnreadableRecord as error:
            left_out(etcd, error)
    return records
