"""A gRPC channel to distop's service, and its calls."""

from __future__ import annotations

import asyncio
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import grpc
from google.protobuf import descriptor_pool, message_factory

from distop.client.service_errors import error_of
from distop.client.service_messages import request_id_of
from distop.clock import random
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
    """A channel to a service. ``url``: ``grpc://host:port`` or, with TLS, ``grpcs://host:port``.

    Several IP addresses, separated by commas, are those of services of one etcd: the channel is connected to one of
    them, and to another one if that is lost. With TLS all of them must show a certificate for the first address.

    ``token``: a bearer token. ``tls``: the files for TLS; without a CA, the system's.

    Raises InvalidArgument for another URL, and for a token without TLS to another machine.
    """

    def __init__(self, url: str, token: str = "", tls: TlsFiles = NO_FILES) -> None:
        addresses = _addresses(url)
        self.address = ",".join(addresses)
        self._target = self.address if len(addresses) == 1 else _target(addresses)
        self._secure = url.lower().startswith("grpcs:")
        self._tls = tls
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        options = (("grpc.ssl_target_name_override", addresses[0].rpartition(":")[0].strip("[]")),)
        self._options = (*OPTIONS, *(options if self._secure and len(addresses) > 1 else ()))
        if token and not self._secure and not all(map(_is_loopback, addresses)):
            raise InvalidArgument(f"a token for {self.address} would be sent as plain text: use grpcs://")
        self._channel: grpc.aio.Channel | None = None

    def _opened(self) -> grpc.aio.Channel:
        if self._channel is None:  # it belongs to the loop that opens it
            if self._secure:
                credentials = grpc.ssl_channel_credentials(self._tls.ca, self._tls.key, self._tls.cert)
                self._channel = grpc.aio.secure_channel(self._target, credentials, options=self._options)
            else:
                self._channel = grpc.aio.insecure_channel(self._target, options=self._options)
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

    async def call(self, method: str, request: Message, *, writes: bool, limit: float | None = CALL_LIMIT) -> Any:
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


def _addresses(url: str) -> list[str]:
    """The addresses in a URL. Raises InvalidArgument."""
    scheme, _, rest = url.partition("://")
    return [_address(f"{scheme}://{one}", url) for one in rest.split(",")]


def _address(one: str, url: str) -> str:
    try:
        parts = urlsplit(one)
        host, port = parts.hostname, parts.port or DEFAULT_PORT
    except ValueError:
        host, port, parts = None, 0, urlsplit("")
    if not host or parts.scheme.lower() not in SCHEMES or parts.path or parts.query or parts.username:
        raise InvalidArgument(f"{shown(url)} is not the URL of a service: grpc://host:port, or grpcs:// with TLS")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _target(addresses: list[str]) -> str:
    """gRPC's name of several addresses, in a random order, so that clients spread. Raises InvalidArgument."""
    kinds, found = set(), []
    for one in addresses:
        host, _, port = one.rpartition(":")
        try:
            known = ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
        except ValueError:
            raise InvalidArgument(
                f"{shown(host)} is a name: give several services by IP addresses, or a name that has several addresses"
            ) from None
        kinds.add(f"ipv{known.version}")
        found.append(f"[{known}]:{port}" if known.version == 6 else f"{known}:{port}")
    if len(kinds) > 1:
        raise InvalidArgument("the addresses of services must be all of IPv4, or all of IPv6")
    found.sort(key=lambda _: random.uniform(0.0, 1.0))
    return f"{kinds.pop()}:{','.join(found)}"


def _is_loopback(address: str) -> bool:
    return address.rpartition(":")[0].strip("[]") in ("127.0.0.1", "::1", "localhost")


def _method(name: str) -> MethodDescriptor:
    service, _, method = name.partition("/")
    return descriptor_pool.Default().FindServiceByName(f"distop.v1.{service}").methods_by_name[method]


def _class_of(method: MethodDescriptor) -> Any:
    return message_factory.GetMessageClass(method.output_type)
