"""The session of one incarnation: a lease with its node key, and the deadline by which all its work stops.

The deadline makes a lost session safe: it is before the earliest moment at which etcd can expire the lease, whatever
happens to messages, and it is computed here without any request (L1).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from distop.clock import secrets, time
from distop.errors import (
    ClusterChanged,
    DistopError,
    EtcdRejected,
    EtcdUnavailable,
    LeaseNotFound,
    OutcomeUnknown,
    SessionLost,
    describe,
)
from distop.protocol.txn import Get, GetResult, Put, Txn, absent, unchanged
from distop.store import transport as wire
from distop.store._proto import rpc_pb2 as rpc
from distop.store.transport import RequestFailed, being_cancelled

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.store.client import EtcdClient

log = logging.getLogger("distop.store")

_REVOKE_LIMIT = 3.0  # seconds; after that the lease is left to expire
_CHECK_EVERY = 0.2  # maximum seconds between two checks of the clock


def boottime() -> float:
    """Seconds of the clock for deadlines, which also counts while the machine is suspended (L1)."""
    return time.boottime()


def new_lease_id() -> int:
    """A new lease id, chosen by the client so that a repeated grant is recognized (L6)."""
    return secrets.randbits(62) + 1


class Session:
    """Keeps the lease of one incarnation and its node key alive.

    ``ttl``: requested whole seconds (etcd's minimum is about 2, L7); the granted TTL counts (L2). ``margin``: seconds
    between the deadline and the earliest expiry, in which work must stop (default: 1 s, or a quarter of the TTL).
    ``on_deadline_moved`` is called with each new deadline, on the clock of :func:`boottime`.

    ``lost`` is done, with the reason, when the session ends: the lease or the node key is gone, or the deadline has
    passed. A session that was lost never recovers; a new incarnation follows.
    """

    def __init__(
        self,
        client: EtcdClient,
        node_key: str,
        value: bytes,
        ttl: int,
        *,
        lease_id: int = 0,
        margin: float | None = None,
        on_deadline_moved: Callable[[float], None] | None = None,
    ) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.node_key = node_key
        self.lease_id = lease_id or new_lease_id()
        self.ttl = ttl
        self.deadline = 0.0
        self.create_revision = 0
        """The node key's create revision: it identifies the session in guards."""
        self._mod = 0
        """The last known mod revision of the node key."""
        self._client = client
        self._value = value
        self._margin = margin
        self._on_deadline_moved = on_deadline_moved
        self._tasks: list[asyncio.Task[None]] = []
        self._updating = asyncio.Lock()
        self._call: Any = None
        self._address = ""

    @property
    def alive(self) -> bool:
        """Whether work may continue under this session. Checks the clock, not only ``lost``."""
        return self.create_revision > 0 and not self.lost.done() and boottime() < self.deadline

    @property
    def margin(self) -> float:
        """Seconds between the deadline and the earliest moment at which the lease can expire."""
        return self._margin if self._margin is not None else min(1.0, self.ttl / 4)

    # ---- for the owner

    async def start(self) -> None:
        """Grant the lease and put the node key on it; keep both until :meth:`close`.

        Raises SessionLost if the node key exists already or the lease ends meanwhile, and the errors of ``commit``.
        """
        sent = boottime()
        self.ttl = await self._client.grant(self.ttl, self.lease_id)
        if boottime() - sent <= self.ttl / 3:
            self._move_deadline(sent)
        while not self.deadline:  # etcd answered too late: start with a renewal
            try:
                await self._renew(self.ttl / 3)
            except RequestFailed:
                await asyncio.wait([self.lost], timeout=0.1)
            if self.lost.done():
                raise SessionLost(f"the session ended during its start: {self.lost.result()}")
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._guard(), name="distop-session-guard"),
            loop.create_task(self._keep_alive(), name="distop-session-keep-alive"),
        ]
        try:
            await self._put_node_key()
        except BaseException:
            await self._stop()
            raise
        self._tasks.append(loop.create_task(self._verify(), name="distop-session-verify"))

    async def update(self, value: bytes) -> None:
        """Rewrite the node key under the same lease. Raises SessionLost, and the errors of ``commit``."""
        async with self._updating:
            while not await self._rewrite(value):
                pass

    async def _rewrite(self, value: bytes) -> bool:
        """Replace the last known record: a late copy of an update must not undo later updates (T9).

        False: etcd has another record, from an earlier update of ours that was reported as failed.
        """
        if self.lost.done():
            raise SessionLost(self.lost.result())
        put = Put(self.node_key, value, self.lease_id)
        txn = Txn((unchanged(self.node_key, self._mod),), (put,), (Get(self.node_key),), label="node update")
        try:
            result = await self._client.commit(txn, until=self.lost)
        except LeaseNotFound:
            self._lose("its lease is gone")
            raise SessionLost(self.lost.result()) from None
        except (OutcomeUnknown, EtcdUnavailable) as error:
            if self.lost.done():
                raise SessionLost(self.lost.result()) from error
            raise
        if result.succeeded:
            self._mod = result.revision
        else:
            found = result.responses[0]
            node = found.kv if isinstance(found, GetResult) else None
            if node is None or node.create_revision != self.create_revision:
                self.node_key_gone()
                raise SessionLost(self.lost.result())
            self._mod = node.mod_revision
            if node.value != value:
                return False
        self._value = value
        return True

    def node_key_gone(self) -> None:
        """End the session because the node key was deleted, even if renewals succeed (L2)."""
        self._lose(f"its node key {self.node_key} was deleted")

    async def close(self) -> None:
        """End the session: revoke the lease and its node key, so that nobody waits for its expiry."""
        was_lost = self.lost.done()
        await self._stop()
        if not was_lost:
            self._lose("it was closed")
        left = max(self.deadline - boottime(), 0.0)
        if not was_lost and left:
            with contextlib.suppress(DistopError):
                await self._client.revoke(self.lease_id, deadline=min(left, _REVOKE_LIMIT))

    # ---- the deadline

    def _move_deadline(self, sent: float) -> None:
        """Move the deadline after an answer to a request of ``sent``: the lease lasts a TTL from then on (L1)."""
        deadline = sent + self.ttl - self.margin
        if self.deadline and boottime() >= self.deadline:
            self._lose("no renewal was acknowledged before the deadline")  # work that has stopped cannot resume
            return
        if deadline > self.deadline:
            self.deadline = deadline
            log.debug("Deadline of session %s moved to %.3f, margin %.3f", self.node_key, deadline, self.margin)
            if self._on_deadline_moved is not None:
                self._on_deadline_moved(deadline)

    async def _guard(self) -> None:
        """Check the clock often: the loop's timers do not count while the machine is suspended."""
        while not self.lost.done():
            left = self.deadline - boottime()
            if left <= 0:
                self._lose("no renewal was acknowledged before the deadline")
                return
            await asyncio.wait([self.lost], timeout=min(left, _CHECK_EVERY))

    def _lose(self, reason: str) -> None:
        if self.lost.done():
            return
        self.lost.set_result(reason)
        log.info("Session %s ended: %s", self.node_key, reason)
        if self._call is not None:
            self._call.cancel()

    # ---- the lease

    async def _put_node_key(self) -> None:
        txn = Txn(
            (absent(self.node_key),),
            (Put(self.node_key, self._value, self.lease_id), Get(self.node_key)),
            (Get(self.node_key),),
            label="node",
        )
        try:
            result = await self._client.commit(txn, until=self.lost)
        except LeaseNotFound:
            raise SessionLost("the lease ended before the node key was written") from None
        except (OutcomeUnknown, EtcdUnavailable) as error:
            if self.lost.done():
                raise SessionLost(f"the session ended during its start: {self.lost.result()}") from error
            raise
        found = result.responses[-1]
        node = found.kv if isinstance(found, GetResult) else None
        # If the key is on our lease, an earlier copy of this transaction was applied (T9).
        if node is None or node.lease != self.lease_id:
            raise SessionLost(f"the node key {self.node_key} exists already: an incarnation id is used only once")
        self.create_revision, self._mod = node.create_revision, node.mod_revision

    async def _keep_alive(self) -> None:
        """Renew every TTL/3, one request outstanding on one stream (L1, L3)."""
        interval, logged = self.ttl / 3, ""
        try:
            while not self.lost.done():
                started = boottime()
                try:
                    await self._renew(interval)
                    logged = ""
                except (RequestFailed, EtcdRejected) as error:
                    # Log an outage once: there are ten attempts a second.
                    level = logging.DEBUG if str(error) == logged else logging.WARNING
                    log.log(level, "Renewal of session %s failed; retrying: %s", self.node_key, error)
                    logged = str(error)
                    # For "not a primary lessor" and the like: retry soon, but not in a busy loop (L2).
                    await asyncio.wait([self.lost], timeout=min(0.1, interval / 4))
                    continue
                await asyncio.wait([self.lost], timeout=max(interval - (boottime() - started), 0.0))
        except (ClusterChanged, EtcdUnavailable) as error:
            self._lose(describe(error))
        finally:
            self._drop_stream()

    async def _renew(self, time_limit: float) -> None:
        transport = self._client.transport
        sent = boottime()
        try:
            async with asyncio.timeout(time_limit):
                if self._call is None:
                    self._call, self._address = await transport.stream(wire.KEEP_ALIVE)
                await self._call.write(rpc.LeaseKeepAliveRequest(ID=self.lease_id))
                answer = await self._call.read()
        except TimeoutError:
            # The request waits for the revocation of an expired lease (L3), or the member is silent: use another one.
            transport.use_next_member(self._address)
            self._drop_stream()
            if not self.lost.done():
                message = "A renewal of session %s was not answered within %.1f s; retrying"
                log.warning(message, self.node_key, time_limit)
            return
        except grpc.aio.AioRpcError as error:
            self._drop_stream()
            raise transport.failed(error, self._address) from None
        except asyncio.InvalidStateError:  # the stream had ended
            self._drop_stream()
            return
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            self._drop_stream()  # the session was lost, or the channel was closed
            return
        if not isinstance(answer, rpc.LeaseKeepAliveResponse):  # the stream ended
            self._drop_stream()
            return
        transport.see(answer.header)
        if answer.TTL <= 0:
            self._lose("its lease is gone")
            return
        self.ttl = answer.TTL
        self._move_deadline(sent)

    def _drop_stream(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    async def _verify(self) -> None:
        """Read the node key once per TTL: old servers acknowledge renewals of a revoked lease (L2)."""
        while not self.lost.done():
            await asyncio.wait([self.lost], timeout=self.ttl)
            if self.lost.done():
                return
            try:
                node = await self._client.get(self.node_key)
            except DistopError as error:  # the next renewal detects another cluster as well
                log.debug("Cannot read the node key of session %s: %s", self.node_key, error)
                continue
            if node is None or node.create_revision != self.create_revision:
                self.node_key_gone()

    async def _stop(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
