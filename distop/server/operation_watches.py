"""Watches of operations for many callers: one watch of etcd for all, and one reading of an operation for its callers.

etcd's events only say what to read again: a caller gets the operation's newest status, and skips those that it was too
slow for. So nothing is queued, and a watch of etcd that cannot resume (compaction) is repaired by another reading.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop.client import service_messages as m
from distop.errors import DistopError, EtcdUnavailable, ServiceUnavailable, no_operation
from distop.protocol import keys as K
from distop.protocol.record_reading import read
from distop.protocol.records import History
from distop.protocol.txn import Get
from distop.runtime.backoff import Backoff
from distop.runtime.lru_cache import LruCache
from distop.services.inspection.status import JobStates, ended_status, status
from distop.store.past_reads import PastReads
from distop.store.watch import Feed
from distop.v1 import operations_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine

    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef
    from distop.protocol.txn import KeyValue
    from distop.services.operation_results import OperationStatus
    from distop.store.client import EtcdClient
    from distop.store.watch import Batch

log = logging.getLogger("distop.service")

LINGER = 30.0
"""Seconds for which a watch of etcd stays open without callers."""
REFRESH = 2.0
"""Seconds between two readings of an operation without changes: its status depends on nodes and time, too."""
REFRESHES = 50
"""Readings a second of all watched operations that do not change."""
LEAST_PAUSE = 0.02
"""Seconds between two readings of an operation; also a multiple of the duration of one."""
PAUSE_SHARE = 3.0
AT_ONCE = 4
"""Operations that are read at the same time."""
MOST_CURSORS = 100
"""Past revisions of an operation whose status is kept."""
_READS = 60
"""Ends that are looked for in one transaction."""
_PAUSE = (0.1, 2.0)
"""Back-off in seconds while etcd does not answer, first and longest."""


class _SharedFeed:
    """A watch of a range of etcd, open while there are callers, and somewhat longer.

    ``failed`` is called with the error that ends it for good.
    """

    def __init__(
        self,
        etcd: EtcdClient,
        key_range: tuple[str, str],
        apply: Callable[[Batch], None],
        failed: Callable[[BaseException], None],
        name: str,
    ) -> None:
        self._etcd, self._range, self._apply, self._failed, self._name = etcd, key_range, apply, failed, name
        self._feed: Feed | None = None
        self._opening = asyncio.Lock()
        self._callers = 0
        self._idle: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Keep the watch open: all changes after the start of the block are delivered. Raises EtcdUnavailable."""
        self._callers += 1
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        try:
            async with self._opening:
                if self._feed is None:
                    feed = Feed(self._etcd, *self._range, self._apply, name=self._name, contents=False)
                    await feed.start()
                    self._feed = feed
                    self._run(self._until_failed(feed))
            yield
        finally:
            self._callers -= 1
            if not self._callers:
                self._idle = asyncio.get_running_loop().call_later(LINGER, self._close_idle)

    async def close(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        feed, self._feed = self._feed, None
        if feed is not None:
            await feed.close()

    def _close_idle(self) -> None:
        feed, self._feed = self._feed, None
        if feed is not None:
            self._run(feed.close())

    async def _until_failed(self, feed: Feed) -> None:
        try:
            await feed.wait()
            error: BaseException = EtcdUnavailable("the watch of etcd has ended")
        except Exception as failure:
            error = failure
        if self._feed is feed:
            self._feed = None
            self._failed(error)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _End:
    """The end of one operation, for which callers wait."""

    def __init__(self, ref: OperationRef) -> None:
        self.ref = ref
        self.callers = 0
        self.reading: asyncio.Task[None] | None = None
        self.known = asyncio.Event()
        self.answer: operations_pb2.Operation | None = None
        self.error: BaseException | None = None

    def settle(self, record: KeyValue) -> None:
        """The operation has ended with this record."""
        if self.known.is_set():
            return
        try:
            self.answer = m.history_message(read(History.decode, record))
        except DistopError as error:
            self.error = error
        self.known.set()

    def fail(self, error: BaseException) -> None:
        if not self.known.is_set():
            self.error = error
            self.known.set()


class OperationEnds:
    """The ends of operations, over one watch of the history."""

    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self._etcd, self._keys = etcd, keys
        self._ends: dict[str, _End] = {}
        """By the key of the history record."""
        self._feed = _SharedFeed(etcd, keys.family(K.HISTORY), self._apply, self._fail, "the history for callers")
        self._again: asyncio.Task[None] | None = None

    async def wait(self, ref: OperationRef) -> operations_pb2.Operation:
        """The ended operation. Raises NotFound, Unavailable, UnreadableRecord."""
        key = self._keys.history(ref)
        async with self._feed.opened():
            end = self._ends.get(key)
            if end is None:
                end = self._ends[key] = _End(ref)
                end.reading = asyncio.create_task(self._read_first(end))
            end.callers += 1
            try:
                await end.known.wait()
            finally:
                end.callers -= 1
                if not end.callers:
                    self._forget(key, end)
        if end.error is not None:
            raise end.error
        assert end.answer is not None
        return end.answer

    async def close(self) -> None:
        self._fail(ServiceUnavailable("the service stops"))
        if self._again is not None:
            self._again.cancel()
        await self._feed.close()

    def _forget(self, key: str, end: _End) -> None:
        if end.reading is not None:
            end.reading.cancel()
        if self._ends.get(key) is end:
            del self._ends[key]

    async def _read_first(self, end: _End) -> None:
        try:
            await self._read([end])
        except Exception as error:
            if not isinstance(error, DistopError):
                log.exception("Unexpected error while reading the end of %s", end.ref)
            end.fail(error)

    async def _read(self, ends: list[_End]) -> None:
        """Look whether these operations have ended, or do not exist."""
        gets = []
        for one in ends:
            gets += [Get(self._keys.history(one.ref)), Get(self._keys.of(one.ref, "state"), count_only=True)]
        found = await self._etcd.read(*gets)
        for n, one in enumerate(ends):
            history, state = found[2 * n], found[2 * n + 1]
            if history.kv is not None:
                one.settle(history.kv)
            elif not state.count:
                one.fail(no_operation(str(one.ref)))

    def _apply(self, batch: Batch) -> None:
        for change in batch.events:
            end = self._ends.pop(change.kv.key, None) if not change.deleted else None
            if end is not None:
                end.settle(change.kv)
        if batch.listing and self._ends and (self._again is None or self._again.done()):
            self._again = asyncio.create_task(self._read_all())

    async def _read_all(self) -> None:
        """Look for all ends: the watch may have missed some."""
        backoff = Backoff(*_PAUSE)
        left = list(self._ends.values())
        while left:
            try:
                await self._read(left[:_READS])
                left = left[_READS:]
            except EtcdUnavailable:
                await asyncio.sleep(backoff.pause())
            except DistopError as error:
                self._fail(error)
                return

    def _fail(self, error: BaseException) -> None:
        ends, self._ends = self._ends, {}
        for one in ends.values():
            one.fail(error)


class _WatchedOperation:
    """The status of an operation, read again after changes, for all callers that watch it."""

    def __init__(
        self, etcd: EtcdClient, keys: Keys, ref: OperationRef, turn: asyncio.Semaphore, refresh: Callable[[], float]
    ) -> None:
        """``refresh``: returns the seconds until it is read again without a change."""
        self.ref = ref
        self.callers = 0
        self.response: operations_pb2.WatchResponse | None = None
        self.number = 0
        """Of the response, from 1."""
        self.news = asyncio.Event()
        """Set, and replaced, at a new response, and at a failure."""
        self.failure: BaseException | None = None
        self._etcd, self._keys, self._turn, self._refresh = etcd, keys, turn, refresh
        self._status: OperationStatus | None = None
        self._due = asyncio.Event()
        self._begun = self._done = 0
        """Readings."""
        self._looked = asyncio.Event()
        self._past: LruCache[asyncio.Task[OperationStatus | None]] = LruCache(MOST_CURSORS)
        self._task = asyncio.create_task(self._follow())

    def close(self) -> None:
        self._task.cancel()

    @property
    def has_ended(self) -> bool:
        return self._status is not None and self._status.ended

    def changed(self) -> None:
        """The operation may have changed."""
        self._due.set()

    def ended(self, record: KeyValue) -> None:
        """The operation has ended with this record."""
        try:
            self._show(ended_status(self.ref, read(History.decode, record)), record.mod_revision)
        except DistopError as error:
            self.fail(error)
        self._task.cancel()

    def fail(self, error: BaseException) -> None:
        self.failure = error
        self._task.cancel()
        self._wake()

    async def look(self) -> None:
        """Wait for a reading that begins from now on. Raises what it raises."""
        wanted = self._begun + 1
        self._due.set()
        while self._done < wanted and self.failure is None and not self.has_ended:
            await self._looked.wait()
        if self.failure is not None:
            raise self.failure

    async def is_unchanged_since(self, revision: int) -> bool:
        """Whether the status is still that of a past revision. False if etcd no longer has it."""
        past = self._past.get((revision,), lambda: asyncio.create_task(self._status_at(revision)))
        found = await asyncio.shield(past)
        return found is not None and self._status is not None and _without_time(found) == _without_time(self._status)

    async def _status_at(self, revision: int) -> OperationStatus | None:
        try:
            return await status(PastReads(self._etcd, revision), self._keys, self.ref, JobStates())
        except DistopError as error:
            log.debug("Cannot read %s at revision %d: %s", self.ref, revision, error)
            return None

    async def _follow(self) -> None:
        jobs, loop = JobStates(), asyncio.get_running_loop()
        try:
            while not self.has_ended:
                async with self._turn:
                    self._due.clear()
                    self._begun += 1
                    began = loop.time()
                    revision, _ = await self._etcd.read_at(Get(self._keys.of(self.ref, "state"), count_only=True))
                    found = await status(self._etcd, self._keys, self.ref, jobs)
                self._show(found, revision)
                self._done = self._begun
                self._looked.set()
                self._looked = asyncio.Event()
                await asyncio.sleep(max(LEAST_PAUSE, PAUSE_SHARE * (loop.time() - began)))
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._refresh()):
                        await self._due.wait()
        except Exception as error:
            if not isinstance(error, DistopError):
                log.exception("Unexpected error in the watch of %s", self.ref)
            self.failure = error
            self._wake()

    def _show(self, found: OperationStatus, revision: int) -> None:
        if found == self._status:
            return
        self._status = found
        self.response = operations_pb2.WatchResponse(operation=m.operation_message(found), revision=revision)
        self.number += 1
        self._wake()

    def _wake(self) -> None:
        self.news.set()
        self.news = asyncio.Event()
        if self.failure is not None or self.has_ended:
            self._looked.set()


