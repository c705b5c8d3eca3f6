"""Insertion: the reads and decisions that all starts share.

Immediate and pending starts, graphs, prepared and transactional operations are each an attempt of an Insertion, and
differ in what they commit (``submit``, ``graph_start``, ``two_phase``, ``transactional_start``). Each operation gets
its own verdict. ``submit`` starts operations independently; all others raise the first error.
"""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from distop.clock import time
from distop.errors import DistopError, InvalidArgument, NotFound, UnknownBehavior
from distop.protocol import keys as K
from distop.protocol import operation_transitions as t
from distop.protocol import table_registry
from distop.protocol.behavior_declaration import Declaration, shortest
from distop.protocol.frozen import frozen
from distop.protocol.identity import request_digest
from distop.protocol.json_codec import rfc3339
from distop.protocol.plan import whole_plan
from distop.protocol.record_reading import read, word
from distop.protocol.records import CLUSTER_TABLE, OperationRef, Spec, TableRecord
from distop.protocol.texts import did_you_mean
from distop.protocol.txn import Get, GetResult
from distop.services.nearest_names import unknown_table
from distop.services.submission.awaited_operations import predecessors, standings
from distop.services.submission.contention import Inserting, Lost
from distop.services.submission.duplicates import Joined, ResolvedStart, Undecided, resolve
from distop.services.submission.idempotency import BeingInserted, find_earlier
from distop.services.submission.option_values import refuse_unowned
from distop.services.suggested_commands import command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from distop.protocol.keys import Keys
    from distop.protocol.records import Subject
    from distop.services.submission.awaited_operations import FoundStanding
    from distop.services.submission.option_values import After
    from distop.services.submission.start_request import Request
    from distop.store.client import EtcdClient

SPEC_IS_GOOD_FOR = 1.0
"""Maximum age in seconds of a cached Spec (it embeds its creation time)."""


@frozen
class Started:
    """The operation that a request has started.

    ``earlier``: an earlier call started it, with its request id or its id.
    """

    ref: OperationRef
    earlier: bool = False


@frozen
class OfType:
    """The data from which starts of one type on one table are built."""

    declaration: Declaration
    record: TableRecord | None
    counters: t.Counters


def _started_on(of_type: OfType) -> tuple[Declaration, TableRecord | None, int | None]:
    """What a spec has of the data."""
    return of_type.declaration, of_type.record, of_type.counters.table_mod


def _never() -> bool:
    return False


@dataclass(slots=True, eq=False)
class StartAttempt:
    """One attempt to start a request, and its verdict.

    The verdict is the operation, or why there is none; Lost is retried by the caller. ``withdrawn`` returns whether the
    caller is gone: then the operation is not started.
    """

    wanted: Request
    withdrawn: Callable[[], bool] = _never
    verdict: Started | Exception | None = None
    object: str = ""
    resolved: ResolvedStart | None = None
    """The operation to start, by its id; None: not known yet."""
    outside: tuple[After, ...] = ()
    """Further predecessors: active operations that other operations of its graph joined."""
    after: tuple[t.Predecessor, ...] = ()
    """The predecessors that have not ended."""
    sent: bool = False
    """A transaction that starts it was sent: without a verdict the outcome is unknown."""
    _for: OfType | None = None
    _object: str | None = None
    _spec: tuple[float, Spec, bytes] | None = None

    def again(self) -> StartAttempt:
        """Reset it for another attempt. Its cached object and Spec stay."""
        self.verdict, self.resolved, self.outside, self.after, self.sent = None, None, (), (), False
        return self

    @property
    def open(self) -> bool:
        """Whether it has no verdict yet, and its caller waits for one."""
        return self.verdict is None and not self.withdrawn()

    @property
    def awaited(self) -> tuple[After, ...]:
        """The operations that it must wait for."""
        after = self.resolved.request.after if self.resolved is not None else self.wanted.after
        if not self.outside:
            return after
        known = {one.ref for one in after}
        return (*after, *(one for one in self.outside if one.ref not in known))

    async def object_of(self, of_type: OfType) -> str:
        """The cached result of :func:`object_found`."""
        self._same(of_type)
        if self._object is None:
            self._object = await object_found(of_type.declaration, self.wanted)
        return self._object

    def spec_of(self, of_type: OfType, hold: str = "") -> tuple[Spec, bytes]:
        """Its Spec, and the encoded Spec; cached for a moment."""
        asked = self.resolved
        assert asked is not None
        if hold or asked.request is not self.wanted or asked.id:
            spec = make_spec(asked.request, of_type.declaration, of_type.record, hold, of_type.counters.table_mod or 0)
            spec = asked.spec(spec, self.wanted)
            return spec, spec.encode()
        self._same(of_type)
        if self._spec is None or time.monotonic() - self._spec[0] > SPEC_IS_GOOD_FOR:
            mod = of_type.counters.table_mod or 0
            spec = make_spec(self.wanted, of_type.declaration, of_type.record, "", mod)
            self._spec = time.monotonic(), spec, spec.encode()
        return self._spec[1:]

    def _same(self, of_type: OfType) -> None:
        former, self._for = self._for, of_type
        if former is None or _started_on(former) != _started_on(of_type):
            self._object = self._spec = None

    def result(self) -> Started:
        """The started operation. Raises the error if there is none."""
        assert self.verdict is not None
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return self.verdict


