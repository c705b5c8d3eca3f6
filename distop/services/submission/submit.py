"""Starts independent operations; those of one type and table share a transaction (I39)."""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from distop.clock import time
from distop.errors import EtcdRejected, Incompatible, InvalidArgument, OutcomeUnknown, UnreadableRecord
from distop.protocol import operation_transitions as t
from distop.protocol.record_reading import read, word
from distop.protocol.records import CLUSTER_TABLE, OperationRef
from distop.protocol.table_registry import excludes
from distop.protocol.txn import MAX_OPERATIONS, GetResult, operations
from distop.services.submission.contention import Lost, until_won
from distop.services.submission.idempotency import excluding, running_refs, won
from distop.services.submission.insertion import Insertion, StartAttempt, Started, copied, counters, mod_of, share
from distop.store.connection_settings import WRITE_LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from distop.protocol.behavior_declaration import Declaration
    from distop.protocol.keys import Keys
    from distop.protocol.txn import Txn, TxnResult
    from distop.services.submission.duplicates import ResolvedStart
    from distop.services.submission.insertion import OfType
    from distop.services.submission.start_request import Request
    from distop.store.client import EtcdClient

log = logging.getLogger("distop.client")

READS = 60
"""Number of keys that are read at once."""
CACHED_FOR = 0.25
"""Maximum age in seconds of the counters and the declaration from the previous attempt."""
_CUT_OFF = "distop_request_id"


