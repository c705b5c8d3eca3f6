"""A proxy in front of etcd that records all requests, also refused ones, which etcd's history lacks."""

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
"""Methods that change no keys. A transaction may change none, either."""


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request and its arrival on the clock of the deadlines, CLOCK_BOOTTIME."""

    at: float
    method: str
    request: bytes

    @property
    def grants(self) -> bool:
        return self.method == wire.GRANT.path

    @property
    def writes(self) -> bool:
        """Whether the request may change a key. Unknown methods count as changing one."""
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
    """``requests``: all requests in order, each recorded before it is passed on. ``replaced``: the number of tokens
    requested after a token was refused.
    """

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.requests: list[RecordedRequest] = []
        self.replaced = 0
        self._refused = False

    def on_request(self, method: str, request: bytes) -> None:
        self.requests.append(RecordedRequest(boottime(), method, request))
        if method == wire.AUTHENTICATE.path:
            self.replaced += self._refused
            self._refused = False

    def on_error(self, method: str, details: str) -> None:
        self._refused = self._refused or "invalid auth token" in details

    def writes_until_grant(self, moment: float) -> list[RecordedRequest]:
        """Requests that may change a key, from ``moment`` until the next grant. AssertionError if there is no grant."""
        later = [request for request in self.requests if request.at >= moment]
        grant = next((n for n, request in enumerate(later) if request.grants), None)
        assert grant is not None, "no new session was requested"
        return [request for request in later[:grant] if request.writes]


def formatted(requests: Iterable[RecordedRequest]) -> str:
    """The requests as text for an error message."""
    return "\n".join(str(request) for request in requests)
