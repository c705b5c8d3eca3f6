"""The blocking handles of operations and submissions."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from distop.client.done_callbacks import check_callback, log
from distop.client.loop_thread import close, next_of
from distop.services.submission.start_options import takes_options

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    from distop import aio
    from distop.client.loop_thread import Loop
    from distop.protocol.records import OperationRef
    from distop.services.inspection.outcomes import JobResult
    from distop.services.inspection.why import Why
    from distop.services.operation_results import OperationResult, OperationStatus
    from distop.services.submission import transactional_start
    from distop.services.submission.start_options import AlterKeywords, RerunKeywords

T = TypeVar("T")


class Operation:
    """An operation that was started: :class:`distop.aio.Operation` with blocking methods."""

    def __init__(self, loop: Loop, inner: aio.Operation) -> None:
        self._loop = loop
        self._inner = inner

    @property
    def ref(self) -> str:
        """``table/type[/object]/instance``: what the command line takes."""
        return self._inner.ref

    @property
    def instance_id(self) -> int:
        """The instance number."""
        return self._inner.instance_id

    @property
    def parts(self) -> OperationRef:
        """Table, type, object and instance."""
        return self._inner.parts

    @property
    def already_started(self) -> bool:
        """An earlier call with the same request id had started it."""
        return self._inner.already_started

    def __repr__(self) -> str:
        return repr(self._inner)

    def wait(self, timeout: float | None = None, *, report: type | None = None) -> OperationResult:
        """Wait for the result, at most ``timeout`` seconds.

        An interrupt does not stop the operation. ``report``: a pydantic model to which the report is converted. Raises
        WaitTimeout, NotFound, InvalidArgument.
        """
        return self._loop.run(self._inner.wait(timeout, report=report))

    def results(self, model: type | None = None) -> Iterator[JobResult]:
        """The outcomes of the ended jobs; see :meth:`distop.aio.Operation.results`."""
        return self._each(self._inner.results(model))

    def add_done_callback(self, function: Callable[[OperationResult], Any]) -> None:
        """Register a function that is called once with the result, in its own thread, when the operation has ended.

        If it has already ended, the function is called soon. It may use this client. Its exceptions are logged. It is
        not called if the client is closed before, and the process does not wait for it at its end. Raises
        InvalidArgument.
        """
        check_callback(function)
        self._loop.run(self._add(_InThread(function, self.ref)))

    async def _add(self, function: _InThread) -> None:
        self._inner.add_done_callback(function)

    def why(self) -> Why:
        """Why the operation waits, and what to do about it. Raises NotFound."""
        return self._loop.run(self._inner.why())

    def status(self) -> OperationStatus:
        """The status of the operation. Raises NotFound."""
        return self._loop.run(self._inner.status())

    def watch(self, interval: float = 0.5) -> Iterator[OperationStatus]:
        """Yield the status now, and at each change, checked every ``interval`` seconds.

        The last one has ``ended``.
        """
        return self._each(self._inner.watch(interval))

    def _each(self, stream: AsyncGenerator[T, None]) -> Iterator[T]:
        try:
            while True:
                found = self._loop.run(next_of(stream))
                if found is None:
                    return
                yield found
        finally:
            self._loop.run(close(stream))

    def cancel(self, text: str = "") -> None:
        """Cancel the operation.

        Raises NotAllowed when it has ended or is completing, NotFound, OutcomeUnknown.
        """
        self._loop.run(self._inner.cancel(text))

    def end_series(self, text: str = "") -> str:
        """End the operation's series; see :meth:`distop.aio.Operation.end_series`."""
        return self._loop.run(self._inner.end_series(text))

    def pause(self, *, now: bool = False) -> None:
        """Pause the operation: no more jobs start until :meth:`resume`.

        Running jobs finish, or (``now``) stop and keep their checkpoints. Raises as :meth:`cancel` does.
        """
        self._loop.run(self._inner.pause(now=now))

    def resume(self) -> None:
        """Resume a paused operation. Raises as :meth:`cancel` does."""
        self._loop.run(self._inner.resume())

    def confirm(self) -> None:
        """Confirm the prepared operation; see :meth:`distop.aio.Operation.confirm`."""
        self._loop.run(self._inner.confirm())

    def abandon(self, text: str = "") -> None:
        """Abandon the prepared operation; see :meth:`distop.aio.Operation.abandon`."""
        self._loop.run(self._inner.abandon(text))

    @takes_options("alter")
    def alter(self, **options: Unpack[AlterKeywords]) -> None:
        """Change the priority and the limits; see :meth:`distop.aio.Operation.alter`."""
        self._loop.run(self._inner.alter(**options))

    @takes_options("rerun")
    def rerun(self, *, unfinished: bool | None = None, **options: Unpack[RerunKeywords]) -> Operation:
        """Start a new operation over the failed partitions of this ended one.

        See :meth:`distop.aio.Operation.rerun` for the options and errors.
        """
        return Operation(self._loop, self._loop.run(self._inner.rerun(unfinished=unfinished, **options)))


class Submission:
    """:class:`distop.services.submission.transactional_start.Submission` with blocking methods."""

    def __init__(self, loop: Loop, inner: transactional_start.Submission) -> None:
        self._loop = loop
        self._inner = inner
        self.compares = inner.compares
        self.puts = inner.puts

    @property
    def refs(self) -> tuple[OperationRef, ...]:
        """The operations, which exist once the transaction has been committed."""
        return self._inner.refs

    def etcd3(self, client: Any) -> tuple[list[Any], list[Any]]:
        """The compares and the operations as an ``etcd3`` client's transaction takes them."""
        return self._inner.etcd3(client)

    def stale(self) -> bool:
        """After a refusal: whether a new submission is needed. False: a compare of the caller's failed."""
        return self._loop.run(self._inner.stale())

    def committed(self) -> bool:
        """After an unknown outcome: whether it was committed. If it was not, it never will be."""
        return self._loop.run(self._inner.committed())


class _InThread:
    """Calls a function in its own thread, so that it may block and call the client."""

    def __init__(self, function: Callable[[OperationResult], Any], op: str) -> None:
        self._function = function
        self._op = op

    def __call__(self, result: OperationResult) -> None:
        threading.Thread(target=self._call, args=(result,), name="distop-callback", daemon=True).start()

    def _call(self, result: OperationResult) -> None:
        try:
            self._function(result)
        except Exception as error:
            log.error("Error in a callback", extra={"operation": self._op}, exc_info=error)