@contextmanager
def cut_off_noted(one: StartAttempt) -> Iterator[None]:
    """Note in a cancellation that the start was sent: it may have been applied, or may still be.

    The exception has no class of its own: ``asyncio.timeout`` and task groups of Python 3.11 accept only
    CancelledError itself as a cancellation.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        if one.sent:
            vars(error)[_CUT_OFF] = one.wanted.request_id
        raise


def cut_off(error: asyncio.CancelledError) -> str | None:
    """The request id of the cancelled start, if :func:`cut_off_noted` has noted it."""
    request_id: str | None = vars(error).get(_CUT_OFF)
    return request_id


class NotSent(Lost):
    """The operation did not fit into the transaction: it was not tried."""


class Apart(Exception):
    """The start has to be sent alone: etcd rejected a transaction of several, or does not answer."""


async def submit(etcd: EtcdClient, keys: Keys, wanted: Request) -> Started:
    """Start the operation, once for each request id (invariant 14).

    Raises UnknownBehavior, InvalidArgument, NotFound (the table), Incompatible, OutcomeUnknown (call again with the
    same request id), EtcdUnavailable. A cancellation after the start was sent names its request id (:func:`cut_off`).
    """

    async def attempt() -> Started:
        one = StartAttempt(wanted)
        with cut_off_noted(one):
            await try_to_start(etcd, keys, [one])
        return one.result()

    return await until_won(etcd, keys, wanted, attempt)


class CountersCache:
    """A cache of the declaration, table record and counters that the previous transaction found.

    The next transaction need not read them again. If they are stale, it is refused, and the refusal returns the current
    ones.
    """

    def __init__(self) -> None:
        self._latest: OfType | None = None
        self._at = 0.0

    def latest(self) -> OfType | None:
        """The data of the latest attempt; None if it is too old."""
        return self._latest if time.monotonic() - self._at < CACHED_FOR else None

    def note(self, latest: OfType | None) -> None:
        self._latest, self._at = latest, time.monotonic()


async def try_to_start(
    etcd: EtcdClient, keys: Keys, tries: Sequence[StartAttempt], cache: CountersCache | None = None
) -> None:
    """Try once to start operations of one type on one table in one transaction, and set the verdict of each.

    An error of one operation does not affect the others. Operations that do not fit into this transaction (it is full,
    or contains the same request) are NotSent. Errors of the type, the table or etcd are the verdict of all that have
    none yet, each with its own exception. ``cache``: the cache of the previous try, which this one updates.
    """
    cache = cache if cache is not None else CountersCache()
    try:
        await _start(etcd, keys, tries, cache)
    except EtcdRejected as error:
        share(tries, Apart(error) if len(tries) > 1 else error)
    except Exception as error:
        share(tries, error)
    share(tries, NotSent())


async def _start(etcd: EtcdClient, keys: Keys, tries: Sequence[StartAttempt], cache: CountersCache) -> None:
    insertion = Insertion(etcd, keys, tries)
    latest = cache.latest()
    cache.note(None)
    await insertion.look_back(latest)
    await insertion.check()
    if not _asked(tries):
        return
    await insertion.read_predecessors()
    ((table, type_name),) = insertion.subjects
    of_type = insertion.types[table, type_name]
    if at_once := [one for one, answer in _asked(tries).items() if not answer.request.waits]:
        try:
            await _check_conflicts(etcd, keys, table, type_name, of_type)
        except (Incompatible, UnreadableRecord) as error:
            share(at_once, error)
    chosen, behind = _choose(of_type.declaration, _asked(tries))
    if not chosen:
        return
    new = insertion.operations(chosen)
    begun = [t.begin_with(keys, one) for one in new]
    new = new[: t.fitting_starts(keys, new, begun)]
    chosen, begun = chosen[: len(new)], begun[: len(new)]
    # A request without a caller's request id that is refused at once has started nothing before.
    looks = of_type.declaration.instances == "one" or any(one.wanted.own_id for one in chosen)
    txn = t.starts(keys, of_type.counters, new, begun=begun, looks=looks)
    if operations(txn) > MAX_OPERATIONS:
        chosen[0].verdict = _too_many_predecessors(new[0])
        return
    if (result := await _commit(etcd, txn, chosen)) is None:
        return
    cache.note(_refreshed(result, of_type, new))
    instead: Sequence[t.FoundInstead | None] = [None] * len(new)
    if not result.succeeded:
        instead = t.found_instead(result) if looks else await _instead(etcd, keys, result, new)
    for one, each, there in zip(chosen, new, instead, strict=True):
        one.verdict = _judge(one.wanted, each, there)
    for one, first in behind.items():
        if first in chosen:
            _verdict_from_first(one, first)


async def _commit(etcd: EtcdClient, txn: Txn, chosen: Sequence[StartAttempt]) -> TxnResult | None:
    """Send the transaction that starts these. Returns None if the outcome is unknown, which is the verdict of each."""
    for one in chosen:
        one.sent = True
    try:
        return await etcd.commit(txn, deadline=WRITE_LIMIT)
    except OutcomeUnknown as error:
        for one in chosen:
            one.verdict = _unknown(one.wanted, error)
        return None


def _asked(tries: Iterable[StartAttempt]) -> dict[StartAttempt, ResolvedStart]:
    """The operations to start."""
    return {one: one.resolved for one in tries if one.resolved is not None and one.open}


async def _instead(
    etcd: EtcdClient, keys: Keys, refused: TxnResult, new: Sequence[t.NewOperation]
) -> list[t.FoundInstead]:
    """What exists at the keys of operations whose start was refused.

    It is read only if an earlier copy may have been applied; by now that copy is applied or dead (T9).
    """
    if not refused.repeated:
        return [t.FoundInstead(None, None, None)] * len(new)
    gets = t.conflict_reads(keys, (one.ref for one in new))
    answers = [answer for n in range(0, len(gets), READS) for answer in await etcd.read(*gets[n : n + READS])]
    return t.conflicts_in(answers)


def _refreshed(result: TxnResult, of_type: OfType, new: Sequence[t.NewOperation]) -> OfType | None:
    """The data for the next try: with the counters that this start wrote, or that its refusal returned.

    None: runOps has changed. Every write of the table's record also writes runOps, so both must be read again.
    """
    seen, ref = of_type.counters, new[0].ref
    if not result.succeeded:
        run_ops, following = (answer for answer in result.responses[:2] if isinstance(answer, GetResult))
        if ref.table != CLUSTER_TABLE and mod_of(run_ops) != seen.run_ops_mod:
            return None
        return replace(of_type, counters=counters(run_ops, following, seen.table_mod))
    running = sum(not one.waits for one in new)
    counts = {**seen.run_ops, ref.type: seen.run_ops.get(ref.type, 0) + running} if running else seen.run_ops
    mod = result.revision if running else seen.run_ops_mod
    return replace(
        of_type, counters=t.Counters(counts, mod, seen.next_instance + len(new), result.revision, seen.table_mod)
    )


def _judge(wanted: Request, begun: t.NewOperation, instead: t.FoundInstead | None) -> Started | Exception:
    """The verdict of a start. ``instead``: what a refused start found at its keys; None: it was applied."""
    ref = begun.ref
    if instead is None:
        return Started(ref)
    try:
        if won(instead.spec, instead.history, wanted, ref):
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


def _too_many_predecessors(new: t.NewOperation) -> InvalidArgument:
    """The error of a replacing operation with too many predecessors.

    Others write such edges separately (``services.submission.insertion``).
    """
    return InvalidArgument(
        f"{new.ref.type} on {new.ref.table} was not started: it would wait for {len(new.after)} operations, which is "
        "too many for an operation that replaces another: let it wait for a join of them"
    )


def _unknown(wanted: Request, error: OutcomeUnknown) -> OutcomeUnknown:
    unknown = OutcomeUnknown(
        f"cannot tell whether {wanted.type} on {wanted.table} was started, because etcd did not answer: call again "
        f"with request_id={wanted.request_id!r} (--request-id), which starts it at most once"
    )
    unknown.__cause__ = error
    return unknown


def _choose(
    declaration: Declaration, asked: Mapping[StartAttempt, ResolvedStart]
) -> tuple[list[StartAttempt], dict[StartAttempt, StartAttempt]]:
    """The operations that may start together, in order; and the excluded ones, each with the one that excludes it.

    A second copy of a request waits until it can find the first one by its request id (invariant 14). If the type
    excludes itself, or runs one at a time for each object, only the first operation starts.
    """
    chosen: list[StartAttempt] = []
    behind: dict[StartAttempt, StartAttempt] = {}
    requests: set[str] = set()
    first: dict[str, StartAttempt] = {}
    for one, answer in asked.items():
        if one.wanted.request_id in requests:
            continue
        if answer.request.waits:
            chosen.append(one)
            requests.add(one.wanted.request_id)
        elif declaration.instances == "one" and one.object in first:
            behind[one] = first[one.object]
        elif not (first and excludes(declaration.conflicts_with, declaration.type_name)):
            chosen.append(one)
            first[one.object] = one
            requests.add(one.wanted.request_id)
    return chosen, behind


def _verdict_from_first(one: StartAttempt, first: StartAttempt) -> None:
    """Derive the verdict from that of the excluding operation, without another transaction."""
    ref = OperationRef(one.wanted.table, one.wanted.type, one.object, 0)
    if isinstance(first.verdict, Started):
        one.verdict = _excluded(ref, first.verdict.ref)
    elif isinstance(first.verdict, Incompatible):
        one.verdict = copied(first.verdict)


def _excluded(ref: OperationRef, holder: OperationRef) -> Incompatible:
    name = f"{ref.type} on {ref.table}" + (f" for {ref.object}" if ref.object else "")
    return Incompatible(
        f"{name} cannot start while {holder} runs: {ref.type} runs one at a time"
        + (" for each object" if ref.object else "")
    )


async def _check_conflicts(etcd: EtcdClient, keys: Keys, table: str, type_name: str, of_type: OfType) -> None:
    """Raise Incompatible if a running operation and this type exclude each other (``conflicts_with`` of either).

    Raises UnreadableRecord if the declaration of a running type cannot be read. The start compares runOps, so the check
    still holds when it is applied.
    """
    running, declared = of_type.counters.run_ops, of_type.declaration.conflicts_with
    _, types = await excluding(etcd, keys, type_name, running, declared)
    if not types:
        return
    holders = [ref for name in types for ref in await running_refs(etcd, keys, table, name)]
    if not holders:
        raise Lost  # it ended between the two reads
    names = " and ".join(map(str, holders[:3])) + (" and others" if len(holders) > 3 else "")
    run = "runs" if len(holders) == 1 else "run"
    others = " and ".join(name for name in types if name != type_name)
    why = [f"{type_name} and {others} exclude each other"] if others else []
    why += [f"operations of type {type_name} exclude each other"] if type_name in types else []
    raise Incompatible(f"{type_name} on {table} cannot start while {names} {run}: {'; '.join(why)}")
