"""Starting operations: what is read and checked, and the race for the next instance numbers (I39)."""

from __future__ import annotations

import asyncio
import copy
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from distop.clock import random, time
from distop.errors import (
    DistopError,
    EtcdRejected,
    Incompatible,
    InvalidArgument,
    NotFound,
    OperationStartError,
    OutcomeUnknown,
    UnknownBehavior,
    UnreadableRecord,
)
from distop.protocol import keys as K
from distop.protocol import operation_transitions as t
from distop.protocol import table_registry
from distop.protocol.behavior_declaration import Declaration, shortest
from distop.protocol.frozen import frozen
from distop.protocol.identity import request_digest
from distop.protocol.json_codec import rfc3339
from distop.protocol.plan import whole_plan
from distop.protocol.record_reading import read, word
from distop.protocol.records import CLUSTER_TABLE, History, OperationRef, Spec, TableRecord
from distop.protocol.txn import MAX_OPERATIONS, Get, GetResult, operations
from distop.services.submission.awaited_operations import predecessors, standings
from distop.services.submission.duplicates import Asked, Joined, Undecided, resolve
from distop.services.submission.idempotency import BeingInserted, excluding, find_earlier, is_of, running_refs
from distop.services.submission.option_checks import refuse_unowned
from distop.services.suggested_commands import command
from distop.store.connection_settings import WRITE_LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from distop.protocol.keys import Keys
    from distop.protocol.txn import TxnResult
    from distop.services.submission.start_request import Request
    from distop.store.client import EtcdClient

log = logging.getLogger("distop.client")

READS = 60
"""Keys that are read at once."""
CONTENTION_LIMIT = 60.0
"""Seconds after which a start that always loses the race for the table's counters gives up."""


MADE_FOR = 1.0
"""Seconds for which the spec of a start, which tells the time, is good for another try."""
HEARD_FOR = 0.25
"""Seconds for which the counters, and what a type declares, are good for another try as they were told."""


class Lost(Exception):
    """Another start or finish on the table came first: read again."""


_CUT_OFF = "distop_request_id"


def note_cut_off(error: asyncio.CancelledError, wanted: Request) -> None:
    """Note in a cancellation that a start was under way: it may have been applied, or still be. (No class of its own:
    ``asyncio.timeout`` and task groups of Python 3.11 take none but CancelledError itself for a cancellation.)
    """
    vars(error)[_CUT_OFF] = wanted.request_id


def cut_off(error: asyncio.CancelledError) -> str | None:
    """The request id of the start that was cut off, where :func:`note_cut_off` has noted one."""
    request_id: str | None = vars(error).get(_CUT_OFF)
    return request_id


class NotSent(Lost):
    """It was not in the transaction, for which it was not fit: nothing is lost."""


class Apart(Exception):
    """etcd took none of several starts in one transaction; each may be taken alone."""


def _never() -> bool:
    return False


@frozen
class Started:
    """The operation that a request has started. ``earlier``: an earlier call has, with its request id or its id."""

    ref: OperationRef
    earlier: bool = False


@dataclass(slots=True, eq=False)
class Try:
    """One request in a try to start it, and what became of that: the operation, or why there is none; Lost and Apart
    are for whoever tries to act on. ``withdrawn`` tells whether the caller is gone: then it is not sent any more.
    """

    wanted: Request
    withdrawn: Callable[[], bool] = _never
    verdict: Started | Exception | None = None
    _for: OfType | None = None
    _object: str | None = None
    _spec: tuple[float, Spec, bytes] | None = None

    def again(self) -> Try:
        """The same once more, without a verdict. What was made of the request need not be made again."""
        self.verdict = None
        return self

    async def object_of(self, of_type: OfType) -> str:
        """As :func:`object_found`."""
        self._same(of_type)
        if self._object is None:
            self._object = await object_found(of_type.declaration, self.wanted)
        return self._object

    def spec_of(self, of_type: OfType) -> tuple[Spec, bytes]:
        """As :func:`make_spec`; and its value."""
        self._same(of_type)
        if self._spec is None or time.monotonic() - self._spec[0] > MADE_FOR:
            spec = make_spec(self.wanted, of_type.declaration, of_type.record)
            self._spec = time.monotonic(), spec, spec.encode()
        return self._spec[1:]

    def _same(self, of_type: OfType) -> None:
        former, self._for = self._for, of_type
        if former is None or (former.declaration, former.record) != (of_type.declaration, of_type.record):
            self._object = self._spec = None

    def result(self) -> Started:
        """The operation. Raises why there is none."""
        assert self.verdict is not None
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return self.verdict


