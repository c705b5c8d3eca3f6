"""One try to start operations that wait for each other: what is read, and the transactions that are made of it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from distop.clock import time, uuid
from distop.errors import DistopError, Incompatible, InvalidArgument, NotFound, OperationStartError
from distop.protocol import operation_transitions as t
from distop.protocol import pending_operations as w
from distop.protocol.dependencies import GRAPH, Hold, HoldState
from distop.protocol.frozen import frozen
from distop.protocol.json_codec import word
from distop.protocol.operation_options import DEFAULT
from distop.protocol.record_reading import read
from distop.protocol.records import History, OperationRef, Spec, State
from distop.protocol.txn import MAX_OPERATIONS, Delete, Get, GetResult, Put, Txn, operations, unchanged, value_is
from distop.services.submission.awaited_operations import predecessors, standings
from distop.services.submission.duplicates import Asked, Joined, Undecided, resolve
from distop.services.submission.idempotency import BeingInserted, find_earlier, is_of
from distop.services.submission.start_request import After
from distop.services.submission.submit import Lost, Started, make_spec, object_found, overdue, read_type
from distop.store.connection_settings import WRITE_LIMIT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.protocol.behavior_declaration import Declaration
    from distop.protocol.keys import Keys
    from distop.protocol.records import TableRecord
    from distop.protocol.txn import TxnResult
    from distop.services.submission.start_request import Request
    from distop.store.client import EtcdClient

HOLD_EVERY = 2.0
"""Seconds after which a caller that inserts a large graph shows that it is still there."""
EDGES_PER_TXN = 62
AFTER_PER_START = 30
"""Operations that one waits for, which are not of its graph, that are compared where it is inserted: the edges to more
are written apart, under the hold.
"""
OUTSIDE_PER_TXN = 60
"""Of those, as many as one transaction compares and writes (T1)."""
DENY_LIMIT = 5.0
"""Seconds for which a caller that gives up tries to say so."""

Subject: TypeAlias = tuple[str, str]
"""(table, type)."""
Link: TypeAlias = tuple[int, int, str]
"""Of two operations of a graph, by their places in it: the one that is waited for, the one that waits, and ``on``."""


@frozen
class Whole:
    """Operations that one transaction starts, as it was read. ``earlier``: an earlier call with their request ids has
    started them, and there is nothing to commit.
    """

    refs: tuple[OperationRef, ...]
    txn: Txn
    earlier: bool = False


class Inserting(Exception):
    """An earlier call with the same request ids inserts them, under this hold."""

    def __init__(self, hold: str) -> None:
        super().__init__(hold)
        self.hold = hold


class Insertion:
    """One try."""

    def __init__(
        self, etcd: EtcdClient, keys: Keys, wanted: Sequence[Request], links: Sequence[Link], hold: str = ""
    ) -> None:
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
        self._waits: list[tuple[After, ...]] = []
        """Whom each of them shall wait for that is not of the graph."""
        self._after: list[tuple[t.Predecessor, ...]] = []
        """Those of them that have not ended."""
        self._apart: set[int] = set()
        """The places of those to whom so many of these edges are to be written that it is done apart."""
        self._asked: dict[int, Asked] = {}
        """Those that take an id."""
        self._standing: dict[int, OperationRef] = {}
        """Operations that go on, and have the ids of those at these places: they stand for them."""
        self._outside: dict[int, list[After]] = {}
        """By place, which of them it waits for."""
        self._refs = [OperationRef(one.table, one.type, "", 0) for one in wanted]
        self._hold, self._value, self._shown = hold, b"", 0.0

    async def run(self) -> list[Started]:
        """Raises Lost where it is to be tried again."""
        await self._read()
        if (earlier := await self._earlier(joins=True)) is not None:
            return earlier
        await self._read_ids(joins=True)
        if len(self._standing) == len(self._wanted):
            return [Started(self._refs[n], earlier=True) for n in range(len(self._wanted))]
        await self._read_predecessors()
        whole = self._in_one()
        if whole is not None:
            await self._commit_whole(whole)
        else:
            await self._in_pages()
        return [Started(ref, earlier=n in self._standing) for n, ref in enumerate(self._refs)]

    async def in_one(self) -> Whole:
        """Whoever has the id of one of them already stands for none: what the transaction is told to start exists
        exactly if it commits. Raises InvalidArgument where it is too much for one transaction; Incompatible; Lost where
        it is to be tried again.
        """
        await self._read()
        if (earlier := await self._earlier(joins=False)) is not None:
            return Whole(tuple(one.ref for one in earlier), Txn(), earlier=True)
        await self._read_ids(joins=False)
        await self._read_predecessors()
        whole = self._in_one()
        if whole is None:
            raise InvalidArgument(
                f"{len(self._wanted)} operations are more than one transaction takes (31, 25 with request ids or with "
                "ids, 21 with both, 1 MiB of arguments in all, and some 60 that they wait for): start them by "
                "themselves (start_operations), or several times fewer"
            )
        return Whole(tuple(self._refs), whole)

    # ------------------------------------------------------------------- read

    async def _read(self) -> None:
        """What holds for each type and table, and each operation's argument held against it."""
        for subject, places in self._places.items():
            found = await read_type(self._etcd, self._keys, *subject)
            self._types[subject] = found.declaration, found.record
            self._counters[subject] = found.counters
            for n in places:
                self._objects[n] = await object_found(found.declaration, self._wanted[n])

    async def _read_counters(self, subject: Subject) -> None:
        self._counters[subject] = (await read_type(self._etcd, self._keys, *subject)).counters

    async def _earlier(self, *, joins: bool) -> list[Started] | None:
        """Where the caller chose the request ids: what an earlier call has started. It has started all, or none; but
        (with ``joins``) those for which others stood. Raises Inserting.
        """
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
                if isinstance(answer, BeingInserted):
                    raise Inserting(answer.hold)
                if answer is not None:
                    found[n] = answer
        if not found:
            return None
        if joins:
            found |= await self._standing_still([n for n in range(len(self._wanted)) if n not in found])
        if len(found) < len(self._wanted):
            name = self._wanted[next(n for n in range(len(self._wanted)) if n not in found)].request_id
            raise OperationStartError(
                f"an earlier call has started {len(found)} of these {len(self._wanted)} operations, and not {name!r}: "
                "this is another graph, so choose new ids"
            )
        return [Started(found[n], earlier=True) for n in range(len(self._wanted))]

    async def _standing_still(self, places: Sequence[int]) -> dict[int, OperationRef]:
        """For those at these places, which an earlier call has not started: which go on, and so stood for them then."""
        found: dict[int, OperationRef] = {}
        for subject, own in self._places.items():
            left = [n for n in places if n in set(own)]
            answers = await resolve(self._etcd, self._keys, self._types[subject][0], [self._wanted[n] for n in left])
            for n, answer in zip(left, answers, strict=True):
                if isinstance(answer, Joined):
                    found[n] = answer.ref
        return found

    async def _read_ids(self, *, joins: bool) -> None:
        """Which of them go on already, started by somebody else: these stand for them, and what waits for them in the
        graph waits for these; or (without ``joins``) that is refused. Raises InvalidArgument for two of one id,
        Incompatible, Lost.
        """
        for subject, places in list(self._places.items()):
            wanted = [self._wanted[n] for n in places]
            answers = await resolve(self._etcd, self._keys, self._types[subject][0], wanted, joins=joins)
            seen: dict[str, int] = {}
            for n, answer in zip(places, answers, strict=True):
                if isinstance(answer, Undecided):
                    raise Lost
                if isinstance(answer, Exception):
                    raise answer
                if answer.id and seen.setdefault(answer.id, n) != n:
                    raise InvalidArgument(
                        f"two operations of the graph, both {subject[1]} on {subject[0]}, have the same id: of one id "
                        "one goes on at a time"
                    )
                if isinstance(answer, Joined):
                    self._standing[n] = self._refs[n] = answer.ref
                elif answer.id:
                    self._asked[n] = answer
        self._places = {
            subject: left
            for subject, places in self._places.items()
            if (left := [n for n in places if n not in self._standing])
        }
        inner: list[Link] = []
        for pred, succ, on in self._links:
            if succ in self._standing:
                one = self._wanted[succ]
                raise Incompatible(
                    f"{one.type} on {one.table} would have to wait for others of the graph, and goes on already as "
                    f"{self._standing[succ]}"
                )
            if pred in self._standing:
                self._outside.setdefault(succ, []).append(After(self._standing[pred], on))
            else:
                inner.append((pred, succ, on))
        self._links = inner

    async def _read_predecessors(self) -> None:
        """What is waited for that is not of this graph. Raises Lost where an operation that stood for one of the graph
        has ended since: its id is free, or another one has it.
        """
        waits = [
            (*one.after, *(after for after in self._outside.get(n, ()) if after.ref not in {a.ref for a in one.after}))
            if n in self._outside
            else one.after
            for n, one in enumerate(self._wanted)
        ]
        standing = await standings(self._etcd, self._keys, (one.ref for after in waits for one in after))
        for seen in (standing.get(ref) for ref in self._standing.values()):
            if isinstance(seen, NotFound) or (seen is not None and not seen.mod):
                raise Lost
        self._after = [
            predecessors(after, standing) if n not in self._standing else () for n, after in enumerate(waits)
        ]
        self._waits = waits

    # ------------------------------------------------------------------ build

    def _operations(self, subject: Subject, places: Sequence[int], hold: str = "") -> list[t.NewOperation]:
        """Those at these places, of one type on one table, with the next numbers; what they wait for inside the graph
        is written apart.
        """
        declaration, record = self._types[subject]
        first = self._counters[subject].next_instance
        found = []
        for number, n in enumerate(places):
            wanted, ref = self._wanted[n], OperationRef(*subject, self._objects[n], first + number)
            asked = self._asked.get(n) or Asked(wanted)
            spec = asked.spec(replace(make_spec(wanted, declaration, record), hold=hold), wanted)
            found.append(
                t.NewOperation(
                    *(ref, spec, wanted.arg),
                    waits=True,
                    after=self._after[n] if n not in self._apart else (),
                    takes=asked.takes(ref),
                    options=wanted.options,
                    named=wanted.keyed,
                )
            )
        return found

    def _in_one(self) -> Txn | None:
        """One transaction for all, where etcd takes it."""
        said = sum(one.options != DEFAULT for one in self._wanted)
        if 4 * len(self._wanted) + said + 2 * len(self._links) > MAX_OPERATIONS:
            return None
        parts = []
        for subject, places in self._places.items():
            new = self._operations(subject, places, self._hold)
            for n, one in zip(places, new, strict=True):
                self._refs[n] = one.ref
            parts.append(t.starts(self._keys, self._counters[subject], new))
        edges = [put for pred, succ, on in self._links for put in w.link(self._keys, *self._ends(pred, succ), on)]
        whole = Txn(
            tuple({compare: None for part in parts for compare in part.compares}),
            (*(op for part in parts for op in part.success), *edges),
            tuple(Get(key) for n in self._new for key in self._found_at(self._refs[n])),
            "start_graph",
        )
        size = sum(len(put.value) for put in whole.success if isinstance(put, Put))
        fits = operations(whole) <= MAX_OPERATIONS and not any(isinstance(op, Txn) for op in whole.success)
        return whole if fits and size <= t.START_BYTES_PER_TXN else None

    def _found_at(self, ref: OperationRef) -> tuple[str, str]:
        """Where an operation that was started is found by its request id, whether it goes on or has ended."""
        return self._keys.of(ref, "spec"), self._keys.history(ref)

    def _ends(self, pred: int, succ: int) -> tuple[OperationRef, OperationRef]:
        return self._refs[pred], self._refs[succ]

    @property
    def _new(self) -> list[int]:
        """The places of those that are to be started."""
        return [n for n in range(len(self._wanted)) if n not in self._standing]

    # ----------------------------------------------------------------- commit

    async def _commit_whole(self, txn: Txn) -> None:
        result = await self._etcd.commit(txn, deadline=WRITE_LIMIT)
        if result.succeeded:
            return
        # An earlier copy of this transaction may have won, and what it started have ended since (T9).
        found = [answer.kv if isinstance(answer, GetResult) else None for answer in result.responses]
        for n, spec, history in zip(self._new, found[::2], found[1::2], strict=True):
            wanted, ref = self._wanted[n], self._refs[n]
            if spec is not None and is_of(read(Spec.decode, spec), wanted, ref):
                return
            if history is not None and is_of(read(History.decode, history), wanted, ref):
                return
        raise Lost

    async def _in_pages(self) -> None:
        """Insert them under a hold. Where something is refused for good, or the caller gives up, the hold is denied."""
        self._hold = str(uuid.uuid4())
        hold = Hold(GRAPH, options={"operations": len(self._wanted)})
        self._value = hold.encode()
        await self._etcd.commit(w.hold(self._keys, self._hold, hold, 0), deadline=WRITE_LIMIT)
        self._shown = time.monotonic()
        self._apart = {n for n, after in enumerate(self._after) if len(after) > AFTER_PER_START}
        try:
            for subject, places in self._places.items():
                await self._insert(subject, places)
            for first in range(0, len(self._links), EDGES_PER_TXN):
                await self._connect(self._links[first : first + EDGES_PER_TXN])
            apart = [(n, one) for n in sorted(self._apart) for one in self._waits[n]]
            for first in range(0, len(apart), OUTSIDE_PER_TXN):
                await self._connect_outside(apart[first : first + OUTSIDE_PER_TXN])
            await self._let_go()
        except BaseException:
            await self._deny()
            raise

    async def _insert(self, subject: Subject, places: Sequence[int]) -> None:
        """The operations of one type on one table, page by page, with the numbers that stand there then."""
        first = 0
        while first < len(places):
            counters = self._counters[subject]
            page = self._operations(subject, places[first : first + t.STARTS_PER_LIST], self._hold)
            page = page[: t.start_together(self._keys, page, flat=True)]
            result = await self._commit_held(t.starts(self._keys, counters, page))
            if not result.succeeded:
                instead, wanted = t.found_instead(result)[0], self._wanted[places[first]]
                spec = read(Spec.decode, instead.spec) if instead.spec is not None else None
                if spec is None or (spec.request_id, spec.hold) != (wanted.request_id, self._hold):
                    await self._still_held()
                    record = read(History.decode, instead.history) if instead.history is not None else None
                    if record is not None and is_of(record, wanted, page[0].ref):
                        raise Lost  # it was started by another call, and has ended: what is held here does not end
                    await self._still_alone(places[first : first + len(page)])
                    await self._still_free(subject, places[first : first + len(page)])
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

    async def _still_free(self, subject: Subject, places: Sequence[int]) -> None:
        """Raises Incompatible where somebody else has taken one of their ids meanwhile, with part of the graph there
        already.
        """
        own = [self._wanted[n] for n in places if n in self._asked]
        for answer in await resolve(self._etcd, self._keys, self._types[subject][0], own) if own else ():
            if isinstance(answer, Joined | Undecided):
                raise Incompatible(
                    f"an operation of one of the ids of the graph, {subject[1]} on {subject[0]}, was started by "
                    "somebody else while it was inserted: start it again"
                )
            if isinstance(answer, Exception):
                raise answer

    async def _still_alone(self, places: Sequence[int]) -> None:
        """Whoever came first of two calls with the same request ids inserts them; both do it in the same order. Raises
        Inserting, Lost.
        """
        own = [self._wanted[n] for n in places if self._wanted[n].own_id]
        for answer in await find_earlier(self._etcd, self._keys, own) if own else ():
            if isinstance(answer, BeingInserted):
                raise Inserting(answer.hold)
            if answer is not None:
                raise answer if isinstance(answer, InvalidArgument) else Lost

    async def _connect_outside(self, edges: Sequence[tuple[int, After]]) -> None:
        """Edges to operations of which an operation waits for very many. What has ended well meanwhile is waited for
        no more. Raises OperationStartError where one ended otherwise.
        """
        began = time.monotonic()
        while True:
            standing = await standings(self._etcd, self._keys, (one.ref for _, one in edges))
            left = [(n, pred) for n, one in edges for pred in predecessors([one], standing)]
            mods = {pred.ref: pred.mod for _, pred in left}
            compares = tuple(unchanged(self._keys.of(ref, "state"), mod) for ref, mod in sorted(mods.items()))
            puts = tuple(put for n, pred in left for put in w.link(self._keys, pred.ref, self._refs[n], pred.on))
            if not puts or (await self._commit_held(Txn(compares, puts, (), "edges"))).succeeded:
                return
            await self._still_held()
            if overdue(began):
                raise OperationStartError("the operations that are waited for change all the time: try again")

    async def _connect(self, links: Sequence[Link]) -> None:
        """Write edges between operations that exist; writing them twice does no harm.

        Raises OperationStartError where one of them has ended: a coordinator of an older release does not look for its
        hold.
        """
        ends = [self._ends(pred, succ) for pred, succ, _ in links]
        refs = sorted({ref for two in ends for ref in two})
        waits = tuple(value_is(self._keys.of(ref, "state"), word(State.PENDING)) for ref in refs)
        puts = tuple(put for two, (_, _, on) in zip(ends, links, strict=True) for put in w.link(self._keys, *two, on))
        if not (await self._commit_held(Txn(waits, puts, (), "edges"))).succeeded:
            await self._still_held()
            raise OperationStartError(
                "an operation of the graph ended before the graph was inserted completely; start the graph again"
            )

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
        denied = Hold(GRAPH, HoldState.DENIED, "the graph that it was part of was not inserted as a whole")
        with suppress(DistopError):
            await self._etcd.commit(
                Txn((value_is(key, self._value),), (Put(key, denied.encode()),), (), "deny"), deadline=DENY_LIMIT
            )
