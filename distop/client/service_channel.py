"""A gRPC channel to distop's service, and its calls."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import grpc
from google.protobuf import descriptor_pool, message_factory

from distop.client.service_errors import error_of
from distop.client.service_messages import request_id_of
from distop.errors import EtcdUnavailable, InvalidArgument
from distop.protocol.texts import shown
from distop.runtime import caller_trace
from distop.store.tls_files import NO_FILES, TlsFiles

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from google.protobuf.descriptor import MethodDescriptor
    from google.protobuf.message import Message

SCHEMES = ("grpc", "grpcs")
"""The second one is with TLS."""
DEFAULT_PORT = 7781
MOST_BYTES = 64 << 20
"""Maximum bytes of a message, in both directions."""
CALL_LIMIT = 60.0
"""Seconds for one call."""
OPTIONS = (
    ("grpc.max_receive_message_length", MOST_BYTES),
    ("grpc.max_send_message_length", MOST_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.enable_retries", 0),  # a call that may have had an effect is repeated with its request id only
    ("grpc.enable_http_proxy", 0),
)


class ServiceChannel:
    """A channel to one service. ``url``: ``grpc://host:port`` or, with TLS, ``grpcs://host:port``.

    ``token``: a bearer token. ``tls``: the files for TLS; without a CA, the system's.

    Raises InvalidArgument for another URL, and for a token without TLS to another machine.
    """

    def __init__(self, url: str, token: str = "", tls: TlsFiles = NO_FILES) -> None:
        self.address = _address(url)
        self._secure = url.lower().startswith("grpcs:")
        self._tls = tls
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        if token and not self._secure and not _is_loopback(self.address):
            raise InvalidArgument(f"a token for {self.address} would be sent as plain text: use grpcs://")
        self._channel: grpc.aio.Channel | None = None

    def _opened(self) -> grpc.aio.Channel:
        if self._channel is None:  # it belongs to the loop that opens it
            if self._secure:
                credentials = grpc.ssl_channel_credentials(self._tls.ca, self._tls.key, self._tls.cert)
                self._channel = grpc.aio.secure_channel(self.address, credentials, options=OPTIONS)
            else:
                self._channel = grpc.aio.insecure_channel(self.address, options=OPTIONS)
        return self._channel

    def _call_metadata(self) -> tuple[tuple[str, str], ...]:
        trace = caller_trace.traceparent()
        return (*self._metadata, ("traceparent", trace)) if trace else self._metadata

    async def connect(self, limit: float) -> None:
        """Wait until the service can be reached, for ``limit`` seconds. Raises EtcdUnavailable."""
        try:
            async with asyncio.timeout(limit):
                await self._opened().channel_ready()
        except TimeoutError:
            raise EtcdUnavailable(f"the service at {self.address} cannot be reached within {limit:g} s") from None

    async def close(self) -> None:
        """Close the channel. Open calls fail."""
        if self._channel is not None:
            await self._channel.close(None)

    async def call(self, method: str, request: Message, *, writes: bool, limit: float = CALL_LIMIT) -> Any:
        """Call ``Service/Method``. ``writes``: it may change something. Raises what the service raises."""
        found = _method(method)
        calling = self._opened().unary_unary(
            f"/distop.v1.{method}", type(request).SerializeToString, _class_of(found).FromString
        )
        try:
            return await calling(request, timeout=limit, metadata=self._call_metadata())
        except grpc.aio.AioRpcError as failed:
            raise error_of(failed, self.address, writes=writes, request_id=request_id_of(request)) from None

    async def stream(self, method: str, request: Message) -> AsyncGenerator[Any, None]:
        """The responses of ``Service/Method``. Raises what the service raises."""
        found = _method(method)
        calling = self._opened().unary_stream(
            f"/distop.v1.{method}", type(request).SerializeToString, _class_of(found).FromString
        )
        call = calling(request, metadata=self._call_metadata())
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as failed:
            raise error_of(failed, self.address, writes=False) from None
        finally:
            call.cancel()


def _address(url: str) -> str:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or DEFAULT_PORT
    except ValueError:
        host, port, parts = None, 0, urlsplit("")
    if not host or parts.scheme.lower() not in SCHEMES or parts.path or parts.query or parts.username:
        raise InvalidArgument(f"{shown(url)} is not the URL of a service: grpc://host:port, or grpcs:// with TLS")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_loopback(address: str) -> bool:
    return address.rpartition(":")[0].strip("[]") in ("127.0.0.1", "::1", "localhost")


def _method(name: str) -> MethodDescriptor:
    service, _, method = name.partition("/")
    return descriptor_pool.Default().FindServiceByName(f"distop.v1.{service}").methods_by_name[method]


def _class_of(method: MethodDescriptor) -> Any:
    return message_factory.GetMessageClass(method.output_type)