async def submit(etcd: EtcdClient, keys: Keys, wanted: Request) -> Started:
    """Start the operation, once for each request id (invariant 14).

    Raises UnknownBehavior, InvalidArgument, NotFound (the table), Incompatible, OutcomeUnknown (call again with the
    same request id), EtcdUnavailable. A cancellation at the moment that counts says so (:func:`cut_off`).
    """
    from tenacity import AsyncRetrying, retry_if_exception_type

    began = time.monotonic()
    try:
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(Lost),
            wait=lambda state: pause(state.attempt_number),
            stop=lambda _: overdue(began),
            reraise=True,
        ):
            with attempt:
                one = Try(wanted)
                await try_to_start(etcd, keys, [one])
                return one.result()
    except Lost:
        raise too_contended(wanted) from None
    raise AssertionError("unreachable")


def pause(tries: int, took: float = 0.0) -> float:
    """Seconds to wait after so many tries in a row that were lost, the last of which ``took`` so long: as long as one
    takes another one may be under way, which would be lost, too.
    """
    return random.uniform(0, min(0.25, max(0.004, took) * 2.0 ** min(tries - 1, 10)))


def overdue(began: float) -> bool:
    """A start that began then (``time.monotonic``) has lost the race for long enough."""
    return time.monotonic() - began > CONTENTION_LIMIT


def too_contended(wanted: Request) -> OperationStartError:
    """It always lost the race."""
    return OperationStartError(
        f"{wanted.type} on {wanted.table} could not be started within {CONTENTION_LIMIT:g} s, because others start "
        "and finish operations on it all the time: try again"
    )


class Heard:
    """What the transaction before told of a type on a table, for the next one: there is no need to read it again, and
    where it is not so any more, that one is refused, and its refusal tells.
    """

    def __init__(self) -> None:
        self._latest: OfType | None = None
        self._at = 0.0

    def latest(self) -> OfType | None:
        """As it was a moment ago."""
        return self._latest if time.monotonic() - self._at < HEARD_FOR else None

    def note(self, latest: OfType | None) -> None:
        self._latest, self._at = latest, time.monotonic()


async def try_to_start(etcd: EtcdClient, keys: Keys, tries: Sequence[Try], heard: Heard | None = None) -> None:
    """Try once to start operations of one type on one table, in one transaction, and tell each its verdict.

    What one is refused for is its own, and the others are started; those that are not fit for this transaction (it is
    full; a twin of theirs is in it) are NotSent. What holds for the type or the table, and what etcd
    answers, is told to all that are without a verdict, each with an exception of its own. ``heard``: by the try before
    this one; it is told what this one hears.
    """
    heard = heard if heard is not None else Heard()
    try:
        await _start(etcd, keys, tries, heard)
    except EtcdRejected as error:
        _share(tries, Apart(error) if len(tries) > 1 else error)
    except Exception as error:
        _share(tries, error)
    _share(tries, NotSent())


def _share(tries: Iterable[Try], error: Exception) -> None:
    """Each gets its own copy but the first: two that are raised at once would write into each other's traceback."""
    given = False
    for one in tries:
        if one.verdict is None:
            one.verdict = _copy(error) if given else error
            given = True


def _copy(error: Exception) -> Exception:
    if not isinstance(error, DistopError):
        return error
    other = copy.copy(error)
    other.__cause__, other.__suppress_context__ = error.__cause__, error.__suppress_context__
    return other


def _open(tries: Iterable[Try]) -> list[Try]:
    return [one for one in tries if one.verdict is None and not one.withdrawn()]


