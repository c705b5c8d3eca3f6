"""Sends calls from the daemon to the child, cancels them, and handles the death of the child."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from distop.errors import describe
from distop.protocol.records import OperationRef
from distop.worker import child_messages
from distop.worker.daemon_side.admission import FairSemaphore
from distop.worker.daemon_side.requests import Death, WorkerError
from distop.worker.daemon_side.result_handlers import CallSink, Sources, wait_first

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator

    from distop.runtime.logs import Log
    from distop.worker.daemon_side.admission import SharedExclusiveLock
    from distop.worker.daemon_side.child_keeper import ChildKeeper
    from distop.worker.daemon_side.child_launch import ChildProcess

    CallMessage = (
        child_messages.PlanMessage
        | child_messages.CompleteMessage
        | child_messages.CleanupMessage
        | child_messages.SweepMessage
        | child_messages.ResultsMessage
        | child_messages.VerifyMessage
        | child_messages.StatisticsMessage
    )
    Answer = tuple[Any, list[bytes]]
    Rows = Callable[[], Iterable[str]]
    Spawn = Callable[[Coroutine[Any, Any, Answer]], asyncio.Task[Answer]]

NOTHING = Sources()
PLACES = 8
"""Maximum concurrent plannings and completions in the child; half of them for one table.

They use no slot, so this limits their memory.
"""
IN_PLACES = frozenset({"plan", "complete", "statistics"})
CALL_NAMES = {
    "plan": "the planning",
    "complete": "the completion",
    "cleanup": "the cleanup",
    "sweep": "the sweep",
    "results": "the sweep of results",
    "verify": "the verification",
    "statistics": "the reading of statistics",
}


async def _send_frames(child: ChildProcess, message: CallMessage, rows: Rows | None) -> None:
    """Send a call's message, with its items in pages."""
    if rows is None or message["t"] not in ("cleanup", "complete"):
        child.send(message)
        return
    for frame in child_messages.encode_paged(message, rows()):
        child.send_frame(frame)
        # Encoding many items takes long; yield so that the daemon renews its lease.
        await asyncio.sleep(0)


def _retrieve_error(attended: asyncio.Task[Answer]) -> None:
    """Retrieve the error of an abandoned call, so that asyncio does not log it."""
    if not attended.cancelled():
        attended.exception()


class _PendingCall:
    """A call that has not ended, in a child or waiting for one."""

    def __init__(self, message: CallMessage, of_run: bool) -> None:
        self.op = message["op"]
        self.what = f"{CALL_NAMES[message['t']]} of {self.op}"
        self.of_run = of_run
        self.table = OperationRef.parse(self.op).table if message["t"] in IN_PLACES else None
        """The table that shares the places in the child; None: the call needs no place."""
        self.sink: CallSink | None = None
        loop = asyncio.get_running_loop()
        self.placed: asyncio.Future[None] = loop.create_future()
        """Done when the call has its place; from then on its time limit counts."""
        self.stop_reason: asyncio.Future[str] = loop.create_future()
        """Done when the call must stop, with the reason."""

    def stop(self, why: str) -> None:
        """Stop the call. The first reason counts."""
        if not self.stop_reason.done():
            self.stop_reason.set_result(why)


class CallStatuses(Protocol):
    """Shows what plannings and completions do (:class:`distop.daemon.job_progress.JobStatuses`)."""

    def set_text(self, work: Any, text: str) -> None: ...

    def set_work(self, work: Any, partition: int, done: Any) -> None: ...

    def remove(self, work: Any) -> None: ...


