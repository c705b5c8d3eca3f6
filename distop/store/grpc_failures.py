"""What a gRPC failure of etcd means for the request: the error classes of docs/internals/etcd-rules.md.

etcd says the important part in the detail string, so both are looked at. Pure.
"""

from __future__ import annotations

from enum import Enum

from distop.errors import Compacted, EtcdRejected, LeaseNotFound, MalformedRequest, PermissionDenied
from distop.protocol.frozen import frozen


class Fate(Enum):
    """What is known of a request that failed, and so what may be done next."""

    NOT_DONE = "certainly not applied, and a repetition may succeed: back off, repeat"
    TOKEN = "certainly not applied for want of a valid token: fetch one, repeat"
    UNKNOWN = "may have been applied, or may be yet: only the identical guarded transaction tells (T9)"
    FINAL = "certainly not applied, and a repetition would be refused as well"


@frozen
class Failure:
    """A failed request: ``code`` is the gRPC status name, ``detail`` etcd's own words.

    ``elsewhere``: another member may do better, so the next attempt goes there.
    """

    fate: Fate
    code: str
    detail: str
    elsewhere: bool = False

    def __str__(self) -> str:
        return f"{self.detail or 'no details'} ({self.code})"


# gRPC's own words when no connection existed on which the request could have gone out (T7).
_NEVER_SENT = ("failed to connect to all addresses", "empty address list", "name resolution", "dns resolution failed")
_TOKEN = ("invalid auth token", "revision of auth store is old", "user name is empty", "auth: revision in header")
_NOT_DONE = ("too many requests", "etcdserver: no leader", "not supported for learner", "not capable")
_FINAL_CODES = frozenset(
    {
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "ALREADY_EXISTS",
        "PERMISSION_DENIED",
        "FAILED_PRECONDITION",
        "OUT_OF_RANGE",
        "UNIMPLEMENTED",
        "UNAUTHENTICATED",
    }
)

_OF_FORM = frozenset({"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"})
"""Final codes by which etcd rejects a request as invalid (T1, T2, T3)."""


def classify(code: str, detail: str) -> Failure:
    """The failure that a status code and detail string stand for."""
    text = detail.lower()
    if any(words in text for words in _TOKEN):
        return Failure(Fate.TOKEN, code, detail)
    if any(words in text for words in _NOT_DONE):
        return Failure(Fate.NOT_DONE, code, detail, elsewhere="too many requests" not in text)
    if code == "UNAVAILABLE" and any(words in text for words in _NEVER_SENT):
        return Failure(Fate.NOT_DONE, code, detail, elsewhere=True)
    if code == "RESOURCE_EXHAUSTED" and "grpc: received message larger" in text:
        return Failure(Fate.FINAL, code, detail)  # grpc-go's words: the server refused to read the request
    if code in _FINAL_CODES:
        return Failure(Fate.FINAL, code, detail)
    # Deadline, cancelled, unavailable after sending, unknown, internal, data loss, and NOSPACE, which the applier
    # may report after it has committed (T8).
    return Failure(Fate.UNKNOWN, code, detail, elsewhere=code in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"))


def rejection(
    failure: Failure, what: str = "the request", *, user: str | None = None, keys: str = "distOp"
) -> EtcdRejected:
    """The exception for a failure that is FINAL. ``user``: who we are there; ``keys``: what all our keys begin with."""
    if "permission denied" in failure.detail.lower():
        return PermissionDenied(
            f"etcd does not permit {f'the user {user!r}' if user else 'us'} {what}: a role of "
            f"{'that' if user else 'our'} user needs it; executors need read and write on all keys that begin with "
            f"{keys} (`distop access` prints and creates the roles)",
            code=failure.code,
            detail=failure.detail,
        )
    text, words = failure.detail.lower(), f"{what} was refused by etcd: {failure.detail or failure.code}"
    if "lease not found" in text:
        return LeaseNotFound(words, code=failure.code, detail=failure.detail)
    if "has been compacted" in text:
        return Compacted(words, detail=failure.detail)
    if failure.code in ("PERMISSION_DENIED", "UNAUTHENTICATED") or "authentication failed" in text:
        return PermissionDenied(words, code=failure.code, detail=failure.detail)
    if "http2 header with status" in text:
        words = f"what answers at the endpoint is not etcd ({failure.detail}): see which host and port were given"
    if failure.code in _OF_FORM:
        return MalformedRequest(words, code=failure.code, detail=failure.detail)
    return EtcdRejected(words, code=failure.code, detail=failure.detail)
