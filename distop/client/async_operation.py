"""The asyncio handle of one operation: wait, status, commands."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Unpack

from distop.client.done_callbacks import DoneCallbacks
from distop.errors import (
    ClusterChanged,
    EtcdUnavailable,
    InvalidArgument,
    WaitTimeout,
    no_operation,
)
from distop.protocol.caller_values import seconds
from distop.protocol.caller_values import text as check_text
from distop.protocol.keys import Keys
from distop.protocol.record_reading import read
from distop.protocol.records import History, OperationRef
from distop.protocol.texts import shown
from distop.protocol.txn import Get
from distop.runtime.backoff import Backoff
from distop.services.inspection.outcomes import outcomes
from distop.services.inspection.status import JobStates, status
from distop.services.inspection.why import why
from distop.services.operation_commands import OperationCommands
from distop.services.operation_results import OperationResult, OperationStatus, check_model
from distop.services.submission import two_phase
from distop.services.submission.rerun import rerun
from distop.services.submission.start_options import StartOptions, takes_options

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from distop.protocol.txn import KeyValue
    from distop.services.inspection.outcomes import JobResult
    from distop.services.inspection.why import Why
    from distop.services.submission.start_options import AlterKeywords, RerunKeywords
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


def parse_ref(text: str | OperationRef) -> OperationRef:
    """The parsed name of an operation; nothing is read. Raises InvalidArgument."""
    ref = text if isinstance(text, OperationRef) else OperationRef.parse(check_text(text, "an operation's name"))
    Keys().root(ref)
    return ref


class Operation:
    """The handle of an operation: its name and a connection.

    Losing the handle changes nothing. Besides the errors that each method documents, all raise EtcdUnavailable when
    etcd cannot be reached for long.
    """

    def __init__(
        self, etcd: EtcdClient, keys: Keys, ref: OperationRef, *, already_started: bool = False, shared_dir: str = ""
    ) -> None:
        self._etcd = etcd
        self._keys = keys
        self._ref = ref
        self._already_started = already_started
        self._shared_dir = shared_dir
        self._jobs = JobStates()
        self._waiting_for_etcd = False
        self._callbacks = DoneCallbacks(str(ref), self.wait)
        self._commands = OperationCommands(etcd, keys, ref)

    @property
    def ref(self) -> str:
        """``table/type[/object]/instance``: what the command line takes."""
        return str(self._ref)

    @property
    def instance_id(self) -> int:
        """The instance number."""
        return self._ref.instance

    @property
    def parts(self) -> OperationRef:
        """Table, type, object and instance."""
        return self._ref

    @property
    def already_started(self) -> bool:
        """Whether an earlier call with the same request id, or an id, had started the operation.

        It may have ended by now.
        """
        return self._already_started

    def __repr__(self) -> str:
        return f"<Operation {self.ref}>"

    # ------------------------------------------------------------------- look

    async def status(self) -> OperationStatus:
        """The status of the operation. Raises NotFound."""
        return await status(self._etcd, self._keys, self._ref, self._jobs)

    async def why(self) -> Why:
        """Why the operation waits, and what to do about it.

        Reasons have a code, a sentence and advice; the most important one is first. There are none while jobs run, and
        none once it has ended. Raises NotFound, UnreadableRecord.
        """
        return await why(self._etcd, self._keys, self._ref)

    async def wait(self, timeout: float | None = None, *, report: type | None = None) -> OperationResult:
        """Wait for the result, at most ``timeout`` seconds (None: for ever).

        Outages of etcd are waited out and logged. ``report``: a pydantic model, such as the behavior's Report, to which
        the report is converted; an invalid report raises InvalidArgument, and stays in the record.

        Raises WaitTimeout (the operation continues), NotFound, InvalidArgument (``timeout`` is not a number).
        """
        if timeout is not None:
            seconds(timeout, "the timeout")
        if report is not None:
            check_model(report)
        try:
            async with asyncio.timeout(timeout):
                result = OperationResult.of(await self._history())
        except TimeoutError:
            raise WaitTimeout(f"{self.ref} has not ended within {timeout:g} s; it goes on") from None
        return result if report is None else replace(result, report=result.report_as(report))

    def results(self, model: type | None = None) -> AsyncGenerator[JobResult, None]:
        """The outcomes of the ended jobs, in the order of their partitions.

        Each page is read when it is needed. After the operation's end they are available until etcd has compacted them
        (the report is kept in the history record). ``model``: a pydantic model, such as the behavior's Result, to which
        each result is converted. The size and checksum of a result in a file (``Behavior.large_results``) are checked;
        the file is searched below the client's ``shared_dir``, or else below ``_distop/`` in the table's folder.

        Raises NotFound (no such operation; its results are compacted; a file that cannot be read from here),
        UnreadableRecord (a changed file), InvalidArgument (a result does not fit the model).
        """
        if model is not None:
            check_model(model)
        return outcomes(self._etcd, self._keys, self._ref, model, self._shared_dir)

    def add_done_callback(self, function: Callable[[OperationResult], Any]) -> None:
        """Register a function that is called once with the result, in the running loop, when the operation has ended.

        If it has already ended, the function is called soon. A returned awaitable is awaited. Exceptions are logged.
        The function is not called if the client is closed before. Raises InvalidArgument.
        """
        self._callbacks.add(function)

    def remove_done_callback(self, function: Callable[[OperationResult], Any]) -> int:
        """Remove a callback; returns how often it was registered."""
        return self._callbacks.remove(function)

    async def _history(self) -> History:
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
                    log.warning("Waiting for etcd: %s", error, extra={"operation": self.ref})
                await asyncio.sleep(backoff.pause())

    def _answered(self) -> None:
        """Log that etcd answers again, after an outage was logged."""
        if self._waiting_for_etcd:
            self._waiting_for_etcd = False
            log.warning("Connected to etcd again", extra={"operation": self.ref})

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
            raise no_operation(self.ref)
        return None

    async def watch(self, interval: float = 0.5) -> AsyncGenerator[OperationStatus, None]:
        """Yield the status now, and at each change, checked every ``interval`` seconds.

        The last one has ``ended``. Raises NotFound, InvalidArgument (``interval`` is not a number).
        """
        seconds(interval, "the interval")
        last: OperationStatus | None = None
        waiter = asyncio.ensure_future(self.wait())
        try:
            while True:
                with contextlib.suppress(EtcdUnavailable):
                    now = await self.status()
                    if now != last:
                        yield now
                    if now.ended:
                        return
                    last = now
                await asyncio.wait([waiter], timeout=interval)
                if waiter.done() and waiter.exception() is not None:
                    waiter.result()
        finally:
            waiter.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await waiter

    # --------------------------------------------------------------- commands

    async def cancel(self, text: str = "") -> None:
        """Cancel the operation: no more jobs start; running jobs stop and clean up.

        Idempotent. ``text``: the reason, for the record.

        Raises NotAllowed when it has ended, is completing, or is stopping because its jobs failed: its completion code
        decides its result. Raises NotFound, OutcomeUnknown.
        """
        await self._commands.cancel(text)

    async def end_series(self, text: str = "") -> str:
        """End the operation's series (``every``): cancel its active operation; returns its name.

        This operation itself may have ended. No operation of the series follows. If the active one is just ending, it
        is waited for, and the next one is cancelled. ``text``: the reason, for the record.

        Raises NotAllowed (it is not part of a series; the series has ended; or the active operation does not end),
        NotFound, OutcomeUnknown (call again).
        """
        return await self._commands.end_series(text)

    async def confirm(self) -> None:
        """Confirm the prepared operation, so that it may start (C13). Idempotent.

        Raises NotAllowed (it was not prepared; or, with the reason, it was given up, abandoned or cancelled), NotFound,
        OutcomeUnknown (confirm it again).
        """
        await two_phase.confirm_operation(self._etcd, self._keys, self._ref)

    async def abandon(self, text: str = "") -> None:
        """Abandon the prepared operation: it never starts. Idempotent.

        ``text``: the reason. Raises NotAllowed (it was confirmed, or not prepared), NotFound, OutcomeUnknown.
        """
        await self._commands.abandon(text)

    async def pause(self, *, now: bool = False) -> None:
        """Pause the operation: no more jobs start until :meth:`resume`.

        Running jobs finish. With ``now`` they stop: jobs with checkpoints save one, the others start over later. The
        stage of its status is ``pausing`` while jobs run, then ``paused``. Raises as :meth:`cancel` does.
        """
        await self._commands.pause(now=now)

    async def resume(self) -> None:
        """Resume a paused operation. Idempotent. Raises as :meth:`cancel` does."""
        await self._commands.resume()

    @takes_options("alter")
    async def alter(self, **options: Unpack[AlterKeywords]) -> None:
        """Change the priority and the limits of the operation; None leaves a value unchanged.

        After a limit is lowered, running jobs finish, and no job starts until fewer run; 0 removes a limit.
        ``max_failed`` "" restores the failure policy.

        Raises InvalidArgument (also if there is nothing to change), and as :meth:`cancel` does.
        """
        wanted = StartOptions.of(options, "alter").checked()
        if not wanted:
            raise InvalidArgument("there is nothing to alter: give a priority, a limit or a number of failures")
        await self._commands.alter(wanted)

    @takes_options("rerun")
    async def rerun(self, *, unfinished: bool | None = None, **options: Unpack[RerunKeywords]) -> Operation:
        """Start a new operation over the failed partitions of this ended one.

        If it was cancelled, or with ``unfinished``, also over partitions without an end. The argument is the same; the
        table is planned anew, so its current files are read. The other parameters are those of a start; policy,
        attempts, time limit and labels are inherited unless given.

        Raises NotAllowed if it has not ended, has succeeded or has no such partition, NotFound, and the errors of a
        start.
        """
        if unfinished is not None and not isinstance(unfinished, bool):
            raise InvalidArgument(f"unfinished must be True, False or None, not {shown(unfinished)}")
        given = StartOptions.of(options, "rerun")
        started = await rerun(self._etcd, self._keys, self._ref, given, unfinished=unfinished)
        earlier, shared_dir = started.earlier, self._shared_dir
        return Operation(self._etcd, self._keys, started.ref, already_started=earlier, shared_dir=shared_dir)
