"""Starting several operations that wait for each other: all of them, or none.

As many as one transaction takes are one transaction. More are inserted page by page under a *hold*
(``core.waiting.hold``): none of them begins while it is there, and the last transaction takes it away. A caller that
dies before leaves a hold that does not change any more: daemons deny it after a while, and what it held ends as if it
had been cancelled (``daemon.holding``).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from distop.clock import time, uuid
from distop.core import transitions as t
from distop.core import waiting as w
from distop.core.links import Hold, HoldState
from distop.core.model import OperationRef, Spec
from distop.core.options import DEFAULT
from distop.core.records import read
from distop.core.txn import MAX_OPERATIONS, Delete, Get, GetResult, Put, Txn, absent, value_is
from distop.errors import DistopError, InvalidArgument, OperationStartError
from distop.submission.earlier import find_earlier
from distop.submission.submit import (
    WRITE_LIMIT,
    Lost,
    Started,
    make_spec,
    object_of,
    overdue,
    pause,
    read_type,
    too_contended,
)
from distop.submission.waiting import predecessors, standings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.core.declaration import Declaration
    from distop.core.keys import Keys
    from distop.core.model import TableRecord
    from distop.core.txn import TxnResult
    from distop.store.client import EtcdClient
    from distop.submission.request import Request

MAX_GRAPH = 100_000
"""Operations in one graph."""
HOLD_EVERY = 2.0
"""Seconds after which a caller that inserts a large graph shows that it is still there."""
EDGES_PER_TXN = 62
DENY_LIMIT = 5.0
"""Seconds for which a caller that gives up tries to say so."""

Subject: TypeAlias = tuple[str, str]
"""(table, type)."""
Link: TypeAlias = tuple[int, int, str]
"""Of two operations of a graph, by their places in it: the one that is waited for, the one that waits, and ``on``."""


async def start_graph(etcd: EtcdClient, keys: Keys, wanted: Sequence[Request], links: Sequence[Link]) -> list[Started]:
    """Start these operations, in whose order the answer is. All of them wait, be it for nobody.

    Raises as ``submit.submit`` does, for the first operation that is refused; nothing was started then.
    """
    _check(wanted, links)
    began, tries = time.monotonic(), 0
    while True:
        try:
            return await _Insertion(etcd, keys, wanted, links).run()
        except Lost:
            tries += 1
            if overdue(began):
                raise too_contended(wanted[0]) from None
            await asyncio.sleep(pause(tries))


def _check(wanted: Sequence[Request], links: Sequence[Link]) -> None:
    """Raises InvalidArgument: too many, the same request twice, a cycle."""
    if not wanted:
        raise InvalidArgument("there is no operation to start: the list is empty")
    if len(wanted) > MAX_GRAPH:
        raise InvalidArgument(f"{len(wanted)} operations are more than one graph takes ({MAX_GRAPH})")
    ids: set[str] = set()
    for one in wanted:
        if one.request_id in ids:
            raise InvalidArgument(f"two operations of the graph have the request id {one.request_id!r}")
        ids.add(one.request_id)
    left = [0] * len(wanted)
    after: list[list[int]] = [[] for _ in wanted]
    for pred, succ, _ in links:
        left[succ] += 1
        after[pred].append(succ)
    free = [n for n, count in enumerate(left) if not count]
    done = 0
    while free:
        done += 1
        for succ in after[free.pop()]:
            left[succ] -= 1
            if not left[succ]:
                free.append(succ)
    if done < len(wanted):
        one = wanted[next(n for n, count in enumerate(left) if count)]
        raise InvalidArgument(
            f"the operations of the graph wait for each other in a circle, {one.type} on {one.table} among them"
        )


class _Insertion:
    """One try."""

    def __init__(self, etcd: EtcdClient, keys: Keys, wanted: Sequence[Request], links: Sequence[Link]) -> None:
        self._etcd = etcd
        self._keys = keys
        self._wanted = wanted
        self._links = links
        self._types: dict[Subject, tuple[Declaration, TableRecord | None]] = {}
        self._counters: dict[Subject, t.Counters] = {}
        self._places: dict[Subject, list[int]] = {}
        for n, one in enumerate(wanted):
            self._places.setdefault((one.table, one.type), []).append(n)
        self._objects: list[str] = [""] * len(wanted)
        self._after: list[tuple[t.Predecessor, ...]] = []
        self._refs = [OperationRef(one.table, one.type, "", 0) for one in wanted]
        self._hold, self._value, self._shown = "", b"", 0.0

    async def run(self) -> list[Started]:
        """Raises Lost where it is to be tried again."""
        await self._read()
        if (earlier := await self._earlier()) is not None:
            return earlier
        await self._read_predecessors()
        whole = self._in_one()
        if whole is not None:
            await self._commit_whole(whole)
        else:
            await self._in_pages()
        return [Started(ref) for ref in self._refs]

    # ------------------------------------------------------------------- read

    async def _read(self) -> None:
        """What holds for each type and table, and each operation's argument held against it."""
        for subject, places in self._places.items():
            found = await read_type(self._etcd, self._keys, *subject)
            self._types[subject] = found.declaration, found.record
            self._counters[subject] = found.counters
            for n in places:
                self._objects[n] = object_of(found.declaration, self._wanted[n])

    async def _read_counters(self, subject: Subject) -> None:
        self._counters[subject] = (await read_type(self._etcd, self._keys, *subject)).counters

    async def _earlier(self) -> list[Started] | None:
        """Where the caller chose the request ids: what an earlier call has started. It has started all, or none."""
        if not any(one.own_id for one in self._wanted):
            return None
        found: dict[int, OperationRef] = {}
        for subject, all_places in self._places.items():
            places = [n for n in all_places if self._wanted[n].own_id]
            if not places or self._counters[subject].next_instance == 1:
                continue
            answers = await find_earlier(self._etcd, self._keys, [self._wanted[n] for n in places])
            for n, answer in zip(places, answers, strict=True):
                if isinstance(answer, DistopError):
                    raise answer
                if answer is not None:
                    found[n] = answer
        if not found:
            return None
        if len(found) < len(self._wanted):
            name = self._wanted[next(n for n in range(len(self._wanted)) if n not in found)].request_id
            raise OperationStartError(
                f"an earlier call has started {len(found)} of these {len(self._wanted)} operations, and not {name!r}: "
                "either it inserts them still, or is given up within minutes; or this is another graph: choose new ids"
            )
        return [Started(found[n], earlier=True) for n in range(len(self._wanted))]

    async def _read_predecessors(self) -> None:
        """What is waited for that is not of this graph."""
        waited_for = (one.ref for request in self._wanted for one in request.after)
        standing = await standings(self._etcd, self._keys, waited_for)
        self._after = [predecessors(one.after, standing) for one in self._wanted]

    # ------------------------------------------------------------------ build

    def _operations(self, subject: Subject, places: Sequence[int], hold: str = "") -> list[t.NewOperation]:
        """Those at these places, of one type on one table, with the next numbers; what they wait for inside the graph
        is written apart.
        """
        declaration, record = self._types[subject]
        first = self._counters[subject].next_instance
        return [
            t.NewOperation(
                OperationRef(*subject, self._objects[n], first + number),
                replace(make_spec(self._wanted[n], declaration, record), hold=hold),
                self._wanted[n].arg,
                waits=True,
                after=self._after[n],
                options=self._wanted[n].options,
            )
            for number, n in enumerate(places)
        ]

    def _in_one(self) -> Txn | None:
        """One transaction for all, where etcd takes it."""
        said = sum(one.options != DEFAULT for one in self._wanted)
        if 4 * len(self._wanted) + said + 2 * len(self._links) > MAX_OPERATIONS:
            return None
        parts = []
        for subject, places in self._places.items():
            new = self._operations(subject, places)
            for n, one in zip(places, new, strict=True):
                self._refs[n] = one.ref
            parts.append(t.starts(self._keys, self._counters[subject], new))
        edges = [put for pred, succ, on in self._links for put in w.link(self._keys, *self._ends(pred, succ), on)]
        whole = Txn(
            tuple({compare: None for part in parts for compare in part.compares}),
            (*(op for part in parts for op in part.success), *edges),
            tuple(Get(self._keys.of(ref, "spec")) for ref in self._refs),
            "start_graph",
        )
        size = sum(len(put.value) for put in whole.success if isinstance(put, Put))
        fits = max(map(len, (whole.compares, whole.success, whole.failure))) <= MAX_OPERATIONS
        return whole if fits and size <= t.START_BYTES_PER_TXN else None

    def _ends(self, pred: int, succ: int) -> tuple[OperationRef, OperationRef]:
        return self._refs[pred], self._refs[succ]

    # ----------------------------------------------------------------- commit

    async def _commit_whole(self, txn: Txn) -> None:
        result = await self._etcd.commit(txn, deadline=WRITE_LIMIT)
        if result.succeeded:
            return
        first = result.responses[0]
        spec = read(Spec.decode, first.kv) if isinstance(first, GetResult) and first.kv is not None else None
        if spec is None or spec.request_id != self._wanted[0].request_id:
            raise Lost  # else an earlier copy of this transaction has won (T9)

    async def _in_pages(self) -> None:
        """Insert them under a hold. Where something is refused for good, or the caller gives up, the hold is denied."""
        self._hold = str(uuid.uuid4())
        self._value = Hold("graph", options={"operations": len(self._wanted)}).encode()
        key = self._keys.hold(self._hold)
        await self._etcd.commit(Txn((absent(key),), (Put(key, self._value),), (), "hold"), deadline=WRITE_LIMIT)
        self._shown = time.monotonic()
        try:
            for subject, places in self._places.items():
                await self._insert(subject, places)
            for first in range(0, len(self._links), EDGES_PER_TXN):
                await self._connect(self._links[first : first + EDGES_PER_TXN])
            await self._let_go()
        except BaseException:
            await self._deny()
            raise

    async def _insert(self, subject: Subject, places: Sequence[int]) -> None:
        """The operations of one type on one table, page by page, with the numbers that stand there then."""
        first = 0
        while first < len(places):
            counters = self._counters[subject]
            page = self._operations(subject, places[first : first + t.STARTS_PER_TXN], self._hold)
            page = page[: t.start_together(self._keys, page)]
            result = await self._commit_held(t.starts(self._keys, counters, page))
            if not result.succeeded:
                found = t.found_instead(result)[0].spec
                wanted = self._wanted[places[first]]
                if found is None or read(Spec.decode, found).request_id != wanted.request_id:
                    await self._still_held()
                    await self._read_counters(subject)
                    await self._read_predecessors()
                    continue
            for n, one in zip(places[first:], page, strict=False):
                self._refs[n] = one.ref
            first += len(page)
            if result.succeeded:
                following = counters.next_instance + len(page)
                self._counters[subject] = replace(counters, next_instance=following, next_instance_mod=result.revision)
            else:
                await self._read_counters(subject)

    async def _connect(self, links: Sequence[Link]) -> None:
        """Edges between those that are there. Writing them twice is writing them once."""
        puts = tuple(put for pred, succ, on in links for put in w.link(self._keys, *self._ends(pred, succ), on))
        if not (await self._commit_held(Txn((), puts, (), "edges"))).succeeded:
            await self._still_held()

    async def _commit_held(self, txn: Txn) -> TxnResult:
        """Commit it as long as the hold is there, and show now and then that somebody works at it."""
        key, show = self._keys.hold(self._hold), time.monotonic() - self._shown > HOLD_EVERY
        held = replace(
            txn,
            compares=(value_is(key, self._value), *txn.compares),
            success=(*txn.success, *((Put(key, self._value),) if show else ())),
        )
        result = await self._etcd.commit(held, deadline=WRITE_LIMIT)
        if show and result.succeeded:
            self._shown = time.monotonic()
        return result

    async def _still_held(self) -> None:
        """Raises OperationStartError where the hold was denied meanwhile."""
        kv = await self._etcd.get(self._keys.hold(self._hold))
        if kv is None or kv.value != self._value:
            raise OperationStartError(
                "the graph was given up, because nothing was seen of its caller for a while: start it again"
            )

    async def _let_go(self) -> None:
        """The last transaction: from here on all of them are there."""
        key = self._keys.hold(self._hold)
        txn = Txn((value_is(key, self._value),), (Delete(key),), (Get(key),), "release_hold")
        result = await self._etcd.commit(txn, deadline=WRITE_LIMIT)
        if not result.succeeded and not (result.repeated and await self._etcd.get(key) is None):
            await self._still_held()

    async def _deny(self) -> None:
        """What was inserted shall never begin. Where etcd does not answer, daemons see to it."""
        key = self._keys.hold(self._hold)
        denied = Hold("graph", HoldState.DENIED, "the graph that it was part of was not inserted as a whole")
        with suppress(DistopError):
            await self._etcd.commit(
                Txn((value_is(key, self._value),), (Put(key, denied.encode()),), (), "deny"), deadline=DENY_LIMIT
            )
