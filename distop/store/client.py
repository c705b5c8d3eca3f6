"""The etcd client: transactions with reliable outcomes, pinned reads, leases, status.

It follows the rules in docs/internals/etcd-rules.md, which are cited by number.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Self, TypeVar

from distop.clock import time
from distop.errors import (
    Compacted,
    EtcdRejected,
    EtcdUnavailable,
    LeaseNotFound,
    MalformedRequest,
    OutcomeUnknown,
    PermissionDenied,
)
from distop.protocol.frozen import frozen
from distop.protocol.supported_versions import Judgement, judge_etcd, parse_version
from distop.protocol.txn import flaw, largest_value, operations, request_bytes
from distop.runtime.backoff import Backoff
from distop.store import endpoint_diagnosis
from distop.store import transport as wire
from distop.store._proto import rpc_pb2 as rpc
from distop.store.connection_settings import EtcdConfig
from distop.store.etcd_messages import decode_range, decode_txn, encode_txn, fill_get, key_value, to_bytes
from distop.store.grpc_failures import Failure, FailureKind
from distop.store.request_retry import Repeater, RequestRetries
from distop.store.transport import Method, RequestFailed, Transport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from types import TracebackType

    from distop.protocol.txn import Get, GetResult, KeyValue, Txn, TxnResult
    from distop.store.cluster_identity import Identity


log = logging.getLogger("distop.store")
malformed = logging.getLogger("distop.malformed")
"""Logs transactions that etcd rejects with its default limits: their builder has a bug."""

_PAUSE = (0.05, 0.5)
"""Seconds of back-off while connecting, first and longest."""
SILENT_FOR = 1.0
"""Seconds of waiting for a connection before a warning is logged."""

Request = TypeVar("Request")
Response = TypeVar("Response")

PAGE = 1_000
"""Keys in one page of a list."""

_WIDE = 4
"""Pages of keys in a range, beyond which the next request asks for a narrower range."""

_warned: set[str] = set()


def _explained(error: MalformedRequest, txn: Txn) -> MalformedRequest:
    """The error with the key and the limit concerned.

    If etcd would reject the transaction with its default limits, its builder has a bug; else this etcd's limits are
    lower. This is checked only after a rejection, so it costs nothing otherwise.
    """
    found = flaw(txn)
    if found is not None:
        malformed.error("etcd rejected a malformed transaction: %s", found.text, extra={"malformed": found.text})
        return MalformedRequest(f"{error}: {found.text}", code=error.code, detail=error.detail, key=found.key)
    key, size = largest_value(txn)
    has = f"it has {request_bytes(txn)} bytes and {operations(txn)} operations"
    largest = f"; the largest value is that of {key} ({size} bytes)" if key else ""
    return MalformedRequest(f"{error}: {has}{largest}", code=error.code, detail=error.detail, key=key)


def _prefix_end(key: bytes, cut: int, last: bytes) -> bytes:
    """The end of the range that shares the key's prefix, the key without its last ``cut`` bytes; at most ``last``."""
    prefix = key.rstrip(b"\0")[:-cut]
    bound = prefix[:-1] + bytes([prefix[-1] + 1]) if prefix else last
    return min(bound, last) if bound > key else last


@frozen
class Listing:
    """The content of a range at ``revision``: a watch starts from the next revision (W1)."""

    revision: int
    kvs: tuple[KeyValue, ...]


@frozen
class Member:
    """A member of the etcd cluster."""

    id: int
    name: str
    client_urls: tuple[str, ...]
    peer_urls: tuple[str, ...]
    learner: bool = False


@frozen
class ServerStatus:
    """The status of the etcd member in use. Sizes are in bytes; unknown fields are 0 or empty.

    ``denied``: our user may not read the status; then only the fields known from reads are set.
    """

    endpoint: str
    version: str = ""
    cluster_id: int = 0
    member_id: int = 0
    leader: int = 0
    revision: int = 0
    raft_term: int = 0
    db_size: int = 0
    db_size_in_use: int = 0
    db_size_quota: int = 0
    alarms: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    denied: bool = False