def _without_time(found: OperationStatus) -> OperationStatus:
    return replace(found, eta_seconds=None)


class OperationWatches:
    """The watches of callers, over one watch of distop's keys, which is open while there are callers."""

    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self.ends = OperationEnds(etcd, keys)
        self._etcd, self._keys = etcd, keys
        self._watched: dict[str, _WatchedOperation] = {}
        """By the part of its keys that names the operation."""
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._feed = _SharedFeed(etcd, keys.everything(), self._apply, self._fail, "operations for callers")
        self._prefix = len(keys.everything()[0]) - len(K.OP)
        self._history = keys.family(K.HISTORY)[0]
        self._nodes = keys.family(K.NODE)[0]

    async def watch(self, ref: OperationRef, revision: int) -> AsyncGenerator[operations_pb2.WatchResponse, None]:
        """The status now, and at each change; the last one has ended.

        ``revision``: that of a former response; only changes after it are yielded. Raises NotFound, Unavailable.
        """
        name = self._keys.history(ref)[len(self._history) :]
        async with self._feed.opened():
            one = self._watched.get(name)
            if one is None or one.failure is not None:
                one = _WatchedOperation(self._etcd, self._keys, ref, self._turn, self._refresh)
                self._watched[name] = one
            one.callers += 1
            try:
                await one.look()
                sent = one.number if revision and await one.is_unchanged_since(revision) else 0
                while True:
                    news = one.news
                    if one.failure is not None:
                        raise one.failure
                    if one.number != sent:
                        sent, response = one.number, one.response
                        assert response is not None
                        yield response
                    elif one.has_ended:
                        return
                    else:
                        await news.wait()
            finally:
                one.callers -= 1
                if not one.callers:
                    one.close()
                    if self._watched.get(name) is one:
                        del self._watched[name]

    def stop(self) -> None:
        """End the watches, so that their callers go on with another service. Waits for ends go on."""
        self._fail(ServiceUnavailable("the service stops: go on with another one, after the last revision"))

    async def close(self) -> None:
        await self.ends.close()
        self.stop()
        await self._feed.close()

    def _refresh(self) -> float:
        return max(REFRESH, len(self._watched) / REFRESHES)

    def _apply(self, batch: Batch) -> None:
        if batch.listing:
            self._all_changed()
        for change in batch.events:
            key = change.kv.key
            if key.startswith(self._nodes):
                if change.deleted or change.kv.mod_revision == change.kv.create_revision:
                    self._all_changed()
                continue
            parts = key[self._prefix :].split(".", 6)
            one = self._watched.get(".".join(parts[1:4])) or self._watched.get(".".join(parts[1:5]))
            if one is None:
                continue
            if not change.deleted and key == self._keys.history(one.ref):
                one.ended(change.kv)
            else:
                one.changed()

    def _all_changed(self) -> None:
        for one in self._watched.values():
            one.changed()

    def _fail(self, error: BaseException) -> None:
        for one in self._watched.values():
            one.fail(error)
        self._watched = {}
