"""The services over gRPC, with health and reflection."""

from __future__ import annotations

import asyncio
import logging
import resource
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from distop.client.service_channel import MOST_BYTES
from distop.client.service_errors import DETAILS, status_of
from distop.errors import DistopError, InvalidArgument, ServiceUnavailable
from distop.runtime import caller_trace
from distop.server.call_admission import CallerCredentials
from distop.server.checked_streams import checked

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
    from contextlib import AbstractContextManager

    from google.protobuf.descriptor import MethodDescriptor

    from distop.server.call_admission import AdmittedCall, CallAdmission

log = logging.getLogger("distop.service")

MOST_CALLS = 10_000
"""Maximum open calls of a service. Others are refused at once."""
MOST_CONNECTIONS = 10_000
"""Maximum connections, if the process may have four times as many files. Others are closed at once."""
MESSAGE_TIMEOUT = 30.0
"""Seconds for the message of a call to arrive."""
MOST_PUBLIC = 100
"""Maximum open streams of health and of reflection each, for which callers are not identified."""
READ_TIMEOUT = 30.0
"""Seconds without reading after which a stream of a caller ends."""
PUBLIC_TIMEOUT = 60.0
"""Seconds without a request after which a stream of reflection ends."""
HEALTH_TIMEOUT = 2.0
"""Seconds in which callers learn from health that the service stops."""
OPTIONS = (
    ("grpc.max_receive_message_length", MOST_BYTES),
    ("grpc.max_send_message_length", MOST_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.so_reuseport", 0),  # a second service on the port is an error
)


class GrpcServer:
    """A gRPC server of these services (full name → handlers), on one address."""

    def __init__(self, services: Mapping[str, Any], admission: CallAdmission) -> None:
        most = min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        options = (*OPTIONS, ("grpc.max_allowed_incoming_connections", most))
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MOST_CALLS)
        self._health = _Health()
        self._names = tuple(services)
        for name, handlers in services.items():
            self._server.add_generic_rpc_handlers((_service(name, handlers, admission),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        listed = _Reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME))
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(listed, self._server)

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
        with suppress(TimeoutError):  # a caller that reads nothing of its stream holds it up
            async with asyncio.timeout(HEALTH_TIMEOUT):
                await self._health.enter_graceful_shutdown()
        await self._server.stop(grace)


class _Health(health.aio.HealthServicer):  # type: ignore[name-defined,misc]
    """gRPC's health service, with few streams."""

    _streams = 0

    async def Watch(self, request: Any, context: Any) -> None:
        if self._streams >= MOST_PUBLIC:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many streams of health are open")
        self._streams += 1
        try:
            await super().Watch(request, context)
        finally:
            self._streams -= 1


class _Reflection(reflection.aio.ReflectionServicer):  # type: ignore[name-defined,misc]
    """gRPC's reflection service, with few streams that end when nothing is asked."""

    _streams = 0

    async def ServerReflectionInfo(self, request_iterator: Any, context: Any) -> AsyncGenerator[Any, None]:
        if self._streams >= MOST_PUBLIC:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many streams of reflection are open")
        self._streams += 1
        try:
            async for response in super().ServerReflectionInfo(_in_time(context), context):
                yield response
        finally:
            self._streams -= 1


async def _in_time(context: Any) -> AsyncGenerator[Any, None]:
    """The requests of a stream, until none arrives for some time."""
    with suppress(TimeoutError):
        while True:
            async with asyncio.timeout(PUBLIC_TIMEOUT):
                request = await context.read()
            if request is grpc.aio.EOF:  # type: ignore[attr-defined]
                return
            yield request


def _service(name: str, handlers: Any, admission: CallAdmission) -> grpc.GenericRpcHandler[Any, Any]:
    """The handler of all calls of a service, by its descriptor."""
    methods = descriptor_pool.Default().FindServiceByName(name).methods
    served = {one.name: _method(one, handlers, admission) for one in methods if hasattr(handlers, one.name)}
    return grpc.method_handlers_generic_handler(name, served)


