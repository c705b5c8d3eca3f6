"""Classifies gRPC failures of etcd (the error classes of docs/internals/etcd-rules.md).

etcd puts the important part into the detail string, so code and detail are examined. Pure.
"""

from __future__ import annotations

from enum import Enum

from distop.errors import Compacted, EtcdRejected, LeaseNotFound, MalformedRequest, PermissionDenied
from distop.protocol.frozen import frozen


class FailureKind(Enum):
    """Whether a failed request may have been applied, and whether it may be repeated."""

    NOT_DONE = "not applied, and a repetition may succeed: back off, repeat"
    TOKEN = "not applied, because the token is not valid: fetch a token, repeat"
    UNKNOWN = "may have been applied, or may still be: only the identical guarded transaction can tell (T9)"
    FINAL = "not applied, and a repetition would be rejected as well"


@frozen
class Failure:
    """A failed request: ``code`` is the gRPC status name, ``detail`` etcd's message.

    ``elsewhere``: another member may succeed, so the next attempt uses that one.
    """

    kind: FailureKind
    code: str
    detail: str
    elsewhere: bool = False

    def __str__(self) -> str:
        return f"{self.detail or 'no details'} ({self.code})"


CLOSED = Failure(FailureKind.UNKNOWN, "CANCELLED", "the etcd client was closed")
"""Our client was closed before the answer."""

# gRPC's messages when there was no connection, so the request was not sent (T7).
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

_MALFORMED_CODES = frozenset({"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"})
"""Final codes by which etcd rejects a request as invalid (T1, T2, T3)."""


def classify(code: str, detail: str) -> Failure:
    """The Failure for a status code and a detail string."""
    text = detail.lower()
    if any(words in text for words in _TOKEN):
        return Failure(FailureKind.TOKEN, code, detail)
    if any(words in text for words in _NOT_DONE):
        return Failure(FailureKind.NOT_DONE, code, detail, elsewhere="too many requests" not in text)
    if code == "UNAVAILABLE" and any(words in text for words in _NEVER_SENT):
        return Failure(FailureKind.NOT_DONE, code, detail, elsewhere=True)
    if code == "RESOURCE_EXHAUSTED" and "grpc: received message larger" in text:
        return Failure(FailureKind.FINAL, code, detail)  # grpc-go's message: the server did not read the request
    if code in _FINAL_CODES:
        return Failure(FailureKind.FINAL, code, detail)
    # Deadline, cancelled, unavailable after sending, unknown, internal, data loss, and NOSPACE, which the applier
    # may report after it has committed (T8).
    return Failure(
        FailureKind.UNKNOWN, code, detail, elsewhere=code in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")
    )


def rejection(
    failure: Failure, what: str = "the request", *, user: str | None = None, keys: str = "distOp"
) -> EtcdRejected:
    """The exception for a failure that is FINAL. ``user``: our user name; ``keys``: the prefix of our keys."""
    if "permission denied" in failure.detail.lower():
        return PermissionDenied(
            f"etcd denies {f'the user {user!r}' if user else 'us'} permission for {what}: grant it to a role of "
            f"{'that' if user else 'our'} user; executors need read and write access to all keys with the prefix "
            f"{keys} (`distop access` prints and creates the roles)",
            code=failure.code,
            detail=failure.detail,
        )
    text, message = failure.detail.lower(), f"etcd rejected {what}: {failure.detail or failure.code}"
    if "lease not found" in text:
        return LeaseNotFound(message, code=failure.code, detail=failure.detail)
    if "has been compacted" in text:
        return Compacted(message, detail=failure.detail)
    if failure.code in ("PERMISSION_DENIED", "UNAUTHENTICATED") or "authentication failed" in text:
        return PermissionDenied(message, code=failure.code, detail=failure.detail)
    if "http2 header with status" in text:
        message = f"the server at the endpoint is not etcd ({failure.detail}): check the host and the port"
    if failure.code in _MALFORMED_CODES:
        return MalformedRequest(message, code=failure.code, detail=failure.detail)
    return EtcdRejected(message, code=failure.code, detail=failure.detail)
