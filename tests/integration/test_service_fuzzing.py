"""Random messages over gRPC to the calls that watch etcd, which the model of etcd cannot serve."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from hypothesis import given

from distop.client.connection_options import configure
from distop.protocol.txn import Get
from distop.store.client import EtcdClient
from tests.support.service import ServiceThread
from tests.unit.server.test_fuzzing import CALLS, LOOSE, REFUSED, UNMODELLED, messages
from tests.unit.support.model_submission import TABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.daemons import Daemons

pytestmark = [pytest.mark.etcd, pytest.mark.direct, pytest.mark.rotating]

PATIENCE = 1.0
"""Seconds after which a call that waits is ended."""


class Revisions:
    """Reads etcd's revision."""

    def __init__(self, endpoint: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._etcd = EtcdClient(configure(endpoint).etcd)
        self._loop.run_until_complete(self._etcd.connect())

    def now(self) -> int:
        return self._loop.run_until_complete(self._etcd.read_at(Get("a")))[0]

    def close(self) -> None:
        self._loop.run_until_complete(self._etcd.close())
        self._loop.close()


@pytest.fixture
def channel(group: Daemons) -> Iterator[grpc.Channel]:
    service = ServiceThread(group.endpoint)
    with grpc.insecure_channel(service.url.removeprefix("grpc://")) as found:
        yield found
    service.close()


@pytest.fixture
def revisions(group: Daemons) -> Iterator[Revisions]:
    found = Revisions(group.endpoint)
    yield found
    found.close()


def status_of(channel: grpc.Channel, method: Any, data: bytes) -> str:
    """The status of a call with these bytes; of a stream, of its first response."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    try:
        if method.server_streaming:
            stream = channel.unary_stream(path)(data, timeout=PATIENCE)
            next(stream, None)
            stream.cancel()
        else:
            channel.unary_unary(path)(data, timeout=PATIENCE)
    except grpc.RpcError as error:
        found: Any = error
        return str(found.code().name)
    return "OK"


@pytest.mark.parametrize("call", sorted(UNMODELLED))
def test_a_random_message_is_answered_or_refused(
    group: Daemons, channel: grpc.Channel, revisions: Revisions, call: str
) -> None:
    method = CALLS[call]
    group.client.register_type("noop", {})
    assert group.client.start_operation("noop", TABLE, {}, partitions=["a", "b"]).ref == f"{TABLE}/noop/1"

    @LOOSE
    @given(messages(method.input_type))
    def send(message: Any) -> None:
        before = revisions.now()
        code = status_of(channel, method, message.SerializeToString())
        assert code == "OK" or code in REFUSED, f"{call}: {code}"
        assert code == "OK" or revisions.now() == before

    send()
