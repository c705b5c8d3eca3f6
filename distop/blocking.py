"""The blocking face of the client: safe from any thread, and from code that already runs an event loop.

One private daemon thread with an event loop of its own serves all clients of a process. A call from inside a
coroutine works and blocks that coroutine's loop meanwhile; use :mod:`distop.aio` there. Not to be used across
``fork()``: threads and gRPC do not survive it; connect in the child instead (a client of the parent says so).
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from distop.callbacks import check_callback, log
from distop.errors import EtcdUnavailable, UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
    from datetime import datetime
    from types import TracebackType

    from distop import aio, workers
    from distop.claims.model import OfferedJob, Outcome, OwnedJob
    from distop.core.declaration import Declaration
    from distop.core.model import Node, OperationRef, TableRecord
    from distop.core.txn import Compare
    from distop.core.txn import Operation as TxnOperation
    from distop.graphs import Start, Step
    from distop.inspection.history import HistoryPage
    from distop.inspection.outcomes import JobResult
    from distop.inspection.survey import Count
    from distop.inspection.why import Why
    from distop.results import OperationResult, OperationStatus, Transaction
    from distop.submission import within
    from distop.submission.request import Every

__all__ = ["Client", "Job", "Operation", "Worker", "connect", "start_operation"]

T = TypeVar("T")

_LOOK_UP = 3_600.0
"""Seconds of one uninterrupted wait. A wait without end could not be interrupted on every platform."""


class _Loop:
    """The private thread and its event loop."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="distop-client", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it there and wait here. An interrupt of the caller (Ctrl-C) stops the work."""
        if os.getpid() != self.pid:
            work.close()
            raise UsageError("this client was made before a fork: connect again in the child process")
        if threading.current_thread() is self._thread:
            work.close()
            raise UsageError("the blocking client was called from its own event loop: use distop.aio there")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while True:
                try:
                    return future.result(_LOOK_UP)
                except TimeoutError:
                    if future.done():
                        return future.result()
        except CancelledError:
            raise EtcdUnavailable("the client was closed") from None
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """End the loop; the thread with it."""
        if os.getpid() == self.pid and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(2.0)


_lock = threading.Lock()
_loop: _Loop | None = None
_default: Client | None = None


def _shared_loop() -> _Loop:
    global _loop
    with _lock:
        if _loop is None or _loop.pid != os.getpid():
            _loop = _Loop()
        return _loop


def _forget_after_fork() -> None:
    global _lock, _loop, _default
    _lock, _loop, _default = threading.Lock(), None, None


os.register_at_fork(after_in_child=_forget_after_fork)


