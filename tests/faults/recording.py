"""A server in front of etcd that writes down what it is asked: also what etcd refuses, which no history shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from distop.store import transport as wire
from distop.store._proto import rpc_pb2 as rpc
from distop.worker.guardian import boottime
from tests.support.grpc_forwarder import Forwarder

if TYPE_CHECKING:
    from collections.abc import Iterable

HARMLESS = {
    method.path
    for method in (
        *(wire.RANGE, wire.WATCH, wire.KEEP_ALIVE, wire.TIME_TO_LIVE, wire.GRANT),
        *(wire.STATUS, wire.ALARM, wire.MEMBERS, wire.AUTHENTICATE),
    )
}
"""What changes no key, whatever it says; a transaction may be harmless, too."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, and when it arrived, on the clock of all deadlines."""

    at: float
    method: str
    request: bytes

    @property
    def grants(self) -> bool:
        return self.method == wire.GRANT.path

    @property
    def writes(self) -> bool:
        """Whether a key may change by it. What is not known here may change one."""
        if self.method == wire.TXN.path:
            return _changes(rpc.TxnRequest.FromString(self.request))
        return self.method not in HARMLESS

    def __str__(self) -> str:
        text = str(rpc.TxnRequest.FromString(self.request)) if self.method == wire.TXN.path else repr(self.request)
        return f"{self.at:.3f} {self.method}\n{text}"


def _changes(txn: rpc.TxnRequest) -> bool:
    return any(_writes(part) for part in (*txn.success, *txn.failure))


def _writes(part: rpc.RequestOp) -> bool:
    kind = part.WhichOneof("request")
    return _changes(part.request_txn) if kind == "request_txn" else kind != "request_range"


class Recorder(Forwarder):
    """``requests``: all that arrived, in order, each written down before it is passed on. ``replaced``: how often a
    token was asked for after one had been refused.
    """

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.requests: list[Asked] = []
        self.replaced = 0
        self._refused = False

    def on_request(self, method: str, request: bytes) -> None:
        self.requests.append(Asked(boottime(), method, request))
        if method == wire.AUTHENTICATE.path:
            self.replaced += self._refused
            self._refused = False

    def on_error(self, method: str, details: str) -> None:
        self._refused = self._refused or "invalid auth token" in details

    def writes_until_grant(self, moment: float) -> list[Asked]:
        """What may change a key, from a moment on until a lease is asked for. AssertionError where none is."""
        later = [asked for asked in self.requests if asked.at >= moment]
        grant = next((n for n, asked in enumerate(later) if asked.grants), None)
        assert grant is not None, "no new session was asked for"
        return [asked for asked in later[:grant] if asked.writes]


def told(requests: Iterable[Asked]) -> str:
    """Requests for somebody to read."""
    return "\n".join(str(asked) for asked in requests)
