"""The asyncio handle of one operation: wait, status, commands."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from distop.client.done_callbacks import DoneCallbacks
from distop.errors import WaitTimeout
from distop.protocol.caller_values import seconds
from distop.protocol.caller_values import text as check_text
from distop.protocol.keys import Keys
from distop.protocol.records import OperationRef
from distop.services.inspection.status import JobStates
from distop.services.operation_results import OperationResult, OperationStatus, check_model
from distop.services.submission.start_options import StartOptions, takes_options

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from distop.client.backend import Backend
    from distop.services.inspection.outcomes import JobResult
    from distop.services.inspection.why import Why
    from distop.services.submission.start_options import AlterKeywords, RerunKeywords

log = logging.getLogger("distop.client")


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

    def __init__(self, backend: Backend, ref: OperationRef, *, already_started: bool = False) -> None:
        self._backend = backend
        self._ref = ref
        self._already_started = already_started
        self._jobs = JobStates()
        self._callbacks = DoneCallbacks(str(ref), self.wait)

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
        return await self._backend.status(self._ref, self._jobs)

    async def why(self) -> Why:
        """Why the operation waits, and what to do about it.

        Reasons have a code, a sentence and advice; the most important one is first. There are none while jobs run, and
        none once it has ended. Raises NotFound, UnreadableRecord.
        """
        return await self._backend.why(self._ref)

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
                result = OperationResult.of(await self._backend.end(self._ref))
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
        return self._backend.outcomes(self._ref, model)

    def add_done_callback(self, function: Callable[[OperationResult], Any]) -> None:
        """Register a function that is called once with the result, in the running loop, when the operation has ended.

        If it has already ended, the function is called soon. A returned awaitable is awaited. Exceptions are logged.
        The function is not called if the client is closed before. Raises InvalidArgument.
        """
        self._callbacks.add(function)

    def remove_done_callback(self, function: Callable[[OperationResult], Any]) -> int:
        """Remove a callback; returns how often it was registered."""
        return self._callbacks.remove(function)

    async def watch(self, interval: float = 0.5) -> AsyncGenerator[OperationStatus, None]:
        """Yield the status now, and at each change, checked every ``interval`` seconds (by a service: at once).

        The last one has ``ended``. Raises NotFound, InvalidArgument (``interval`` is not a number).
        """
        seconds(interval, "the interval")
        async with contextlib.aclosing(self._backend.watch(self._ref, self._jobs, interval)) as found:
            async for one in found:
                yield one

    # --------------------------------------------------------------- commands

    async def cancel(self, text: str = "") -> None:
        """Cancel the operation: no more jobs start; running jobs stop and clean up.

        Idempotent. ``text``: the reason, for the record.

        Raises NotAllowed when it has ended, is completing, or is stopping because its jobs failed: its completion code
        decides its result. Raises NotFound, OutcomeUnknown.
        """
        await self._backend.cancel(self._ref, text)

    async def end_series(self, text: str = "") -> str:
        """End the operation's series (``every``): cancel its active operation; returns its name.

        This operation itself may have ended. No operation of the series follows. If the active one is just ending, it
        is waited for, and the next one is cancelled. ``text``: the reason, for the record.

        Raises NotAllowed (it is not part of a series; the series has ended; or the active operation does not end),
        NotFound, OutcomeUnknown (call again).
        """
        return await self._backend.end_series(self._ref, text)

    async def confirm(self) -> None:
        """Confirm the prepared operation, so that it may start (C13). Idempotent.

        Raises NotAllowed (it was not prepared; or, with the reason, it was given up, abandoned or cancelled), NotFound,
        OutcomeUnknown (confirm it again).
        """
        await self._backend.confirm_operation(self._ref)

    async def abandon(self, text: str = "") -> None:
        """Abandon the prepared operation: it never starts. Idempotent.

        ``text``: the reason. Raises NotAllowed (it was confirmed, or not prepared), NotFound, OutcomeUnknown.
        """
        await self._backend.abandon(self._ref, text)

    async def pause(self, *, now: bool = False) -> None:
        """Pause the operation: no more jobs start until :meth:`resume`.

        Running jobs finish. With ``now`` they stop: jobs with checkpoints save one, the others start over later. The
        stage of its status is ``pausing`` while jobs run, then ``paused``. Raises as :meth:`cancel` does.
        """
        await self._backend.pause(self._ref, now)

    async def resume(self) -> None:
        """Resume a paused operation. Idempotent. Raises as :meth:`cancel` does."""
        await self._backend.resume(self._ref)

    @takes_options("alter")
    async def alter(self, **options: Unpack[AlterKeywords]) -> None:
        """Change the priority and the limits of the operation; None leaves a value unchanged.

        After a limit is lowered, running jobs finish, and no job starts until fewer run; 0 removes a limit.
        ``max_failed`` "" restores the failure policy.

        Raises InvalidArgument (also if there is nothing to change), and as :meth:`cancel` does.
        """
        await self._backend.alter(self._ref, StartOptions.of(options, "alter").checked())

    @takes_options("rerun")
    async def rerun(self, *, unfinished: bool | None = None, **options: Unpack[RerunKeywords]) -> Operation:
        """Start a new operation over the failed partitions of this ended one.

        If it was cancelled, or with ``unfinished``, also over partitions without an end. The argument is the same; the
        table is planned anew, so its current files are read. The other parameters are those of a start; policy,
        attempts, time limit and labels are inherited unless given.

        Raises NotAllowed if it has not ended, has succeeded or has no such partition, NotFound, and the errors of a
        start.
        """
        started = await self._backend.rerun(self._ref, StartOptions.of(options, "rerun"), unfinished)
        return Operation(self._backend, started.ref, already_started=started.earlier)