class Operation:
    """An operation that was started: :class:`distop.aio.Operation` with blocking methods."""

    def __init__(self, loop: _Loop, inner: aio.Operation) -> None:
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
        """How it ended, once it has; at most ``timeout`` seconds. An interrupt leaves the operation going. ``report``:
        a pydantic model, as which the report is given.

        Raises WaitTimeout, NotFound, InvalidArgument.
        """
        return self._loop.run(self._inner.wait(timeout, report=report))

    def results(self, model: type | None = None) -> Iterator[JobResult]:
        """How its jobs ended, one after the other; see :meth:`distop.aio.Operation.results`."""
        return self._each(self._inner.results(model))

    def add_done_callback(self, function: Callable[[OperationResult], Any]) -> None:
        """Have a function called once with the result, in a thread of its own, when the operation has ended: soon, if
        it has by now. It may use this client. What it raises is logged, and breaks nothing. It is not called where the
        client is closed before, and the end of the process does not wait for it. Raises InvalidArgument.
        """
        check_callback(function)
        self._loop.run(self._add(_InThread(function, self.ref)))

    async def _add(self, function: _InThread) -> None:
        self._inner.add_done_callback(function)

    def why(self) -> Why:
        """What it waits for, and what to do about it. Raises NotFound."""
        return self._loop.run(self._inner.why())

    def status(self) -> OperationStatus:
        """How it is doing. Raises NotFound."""
        return self._loop.run(self._inner.status())

    def watch(self, interval: float = 0.5) -> Iterator[OperationStatus]:
        """Its status whenever it has changed, looked at each ``interval`` seconds; the last one has ``ended``."""
        return self._each(self._inner.watch(interval))

    def _each(self, stream: AsyncGenerator[T, None]) -> Iterator[T]:
        try:
            while True:
                found = self._loop.run(_next(stream))
                if found is None:
                    return
                yield found
        finally:
            self._loop.run(_close(stream))

    def cancel(self, text: str = "") -> None:
        """Stop it. Raises NotAllowed when it has ended or is completing, NotFound, OutcomeUnknown."""
        self._loop.run(self._inner.cancel(text))

    def end_series(self, text: str = "") -> str:
        """End the series that it is of; see :meth:`distop.aio.Operation.end_series`."""
        return self._loop.run(self._inner.end_series(text))

    def pause(self, *, now: bool = False) -> None:
        """No more jobs start until :meth:`resume`; running ones finish, or (``now``) are told to stop, keeping their
        checkpoints. Raises as :meth:`cancel` does.
        """
        self._loop.run(self._inner.pause(now=now))

    def resume(self) -> None:
        """Let a paused operation go on. Raises as :meth:`cancel` does."""
        self._loop.run(self._inner.resume())

    def confirm(self) -> None:
        """Let it begin, where it was prepared; again changes nothing. See :meth:`distop.aio.Operation.confirm`."""
        self._loop.run(self._inner.confirm())

    def abandon(self, text: str = "") -> None:
        """End it, where it was prepared and not confirmed. See :meth:`distop.aio.Operation.abandon`."""
        self._loop.run(self._inner.abandon(text))

    def alter(
        self,
        *,
        priority: int | None = None,
        max_jobs: int | None = None,
        max_jobs_per_executor: int | None = None,
        max_failed: int | str | None = None,
    ) -> None:
        """Change how urgent it is, and what limits it; see :meth:`distop.aio.Operation.alter`."""
        self._loop.run(
            self._inner.alter(
                priority=priority,
                max_jobs=max_jobs,
                max_jobs_per_executor=max_jobs_per_executor,
                max_failed=max_failed,
            )
        )

    def rerun(
        self,
        *,
        unfinished: bool | None = None,
        request_id: str | None = None,
        failure_policy: str | None = None,
        retry_attempts: int | None = None,
        submitter: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Operation:
        """Once it has ended: start a new operation over its failed partitions; see
        :meth:`distop.aio.Operation.rerun` for the options and for what is raised.
        """
        inner = self._loop.run(
            self._inner.rerun(
                unfinished=unfinished,
                request_id=request_id,
                failure_policy=failure_policy,
                retry_attempts=retry_attempts,
                submitter=submitter,
                labels=labels,
            )
        )
        return Operation(self._loop, inner)


async def _next(stream: AsyncGenerator[T, None]) -> T | None:
    return await anext(stream, None)


async def _close(stream: Any) -> None:
    await stream.aclose()


class Submission:
    """:class:`distop.submission.within.Submission` with blocking methods."""

    def __init__(self, loop: _Loop, inner: within.Submission) -> None:
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
        """After a refusal: whether a new submission is needed; else it was a compare of the caller's."""
        return self._loop.run(self._inner.stale())

    def committed(self) -> bool:
        """Where the outcome is not known: whether it was committed; where it was not, it never will be."""
        return self._loop.run(self._inner.committed())


class _InThread:
    """Calls a function in a thread of its own: it may block, and call the client."""

    def __init__(self, function: Callable[[OperationResult], Any], op: str) -> None:
        self._function = function
        self._op = op

    def __call__(self, result: OperationResult) -> None:
        threading.Thread(target=self._call, args=(result,), name="distop-callback", daemon=True).start()

    def _call(self, result: OperationResult) -> None:
        try:
            self._function(result)
        except Exception as error:
            log.error("a callback failed", extra={"operation": self._op}, exc_info=error)


class Client:
    """:class:`distop.aio.Client` with blocking methods; may be shared by threads. A context manager."""

    def __init__(self, loop: _Loop, inner: aio.Client) -> None:
        self._loop = loop
        self._inner = inner
        self._closed = False
        atexit.register(self.close)

    def close(self) -> None:
        """Close the connection. Operations go on."""
        if not self._closed and self._loop.pid == os.getpid():
            self._loop.run(self._inner.close())
        self._closed = True
        atexit.unregister(self.close)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start_operation(
        self,
        type_name: str,
        table: str,
        arg: Any = None,
        *,
        partitions: Sequence[str] | None = None,
        request_id: str | None = None,
        failure_policy: str | None = None,
        retry_attempts: int | None = None,
        submitter: str | None = None,
        labels: Mapping[str, str] | None = None,
        not_before: datetime | str | None = None,
        delay: float | None = None,
        after: Iterable[Any] | None = None,
        priority: int | None = None,
        max_jobs: int | None = None,
        max_jobs_per_executor: int | None = None,
        max_failed: int | str | None = None,
        where: Mapping[str, str] | None = None,
        every: Every | float | None = None,
        id: str | None = None,  # noqa: A002
        one_off: bool = False,
        on_duplicate: str | None = None,
    ) -> Operation:
        """Start an operation; see :meth:`distop.aio.Client.start_operation`.

        Raises UnknownBehavior, InvalidArgument, NotFound, Incompatible, OutcomeUnknown, EtcdUnavailable.
        """
        inner = self._loop.run(
            self._inner.start_operation(
                type_name,
                table,
                arg,
                partitions=partitions,
                request_id=request_id,
                failure_policy=failure_policy,
                retry_attempts=retry_attempts,
                submitter=submitter,
                labels=labels,
                not_before=not_before,
                delay=delay,
                after=after,
                priority=priority,
                max_jobs=max_jobs,
                max_jobs_per_executor=max_jobs_per_executor,
                max_failed=max_failed,
                where=where,
                every=every,
                id=id,
                one_off=one_off,
                on_duplicate=on_duplicate,
            )
        )
        return Operation(self._loop, inner)

    def start_operations(self, starts: Iterable[Start], *, request_id: str | None = None) -> list[Operation]:
        """Start operations that may wait for each other, all or none: see
        :meth:`distop.aio.Client.start_operations`.
        """
        inner = self._loop.run(self._inner.start_operations(starts, request_id=request_id))
        return [Operation(self._loop, one) for one in inner]

    def submission(self, starts: Step | Iterable[Start], *, request_id: str | None = None) -> Submission:
        """Operations to be started by a transaction of the caller's own: see :meth:`distop.aio.Client.submission`."""
        return Submission(self._loop, self._loop.run(self._inner.submission(starts, request_id=request_id)))

    def transaction(
        self,
        *,
        compare: Iterable[Compare] = (),
        success: Iterable[TxnOperation] = (),
        failure: Iterable[TxnOperation] = (),
        start: Step | Iterable[Start],
        request_id: str | None = None,
    ) -> Transaction:
        """One transaction of the caller's that also starts operations: see :meth:`distop.aio.Client.transaction`."""
        done = self._loop.run(
            self._inner.transaction(
                compare=compare, success=success, failure=failure, start=start, request_id=request_id
            )
        )
        return replace(done, operations=[Operation(self._loop, one) for one in done.operations])

    def prepare_operation(
        self, type_name: str, table: str, arg: Any = None, *, external_id: str, **options: Any
    ) -> Operation:
        """Insert an operation that begins once it is confirmed: see :meth:`distop.aio.Client.prepare_operation`."""
        inner = self._inner.prepare_operation(type_name, table, arg, external_id=external_id, **options)
        return Operation(self._loop, self._loop.run(inner))

    def confirm(self, external_id: str) -> Operation:
        """Let the operation begin that was prepared under this id. Raises NotFound, NotAllowed, OutcomeUnknown."""
        return Operation(self._loop, self._loop.run(self._inner.confirm(external_id)))

    def prepared_operation(self, external_id: str) -> Operation:
        """The operation that was prepared under this id. Raises NotFound."""
        return Operation(self._loop, self._loop.run(self._inner.prepared_operation(external_id)))

    def add_dependencies(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Let operations wait for others as well: see :meth:`distop.aio.Client.add_dependencies`."""
        self._loop.run(self._inner.add_dependencies(pairs))

    def rerun(
        self,
        ref: str | OperationRef,
        *,
        unfinished: bool | None = None,
        request_id: str | None = None,
        failure_policy: str | None = None,
        retry_attempts: int | None = None,
        submitter: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Operation:
        """Start an ended operation anew over its failed partitions: see :meth:`distop.aio.Operation.rerun`."""
        return self.operation(ref).rerun(
            unfinished=unfinished,
            request_id=request_id,
            failure_policy=failure_policy,
            retry_attempts=retry_attempts,
            submitter=submitter,
            labels=labels,
        )

    def operation(self, ref: str | OperationRef) -> Operation:
        """The operation of this name, which is not looked up. Raises InvalidArgument."""
        return Operation(self._loop, self._inner.operation(ref))

    def operations(
        self,
        table: str | None = None,
        *,
        type: str | None = None,  # noqa: A002
        states: str | Collection[str] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> list[OperationStatus]:
        """The operations that have not ended, with their status; see :meth:`distop.aio.Client.operations`."""
        return self._loop.run(self._inner.operations(table, type=type, states=states, labels=labels))

    def counts(
        self,
        table: str | None = None,
        *,
        type: str | None = None,  # noqa: A002
        states: str | Collection[str] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> tuple[Count, ...]:
        """How many operations have not ended, by type and state; see :meth:`distop.aio.Client.counts`."""
        return self._loop.run(self._inner.counts(table, type=type, states=states, labels=labels))

    def why(self, ref: str | OperationRef) -> Why:
        """What an operation waits for, and what to do about it. Raises NotFound, InvalidArgument."""
        return self.operation(ref).why()

    def history(
        self,
        table: str | None = None,
        limit: int = 100,
        *,
        type: str | None = None,  # noqa: A002
        op: str | OperationRef | None = None,
        states: str | Collection[str] | None = None,
        since: float | str | datetime | None = None,
        until: float | str | datetime | None = None,
        labels: Mapping[str, str] | None = None,
        request_id: str | None = None,
        alarms: bool = False,
        after: str | None = None,
    ) -> HistoryPage:
        """How operations ended, the newest first; see :meth:`distop.aio.Client.history`."""
        return self._loop.run(
            self._inner.history(
                table,
                limit,
                type=type,
                op=op,
                states=states,
                since=since,
                until=until,
                labels=labels,
                request_id=request_id,
                alarms=alarms,
                after=after,
            )
        )

    def nodes(self) -> dict[str, Node]:
        """The live executors, by incarnation."""
        return self._loop.run(self._inner.nodes())

    def drain(self, executor: str, *, wait: bool = False, timeout: float | None = None) -> str:
        """Empty an executor; see :meth:`distop.aio.Client.drain`."""
        return self._loop.run(self._inner.drain(executor, wait=wait, timeout=timeout))

    def undrain(self, executor: str) -> None:
        """Let an executor work again; nothing changes when it is not drained. Raises NotFound."""
        self._loop.run(self._inner.undrain(executor))

    def behaviors(self) -> list[Declaration]:
        """The operation types that executors have published."""
        return self._loop.run(self._inner.behaviors())

    def register_type(
        self, type_name: str, arg_schema: Mapping[str, Any] | None = None, *, replace: bool = False, **declared: Any
    ) -> Declaration:
        """Declare a type without code; see :meth:`distop.aio.Client.register_type` for the options and for what is
        raised.
        """
        return self._loop.run(self._inner.register_type(type_name, arg_schema, replace=replace, **declared))

    def own_jobs(
        self,
        actor: str,
        types: Iterable[str] | Mapping[str, int | None],
        max: int = 1,  # noqa: A002  # the name in the requirements
        duration: float = 60.0,
        *,
        accept: Callable[[OfferedJob], bool] | None = None,
    ) -> list[OwnedJob]:
        """Claim jobs for a worker loop of one's own; see :meth:`distop.aio.Client.own_jobs`. (``accept`` is called in
        the client's own thread.)
        """
        return self._loop.run(self._inner.own_jobs(actor, types, max, duration, accept=accept))

    def extend(self, tokens: Iterable[str], duration: float = 60.0) -> list[bool]:
        """Keep jobs for longer; for each whether it is still owned. See :meth:`distop.aio.Client.extend`."""
        return self._loop.run(self._inner.extend(tokens, duration))

    def return_job(self, token: str, outcome: Outcome) -> None:
        """Return a job; see :meth:`distop.aio.Client.return_job`. Raises InvalidToken, InvalidArgument,
        OutcomeUnknown.
        """
        self._loop.run(self._inner.return_job(token, outcome))

    def tables(self) -> list[TableRecord]:
        """The registered tables."""
        return self._loop.run(self._inner.tables())

    def add_table(self, record: TableRecord, *, replace: bool = False, check: bool = True) -> TableRecord:
        """Register a table; see :meth:`distop.aio.Client.add_table`."""
        return self._loop.run(self._inner.add_table(record, replace=replace, check=check))

    def remove_table(self, name: str) -> None:
        """Remove a table from the registry. Raises NotFound, NotAllowed."""
        self._loop.run(self._inner.remove_table(name))


class Job:
    """A job that a worker holds: :class:`distop.workers.Job` with blocking methods."""

    def __init__(self, loop: _Loop, inner: workers.Job) -> None:
        self._loop = loop
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner.owned, name)

    @property
    def lost(self) -> bool:
        """Another has it, or its operation is being cancelled: stop."""
        return self._inner.lost

    def complete(self, result: Any = None) -> None:
        """It is done. Raises as :meth:`Client.return_job`, as the others do."""
        self._loop.run(self._inner.complete(result))

    def abort(self, message: str, result: Any = None) -> None:
        """A verdict: it has failed."""
        self._loop.run(self._inner.abort(message, result))

    def retry(self, error: str = "") -> None:
        """It broke: to be tried again."""
        self._loop.run(self._inner.retry(error))

    def release(self) -> None:
        """As if it had not been claimed."""
        self._loop.run(self._inner.release())


class Worker:
    """:class:`distop.workers.Worker` with plain functions for handlers, each called in a thread of its own, or for
    ``for job in worker``; see there for the options. An interrupt of :meth:`run` releases what is held.
    """

    def __init__(self, client: Client, handlers: Mapping[str, Callable[[Job], Any]] | Iterable[str], **options: Any):
        self._loop = client._loop
        loop = self._loop

        def wrapped(handler: Callable[[Job], Any]) -> Callable[[workers.Job], Any]:
            return lambda inner: handler(Job(loop, inner))

        async def make() -> workers.Worker:
            from distop.workers import Worker as Inner

            given: Any = handlers
            if isinstance(handlers, dict):
                given = {name: wrapped(one) if callable(one) else one for name, one in handlers.items()}
            return Inner(client._inner, given, **options)

        self._inner = self._loop.run(make())

    @property
    def actor(self) -> str:
        """The name under which jobs are claimed."""
        return self._inner.actor

    def run(self) -> None:
        """Have the handlers called, until :meth:`stop`, which another thread, or a handler, calls."""
        self._loop.run(self._inner.run())

    def stop(self) -> None:
        """Claim nothing more: :meth:`run` returns, and the iteration ends, once what is held was returned."""

        async def stop() -> None:
            self._inner.stop()

        self._loop.run(stop())

    def __iter__(self) -> Iterator[Job]:
        stream = self._inner.__aiter__()
        try:
            while True:
                found = self._loop.run(_next(stream))
                if found is None:
                    return
                yield Job(self._loop, found)
        finally:
            self._loop.run(_close(stream))


def connect(
    endpoints: str | Iterable[str] | None = None,
    *,
    client: Any = None,
    namespace: str | None = None,
    username: str | None = None,
    password: str | None = None,
    ca_cert: str | None = None,
    cert: str | None = None,
    key: str | None = None,
    connect_timeout: float | None = None,
) -> Client:
    """Connect to etcd: one endpoint or several, ``DISTOP_ETCD`` when left out, else 127.0.0.1:2379.

    ``client``: an ``etcd3.Etcd3Client`` of the caller's, whose address is taken; it keeps neither passwords nor
    certificate files, so those are given here as well. ``connect_timeout``: seconds, default 10.
    Raises InvalidArgument, EtcdUnavailable, PermissionDenied.
    """
    from distop.aio import connect as connecting

    loop = _shared_loop()

    async def work() -> aio.Client:
        return await connecting(
            endpoints,
            client=client,
            namespace=namespace,
            username=username,
            password=password,
            ca_cert=ca_cert,
            cert=cert,
            key=key,
            connect_timeout=connect_timeout,
        )

    return Client(loop, loop.run(work()))


_connecting = threading.Lock()


def start_operation(type_name: str, table: str, arg: Any = None, **options: Any) -> Operation:
    """Start an operation with the default client, which is connected on first use (``DISTOP_ETCD``).

    See :meth:`Client.start_operation` for the options and for what is raised.
    """
    global _default
    with _connecting:
        if _default is None or _default._closed:
            _default = connect()
        client = _default
    return client.start_operation(type_name, table, arg, **options)
