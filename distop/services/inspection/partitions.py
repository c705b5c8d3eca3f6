"""What an operation was asked, and what became of each of its partitions: all of it as it was at one revision.

What the partitions of an operation are called, for those few whose errors are told before it has ended.
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
"""Partitions up to which they are looked at one by one."""
_PAGE = 500
"""Ordinals whose keys are read at once: an outcome has up to 64 KiB, of which little is kept here."""


@frozen
class Partition:
    """One partition and its job. ``state``: ``success``, ``failed``, ``running`` (somebody has claimed it), ``waiting``
    (to be tried again), ``open`` (nobody has claimed it yet, or it had no end when the operation ended).

    ``name``: "" where it is not known. ``attempt``: the last one, 0 where there was none. ``started`` and ``finished``:
    of the last attempt, in seconds since the epoch by its executor's clock, 0 where that is not known. ``tried``: what
    went wrong in each attempt, the first and the last few.
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
    """An operation in full. ``partitions``: in order of their ordinals; None where they cannot be told: there is no
    plan (``planned`` False), there are more than :data:`MOST`, or it has ended and etcd has compacted its history since
    (``gone``). ``failed`` and ``unfinished`` are then the names that are kept for a rerun.

    ``arg`` is None where it is not kept (``arg_known`` False): so it is of an operation that succeeded and is ``gone``.
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
    """Read an operation in full: one that goes on as it is now, one that has ended as it was right before its history
    record was written, as long as etcd remembers that (its keys are deleted, and are in etcd's own history until it is
    compacted).

    Raises NotFound, UnreadableRecord (of what concerns all of it; a job's record that cannot be read is left out).
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
                continue  # while it was read; it is there to be read anew
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
    told = read(Spec.decode, spec) if spec is not None else None
    return Account(ended, revision, told, value, known, planned is not None, False, partitions)


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
    for first in range(0, plan.count, _PAGE):
        after = min(first + _PAGE, plan.count)
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
    """The names of these ordinals, out of the plan's chunks, a few of which are in memory at once."""
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
    """Add the names of these ordinals to those ``known``, which never change. What is gone meanwhile stays unknown.

    A chunk holds neighbouring ordinals and has up to half a megabyte, so it is looked for rather than all of them read.
    Raises UnreadableRecord.
    """
    for ordinal in sorted(set(wanted) - known.keys()):
        if ordinal in known:
            continue  # it stood in a chunk that was read for another one
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
