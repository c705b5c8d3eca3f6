"""The blocking client: safe from any thread, and from code that already runs an event loop.

One private daemon thread with an event loop of its own serves all clients of a process. A call from inside a
coroutine works and blocks that coroutine's loop meanwhile; use :mod:`distop.aio` there. Not to be used across
``fork()``: threads and gRPC do not survive it; connect in the child instead (a client of the parent says so).
"""

from __future__ import annotations

import atexit
import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from distop.client.blocking_operation import Operation, Submission
from distop.client.blocking_worker import Job, Worker
from distop.client.connection_options import ConnectionOptions
from distop.client.loop_thread import Loop
from distop.runtime.keyword_signatures import takes_fields_of
from distop.services.claims.types_without_code import TypeOptions
from distop.services.inspection.history_filters import HistoryFilters
from distop.services.submission.start_options import takes_options

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from types import TracebackType

    from distop import aio
    from distop.client.connection_options import ConnectionKeywords
    from distop.client.graphs import Start, Step
    from distop.protocol.behavior_declaration import Declaration
    from distop.protocol.records import Node, OperationRef, TableRecord
    from distop.protocol.txn import Compare, TxnOperation
    from distop.services.autopilot import Autopilot
    from distop.services.claims.owned_jobs import OfferedJob, OwnedJob, OwnedOutcome
    from distop.services.claims.types_without_code import TypeKeywords
    from distop.services.inspection.history_filters import HistoryKeywords
    from distop.services.inspection.history_pages import HistoryPage
    from distop.services.inspection.survey import Count
    from distop.services.inspection.why import Why
    from distop.services.operation_results import OperationStatus, Transaction
    from distop.services.policies import PolicyStatus
    from distop.services.submission.start_options import PrepareKeywords, RerunKeywords, StartKeywords

__all__ = ["Client", "Job", "Operation", "Worker", "connect", "start_operation"]

_lock = threading.Lock()
_loop: Loop | None = None
_default: Client | None = None


def _shared_loop() -> Loop:
    global _loop
    with _lock:
        if _loop is None or _loop.pid != os.getpid():
            _loop = Loop()
        return _loop


def _forget_after_fork() -> None:
    global _lock, _loop, _default
    _lock, _loop, _default = threading.Lock(), None, None


os.register_at_fork(after_in_child=_forget_after_fork)


