"""List and watch of one range: an ordered feed of batches that survives failures of streams (W1–W11).

The decisions are in ``position``; this module does the I/O.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import grpc.aio

from distop.clock import random
from distop.errors import ClusterChanged, Compacted, EtcdRejected, EtcdUnavailable, describe
from distop.protocol.revisioned import Change
from distop.protocol.supported_versions import orders_requested_progress
from distop.protocol.txn import Get
from distop.runtime.backoff import Backoff
from distop.store import transport as wire
from distop.store._proto import kv_pb2
from distop.store._proto import rpc_pb2 as rpc
from distop.store.etcd_messages import key_value, to_bytes
from distop.store.grpc_failures import Failure, FailureKind
from distop.store.transport import RequestFailed, being_cancelled
from distop.store.watch_position import Batch, Relist, Reopen, Response, WatchPosition

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.store.client import EtcdClient

__all__ = ["Batch", "Feed", "WatchStream", "decode_response"]

log = logging.getLogger("distop.store")

_DELETE = kv_pb2.Event.DELETE
PATIENCE = 10.0  # seconds without a response before a progress request, and then before the stream is replaced
OLD_PATIENCE = 60.0  # seconds before the stream is replaced if progress requests are not safe (W3)
_GRACE = 3.0  # seconds that reached() waits for an event before a progress request, and then before a listing
LISTING_SHARE = 300.0  # minimum time between two listings, as a multiple of the duration of a listing
_PAUSE = (0.05, 2.0)  # seconds of back-off between streams, first and longest


def _filtered(events: Any, ignore: tuple[bytes, ...], ignore_deletions: tuple[bytes, ...]) -> Any:
    """The events without ignored keys. The last event always stays: its revision is the position (W2)."""
    if not (ignore or ignore_deletions) or len(events) < 2:
        return events
    last = len(events) - 1
    return [
        event
        for n, event in enumerate(events)
        if n == last or not event.kv.key.endswith(ignore_deletions if event.type == _DELETE else ignore)
    ]


def decode_response(
    message: rpc.WatchResponse, ignore: tuple[bytes, ...] = (), ignore_deletions: tuple[bytes, ...] = ()
) -> Response:
    """Decode a watch response.

    ``ignore``: suffixes of keys whose puts are left out; ``ignore_deletions``: of those whose deletions are.
    """
    events = _filtered(message.events, ignore, ignore_deletions)
    return Response(
        message.header.revision,
        tuple([Change(key_value(event.kv), event.type == _DELETE) for event in events]),
        message.created,
        message.canceled,
        message.compact_revision,
        message.fragment,
        message.cancel_reason,
    )


class WatchStream:
    """One stream with one watch (W10), without prev_kv, in fragments (W5)."""

    def __init__(self, client: EtcdClient, start: str, end: str, revision: int) -> None:
        self._client = client
        self._request = rpc.WatchRequest(
            create_request=rpc.WatchCreateRequest(
                key=to_bytes(start),
                range_end=to_bytes(end),
                start_revision=revision,
                progress_notify=True,
                fragment=True,
            )
        )
        self._call: Any = None
        self.address = ""
        self._cut = False

    async def open(self, timeout: float) -> None:
        """Open the stream. Raises RequestFailed, also if there is no answer within ``timeout`` seconds."""
        transport = self._client.transport
        self._call, self.address = await transport.stream(wire.WATCH)
        try:
            # Not wait_for(): in Python 3.11 it loses a cancellation that coincides with its result.
            async with asyncio.timeout(timeout):
                await self._call.write(self._request)
        except (TimeoutError, asyncio.InvalidStateError):
            transport.use_next_member(self.address)
            self._call.cancel()
            raise RequestFailed(
                Failure(FailureKind.NOT_DONE, "DEADLINE_EXCEEDED", "the watch could not be opened")
            ) from None
        except grpc.aio.AioRpcError as error:
            raise transport.failed(error, self.address) from None

    async def read(self) -> rpc.WatchResponse | None:
        """The next response; None if the stream has ended or was cut. Raises RequestFailed."""
        transport = self._client.transport
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise transport.failed(error, self.address) from None
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            return None  # the stream was cut, or its channel was closed
        if not isinstance(message, rpc.WatchResponse):  # the stream ended
            return None
        transport.see(message.header)
        return message

    async def ask_progress(self) -> None:
        """Request a progress notification: the revision up to which all events were sent."""
        try:
            await self._call.write(rpc.WatchRequest(progress_request=rpc.WatchProgressRequest()))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            log.debug("Cannot send a progress request: %s", error)
        except asyncio.CancelledError:
            if being_cancelled():
                raise

    def cut(self, *, elsewhere: bool = False) -> None:
        """End the stream; a pending read returns None. ``elsewhere``: use another endpoint from now on."""
        self._cut = True
        if elsewhere:
            self._client.transport.use_next_member(self.address)
        if self._call is not None:
            self._call.cancel()


class Gather(Protocol):
    """Collects a large listing page by page: the decoded view needs less memory than etcd's keys."""

    def apply(self, changes: list[Change], /) -> object:
        """Add one page of the listing; pages come in order."""


