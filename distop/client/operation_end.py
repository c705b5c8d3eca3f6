"""Waits for the end of an operation: its history record."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from distop.errors import ClusterChanged, EtcdUnavailable, no_operation
from distop.protocol.record_reading import read
from distop.protocol.records import History
from distop.protocol.txn import Get
from distop.runtime.backoff import Backoff

if TYPE_CHECKING:
    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef
    from distop.protocol.txn import KeyValue
    from distop.store.client import EtcdClient

log = logging.getLogger("distop.client")

_POLL = 5.0
"""Seconds between the reads that back the watch for the history record."""
_EARLY_POLLS = (0.015, 0.03, 0.06)
"""Seconds between the first reads besides a new watch: etcd serves a watch that lags because of a concurrent write only
every 0.1 s.
"""
_PAUSE = (0.1, 2.0)
"""Back-off in seconds while etcd does not answer, first and longest."""


class OperationEnd:
    """The wait for one operation's end. Outages of etcd are waited out and logged."""

    def __init__(self, etcd: EtcdClient, keys: Keys, ref: OperationRef) -> None:
        self._etcd = etcd
        self._keys = keys
        self._ref = ref
        self._waiting_for_etcd = False

    async def wait(self) -> History:
        """The history record, once there is one. Raises NotFound, ClusterChanged, UnreadableRecord."""
        backoff = Backoff(*_PAUSE)
        while True:
            try:
                ended = await self._until_ended()
                if ended is not None:
                    return read(History.decode, ended)
                backoff.reset()
            except ClusterChanged:
                raise
            except EtcdUnavailable as error:
                self._etcd.transport.check()
                if not self._waiting_for_etcd:
                    self._waiting_for_etcd = True
                    log.warning("Waiting for etcd: %s", error, extra={"operation": str(self._ref)})
                await asyncio.sleep(backoff.pause())

    def _answered(self) -> None:
        """Log that etcd answers again, after an outage was logged."""
        if self._waiting_for_etcd:
            self._waiting_for_etcd = False
            log.warning("Connected to etcd again", extra={"operation": str(self._ref)})

    async def _until_ended(self) -> KeyValue | None:
        """Wait for the history record; None if the watch ended before.

        The watch starts at the current revision, and the key is read once the watch stands. A watch from a past
        revision would be served by etcd's slower loop, up to 0.1 s later.
        """
        from distop.store.etcd_messages import key_value
        from distop.store.transport import RequestFailed
        from distop.store.watch import WatchStream

        key = self._keys.history(self._ref)
        stream = WatchStream(self._etcd, key, key + "\0", 0)
        reading: asyncio.Future[Any] | None = None
        try:
            await stream.open(_POLL)
            reading = asyncio.ensure_future(stream.read())
            pauses = chain(_EARLY_POLLS, repeat(_POLL))
            while True:
                await asyncio.wait([reading], timeout=next(pauses))
                if reading.done():
                    message = reading.result()
                    if message is None or message.canceled:
                        return await self._ended_by_now()
                    self._answered()
                    for event in message.events:
                        if event.kv.value:
                            return key_value(event.kv)
                    reading = asyncio.ensure_future(stream.read())
                if (ended := await self._ended_by_now()) is not None:
                    return ended
        except RequestFailed as error:
            raise EtcdUnavailable(str(error)) from None
        finally:
            stream.cut()
            if reading is not None and not reading.done():
                with contextlib.suppress(Exception):
                    await reading

    async def _ended_by_now(self) -> KeyValue | None:
        """The history record, if there is one. Raises NotFound when there is no operation either."""
        history, state = await self._etcd.read(
            Get(self._keys.history(self._ref)), Get(self._keys.of(self._ref, "state"), count_only=True)
        )
        self._answered()
        if history.kv is not None:
            return history.kv
        if not state.count:
            raise no_operation(str(self._ref))
        return None
