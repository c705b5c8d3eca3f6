"""Group commit of the starts of one client.

Starts of the same type on the same table that arrive during a commit share the next transaction. A start without a
commit under way is sent at once, in its caller's task. The others queue: they would race it, and each other, for the
same two keys, and all but one would lose (measured in ``scripts/bench starts``).
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from distop.clock import time
from distop.errors import EtcdUnavailable, OutcomeUnknown
from distop.protocol.operation_transitions import STARTS_PER_TXN
from distop.services.submission.contention import Lost, overdue, pause, too_contended
from distop.services.submission.insertion import Started, Try
from distop.services.submission.submit import Apart, Heard, NotSent, note_cut_off, submit, try_to_start

if TYPE_CHECKING:
    from distop.protocol.keys import Keys
    from distop.services.submission.start_request import Request
    from distop.store.client import EtcdClient

_Place: TypeAlias = tuple[str, str]
"""(table, type)."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A queued start. ``answer``: its result, or None: it continues alone."""

    wanted: Request
    began: float | None
    """Since when it has lost the race."""
    answer: asyncio.Future[Started | Exception | None]
    sent: bool = False
    """It is being started: the outcome is unknown before the answer."""
    tried: Try = field(init=False)

    def __post_init__(self) -> None:
        self.tried = Try(self.wanted, self.answer.cancelled)

    def settle(self, verdict: Started | Exception | None) -> None:
        if not self.answer.done():
            self.answer.set_result(verdict)


class Starts:
    """The starts of one client."""

    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self._etcd = etcd
        self._keys = keys
        self._lines: dict[_Place, deque[_Waiting]] = {}
        """Type and table with a start under way → queued starts."""
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self, wanted: Request) -> Started:
        """As :func:`distop.services.submission.submit.submit`, beside others. Who is cancelled while it waits is not
        started; what was sent by then goes on, for the others, and the cancellation says so (``submit.cut_off``).
        """
        place = wanted.table, wanted.type
        line = self._lines.get(place)
        if line is not None:
            return await self._answer(_stand_in(line, wanted, None))
        line = self._lines[place] = deque()
        began, one, heard = time.monotonic(), Try(wanted), Heard()
        try:
            await try_to_start(self._etcd, self._keys, [one], heard)
        finally:
            # Others may be waiting, whatever becomes of this one. Where it lost, it goes on with those.
            waiting = _stand_in(line, wanted, began, first=True) if isinstance(one.verdict, Lost) else None
            self._next(place, line, heard, lost=int(waiting is not None), silent=_silent(one))
        return one.result() if waiting is None else await self._answer(waiting)

    async def _answer(self, waiting: _Waiting) -> Started:
        try:
            verdict = await waiting.answer
        except asyncio.CancelledError as error:
            if waiting.sent:
                note_cut_off(error, waiting.wanted)
            raise
        if verdict is None:
            return await submit(self._etcd, self._keys, waiting.wanted)
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    def _next(self, place: _Place, line: deque[_Waiting], heard: Heard, *, lost: int, silent: bool) -> None:
        """Start the next group after the one that was under way, or dissolve the queue."""
        if not silent and any(not one.answer.cancelled() for one in line):
            task = asyncio.ensure_future(self._start_queue(place, line, heard, lost))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
        else:
            self._dissolve(place, line)

    def _dissolve(self, place: _Place, line: deque[_Waiting]) -> None:
        """Where etcd does not answer, each goes on by itself, as if there were no line: so nobody waits for more than
        what was under way when it came.
        """
        del self._lines[place]
        for one in line:
            one.settle(None)

    async def _start_queue(self, place: _Place, line: deque[_Waiting], heard: Heard, lost: int) -> None:
        """Start the queued operations, in large transactions, until the queue is empty.

        ``lost``: attempts in a row without progress; ``heard``: what the previous attempt read.
        """
        group: list[_Waiting] = []
        took = 0.0
        try:
            while True:
                # Whoever was just answered may start another one at once: it goes with those in line.
                await asyncio.sleep(pause(lost, took) if lost else 0)
                if lost:
                    heard.note(None)  # others had their turns meanwhile: a read costs less than a try that is refused
                group = _next_group(line)
                if not group:
                    break
                for one in group:
                    one.sent = True
                tries = [one.tried.again() for one in group]
                began = time.monotonic()
                await try_to_start(self._etcd, self._keys, tries, heard)
                took = time.monotonic() - began
                left = [one for one, tried in zip(group, tries, strict=True) if not _settled(one, tried)]
                for one in left:
                    one.sent = False
                line.extendleft(reversed(left))
                lost = lost + 1 if len(left) == len(group) else 0
                group = []
                if any(map(_silent, tries)):
                    break
        finally:
            for one in group:  # the loop is being closed
                one.answer.cancel()
            self._dissolve(place, line)


def _stand_in(line: deque[_Waiting], wanted: Request, began: float | None, *, first: bool = False) -> _Waiting:
    waiting = _Waiting(wanted, began, asyncio.get_running_loop().create_future())
    (line.appendleft if first else line.append)(waiting)
    return waiting


def _next_group(line: deque[_Waiting]) -> list[_Waiting]:
    """The first queued starts, without those whose callers are gone."""
    group: list[_Waiting] = []
    while line and len(group) < STARTS_PER_TXN:
        one = line.popleft()
        if not one.answer.cancelled():
            group.append(one)
    return group


def _settled(one: _Waiting, tried: Try) -> bool:
    """Deliver the result; returns False if there is none yet, and the start is retried."""
    if isinstance(tried.verdict, Apart):
        one.settle(None)
    elif not isinstance(tried.verdict, Lost):
        one.settle(tried.verdict)
    elif not isinstance(tried.verdict, NotSent):
        one.began = one.began if one.began is not None else time.monotonic()
        if overdue(one.began):
            one.settle(too_contended(one.wanted))
    return one.answer.done()


def _silent(one: Try) -> bool:
    """etcd did not answer it."""
    return isinstance(one.verdict, EtcdUnavailable | OutcomeUnknown)