class Feed:
    """Delivers the content of ``[start, end)`` and all its changes, in order.

    ``apply`` is called on the loop with each complete :class:`Batch` (W4): first a listing, then changes; a listing
    again after a compaction (W6), every ``relist_every`` seconds (with some jitter), and on :meth:`relist`. A listing
    implies deletions: keys that it does not contain are gone. A batch without events only moves the revision. With
    ``gather``, called once per listing, the batch has the returned object in ``gathered`` instead of events.
    ``apply`` must not raise; if it does, the feed fails, and :meth:`reached`, :meth:`relist` and :meth:`wait` raise
    its error.

    ``ignore``: suffixes of keys whose changes are not delivered; ``ignore_deletions``: of those whose deletions are
    not. ``contents`` False: a listing only has its revision, and the owner reads what it needs of the range.

    Failed, silent and rejected streams are replaced without end, with back-off; ``problem`` is the last error.
    """

    def __init__(
        self,
        client: EtcdClient,
        start: str,
        end: str,
        apply: Callable[[Batch], None],
        *,
        relist_every: float = 300.0,
        name: str = "",
        ignore: tuple[bytes, ...] = (),
        gather: Callable[[], Gather] | None = None,
        ignore_deletions: tuple[bytes, ...] = (),
        contents: bool = True,
    ) -> None:
        self.name = name or start
        self.problem = ""
        self._client = client
        self._start, self._end = start, end
        self._apply = apply
        self._ignore = ignore
        self._gather = gather
        self._contents = contents
        self._ignore_deletions = (*ignore, *ignore_deletions)
        self._relist_every = relist_every
        self._position = WatchPosition()
        self._stream: WatchStream | None = None
        self._task: asyncio.Task[None] | None = None
        self._list_due = True
        self._listed: list[asyncio.Future[None]] = []
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._failure: BaseException | None = None
        self._relist_timer: asyncio.TimerHandle | None = None
        self._silence_timer: asyncio.TimerHandle | None = None
        self._progress: asyncio.Task[None] | None = None
        self._received_at = 0.0
        self._asked = False
        self._may_ask = False
        self._answer_due = False
        self._started_at = 0

    @property
    def revision(self) -> int:
        """The revision up to which all changes were applied."""
        return self._position.revision

    @property
    def silent(self) -> float:
        """Seconds since the watch's last response; 0 before the first one."""
        return asyncio.get_running_loop().time() - self._received_at if self._received_at else 0.0

    # ---- for the owner

    async def start(self) -> None:
        """Apply the first listing and start watching. Raises the listing's error; then no watch is started."""
        await self._list_now()
        self.begin()

    def begin(self) -> None:
        """Like :meth:`start`, without waiting: a rejected first listing is retried, like all later ones."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"distop-feed-{self.name}")

    async def reached(self, revision: int) -> None:
        """Wait until all changes up to ``revision`` were applied (W11).

        A revision without changes in the range is confirmed by a progress notification, or by a listing.
        Raises ClusterChanged, or EtcdUnavailable if the feed is closed.
        """
        if self._has_reached(revision):
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((revision, waiter))
        try:
            await asyncio.wait([waiter], timeout=_GRACE)
            if not waiter.done() and self._may_ask and self._stream is not None:
                await self._stream.ask_progress()
                await asyncio.wait([waiter], timeout=_GRACE)
            while not self._has_reached(revision):
                await self.relist()
        finally:
            waiter.cancel()

    async def relist(self) -> None:
        """List again, and return after the listing was applied."""
        self._raise_failure()
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._listed.append(waiter)
        self._want_listing()
        await waiter

    async def wait(self) -> None:
        """Wait until the feed is closed. Raises the error that made it fail."""
        if self._task is not None:
            await asyncio.wait([self._task])
        if self._failure is not None and not isinstance(self._failure, EtcdUnavailable):
            raise self._failure

    async def close(self) -> None:
        """Stop the feed; ``apply`` is not called after this returns."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._end_with(EtcdUnavailable(f"the watch of {self.name} is closed"))

    # ---- the loop

    async def _run(self) -> None:
        backoff = Backoff(*_PAUSE)
        try:
            while True:
                try:
                    if self._list_due:
                        await self._list_now()
                    if await self._follow():
                        backoff.reset()
                        continue
                except RequestFailed as error:
                    self._set_problem(str(error))
                except (EtcdUnavailable, EtcdRejected) as error:
                    self._client.transport.check()
                    self._set_problem(describe(error))
                await asyncio.sleep(backoff.pause())
        except asyncio.CancelledError:
            raise
        except ClusterChanged as error:
            self._end_with(error)
        except EtcdUnavailable as error:  # the client is closed
            self._end_with(error)
        except Exception as error:
            log.exception("Unexpected error in the watch of %s", self.name)
            self._end_with(error)
        finally:
            self._stop_timers()
            if self._stream is not None:
                self._stream.cut()
                self._stream = None

    async def _list_now(self) -> None:
        waiting, self._listed = self._listed, []
        self._list_due = False
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            batch = await (self._listing() if self._gather is None else self._gathered(self._gather))
        except BaseException:
            self._list_due = True
            self._listed = waiting + self._listed
            raise
        self._position.listed(batch.revision)
        self._deliver(batch)
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)
        if self._relist_timer is not None:
            self._relist_timer.cancel()
        # A listing only guards against an incomplete watch, so it may use a small share of the time only.
        every = max(self._relist_every, LISTING_SHARE * (loop.time() - started))
        self._relist_timer = loop.call_later(every * random.uniform(0.9, 1.1), self._want_listing)

    async def _listing(self) -> Batch:
        if not self._contents:
            revision, _ = await self._client.read_at(Get(self._start, count_only=True))
            return Batch(revision, (), listing=True)
        listing = await self._client.list(self._start, self._end)
        return Batch(listing.revision, tuple([Change(pair) for pair in listing.kvs]), listing=True)

    async def _gathered(self, gather: Callable[[], Gather]) -> Batch:
        while True:
            gathered, revision = gather(), 0
            try:
                async for part in self._client.parts(self._start, self._end):
                    gathered.apply([Change(pair) for pair in part.kvs])
                    revision = part.revision
            except Compacted:
                log.info("etcd compacted the revision of a listing of %s during paging; listing again", self.name)
                continue
            return Batch(revision, (), listing=True, gathered=gathered)

    async def _open_stream(self) -> WatchStream:
        stream = WatchStream(self._client, self._start, self._end, self._position.next_revision)
        self._started_at = self._position.next_revision
        self._position.opened()
        with contextlib.suppress(EtcdUnavailable, EtcdRejected):
            await self._client.version()
        await stream.open(self._client.config.request_timeout)
        self._stream = stream
        self._asked, self._may_ask = False, False
        if self._list_due:
            stream.cut()
        self._watch_silence(self._client.config.request_timeout)
        return stream

    async def _follow(self) -> bool:
        """Follow one stream until it ends. Returns whether its watch was created."""
        stream = await self._open_stream()
        useful = False

        def check_soon(address: str) -> None:
            # Requests to this member fail, so the stream may be dead, too; for old servers the check takes long.
            if address == stream.address:
                self._watch_silence(self._client.config.request_timeout)

        self._client.transport.on_endpoint_failed.add(check_soon)
        try:
            while True:
                message = await stream.read()
                if message is None:
                    return useful
                self._received_at = asyncio.get_running_loop().time()
                self._asked = False
                step = self._position.feed(decode_response(message, self._ignore, self._ignore_deletions))
                if not useful and message.created and not message.canceled:
                    useful = True
                    self.problem = ""
                    self._may_ask = orders_requested_progress(self._client.known_version(stream.address))
                    self._watch_silence(PATIENCE if self._may_ask else OLD_PATIENCE)
                if isinstance(step, Batch):
                    self._deliver(step)
                elif isinstance(step, Relist):
                    log.info("Watch of %s cannot resume; listing again: %s", self.name, step.reason)
                    self._list_due = True
                    return True
                elif isinstance(step, Reopen):
                    self._set_problem(step.reason)
                    return useful and not step.refused
        finally:
            self._client.transport.on_endpoint_failed.discard(check_soon)
            self._stream = None
            stream.cut()

    def _deliver(self, batch: Batch) -> None:
        self._apply(batch)
        if self._waiters:
            revision = self.revision
            for wanted, waiter in self._waiters:
                if wanted <= revision and not waiter.done():
                    waiter.set_result(None)
            self._waiters = [pair for pair in self._waiters if not pair[1].done()]

    # ---- timers

    def _want_listing(self) -> None:
        self._list_due = True
        if self._stream is not None:
            self._stream.cut()

    def _watch_silence(self, patience: float) -> None:
        """Check the stream every ``patience`` seconds: request its progress if that is safe, else replace it."""
        loop = asyncio.get_running_loop()
        if self._silence_timer is not None:
            self._silence_timer.cancel()
        self._received_at = loop.time()

        def check() -> None:
            stream = self._stream
            if stream is None:
                return
            quiet = loop.time() - self._received_at
            if quiet >= patience * 0.9:
                owed = self._owes_progress()
                if self._may_ask and (not self._asked or (owed and not self._answer_due)):
                    self._asked, self._answer_due = True, owed
                    self._progress = loop.create_task(stream.ask_progress())
                    self._silence_timer = loop.call_later(patience, check)
                    return
                if self._may_ask and not self._answer_due:
                    self._asked = False
                    self._watch_silence(patience)
                    return
                log.debug("Watch of %s was silent for %.0f s; opening another stream", self.name, quiet)
                stream.cut(elsewhere=self._may_ask or patience < OLD_PATIENCE)
                return
            self._silence_timer = loop.call_later(patience - quiet, check)

        self._silence_timer = loop.call_later(patience, check)

    def _owes_progress(self) -> bool:
        """Whether the server must answer a progress request that is sent now (W8a).

        It need not answer if the watch starts beyond the store's revision. The answers to other requests, such as
        session renewals, show new revisions. Until there is one, no event can be missed, and only pings and
        `hasleader` check the connection.
        """
        return self._client.transport.identity.revision >= self._started_at

    def _stop_timers(self) -> None:
        for timer in (self._relist_timer, self._silence_timer):
            if timer is not None:
                timer.cancel()

    # ---- failure

    def _set_problem(self, problem: str) -> None:
        if problem != self.problem:
            log.warning("Watch of %s failed; retrying: %s", self.name, problem)
        self.problem = problem

    def _has_reached(self, revision: int) -> bool:
        self._raise_failure()
        return self.revision >= revision

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _end_with(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        self._stop_timers()
        for waiter in [*self._listed, *(waiter for _, waiter in self._waiters)]:
            if not waiter.done():
                waiter.set_exception(error)
        self._listed, self._waiters = [], []
