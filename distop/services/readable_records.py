"""Decodes lists of records, skipping and logging unreadable records.

Also checks that executors can read the argument and the plan of an open operation, which would otherwise wait for ever.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

from distop.errors import UnreadableRecord
from distop.protocol.json_codec import loads
from distop.protocol.plan import CHUNK_PAGE, Plan, begin_with
from distop.protocol.record_reading import read
from distop.protocol.txn import Get

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef
    from distop.protocol.txn import KeyValue
    from distop.store.client import EtcdClient


log = logging.getLogger("distop.client")

T = TypeVar("T")

_logged: WeakKeyDictionary[EtcdClient, set[str]] = WeakKeyDictionary()
"""Connection → logged errors, so that a repeated read logs each error once."""


def left_out(etcd: EtcdClient, error: UnreadableRecord) -> None:
    """Log a skipped unreadable record, once per connection."""
    logged = _logged.setdefault(etcd, set())
    if str(error) not in logged:
        logged.add(str(error))
        log.warning("Skipping an unreadable record: %s", error)


def readable(etcd: EtcdClient, decode: Callable[[bytes], T], found: Iterable[KeyValue]) -> list[tuple[KeyValue, T]]:
    """The readable records with their keys; unreadable ones are skipped and logged."""
    records = []
    for kv in found:
        try:
            records.append((kv, read(decode, kv)))
        except UnreadableRecord as error:
            left_out(etcd, error)
    return records


class ReadabilityCheck:
    """The check of one operation. Records that were readable are not read again until they change."""

    def __init__(self) -> None:
        self._readable: tuple[int, ...] = ()
        """The mod revisions of the records that were readable."""

    async def problem(self, etcd: EtcdClient, keys: Keys, ref: OperationRef) -> str:
        """Why this release cannot read the argument or the plan; "" if it can, or if they are deleted."""
        first, after = keys.chunks_range(ref)
        arg, plan = (answer.kv for answer in await etcd.read(Get(keys.of(ref, "arg")), Get(keys.of(ref, "plan"))))
        listed = await etcd.list(first, after, keys_only=True)
        if arg is None or plan is None:
            return ""
        mods = (arg.mod_revision, plan.mod_revision, *(kv.mod_revision for kv in listed.kvs))
        if mods == self._readable:
            return ""
        try:
            read(loads, arg)
            decoded = read(Plan.decode, plan)
            chunks = [kv.value for kv in (await etcd.list(first, after, page=CHUNK_PAGE)).kvs]
            begin_with(decoded, chunks[: decoded.chunks])
        except UnreadableRecord as error:
            return str(error)
        except ValueError as error:
            return f"the plan {error}"
        self._readable = mods
        return ""
