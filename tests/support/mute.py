"""A server in front of etcd that passes on everything but what watches tell."""

from __future__ import annotations

from distop.store import transport as wire
from distop.store._proto import rpc_pb2 as rpc
from tests.support.forwarding import Forwarder


class MuteWatches(Forwarder):
    """Watches are created here, and then nothing comes: no event, and no answer to how far the server is.
    ``swallowed``: the events that clients were not told of.
    """

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.swallowed = 0

    def answers(self, method: str, answer: bytes) -> bool:
        if method != wire.WATCH.path:
            return True
        message = rpc.WatchResponse.FromString(answer)
        self.swallowed += len(message.events)
        return bool(message.created or message.canceled)
