"""Which etcd and which namespace this is: the cluster's id and revision, and the namespace's id.

Which etcd this is: the id of its cluster, and how far it had come when it was last heard of.

A cluster that is another one, or whose revision went back, is noticed at its next answer and never used again (F18).

The id of a namespace, which names its folders in shared directories (docs/contract.md, "Files").

It is random and stands in etcd. The id of the etcd cluster would not do: etcd computes it from the token and the URLs
of the first members, so that two clusters which are set up alike have the same one.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from distop.clock import uuid
from distop.errors import ClusterChanged, NotFound
from distop.protocol.record_reading import read, space_of
from distop.protocol.txn import Put, Txn, absent

if TYPE_CHECKING:
    from distop.protocol.keys import Keys
    from distop.store._proto import rpc_pb2 as rpc
    from distop.store.client import EtcdClient


log = logging.getLogger("distop.store")

OTHER = "it was replaced, and nothing known of it holds any more; start this process anew if that is meant"
BACK = (
    "it was restored from an older snapshot, and nothing known of it holds any more; start this process anew once it "
    "is clear what was lost"
)


class Identity:
    """What is known of one cluster; it may outlive the client that learned it, and be given to the next.

    ``cluster_id`` and ``revision``: as remembered, 0 where nothing is. A revision that is lower than the one last seen
    is fine: it notices less, and is never wrong. ``other`` and ``back`` end the sentence for a cluster that is another
    one, and for one that went back: what is to be done.
    """

    def __init__(self, cluster_id: int = 0, revision: int = 0, *, other: str = OTHER, back: str = BACK) -> None:
        self.cluster_id = cluster_id
        self.revision = revision
        self._other = other
        self._back = back
        self._changed: ClusterChanged | None = None

    def check(self) -> None:
        """Raise ClusterChanged if it was noticed before."""
        if self._changed is not None:
            raise self._changed

    def see(self, header: rpc.ResponseHeader, where: str, *, linearizable_after: int = 0) -> None:
        """Learn from the header of an answer of the etcd at ``where``. Raises ClusterChanged, then and from then on.

        ``linearizable_after``: the highest revision seen before the request was sent; a linearizable answer of the
        same store is not older.
        """
        self.check()
        if header.cluster_id and header.cluster_id != self.cluster_id:
            if self.cluster_id:
                former = f"(id {header.cluster_id:x}, it was {self.cluster_id:x})"
                self._fail_closed(f"the etcd behind {where} is another cluster than before {former}: {self._other}")
            self.cluster_id = header.cluster_id
        if header.revision < linearizable_after:
            went = f"went back from revision {linearizable_after} to {header.revision}"
            self._fail_closed(f"the etcd behind {where} {went}: {self._back}")
        self.revision = max(self.revision, header.revision)

    def _fail_closed(self, what: str) -> None:
        self._changed = ClusterChanged(what)
        log.error("%s", what)
        raise self._changed


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
