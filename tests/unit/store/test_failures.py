"""Classes of etcd's errors (docs/internals/etcd-rules.md, "What an error says about a write")."""

from __future__ import annotations

import pytest

from distop.errors import Compacted, EtcdRejected, LeaseNotFound, MalformedRequest, PermissionDenied
from distop.store.grpc_failures import Failure, FailureKind, classify, rejection


@pytest.mark.parametrize(
    ("code", "detail", "kind"),
    [
        ("UNAVAILABLE", "failed to connect to all addresses; last error: refused", FailureKind.NOT_DONE),
        ("UNAVAILABLE", "etcdserver: no leader", FailureKind.NOT_DONE),
        ("RESOURCE_EXHAUSTED", "etcdserver: too many requests", FailureKind.NOT_DONE),
        ("UNAUTHENTICATED", "etcdserver: invalid auth token", FailureKind.TOKEN),
        ("INVALID_ARGUMENT", "etcdserver: revision of auth store is old", FailureKind.TOKEN),
        ("INVALID_ARGUMENT", "etcdserver: user name is empty", FailureKind.TOKEN),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", FailureKind.UNKNOWN),
        ("UNAVAILABLE", "Socket closed", FailureKind.UNKNOWN),
        ("UNAVAILABLE", "etcdserver: request timed out", FailureKind.UNKNOWN),
        ("UNAVAILABLE", "etcdserver: leader changed", FailureKind.UNKNOWN),
        ("UNKNOWN", "not a primary lessor", FailureKind.UNKNOWN),
        ("INTERNAL", "stream terminated", FailureKind.UNKNOWN),
        ("CANCELLED", "", FailureKind.UNKNOWN),
        ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded", FailureKind.UNKNOWN),  # T8
        ("RESOURCE_EXHAUSTED", "CLIENT: Received message larger than max (9 vs. 4)", FailureKind.UNKNOWN),
        ("RESOURCE_EXHAUSTED", "grpc: received message larger than max (9 vs. 4)", FailureKind.FINAL),
        ("INVALID_ARGUMENT", "etcdserver: too many operations in txn request", FailureKind.FINAL),
        ("NOT_FOUND", "etcdserver: requested lease not found", FailureKind.FINAL),
        ("PERMISSION_DENIED", "etcdserver: permission denied", FailureKind.FINAL),
    ],
)
def test_an_error_of_etcd_has_one_kind(code: str, detail: str, kind: FailureKind) -> None:
    assert classify(code, detail).kind is kind


@pytest.mark.parametrize(
    ("code", "detail", "kind"),
    [
        ("NOT_FOUND", "etcdserver: requested lease not found", LeaseNotFound),
        ("OUT_OF_RANGE", "etcdserver: mvcc: required revision has been compacted", Compacted),
        ("UNAUTHENTICATED", "etcdserver: no", PermissionDenied),
        ("INVALID_ARGUMENT", "etcdserver: authentication failed, invalid user ID or password", PermissionDenied),
        ("INVALID_ARGUMENT", "etcdserver: duplicate key given in txn request", MalformedRequest),
    ],
)
def test_rejections_keep_the_message_of_etcd(code: str, detail: str, kind: type[EtcdRejected]) -> None:
    error = rejection(Failure(FailureKind.FINAL, code, detail))
    assert type(error) is kind
    assert error.detail == detail
    assert detail in str(error)


def test_a_server_other_than_etcd_is_reported() -> None:
    """A proxy or another service at a mistyped endpoint."""
    detail = "Received http2 header with status: 404"
    assert "is not etcd (Received" in str(
        rejection(Failure(FailureKind.FINAL, "UNIMPLEMENTED", detail), "the first read")
    )


def test_a_denied_permission_names_the_user_and_the_keys() -> None:
    denied = Failure(FailureKind.FINAL, "PERMISSION_DENIED", "etcdserver: permission denied")
    error = rejection(denied, "the read", user="worker", keys="prod/distOp")
    assert type(error) is PermissionDenied
    assert str(error) == (
        "etcd denies the user 'worker' permission for the read: grant it to a role of that user; executors need read "
        "and write access to all keys with the prefix prod/distOp (`distop access` prints and creates the roles)"
    )
    assert "denies us" in str(rejection(denied))
    assert error.detail == "etcdserver: permission denied"