class Insertion:
    """One attempt to start operations.

    ``joins``: a request whose id belongs to an active operation may join that one; otherwise it is refused.
    """

    def __init__(self, etcd: EtcdClient, keys: Keys, tries: Sequence[StartAttempt], *, joins: bool = True) -> None:
        self.etcd = etcd
        self.keys = keys
        self.tries = tries
        self.types: dict[Subject, OfType] = {}
        self.subjects: dict[Subject, list[StartAttempt]] = {}
        self._joins = joins
        self._found: dict[Subject, Sequence[GetResult]] = {}
        for one in tries:
            self.subjects.setdefault((one.wanted.table, one.wanted.type), []).append(one)

    async def look_back(self, cached: OfType | None = None) -> None:
        """Read the counters of each type and table, then find operations that earlier calls have started.

        ``cached``: cached data of the only type and table.
        """
        if cached is not None:
            self.types = dict.fromkeys(self.subjects, cached)
        else:
            self._found = {one: await _read(self.etcd, self.keys, *one) for one in self.subjects}
        for subject, tries in self.subjects.items():
            own = [one for one in tries if one.wanted.own_id]
            # A type that nobody has started on the table has no counter there.
            if own and (subject in self.types or self._found[subject][1].kv is not None):
                await self._find_earlier(own)

    async def check(self) -> None:
        """Check the open requests against the declarations of their types, and against active operations by id.

        Raises UnknownBehavior, NotFound (the table), InvalidArgument (a type that needs a table, without one).
        """
        for subject, tries in self.subjects.items():
            if subject not in self.types and any(one.open for one in tries):
                self.types[subject] = await _of_type(self.etcd, self.keys, *subject, self._found[subject])
        for subject in self.types:
            await self._read_objects(subject)
            await self._read_ids(subject)

    async def read_type(self, subject: Subject) -> None:
        """Read its counters again."""
        found = await _read(self.etcd, self.keys, *subject)
        self.types[subject] = await _of_type(self.etcd, self.keys, *subject, found)

    async def _find_earlier(self, own: Sequence[StartAttempt]) -> None:
        """Find the operations of earlier calls with the same request ids, which their callers chose."""
        try:
            answers = await find_earlier(self.etcd, self.keys, [one.wanted for one in own])
        except DistopError as error:
            share(own, error)
            return
        for one, found in zip(own, answers, strict=True):
            if isinstance(found, BeingInserted):
                one.verdict = Inserting(found.hold)  # wait until the graph is inserted or abandoned
            else:
                one.verdict = Started(found, earlier=True) if isinstance(found, OperationRef) else found

    async def _read_objects(self, subject: Subject) -> None:
        """Find the object of each operation in its argument, which is checked for this."""
        for one in self.subjects[subject]:
            if one.open:
                try:
                    one.object = await one.object_of(self.types[subject])
                except InvalidArgument as error:
                    one.verdict = error

    async def _read_ids(self, subject: Subject) -> None:
        """Decide by id which requests start an operation; the others join an active one, or are refused.

        Of several requests with one id, only the first one is started now: the others must find its operation.
        """
        tries, of_type = [one for one in self.subjects[subject] if one.open], self.types[subject]
        wanted = [one.wanted for one in tries]
        answers = await resolve(self.etcd, self.keys, of_type.declaration, wanted, joins=self._joins)
        ids: set[str] = set()
        for one, answer in zip(tries, answers, strict=True):
            if isinstance(answer, Joined):
                one.verdict = Started(answer.ref, earlier=True)
            elif isinstance(answer, Undecided):
                one.verdict = Lost()
            elif isinstance(answer, Exception):
                one.verdict = answer
            elif _overtaken(answer, of_type):
                one.verdict = Lost()
            elif answer.id not in ids:
                ids |= {answer.id} if answer.id else set()
                one.resolved = answer
                if answer.request.arg != one.wanted.arg:
                    try:
                        one.object = await object_found(of_type.declaration, answer.request)
                    except InvalidArgument as error:
                        one.verdict = error
        _leave_out_waits_for_replaced(tries)

    async def read_predecessors(self) -> Mapping[OperationRef, FoundStanding]:
        """Find the predecessors of each operation."""
        asked = [one for one in self.tries if one.resolved is not None and one.verdict is None]
        standing = await standings(self.etcd, self.keys, (after.ref for one in asked for after in one.awaited))
        for one in asked:
            try:
                one.after = predecessors(one.awaited, standing)
            except DistopError as error:
                one.verdict = error
        return standing

    def operations(
        self, tries: Sequence[StartAttempt], *, hold: str = "", waits: bool = False, apart: Iterable[StartAttempt] = ()
    ) -> list[t.NewOperation]:
        """New operations of one type on one table, with the next instance numbers.

        ``hold``, ``waits``: all of them are pending first, even without a predecessor. ``apart``: the edges of these
        are written in other transactions.
        """
        subject = tries[0].wanted.table, tries[0].wanted.type
        return [
            self._operation(one, OperationRef(*subject, one.object, number), hold, waits, one in apart)
            for number, one in enumerate(tries, self.types[subject].counters.next_instance)
        ]

    def _operation(self, one: StartAttempt, ref: OperationRef, hold: str, waits: bool, apart: bool) -> t.NewOperation:
        assert one.resolved is not None
        spec, value = one.spec_of(self.types[ref.table, ref.type], hold)
        waits = waits or one.resolved.request.waits
        return t.NewOperation(
            *(ref, spec, one.resolved.request.arg),
            None if waits or ref.table != CLUSTER_TABLE else whole_plan(),
            waits=waits,
            after=one.after if not apart else (),
            options=one.wanted.options,
            takes=one.resolved.takes(ref),
            value=value,
            named=one.wanted.keyed,
        )


