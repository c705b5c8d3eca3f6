"""How long a connection to etcd may be dead before the client notices."""

from __future__ import annotations

from dataclasses import fields

from distop.config import ExecutorConfig
from distop.store.transport import channel_options

PERMITTED = 5_000
"""Milliseconds between two pings of a client that etcd permits by default (R4)."""


def test_a_dead_connection_is_noticed_within_a_session_of_the_default_length() -> None:
    """Time is left to connect again and to extend the session; and etcd permits the pings."""
    options = dict(channel_options())
    every, answered = int(options["grpc.keepalive_time_ms"]), int(options["grpc.keepalive_timeout_ms"])
    assert every > PERMITTED
    assert answered >= 1_000
    assert options["grpc.http2.ping_timeout_ms"] == answered
    (session,) = (one.default for one in fields(ExecutorConfig) if one.name == "ttl")
    assert every + answered <= session * 1000 - 1_000
