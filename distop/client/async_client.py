"""The asyncio client: starts and finds operations, and changes the table registry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from distop.client.async_operation import Operation, parse_ref
from distop.client.direct_backend import DirectBackend
from distop.errors import NotAllowed
from distop.protocol.keys import Keys
from distop.protocol.operation_labels import labels as check_labels
from distop.runtime import caller_trace
from distop.runtime.keyword_signatures import takes_fields_of
from distop.schemas.argument_schema import encode_argument
from distop.services import policies
from distop.services.claims.types_without_code import TypeOptions
from distop.services.inspection import filters
from distop.services.inspection.history_filters import HistoryFilters
from distop.services.inspection.survey import Filter, open_states
from distop.services.operation_results import Transaction
from distop.services.submission.start_options import StartOptions, takes_options
from distop.storage import storage_options

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from types import TracebackType

    from distop.client.backend import Backend
    from distop.client.graphs import Start, Step
    from distop.protocol.behavior_declaration import Declaration
    from distop.protocol.records import Node, OperationRef, TableRecord
    from distop.protocol.txn import Compare, TxnOperation
    from distop.services.autopilot import Autopilot
    from distop.services.claims import owned_jobs as claims
    from distop.services.claims.owned_jobs import OfferedJob, OwnedJob
    from distop.services.claims.types_without_code import TypeKeywords
    from distop.services.inspection.history_filters import HistoryKeywords
    from distop.services.inspection.history_pages import HistoryPage
    from distop.services.inspection.survey import Count
    from distop.services.inspection.why import Why
    from distop.services.operation_results import OperationStatus
    from distop.services.policies import PolicyStatus
    from distop.services.submission.start_options import PrepareKeywords, RerunKeywords, StartKeywords
    from distop.services.submission.transactional_start import Submission
    from distop.settings import ClientConfig
    from distop.store.client import EtcdClient


class Client:
    """A connection for one event loop. All methods may be called concurrently.

    Besides what each method documents, all raise EtcdUnavailable when etcd cannot be reached for long. ``etcd``: the
    client of the store; by default a new one.
    """

    def __init__(self, config: ClientConfig, etcd: EtcdClient | None = None) -> None:
        from distop.store.client import EtcdClient

        self.config = config
        if config.storage:
            storage_options.configure(config.storage)
        self._backend: Backend
        self._direct: DirectBackend | None = None
        if config.service:
            from distop.client.remote_backend import RemoteBackend
            from distop.client.service_channel import ServiceChannel
            from distop.store import tls_files

            channel = ServiceChannel(config.service, config.token, tls_files.read(config.etcd))
            identified = bool(config.token or config.etcd.cert)
            self._backend = RemoteBackend(channel, config.etcd.connect_timeout, identified=identified)
        else:
            opened = etcd if etcd is not None else EtcdClient(config.etcd)
            self._backend = self._direct = DirectBackend(opened, Keys(config.namespace), config.shared_dir)

    @property
    def etcd(self) -> EtcdClient:
        """The client of the store. Raises NotAllowed if this client is connected to a service."""
        return self._to_etcd.etcd

    @property
    def keys(self) -> Keys:
        """The key schema in this client's namespace. Raises NotAllowed if this client is connected to a service."""
        return self._to_etcd.keys

    @property
    def _to_etcd(self) -> DirectBackend:
        if self._direct is None:
            raise NotAllowed(f"this client is connected to the service {self.config.service}, not to etcd")
        return self._direct

    async def connect(self) -> None:
        """Wait until etcd answers, at most ``connect_timeout`` seconds.

        Raises EtcdUnavailable, InvalidArgument (certificates), PermissionDenied (credentials).
        """
        await self._backend.connect()

    async def close(self) -> None:
        """Close the connection.

        Operations continue; owned jobs that were not returned are free after they expire. Writes that etcd has not
        answered raise OutcomeUnknown, and reads EtcdUnavailable.
        """
        await self._backend.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ------------------------------------------------------------- operations

    def _handle(self, ref: OperationRef, *, already_started: bool = False) -> Operation:
        return Operation(self._backend, ref, already_started=already_started)

    @takes_options("start")
    async def start_operation(
        self, type_name: str, table: str, arg: Any = None, **options: Unpack[StartKeywords]
    ) -> Operation:
        """Start an operation; it is stored durably when this returns.

        Concurrent starts of one type on one table share transactions; each is accepted or refused by itself.

        ``arg``: JSON that fits the behavior's schema, or its pydantic model. ``table``: ``"@cluster"`` for an operation
        without a table, with one job. ``partitions``: names of some partitions (default: all of the table's).
        ``request_id``: a text chosen by the caller. Calling again with the same id returns the operation that the first
        call started, as long as its history is kept; with another argument or other partitions the call is refused.
        ``failure_policy`` and ``retry_attempts`` override the behavior's declaration. ``time_limit``: maximum seconds
        for one attempt of a job, if the behavior or the executor sets no lower limit. ``labels``: texts by which lists
        and the history can be filtered (``protocol.operation_labels`` has the bounds); a repeated call does not change
        them.

        ``not_before`` (a time with its zone) or ``delay`` (seconds): the earliest start. ``after``: the operation
        starts after these operations (names or handles) have succeeded, or, as ``distop.After(op, "end")``, ended. If
        one of them ends otherwise, the operation is cancelled, and so are those that wait for it. It also waits for
        running operations on the table that exclude it. ``every``: the seconds after which it repeats, or a
        ``distop.Every``; each repetition is a new operation, until one is cancelled.

        ``priority`` (-100 to 100, default 0): executors serve higher priorities first; ten seconds of waiting count as
        one. ``max_jobs`` and ``max_jobs_per_executor``: limits of its running jobs, in all and on each executor.
        ``max_failed``: the number (5) or share (``"2%"``) of jobs that may fail before the operation is cancelled; it
        overrides the failure policy. ``where``: only executors with these labels (``{"zone": "a"}``) work on it.
        :meth:`distop.aio.Operation.alter` changes all of these but the last.

        ``id``: an id chosen by the caller, unless the behavior computes one (``id_fields``). Only one operation of the
        type on the table can be active with an id. ``on_duplicate`` decides what happens if there is one: ``"join"``
        returns it, if id and partitions agree; ``"refuse"`` raises Incompatible; ``"replace"`` ends it if it has not
        started; ``"combine"`` starts an operation with the combined argument in its place, or after it if it has
        started. ``one_off``: start without an id.

        Raises UnknownBehavior, InvalidArgument, NotFound (no such table), Incompatible (a running operation excludes
        it); then nothing was changed. OutcomeUnknown: etcd did not answer, or the client was closed; call again with
        the request id in the message.
        """
        chosen = StartOptions.of(options)
        with caller_trace.span("distop.start", **{"distop.type": str(type_name), "distop.table": str(table)}):
            started = await self._backend.start(type_name, table, encode_argument(arg), chosen)
        return self._handle(started.ref, already_started=started.earlier)

    async def start_operations(self, starts: Iterable[Start], *, request_id: str | None = None) -> list[Operation]:
        """Start operations that may depend on each other, all or none (L19).

        They are ``distop.Start``, ``chain``, ``group`` and ``chord``; the result has their order. ``request_id``: as in
        :meth:`start_operation`, for the graph as a whole.

        All of them are pending first, even without a dependency: running operations on a table delay those that they
        exclude, and refuse none. Raises as :meth:`start_operation` does, for the first refused operation;
        InvalidArgument for a cycle, and for more than 100,000 operations.
        """
        started = await self._backend.start_graph(starts, request_id)
        return [self._handle(one.ref, already_started=one.earlier) for one in started]

    async def add_dependencies(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Add dependencies to operations that have not started, all or none (L26).

        They are pairs (after, run), as ``AddDependencies`` has them; ``after`` may be an ``After``.

        Raises NotFound; NotAllowed (``run`` has started); OperationStartError (``after`` ended otherwise, or there are
        too many dependencies to rule out a cycle); InvalidArgument (a cycle).
        """
        await self._backend.add_dependencies(pairs)

    # --------------------------------------------- within transactions, in two phases

    async def submission(self, starts: Step | Iterable[Start], *, request_id: str | None = None) -> Submission:
        """Start operations in the caller's own transaction (C8-C10).

        It may consist of ``distop.protocol.txn`` values, or be one of an ``etcd3`` client. Add the ``compares`` and
        ``puts`` (or ``etcd3(client)``) of the result to it: the operations (``refs``) exist if and only if it commits.
        They are one ``Start``, or a graph that fits into one transaction. Nothing is written here. All of them are
        pending first, as those of :meth:`start_operations` are. An operation with an id takes it with the transaction;
        Incompatible if another one has it, which cannot be joined here.

        Raises as :meth:`start_operations` does; InvalidArgument if they do not fit into one transaction;
        OperationStartError if ``request_id`` has started them before.
        """
        return await self._backend.submission(starts, request_id)

    async def transaction(
        self,
        *,
        compare: Iterable[Compare] = (),
        success: Iterable[TxnOperation] = (),
        failure: Iterable[TxnOperation] = (),
        start: Step | Iterable[Start],
        request_id: str | None = None,
    ) -> Transaction:
        """Commit a transaction of the caller that also starts operations.

        It consists of ``distop.protocol.txn`` values (``value_is``, ``unchanged``, ``Put``, …). If all of ``compare``
        hold, all of ``success`` is applied and the operations start; otherwise ``failure`` is applied. If other starts
        interfere, nothing is applied, and the transaction is retried here.

        Raises as :meth:`submission` does; InvalidArgument for invalid parts, for writes to keys of distop, and for keys
        that are written twice; EtcdRejected if etcd rejects it; OutcomeUnknown: call again with the request id in the
        message. Of all calls with one request id, one branch is applied, once, and the other answers have ``earlier``;
        if ``failure`` only reads, a later call may still be committed.
        """
        done = await self._backend.transaction(compare, success, failure, start, request_id)
        handles = [self._handle(ref, already_started=done.earlier) for ref in done.refs]
        return Transaction(done.committed, handles, done.answers, done.earlier, done.revision)

    @takes_options("prepare")
    async def prepare_operation(
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
        """Prepare an operation, which starts after :meth:`confirm` (C13).

        The sender confirms it when its own transaction, which has this ``external_id``, is completed. Preparing it
        again with the same id returns the same operation; another request is refused.

        If it is not confirmed within ``verify_after`` seconds, ``verify`` is asked whether the transaction was
        completed. It is a function that executors have installed (entry point group ``distop.verifiers``), or a URL
        (``GET``, with the parameters ``external_id`` and ``op``; the answer is ``{"completed": true}`` or false). If
        the answer is no, or none of ``verify_attempts`` gets an answer (``verify_pause`` seconds apart, doubled each
        time), or there is no verifier, the operation ends as cancelled without starting, and its record has an
        ``alarm``.

        ``options``: the other parameters of :meth:`start_operation`, except ``every``. An operation with an id has it
        until it ends; Incompatible if another one has it, which is not joined. Raises as that does; OutcomeUnknown:
        prepare it again.
        """
        chosen, encoded = StartOptions.of(options, "prepare"), encode_argument(arg)
        verification = verify, verify_after, verify_attempts, verify_pause
        started = await self._backend.prepare(type_name, table, encoded, chosen, external_id, *verification)
        return self._handle(started.ref, already_started=started.earlier)

    async def confirm(self, external_id: str) -> Operation:
        """Confirm the operation that was prepared under this id. Idempotent.

        Raises NotFound; NotAllowed, with the reason, if it was given up, abandoned or cancelled; OutcomeUnknown:
        confirm it again.
        """
        return self._handle(await self._backend.confirm(external_id))

    async def prepared_operation(self, external_id: str) -> Operation:
        """The operation that was prepared under this id. Raises NotFound."""
        return self._handle(await self._backend.prepared_operation(external_id), already_started=True)

    @takes_options("rerun")
    async def rerun(
        self, ref: str | OperationRef, *, unfinished: bool | None = None, **options: Unpack[RerunKeywords]
    ) -> Operation:
        """Start an ended operation anew over its failed partitions: see :meth:`distop.aio.Operation.rerun`."""
        return await self.operation(ref).rerun(unfinished=unfinished, **options)

    def operation(self, ref: str | OperationRef) -> Operation:
        """The handle of the operation with this name; nothing is read.

        Raises InvalidArgument for an invalid name.
        """
        return self._handle(parse_ref(ref))

    async def operations(
        self,
        table: str | None = None,
        *,
        type: str | None = None,  # noqa: A002
        states: str | Collection[str] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> list[OperationStatus]:
        """The operations that have not ended, with their status, by name.

        Filtered by table, type, states and labels (all of them). As in all lists, an operation with an unreadable
        record is skipped and logged. Raises InvalidArgument.
        """
        wanted = Filter(filters.table_of(table), filters.type_of(type), open_states(states), check_labels(labels))
        return await self._backend.operations(wanted)

    async def counts(
        self,
        table: str | None = None,
        *,
        type: str | None = None,  # noqa: A002
        states: str | Collection[str] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> tuple[Count, ...]:
        """The number of operations that have not ended, by type and state.

        Also the age of the oldest waiting one. Filtered as :meth:`operations`. The cost grows with the number of open
        operations, never with the history. Raises InvalidArgument.
        """
        wanted = Filter(filters.table_of(table), filters.type_of(type), open_states(states), check_labels(labels))
        return await self._backend.counts(wanted)

    async def why(self, ref: str | OperationRef) -> Why:
        """What an operation waits for: see :meth:`distop.aio.Operation.why`."""
        return await self.operation(ref).why()

    @takes_fields_of(HistoryFilters)
    async def history(
        self, table: str | None = None, limit: int = 100, **filters: Unpack[HistoryKeywords]
    ) -> HistoryPage:
        """The results of ended operations, newest first, one page at a time.

        A page has at most ``limit`` results; its ``after`` is the token of the next page (None: the last page). Memory
        holds only one page, however long the history is.

        ``states``: success, failed, cancelled. ``since`` and ``until``: the finish is at or after the first, and before
        the second; seconds since the epoch, RFC 3339 text, or a ``datetime``, with a zone. ``labels``: all of these.
        ``request_id``: of the start. ``alarms``: only records with an alarm (prepared, never confirmed, never started).
        ``after``: the token of the previous page of the same query. Raises InvalidArgument.
        """
        return await self._backend.history(table, limit, HistoryFilters(**filters))

    async def nodes(self) -> dict[str, Node]:
        """The live executors, by incarnation."""
        return await self._backend.nodes()

    async def drain(self, executor: str, *, wait: bool = False, timeout: float | None = None) -> str:
        """Drain an executor: it releases its jobs and claims nothing until :meth:`undrain`.

        The jobs stop, keep their checkpoints, and do not count as failed. The executor also gives up its elections, and
        stays drained after a restart. Operations that no other executor can run wait. ``wait``: wait until it is empty,
        at most ``timeout`` seconds. Returns its state: ``draining`` or ``drained``.

        Raises NotFound (no such executor), InvalidArgument, WaitTimeout, OutcomeUnknown.
        """
        return await self._backend.drain(executor, wait, timeout)

    async def undrain(self, executor: str) -> None:
        """Undo the drain of an executor. Idempotent. Raises NotFound, OutcomeUnknown."""
        await self._backend.undrain(executor)

    async def behaviors(self) -> list[Declaration]:
        """The operation types that executors have published, by name."""
        return await self._backend.behaviors()

    @takes_fields_of(TypeOptions)
    async def register_type(
        self,
        type_name: str,
        arg_schema: Mapping[str, Any] | None = None,
        *,
        replace: bool = False,
        **options: Unpack[TypeKeywords],
    ) -> Declaration:
        """Declare an operation type without code, whose jobs are for :meth:`own_jobs`.

        Its operations are on ``@cluster``, with one job, or name their partitions; any live executor daemon coordinates
        them.

        ``arg_schema``: a JSON Schema of the argument. The other parameters are those of a behavior
        (docs/how-to/write-a-behavior.md). Registering the same declaration again changes nothing.

        Raises InvalidArgument, NotAllowed (another declaration exists: use ``replace``; one that executors have code
        for is never replaced), OutcomeUnknown.
        """
        declaration = TypeOptions(**options).declaration(type_name, arg_schema)
        await self._backend.register_type(declaration, replace)
        return declaration

    # ------------------------------------------------------------------- jobs

    async def own_jobs(
        self,
        actor: str,
        types: Iterable[str] | Mapping[str, int | None],
        max: int = 1,  # noqa: A002  # the name in the requirements
        duration: float = 60.0,
        *,
        accept: Callable[[OfferedJob], bool] | None = None,
    ) -> list[OwnedJob]:
        """Claim jobs for a custom worker loop (L21).

        Returns up to ``max`` jobs of these types that can be claimed now, perhaps none. A mapping gives the maximum for
        each type. No other claimant takes them for ``duration`` seconds; :meth:`extend` renews that. ``accept`` is
        called with each job before its claim; if it returns False, the job is skipped. ``actor``: a name of the worker,
        for people.

        Jobs whose actor has not extended them in time, or whose executor is lost, are taken over as executors do. This
        client measures that time from when it first sees a claim, so only a long-lived client can take over.

        Raises InvalidArgument; OutcomeUnknown: jobs that may have been claimed are free again after they expire.
        """
        return await self._backend.own_jobs(actor, types, max, duration, accept)

    async def extend(self, tokens: Iterable[str], duration: float = 60.0) -> list[bool]:
        """Extend the claims of jobs by ``duration`` seconds from now (L22).

        Returns for each whether it is still owned. False: another claimant has it, it was returned, its operation is
        being cancelled (stop, and return it), or the token is invalid. An overdue claim that is not taken over is
        extended: the token decides, not the clock.

        Raises InvalidArgument (the duration), EtcdUnavailable, OutcomeUnknown (call again).
        """
        return await self._backend.extend(tokens, duration)

    async def return_job(self, token: str, outcome: claims.OwnedOutcome) -> None:
        """Return a job (L24).

        The outcome is :class:`distop.Complete`, ``Abort`` (a verdict: the job failed), ``Retry`` (the attempt failed:
        retried with back-off, up to the type's limit) or ``Release`` (as if the job had not been claimed). However
        late, it counts unless the job was granted to another claimant (L17). Repeating the call changes nothing.

        Raises InvalidToken: the token is invalid, or the job has ended or has another holder; InvalidArgument (a result
        that is not JSON, or over 64 KiB); then nothing was changed. OutcomeUnknown: return it again.
        """
        await self._backend.return_job(token, outcome)

    async def jobs_version(self) -> int:
        """A number that grows when more jobs may be available."""
        return await self._backend.jobs_version()

    async def jobs_changed(self, version: int, timeout: float) -> None:
        """Wait until more jobs may be available than at this version, or for ``timeout`` seconds."""
        await self._backend.jobs_changed(version, timeout)

    async def actions(self, table: str | None = None) -> list[dict[str, Any]]:
        """The actions on tables and executors, newest first; of one ``table`` only.

        These are registrations, changes and removals of tables, and drains of executors. Actions on an operation are in
        its status and its history record. Each is a mapping (docs/contract.md); the last 20 of each table and executor
        are kept. Raises InvalidArgument.
        """
        return await self._backend.actions(table)

    # ----------------------------------------------------------------- tables

    async def tables(self) -> list[TableRecord]:
        """The registered tables, by name."""
        return await self._backend.tables()

    async def add_table(self, record: TableRecord, *, replace: bool = False, check: bool = True) -> TableRecord:
        """Register a table; the same record again changes nothing.

        ``replace`` replaces another record; running operations that were started with the previous one fail. ``check``
        checks the format, the location and the options.

        Raises InvalidArgument, NotAllowed (another record exists), OutcomeUnknown.
        """
        return await self._backend.add_table(record, replace, check)

    async def remove_table(self, name: str) -> None:
        """Remove a table from the registry; its data and its operations' history stay. Its series end.

        Raises NotFound, NotAllowed (operations run on it), OutcomeUnknown.
        """
        await self._backend.remove_table(name)

    # --------------------------------------------------------------- policies

    async def set_policy(
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
        """Make a policy, or change it: it starts an operation of the type ``start`` whenever it is due.

        Triggers, at least one: ``every``, an interval in seconds or as text (``"1h"``); ``on``, ``"version"`` for new
        versions of the table, ``"event:NAME"`` for :meth:`emit`, or several of these. ``when``: a condition over the
        table's statistics (docs/how-to/let-tables-keep-themselves.md). The other options are those of
        :meth:`start_operation`. A paused policy stays paused.

        Raises InvalidArgument, NotFound (the table), UnknownBehavior, OutcomeUnknown.
        """
        limits = {
            "priority": priority,
            "max_jobs": max_jobs,
            "max_jobs_per_executor": max_jobs_per_executor,
            "max_failed": max_failed,
        }
        made = policies.definition(name, start, arg, every, on, when, limits)
        return (await self._backend.set_policies(table, {name: made}))[0]

    async def autopilot(self, table: str, *, dry_run: bool = False) -> Autopilot:
        """Make the policies with which a table keeps itself, of the published types that fit its format.

        ``dry_run``: only return them. Raises NotFound (the table), OutcomeUnknown.
        """
        return await self._backend.autopilot(table, dry_run)

    async def policies(self, table: str | None = None) -> list[PolicyStatus]:
        """The policies of a table, or of all tables, with their last evaluations.

        Raises NotFound for a table that has no policies and is not registered.
        """
        return await self._backend.policies(table)

    async def policy(self, table: str, name: str) -> PolicyStatus:
        """A policy with its last evaluations: why it did or did not start an operation. Raises NotFound."""
        return await self._backend.policy(table, name)

    async def pause_policy(self, table: str, name: str) -> PolicyStatus:
        """Pause a policy: nothing is started until it is resumed. Raises NotFound, OutcomeUnknown."""
        return await self._backend.pause_policy(table, name)

    async def resume_policy(self, table: str, name: str) -> PolicyStatus:
        """Resume a policy. What was due while it was paused counts once. Raises NotFound, OutcomeUnknown."""
        return await self._backend.resume_policy(table, name)

    async def remove_policy(self, table: str, name: str) -> None:
        """Remove a policy. Operations that it started continue. Raises NotFound, OutcomeUnknown."""
        await self._backend.remove_policy(table, name)

    async def emit(self, table: str, name: str, *, event_id: str | None = None) -> list[str]:
        """Emit an event on a table; returns the names of the policies that it triggers.

        Each of them evaluates the event once; events that wait together count once. Repeated calls with the same
        ``event_id`` are one event. Raises NotFound (the table), InvalidArgument, OutcomeUnknown.
        """
        return await self._backend.emit(table, name, event_id)