def share(tries: Iterable[StartAttempt], error: Exception) -> None:
    """Give the error to each request without a verdict: the first one gets the error, the others get copies.

    An exception that is raised by two callers at once would mix their tracebacks.
    """
    given = False
    for one in tries:
        if one.verdict is None:
            one.verdict = copied(error) if given else error
            given = True


def copied(error: Exception) -> Exception:
    """A copy of an error of distop; other errors are returned unchanged."""
    if not isinstance(error, DistopError):
        return error
    other = copy.copy(error)
    other.__cause__, other.__suppress_context__ = error.__cause__, error.__suppress_context__
    return other


def _overtaken(resolved: ResolvedStart, of_type: OfType) -> bool:
    """Whether the holder of its id was started after the counters were read.

    The holder then has an instance number that these counters would assign again.
    """
    return resolved.holder is not None and resolved.holder.ref.instance >= of_type.counters.next_instance


def _leave_out_waits_for_replaced(tries: Iterable[StartAttempt]) -> None:
    """Postpone requests that conflict by a replacement.

    One request may replace an operation that another one waits for. The later one of the two is left out of this
    attempt, and is decided again after the first one.
    """
    replaced, awaited = set[OperationRef](), set[OperationRef]()
    for one in tries:
        if one.resolved is None or one.verdict is not None:
            continue
        holder = one.resolved.holder.ref if one.resolved.replaces and one.resolved.holder is not None else None
        after = {pred.ref for pred in one.resolved.request.after}
        if holder in awaited or not replaced.isdisjoint(after):
            one.resolved = None
            continue
        awaited |= after
        if holder is not None:
            replaced.add(holder)


# ---------------------------------------------------------- types and counters


async def _read(etcd: EtcdClient, keys: Keys, table: str, type_name: str) -> Sequence[GetResult]:
    return await etcd.read(
        Get(keys.run_ops(table)),
        Get(keys.next_instance(table, type_name)),
        Get(keys.behavior(type_name)),
        Get(keys.table(table)),
    )


async def _of_type(etcd: EtcdClient, keys: Keys, table: str, type_name: str, found: Sequence[GetResult]) -> OfType:
    """The declaration, table record and counters of a type on a table, from these reads.

    Raises UnknownBehavior, NotFound (the table), InvalidArgument (a type that needs a table, without one).
    """
    run_ops, following, declared, record = found
    declaration = await _declaration(etcd, keys, type_name, declared)
    if record.kv is None and table != CLUSTER_TABLE:
        raise NotFound(
            f"{await unknown_table(etcd, keys, table)}: register it with "
            f"{command('table', 'add', table, '--format', 'parquet', '--location', 'DIR')}"
        )
    if declaration.needs_table and table == CLUSTER_TABLE:
        raise InvalidArgument(f"{type_name} works on a table: name one instead of {CLUSTER_TABLE}")
    record_of_table = read(TableRecord.decode, record.kv) if record.kv is not None else None
    return OfType(declaration, record_of_table, counters(run_ops, following, mod_of(record)))


