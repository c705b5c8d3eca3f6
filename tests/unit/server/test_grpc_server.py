"""gRPC: malformed calls, and callers that hold streams open. Handlers are scripted."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from distop.client.service_errors import error_of
from distop.errors import ServiceUnavailable
from distop.server import checked_streams, grpc_server
from distop.server.call_admission import AccessFile, CallAdmission
from distop.server.grpc_server import GrpcServer
from distop.server.handlers import services
from distop.v1 import operations_pb2, tables_pb2
from tests.unit.server.test_access import FILE
from tests.unit.server.test_http_server import NAMES, Endless, Scripted, Talkative

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

CALLS = [
    (f"/{name}/{method.name}", method.server_streaming)
    for name in services(None)  # type: ignore[arg-type]
    for method in descriptor_pool.Default().FindServiceByName(name).methods
]
LIST = "/distop.v1.Tables/List"


@asynccontextmanager
async def served(admission: CallAdmission | None = None, handlers: Any = None) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server with scripted handlers."""
    server = GrpcServer(dict.fromkeys(NAMES, handlers or Scripted()), admission or CallAdmission())
    port = await server.start("127.0.0.1:0")
    try:
        async with asyncio.timeout(60), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(0)


async def code_of(call: Any) -> str:
    """The status of a call."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


@pytest.fixture
def guarded(tmp_path: Any) -> CallAdmission:
    path = tmp_path / "access.toml"
    path.write_text(FILE)
    return CallAdmission(AccessFile(path))


async def test_a_malformed_message_is_an_invalid_argument() -> None:
    async with served() as channel:
        for path, streams in CALLS:
            call = channel.unary_stream(path) if streams else channel.unary_unary(path)
            assert (await code_of(call(b"\xff\xff\xff")), path) == ("INVALID_ARGUMENT", path)
        get = channel.unary_unary("/distop.v1.Operations/Get")
        assert await code_of(get(b"\x0a\x02\xff\xfe")) == "INVALID_ARGUMENT", "no UTF-8"


async def test_an_unexpected_error_shows_nothing_of_itself() -> None:
    scripted = Scripted()
    scripted.answers["List"] = ValueError("a secret")
    async with served(handlers=scripted) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(LIST)(b"")
    assert (caught.value.code().name, "secret" in str(caught.value)) == ("INTERNAL", False)


async def silence() -> AsyncGenerator[bytes, None]:
    await asyncio.Event().wait()
    yield b""


async def nothing() -> AsyncGenerator[bytes, None]:
    for one in ():
        yield one


async def test_a_caller_is_identified_before_its_message_arrives(guarded: CallAdmission) -> None:
    async with served(guarded) as channel:
        for path, streams in CALLS:
            call = channel.stream_stream(path) if streams else channel.stream_unary(path)
            assert (await code_of(call(silence())), path) == ("UNAUTHENTICATED", path)


async def test_a_message_has_to_arrive_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "MESSAGE_TIMEOUT", 0.05)
    async with served() as channel:
        for requests in (silence, nothing):
            assert await code_of(channel.stream_unary(LIST)(requests())) == "INVALID_ARGUMENT"


async def test_streams_of_health_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "MOST_PUBLIC", 1)
    scripted = Scripted()
    scripted.answers["List"] = tables_pb2.ListTablesResponse()
    async with served(handlers=scripted) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        first = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await first.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert await code_of(stub.Watch(health_pb2.HealthCheckRequest())) == "RESOURCE_EXHAUSTED"
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        assert await code_of(channel.unary_unary(LIST)(b"")) == "OK"


async def test_streams_of_reflection_are_bounded_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "MOST_PUBLIC", 1)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    async with served() as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        first = stub.ServerReflectionInfo()
        await first.write(asked)
        names = {one.name for one in (await first.read()).list_services_response.service}
        assert names > set(NAMES)
        assert await code_of(stub.ServerReflectionInfo()) == "RESOURCE_EXHAUSTED"
        monkeypatch.setattr(grpc_server, "PUBLIC_TIMEOUT", 0.05)
        await first.write(asked)
        await first.read()
        assert await first.read() is grpc.aio.EOF
        assert (await first.code()).name == "OK"


async def test_a_caller_that_does_not_read_holds_no_stop_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "HEALTH_TIMEOUT", 0.05)
    server = GrpcServer(dict.fromkeys(NAMES, Scripted()), CallAdmission())
    await server.start("127.0.0.1:0")
    # A watch of health holds this lock while it writes.
    async with asyncio.timeout(60), server._health._server_watchers[""]:
        await server.stop(0)


async def test_connections_beyond_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "MOST_CONNECTIONS", 1)
    server = GrpcServer(dict.fromkeys(NAMES, Scripted()), CallAdmission())
    port = await server.start("127.0.0.1:0")
    own = (("grpc.use_local_subchannel_pool", 1),)
    try:
        async with asyncio.timeout(60), grpc.aio.insecure_channel(f"127.0.0.1:{port}", own) as first:
            await first.channel_ready()
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", own) as second:
                stub: Any = health_pb2_grpc.HealthStub(second)
                assert await code_of(stub.Check(health_pb2.HealthCheckRequest())) == "UNAVAILABLE"
    finally:
        await server.stop(0)


# ------------------------------------------------------------------ streams of callers

WATCH = "/distop.v1.Operations/Watch"
REQUEST = operations_pb2.WatchRequest(op="sales.orders/validate/1").SerializeToString()


@pytest.mark.parametrize("how", ["cancelled", "late"])
async def test_a_call_that_nobody_waits_for_stops_its_work(how: str) -> None:
    endless = Endless()
    async with served(handlers=endless) as channel:
        call = channel.unary_stream(WATCH)(REQUEST, timeout=None if how == "cancelled" else 0.05)
        if how == "cancelled":
            await endless.began.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call.read()
        else:
            assert await code_of(call) == "DEADLINE_EXCEEDED"
        if endless.began.is_set():
            await endless.ended.wait()


async def test_a_caller_that_does_not_read_is_cut_off_and_learns_it_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "READ_TIMEOUT", 0.05)
    talkative = Talkative()
    async with served(handlers=talkative) as channel:
        call = channel.unary_stream(WATCH)(REQUEST)
        first = operations_pb2.WatchResponse.FromString(await call.read())
        await talkative.ended.wait()
        assert first.operation.op.startswith("x")
        with pytest.raises(grpc.aio.AioRpcError, match="go on after the last revision") as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
            await call
        assert isinstance(error_of(caught.value, "", writes=False), ServiceUnavailable), "it may be repeated"


async def test_a_quiet_stream_ends_soon_after_its_grant(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_streams, "BEAT", 0.02)
    monkeypatch.setattr("distop.server.call_admission.LOOK_EVERY", 0.0)
    path = tmp_path / "access.toml"
    path.write_text(FILE)
    endless = Endless()
    async with served(CallAdmission(AccessFile(path)), endless) as channel:
        call = channel.unary_stream(WATCH)(REQUEST, metadata=(("authorization", "Bearer etl token of the tests"),))
        await endless.began.wait()
        path.write_text(FILE.partition("[[grants]]")[0])
        assert await code_of(call) == "PERMISSION_DENIED"
        await endless.ended.wait()


async def test_open_streams_end_when_the_grace_has_passed() -> None:
    endless = Endless()
    server = GrpcServer(dict.fromkeys(NAMES, endless), CallAdmission())
    port = await server.start("127.0.0.1:0")
    async with asyncio.timeout(60), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_stream(WATCH)(REQUEST)
        await endless.began.wait()
        await server.stop(0.05)
        assert await code_of(call) in ("UNAVAILABLE", "CANCELLED")
        await endless.ended.wait()
