"""gRPC channels to etcd's members, with tokens and the check of the cluster's identity.

There is one channel per endpoint; requests stay with the endpoint that works. This module makes single attempts and
streams; the client repeats them.
"""

from __future__ import annotations

import asyncio
import logging
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import grpc
import grpc.aio

from distop.errors import EtcdRejected, EtcdUnavailable, InvalidArgument, PermissionDenied
from distop.protocol.frozen import frozen
from distop.protocol.keys import OP
from distop.store import tls_files
from distop.store._proto import rpc_pb2 as rpc
from distop.store.cluster_identity import Identity
from distop.store.connection_settings import plaintext_password_warning
from distop.store.grpc_failures import CLOSED, Failure, FailureKind, classify, rejection

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.protobuf.message import Message

    from distop.store.connection_settings import EtcdConfig

log = logging.getLogger("distop.store")

Request = TypeVar("Request")
Response = TypeVar("Response")
Asked = TypeVar("Asked", bound="Message")
Answer = TypeVar("Answer", bound="Message")

PING_EVERY, PING_LIMIT = 6.0, 2.0
"""Seconds between two pings of a connection in use, and until an unanswered ping closes the connection.

So a connection that drops packets without a reset is replaced in time for a session of the default TTL (F7).
"""


@frozen
class Reconnect:
    """Seconds between the starts of two connection attempts: the first and the longest pause.

    ``least``: minimum seconds for one attempt, whatever the pause.
    """

    first: float
    longest: float
    least: float


RECONNECT = Reconnect(0.1, 2.0, 1.0)


def channel_options() -> tuple[tuple[str, int | str], ...]:
    """The gRPC options of each connection to etcd."""
    return (
        ("grpc.max_receive_message_length", -1),  # an answer may exceed gRPC's default of 4 MiB (T2)
        ("grpc.max_send_message_length", -1),  # the server decides what is too large
        # The server permits a ping every 5 s, and only while there is a stream or request (R4).
        ("grpc.keepalive_time_ms", int(PING_EVERY * 1000)),
        # Two limits for one answer: without the second, gRPC waits for a minute despite the first.
        ("grpc.keepalive_timeout_ms", int(PING_LIMIT * 1000)),
        ("grpc.http2.ping_timeout_ms", int(PING_LIMIT * 1000)),
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", int(RECONNECT.first * 1000)),
        ("grpc.min_reconnect_backoff_ms", int(RECONNECT.least * 1000)),
        ("grpc.max_reconnect_backoff_ms", int(RECONNECT.longest * 1000)),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),  # gRPC must not repeat a write itself (T7)
        ("grpc.enable_http_proxy", 0),
    )


# A member without a leader then rejects requests and ends streams at once, instead of blocking them (W8).
_HAS_LEADER = ("hasleader", "true")


@frozen
class Method(Generic[Request, Response]):
    """A gRPC method of etcd. ``leader``: require that the member has a leader. ``auth``: send the token."""

    path: str
    serialize: Callable[[Request], bytes]
    parse: Callable[[bytes], Response]
    leader: bool = True
    auth: bool = True

    @staticmethod
    def of(
        path: str, request: type[Asked], response: type[Answer], *, leader: bool = True, auth: bool = True
    ) -> Method[Asked, Answer]:
        """The method at ``Service/Name`` with these request and response messages."""
        return Method(f"/etcdserverpb.{path}", request.SerializeToString, response.FromString, leader, auth)


RANGE = Method.of("KV/Range", rpc.RangeRequest, rpc.RangeResponse)
TXN = Method.of("KV/Txn", rpc.TxnRequest, rpc.TxnResponse)
COMPACT = Method.of("KV/Compact", rpc.CompactionRequest, rpc.CompactionResponse)
GRANT = Method.of("Lease/LeaseGrant", rpc.LeaseGrantRequest, rpc.LeaseGrantResponse)
REVOKE = Method.of("Lease/LeaseRevoke", rpc.LeaseRevokeRequest, rpc.LeaseRevokeResponse)
TIME_TO_LIVE = Method.of("Lease/LeaseTimeToLive", rpc.LeaseTimeToLiveRequest, rpc.LeaseTimeToLiveResponse)
KEEP_ALIVE = Method.of("Lease/LeaseKeepAlive", rpc.LeaseKeepAliveRequest, rpc.LeaseKeepAliveResponse)
WATCH = Method.of("Watch/Watch", rpc.WatchRequest, rpc.WatchResponse)
STATUS = Method.of("Maintenance/Status", rpc.StatusRequest, rpc.StatusResponse, leader=False)
ALARM = Method.of("Maintenance/Alarm", rpc.AlarmRequest, rpc.AlarmResponse, leader=False)
MEMBERS = Method.of("Cluster/MemberList", rpc.MemberListRequest, rpc.MemberListResponse, leader=False)
AUTHENTICATE = Method.of(
    "Auth/Authenticate", rpc.AuthenticateRequest, rpc.AuthenticateResponse, leader=False, auth=False
)


