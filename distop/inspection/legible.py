"""Whether executors can read what they need of an open operation: it waits for ever where they cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.core.codec import loads
from distop.core.plan import CHUNK_PAGE, Plan, begin_with
from distop.core.records import read
from distop.core.txn import Get
from distop.errors import UnreadableRecord

if TYPE_CHECKING:
    from distop.core.keys import Keys
    from distop.core.model import OperationRef
    from distop.store.client import EtcdClient


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