def counters(run_ops: GetResult, following: GetResult, table_mod: int | None) -> t.Counters:
    """The counters from these reads."""
    running = table_registry.running(run_ops.kv)
    number = read(word(int), following.kv) if following.kv is not None else 1
    return t.Counters(running, mod_of(run_ops), number, mod_of(following), table_mod)


def mod_of(found: GetResult) -> int:
    """The mod revision; 0: the key is absent."""
    return found.kv.mod_revision if found.kv is not None else 0


async def _declaration(etcd: EtcdClient, keys: Keys, type_name: str, found: GetResult) -> Declaration:
    if found.kv is not None:
        return read(Declaration.decode, found.kv)
    listing = await etcd.list(*keys.family(K.BEHAVIOR), keys_only=True)
    published = sorted(kv.key.rpartition(".")[2] for kv in listing.kvs)
    raise UnknownBehavior(
        f"there is no behavior {type_name!r}{did_you_mean(type_name, published, 'published')}: start an executor on "
        "which it is installed"
    )


# ------------------------------------------------------------------- requests


def make_spec(
    wanted: Request, declaration: Declaration, record: TableRecord | None, hold: str = "", table_mod: int = 0
) -> Spec:
    """The Spec of an operation that this request starts. It never changes.

    ``table_mod``: the mod revision of the table's record.
    """
    rules = declaration.rules()
    if wanted.failure_policy is not None:
        rules = replace(rules, failure_policy=wanted.failure_policy)
    if wanted.retry_attempts is not None:
        rules = replace(rules, retry=replace(rules.retry, attempts=wanted.retry_attempts))
    if wanted.time_limit is not None:
        rules = replace(rules, time_limit=shortest(rules.time_limit, wanted.time_limit))
    return Spec(
        wanted.request_id,
        rfc3339(time.time()),
        wanted.submitter,
        rules,
        record,
        wanted.partitions,
        declaration.instances == "one",
        rerun_of=wanted.rerun_of,
        request_digest=request_digest(wanted.arg, wanted.partitions),
        labels=wanted.labels,
        not_before=wanted.not_before,
        hold=hold,
        where=wanted.where,
        series=wanted.series.to_json() if wanted.series is not None else None,
        table_revision=table_mod if declaration.removes_table else 0,
        by=wanted.by,
        traceparent=wanted.traceparent,
    )


async def object_found(declaration: Declaration, wanted: Request) -> str:
    """The result of :func:`object_of`. A long check runs in a thread, because the event loop renews leases."""
    from distop.schemas.argument_schema import QUICK_STEPS, TakesLong

    try:
        return object_of(declaration, wanted, steps=QUICK_STEPS)
    except TakesLong:
        return await asyncio.to_thread(object_of, declaration, wanted)


def object_of(declaration: Declaration, wanted: Request, *, steps: int | None = None) -> str:
    """The object that the operation works on, or "". ``steps``: maximum steps of the check against the schema.

    Raises InvalidArgument if the argument does not fit, and as ``argument_schema.check_argument`` does.
    """
    from distop.schemas.argument_schema import MAX_STEPS, check_argument

    if not declaration.code and wanted.table != CLUSTER_TABLE and not wanted.partitions:
        raise InvalidArgument(
            f"{wanted.type} has no code to list the partitions of {wanted.table}: name them, or start it on "
            f"{CLUSTER_TABLE}, where an operation has a single job"
        )
    if not declaration.code and wanted.time_limit is not None:
        raise InvalidArgument(
            f"{wanted.type} has no code that executors run, so its jobs have no time limit: the worker that owns a "
            "job sets the duration of its claim (duration)"
        )
    if not declaration.code:
        refuse_unowned(wanted.type, wanted.options, wanted.where)
    arg = check_argument(wanted.type, declaration.arg_schema, wanted.arg, steps=steps or MAX_STEPS)
    if declaration.object_field is None:
        return ""
    value = arg.get(declaration.object_field) if isinstance(arg, dict) else None
    if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
        raise InvalidArgument(
            f"the argument of {wanted.type} needs the field {declaration.object_field!r}, a text that names the "
            "object to work on"
        )
    K.encode_object(str(value))
    return str(value)
