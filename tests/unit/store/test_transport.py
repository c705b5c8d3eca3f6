"""Detection of dead connections to etcd, and the end of replaced ones."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import fields
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc

from distop.settings import ExecutorConfig
from distop.store import certificates
from distop.store.connection_settings import EtcdConfig
from distop.store.transport import Transport, channel_options, channels

if TYPE_CHECKING:
    import pytest

PERMITTED = 5_000
"""Milliseconds between two pings of a client that etcd permits by default (R4)."""


def test_a_dead_connection_is_detected_within_a_session_of_the_default_length() -> None:
    """Time remains to reconnect and to extend the session, and etcd permits the pings."""
    options = dict(channel_options())
    every, answered = int(options["grpc.keepalive_time_ms"]), int(options["grpc.keepalive_timeout_ms"])
    assert every > PERMITTED
    assert answered >= 1_000
    assert options["grpc.http2.ping_timeout_ms"] == answered
    (session,) = (one.default for one in fields(ExecutorConfig) if one.name == "ttl")
    assert every + answered <= session * 1000 - 1_000


async def test_a_connection_with_replaced_certificates_is_closed_after_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its requests may end. If it stayed open, each renewal of certificates would leak one."""
    closed: list[tuple[int, float]] = []

    class Broken:
        """A channel that is not connected."""

        def __init__(self, number: int) -> None:
            self.number = number

        def get_state(self) -> grpc.ChannelConnectivity:
            return grpc.ChannelConnectivity.TRANSIENT_FAILURE

        def unary_unary(self, *_: Any, **__: Any) -> None:
            return None

        async def close(self, grace: float) -> None:
            closed.append((self.number, grace))

    made = itertools.count()
    found = SimpleNamespace(ca=None, key=None, cert=None)
    stamps = iter(["before", "after"])
    monkeypatch.setattr(certificates, "read", lambda config: found)
    monkeypatch.setattr(certificates, "stamp", lambda config: next(stamps))
    reset = channels.set(lambda address, credentials: Broken(next(made)))  # type: ignore[arg-type,return-value]
    try:
        config = EtcdConfig(("https://e1:2379",))
        transport = Transport(config)
        transport.open()
        transport._reload_certificates("e1:2379")
        await asyncio.sleep(0.001)
        assert [number for number, _ in closed] == [0]
        assert closed[0][1] >= config.request_timeout
    finally:
        channels.reset(reset)