class EtcdClient:
    """A client of one etcd cluster, for one event loop. All methods may be called concurrently.

    Besides the documented errors of each method, all raise EtcdUnavailable (etcd could not be reached; a write was
    certainly not applied), PermissionDenied and other subclasses of EtcdRejected, and ClusterChanged.

    ``identity``: the cluster's identity, if an earlier client learned it.
    """

    def __init__(self, config: EtcdConfig | None = None, identity: Identity | None = None) -> None:
        self.config = config if config is not None else EtcdConfig()
        self.transport = Transport(self.config, identity)
        self._repeater = Repeater(self.transport, self.config)
        self._versions: dict[str, tuple[int, ...]] = {}
        self.suggests_tables = True
        """Whether an error about an unknown table may name another one: its reader may see all tables."""
        self.on_commit: Callable[[str, float, str], None] | None = None
        """Called when a transaction ends: label, seconds, and ``applied``, ``refused`` or ``error``."""

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---- connection

    async def connect(self) -> None:
        """Wait until any endpoint answers a linearizable read, at most ``connect_timeout`` seconds.

        Raises EtcdUnavailable (which endpoints were tried, and what to do), PermissionDenied for wrong credentials,
        InvalidArgument for unreadable certificates.
        """
        self.transport.open()
        diagnosis = endpoint_diagnosis.Diagnosis(self.config.members, self.config.secure, self.config.connect_timeout)
        try:
            await self._connect(diagnosis)
        finally:
            diagnosis.cancel()

    async def _connect(self, diagnosis: endpoint_diagnosis.Diagnosis) -> None:
        config = self.config
        request = rpc.RangeRequest(key=b"distOp", limit=1, keys_only=True)
        started = time.monotonic()
        backoff, last, warned = Backoff(*_PAUSE), None, False
        while True:
            waited = time.monotonic() - started
            left = config.connect_timeout - waited
            until_diagnosis = diagnosis.start_if_due(left)
            if left <= 0:
                raise EtcdUnavailable(self._connect_error(await diagnosis.results(), last))
            if not warned and waited >= SILENT_FOR:
                warned = True
                log.warning("Waiting for etcd at %s", ", ".join(member.address for member in config.members))
            try:
                await self.transport.unary(wire.RANGE, request, min(config.request_timeout, until_diagnosis))
                if warned:
                    log.warning("Connected to etcd at %s", self.transport.address)
                return
            except RequestFailed as error:
                last = error.failure
                if last.kind is FailureKind.FINAL and last.code == "PERMISSION_DENIED":
                    return  # the user is authenticated, but may not read this key
                if last.kind is FailureKind.FINAL:
                    raise self.transport.rejection(last, "the first read") from None
                if last.kind is FailureKind.TOKEN:
                    if not config.username:
                        raise PermissionDenied(
                            "etcd requires a user name and a password: give --user and DISTOP_PASSWORD, or in Python "
                            "`username` and `password`",
                            code=last.code,
                            detail=last.detail,
                        ) from None
                    await self._repeater.fresh_token(error.token)
            left = config.connect_timeout - (time.monotonic() - started)
            await asyncio.sleep(min(backoff.pause(), max(left, 0)))

    def _connect_error(self, reasons: Sequence[str], last: Failure | None) -> str:
        config = self.config
        parts = []
        for endpoint, reason in zip(config.members, reasons, strict=True):
            if not reason and last is not None:
                silent = last.code == "DEADLINE_EXCEEDED"
                reason = "it does not answer" if silent else f"it answered: {last.detail or last.code}"
            parts.append(f"{endpoint.address} ({reason})" if reason else endpoint.address)
        return (
            f"etcd could not be reached within {config.connect_timeout:g} s at {', '.join(parts)}: "
            "start etcd there, or give its endpoints (--etcd HOST:PORT or DISTOP_ETCD)"
        )

    async def close(self) -> None:
        """Close the connections. Pending writes raise OutcomeUnknown, and pending reads EtcdUnavailable."""
        await self.transport.close()

    # ---- transactions

    async def commit(
        self, txn: Txn, *, deadline: float | None = None, until: asyncio.Future[Any] | None = None
    ) -> TxnResult:
        """Send a guarded transaction until its outcome is known (T9).

        While the outcome of a copy is unknown, the identical transaction is sent again. The result then has
        ``repeated`` set, and a refusal may mean that an earlier copy was applied: check the reads of the failure
        branch. ``deadline``: seconds from now, None for no limit. ``until``: stop when this future is done (the
        session was lost).

        Raises OutcomeUnknown if time is up after a copy that may have been applied, or if etcd then rejects a
        repetition for a reason other than permissions, which may be restored; EtcdUnavailable if time is up and no
        copy was applied; EtcdRejected and its subclasses if etcd rejected the first copy, MalformedRequest for an
        invalid transaction.
        """
        request = encode_txn(txn)
        attempts = RequestRetries(txn.label or "transaction", deadline, until=until)
        started, outcome = time.monotonic(), "error"
        try:
            response = await self._repeater.send(wire.TXN, request, attempts)
            outcome = "applied" if response.succeeded else "refused"
        except MalformedRequest as error:
            raise _explained(error, txn) from None
        finally:
            if self.on_commit is not None:
                self.on_commit(txn.label or "transaction", time.monotonic() - started, outcome)
        return decode_txn(response, repeated=attempts.unknown)

    # ---- reads, all linearizable

    async def get(self, key: str) -> KeyValue | None:
        """One key, or None."""
        response = await self._read(wire.RANGE, rpc.RangeRequest(key=to_bytes(key)))
        return key_value(response.kvs[0]) if response.kvs else None

    async def read(self, *gets: Get) -> tuple[GetResult, ...]:
        """Several reads at one revision, in one transaction."""
        return (await self.read_at(*gets))[1]

    async def read_at(self, *gets: Get) -> tuple[int, tuple[GetResult, ...]]:
        """Like :meth:`read`; also returns the revision of the reads."""
        request = rpc.TxnRequest()
        for get in gets:
            fill_get(request.success.add().request_range, get)
        attempts = RequestRetries("read", self.config.read_timeout, idempotent=True, stop_on_no_space=True)
        try:
            response = await self._repeater.send(wire.TXN, request, attempts)
        except RequestFailed:
            return await self._read_one_by_one(request)
        results = tuple(decode_range(part.response_range) for part in response.responses)
        return response.header.revision, results

    async def _read_one_by_one(self, request: rpc.TxnRequest) -> tuple[int, tuple[GetResult, ...]]:
        """The reads of a transaction one by one, pinned to the revision of the first.

        A full etcd (before 3.4.20 and 3.5.7) rejects even read-only transactions.
        """
        while True:
            revision, results = 0, []
            try:
                for part in request.success:
                    part.request_range.revision = revision
                    answer = await self._read(wire.RANGE, part.request_range)
                    revision = revision or answer.header.revision
                    results.append(decode_range(answer))
                return revision, tuple(results)
            except Compacted:
                log.info("etcd compacted the revision %d of a read; reading again", revision)

    async def list(
        self, start: str, end: str, *, keys_only: bool = False, page: int = PAGE, revision: int = 0
    ) -> Listing:
        """All keys in ``[start, end)``, in order, in pages pinned to the first one's revision.

        ``revision`` 0 means the current one; if it is compacted during paging, the list starts again. For another
        revision, raises Compacted if it was compacted.
        """
        while True:
            try:
                return await self._list(start, end, keys_only, page, revision)
            except Compacted:
                if revision:
                    raise
                log.info("etcd compacted the revision of a list of %s during paging; listing again", start)

    async def _list(self, start: str, end: str, keys_only: bool, page: int, revision: int) -> Listing:
        request = rpc.RangeRequest(
            key=to_bytes(start), range_end=to_bytes(end), limit=page, keys_only=keys_only, revision=revision
        )
        found: list[KeyValue] = []
        while True:
            response = await self._read(wire.RANGE, request)
            if not request.revision:
                request.revision = response.header.revision
            found.extend(map(key_value, response.kvs))
            if not response.more:
                return Listing(request.revision, tuple(found))
            request.key = response.kvs[-1].key + b"\0"

    async def pages(
        self, start: str, end: str, *, keys_only: bool = False, page: int = PAGE, revision: int = 0
    ) -> AsyncIterator[tuple[KeyValue, ...]]:
        """All keys in ``[start, end)``, in order, one page at a time, for lists too large for memory.

        All pages have one revision: ``revision``, or that of the first page (R2).

        Raises Compacted, also after some pages, if the revision was compacted: the caller starts again.
        """
        async for part in self.parts(start, end, keys_only=keys_only, page=page, revision=revision):
            if part.kvs:
                yield part.kvs

    async def parts(
        self, start: str, end: str, *, keys_only: bool = False, page: int = PAGE, revision: int = 0
    ) -> AsyncIterator[Listing]:
        """Like :meth:`pages`, each page with the revision; at least one page, and pages may be empty.

        For each page etcd counts all keys of the requested range, so the cost of plain paging grows with the square of
        the number of keys. Here each request covers a range of about one page: the keys that share a prefix with the
        last key. The length of the prefix adapts to the counts of earlier pages.
        """
        last, cut = to_bytes(end), 1
        request = rpc.RangeRequest(
            key=to_bytes(start), range_end=last, limit=page, keys_only=keys_only, revision=revision
        )
        while True:
            response = await self._read(wire.RANGE, request)
            request.revision = request.revision or response.header.revision
            yield Listing(request.revision, tuple(map(key_value, response.kvs)))
            if response.count > _WIDE * page:
                cut = max(1, cut - 1)
            elif response.count <= page:
                cut += 1
            if response.more:
                request.key = response.kvs[-1].key + b"\0"
            elif request.range_end == last:
                return
            else:
                request.key = request.range_end
            request.range_end = _prefix_end(request.key, cut, last)

    async def count(self, start: str, end: str) -> int:
        """The number of keys in ``[start, end)``."""
        request = rpc.RangeRequest(key=to_bytes(start), range_end=to_bytes(end), count_only=True)
        return (await self._read(wire.RANGE, request)).count

    # ---- leases

    async def grant(self, ttl: int, lease_id: int, *, deadline: float | None = None) -> int:
        """Grant a lease of ``ttl`` seconds under the caller's id (L6); returns the granted TTL.

        If a repetition after an unknown outcome finds the lease, that is a success. Raises EtcdRejected if another
        lease has the id.
        """
        request = rpc.LeaseGrantRequest(TTL=ttl, ID=lease_id)
        attempts = RequestRetries("grant", deadline)
        try:
            return (await self._repeater.send(wire.GRANT, request, attempts)).TTL
        except (EtcdRejected, OutcomeUnknown) as error:
            cause = error if isinstance(error, EtcdRejected) else error.__cause__
            if not (attempts.unknown and isinstance(cause, EtcdRejected) and "already exists" in cause.detail):
                raise
        granted, _ = await self.time_to_live(lease_id)
        if granted <= 0:
            raise LeaseNotFound("the lease ended before its grant was answered")
        return granted

    async def revoke(self, lease_id: int, *, deadline: float | None = 5.0) -> None:
        """Revoke a lease and delete its keys; does nothing if the lease does not exist."""
        try:
            await self._repeater.send(
                wire.REVOKE, rpc.LeaseRevokeRequest(ID=lease_id), RequestRetries("revoke", deadline)
            )
        except LeaseNotFound:
            pass
        except OutcomeUnknown as error:
            if not isinstance(error.__cause__, LeaseNotFound):
                raise

    async def time_to_live(self, lease_id: int) -> tuple[int, int]:
        """The granted TTL of a lease and its remaining seconds; (0, -1) if it does not exist."""
        response = await self._read(wire.TIME_TO_LIVE, rpc.LeaseTimeToLiveRequest(ID=lease_id))
        return response.grantedTTL, response.TTL

    # ---- the server

    async def status(self) -> ServerStatus:
        """The status of the member in use; fields that our user may not read are left out."""
        try:
            status = await self._read(wire.STATUS, rpc.StatusRequest())
        except PermissionDenied:
            return ServerStatus(endpoint=self.transport.address, denied=True)
        try:
            alarms = await self.alarms()
        except EtcdRejected:
            alarms = ()
        return ServerStatus(
            endpoint=self.transport.address,
            version=status.version,
            cluster_id=status.header.cluster_id,
            member_id=status.header.member_id,
            leader=status.leader,
            revision=status.header.revision,
            raft_term=status.header.raft_term,
            db_size=status.dbSize,
            db_size_in_use=status.dbSizeInUse,
            db_size_quota=status.dbSizeQuota,
            alarms=alarms,
            errors=tuple(status.errors),
        )

    async def version(self) -> tuple[int, ...]:
        """The version of the member in use, cached per member; empty if our user may not read it."""
        known = self._versions.get(self.transport.address)
        if known is None:
            status = await self.status()
            known = self._versions[status.endpoint] = parse_version(status.version)
        return known

    def known_version(self, address: str) -> tuple[int, ...]:
        """The version of a member if :meth:`version` has read it; else empty."""
        return self._versions.get(address, ())

    async def judge_server(self) -> tuple[Judgement, int]:
        """The judgement on the server's version, and the number of members (0: we may not read it).

        The cluster's size for the judgement is the number of members or of endpoints, whichever is larger.
        """
        status = await self.status()
        try:
            members = len(await self.members())
        except EtcdRejected:
            members = 0
        return judge_etcd(status.version, max(members, self.transport.size)), members

    async def check_server(self) -> None:
        """Warn once about an unreliable server version. Raises EtcdRejected for one that must not be used."""
        judged, _ = await self.judge_server()
        if judged.level == "error" and not self.config.accept_defects:
            raise EtcdRejected(judged.text)
        if judged.level != "ok" and judged.brief not in _warned:
            _warned.add(judged.brief)
            log.warning("%s", judged.brief)

    async def alarms(self) -> tuple[str, ...]:
        """The active alarms: ``NOSPACE``, ``CORRUPT``."""
        response = await self._read(wire.ALARM, rpc.AlarmRequest(action=rpc.AlarmRequest.GET))
        return tuple(sorted({rpc.AlarmType.Name(alarm.alarm) for alarm in response.alarms}))

    async def members(self) -> tuple[Member, ...]:
        """The members of the cluster."""
        response = await self._read(wire.MEMBERS, rpc.MemberListRequest())
        return tuple(
            Member(member.ID, member.name, tuple(member.clientURLs), tuple(member.peerURLs), member.isLearner)
            for member in response.members
        )

    async def administer(self, method: Method[Request, Response], request: Request) -> Response:
        """Send a change of users or roles until it is answered; such a change is idempotent."""
        attempts = RequestRetries("change of roles", self.config.read_timeout, idempotent=True)
        return await self._repeater.send(method, request, attempts)

    async def _read(self, method: Method[Request, Response], request: Request) -> Response:
        """Send a request that may be repeated without limit."""
        return await self._repeater.send(
            method, request, RequestRetries("read", self.config.read_timeout, idempotent=True)
        )