async def _start(etcd: EtcdClient, keys: Keys, tries: Sequence[Try], heard: Heard) -> None:
    table, type_name = tries[0].wanted.table, tries[0].wanted.type
    of_type, found = heard.latest(), None
    heard.note(None)
    if of_type is None:
        found = await _read(etcd, keys, table, type_name)
    before = of_type is not None or (found is not None and found[1].kv is not None)
    if before and (own := [one for one in tries if one.wanted.own_id]):
        await _look_back(etcd, keys, own)
        if not _open(tries):
            return
    if of_type is None:
        assert found is not None
        of_type = await _of_type(etcd, keys, table, type_name, found)
    declaration, counters = of_type.declaration, of_type.counters
    objects = await _objects(of_type, _open(tries))
    asked = await _by_id(etcd, keys, of_type, objects)
    if not asked:
        return
    waiting = await _predecessors(etcd, keys, {one: asked[one].request for one in asked if asked[one].request.waits})
    if any(not one.request.waits for one in asked.values()):
        await _check_conflicts(etcd, keys, tries[0].wanted, declaration, counters.run_ops)
    open_ = {one: objects[one] for one in asked if not one.withdrawn() and one.verdict is None}
    chosen, behind = _choose(declaration, open_, asked)
    if not chosen:
        return
    specs = [_spec(one, asked[one], of_type) for one in chosen]
    new = [
        t.NewOperation(
            OperationRef(table, type_name, objects[one], counters.next_instance + n),
            spec,
            asked[one].request.arg,
            None if asked[one].request.waits or table != CLUSTER_TABLE else whole_plan(),
            waits=asked[one].request.waits,
            after=waiting.get(one, ()),
            options=one.wanted.options,
            value=value,
            named=one.wanted.keyed,
        )
        for n, (one, (spec, value)) in enumerate(zip(chosen, specs, strict=True))
    ]
    new = [
        replace(each, takes=takes) if (takes := asked[one].takes(each.ref)) is not None else each
        for one, each in zip(chosen, new, strict=True)
    ]
    begun = [t.begin_with(keys, one) for one in new]
    new = new[: t.start_together(keys, new, begun)]
    chosen, begun = chosen[: len(new)], begun[: len(new)]
    # Who was refused at once, and chose no request id, has started nothing before.
    looks = declaration.instances == "one" or any(one.wanted.own_id for one in chosen)
    txn = t.starts(keys, counters, new, begun=begun, looks=looks)
    if operations(txn) > MAX_OPERATIONS:
        chosen[0].verdict = _waits_for_too_many(new[0])
        return
    try:
        result = await etcd.commit(txn, deadline=WRITE_LIMIT)
    except OutcomeUnknown as error:
        for one in chosen:
            one.verdict = _unknown(one.wanted, error)
        return
    except asyncio.CancelledError as error:
        note_cut_off(error, tries[0].wanted)
        raise
    heard.note(_told(result, of_type, new))
    instead: Sequence[t.FoundInstead | None] = [None] * len(new)
    if not result.succeeded:
        instead = t.found_instead(result) if looks else await _instead(etcd, keys, result, new)
    for one, each, there in zip(chosen, new, instead, strict=True):
        one.verdict = _judge(one.wanted, each, there)
    for one, first in behind.items():
        if first in chosen:
            _told_by_the_first(one, objects[one], first)


async def _instead(
    etcd: EtcdClient, keys: Keys, refused: TxnResult, new: Sequence[t.NewOperation]
) -> list[t.FoundInstead]:
    """What is there instead of operations whose start was refused, where an earlier copy of it may have won: that is
    over by now (T9).
    """
    if not refused.repeated:
        return [t.FoundInstead(None, None, None)] * len(new)
    gets = t.instead_of(keys, (one.ref for one in new))
    answers = [answer for n in range(0, len(gets), READS) for answer in await etcd.read(*gets[n : n + READS])]
    return t.found_in(answers)


@frozen
class OfType:
    """What starts of one type on one table are built from."""

    declaration: Declaration
    record: TableRecord | None
    counters: t.Counters


async def read_type(etcd: EtcdClient, keys: Keys, table: str, type_name: str) -> OfType:
    """Raises UnknownBehavior, NotFound (the table), InvalidArgument (a type that works on a table, without one)."""
    return await _of_type(etcd, keys, table, type_name, await _read(etcd, keys, table, type_name))


async def _read(etcd: EtcdClient, keys: Keys, table: str, type_name: str) -> Sequence[GetResult]:
    return await etcd.read(
        Get(keys.run_ops(table)),
        Get(keys.next_instance(table, type_name)),
        Get(keys.behavior(type_name)),
        Get(keys.table(table)),
    )


