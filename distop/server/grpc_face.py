"""The services over gRPC, with health and reflection."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from distop.client.service_channel import MOST_BYTES
from distop.client.service_errors import DETAILS, status_of
from distop.errors import DistopError, InvalidArgument
from distop.server.gate import CallerProof

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
    from contextlib import AbstractContextManager

    from google.protobuf.descriptor import MethodDescriptor

    from distop.server.gate import CallGate, PassedCall

log = logging.getLogger("distop.service")

MOST_CALLS = 10_000
"""Maximum open calls of a service. Others are refused at once."""
OPTIONS = (
    ("grpc.max_receive_message_length", MOST_BYTES),
    ("grpc.max_send_message_length", MOST_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),  # a second service on the port is an error
)


class GrpcFace:
    """A gRPC server of these services (full name → handlers), on one address."""

    def __init__(self, services: Mapping[str, Any], gate: CallGate) -> None:
        self._server = grpc.aio.server(options=OPTIONS, maximum_concurrent_rpcs=MOST_CALLS)
        self._health: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._names = tuple(services)
        for name, handlers in services.items():
            self._server.add_generic_rpc_handlers((_service(name, handlers, gate),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    async def start(self, address: str, credentials: grpc.ServerCredentials | None = None) -> int:
        """Serve at this address, with TLS if there are credentials; returns the port.

        Raises OSError if it cannot be used.
        """
        try:
            port: int = (
                self._server.add_insecure_port(address)
                if credentials is None
                else self._server.add_secure_port(address, credentials)
            )
        except RuntimeError as error:
            raise OSError(str(error)) from None
        await self._server.start()
        for name in ("", *self._names):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return port

    async def stop(self, grace: float) -> None:
        """Refuse new calls, and wait for open ones for ``grace`` seconds."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace)


def _service(name: str, handlers: Any, gate: CallGate) -> grpc.GenericRpcHandler[Any, Any]:
    """The handler of all calls of a service, by its descriptor."""
    methods = descriptor_pool.Default().FindServiceByName(name).methods
    return grpc.method_handlers_generic_handler(name, {one.name: _method(one, handlers, gate) for one in methods})


def _method(method: MethodDescriptor, handlers: Any, gate: CallGate) -> grpc.RpcMethodHandler[Any, Any]:
    through = _Through(gate, f"{method.containing_service.name}/{method.name}")
    call, request = getattr(handlers, method.name), message_factory.GetMessageClass(method.input_type)
    serialize = message_factory.GetMessageClass(method.output_type).SerializeToString
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(_stream(call, request, through), None, serialize)
    return grpc.unary_unary_rpc_method_handler(_unary(call, request, through), None, serialize)


class _Through:
    """The way of one call through the gate."""

    def __init__(self, gate: CallGate, call: str) -> None:
        self._gate = gate
        self._call = call

    def check_identity(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._gate.check_identity(self._call, proof_of(context))

    def passing(self, message: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AbstractContextManager[PassedCall]:
        return self._gate.passing(self._call, message, proof_of(context))


def proof_of(context: grpc.aio.ServicerContext[Any, Any]) -> CallerProof:
    """What the caller shows of itself."""
    metadata = tuple(context.invocation_metadata() or ())
    header = next((str(value) for key, value in metadata if key == "authorization"), "")
    kind, _, token = header.partition(" ")
    shown = context.auth_context() or {}
    # By their kinds: a name of one kind may have any text, such as a URI "CN=root".
    kinds = (("x509_common_name", "CN="), ("peer_dns", "DNS:"), ("peer_uri", "URI:"))
    names = [f"{prefix}{one.decode(errors='replace')}" for name, prefix in kinds for one in shown.get(name, ())]
    bearer = token.strip() if kind.lower() == "bearer" and token.strip() else None
    return CallerProof(bearer, names, str(context.peer()))


def _parsed(data: bytes, request: Any) -> Any:
    try:
        return request.FromString(data)
    except DecodeError as error:
        raise InvalidArgument(f"the request is not a message {request.DESCRIPTOR.full_name}: {error}") from None


def _unary(call: Callable[[Any], Awaitable[Any]], request: Any, through: _Through) -> Callable[..., Any]:
    async def answer(data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            through.check_identity(context)
            message = _parsed(data, request)
            with through.passing(message, context) as passed:
                return passed.answer(await call(message))
        except Exception as error:  # an unexpected one must not show its text to the caller
            await _refuse(context, error)

    return answer


def _stream(call: Callable[[Any], AsyncGenerator[Any, None]], request: Any, through: _Through) -> Callable[..., Any]:
    async def answer(data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncGenerator[Any, None]:
        try:
            through.check_identity(context)
            message = _parsed(data, request)
            with through.passing(message, context) as passed:
                async for response in call(message):
                    passed.check()
                    yield response
        except Exception as error:  # as above
            await _refuse(context, error)

    return answer


async def _refuse(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> None:
    """End the call with the status of an error. Raises."""
    if isinstance(error, asyncio.CancelledError | grpc.aio.AbortError):
        raise error
    if not isinstance(error, DistopError):
        log.error("Unexpected error in a call", exc_info=error)
    code, text, details = status_of(error if isinstance(error, DistopError) else DistopError())
    await context.abort(code, text, ((DETAILS, details),) if details else ())
