"""The asyncio client: start operations, find them, and keep the table registry."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from distop.client.async_operation import Operation, parse_ref
from distop.client.graphs import Start, requests, steps
from distop.clock import time, uuid
from distop.errors import InvalidArgument, NotFound, UnreadableRecord
from distop.protocol.identity import MADE
from distop.protocol.keys import Keys
from distop.protocol.operation_labels import labels as check_labels
from distop.protocol.texts import shown
from distop.schemas.argument_schema import encode_argument
from distop.services import actions, registered, table_registry
from distop.services.claims import owned_jobs as claims
from distop.services.claims import types_without_code as declared
from distop.services.draining import drain, undo
from distop.services.inspection import filters
from distop.services.inspection import history_pages as past
from distop.services.inspection.status import alarms, judge, live_nodes, take
from distop.services.inspection.survey import Filter, counts, open_states, survey
from distop.services.operation_results import Transaction
from distop.services.readable_records import left_out
from distop.services.submission import two_phase
from distop.services.submission.added_dependencies import add_dependencies
from distop.services.submission.graph_start import AFTER_PER_START, IN_GRAPHS, start_graph
from distop.services.submission.option_values import after_one
from distop.services.submission.start_batches import Starts
from distop.services.submission.start_options import StartOptions, takes_options
from distop.services.submission.start_request import acting, derived, request
from distop.services.submission.transactional_start import commit_with, own, submission

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from datetime import datetime
    from types import TracebackType

    from distop.client.graphs import Step
    from distop.protocol.behavior_declaration import Declaration, Retry
    from distop.protocol.records import Node, OperationRef, TableRecord
    from distop.protocol.txn import Compare
    from distop.protocol.txn import Operation as TxnOperation
    from distop.services.claims.job_owner import Owner
    from distop.services.claims.owned_jobs import OfferedJob, OwnedJob
    from distop.services.inspection.history_pages import HistoryPage
    from distop.services.inspection.survey import Count
    from distop.services.inspection.why import Why
    from distop.services.operation_results import OperationStatus
    from distop.services.submission.graph_start import Link
    from distop.services.submission.start_options import PrepareKeywords, RerunKeywords, StartKeywords
    from distop.services.submission.start_request import Request
    from distop.services.submission.transactional_start import Submission
    from distop.settings import ClientConfig
    from distop.store.client import EtcdClient

_AT_ONCE = 8


def _once(starts: Step | Iterable[Start], request_id: str | None, who: str) -> tuple[list[Request], list[Link], str]:
    """What shall be started, and the request id of all together: where the caller chose none, one that it can be
    told. Those that have one of their own keep it.
    """
    if request_id is not None:
        return *requests(steps(starts), request_id, who), request_id
    name = f"{MADE}{uuid.uuid4()}"
    wanted, links = requests(steps(starts), None, who)
    named = [one if one.own_id else replace(one, request_id=f"{name}#{n}") for n, one in enumerate(wanted)]
    return named, links, name


class Client:
    """A connection for one event loop. All methods may be called concurrently.

    Besides what each method documents, all raise EtcdUnavailable when etcd cannot be reached for long.
    """

    def __init__(self, config: ClientConfig) -> None:
        from distop.store.client import EtcdClient

        self.config = config
        self._keys = Keys(config.namespace)
        self._etcd = EtcdClient(config.etcd)
        self._starts = Starts(self._etcd, self._keys)
        self._owner: Owner | None = None

    @property
    def etcd(self) -> EtcdClient:
        """The client of the store."""
        return self._etcd

    @property
    def keys(self) -> Keys:
        """The key schema in this client's namespace."""
        return self._keys

    async def connect(self) -> None:
        """Wait until etcd answers, at most ``connect_timeout`` seconds.

        Raises EtcdUnavailable, InvalidArgument (certificates), PermissionDenied (credentials).
        """
        await self._etcd.connect()

    async def close(self) -> None:
        """Close the connection. Operations go on; jobs that were owned and not returned are free once they expire."""
        if self._owner is not None:
            await self._owner.close()
        await self._etcd.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ------------------------------------------------------------- operations

    def _handle(self, ref: OperationRef, *, already_started: bool = False) -> Operation:
        shared_dir = self.config.shared_dir
        return Operation(self._etcd, self._keys, ref, already_started=already_started, shared_dir=shared_dir)

    @takes_options("start")
    async def start_operation(
        self, type_name: str, table: str, arg: Any = None, **options: Unpack[StartKeywords]
    ) -> Operation:
        """Start an operation; it is stored when this returns, whoever dies then. Several that are started at the same
        time, of one type on one table, share transactions; each is accepted or refused by itself.

        ``arg``: anything JSON that fits the behavior's schema, or its pydantic model. ``partitions``: the names of some
        (default: all of the table's). ``request_id``: a text of the caller's own; calling again with the same one gives
        the operation that the first call started (as long as its history is kept); with another argument or other
        partitions it is refused. ``failure_policy`` and ``retry_attempts`` override what the behavior declares.
        ``time_limit``: seconds for one attempt of a job, where the behavior or the executor allows no less. ``labels``:
        texts by which lists and the history find it (``protocol.operation_labels`` has the bounds); those of the call
        that started it stay. ``table`` may be ``"@cluster"``: no table, one job.

        ``not_before`` (a time with its zone) or ``delay`` (seconds): it begins then. ``after``: it begins once these
        operations (their names or handles) have succeeded, or, as ``distop.After(op, "end")``, ended; where one of them
        ends otherwise it is cancelled, and so is what waits for it. While something that runs on the table excludes it,
        it waits for that too. ``every``: seconds after which it comes again, or a ``distop.Every``: each time as an
        operation of its own, until one is cancelled.

        ``priority`` (-100 to 100, default 0): executors serve the higher first; ten seconds of waiting count as one.
        ``max_jobs``, ``max_jobs_per_executor``: so many of its jobs run at once, in all and on each executor.
        ``max_failed``: so many (5, or ``"2%"``) may fail before it is cancelled for it; it overrides the failure
        policy. ``where``: only executors that have these labels (``{"zone": "a"}``) work for it.
        :meth:`distop.aio.Operation.alter` changes all but the last while it runs.
        Where the behavior computes an id (``id_fields``), or ``id`` gives one of the caller's own, at most one such
        operation of the type on the table goes on at a time. ``on_duplicate``: ``"join"`` gives the one that does
        (which asks for the same, by what makes the id, and by partitions), ``"refuse"`` raises Incompatible,
        ``"replace"`` ends it where it has not begun, in favour of this one, ``"combine"`` starts one in its place with
        the combined argument, which runs after it where it has begun. ``one_off``: it has no id.

        Raises UnknownBehavior, InvalidArgument, NotFound (no such table), Incompatible (another operation that runs
        excludes it); nothing was changed then. OutcomeUnknown: etcd stopped answering; call again with the request id
        that the sentence names.
        """
        chosen = StartOptions.of(options)
        wanted = request(type_name, table, encode_argument(arg), chosen, acting(self._etcd))
        if len(wanted.after) > AFTER_PER_START and wanted.on_duplicate in IN_GRAPHS:
            (started,) = await start_graph(self._etcd, self._keys, [wanted], [], wanted.request_id)
        else:
            started = await self._starts.start(wanted)
        return self._handle(started.ref, already_started=started.earlier)

    async def start_operations(self, starts: Iterable[Start], *, request_id: str | None = None) -> list[Operation]:
        """Start operations that may wait for each other (``distop.Start``, ``chain``, ``group``, ``chord``): all of
        them, or none, however many they are (L19). The answer has their order.

        ``request_id``: as in :meth:`start_operation`, for the graph as a whole. All of them wait first, be it for
        nobody: what runs on a table delays those that it excludes, and refuses none.

        Raises as :meth:`start_operation` does, for the first that is refused; InvalidArgument for a cycle, and for more
        than 100,000.
        """
        wanted, links, name = _once(starts, request_id, acting(self._etcd))
        started = await start_graph(self._etcd, self._keys, wanted, links, name)
        return [self._handle(one.ref, already_started=one.earlier) for one in started]

    async def add_dependencies(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Let operations that have not begun wait for others as well: pairs (after, run), as ``AddDependencies`` has
        them (L26). All, or none. ``after`` may be an ``After``.

        Raises NotFound; NotAllowed (``run`` has begun); OperationStartError (``after`` ended otherwise, or too many are
        waited for already to rule out a cycle); InvalidArgument (a cycle).
        """
        try:
            given = [(after_one(after), after_one(run).ref) for after, run in pairs]
        except (TypeError, ValueError):
            raise InvalidArgument("dependencies are pairs: (the operation to wait for, the one that waits)") from None
        await add_dependencies(self._etcd, self._keys, given)

    # --------------------------------------------- within transactions, in two phases

    async def submission(self, starts: Step | Iterable[Start], *, request_id: str | None = None) -> Submission:
        """Operations to be started by a transaction of the caller's own, of ``distop.protocol.txn`` values or of an
        ``etcd3`` client: its ``compares`` and ``puts`` (or ``etcd3(client)``) are added to that one, and its ``refs``
        exist exactly if it commits (C8-C10). One ``Start``, or a graph of them, that fits one transaction. Nothing is
        written here. They wait first, as those of :meth:`start_operations` do. One with an id takes it with the
        transaction; Incompatible where another one has it, which nothing joins here.

        Raises as :meth:`start_operations` does; InvalidArgument for more than one transaction takes;
        OperationStartError where ``request_id`` has started them before.
        """
        wanted, links, _ = _once(starts, request_id, acting(self._etcd))
        return await submission(self._etcd, self._keys, wanted, links)

    async def transaction(
        self,
        *,
        compare: Iterable[Compare] = (),
        success: Iterable[TxnOperation] = (),
        failure: Iterable[TxnOperation] = (),
        start: Step | Iterable[Start],
        request_id: str | None = None,
    ) -> Transaction:
        """One transaction of the caller's (``distop.protocol.txn``: ``value_is``, ``unchanged``, ``Put``, …) that also
        starts operations: all of ``success`` and the operations, if all of ``compare`` hold; else ``failure`` alone.
        Where others start operations meanwhile, nothing was done, and it is tried again here.

        Raises as :meth:`submission` does; InvalidArgument for what is no part of a transaction, writes distop's own
        keys, or writes a key twice; EtcdRejected for what etcd does not take; OutcomeUnknown: call again with the
        request id that the sentence names. Of all calls with one request id one branch is applied, once, and the
        answer to the others has ``earlier``; where ``failure`` only reads, a later call may still be committed.
        """
        mine = own(self._keys, compare, success, failure)
        wanted, links, name = _once(start, request_id, acting(self._etcd))
        done = await commit_with(self._etcd, self._keys, wanted, links, mine, name)
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
        """Insert an operation that begins once :meth:`confirm` says that the sender's own transaction, which has this
        ``external_id``, was completed (C13). Prepared again under the same id it is the same operation, and another
        request is refused.

        Where it is not confirmed within ``verify_after`` seconds, ``verify`` is asked whether the transaction was
        completed: a function that executors have installed (entry point of the group ``distop.verifiers``), or a URL
        (``GET``, with ``external_id`` and ``op`` as parameters; its answer: ``{"completed": true}`` or false). Where
        the answer is no, or none of ``verify_attempts`` gets one (``verify_pause`` seconds apart, then twice as long
        each time), or there is nobody to ask, the operation ends as cancelled without having begun, and its record has
        an ``alarm``. ``options``: the other parameters of :meth:`start_operation`, but ``every``. One with an id has
        it until it ends; Incompatible where another one has it, which is not joined.

        Raises as that does; OutcomeUnknown: prepare it again.
        """
        known = two_phase.external(external_id)
        chosen = StartOptions.of(options, "prepare")
        wanted = request(type_name, table, encode_argument(arg), chosen, acting(self._etcd))
        wanted = derived(wanted, two_phase.request_id(known))
        terms = two_phase.terms(wanted, verify, verify_after, verify_attempts, verify_pause, known)
        started = await two_phase.prepare(self._etcd, self._keys, wanted, terms)
        return self._handle(started.ref, already_started=started.earlier)

    async def confirm(self, external_id: str) -> Operation:
        """Let the operation begin that was prepared under this id; again changes nothing.

        Raises NotFound; NotAllowed, with the reason, where it was given up, abandoned or cancelled; OutcomeUnknown:
        confirm it again.
        """
        ref = await two_phase.confirm(self._etcd, self._keys, two_phase.external(external_id))
        return self._handle(ref)

    async def prepared_operation(self, external_id: str) -> Operation:
        """The operation that was prepared under this id. Raises NotFound."""
        ref = await two_phase.find(self._etcd, self._keys, two_phase.external(external_id))
        return self._handle(ref, already_started=True)

    @takes_options("rerun")
    async def rerun(
        self, ref: str | OperationRef, *, unfinished: bool | None = None, **options: Unpack[RerunKeywords]
    ) -> Operation:
        """Start an ended operation anew over its failed partitions: see :meth:`distop.aio.Operation.rerun`."""
        return await self.operation(ref).rerun(unfinished=unfinished, **options)

    def operation(self, ref: str | OperationRef) -> Operation:
        """The operation of this name, which is not looked up. Raises InvalidArgument for what is no name of one."""
        return self._handle(parse_ref(ref))

    async def operations(
        self,
        table: str | None = None,
        *,
        type: str | None = None,  # noqa: A002
        states: str | Collection[str] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> list[OperationStatus]:
        """The operations that have not ended, with their status, by name: of one table, of one type, in these states,
        with all of these labels. One with a record that cannot be read is left out, and the log says so; as in all
        lists.

        Raises InvalidArgument.
        """
        wanted = Filter(filters.table_of(table), filters.type_of(type), open_states(states), check_labels(labels))
        active = [one.ref async for one in survey(self._etcd, self._keys, wanted)]
        live, raised = await asyncio.gather(self.nodes(), alarms(self._etcd)) if active else ({}, ())
        gate = asyncio.Semaphore(_AT_ONCE)

        async def one(ref: OperationRef) -> OperationStatus | None:
            async with gate:
                try:
                    return judge(await take(self._etcd, self._keys, ref), live, time.time(), raised)
                except NotFound:
                    return None  # ended and cleaned up meanwhile
                except UnreadableRecord as error:
                    left_out(self._etcd, error)
                    return None

        seen = await asyncio.gather(*map(one, active))
        return [s for s in seen if s is not None and not s.ended]

    async def counts(
        self,
        table: str | None = None,
        *,
        type: str | None = None,  # noqa: A002
        states: str | Collection[str] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> tuple[Count, ...]:
        """How many operations have not ended, by type and state, and how old the oldest is that waits; filtered as
        :meth:`operations`. What it costs grows with what is open, never with the history. Raises InvalidArgument.
        """
        wanted = Filter(filters.table_of(table), filters.type_of(type), open_states(states), check_labels(labels))
        return await counts(self._etcd, self._keys, wanted)

    async def why(self, ref: str | OperationRef) -> Why:
        """What an operation waits for: see :meth:`distop.aio.Operation.why`."""
        return await self.operation(ref).why()

    async def history(
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
        """How operations ended, the newest first: a list of at most ``limit`` results, whose ``after`` is the token of
        the next page (None: there is none). However long the history is, no more of it than that is in memory.

        ``states``: success, failed, cancelled. ``since`` and ``until``: when it finished, from the first on and before
        the second; seconds since the epoch, RFC 3339 text, or a ``datetime``, with a zone. ``labels``: it has all of
        these. ``request_id``: of its start. ``alarms``: those alone whose record has an alarm (prepared, never
        confirmed, never run). ``after``: the token of the page before, asked for in the same way.

        Raises InvalidArgument.
        """
        wanted = past.query(
            self._keys,
            table=table,
            type_name=type,
            op=op,
            states=states,
            since=since,
            until=until,
            labels=labels,
            request_id=request_id,
            limit=limit,
            after=after,
            alarms=alarms,
        )
        return await past.ask(self._etcd, self._keys, wanted)

    async def nodes(self) -> dict[str, Node]:
        """The live executors, by incarnation."""
        return await live_nodes(self._etcd, self._keys)

    async def drain(self, executor: str, *, wait: bool = False, timeout: float | None = None) -> str:
        """Empty an executor: it stops and releases what it runs (nothing is blamed, checkpoints are kept), gives up
        what it coordinates, and claims nothing more, also after a restart, until :meth:`undrain`. Operations that
        nobody else can run wait. ``wait``: until it is empty, at most ``timeout`` seconds. Returns what the executor
        says of itself: ``draining`` or ``drained``.

        Raises NotFound (no such executor), InvalidArgument, WaitTimeout, OutcomeUnknown.
        """
        return str(await drain(self._etcd, self._keys, executor, wait=wait, timeout=timeout))

    async def undrain(self, executor: str) -> None:
        """Let an executor work again; nothing changes when it is not drained. Raises NotFound, OutcomeUnknown."""
        await undo(self._etcd, self._keys, executor)

    async def behaviors(self) -> list[Declaration]:
        """The operation types that executors have published, by name."""
        return await registered.behaviors(self._etcd, self._keys)

    async def register_type(
        self,
        type_name: str,
        arg_schema: Mapping[str, Any] | None = None,
        *,
        result_schema: Mapping[str, Any] | None = None,
        object_field: str | None = None,
        instances: str = "many",
        conflicts_with: Iterable[str] = (),
        can_fail: bool = True,
        retry: Retry | None = None,
        lost: str = "retry",
        failure_policy: str = "fail_fast",
        description: str = "",
        replace: bool = False,
    ) -> Declaration:
        """Declare an operation type of which no executor has code: its jobs are for :meth:`own_jobs`. Operations of it
        are on ``@cluster``, with one job, or name their partitions; any live executor daemon brings them to their end.
        ``arg_schema``: a JSON Schema of the argument. The rest is what a behavior declares
        (docs/how-to/write-a-behavior.md).

        Registering the same again changes nothing. Raises InvalidArgument, NotAllowed (there is another declaration:
        ``replace``; one that executors have code for is never replaced), OutcomeUnknown.
        """
        declaration = declared.declaration(
            type_name,
            arg_schema,
            result_schema,
            object_field,
            instances,
            conflicts_with,
            can_fail,
            retry,
            lost,
            failure_policy,
            description,
        )
        await declared.register(self._etcd, self._keys, declaration, replace=replace)
        return declaration

    # ------------------------------------------------------------------- jobs

    @property
    def _own(self) -> Owner:
        if self._owner is None:
            from distop.services.claims.job_owner import Owner

            self._owner = Owner(self._etcd, self._keys)
        return self._owner

    async def own_jobs(
        self,
        actor: str,
        types: Iterable[str] | Mapping[str, int | None],
        max: int = 1,  # noqa: A002  # the name in the requirements
        duration: float = 60.0,
        *,
        accept: Callable[[OfferedJob], bool] | None = None,
    ) -> list[OwnedJob]:
        """Claim jobs for a worker loop of one's own (L21): up to ``max`` of these types, what can be had now, perhaps
        none. A mapping gives the most of each type. For ``duration`` seconds nobody else takes them; :meth:`extend`
        keeps them for longer. ``accept``: is asked of each before it is claimed; where it says no, the job is left.

        ``actor``: who that is, for people. What an actor has lost (it has not extended its claims in time), and what
        executors have lost, is taken over as executors do: the time is measured by this client, from when it first
        sees a claim, so that it can only be taken by a client that lives on.

        Raises InvalidArgument; OutcomeUnknown: what may have been claimed is free again once it expires.
        """
        return await self._own.own(
            claims.check_actor(actor),
            claims.check_types(types),
            claims.check_count(max, "the most to own"),
            claims.check_duration(duration),
            accept,
        )

    async def extend(self, tokens: Iterable[str], duration: float = 60.0) -> list[bool]:
        """Keep jobs for another ``duration`` seconds from now; for each whether it is still owned (L22). False: another
        one has it, it was returned, its operation is being cancelled (stop then, and return it), or it is no token. A
        claim that is overdue and that nobody has taken is extended: the token decides, not the clock.

        Raises InvalidArgument (the duration), EtcdUnavailable, OutcomeUnknown (call again).
        """
        if isinstance(tokens, str) or not isinstance(tokens, Iterable):
            raise InvalidArgument(f"extend() takes a list of tokens, not {shown(tokens)}")
        return await self._own.extend(tokens, claims.check_duration(duration))

    async def return_job(self, token: str, outcome: claims.Outcome) -> None:
        """Return a job (L24): :class:`distop.Complete`, ``Abort`` (a verdict: it has failed), ``Retry`` (it broke:
        tried again with back-off, up to the type's limit) or ``Release`` (as if it had not been claimed). However late:
        it counts unless somebody else was granted the job meanwhile (L17). The same once more changes nothing.

        Raises InvalidToken: the token is none, or the job is somebody else's, or has ended; InvalidArgument (a result
        that is no JSON, or over 64 KiB); nothing was changed then. OutcomeUnknown: return it again.
        """
        await self._own.give(token, claims.checked(outcome))

    async def jobs_version(self) -> int:
        """A number that grows whenever there may be more to own."""
        await self._own.candidates.ready()
        return self._own.candidates.version

    async def jobs_changed(self, version: int, timeout: float) -> None:
        """Wait until there may be more to own than at this version, at most so many seconds."""
        await self._own.candidates.wait(version, timeout)

    async def actions(self, table: str | None = None) -> list[dict[str, Any]]:
        """Who registered, changed and removed tables, and who drained executors, the newest first; of a ``table`` those
        on it alone. What was done to an operation stands in its status and its history record. Each is a mapping
        (docs/contract.md); of each table and executor the last 20 are kept.

        Raises InvalidArgument.
        """
        return await actions.of_registry(self._etcd, self._keys, table)

    # ----------------------------------------------------------------- tables

    async def tables(self) -> list[TableRecord]:
        """The registered tables, by name."""
        return await registered.tables(self._etcd, self._keys)

    async def add_table(self, record: TableRecord, *, replace: bool = False, check: bool = True) -> TableRecord:
        """Register a table; the same record again changes nothing. ``replace`` changes a record that differs: what
        was started with the former one and goes on fails. ``check`` looks at the format, the location and the options.

        Raises InvalidArgument, NotAllowed (another record is there), OutcomeUnknown.
        """
        return await table_registry.add(self._etcd, self._keys, record, replace=replace, check=check)

    async def remove_table(self, name: str) -> None:
        """Remove a table from the registry; its data and its operations' history stay.

        Raises NotFound, NotAllowed (operations run on it), OutcomeUnknown.
        """
        await table_registry.remove(self._etcd, self._keys, name)