async def _of_type(etcd: EtcdClient, keys: Keys, table: str, type_name: str, found: Sequence[GetResult]) -> OfType:
    run_ops, following, declared, record = found
    declaration = await _declaration(etcd, keys, type_name, declared)
    if record.kv is None and table != CLUSTER_TABLE:
        raise NotFound(
            f"there is no table {table!r}: register it with "
            f"{command('table', 'add', table, '--format', 'parquet', '--location', 'DIR')}"
        )
    if declaration.needs_table and table == CLUSTER_TABLE:
        raise InvalidArgument(f"{type_name} works on a table: name one instead of {CLUSTER_TABLE}")
    record_of_table = read(TableRecord.decode, record.kv) if record.kv is not None else None
    return OfType(declaration, record_of_table, _counters(run_ops, following, _mod(record)))


def _counters(run_ops: GetResult, following: GetResult, table_mod: int | None) -> t.Counters:
    running = table_registry.running(run_ops.kv)
    number = read(word(int), following.kv) if following.kv is not None else 1
    return t.Counters(running, _mod(run_ops), number, _mod(following), table_mod)


def _told(result: TxnResult, of_type: OfType, new: Sequence[t.NewOperation]) -> OfType | None:
    """With the counters as this start left them, or as it found them when it was refused; None: the table's record may
    have changed (whoever writes it writes runOps), and has to be read with them.
    """
    seen, ref = of_type.counters, new[0].ref
    if not result.succeeded:
        run_ops, following = (answer for answer in result.responses[:2] if isinstance(answer, GetResult))
        if ref.table != CLUSTER_TABLE and _mod(run_ops) != seen.run_ops_mod:
            return None
        return replace(of_type, counters=_counters(run_ops, following, seen.table_mod))
    running = sum(not one.waits for one in new)
    counts = {**seen.run_ops, ref.type: seen.run_ops.get(ref.type, 0) + running} if running else seen.run_ops
    mod = result.revision if running else seen.run_ops_mod
    return replace(
        of_type, counters=t.Counters(counts, mod, seen.next_instance + len(new), result.revision, seen.table_mod)
    )


async def _by_id(etcd: EtcdClient, keys: Keys, of_type: OfType, objects: dict[Try, str]) -> dict[Try, Asked]:
    """What is to be started of these. Who joins an operation of the same id that goes on, or is refused for it, is
    told so. Of several with one id the first alone is here: the others have to see it. ``objects``: those that they
    work on, by their arguments.

    The holder of an id was read after the counters. One that was started in between has a number that the counters
    still give away: they are read again, and the holder with them.
    """
    declaration, following = of_type.declaration, of_type.counters.next_instance
    found: dict[Try, Asked] = {}
    first: dict[str, Try] = {}
    answers = await resolve(etcd, keys, declaration, [one.wanted for one in objects])
    for one, answer in zip(list(objects), answers, strict=True):
        if isinstance(answer, Joined):
            one.verdict = Started(answer.ref, earlier=True)
        elif isinstance(answer, Undecided):
            one.verdict = Lost()
        elif isinstance(answer, Exception):
            one.verdict = answer
        elif answer.holder is not None and answer.holder.ref.instance >= following:
            one.verdict = Lost()
        elif not answer.id or first.setdefault(answer.id, one) is one:
            found[one] = answer
            if answer.request.arg != one.wanted.arg:
                try:
                    objects[one] = await object_found(declaration, answer.request)
                except InvalidArgument as error:
                    one.verdict = error
                    del found[one]
    return _without_waits_for_replaced(found)


def _without_waits_for_replaced(asked: Mapping[Try, Asked]) -> dict[Try, Asked]:
    """Without those that wait for an operation that another one of these replaces, or the other way round, whichever
    comes later: it is judged by what the first one has left.
    """
    found: dict[Try, Asked] = {}
    replaced, awaited = set[OperationRef](), set[OperationRef]()
    for one, answer in asked.items():
        holder = answer.holder.ref if answer.replaces and answer.holder is not None else None
        after = {pred.ref for pred in answer.request.after}
        if holder not in awaited and replaced.isdisjoint(after):
            found[one] = answer
            awaited |= after
            if holder is not None:
                replaced.add(holder)
    return found


async def _predecessors(
    etcd: EtcdClient, keys: Keys, wanted: Mapping[Try, Request]
) -> dict[Try, tuple[t.Predecessor, ...]]:
    """What each of these has to wait for."""
    standing = await standings(etcd, keys, (one.ref for request in wanted.values() for one in request.after))
    found: dict[Try, tuple[t.Predecessor, ...]] = {}
    for tried, request in wanted.items():
        try:
            found[tried] = predecessors(request.after, standing)
        except DistopError as error:
            tried.verdict = error
    return found


