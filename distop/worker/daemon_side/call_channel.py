"""Calls from the daemon to the child: sent, answered, told to stop; a child that dies is an answer too."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from distop.errors import describe
from distop.protocol.records import OperationRef
from distop.worker import child_messages
from distop.worker.daemon_side.admission import FairSemaphore
from distop.worker.daemon_side.requests import Death, WorkerError
from distop.worker.daemon_side.result_handlers import CallSink, Sources, first

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator

    from distop.runtime.logs import Log
    from distop.worker.daemon_side.admission import Gate
    from distop.worker.daemon_side.child_keeper import Keeper

    CallMessage = (
        child_messages.PlanMessage
        | child_messages.CompleteMessage
        | child_messages.CleanupMessage
        | child_messages.SweepMessage
        | child_messages.ResultsMessage
        | child_messages.VerifyMessage
    )
    Answer = tuple[Any, list[bytes]]
    Rows = Callable[[], Iterable[str]]
    Spawn = Callable[[Coroutine[Any, Any, Answer]], asyncio.Task[Answer]]

NOTHING = Sources()
PLACES = 8
"""Plannings and completions in the child at once; half of them for one table. What they hold in memory is bounded by
this, since they take no slot."""
IN_PLACES = frozenset({"plan", "complete"})
WORDS = {
    "plan": "the planning",
    "complete": "the completion",
    "cleanup": "the cleanup",
    "sweep": "the sweep",
    "results": "the sweep of results",
    "verify": "the verification",
}


def _given_up(attended: asyncio.Task[Answer]) -> None:
    """Retrieve the error of an abandoned call, so that asyncio does not log it."""
    if not attended.cancelled():
        attended.exception()


class _Asked:
    """A call from when it is asked for until it has ended, whether it is in a child or waits for one."""

    def __init__(self, message: CallMessage, of_run: bool) -> None:
        self.op = message["op"]
        self.what = f"{WORDS[message['t']]} of {self.op}"
        self.of_run = of_run
        self.table = OperationRef.parse(self.op).table if message["t"] in IN_PLACES else None
        """Whose turn it takes for a place in the child; None: it needs none."""
        self.sink: CallSink | None = None
        loop = asyncio.get_running_loop()
        self.placed: asyncio.Future[None] = loop.create_future()
        """Done once it has a place, from when on its time limit counts."""
        self.told: asyncio.Future[str] = loop.create_future()
        """Why it has to stop, once it has to."""

    def stop(self, why: str) -> None:
        """The first reason counts."""
        if not self.told.done():
            self.told.set_result(why)


class Caller:
    """The calls that go on. ``spawn`` starts what outlives a caller who gave up."""

    def __init__(self, keeper: Keeper, numbers: Iterator[int], spawn: Spawn, log: Log) -> None:
        self._keeper = keeper
        self._numbers = numbers
        self._spawn = spawn
        self._log = log
        self._asked: set[_Asked] = set()
        self._places = FairSemaphore(PLACES, PLACES // 2)

    def cancel(self, op: str) -> None:
        """Stop the operation's calls, but for the cleanups of runs, which are the runs' own."""
        for asked in self._asked:
            if asked.op == op and not asked.of_run:
                asked.stop(f"cancelled: {asked.what} was told to stop")

    def abort(self, reason: str) -> None:
        """Stop all calls; the caller kills the child."""
        for asked in self._asked:
            asked.stop(f"cancelled: the worker was stopped: {reason}")

    async def call(
        self,
        message: CallMessage,
        rows: Rows | None = None,
        *,
        sources: Sources = NOTHING,
        gate: Gate | None = None,
        limit: float | None = None,
    ) -> Answer:
        """A call's result and chunks. Raises WorkerError; ``transient`` where it was cancelled, or did not end within
        ``limit`` seconds from when it had a place. ``rows`` gives the message's items, as JSON, each time that it is
        sent; ``sources`` what the child asks for meanwhile.

        With a gate (which the caller has not entered), a child that died with others in it is no answer: the call is
        repeated with nobody else there. Without one, it is the call of a run that is in the gate.
        """
        asked = _Asked(message, of_run=gate is None)
        self._asked.add(asked)
        send = partial(self._answer, asked, message, rows, sources)
        attended = self._spawn(self._attend(asked, self._work(asked, send, gate), limit))
        try:
            return await asyncio.shield(attended)
        except WorkerError:
            raise
        except Exception as error:
            # A defect, or trouble of this process: whoever asked counts it as an attempt, and does not ask for ever.
            self._log.exception("%s broke on its way", asked.what, extra={"operation": asked.op})
            raise WorkerError("transient", f"{asked.what} broke on its way: {describe(error)}") from error
        except asyncio.CancelledError:
            # Nobody waits for it any more, but its thread in the child must end all the same, and the gate with it.
            asked.stop("its caller gave it up")
            attended.add_done_callback(_given_up)
            raise

    async def _attend(self, asked: _Asked, working: Coroutine[Any, Any, Answer], limit: float | None) -> Answer:
        """See to it that a call ends once it was told to, or has taken too long: the child is told, and killed when
        that does not help within the grace."""
        work = asyncio.ensure_future(working)
        try:
            await first(work, asked.placed, asked.told)
            await first(work, asked.told, timeout=limit)
            if work.done():
                return work.result()
            if limit is not None:
                asked.stop(f"{asked.what} did not end within {limit:g} s")
            if asked.sink is None:
                work.cancel()
            else:
                asked.sink.stop()
                await first(work, timeout=self._keeper.config.grace)
                if asked.sink is not None:
                    said = "%s did not stop when told: its worker process is killed"
                    self._log.warning(said, asked.what, extra={"operation": asked.op})
                    asked.sink.child.kill("stubborn")
            await first(work)
            if not work.cancelled():
                work.exception()  # what it said in the end does not matter
            raise WorkerError("transient", asked.told.result())
        finally:
            work.cancel()
            self._asked.discard(asked)

    async def _work(self, asked: _Asked, send: Callable[[], Awaitable[Answer | Death]], gate: Gate | None) -> Answer:
        async with self._places.place(asked.table) if asked.table is not None else nullcontext():
            asked.placed.set_result(None)
            if gate is None:
                got = await send()
            else:
                async with gate.shared():
                    got = await send()
                if isinstance(got, Death) and (got.runs or len(got.calls) > 1) and not asked.told.done():
                    async with gate.exclusive():
                        got = await send()
        if isinstance(got, Death):
            raise WorkerError("crash", str(got))
        return got

    async def _answer(self, asked: _Asked, message: CallMessage, rows: Rows | None, sources: Sources) -> Answer | Death:
        """The answer, or how the child crashed.

        A call is sent again if its child was killed for another call, or read it too late, and once if its child's
        Spark session was unusable.
        """
        sparks_lost = 0
        while True:
            child = await self._keeper.ready(call=True)
            call = CallSink(next(self._numbers), child, sources)
            child.calls[call.number] = call
            asked.sink = call
            try:
                message["call"], message["deadline"] = call.number, self._keeper.deadline
                if rows is not None and message["t"] in ("cleanup", "complete"):
                    for frame in child_messages.encode_paged(message, rows()):
                        child.send_frame(frame)
                        # Many items take long to encode; the daemon has a lease to keep.
                        await asyncio.sleep(0)
                else:
                    child.send(message)
                await first(call.result, child.died)
            except asyncio.CancelledError:
                call.stop()
                raise
            finally:
                asked.sink = None
                child.calls.pop(call.number, None)
                child.end_if_stuck()
            if call.result.done():
                try:
                    return call.result.result(), call.chunks
                except WorkerError as error:
                    # The session goes on, since its child lives: the child stood still while it was renewed.
                    if error.kind != "late" or asked.told.done():
                        raise
                    continue
            death = child.died.result()
            if death.crashed:
                return death
            if death.final or asked.told.done():
                raise WorkerError("transient", str(death))
            sparks_lost += death.of_spark
            if sparks_lost > 1:
                raise WorkerError("unavailable", str(death))
