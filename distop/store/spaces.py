"""The id of a namespace, which names its folders in shared directories (docs/contract.md, "Files").

It is random and stands in etcd. The id of the etcd cluster would not do: etcd computes it from the token and the URLs
of the first members, so that two clusters which are set up alike have the same one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.clock import uuid
from distop.core.records import read, space_of
from distop.core.txn import Put, Txn, absent
from distop.errors import NotFound

if TYPE_CHECKING:
    from distop.core.keys import Keys
    from distop.store.client import EtcdClient


async def made_space(etcd: EtcdClient, keys: Keys) -> str:
    """The id of the namespace, which the first executor writes. Raises UnreadableRecord, and what etcd answers."""
    key = keys.space()
    while (found := await etcd.get(key)) is None:
        await etcd.commit(Txn((absent(key),), (Put(key, uuid.uuid4().hex.encode()),), (), "space"))
    return read(space_of, found)


async def known_space(etcd: EtcdClient, keys: Keys) -> str:
    """The id of the namespace. Raises NotFound where there is none, UnreadableRecord, and what etcd answers."""
    found = await etcd.get(keys.space())
    if found is None:
        raise NotFound(f"the key {keys.space()} is missing, which an executor writes: it names the results' folder")
    return read(space_of, found)
