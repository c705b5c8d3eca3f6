"""Reads what is stored of a few partitions: names, attempts, errors and results."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop.errors import Compacted, NotFound
from distop.protocol.frozen import frozen
from distop.protocol.jobs import Claim, Outcome
from distop.protocol.json_codec import UNREADABLE
from distop.protocol.keys import job_name
from distop.protocol.plan import Plan
from distop.protocol.record_reading import read
from distop.protocol.txn import Get
from distop.server.page.partition_states import PartitionStage
from distop.services.inspection.partitions import add_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.protocol.jobs import Tried
    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef
    from distop.server.page.partition_states import PartitionStates
    from distop.store.client import EtcdClient

AT_ONCE = 8


@frozen
class PartitionDetails:
    """One partition. ``seconds``: of the last attempt, -1 if unknown. ``rows``: -1 if unknown.

    ``tried``: the errors of the first and the last few attempts. ``losses``: how many of them lost their executor.
    """

    ordinal: int
    name: str
    stage: PartitionStage
    attempt: int = 0
    executor: str = ""
    started: float = 0.0
    seconds: float = -1.0
    rows: int = -1
    error: str = ""
    tried: tuple[Tried, ...] = ()
    losses: int = 0
    result: Any = None

    @property
    def takeover(self) -> bool:
        """Whether an executor was lost while it ran the job."""
        return self.losses > 0


async def read_details(
    etcd: EtcdClient, keys: Keys, ref: OperationRef, states: PartitionStates, ordinals: Sequence[int], revision: int
) -> list[PartitionDetails]:
    """The details of these ordinals at ``revision`` (0: now). Raises NotFound if etcd has compacted them."""
    turn = asyncio.Semaphore(AT_ONCE)

    async def one(ordinal: int) -> PartitionDetails:
        known = _known(states, ordinal)
        async with turn:
            jobs = await etcd.list(*keys.jobs_between(ref, ordinal, ordinal + 1), revision=revision)
            outcome = next((kv for kv in jobs.kvs if job_name(kv.key)[1] == "outcome"), None)
            claim = keys.claim(ref, ordinal)
            held = await etcd.list(claim, f"{claim}\0", revision=revision) if outcome is None else None
        try:
            if outcome is not None:
                return _ended(known, Outcome.decode(outcome.value))
            if held is not None and held.kvs:
                found = Claim.decode(held.kvs[0].value)  # of an open job
                return replace(known, error=found.error, tried=found.tried, losses=found.losses)
        except UNREADABLE:
            return replace(known, error="its record cannot be read")
        return known

    try:
        found = await asyncio.gather(*map(one, ordinals))
        names = await _names(etcd, keys, ref, [one.ordinal for one in found if not one.name], revision)
    except Compacted:
        raise NotFound("etcd has compacted the outcomes of these partitions since the operation ended") from None
    return [one if one.name else replace(one, name=names.get(one.ordinal, "")) for one in found]


async def _names(
    etcd: EtcdClient, keys: Keys, ref: OperationRef, wanted: Sequence[int], revision: int
) -> dict[int, str]:
    """The names of partitions that have not ended; of an ended operation they are not looked for."""
    names: dict[int, str] = {}
    if wanted and not revision:
        (found,) = await etcd.read(Get(keys.of(ref, "plan")))
        if found.kv is not None:
            await add_names(etcd, keys, ref, read(Plan.decode, found.kv), wanted, names)
    return names


def _known(states: PartitionStates, p: int) -> PartitionDetails:
    started, finished = float(states.started[p]), float(states.finished[p])
    former = states.former.get(p)
    return PartitionDetails(
        p,
        "",
        PartitionStage(states.stage[p]),
        int(states.attempt[p]),
        states.executors[states.executor[p]],
        started,
        finished - started if started and finished >= started else -1.0,
        int(states.rows[p]),
        "",
        former.tried if former is not None else (),
        former.losses if former is not None else 0,
    )


def _ended(known: PartitionDetails, outcome: Outcome) -> PartitionDetails:
    return replace(
        known,
        name=outcome.name,
        error=outcome.error,
        tried=outcome.tried or known.tried,
        result=outcome.result,
    )
