"""Compares this machine's wall clock with an etcd member's, and reports an offset."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.runtime.logs import ContextLogger
    from distop.store.client import EtcdClient

TOLERATED = 60.0
"""Seconds by which the two clocks may differ."""
EVERY = 600.0
"""Seconds between two comparisons."""
RETRY = 60.0
"""Seconds until the next comparison where etcd's clock could not be read."""
TOLD_AFTER = 2
"""Number of failed comparisons in a row after which they are reported: a member may be unavailable for a moment."""


class ClockCheck:
    """The clock check of one incarnation; ``changed()`` is called on a new ``ahead`` or ``unknown``."""

    def __init__(self, client: EtcdClient, log: ContextLogger, changed: Callable[[], None]) -> None:
        self._client = client
        self._log = log
        self._changed = changed
        self.ahead = 0
        """Seconds by which this machine's clock is ahead of etcd's (negative: behind); 0 where they agree."""
        self.unknown = ""
        """Why etcd's clock cannot be read; "": it can."""
        self._failures = 0

    async def run(self) -> None:
        """Compare the clocks every :data:`EVERY` seconds, for ever."""
        while True:
            await self.agrees()
            await asyncio.sleep(RETRY if self._failures else EVERY)

    async def agrees(self) -> bool:
        """Compare the clocks. Returns False if they differ, or if etcd's clock cannot be read.

        The start and the end of a difference are logged once each, and so are those of an unreadable clock.
        """
        from distop.store import server_clock  # a daemon is ready before it loads an HTTP client

        transport = self._client.transport
        try:
            ahead = await server_clock.ahead(self._client.config, transport.address)
        except server_clock.ClockUnreadable as error:
            self._failed(str(error))
            return False
        self._read()
        before = self.ahead
        if abs(ahead) <= TOLERATED:
            self.ahead = 0
        elif abs(ahead - before) > TOLERATED:
            self.ahead = round(ahead)
        if self.ahead != before:
            self._report()
            self._changed()
        return not self.ahead

    def _failed(self, why: str) -> None:
        self._failures += 1
        if self._failures < TOLD_AFTER or self.unknown:
            return
        self.unknown = why
        self._log.warning(
            "This machine's clock cannot be compared with etcd's: %s. History is not deleted by age until it can; "
            "the next comparison is in %.0f s",
            why,
            RETRY,
        )
        self._changed()

    def _read(self) -> None:
        self._failures = 0
        if self.unknown:
            self.unknown = ""
            self._log.warning("This machine's clock can be compared with etcd's again")
            self._changed()

    def _report(self) -> None:
        if not self.ahead:
            self._log.warning("This machine's clock agrees with etcd's again")
            return
        where = "ahead of" if self.ahead > 0 else "behind"
        self._log.error(
            "This machine's clock is %d s %s etcd's. Scheduled operations start at wrong times, and history is not "
            "deleted by age. Set the clock (NTP)",
            abs(self.ahead),
            where,
        )
