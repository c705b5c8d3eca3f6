"""etcd's own history of a range, read back from the oldest revision that is kept, and followed where that is wanted.

It only reads: whoever may read the range may read its history. What was compacted is not there any more (W6); the
reader then says which revisions are lost, and goes on from the content at the compacted revision.
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
    from distop.store.client import EtcdClient

log = logging.getLogger("distop.store")

_QUIET = 0.5  # seconds without an answer before the reader asks itself whether the present is reached
_PATIENCE = 10.0  # seconds without an answer before another stream is opened, while there is more to be read; doubled
# for each such stream: etcd can take longer to divide a response of many small events, and starts it anew for each
_LONGEST_PATIENCE = 160.0
_IDLE = 30.0  # the same while following: nothing may have happened
_PAUSE = (0.1, 2.0)  # seconds of back-off between streams, first and longest
_REFUSALS = 3  # streams that etcd refused in a row, without one that it served


@frozen
class Beginning:
    """The replay begins (anew) with the content at ``revision``: what happened up to it is compacted. ``lost``: the
    first revision that was not told.
    """

    revision: int
    lost: int
    kvs: tuple[KeyValue, ...]


@frozen
class Revision:
    """All that one revision did to the range."""

    number: int
    changes: tuple[Change, ...]


@frozen
class CaughtUp:
    """Everything up to ``revision`` was told, the newest when reading began."""

    revision: int


Step: TypeAlias = Beginning | Revision | CaughtUp


class HistoryReader:
    """The history of ``[start, end)``. ``follow``: go on after the present is reached, for ever.

    On servers before 3.4.25 and 3.5.8 the present is taken as reached when what was told adds up to what is there
    (W3): a key that was written and deleted again in the last moment before may then be missed, unless following.
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
        self._patience = _PATIENCE
        self._stream: WatchStream | None = None

    async def steps(self) -> AsyncGenerator[Step, None]:
        """In order: each revision once. Ends when the present is reached, unless following.

        Raises EtcdUnavailable when etcd cannot be reached for long (never while following: it is tried again for
        ever), EtcdRejected where our user may not read, ClusterChanged.
        """
        present = await self._client.list(self._start, self._end, keys_only=True)
        self._target = present.revision
        self._wanted = {kv.key: kv.mod_revision for kv in present.kvs}
        backoff, heard, told = Backoff(*_PAUSE), time.monotonic(), False
        while True:
            try:
                async with aclosing(self._one_stream()) as stream:
                    async for step in stream:
                        yield step
                        heard, told = time.monotonic(), False
                        backoff.reset()
                        if isinstance(step, CaughtUp) and not self._follow:
                            return
            except (RequestFailed, EtcdUnavailable) as error:
                self._client.transport.check()
                limit = self._client.config.connect_timeout + self._client.config.request_timeout
                if not self._follow and time.monotonic() - heard > limit:
                    raise EtcdUnavailable(f"etcd's history cannot be read on: {describe(error)}") from None
                log.log(logging.DEBUG if told else logging.WARNING, "reading etcd's history: %s; trying again", error)
                told = True
            await asyncio.sleep(backoff.pause())

    async def _one_stream(self) -> AsyncGenerator[Step, None]:
        """What one stream tells, until it ends."""
        client = self._client
        stream = WatchStream(client, self._start, self._end, self._position.next_revision)
        self._position.opened()
        try:
            await client.version()
        except EtcdRejected:
            log.debug("the version of this etcd is not known")
        await stream.open(client.config.request_timeout)
        ordered = orders_requested_progress(client.known_version(stream.address))
        reading: asyncio.Task[object] | None = None
        silent = 0.0
        try:
            while True:
                reading = reading or asyncio.ensure_future(stream.read())
                await asyncio.wait([reading], timeout=_IDLE if self._caught_up else _QUIET)
                if not reading.done():
                    silent += _QUIET
                    if self._caught_up or silent >= self._patience:
                        self._patience = min(2 * self._patience, _LONGEST_PATIENCE)
                        return  # perhaps dead: another stream goes on where this one stands
                    if ordered:
                        await stream.ask_progress()
                    elif self._adds_up():
                        self._caught_up = True
                        yield CaughtUp(self._target)
                    continue
                message, reading, silent = reading.result(), None, 0.0
                if message is None:
                    return
                response = decode_response(message)  # type: ignore[arg-type]
                if response.compact_revision:
                    if (beginning := await self._begin_at(response.compact_revision)) is not None:
                        yield beginning
                        if (end := self._end_of_past()) is not None:
                            yield end
                    return
                step = self._position.feed(response)
                if isinstance(step, Reopen):
                    self._judge(step)
                    return
                if isinstance(step, Batch):
                    self._patience = _PATIENCE
                    for revision in self._told(step):
                        yield revision
                    if (end := self._end_of_past()) is not None:
                        yield end
        finally:
            stream.cut()
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    def _told(self, batch: Batch) -> list[Revision]:
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

    def _end_of_past(self) -> CaughtUp | None:
        """CaughtUp, once, after all revisions up to the first target were yielded."""
        if self._caught_up or self._position.revision < self._target:
            return None
        self._caught_up = True
        return CaughtUp(self._target)

    def _adds_up(self) -> bool:
        return self._content == self._wanted

    async def _begin_at(self, compacted: int) -> Beginning | None:
        """The content at a revision that is compacted up to; None when that is gone as well by now."""
        lost = self._position.next_revision
        try:
            listing = await self._client.list(self._start, self._end, revision=compacted)
        except Compacted:
            return None
        self._position.listed(compacted)
        self._content = {kv.key: kv.mod_revision for kv in listing.kvs}
        return Beginning(compacted, lost, listing.kvs)

    def _judge(self, reopen: Reopen) -> None:
        """Raises EtcdRejected when etcd refuses to be watched, and goes on doing so."""
        self._refused += reopen.refused
        if self._refused >= _REFUSALS:
            raise EtcdRejected(f"etcd refuses to tell its history: {reopen.reason}", detail=reopen.reason)