class Client:
    """:class:`distop.aio.Client` with blocking methods; may be shared by threads. A context manager."""

    def __init__(self, loop: Loop, inner: aio.Client) -> None:
        self._loop = loop
        self._inner = inner
        self._closed = False
        atexit.register(self.close)

    def close(self) -> None:
        """Close the connection. Operations continue."""
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

    @takes_options("start")
    def start_operation(
        self, type_name: str, table: str, arg: Any = None, **options: Unpack[StartKeywords]
    ) -> Operation:
        """Start an operation; see :meth:`distop.aio.Client.start_operation`.

        Raises UnknownBehavior, InvalidArgument, NotFound, Incompatible, OutcomeUnknown, EtcdUnavailable.
        """
        return Operation(self._loop, self._loop.run(self._inner.start_operation(type_name, table, arg, **options)))

    def start_operations(self, starts: Iterable[Start], *, request_id: str | None = None) -> list[Operation]:
        """Start operations that may depend on each other, all or none.

        See :meth:`distop.aio.Client.start_operations`.
        """
        inner = self._loop.run(self._inner.start_operations(starts, request_id=request_id))
        return [Operation(self._loop, one) for one in inner]

    def submission(self, starts: Step | Iterable[Start], *, request_id: str | None = None) -> Submission:
        """Start operations in the caller's transaction: see :meth:`distop.aio.Client.submission`."""
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
        """Commit a transaction that also starts operations.

        See :meth:`distop.aio.Client.transaction`.
        """
        done = self._loop.run(
            self._inner.transaction(
                compare=compare, success=success, failure=failure, start=start, request_id=request_id
            )
        )
        return replace(done, operations=[Operation(self._loop, one) for one in done.operations])

    @takes_options("prepare")
    def prepare_operation(
        self,
        type_name: str,
        table: str,
        arg: Any = None,
        *,
        external_id: str,
        verify: str | None = None,
        verify_after: float = 60.0,
        verify_attempts: int = 5,
        verify_pause: float = 5.0,
        **options: Unpack[PrepareKeywords],
    ) -> Operation:
        """Prepare an operation, which starts when it is confirmed.

        See :meth:`distop.aio.Client.prepare_operation`.
        """
        inner = self._inner.prepare_operation(
            *(type_name, table, arg),
            external_id=external_id,
            verify=verify,
            verify_after=verify_after,
            verify_attempts=verify_attempts,
            verify_pause=verify_pause,
            **options,
        )
        return Operation(self._loop, self._loop.run(inner))

    def confirm(self, external_id: str) -> Operation:
        """Confirm the operation that was prepared under this id.

        Raises NotFound, NotAllowed, OutcomeUnknown.
        """
        return Operation(self._loop, self._loop.run(self._inner.confirm(external_id)))

    def prepared_operation(self, external_id: str) -> Operation:
        """The operation that was prepared under this id. Raises NotFound."""
        return Operation(self._loop, self._loop.run(self._inner.prepared_operation(external_id)))

    def add_dependencies(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Add dependencies to pending operations: see :meth:`distop.aio.Client.add_dependencies`."""
        self._loop.run(self._inner.add_dependencies(pairs))

    @takes_options("rerun")
    def rerun(
        self, ref: str | OperationRef, *, unfinished: bool | None = None, **options: Unpack[RerunKeywords]
    ) -> Operation:
        """Start an ended operation anew over its failed partitions: see :meth:`distop.aio.Operation.rerun`."""
        return self.operation(ref).rerun(unfinished=unfinished, **options)

    def operation(self, ref: str | OperationRef) -> Operation:
        """The handle of the operation with this name; nothing is read. Raises InvalidArgument."""
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
        """The number of operations that have not ended; see :meth:`distop.aio.Client.counts`."""
        return self._loop.run(self._inner.counts(table, type=type, states=states, labels=labels))

    def why(self, ref: str | OperationRef) -> Why:
        """Why an operation waits, and what to do about it. Raises NotFound, InvalidArgument."""
        return self.operation(ref).why()

    @takes_fields_of(HistoryFilters)
    def history(self, table: str | None = None, limit: int = 100, **filters: Unpack[HistoryKeywords]) -> HistoryPage:
        """The results of ended operations, newest first; see :meth:`distop.aio.Client.history`."""
        return self._loop.run(self._inner.history(table, limit, **filters))

    def nodes(self) -> dict[str, Node]:
        """The live executors, by incarnation."""
        return self._loop.run(self._inner.nodes())

    def drain(self, executor: str, *, wait: bool = False, timeout: float | None = None) -> str:
        """Drain an executor; see :meth:`distop.aio.Client.drain`."""
        return self._loop.run(self._inner.drain(executor, wait=wait, timeout=timeout))

    def undrain(self, executor: str) -> None:
        """Undo the drain of an executor. Idempotent. Raises NotFound."""
        self._loop.run(self._inner.undrain(executor))

    def behaviors(self) -> list[Declaration]:
        """The operation types that executors have published."""
        return self._loop.run(self._inner.behaviors())

    @takes_fields_of(TypeOptions)
    def register_type(
        self,
        type_name: str,
        arg_schema: Mapping[str, Any] | None = None,
        *,
        replace: bool = False,
        **options: Unpack[TypeKeywords],
    ) -> Declaration:
        """Declare a type without code; see :meth:`distop.aio.Client.register_type`."""
        return self._loop.run(self._inner.register_type(type_name, arg_schema, replace=replace, **options))

    def own_jobs(
        self,
        actor: str,
        types: Iterable[str] | Mapping[str, int | None],
        max: int = 1,  # noqa: A002  # the name in the requirements
        duration: float = 60.0,
        *,
        accept: Callable[[OfferedJob], bool] | None = None,
    ) -> list[OwnedJob]:
        """Claim jobs for a custom worker loop; see :meth:`distop.aio.Client.own_jobs`.

        ``accept`` is called in the client's own thread.
        """
        return self._loop.run(self._inner.own_jobs(actor, types, max, duration, accept=accept))

    def extend(self, tokens: Iterable[str], duration: float = 60.0) -> list[bool]:
        """Extend the claims of jobs; see :meth:`distop.aio.Client.extend`."""
        return self._loop.run(self._inner.extend(tokens, duration))

    def return_job(self, token: str, outcome: OwnedOutcome) -> None:
        """Return a job; see :meth:`distop.aio.Client.return_job`.

        Raises InvalidToken, InvalidArgument, OutcomeUnknown.
        """
        self._loop.run(self._inner.return_job(token, outcome))

    def tables(self) -> list[TableRecord]:
        """The registered tables."""
        return self._loop.run(self._inner.tables())

    def add_table(self, record: TableRecord, *, replace: bool = False, check: bool = True) -> TableRecord:
        """Register a table; see :meth:`distop.aio.Client.add_table`."""
        return self._loop.run(self._inner.add_table(record, replace=replace, check=check))

    def actions(self, table: str | None = None) -> list[dict[str, Any]]:
        """As :meth:`distop.client.async_client.Client.actions`."""
        return self._loop.run(self._inner.actions(table))

    def remove_table(self, name: str) -> None:
        """Remove a table from the registry. Raises NotFound, NotAllowed."""
        self._loop.run(self._inner.remove_table(name))

    def set_policy(
        self,
        name: str,
        table: str,
        start: str,
        arg: Mapping[str, Any] | None = None,
        *,
        every: float | str | None = None,
        on: str | Iterable[str] | None = None,
        when: str | None = None,
        priority: int | None = None,
        max_jobs: int | None = None,
        max_jobs_per_executor: int | None = None,
        max_failed: int | str | None = None,
    ) -> PolicyStatus:
        """Make or change a policy; see :meth:`distop.aio.Client.set_policy`."""
        return self._loop.run(
            self._inner.set_policy(
                name,
                table,
                start,
                arg,
                every=every,
                on=on,
                when=when,
                priority=priority,
                max_jobs=max_jobs,
                max_jobs_per_executor=max_jobs_per_executor,
                max_failed=max_failed,
            )
        )

    def autopilot(self, table: str, *, dry_run: bool = False) -> Autopilot:
        """Make the policies with which a table keeps itself; see :meth:`distop.aio.Client.autopilot`."""
        return self._loop.run(self._inner.autopilot(table, dry_run=dry_run))

    def policies(self, table: str | None = None) -> list[PolicyStatus]:
        """The policies of a table, or of all tables, with their last evaluations.

        Raises NotFound for a table that has no policies and is not registered.
        """
        return self._loop.run(self._inner.policies(table))

    def policy(self, table: str, name: str) -> PolicyStatus:
        """A policy with its last evaluations. Raises NotFound."""
        return self._loop.run(self._inner.policy(table, name))

    def pause_policy(self, table: str, name: str) -> PolicyStatus:
        """Pause a policy: nothing is started until it is resumed. Raises NotFound, OutcomeUnknown."""
        return self._loop.run(self._inner.pause_policy(table, name))

    def resume_policy(self, table: str, name: str) -> PolicyStatus:
        """Resume a policy; see :meth:`distop.aio.Client.resume_policy`."""
        return self._loop.run(self._inner.resume_policy(table, name))

    def remove_policy(self, table: str, name: str) -> None:
        """Remove a policy. Operations that it started continue. Raises NotFound, OutcomeUnknown."""
        self._loop.run(self._inner.remove_policy(table, name))

    def emit(self, table: str, name: str, *, event_id: str | None = None) -> list[str]:
        """Emit an event on a table; see :meth:`distop.aio.Client.emit`."""
        return self._loop.run(self._inner.emit(table, name, event_id=event_id))


@takes_fields_of(ConnectionOptions)
def connect(endpoints: str | Iterable[str] | None = None, **options: Unpack[ConnectionKeywords]) -> Client:
    """Connect to etcd: one endpoint or several, ``DISTOP_ETCD`` when left out, else 127.0.0.1:2379.

    Or to a service: ``grpc://host:port``, or ``grpcs://`` with TLS (docs/reference/service.md), with a ``token``.
    Several addresses of services are separated by commas.

    ``client``: an ``etcd3.Etcd3Client`` of the caller's, whose address is taken; it keeps neither passwords nor
    certificate files, so those are given here as well. ``connect_timeout``: seconds, default 10.
    ``shared_dir``: the executors' shared directory, where results are that are too large for etcd.
    Raises InvalidArgument, EtcdUnavailable, PermissionDenied.
    """
    from distop.aio import connect as connecting

    loop = _shared_loop()

    async def work() -> aio.Client:
        return await connecting(endpoints, **options)

    return Client(loop, loop.run(work()))


_connecting = threading.Lock()


@takes_options("start")
def start_operation(type_name: str, table: str, arg: Any = None, **options: Unpack[StartKeywords]) -> Operation:
    """Start an operation with the default client, which is connected on first use (``DISTOP_ETCD``).

    See :meth:`Client.start_operation` for the options and the raised errors.
    """
    global _default
    with _connecting:
        if _default is None or _default._closed:
            _default = connect()
        client = _default
    return client.start_operation(type_name, table, arg, **options)
