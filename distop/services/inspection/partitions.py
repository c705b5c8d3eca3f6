"""Reads an operation in full at one revision: its spec, its argument, and the state of each partition.

Finds the names of a few partitions in a plan, for errors that are shown before the operation has ended.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop.errors import Compacted, no_operation
from distop.protocol import rerun_record
from distop.protocol.frozen import frozen
from distop.protocol.jobs import Claim, JobState, Outcome
from distop.protocol.json_codec import loads, parse_time
from distop.protocol.keys import claim_ordinal, job_name
from distop.protocol.plan import CHUNK_PAGE, Plan, decode_chunk
from distop.protocol.record_reading import read
from distop.protocol.records import Spec
from distop.protocol.txn import Get
from distop.services.readable_records import readable

if TYPE_CHECKING:
    from collections.abc import Collection

    from distop.protocol.jobs import Tried
    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef
    from distop.protocol.txn import KeyValue
    from distop.store.client import EtcdClient


MOST = 100_000
"""Maximum number of partitions that are read individually."""
PAGE = 500
"""Ordinals whose keys one read returns: an outcome has up to 64 KiB; little of it stays in memory."""


@frozen
class Partition:
    """One partition and its job.

    ``state``: ``success``, ``failed``, ``running`` (claimed), ``waiting`` (for a retry), ``open`` (not claimed yet, or
    not ended when the operation ended). ``name``: "" if unknown. ``attempt``: the last one, 0 before the first.
    ``started`` and ``finished``: of the last attempt, in seconds since the epoch by its executor's clock, 0 if unknown.
    ``tried``: the errors of the first and the last few attempts.
    """

    ordinal: int
    name: str
    state: str
    attempt: int = 0
    executor: str = ""
    incarnation: str = ""
    started: float = 0.0
    finished: float = 0.0
    error: str = ""
    tried: tuple[Tried, ...] = ()


@frozen
class Account:
    """An operation with all its partitions.

    ``partitions``: in the order of their ordinals; None if there is no plan (``planned`` False), if there are more than
    :data:`MOST`, or if it has ended and etcd has compacted its keys (``gone``). ``failed`` and ``unfinished`` are then
    the names that are stored for a rerun.

    ``arg`` is None if it is not stored (``arg_known`` False), as for an operation that succeeded and is ``gone``.
    """

    ended: bool
    revision: int
    spec: Spec | None = None
    arg: Any = None
    arg_known: bool = False
    planned: bool = False
    gone: bool = False
    partitions: tuple[Partition, ...] | None = None
    failed: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()


async def look(etcd: EtcdClient, keys: Keys, ref: OperationRef) -> Account:
    """Read an operation with all its partitions.

    An open one is read now. An ended one is read at the revision before its history record: its keys are deleted, but
    etcd keeps them in its own history until it is compacted.

    Raises NotFound, and UnreadableRecord for a record of the whole operation; an unreadable record of a job is skipped.
    """
    while True:
        now, (state, history, *beside) = await etcd.read_at(
            Get(keys.of(ref, "state"), count_only=True), Get(keys.history(ref)), *rerun_record.reads(keys, ref)
        )
        if history.kv is None and not state.count:
            raise no_operation(ref)
        ended = history.kv is not None
        revision = history.kv.mod_revision - 1 if history.kv is not None else now
        try:
            return await _look_at(etcd, keys, ref, revision, ended=ended)
        except Compacted:
            if not ended:
                continue  # compacted during the read: read the current keys
        rest = rerun_record.decode(beside)
        if rest is None:
            return Account(True, revision, gone=True)
        arg, known = _argument(rest.arg)
        return Account(True, revision, rest.spec, arg, known, False, True, None, rest.failed, rest.unfinished)


async def _look_at(etcd: EtcdClient, keys: Keys, ref: OperationRef, revision: int, *, ended: bool) -> Account:
    async def one(key: str) -> KeyValue | None:
        found = (await etcd.list(key, key + "\0", revision=revision)).kvs
        return found[0] if found else None

    spec, arg, plan = [await one(keys.of(ref, name)) for name in ("spec", "arg", "plan")]
    value, known = _argument(arg.value) if arg is not None else (None, False)
    planned = read(Plan.decode, plan) if plan is not None else None
    partitions = None
    if planned is not None and planned.count <= MOST:
        partitions = await _partitions(etcd, keys, ref, planned, revision)
    known_spec = read(Spec.decode, spec) if spec is not None else None
    return Account(ended, revision, known_spec, value, known, planned is not None, False, partitions)


def _argument(value: bytes) -> tuple[Any, bool]:
    try:
        return loads(value), True
    except (ValueError, RecursionError):
        return None, False


async def _partitions(
    etcd: EtcdClient, keys: Keys, ref: OperationRef, plan: Plan, revision: int
) -> tuple[Partition, ...]:
    found: dict[int, Partition] = {}
    claims = await etcd.list(*keys.claims_range(ref), revision=revision)
    for kv, claim in readable(etcd, Claim.decode, claims.kvs):
        found[claim_ordinal(kv.key)] = _claimed(claim_ordinal(kv.key), claim)
    for first in range(0, plan.count, PAGE):
        after = min(first + PAGE, plan.count)
        listing = await etcd.list(*keys.jobs_between(ref, first, after), revision=revision)
        _add_ended(etcd, listing.kvs, found)
    nameless = [p for p in range(plan.count) if p not in found or not found[p].name]
    names = await _names(etcd, keys, ref, plan, nameless, revision)
    for p in nameless:
        found[p] = replace(found.get(p) or Partition(p, "", "open"), name=names.get(p, ""))
    return tuple(found[p] for p in range(plan.count))


def _claimed(ordinal: int, claim: Claim) -> Partition:
    return Partition(
        ordinal,
        "",
        "waiting" if claim.waiting else "running",
        claim.attempt,
        claim.executor,
        claim.incarnation,
        error=claim.error,
        tried=claim.tried,
    )


def _add_ended(etcd: EtcdClient, kvs: Collection[KeyValue], found: dict[int, Partition]) -> None:
    for kv in kvs:
        ordinal, name = job_name(kv.key)
        if name == "state":
            well = kv.value == JobState.SUCCESS.encode()
            found[ordinal] = Partition(ordinal, "", str(JobState.SUCCESS if well else JobState.FAILED))
    outcomes = [kv for kv in kvs if job_name(kv.key)[1] == "outcome"]
    for kv, outcome in readable(etcd, Outcome.decode, outcomes):
        ordinal = job_name(kv.key)[0]
        if ordinal in found:
            found[ordinal] = Partition(
                ordinal,
                outcome.name,
                found[ordinal].state,
                outcome.attempt,
                outcome.executor,
                outcome.incarnation,
                parse_time(outcome.started),
                parse_time(outcome.finished),
                outcome.error,
                outcome.tried,
            )


async def _names(
    etcd: EtcdClient, keys: Keys, ref: OperationRef, plan: Plan, wanted: Collection[int], revision: int
) -> dict[int, str]:
    """The names of these ordinals, from the plan's chunks. Only a few chunks are in memory at once."""
    names: dict[int, str] = {}
    missing = set(wanted)
    for first in range(0, plan.chunks, CHUNK_PAGE):
        if not missing:
            break
        after = min(first + CHUNK_PAGE, plan.chunks)
        listing = await etcd.list(keys.chunk(ref, first), keys.chunk(ref, after - 1) + "\0", revision=revision)
        for _, rows in readable(etcd, decode_chunk, listing.kvs):
            names |= {row.partition: row.name for row in rows if row.partition in missing}
        missing -= names.keys()
    return names


async def add_names(
    etcd: EtcdClient, keys: Keys, ref: OperationRef, plan: Plan, wanted: Collection[int], known: dict[int, str]
) -> None:
    """Add the names of the ordinals ``wanted`` to ``known``. Names never change; a deleted chunk adds none.

    A chunk holds neighbouring ordinals and has up to half a megabyte: a binary search finds it, instead of reading all
    chunks. Raises UnreadableRecord.
    """
    for ordinal in sorted(set(wanted) - known.keys()):
        if ordinal in known:
            continue  # a chunk that was read for another ordinal had it
        first, after = 0, plan.chunks
        while first < after:
            middle = min(max(ordinal * plan.chunks // max(plan.count, 1), first), after - 1)
            kv = (await etcd.read(Get(keys.chunk(ref, middle))))[0].kv
            rows = read(decode_chunk, kv) if kv is not None else []
            if not rows:
                return
            if ordinal < rows[0].partition:
                after = middle
            elif ordinal > rows[-1].partition:
                first = middle + 1
            else:
                known |= {row.partition: row.name for row in rows if row.partition in wanted}
                break
