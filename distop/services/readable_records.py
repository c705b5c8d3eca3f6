"""Records that are read in spite of what cannot be read beside them.

Lists of records, in which one that cannot be read takes nothing else with it: it is left out, and that is said.

Whether executors can read what they need of an open operation: it waits for ever where they cannot.
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


class Legible:
    """Of one operation: what was read once and could be, is not read again until it is written again."""

    def __init__(self) -> None:
        self._read: tuple[int, ...] = ()
        """Mod revisions."""

    async def why_not(self, etcd: EtcdClient, keys: Keys, ref: OperationRef) -> str:
        """Why this release cannot read its argument or its plan; nothing where it can, or they are gone."""
        first, after = keys.chunks_range(ref)
        arg, plan = (answer.kv for answer in await etcd.read(Get(keys.of(ref, "arg")), Get(keys.of(ref, "plan"))))
        listed = await etcd.list(first, after, keys_only=True)
        if arg is None or plan is None:
            return ""
        mods = (arg.mod_revision, plan.mod_revision, *(kv.mod_revision for kv in listed.kvs))
        if mods == self._read:
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
        self._read = mods
        return ""
