"""Starts operations all or none: graphs, prepared and transactional operations.

If all fit into one transaction, there is one. A larger graph is inserted page by page under a *hold*
(``protocol.pending_operations.hold``): none of the operations starts before the last transaction releases the hold. If
the caller dies before, the hold does not change any more; daemons deny it after a while, and its operations end as if
they had been cancelled (``daemon.upkeep.abandoned_holds``).
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
from distop.services.submission.awaited_operations import Standing, predecessors, standings
from distop.services.submission.contention import Inserting, Lost, overdue, until_won
from distop.services.submission.duplicates import Joined, Undecided, resolve
from distop.services.submission.idempotency import BeingInserted, find_earlier, won
from distop.services.submission.insertion import Insertion, StartAttempt, Started
from distop.services.submission.option_values import After
from distop.store.connection_settings import WRITE_LIMIT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.protocol.keys import Keys
    from distop.protocol.records import Subject
    from distop.protocol.txn import TxnResult
    from distop.services.submission.start_request import Request
    from distop.store.client import EtcdClient

MAX_GRAPH = 100_000
"""Maximum operations in one graph."""
IN_GRAPHS = ("", "join", "refuse")
"""Duplicate policies that a graph allows."""
HOLD_EVERY = 2.0
"""Seconds between heartbeats of a caller that inserts a large graph."""
EDGES_PER_TXN = 62
AFTER_PER_START = 30
"""Maximum predecessors outside the graph that are compared with an operation's insertion: more edges are written
separately, under the hold.
"""
OUTSIDE_PER_TXN = 60
"""Such edges in one transaction (T1)."""
DENY_LIMIT = 5.0
"""Seconds for which a caller that gives up tries to deny the hold."""

StartLink: TypeAlias = tuple[int, int, str]
"""An edge between operations of a graph, by their places: (predecessor, successor, ``on``)."""


async def start_graph(
    etcd: EtcdClient, keys: Keys, wanted: Sequence[Request], links: Sequence[StartLink], name: str = ""
) -> list[Started]:
    """Start these operations; the results have their order.

    All of them are pending first, even without a dependency. ``name``: the request id that an OutcomeUnknown names.
    Raises as ``submit.submit`` does, for the first refused operation; then nothing was started.
    """
    check(wanted, links)
    try:
        return await until_won(etcd, keys, wanted[0], lambda: _Together(etcd, keys, wanted, links).run())
    except OutcomeUnknown as error:
        raise OutcomeUnknown(
            "cannot tell whether the operations were started, because etcd did not answer: call again with "
            f"request_id={name or wanted[0].request_id!r}, which starts them at most once"
        ) from error


@frozen
class Whole:
    """The parts of a transaction that starts operations.

    ``earlier``: an earlier call with their request ids has started them, and there is nothing to commit.
    """

    refs: tuple[OperationRef, ...]
    txn: Txn
    earlier: bool = False


async def in_one(
    etcd: EtcdClient, keys: Keys, wanted: Sequence[Request], links: Sequence[StartLink], hold: str = ""
) -> Whole:
    """The compares and writes that start these operations in a caller's transaction.

    Nothing is written here. All operations are pending first, even without a dependency or a hold. The compares are of
    mod revisions, of the existence of tables, and of the holders of ids. Raises as :func:`start_graph` does;
    Incompatible also if an active operation would have to be joined; InvalidArgument if they do not fit into one
    transaction; Lost if the caller has to retry.
    """
    check(wanted, links)
    return await _Together(etcd, keys, wanted, links, hold, joins=False).in_one()


def check(wanted: Sequence[Request], links: Sequence[StartLink]) -> None:
    """Check a graph as a whole.

    Raises InvalidArgument for too many operations, a repeated request id, a duplicate policy that graphs do not allow,
    and a cycle.
    """
    if not wanted:
        raise InvalidArgument("there is no operation to start: the list is empty")
    if len(wanted) > MAX_GRAPH:
        raise InvalidArgument(f"the graph has {len(wanted)} operations; at most {MAX_GRAPH} are allowed")
    ids: set[str] = set()
    for one in wanted:
        if one.request_id in ids:
            raise InvalidArgument(f"two operations of the graph have the request id {one.request_id!r}")
        ids.add(one.request_id)
        if one.on_duplicate not in IN_GRAPHS:
            raise InvalidArgument(
                f"operations of a graph, prepared operations and those of a transaction cannot {one.on_duplicate} a "
                f"duplicate: start {one.type} on {one.table} by itself to do so"
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
        raise InvalidArgument(f"the dependencies of the graph form a cycle, which contains {one.type} on {one.table}")


class _Together:
    """One attempt to start operations that depend on each other."""

    def __init__(
        self,
        etcd: EtcdClient,
        keys: Keys,
        wanted: Sequence[Request],
        links: Sequence[StartLink],
        hold: str = "",
        *,
        joins: bool = True,
    ) -> None:
        self._etcd = etcd
        self._keys = keys
        self._tries = [StartAttempt(one) for one in wanted]
        self._insertion = Insertion(etcd, keys, self._tries, joins=joins)
        self._links = links
        self._refs: dict[StartAttempt, OperationRef] = {}
        """The edges between started operations."""
        self._apart: set[StartAttempt] = set()
        """Operations with too many predecessors outside the graph: these edges are written separately."""
        self._hold, self._value, self._shown = hold, b"", 0.0

    async def run(self) -> list[Started]:
        """Start the graph in one transaction, or in pages. Raises Lost if it must be tried again."""
        await self._read()
        if self._new():
            whole = self._whole()
            if whole is not None:
                await self._commit_whole(whole)
            else:
                await self._in_pages()
        return [one.result() if one.verdict is not None else Started(self._refs[one]) for one in self._tries]

    async def in_one(self) -> Whole:
        """The transaction that starts the whole graph.

        Raises InvalidArgument if the graph does not fit into one transaction; Lost if it must be tried again.
        """
        await self._read()
        if not self._new():
            return Whole(tuple(one.result().ref for one in self._tries), Txn(), earlier=True)
        whole = self._whole()
        if whole is None:
            raise InvalidArgument(
                f"{len(self._tries)} operations do not fit into one transaction (at most 31, 25 with request ids or "
                "ids, 21 with both, 1 MiB of arguments in all, and some 60 dependencies): start them with "
                "start_operations, or use several transactions"
            )
        return Whole(tuple(self._refs[one] for one in self._tries), whole)

    def _new(self, subject: Subject | None = None) -> list[StartAttempt]:
        """The attempts of operations to start."""
        tries = self._tries if subject is None else self._insertion.subjects[subject]
        return [one for one in tries if one.verdict is None]

    # ------------------------------------------------------------------- read

    async def _read(self) -> None:
        """Raises the error of a refused operation, or Lost.

        Raises OperationStartError if an earlier call has started some of them but not all, except joined operations
        that are still active.
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
                f"an earlier call has started {earlier} of these {len(self._tries)} operations, but not "
                f"{left[0].wanted.request_id!r}: this is another graph, so choose new request ids"
            )
        self._refuse()
        if (twin := next((one.wanted for one in self._new() if one.resolved is None), None)) is not None:
            raise InvalidArgument(
                f"two operations of the graph, both {twin.type} on {twin.table}, have the same id: only one operation "
                "of an id can be active"
            )
        if not earlier:
            self._stand_in()
            await self._read_predecessors()

    def _refuse(self) -> None:
        """Raise the first refusal, if any; otherwise Lost, if there is one."""
        errors = [one.verdict for one in self._tries if isinstance(one.verdict, Exception)]
        if errors:
            raise next((error for error in errors if not isinstance(error, Lost)), errors[0])

    def _stand_in(self) -> None:
        """Replace joined operations by the active ones in the edges of the graph.

        Raises Incompatible if an active operation would have to wait.
        """
        inner: list[StartLink] = []
        for pred, succ, on in self._links:
            before, after = self._tries[pred].verdict, self._tries[succ]
            if isinstance(after.verdict, Started):
                raise Incompatible(
                    f"{after.wanted.type} on {after.wanted.table} cannot wait for other operations of the graph: it "
                    f"already exists as {after.verdict.ref}"
                )
            if isinstance(before, Started):
                after.outside = (*after.outside, After(before.ref, on))
            else:
                inner.append((pred, succ, on))
        self._links = inner

    async def _read_predecessors(self) -> None:
        """Read the predecessors outside the graph.

        Raises Lost if a joined operation has ended since: its id is free, or another operation has it.
        """
        standing = await self._insertion.read_predecessors()
        for one in self._tries:
            seen = standing.get(one.verdict.ref) if isinstance(one.verdict, Started) else None
            if isinstance(seen, NotFound) or (isinstance(seen, Standing) and not seen.mod):
                raise Lost
        self._refuse()

    # ------------------------------------------------------------------ build

    def _operations(self, tries: Sequence[StartAttempt]) -> list[t.NewOperation]:
        """The new operations, without the edges inside the graph, which are written separately."""
        return self._insertion.operations(tries, hold=self._hold, waits=True, apart=self._apart)

    def _whole(self) -> Txn | None:
        """One transaction for all operations, if etcd accepts it."""
        new = self._new()
        with_options = sum(one.wanted.options != DEFAULT for one in new)
        if 4 * len(new) + with_options + 2 * len(self._links) > MAX_OPERATIONS:
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
        """The keys by which a started operation is found: its spec, or its history record."""
        return self._keys.of(ref, "spec"), self._keys.history(ref)

    def _ends(self, pred: int, succ: int) -> tuple[OperationRef, OperationRef]:
        return self._refs[self._tries[pred]], self._refs[self._tries[succ]]

    # ----------------------------------------------------------------- commit

    async def _commit_whole(self, txn: Txn) -> None:
        result = await self._etcd.commit(txn, deadline=WRITE_LIMIT)
        if result.succeeded:
            return
        # An earlier copy of this transaction may have been applied, and its operations may have ended since (T9).
        found = [answer.kv if isinstance(answer, GetResult) else None for answer in result.responses]
        for one, spec, history in zip(self._new(), found[::2], found[1::2], strict=True):
            if won(spec, history, one.wanted, self._refs[one]):
                return
        raise Lost

    async def _in_pages(self) -> None:
        """Insert the operations under a hold.

        If an operation is refused for good, or the caller gives up, the hold is denied.
        """
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
            await self._deny_hold()
            raise

    async def _insert(self, subject: Subject, tries: Sequence[StartAttempt]) -> None:
        """Insert the operations of one type on one table page by page, with the current counters."""
        types, first = self._insertion.types, 0
        while first < len(tries):
            page = self._operations(tries[first : first + t.STARTS_PER_LIST])
            page = page[: t.fitting_starts(self._keys, page, flat=True)]
            now = tries[first : first + len(page)]
            counters = types[subject].counters
            result = await self._commit_held(t.starts(self._keys, counters, page))
            if not result.succeeded and not await self._inserted_by_copy(result, now, page[0].ref):
                await self._check_no_other_call(now)
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

    async def _inserted_by_copy(self, refused: TxnResult, page: Sequence[StartAttempt], ref: OperationRef) -> bool:
        """Whether an earlier copy of the refused transaction has inserted the page.

        Raises Lost if another call has started its first operation, and that has ended: the operations held here do not
        end.
        """
        instead, wanted = t.found_instead(refused)[0], page[0].wanted
        spec = read(Spec.decode, instead.spec) if instead.spec is not None else None
        if spec is not None and (spec.request_id, spec.hold) == (wanted.request_id, self._hold):
            return True
        await self._still_held()
        if won(None, instead.history, wanted, ref):
            raise Lost
        return False

    async def _still_free(self, subject: Subject, tries: Sequence[StartAttempt]) -> None:
        """Raises Incompatible if another client has taken an id of the graph during its insertion."""
        own = [one.wanted for one in tries if one.resolved is not None and one.resolved.id]
        declaration = self._insertion.types[subject].declaration
        for answer in await resolve(self._etcd, self._keys, declaration, own) if own else ():
            if isinstance(answer, Joined | Undecided):
                raise Incompatible(
                    f"another client started {subject[1]} on {subject[0]} with an id of the graph during its "
                    "insertion: start the graph again"
                )
            if isinstance(answer, Exception):
                raise answer

    async def _check_no_other_call(self, tries: Sequence[StartAttempt]) -> None:
        """Check that no other call with these request ids inserts the graph.

        Both calls insert in the same order, so the first one continues. Raises Inserting, InvalidArgument, Lost.
        """
        own = [one.wanted for one in tries if one.wanted.own_id]
        for answer in await find_earlier(self._etcd, self._keys, own) if own else ():
            if isinstance(answer, BeingInserted):
                raise Inserting(answer.hold)
            if answer is not None:
                raise answer if isinstance(answer, Exception) else Lost

    async def _connect_outside(self, edges: Sequence[tuple[StartAttempt, After]]) -> None:
        """Write the edges of operations with many predecessors.

        A predecessor that has succeeded meanwhile is skipped. Raises OperationStartError if one ended otherwise.
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
                raise OperationStartError("the operations to wait for keep changing: try again")

    async def _connect(self, links: Sequence[StartLink]) -> None:
        """Write edges between operations that exist; writing them twice does no harm.

        Raises OperationStartError where one of them has ended although it was held, such as by a write by hand.
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
        """Commit while the hold exists, and send a heartbeat now and then."""
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
        """Raises OperationStartError if the hold was denied meanwhile."""
        kv = await self._etcd.get(self._keys.hold(self._hold))
        if kv is None or kv.value != self._value:
            raise OperationStartError(
                "the graph was abandoned, because its caller stopped inserting it: start it again"
            )

    async def _let_go(self) -> None:
        """Release the hold. From then on all operations exist."""
        key = self._keys.hold(self._hold)
        txn = Txn((value_is(key, self._value),), (Delete(key),), (Get(key),), "release_hold")
        result = await self._etcd.commit(txn, deadline=WRITE_LIMIT)
        if not result.succeeded and not (result.repeated and await self._etcd.get(key) is None):
            await self._still_held()

    async def _deny_hold(self) -> None:
        """Deny the hold: the inserted operations will never start.

        If etcd does not answer, daemons deny it later.
        """
        key = self._keys.hold(self._hold)
        denied = Hold(GRAPH, HoldState.DENIED, "its graph was not inserted completely")
        with suppress(DistopError):
            await self._etcd.commit(
                Txn((value_is(key, self._value),), (Put(key, denied.encode()),), (), "deny"), deadline=DENY_LIMIT
            )
