"""Starting operations all or none: a graph of them, one that is prepared, those of a caller's transaction.

As many as one transaction takes are one transaction. More are inserted page by page under a *hold*
(``protocol.pending_operations.hold``): none of them begins while it is there, and the last transaction takes it away. A
caller that dies before leaves a hold that does not change any more: daemons deny it after a while, and what it held
ends as if it had been cancelled (``daemon.upkeep.abandoned_holds``).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from distop.clock import time, uuid
from distop.errors import DistopError, Incompatible, InvalidArgument, NotFound, OperationStartError, OutcomeUnknown
from distop.protocol import operation_transitions as t
from distop.protocol import pending_operations as w
from distop.protocol.dependencies import GRAPH, Hold, HoldState
from distop.protocol.frozen import frozen
from distop.protocol.json_codec import word
from distop.protocol.operation_options import DEFAULT
from distop.protocol.record_reading import read
from distop.protocol.records import OperationRef, Spec, State
from distop.protocol.txn import MAX_OPERATIONS, Delete, Get, GetResult, Put, Txn, operations, unchanged, value_is
from distop.services.submission.awaited_operations import predecessors, standings
from distop.services.submission.contention import Inserting, Lost, overdue, until_won
from distop.services.submission.duplicates import Joined, Undecided, resolve
from distop.services.submission.idempotency import BeingInserted, find_earlier, won
from distop.services.submission.insertion import Insertion, Started, Try
from distop.services.submission.option_values import After
from distop.store.connection_settings import WRITE_LIMIT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.protocol.keys import Keys
    from distop.protocol.txn import TxnResult
    from distop.services.submission.insertion import Subject
    from distop.services.submission.start_request import Request
    from distop.store.client import EtcdClient

MAX_GRAPH = 100_000
"""Operations in one graph."""
IN_GRAPHS = ("", "join", "refuse")
"""What may become of a duplicate in a graph."""
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

Link: TypeAlias = tuple[int, int, str]
"""Of two operations of a graph, by their places in it: the one that is waited for, the one that waits, and ``on``."""


async def start_graph(
    etcd: EtcdClient, keys: Keys, wanted: Sequence[Request], links: Sequence[Link], name: str = ""
) -> list[Started]:
    """Start these operations, in whose order the answer is. All of them wait, be it for nobody. ``name``: the request
    id that an OutcomeUnknown names.

    Raises as ``submit.submit`` does, for the first operation that is refused; nothing was started then.
    """
    check(wanted, links)
    try:
        return await until_won(etcd, keys, wanted[0], lambda: _Together(etcd, keys, wanted, links).run())
    except OutcomeUnknown as error:
        raise OutcomeUnknown(
            "whether the operations were started is not known, because etcd stopped answering: call again with "
            f"request_id={name or wanted[0].request_id!r}, which starts them only if they were not"
        ) from error


@frozen
class Whole:
    """Operations that one transaction starts, as it was read. ``earlier``: an earlier call with their request ids has
    started them, and there is nothing to commit.
    """

    refs: tuple[OperationRef, ...]
    txn: Txn
    earlier: bool = False


async def in_one(
    etcd: EtcdClient, keys: Keys, wanted: Sequence[Request], links: Sequence[Link], hold: str = ""
) -> Whole:
    """What would start these operations, all of which wait (be it for nobody, or for a hold), in one transaction of
    somebody else's; nothing is written. It compares mod revisions, that tables are there, and whom ids name.

    Raises as :func:`start_graph` does; Incompatible also where an operation goes on that one of them would join;
    InvalidArgument where one transaction does not take them; Lost where it is to be tried again.
    """
    for one in wanted:
        if one.on_duplicate not in IN_GRAPHS:
            raise InvalidArgument(
                "what is prepared, or part of a transaction of the caller's, is refused where an operation of its id "
                f"goes on: start {one.type} on {one.table} by itself, to {one.on_duplicate} another one"
            )
    check(wanted, links)
    return await _Together(etcd, keys, wanted, links, hold, joins=False).in_one()


def check(wanted: Sequence[Request], links: Sequence[Link]) -> None:
    """Raises InvalidArgument: too many, the same request twice, a policy for duplicates that goes with one alone, a
    cycle.
    """
    if not wanted:
        raise InvalidArgument("there is no operation to start: the list is empty")
    if len(wanted) > MAX_GRAPH:
        raise InvalidArgument(f"{len(wanted)} operations are more than one graph takes ({MAX_GRAPH})")
    ids: set[str] = set()
    for one in wanted:
        if one.request_id in ids:
            raise InvalidArgument(f"two operations of the graph have the request id {one.request_id!r}")
        ids.add(one.request_id)
        if one.on_duplicate not in IN_GRAPHS:
            raise InvalidArgument(
                f"in a graph a duplicate is joined or refused: start {one.type} on {one.table} by itself, to "
                f"{one.on_duplicate} another one"
            )
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


class _Together:
    """One try to start operations that wait for each other."""

    def __init__(
        self,
        etcd: EtcdClient,
        keys: Keys,
        wanted: Sequence[Request],
        links: Sequence[Link],
        hold: str = "",
        *,
        joins: bool = True,
    ) -> None:
        self._etcd = etcd
        self._keys = keys
        self._tries = [Try(one) for one in wanted]
        self._insertion = Insertion(etcd, keys, self._tries, joins=joins)
        self._links = links
        self._refs: dict[Try, OperationRef] = {}
        """Of those that are started."""
        self._apart: set[Try] = set()
        """Those that wait for so many operations outside the graph that these edges are written apart."""
        self._hold, self._value, self._shown = hold, b"", 0.0

    async def run(self) -> list[Started]:
        """Raises Lost where it is to be tried again."""
        await self._read()
        if self._new():
            whole = self._whole()
            if whole is not None:
                await self._commit_whole(whole)
            else:
                await self._in_pages()
        return [one.result() if one.verdict is not None else Started(self._refs[one]) for one in self._tries]

    async def in_one(self) -> Whole:
        """Raises InvalidArgument where it is too much for one transaction; Lost where it is to be tried again."""
        await self._read()
        if not self._new():
            return Whole(tuple(one.result().ref for one in self._tries), Txn(), earlier=True)
        whole = self._whole()
        if whole is None:
            raise InvalidArgument(
                f"{len(self._tries)} operations are more than one transaction takes (31, 25 with request ids or with "
                "ids, 21 with both, 1 MiB of arguments in all, and some 60 that they wait for): start them by "
                "themselves (start_operations), or several times fewer"
            )
        return Whole(tuple(self._refs[one] for one in self._tries), whole)

    def _new(self, subject: Subject | None = None) -> list[Try]:
        """Those that are to be started."""
        tries = self._tries if subject is None else self._insertion.subjects[subject]
        return [one for one in tries if one.verdict is None]

    # ------------------------------------------------------------------- read

    async def _read(self) -> None:
        """Raises what one of them is refused for; OperationStartError where an earlier call has started some, and not
        all: but those for which others stood, and still do. Raises Lost.
        """
        await self._insertion.look_back()
        self._refuse()
        earlier = len(self._tries) - len(self._new())
        if earlier == len(self._tries):
            return
        await self._insertion.check()
        left = [one for one in self._tries if not isinstance(one.verdict, Started)]
        if earlier and left:
            raise OperationStartError(
                f"an earlier call has started {earlier} of these {len(self._tries)} operations, and not "
                f"{left[0].wanted.request_id!r}: this is another graph, so choose new ids"
            )
        self._refuse()
        if (twin := next((one.wanted for one in self._new() if one.asked is None), None)) is not None:
            raise InvalidArgument(
                f"two operations of the graph, both {twin.type} on {twin.table}, have the same id: of one id one goes "
                "on at a time"
            )
        if not earlier:
            self._stand_in()
            await self._read_predecessors()

    def _refuse(self) -> None:
        """Raise the first refusal, if any; else Lost where one is."""
        errors = [one.verdict for one in self._tries if isinstance(one.verdict, Exception)]
        if errors:
            raise next((error for error in errors if not isinstance(error, Lost)), errors[0])

    def _stand_in(self) -> None:
        """Operations that go on stand for those that joined them: what waits for these in the graph waits for those.
        Raises Incompatible where one that goes on would have to wait.
        """
        inner: list[Link] = []
        for pred, succ, on in self._links:
            before, after = self._tries[pred].verdict, self._tries[succ]
            if isinstance(after.verdict, Started):
                raise Incompatible(
                    f"{after.wanted.type} on {after.wanted.table} would have to wait for others of the graph, and goes "
                    f"on already as {after.verdict.ref}"
                )
            if isinstance(before, Started):
                after.outside = (*after.outside, After(before.ref, on))
            else:
                inner.append((pred, succ, on))
        self._links = inner

    async def _read_predecessors(self) -> None:
        """What is waited for that is not of this graph. Raises Lost where an operation that stood for one of the graph
        has ended since: its id is free, or another one has it.
        """
        standing = await self._insertion.read_predecessors()
        for one in self._tries:
            seen = standing.get(one.verdict.ref) if isinstance(one.verdict, Started) else None
            if isinstance(seen, NotFound) or (seen is not None and not seen.mod):
                raise Lost
        self._refuse()

    # ------------------------------------------------------------------ build

    def _operations(self, tries: Sequence[Try]) -> list[t.NewOperation]:
        """What they wait for inside the graph is written apart."""
        return self._insertion.operations(tries, hold=self._hold, waits=True, apart=self._apart)

    def _whole(self) -> Txn | None:
        """One transaction for all, where etcd takes it."""
        new = self._new()
        said = sum(one.wanted.options != DEFAULT for one in new)
        if 4 * len(new) + said + 2 * len(self._links) > MAX_OPERATIONS:
            return None
        parts = []
        for subject in self._insertion.subjects:
            if tries := self._new(subject):
                operations_ = self._operations(tries)
                self._refs.update((one, each.ref) for one, each in zip(tries, operations_, strict=True))
                parts.append(t.starts(self._keys, self._insertion.types[subject].counters, operations_))
        edges = [put for pred, succ, on in self._links for put in w.link(self._keys, *self._ends(pred, succ), on)]
        reads = (Get(key) for one in new for key in self._found_at(self._refs[one]))
        whole = Txn(
            tuple({compare: None for part in parts for compare in part.compares}),
            (*(op for part in parts for op in part.success), *edges),
            tuple(reads),
            "start_graph",
        )
        size = sum(len(put.value) for put in whole.success if isinstance(put, Put))
        fits = operations(whole) <= MAX_OPERATIONS and not any(isinstance(op, Txn) for op in whole.success)
        return whole if fits and size <= t.START_BYTES_PER_TXN else None

    def _found_at(self, ref: OperationRef) -> tuple[str, str]:
        """Where an operation that was started is found by its request id, whether it goes on or has ended."""
        return self._keys.of(ref, "spec"), self._keys.history(ref)

    def _ends(self, pred: int, succ: int) -> tuple[OperationRef, OperationRef]:
        return self._refs[self._tries[pred]], self._refs[self._tries[succ]]

    # ----------------------------------------------------------------- commit

    async def _commit_whole(self, txn: Txn) -> None:
        result = await self._etcd.commit(txn, deadline=WRITE_LIMIT)
        if result.succeeded:
            return
        # An earlier copy of this transaction may have won, and what it started have ended since (T9).
        found = [answer.kv if isinstance(answer, GetResult) else None for answer in result.responses]
        for one, spec, history in zip(self._new(), found[::2], found[1::2], strict=True):
            if won(spec, history, one.wanted, self._refs[one]):
                return
        raise Lost

    async def _in_pages(self) -> None:
        """Insert them under a hold. Where something is refused for good, or the caller gives up, the hold is denied."""
        self._hold = str(uuid.uuid4())
        hold = Hold(GRAPH, options={"operations": len(self._tries)})
        self._value = hold.encode()
        await self._etcd.commit(w.hold(self._keys, self._hold, hold, 0), deadline=WRITE_LIMIT)
        self._shown = time.monotonic()
        self._apart = {one for one in self._new() if len(one.after) > AFTER_PER_START}
        try:
            for subject in self._insertion.subjects:
                await self._insert(subject, self._new(subject))
            for first in range(0, len(self._links), EDGES_PER_TXN):
                await self._connect(self._links[first : first + EDGES_PER_TXN])
            apart = [(one, after) for one in self._tries if one in self._apart for after in one.awaited]
            for first in range(0, len(apart), OUTSIDE_PER_TXN):
                await self._connect_outside(apart[first : first + OUTSIDE_PER_TXN])
            await self._let_go()
        except BaseException:
            await self._deny()
            raise

    async def _insert(self, subject: Subject, tries: Sequence[Try]) -> None:
        """The operations of one type on one table, page by page, with the numbers that stand there then."""
        types, first = self._insertion.types, 0
        while first < len(tries):
            page = self._operations(tries[first : first + t.STARTS_PER_LIST])
            page = page[: t.fitting_starts(self._keys, page, flat=True)]
            now = tries[first : first + len(page)]
            counters = types[subject].counters
            result = await self._commit_held(t.starts(self._keys, counters, page))
            if not result.succeeded and not await self._is_mine(result, now, page[0].ref):
                await self._still_alone(now)
                await self._still_free(subject, now)
                await self._insertion.read_type(subject)
                await self._read_predecessors()
                continue
            self._refs.update((one, each.ref) for one, each in zip(now, page, strict=True))
            first += len(page)
            if result.succeeded:
                following = counters.next_instance + len(page)
                counters = replace(counters, next_instance=following, next_instance_mod=result.revision)
                types[subject] = replace(types[subject], counters=counters)
            else:
                await self._insertion.read_type(subject)

    async def _is_mine(self, refused: TxnResult, page: Sequence[Try], ref: OperationRef) -> bool:
        """An earlier copy of the refused transaction has inserted the page. Raises Lost where another call has started
        its first operation, and that has ended: what is held here does not end.
        """
        instead, wanted = t.found_instead(refused)[0], page[0].wanted
        spec = read(Spec.decode, instead.spec) if instead.spec is not None else None
        if spec is not None and (spec.request_id, spec.hold) == (wanted.request_id, self._hold):
            return True
        await self._still_held()
        if won(None, instead.history, wanted, ref):
            raise Lost
        return False

    async def _still_free(self, subject: Subject, tries: Sequence[Try]) -> None:
        """Raises Incompatible where somebody else has taken one of their ids meanwhile, with part of the graph there
        already.
        """
        own = [one.wanted for one in tries if one.asked is not None and one.asked.id]
        declaration = self._insertion.types[subject].declaration
        for answer in await resolve(self._etcd, self._keys, declaration, own) if own else ():
            if isinstance(answer, Joined | Undecided):
                raise Incompatible(
                    f"an operation of one of the ids of the graph, {subject[1]} on {subject[0]}, was started by "
                    "somebody else while it was inserted: start it again"
                )
            if isinstance(answer, Exception):
                raise answer

    async def _still_alone(self, tries: Sequence[Try]) -> None:
        """Whoever came first of two calls with the same request ids inserts them; both do it in the same order. Raises
        Inserting, Lost.
        """
        own = [one.wanted for one in tries if one.wanted.own_id]
        for answer in await find_earlier(self._etcd, self._keys, own) if own else ():
            if isinstance(answer, BeingInserted):
                raise Inserting(answer.hold)
            if answer is not None:
                raise answer if isinstance(answer, InvalidArgument) else Lost

    async def _connect_outside(self, edges: Sequence[tuple[Try, After]]) -> None:
        """Edges to operations of which an operation waits for very many. What has ended well meanwhile is waited for
        no more. Raises OperationStartError where one ended otherwise.
        """
        began = time.monotonic()
        while True:
            standing = await standings(self._etcd, self._keys, (after.ref for _, after in edges))
            left = [(one, pred) for one, after in edges for pred in predecessors([after], standing)]
            mods = {pred.ref: pred.mod for _, pred in left}
            compares = tuple(unchanged(self._keys.of(ref, "state"), mod) for ref, mod in sorted(mods.items()))
            puts = tuple(put for one, pred in left for put in w.link(self._keys, pred.ref, self._refs[one], pred.on))
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
