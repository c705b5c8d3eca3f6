"""Group commit of the starts of one client.

All starts of one type on one table write the same two keys: of several transactions at once, all but one lose the race
(measured in ``scripts/bench starts``). Therefore starts that arrive during a commit share the next one.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distop.clock import time
from distop.errors import EtcdUnavailable, OutcomeUnknown
from distop.protocol.operation_transitions import STARTS_PER_TXN
from distop.services.submission.contention import Lost, overdue, pause, too_contended
from distop.services.submission.insertion import StartAttempt, Started
from distop.services.submission.submit import Apart, CountersCache, NotSent, cut_off_noted, submit, try_to_start
from distop.store.group_commit import GroupCommit

if TYPE_CHECKING:
    from distop.protocol.keys import Keys
    from distop.protocol.records import Subject
    from distop.services.submission.start_request import Request
    from distop.store.client import EtcdClient

log = logging.getLogger("distop.client")


@dataclass(slots=True, eq=False)
class _PendingStart:
    """A start whose caller waits for its verdict."""

    tried: StartAttempt
    settled: asyncio.Future[None]
    lost_since: float = 0.0
    """When it first lost the race; 0: it has not."""

    def settle(self) -> bool:
        """Wake the caller. Returns False if the start is to be tried again."""
        tried = self.tried
        if isinstance(tried.verdict, Lost) and not isinstance(tried.verdict, NotSent):
            self.lost_since = self.lost_since or time.monotonic()
            if overdue(self.lost_since):
                tried.verdict = too_contended(tried.wanted)
        if isinstance(tried.verdict, Lost):
            tried.again()
            return False
        if not self.settled.done():
            self.settled.set_result(None)
        return True


class _StartGroup:
    """The starts of the next transaction."""

    def __init__(self) -> None:
        self.items: list[_PendingStart] = []

    def add(self, item: _PendingStart) -> bool:
        self.items.append(item)
        return True

    @property
    def full(self) -> bool:
        return len(self.items) >= STARTS_PER_TXN


class _Queue:
    """The starts of one type on one table."""

    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self._etcd = etcd
        self._keys = keys
        self._commits: GroupCommit[_PendingStart] = GroupCommit(
            self._commit,
            _StartGroup,
            lambda error: log.error("Unexpected error; the starts of a group are cancelled", exc_info=error),
            abandoned=lambda one: one.settled.done(),
        )
        self._cache = CountersCache()
        self._lost = 0
        """Attempts in a row without progress."""
        self.pending: dict[_PendingStart, None] = {}

    async def wait_for(self, one: _PendingStart) -> None:
        """Queue a start, and wait until it has a verdict."""
        self.pending[one] = None
        self._commits.add([one])
        try:
            with cut_off_noted(one.tried):
                await one.settled
        except asyncio.CancelledError:
            self._commits.interrupt()
            raise
        finally:
            del self.pending[one]

    async def _commit(self, group: list[_PendingStart]) -> list[_PendingStart]:
        """Try once to start these; returns those to be tried again."""
        tries = [one.tried for one in group]
        began = time.monotonic()
        try:
            await try_to_start(self._etcd, self._keys, tries, self._cache)
        except BaseException:  # cancelled: the loop or the connection was closed
            for one in group:
                one.settled.cancel()
            raise
        took = time.monotonic() - began
        silent = any(isinstance(one.verdict, EtcdUnavailable | OutcomeUnknown) for one in tries)
        left = [one for one in group if not one.settle()]
        if silent:
            self._dissolve()
        self._lost = self._lost + 1 if len(left) == len(group) else 0
        if self._lost:
            # Others have their turns during the pause, and a read costs less than a refused transaction.
            self._cache.note(None)
            await asyncio.sleep(pause(self._lost, took))
        return left

    def _dissolve(self) -> None:
        """Let each pending start continue alone, so that none waits for more commits that etcd does not answer."""
        for one in self.pending:
            if not one.settled.done():
                one.tried.verdict = Apart()
                one.settle()


class Starts:
    """The starts of one client."""

    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self._etcd = etcd
        self._keys = keys
        self._queues: dict[Subject, _Queue] = {}
        """Only those with pending starts."""

    async def start(self, wanted: Request) -> Started:
        """As :func:`distop.services.submission.submit.submit`, in a transaction with others.

        A start that is cancelled before it is sent is not made. If it was sent, the others of its transaction continue,
        and the cancellation says so (``submit.cut_off``).
        """
        subject = wanted.table, wanted.type
        queue = self._queues.get(subject)
        if queue is None:
            queue = self._queues[subject] = _Queue(self._etcd, self._keys)
        settled = asyncio.get_running_loop().create_future()
        one = _PendingStart(StartAttempt(wanted, settled.cancelled), settled)
        try:
            await queue.wait_for(one)
        finally:
            if not queue.pending:
                del self._queues[subject]
        if isinstance(one.tried.verdict, Apart):
            return await submit(self._etcd, self._keys, wanted)
        return one.tried.result()
