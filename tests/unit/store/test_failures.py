"""Classes of etcd's errors (docs/internals/etcd-rules.md, "What an error says about a write")."""

from __future__ import annotations

import pytest

from distop.errors import Compacted, EtcdRejected, LeaseNotFound, MalformedRequest, PermissionDenied
from distop.store.grpc_failures import Failure, Fate, classify, rejection


@pytest.mark.parametrize(
    ("code", "detail", "fate"),
    [
        ("UNAVAILABLE", "failed to connect to all addresses; last error: refused", Fate.NOT_DONE),
        ("UNAVAILABLE", "etcdserver: no leader", Fate.NOT_DONE),
        ("RESOURCE_EXHAUSTED", "etcdserver: too many requests", Fate.NOT_DONE),
        ("UNAUTHENTICATED", "etcdserver: invalid auth token", Fate.TOKEN),
        ("INVALID_ARGUMENT", "etcdserver: revision of auth store is old", Fate.TOKEN),
        ("INVALID_ARGUMENT", "etcdserver: user name is empty", Fate.TOKEN),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", Fate.UNKNOWN),
        ("UNAVAILABLE", "Socket closed", Fate.UNKNOWN),
        ("UNAVAILABLE", "etcdserver: request timed out", Fate.UNKNOWN),
        ("UNAVAILABLE", "etcdserver: leader changed", Fate.UNKNOWN),
        ("UNKNOWN", "not a primary lessor", Fate.UNKNOWN),
        ("INTERNAL", "stream terminated", Fate.UNKNOWN),
        ("CANCELLED", "", Fate.UNKNOWN),
        ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded", Fate.UNKNOWN),  # T8
        ("RESOURCE_EXHAUSTED", "CLIENT: Received message larger than max (9 vs. 4)", Fate.UNKNOWN),
        ("RESOURCE_EXHAUSTED", "grpc: received message larger than max (9 vs. 4)", Fate.FINAL),
        ("INVALID_ARGUMENT", "etcdserver: too many operations in txn request", Fate.FINAL),
        ("NOT_FOUND", "etcdserver: requested lease not found", Fate.FINAL),
        ("PERMISSION_DENIED", "etcdserver: permission denied", Fate.FINAL),
    ],
)
def test_an_error_of_etcd_has_one_fate(code: str, detail: str, fate: Fate) -> None:
    assert classify(code, detail).fate is fate


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
    error = rejection(Failure(Fate.FINAL, code, detail))
    assert type(error) is kind
    assert error.detail == detail
    assert detail in str(error)


def test_a_server_other_than_etcd_is_reported() -> None:
    """A proxy or another service at a mistyped endpoint."""
    detail = "Received http2 header with status: 404"
    assert "is not etcd (Received" in str(rejection(Failure(Fate.FINAL, "UNIMPLEMENTED", detail), "the first read"))


def test_a_denied_permission_names_the_user_and_the_keys() -> None:
    denied = Failure(Fate.FINAL, "PERMISSION_DENIED", "etcdserver: permission denied")
    error = rejection(denied, "the read", user="worker", keys="prod/distOp")
    assert type(error) is PermissionDenied
    assert str(error) == (
        "etcd denies the user 'worker' permission for the read: grant it to a role of that user; executors need read "
        "and write access to all keys with the prefix prod/distOp (`distop access` prints and creates the roles)"
    )
    assert "denies us" in str(rejection(denied))
    assert error.detail == "etcdserver: permission denied"