class RequestFailed(Exception):
    """One attempt failed; used in distop.store only. ``failure``: its class, ``token``: the token that was sent."""

    def __init__(self, failure: Failure, token: str | None = None) -> None:
        super().__init__(str(failure))
        self.failure = failure
        self.token = token


def being_cancelled() -> bool:
    """Whether the current task is being cancelled. (A gRPC call that we cancelled raises the same exception.)"""
    return _cancels() > 0


def _cancels() -> int:
    """The number of cancellations of the current task."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0


def _grpc_channel(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=channel_options())
    return grpc.aio.secure_channel(address, credentials, options=channel_options())


channels: ContextVar[Callable[[str, grpc.ChannelCredentials | None], grpc.aio.Channel]] = ContextVar(
    "distop-channels", default=_grpc_channel
)
"""Function that makes the channel to an address. The simulator replaces it."""


@dataclass(slots=True)
class _Member:
    """One endpoint with its channel, and a cache of the channel's callables."""

    address: str
    channel: grpc.aio.Channel
    credentials: grpc.ChannelCredentials | None
    calls: dict[str, Any] = field(default_factory=dict)


@lru_cache(maxsize=64)
def _warn_once(text: str) -> None:
    """Log a warning once per process: a daemon connects often."""
    log.warning("%s", text)