async def _look_back(etcd: EtcdClient, keys: Keys, own: Sequence[Try]) -> None:
    """Callers that chose their request ids may have made these calls before."""
    try:
        for one, found in zip(own, await find_earlier(etcd, keys, [one.wanted for one in own]), strict=True):
            if isinstance(found, BeingInserted):
                one.verdict = Lost()  # until it is there with its graph, or that is given up
            else:
                one.verdict = Started(found, earlier=True) if isinstance(found, OperationRef) else found
    except DistopError as error:
        _share(own, error)


def _judge(wanted: Request, begun: t.NewOperation, instead: t.FoundInstead | None) -> Started | Exception:
    """``instead``: what was found by a start that was refused."""
    ref = begun.ref
    if instead is None:
        return Started(ref)
    try:
        if _won(instead, wanted, ref):
            return Started(ref)
    except InvalidArgument as error:
        return error
    if begun.spec.one_at_a_time and not begun.waits and instead.current is not None:
        try:
            return _excluded(ref, OperationRef(ref.table, ref.type, ref.object, read(word(int), instead.current)))
        except UnreadableRecord as error:
            return error
    log.debug("start of %s on %s lost the race for instance %d", wanted.type, wanted.table, ref.instance)
    return Lost()


def _waits_for_too_many(new: t.NewOperation) -> InvalidArgument:
    """Where it takes the place of another one; else the edges are written apart (``services.submission.insertion``)."""
    return InvalidArgument(
        f"{new.ref.type} on {new.ref.table} was not started: it would wait for {len(new.after)} operations, more than "
        "one that takes the place of another can: let it wait for a join of them"
    )


def _unknown(wanted: Request, error: OutcomeUnknown) -> OutcomeUnknown:
    unknown = OutcomeUnknown(
        f"whether {wanted.type} on {wanted.table} was started is not known, because etcd stopped answering: call "
        f"again with request_id={wanted.request_id!r} (--request-id), which starts it only if it was not"
    )
    unknown.__cause__ = error
    return unknown


def _spec(one: Try, asked: Asked, of_type: OfType) -> tuple[Spec, bytes]:
    if asked.request is one.wanted and not asked.id:
        return one.spec_of(of_type)
    spec = asked.spec(make_spec(asked.request, of_type.declaration, of_type.record), one.wanted)
    return spec, spec.encode()


async def _objects(of_type: OfType, tries: Sequence[Try]) -> dict[Try, str]:
    """Those whose argument fits, with the objects that they work on."""
    found: dict[Try, str] = {}
    for one in tries:
        try:
            found[one] = await one.object_of(of_type)
        except InvalidArgument as error:
            one.verdict = error
    return found


def _choose(
    declaration: Declaration, objects: Mapping[Try, str], asked: Mapping[Try, Asked]
) -> tuple[list[Try], dict[Try, Try]]:
    """Those that may begin at once, in their order; and those behind one of them that excludes them.

    A second one of a request waits for the first, to be found by its id (invariant 14). Where the type excludes itself,
    or runs one at a time (for each object), the first one goes alone.
    """
    chosen: list[Try] = []
    behind: dict[Try, Try] = {}
    requests: set[str] = set()
    first: dict[str, Try] = {}
    for one, obj in objects.items():
        if one.wanted.request_id in requests:
            continue
        if asked[one].request.waits:
            chosen.append(one)
            requests.add(one.wanted.request_id)
        elif declaration.instances == "one" and obj in first:
            behind[one] = first[obj]
        elif not (first and declaration.type_name in declaration.conflicts_with):
            chosen.append(one)
            first[obj] = one
            requests.add(one.wanted.request_id)
    return chosen, behind


def _told_by_the_first(one: Try, obj: str, first: Try) -> None:
    """What became of the one that excludes it is what it would be told right after it."""
    ref = OperationRef(one.wanted.table, one.wanted.type, obj, 0)
    if isinstance(first.verdict, Started):
        one.verdict = _excluded(ref, first.verdict.ref)
    elif isinstance(first.verdict, Incompatible):
        one.verdict = _copy(first.verdict)


