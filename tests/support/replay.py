"""etcd's own history, read back from the first revision, to be checked against the invariants."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from distop.core import keys as K
from distop.core.invariants import check
from distop.core.keys import Keys
from distop.core.txn import Put, Txn
from distop.core.view import Change
from distop.store.client import EtcdClient
from distop.store.config import EtcdConfig
from distop.store.watch import WatchStream, decode_response

if TYPE_CHECKING:
    from distop.core.model import OperationRef

History = list[tuple[int, tuple[Change, ...]]]


async def read_history(endpoint: str, namespace: str = "") -> History:
    """All revisions so far, each with its changes; the etcd must not have been compacted."""
    prefix = f"{namespace}/" if namespace else ""
    async with EtcdClient(EtcdConfig((endpoint,))) as client:
        # A key that is none of distop's ends the history, so that deletions at its very end are read too.
        end = (await client.commit(Txn((), (Put(f"{prefix}distOpRead", b""),)))).revision
        stream = WatchStream(client, f"{prefix}distOp", f"{prefix}distOq", 1)
        await stream.open(5.0)
        history: dict[int, list[Change]] = {}
        seen = 0
        while seen < end:
            message = await asyncio.wait_for(stream.read(), 20)
            assert message is not None, "the stream ended early"
            response = decode_response(message)
            assert not response.compact_revision, "this etcd was compacted: its history is not whole"
            for event in response.events:
                seen = event.kv.mod_revision
                history.setdefault(seen, []).append(Change(event.kv, event.deleted))
        stream.cut()
    return [(revision, tuple(changes)) for revision, changes in sorted(history.items())]


def violations(endpoint: str) -> list[str]:
    """What the history of this etcd breaks, with its story; empty when all invariants hold."""
    found = check(Keys(), asyncio.run(read_history(endpoint)))
    return [f"{v}\n  " + "\n  ".join(v.story) for v in found]


class Written:
    """What was ever written of one operation's jobs."""

    def __init__(self, endpoint: str, ref: OperationRef) -> None:
        keys = Keys()
        self.states: dict[int, list[str]] = {}
        self.outcomes: dict[int, list[str]] = {}
        self.claims: dict[int, list[str]] = {}
        for _, changes in asyncio.run(read_history(endpoint)):
            for change in changes:
                if change.deleted or not change.kv.key.startswith(("distOp.", "distOpClaim.")):
                    continue
                key = keys.parse(change.kv.key)
                if key.ref != ref or key.partition < 0:
                    continue
                kind = {"state": self.states, "outcome": self.outcomes}.get(key.name)
                kind = self.claims if key.family == K.CLAIM else kind
                if kind is not None:
                    kind.setdefault(key.partition, []).append(change.kv.value.decode())