def _method(method: MethodDescriptor, handlers: Any, admission: CallAdmission) -> grpc.RpcMethodHandler[Any, Any]:
    method_admission = _GrpcAdmission(admission, f"{method.containing_service.name}/{method.name}")
    call, request = getattr(handlers, method.name), message_factory.GetMessageClass(method.input_type)
    serialize = message_factory.GetMessageClass(method.output_type).SerializeToString
    # A stream of requests is the same to clients as one request, but is handled before its message has arrived.
    if method.server_streaming:
        return grpc.stream_stream_rpc_method_handler(_stream(call, request, method_admission), None, serialize)
    return grpc.stream_unary_rpc_method_handler(_unary(call, request, method_admission), None, serialize)


class _GrpcAdmission:
    """The admission of the calls of one method, by the metadata and certificate of their connection."""

    def __init__(self, admission: CallAdmission, call: str) -> None:
        self._admission = admission
        self._call = call

    async def check_identity(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        credentials = credentials_of(context)
        await self._admission.renew_keys(credentials)
        self._admission.check_identity(self._call, credentials)

    def admit(self, message: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AbstractContextManager[AdmittedCall]:
        metadata = tuple(context.invocation_metadata() or ())
        caller_trace.answered(next((value for key, value in metadata if key == "traceparent"), ""))
        return self._admission.admit(self._call, message, credentials_of(context))


def credentials_of(context: grpc.aio.ServicerContext[Any, Any]) -> CallerCredentials:
    """What identifies the caller."""
    metadata = tuple(context.invocation_metadata() or ())
    header = next((str(value) for key, value in metadata if key == "authorization"), "")
    kind, _, token = header.partition(" ")
    shown = context.auth_context() or {}
    # By their kinds: a name of one kind may have any text, such as a URI "CN=root".
    kinds = (("x509_common_name", "CN="), ("peer_dns", "DNS:"), ("peer_uri", "URI:"))
    names = [f"{prefix}{one.decode(errors='replace')}" for name, prefix in kinds for one in shown.get(name, ())]
    bearer = token.strip() if kind.lower() == "bearer" and token.strip() else None
    return CallerCredentials(bearer, names, str(context.peer()))


async def _received(request: Any, context: Any) -> Any:
    """The message of a call. Raises InvalidArgument."""
    try:
        async with asyncio.timeout(MESSAGE_TIMEOUT):
            data = await context.read()
    except TimeoutError:
        raise InvalidArgument(f"the request has not arrived within {MESSAGE_TIMEOUT:g} s") from None
    if data is grpc.aio.EOF:  # type: ignore[attr-defined]
        raise InvalidArgument(f"the call has no message {request.DESCRIPTOR.full_name}")
    try:
        return request.FromString(data)
    except DecodeError as error:
        raise InvalidArgument(f"the request is not a message {request.DESCRIPTOR.full_name}: {error}") from None


def _unary(call: Callable[[Any], Awaitable[Any]], request: Any, admission: _GrpcAdmission) -> Callable[..., Any]:
    async def answer(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            await admission.check_identity(context)
            message = await _received(request, context)
            with admission.admit(message, context) as admitted:
                return await admitted.run(call)
        except Exception as error:  # an unexpected one must not show its text to the caller
            await _refuse(context, error)

    return answer


def _stream(
    call: Callable[[Any], AsyncGenerator[Any, None]], request: Any, admission: _GrpcAdmission
) -> Callable[..., Any]:
    async def answer(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        try:
            await admission.check_identity(context)
            message = await _received(request, context)
            with admission.admit(message, context) as admitted:
                async with aclosing(checked(call(message), admitted.check)) as responses:
                    async for response in responses:
                        if response is not None:
                            await _write(context, response)
        except Exception as error:  # as above
            await _refuse(context, error)

    return answer


async def _write(context: grpc.aio.ServicerContext[Any, Any], response: Any) -> None:
    """Send a response of a stream. Raises ServiceUnavailable if the caller does not read."""
    try:
        async with asyncio.timeout(READ_TIMEOUT):
            await context.write(response)
    except TimeoutError:
        raise ServiceUnavailable(
            f"nothing of the stream was read for {READ_TIMEOUT:g} s: go on after the last revision that has arrived"
        ) from None


async def _refuse(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> None:
    """End the call with the status of an error. Raises."""
    if isinstance(error, asyncio.CancelledError | grpc.aio.AbortError):
        raise error
    if not isinstance(error, DistopError):
        log.error("Unexpected error in a call", exc_info=error)
    code, text, details = status_of(error if isinstance(error, DistopError) else DistopError())
    await context.abort(code, text, ((DETAILS, details),) if details else ())