class Caller:
    """The pending calls. ``spawn`` starts tasks that outlive a caller that was cancelled."""

    def __init__(self, keeper: ChildKeeper, numbers: Iterator[int], spawn: Spawn, log: Log) -> None:
        self._keeper = keeper
        self._numbers = numbers
        self._spawn = spawn
        self._log = log
        self._pending: set[_PendingCall] = set()
        self._places = FairSemaphore(PLACES, PLACES // 2)
        self.statuses: CallStatuses | None = None

    def cancel(self, op: str) -> None:
        """Stop the operation's calls, except the cleanups that belong to runs."""
        for pending in self._pending:
            if pending.op == op and not pending.of_run:
                pending.stop(f"cancelled: {pending.what} was stopped")

    def abort(self, reason: str) -> None:
        """Stop all calls; the caller kills the child."""
        for pending in self._pending:
            pending.stop(f"cancelled: the worker was stopped: {reason}")

    async def call(
        self,
        message: CallMessage,
        rows: Rows | None = None,
        *,
        sources: Sources = NOTHING,
        lock: SharedExclusiveLock | None = None,
        limit: float | None = None,
    ) -> Answer:
        """Send a call; returns its result and chunks.

        ``rows`` returns the message's items as JSON, each time the message is sent; ``sources``: the data that the
        child may request meanwhile. Raises WorkerError; kind ``transient`` if the call was cancelled, or did not end
        within ``limit`` seconds after it got its place.

        With a lock, which the caller has not entered: if the child dies while it runs other work, the call is repeated
        alone. Without a lock, the call belongs to a run that is in the lock.
        """
        pending = _PendingCall(message, of_run=lock is None)
        self._pending.add(pending)
        send = partial(self._send, pending, message, rows, sources)
        attended = self._spawn(self._enforce_stop(pending, self._send_when_admitted(pending, send, lock), limit))
        try:
            return await asyncio.shield(attended)
        except WorkerError:
            raise
        except Exception as error:
            # A defect, or a problem of this process: it counts as an attempt, so that it is not repeated without end.
            self._log.exception("Unexpected error in %s", pending.what, extra={"operation": pending.op})
            raise WorkerError("transient", f"unexpected error in {pending.what}: {describe(error)}") from error
        except asyncio.CancelledError:
            # Nobody waits for the result, but the call's thread in the child must end, and its stay in the lock.
            pending.stop("its caller was cancelled")
            attended.add_done_callback(_retrieve_error)
            raise

    async def _enforce_stop(
        self, pending: _PendingCall, sending: Coroutine[Any, Any, Answer], limit: float | None
    ) -> Answer:
        """Wait for a call. After a stop or the time limit: cancel it, and kill its child after the grace period."""
        work = asyncio.ensure_future(sending)
        try:
            await wait_first(work, pending.placed, pending.stop_reason)
            await wait_first(work, pending.stop_reason, timeout=limit)
            if work.done():
                return work.result()
            if limit is not None:
                pending.stop(f"{pending.what} did not end within {limit:g} s")
            if pending.sink is None:
                work.cancel()
            else:
                pending.sink.stop()
                grace = self._keeper.config.grace
                await wait_first(work, timeout=grace)
                if pending.sink is not None:
                    message = "Killing the worker process: %s did not stop within %g s"
                    self._log.warning(message, pending.what, grace, extra={"operation": pending.op})
                    pending.sink.child.kill("stubborn")
            await wait_first(work)
            if not work.cancelled():
                work.exception()  # the error of a stopped call does not matter
            raise WorkerError("transient", pending.stop_reason.result())
        finally:
            work.cancel()
            self._pending.discard(pending)

    async def _send_when_admitted(
        self, pending: _PendingCall, send: Callable[[], Awaitable[Answer | Death]], lock: SharedExclusiveLock | None
    ) -> Answer:
        async with self._places.place(pending.table) if pending.table is not None else nullcontext():
            pending.placed.set_result(None)
            if lock is None:
                got = await send()
            else:
                async with lock.shared():
                    got = await send()
                if isinstance(got, Death) and (got.runs or len(got.calls) > 1) and not pending.stop_reason.done():
                    async with lock.exclusive():
                        got = await send()
        if isinstance(got, Death):
            raise WorkerError("crash", str(got))
        return got

    async def _send(
        self, pending: _PendingCall, message: CallMessage, rows: Rows | None, sources: Sources
    ) -> Answer | Death:
        """Send a call; returns its answer, or the Death of a child that crashed.

        A call is sent again if its child was killed for another call, or read it too late, and once if its child's
        Spark session was unusable.
        """
        sparks_lost = 0
        while True:
            child = await self._keeper.ready(call=True)
            set_status, set_work = partial(self._set_status, pending), partial(self._set_work, pending)
            call = CallSink(next(self._numbers), child, sources, set_status, set_work)
            child.calls[call.number] = call
            pending.sink = call
            try:
                message["call"], message["deadline"] = call.number, self._keeper.deadline
                await _send_frames(child, message, rows)
                await wait_first(call.result, child.died)
            except asyncio.CancelledError:
                call.stop()
                raise
            finally:
                pending.sink = None
                child.calls.pop(call.number, None)
                if self.statuses is not None:
                    self.statuses.remove(pending)
                child.kill_if_stuck()
            if call.result.done():
                try:
                    return call.result.result(), call.chunks
                except WorkerError as error:
                    # The child lives, so the session was renewed: the child was only frozen for a while.
                    if error.kind != "late" or pending.stop_reason.done():
                        raise
                    continue
            death = child.died.result()
            if death.crashed:
                return death
            if death.final or pending.stop_reason.done():
                raise WorkerError("transient", str(death))
            sparks_lost += death.spark_unusable
            if sparks_lost > 1:
                raise WorkerError("unavailable", str(death))

    def _set_status(self, pending: _PendingCall, text: str) -> None:
        if self.statuses is not None:
            self.statuses.set_text(pending, text)

    def _set_work(self, pending: _PendingCall, done: Any) -> None:
        if self.statuses is not None:
            self.statuses.set_work(pending, -1, done)
