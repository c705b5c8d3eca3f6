"""Reads the history of a key range from etcd, from the oldest kept revision on, and can follow it.

Read permission on the range is enough. Compacted revisions cannot be read (W6): the reader then reports the lost
revisions, and continues from the content at the compacted revision.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

from distop.clock import time
from distop.errors import Compacted, EtcdRejected, EtcdUnavailable, describe
from distop.protocol.frozen import frozen
from distop.protocol.supported_versions import orders_requested_progress
from distop.runtime.backoff import Backoff
from distop.store.transport import RequestFailed
from distop.store.watch import WatchStream, decode_response
from distop.store.watch_position import Batch, Reopen, WatchPosition

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from distop.protocol.revisioned import Change
    from distop.protocol.txn import KeyValue
    from distop.store._proto import rpc_pb2 as rpc
    from distop.store.client import EtcdClient
    from distop.store.watch_position import Response

log = logging.getLogger("distop.store")

QUIET = 0.5  # seconds without an answer before the reader checks whether it has caught up
PATIENCE = 10.0  # seconds without an answer before another stream is opened, until the reader has caught up; doubled
# for each such stream: etcd can take longer to split a response of many small events, and starts again for each stream
_LONGEST_PATIENCE = 160.0
_IDLE = 30.0  # the same while following, when there may be no new events
_PAUSE = (0.1, 2.0)  # seconds of back-off between streams, first and longest
_REFUSALS = 3  # consecutive streams that etcd rejects before the reader fails


@frozen
class HistoryStart:
    """The history starts (again) from the content at ``revision``, since earlier revisions are compacted.

    ``lost``: the first revision that cannot be read.
    """

    revision: int
    lost: int
    kvs: tuple[KeyValue, ...]


@frozen
class Revision:
    """All changes of the range in one revision."""

    number: int
    changes: tuple[Change, ...]


@frozen
class CaughtUp:
    """All changes up to ``revision`` were yielded, the newest revision when reading started."""

    revision: int


HistoryStep: TypeAlias = HistoryStart | Revision | CaughtUp


class HistoryReader:
    """Reads the history of ``[start, end)``. ``follow``: continue with new revisions without end.

    On servers before 3.4.25 and 3.5.8 the reader has caught up when the yielded changes add up to the current content
    (W3): unless following, it may then miss a key that was written and deleted just before.
    """

    def __init__(self, client: EtcdClient, start: str, end: str, *, follow: bool = False) -> None:
        self._client = client
        self._start, self._end = start, end
        self._follow = follow
        self._position = WatchPosition()
        self._target = 0
        self._wanted: dict[str, int] = {}
        self._content: dict[str, int] = {}
        self._caught_up = False
        self._refused = 0
        self._patience = PATIENCE
        self._stream: WatchStream | None = None

    async def steps(self) -> AsyncGenerator[HistoryStep, None]:
        """Each revision once, in order. Ends when the reader has caught up, unless following.

        Raises EtcdUnavailable if etcd is unreachable for long (never while following, which retries without end),
        EtcdRejected if our user may not read the range, ClusterChanged.
        """
        present = await self._client.list(self._start, self._end, keys_only=True)
        self._target = present.revision
        self._wanted = {kv.key: kv.mod_revision for kv in present.kvs}
        backoff, received_at, warned = Backoff(*_PAUSE), time.monotonic(), False
        while True:
            try:
                async with aclosing(self._one_stream()) as stream:
                    async for step in stream:
                        yield step
                        received_at, warned = time.monotonic(), False
                        backoff.reset()
                        if isinstance(step, CaughtUp) and not self._follow:
                            return
            except (RequestFailed, EtcdUnavailable) as error:
                self._client.transport.check()
                limit = self._client.config.connect_timeout + self._client.config.request_timeout
                if not self._follow and time.monotonic() - received_at > limit:
                    raise EtcdUnavailable(f"reading etcd's history failed: {describe(error)}") from None
                level = logging.DEBUG if warned else logging.WARNING
                log.log(level, "Cannot read etcd's history; retrying: %s", describe(error))
                warned = True
            await asyncio.sleep(backoff.pause())

    async def _one_stream(self) -> AsyncGenerator[HistoryStep, None]:
        """The steps of one stream, until it ends."""
        stream = WatchStream(self._client, self._start, self._end, self._position.next_revision)
        self._position.opened()
        try:
            await self._client.version()
        except EtcdRejected:
            log.debug("Cannot read etcd's version")
        await stream.open(self._client.config.request_timeout)
        ordered = orders_requested_progress(self._client.known_version(stream.address))
        reading: asyncio.Task[rpc.WatchResponse | None] | None = None
        silent = 0.0
        try:
            while True:
                reading = reading or asyncio.ensure_future(stream.read())
                await asyncio.wait([reading], timeout=_IDLE if self._caught_up else QUIET)
                if not reading.done():
                    silent += QUIET
                    if self._caught_up or silent >= self._patience:
                        self._patience = min(2 * self._patience, _LONGEST_PATIENCE)
                        return  # the stream may be dead: another one continues at the same position
                    if ordered:
                        await stream.ask_progress()
                    elif self._adds_up():
                        self._caught_up = True
                        yield CaughtUp(self._target)
                    continue
                message, reading, silent = reading.result(), None, 0.0
                if message is None:
                    return
                steps, ended = await self._steps_of(decode_response(message))
                for step in steps:
                    yield step
                if ended:
                    return
        finally:
            stream.cut()
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    async def _steps_of(self, response: Response) -> tuple[list[HistoryStep], bool]:
        """The steps of one response, and whether the stream ends with it."""
        if response.compact_revision:
            restart = await self._restart_at(response.compact_revision)
            return ([], True) if restart is None else ([restart, *self._check_caught_up()], True)
        step = self._position.feed(response)
        if isinstance(step, Reopen):
            self._count_refusal(step)
            return [], True
        if isinstance(step, Batch):
            self._patience = PATIENCE
            return [*self._revisions(step), *self._check_caught_up()], False
        return [], False

    def _revisions(self, batch: Batch) -> list[Revision]:
        self._refused = 0
        found = []
        for number, events in groupby(batch.events, key=lambda event: event.kv.mod_revision):
            changes = tuple(events)
            found.append(Revision(number, changes))
            if not self._caught_up:
                for change in changes:
                    if change.deleted:
                        self._content.pop(change.kv.key, None)
                    else:
                        self._content[change.kv.key] = number
        return found

    def _check_caught_up(self) -> list[CaughtUp]:
        """CaughtUp, once, after all revisions up to the target; else empty."""
        if self._caught_up or self._position.revision < self._target:
            return []
        self._caught_up = True
        return [CaughtUp(self._target)]

    def _adds_up(self) -> bool:
        return self._content == self._wanted

    async def _restart_at(self, compacted: int) -> HistoryStart | None:
        """The content at the compacted revision; None if that was compacted as well."""
        lost = self._position.next_revision
        try:
            listing = await self._client.list(self._start, self._end, revision=compacted)
        except Compacted:
            return None
        self._position.listed(compacted)
        self._content = {kv.key: kv.mod_revision for kv in listing.kvs}
        return HistoryStart(compacted, lost, listing.kvs)

    def _count_refusal(self, reopen: Reopen) -> None:
        """Raises EtcdRejected if etcd has rejected several watches in a row."""
        self._refused += reopen.refused
        if self._refused >= _REFUSALS:
            raise EtcdRejected(f"etcd rejected the watch of its history: {reopen.reason}", detail=reopen.reason)