class Transport:
    """The channels to all endpoints. Create and use it in one running event loop.

    ``identity``: the cluster's identity, if known.
    """

    def __init__(self, config: EtcdConfig, identity: Identity | None = None) -> None:
        self._config = config
        self._members: list[_Member] = []
        self._credentials: grpc.ChannelCredentials | None = None
        self._stamp: tls_files.Stamp | None = None
        """Stamp of the certificate files that were read last, whether they were valid or not."""
        self._retiring: set[asyncio.Task[None]] = set()
        self._current = 0
        self._token: str | None = None
        self._token_lock = asyncio.Lock()
        self.identity = identity if identity is not None else Identity()
        self._closed = False
        self.on_endpoint_failed: set[Callable[[str], None]] = set()
        """Called with the address of an endpoint that failed: streams to it may be dead, too."""

    # ---- channels

    def open(self) -> None:
        """Create the channels, which connect on first use. Raises InvalidArgument for invalid certificates."""
        if self._members:
            return
        if warning := plaintext_password_warning(self._config):
            _warn_once(warning)
        if self._config.secure:
            self._stamp = tls_files.stamp(self._config)
            self._read_certificates()
        self._members = [self._connect(endpoint.address) for endpoint in self._config.members]

    def _connect(self, address: str) -> _Member:
        return _Member(address, channels.get()(address, self._credentials), self._credentials)

    def _read_certificates(self) -> None:
        found = tls_files.read(self._config)
        self._credentials = grpc.ssl_channel_credentials(found.ca, found.key, found.cert)

    def _reload_certificates(self, address: str) -> None:
        """After a failed connection: if the certificate files were replaced, reconnect with the new ones.

        A gRPC channel itself keeps the certificates that it was created with.
        """
        if not self._config.secure or self._closed:
            return
        if (stamp := tls_files.stamp(self._config)) != self._stamp:
            self._stamp = stamp
            try:
                self._read_certificates()
            except InvalidArgument as error:
                log.warning("The changed certificate files are invalid; keeping the previous certificates: %s", error)
            else:
                log.info("The certificate files have changed; new connections use them")
        for n, member in enumerate(self._members):
            stale = member.address == address and member.credentials is not self._credentials
            # A connected channel may have streams, and its failures have other causes than certificates.
            if stale and member.channel.get_state() is not grpc.ChannelConnectivity.READY:
                self._members[n] = self._connect(address)
                self._retire(member)

    def _retire(self, member: _Member) -> None:
        """Close a channel after its requests have ended."""
        # Twice the time-out of a request and of a lease renewal: no call waits longer.
        closing = asyncio.ensure_future(member.channel.close(2 * self._config.request_timeout))
        self._retiring.add(closing)
        closing.add_done_callback(self._retiring.discard)

    @property
    def size(self) -> int:
        """The number of endpoints."""
        return len(self._config.endpoints)

    @property
    def address(self) -> str:
        """The endpoint in use."""
        return self._members[self._current].address if self._members else self._config.members[0].address

    @property
    def users_off(self) -> bool:
        """Whether a user is given although etcd's authentication is disabled."""
        return self._token == ""

    def use_next_member(self, address: str) -> None:
        """Use the next endpoint after ``address`` failed; does nothing if another one is in use already."""
        if len(self._members) > 1 and self._members[self._current].address == address:
            self._current = (self._current + 1) % len(self._members)
            log.info("etcd endpoint %s failed; using %s", address, self._members[self._current].address)
            for callback in list(self.on_endpoint_failed):
                callback(address)

    async def close(self) -> None:
        """Close the channels; pending requests fail as CLOSED."""
        self._closed = True
        members, self._members = self._members, []
        for member in members:
            await member.channel.close(None)
        for closing in self._retiring:
            closing.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)

    def check(self) -> None:
        """Raises EtcdUnavailable if the client is closed, ClusterChanged if the cluster has changed."""
        self.identity.check()
        if self._closed:
            raise EtcdUnavailable("the etcd client is closed")

    def _member(self) -> _Member:
        self.check()
        if not self._members:
            self.open()
        return self._members[self._current]

    # ---- one attempt

    async def unary(self, method: Method[Request, Response], request: Request, timeout: float) -> Response:
        """Send one attempt of one request. Raises RequestFailed; EtcdUnavailable (closed); ClusterChanged."""
        member = self._member()
        call = member.calls.get(method.path)
        if call is None:
            call = member.channel.unary_unary(
                method.path, request_serializer=method.serialize, response_deserializer=method.parse
            )
            member.calls[method.path] = call
        metadata = await self._metadata(method)
        seen, token = self.identity.revision, self._token
        cancels = _cancels()
        try:
            response: Response = await call(request, timeout=timeout, metadata=metadata)
        except asyncio.CancelledError:
            if not self._closed or _cancels() > cancels:
                raise
            raise RequestFailed(CLOSED, token) from None  # gRPC cancels the calls of a closed channel
        except grpc.aio.AioRpcError as error:
            raise self.failed(error, member.address, token) from None
        except grpc.aio.UsageError as error:
            raise EtcdUnavailable("the etcd client is closed") from error
        self.see(response.header, linearizable_after=seen if method.path.startswith("/etcdserverpb.KV/") else 0)  # type: ignore[attr-defined]
        return response

    async def stream(self, method: Method[Request, Response]) -> tuple[Any, str]:
        """Open a stream, with a new token if a user is set; returns the call and the endpoint's address."""
        if self._config.username:
            await self.refresh_token(self._token)
        member = self._member()
        factory = member.channel.stream_stream(
            method.path, request_serializer=method.serialize, response_deserializer=method.parse
        )
        return factory(None, metadata=await self._metadata(method)), member.address

    def failed(self, error: grpc.aio.AioRpcError, address: str, token: str | None = None) -> RequestFailed:
        """The RequestFailed for a gRPC error; switches to another endpoint if that may help."""
        failure = classify(error.code().name, error.details() or "")
        if failure.elsewhere:
            self._reload_certificates(address)
            self.use_next_member(address)
        return RequestFailed(failure, token)

    # ---- identity

    def see(self, header: rpc.ResponseHeader, *, linearizable_after: int = 0) -> None:
        """Check the identity in a response's header. Raises ClusterChanged (:meth:`Identity.see`)."""
        self.identity.see(header, ", ".join(self._config.endpoints), linearizable_after=linearizable_after)

    # ---- tokens

    async def _metadata(self, method: Method[Any, Any]) -> tuple[tuple[str, str], ...]:
        if not method.auth or not self._config.username:
            return (_HAS_LEADER,) if method.leader else ()
        if self._token is None:
            await self.refresh_token(None)
        token = (("token", self._token),) if self._token else ()
        return (*token, _HAS_LEADER) if method.leader else token

    async def refresh_token(self, stale: str | None) -> None:
        """Fetch a token, unless ``stale`` was already replaced. Raises RequestFailed, PermissionDenied."""
        async with self._token_lock:
            if self._token != stale:
                return
            config = self._config
            request = rpc.AuthenticateRequest(name=config.username or "", password=config.password or "")
            try:
                response = await self.unary(AUTHENTICATE, request, config.request_timeout)
            except RequestFailed as error:
                failure = error.failure
                if "authentication is not enabled" in failure.detail:
                    self._token = ""  # authentication is disabled; it may be enabled later
                    return
                if failure.kind in (FailureKind.FINAL, FailureKind.TOKEN):
                    raise self._authentication_error(failure) from None
                # A token request changes nothing, and the request that needs it was not sent.
                raise RequestFailed(Failure(FailureKind.NOT_DONE, failure.code, failure.detail)) from None
            self._token = response.token

    def _authentication_error(self, failure: Failure) -> Exception:
        if failure.code in ("INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED"):
            return PermissionDenied(
                f"etcd does not accept the user {self._config.username!r} with this password: correct both",
                code=failure.code,
                detail=failure.detail,
            )
        return self.rejection(failure, "the authentication")

    def rejection(self, failure: Failure, what: str) -> EtcdRejected:
        """The exception for a FINAL failure; it names our user and the prefix of our keys."""
        namespace = self._config.namespace
        keys = f"{namespace}/{OP}" if namespace else OP
        return rejection(failure, what, user=self._config.username, keys=keys)