def _excluded(ref: OperationRef, holder: OperationRef) -> Incompatible:
    name = f"{ref.type} on {ref.table}" + (f" for {ref.object}" if ref.object else "")
    return Incompatible(
        f"{name} cannot start while {holder} runs: {ref.type} runs one at a time"
        + (" for each object" if ref.object else "")
    )


def _mod(found: GetResult) -> int:
    return found.kv.mod_revision if found.kv is not None else 0


def _won(instead: t.FoundInstead, wanted: Request, ref: OperationRef) -> bool:
    """An earlier copy of a refused start was applied: its request id stands in the spec, or in the history (T9)."""
    spec, history = instead.spec, instead.history
    try:
        return (spec is not None and is_of(read(Spec.decode, spec), wanted, ref)) or (
            history is not None and is_of(read(History.decode, history), wanted, ref)
        )
    except UnreadableRecord:
        return False  # we wrote nothing that we cannot read


def make_spec(wanted: Request, declaration: Declaration, record: TableRecord | None) -> Spec:
    """What never changes about an operation that is started by this request."""
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
        hold=wanted.hold,
        where=wanted.where,
        series=wanted.series.to_json() if wanted.series is not None else None,
        by=wanted.by,
    )


async def object_found(declaration: Declaration, wanted: Request) -> str:
    """As :func:`object_of`. What takes long does not hold up the event loop: a session's leases are renewed on it."""
    from distop.schemas.argument_schema import QUICK_STEPS, TakesLong

    try:
        return object_of(declaration, wanted, steps=QUICK_STEPS)
    except TakesLong:
        return await asyncio.to_thread(object_of, declaration, wanted)


def object_of(declaration: Declaration, wanted: Request, *, steps: int | None = None) -> str:
    """The object that it works on, or "". ``steps``: at most, of the comparison with the schema.

    Raises InvalidArgument where the argument does not fit, and as ``schema.check_argument``.
    """
    from distop.schemas.argument_schema import MAX_STEPS, check_argument

    if not declaration.code and wanted.table != CLUSTER_TABLE and not wanted.partitions:
        raise InvalidArgument(
            f"{wanted.type} has no code that could list the partitions of {wanted.table}: name them, or start it on "
            f"{CLUSTER_TABLE}, where an operation has one job"
        )
    if not declaration.code and wanted.time_limit is not None:
        raise InvalidArgument(
            f"{wanted.type} has no code that executors run, so its jobs have no time limit: whoever owns a job says "
            "how long (duration)"
        )
    if not declaration.code:
        refuse_unowned(wanted.type, wanted.options, wanted.where)
    arg = check_argument(wanted.type, declaration.arg_schema, wanted.arg, steps=steps or MAX_STEPS)
    if declaration.object_field is None:
        return ""
    value = arg.get(declaration.object_field) if isinstance(arg, dict) else None
    if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
        raise InvalidArgument(
            f"the argument of {wanted.type} needs {declaration.object_field!r}, a text that names what it works on"
        )
    K.encode_object(str(value))
    return str(value)


async def _declaration(etcd: EtcdClient, keys: Keys, type_name: str, found: GetResult) -> Declaration:
    if found.kv is not None:
        return read(Declaration.decode, found.kv)
    listing = await etcd.list(*keys.family(K.BEHAVIOR), keys_only=True)
    published = ", ".join(sorted(kv.key.rpartition(".")[2] for kv in listing.kvs))
    known = f"published: {published}" if published else "none is published yet"
    raise UnknownBehavior(
        f"there is no behavior {type_name!r} ({known}); an executor that has it installed must have been started once"
    )


async def _check_conflicts(
    etcd: EtcdClient, keys: Keys, wanted: Request, declaration: Declaration, running: Mapping[str, int]
) -> None:
    """``conflicts_with``, both ways. The guard on runOps makes what is seen here hold at the start."""
    _, types = await excluding(etcd, keys, wanted.type, running, declaration.conflicts_with)
    if not types:
        return
    holders = [ref for name in types for ref in await running_refs(etcd, keys, wanted.table, name)]
    if not holders:
        raise Lost  # it ended between the two reads
    names = " and ".join(map(str, holders[:3])) + (" and others" if len(holders) > 3 else "")
    run = "runs" if len(holders) == 1 else "run"
    raise Incompatible(
        f"{wanted.type} on {wanted.table} cannot start while {names} {run}: {wanted.type} and "
        f"{' and '.join(types)} exclude each other"
    )
