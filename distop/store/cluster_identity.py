"""The identity of an etcd cluster (its id and the highest revision seen), and the id of a namespace.

If the cluster id changes or the revision goes back, the next answer shows it, and the cluster is not used again (F18).

A namespace's id is the name of its folders in shared directories (docs/contract.md, "Files"). It is random and stored
in etcd. The etcd cluster id is not unique enough: etcd computes it from the token and the URLs of the first members, so
two clusters with the same configuration have the same id.
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

OTHER = "etcd was replaced, so this process's state is no longer valid; restart this process if that is intended"
BACK = (
    "etcd was restored from an older snapshot, so this process's state is no longer valid; find out what was lost, "
    "then restart this process"
)


class Identity:
    """The known identity of one cluster; it may outlive a client and be passed to the next one.

    ``cluster_id`` and ``revision``: the remembered values, 0 for unknown. A remembered revision below the last seen
    one is safe: it detects less, and gives no false alarm. ``other`` and ``back`` end the error text for a different
    cluster and for a revision that went back; they say what to do.
    """

    def __init__(self, cluster_id: int = 0, revision: int = 0, *, other: str = OTHER, back: str = BACK) -> None:
        self.cluster_id = cluster_id
        self.revision = revision
        self._other = other
        self._back = back
        self._changed: ClusterChanged | None = None

    def check(self) -> None:
        """Raises ClusterChanged if a change was detected before."""
        if self._changed is not None:
            raise self._changed

    def see(self, header: rpc.ResponseHeader, where: str, *, linearizable_after: int = 0) -> None:
        """Check and remember the header of an answer of the etcd at ``where``.

        Raises ClusterChanged on a change, and at each later call. ``linearizable_after``: the highest revision seen
        before the request was sent; a linearizable answer of the same store is not older.
        """
        self.check()
        if header.cluster_id and header.cluster_id != self.cluster_id:
            if self.cluster_id:
                ids = f"(id {header.cluster_id:x}, before: {self.cluster_id:x})"
                self._fail_closed(f"the etcd at {where} is another cluster than before {ids}: {self._other}")
            self.cluster_id = header.cluster_id
        if header.revision < linearizable_after:
            change = f"went back from revision {linearizable_after} to {header.revision}"
            self._fail_closed(f"the etcd at {where} {change}: {self._back}")
        self.revision = max(self.revision, header.revision)

    def _fail_closed(self, message: str) -> None:
        self._changed = ClusterChanged(message)
        log.error("%s", message)
        raise self._changed


async def ensure_space_id(etcd: EtcdClient, keys: Keys) -> str:
    """The namespace's id; written if it does not exist. Raises UnreadableRecord, and the errors of the client."""
    key = keys.space()
    while (found := await etcd.get(key)) is None:
        await etcd.commit(Txn((absent(key),), (Put(key, uuid.uuid4().hex.encode()),), (), "space"))
    return read(space_of, found)


async def read_space_id(etcd: EtcdClient, keys: Keys) -> str:
    """The namespace's id. Raises NotFound if it does not exist, UnreadableRecord, and the errors of the client."""
    found = await etcd.get(keys.space())
    if found is None:
        raise NotFound(
            f"the key {keys.space()} is missing, which names the folder of results: start an executor, which writes it"
        )
    return read(space_of, found)
