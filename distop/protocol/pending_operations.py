"""What happens to operations that wait: for a time, for others, for a hold, for what excludes them; one function per
event that returns the transaction which makes it happen. For the rule of one-way guards see
``protocol.operation_transitions``.

An operation that waits has the state ``pending`` and is not in runOps. It waits for another one by an *edge*: two keys,
``<root>.after.<edge>`` of the one that waits and ``<root>.next.<edge>`` of the one that it waits for, whose coordinator
takes both away when that has ended: so a wide join is as many keys of their own, and no key is written by all. An edge
is named by the two operations (``identity.edge_id``): it never comes back, since nobody comes to wait for what has
ended. The clauses were checked by exhaustive exploration of a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.errors import InvalidArgument
from distop.protocol.dependencies import Edge
from distop.protocol.frozen import frozen
from distop.protocol.identity import edge_id, freed
from distop.protocol.json_codec import dumps, word
from distop.protocol.operation_options import Terms
from distop.protocol.plan import Gate
from distop.protocol.records import OperationRef, Phase, State
from distop.protocol.state_tables import Event, comes_in, enters
from distop.protocol.transaction_groups import fitting_count, merged
from distop.protocol.txn import (
    Compare,
    Delete,
    Get,
    GetResult,
    Operation,
    Put,
    Txn,
    absent,
    exists,
    none_within,
    unchanged,
    value_is,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distop.protocol.dependencies import Hold
    from distop.protocol.keys import Keys
    from distop.protocol.plan import Plan
    from distop.protocol.records import Cancel, History
    from distop.protocol.txn import KeyValue, TxnResult

BEGINS_PER_TXN = 31
"""Operations that one transaction begins at most: four compares of each, the election and runOps (T1)."""
ENDS_PER_TXN = 31
"""Operations that one transaction ends at most that have not begun."""
SIGNALS_PER_TXN = 60
"""Edges that one transaction takes away at most: two keys of each (T1)."""
SEEN_PER_TXN = 60
"""Operations whose states new edges compare at most: both ends, and all that the former wait for, directly or not."""


# ----------------------------------------------------------------------- links


def link(keys: Keys, before: OperationRef, after: OperationRef, on: str) -> tuple[Put, Put]:
    """The two keys of an edge. ``on``: "success", or "end" (however it ends)."""
    edge = edge_id(before, after)
    return (
        Put(keys.edge(after, "after", edge), Edge(str(before), on).encode()),
        Put(keys.edge(before, "next", edge), Edge(str(after), on).encode()),
    )


@frozen
class Seen:
    """An operation's state as it was read, with its mod revision."""

    ref: OperationRef
    state: State
    mod: int


def add_dependencies(keys: Keys, links: Sequence[tuple[Seen, Seen, str]], above: Sequence[Seen]) -> Txn:
    """Let operations that wait do so for others as well (L26), all or none: (the one that is waited for, the one that
    waits, ``on``). ``above``: all that the former wait for themselves, directly or not, of which the latter is none: so
    no cycle comes about, since whoever gives one of them another predecessor meanwhile writes its state again.
    """
    runs = {run.ref: run for _, run, _ in links}
    seen = {one.ref: one for one in (*above, *(pred for pred, _, _ in links), *runs.values())}
    return Txn(
        (
            *(value_is(keys.of(ref, "state"), word(State.PENDING)) for ref in sorted(runs)),
            *(unchanged(keys.of(ref, "state"), one.mod) for ref, one in sorted(seen.items())),
        ),
        (
            *(Put(keys.of(ref, "state"), word(State.PENDING)) for ref in sorted(runs)),
            *(put for pred, run, on in links for put in link(keys, pred.ref, run.ref, on)),
        ),
        (),
        "add_dependencies",
    )


def signal(
    keys: Keys, ref: OperationRef, election: Compare, state_mod: int, ended: State, links: Mapping[str, Edge]
) -> Txn:
    """Tell successors how an operation has ended: the edges of those that may go on are taken away, in those of the
    others it is written down (their own coordinator ends them). ``links``: edge → what stands at its ``next`` key.
    Those of several operations go together (``protocol.job_transitions.group``).

    An edge that is not named by this operation and the one in its value was written by hand, and is only taken away: by
    others it would reach an operation that does not wait for this one, on any table.
    """
    ops: list[Operation] = []
    for edge, one in links.items():
        successor = _successor(ref, edge, one)
        if successor is None:
            ops.append(Delete(keys.edge(ref, "next", edge)))
            continue
        after = keys.edge(successor, "after", edge)
        if one.satisfied_by(ended):
            ops.append(Delete(after))
        else:
            failed = Edge(str(ref), one.on, str(ended))
            ops.append(Txn((exists(after),), (Put(after, failed.encode()),), (), "broken_edge"))
        ops.append(Delete(keys.edge(ref, "next", edge)))
    over = (unchanged(keys.of(ref, "state"), state_mod), election, value_is(keys.pending(ref), word(Phase.CLEANING)))
    return Txn(over, tuple(ops), (), "signal")


def _successor(ref: OperationRef, edge: str, link: Edge) -> OperationRef | None:
    """The operation that waits for ``ref`` by this edge; None where it names none."""
    try:
        successor = OperationRef.parse(link.op)
    except InvalidArgument:
        return None
    return successor if edge == edge_id(ref, successor) else None


# ----------------------------------------------------------------------- begin


@frozen
class Beginning:
    """An operation that shall wait no longer. ``planned``: it brings its plan and opens at once."""

    ref: OperationRef
    state_mod: int
    one_at_a_time: bool
    hold: str = ""
    planned: tuple[Plan, Sequence[bytes]] | None = None
    terms: Terms = Terms()


def begins(
    keys: Keys, election: Compare, run_ops: Mapping[str, int], run_ops_mod: int, new: Sequence[Beginning]
) -> Txn:
    """Operations of one type on one table begin to run, all or none: nothing is left that they wait for, and what runs
    on the table (``run_ops``) excludes none of them.

    The failure branch reads runOps, then of each operation its state and ``.current`` (:func:`begin_refused`).
    """
    first = new[0].ref
    counts = dict(run_ops)
    counts[first.type] = counts.get(first.type, 0) + len(new)
    common = _common(keys, first.table, election, run_ops_mod, counts)
    return merged([_part(keys, one) for one in new], common)


def _common(keys: Keys, table: str, election: Compare, run_ops_mod: int, counts: Mapping[str, int]) -> Txn:
    """What a begin compares, writes and reads once, however many operations begin."""
    run_ops = keys.run_ops(table)
    return Txn((election, unchanged(run_ops, run_ops_mod)), (Put(run_ops, dumps(counts)),), (Get(run_ops),), "begin")


def _part(keys: Keys, one: Beginning) -> Txn:
    """What one operation adds to the transaction that begins several."""
    ref = one.ref
    reads = (Get(keys.of(ref, "state")), Get(keys.current(ref.table, ref.type, ref.object)))
    return Txn(tuple(_nothing_left(keys, one)), tuple(_begun(keys, one)), reads)


def _nothing_left(keys: Keys, one: Beginning) -> list[Compare]:
    """What is compared of each."""
    ref = one.ref
    compares = [
        unchanged(keys.of(ref, "state"), one.state_mod),
        comes_in(keys, ref, Event.BEGIN),
        none_within(*keys.edges_range(ref, "after")),
    ]
    if one.hold:
        compares.append(absent(keys.hold(one.hold)))
    if one.one_at_a_time:
        compares.append(absent(keys.current(ref.table, ref.type, ref.object)))
    return compares


def _begun(keys: Keys, one: Beginning) -> list[Put | Delete]:
    ref = one.ref
    ops = [*enters(keys, ref, Event.BEGIN if one.planned is None else Event.BEGIN_PLANNED)]
    if one.one_at_a_time:
        ops.append(Put(keys.current(ref.table, ref.type, ref.object), word(str(ref.instance))))
    if one.planned is None:
        return ops
    plan, chunks = one.planned
    ops += [Put(keys.chunk(ref, n), chunk) for n, chunk in enumerate(chunks)]
    gate = Put(keys.gate(ref), Gate(plan.count, one.terms.options, one.terms.where).encode())
    return [*ops, Put(keys.of(ref, "plan"), plan.encode()), gate]


def begin_together(keys: Keys, election: Compare, new: Sequence[Beginning]) -> int:
    """How many of these begin in one transaction, in order; at least one.

    See ``transaction_groups.Room``.
    """
    common = _common(keys, new[0].ref.table, election, 0, {})
    return fitting_count((_part(keys, one) for one in new), common)


@frozen
class BeginRefused:
    """Why operations could not begin, as far as the failure branch tells."""

    run_ops: KeyValue | None
    moved: bool
    """runOps is not what was compared."""
    gone: tuple[bool, ...]
    """Of each: its state is not what was compared, or another one holds ``.current``."""


def begin_refused(refused: TxnResult, run_ops_mod: int, new: Sequence[Beginning]) -> BeginRefused:
    """What the failure branch of :func:`begins` read. Where neither runOps nor one of the operations is another, it was
    the election, an edge or a hold.
    """
    run_ops, *rest = [answer.kv if isinstance(answer, GetResult) else None for answer in refused.responses]
    gone = tuple(
        state is None or state.mod_revision != one.state_mod or (one.one_at_a_time and current is not None)
        for one, state, current in zip(new, rest[::2], rest[1::2], strict=True)
    )
    return BeginRefused(run_ops, (run_ops.mod_revision if run_ops is not None else 0) != run_ops_mod, gone)


# ------------------------------------------------------------------------ ends


def end_waiting(
    keys: Keys,
    ref: OperationRef,
    state_mod: int,
    history: History,
    why: Cancel | None,
    *guards: Compare,
    hold: str = "",
) -> Txn:
    """The end of an operation that has not begun: nothing of it runs, so it needs no time to stop, and runOps does not
    count it. Its successors are told, and its keys deleted, as those of any other.

    By whoever cancels it; or, with the election among the ``guards``, by its coordinator: a join, whose predecessors
    have all ended; one whose predecessor failed; one whose hold was denied. ``hold``: that must be gone, and not only
    unknown to the view: as long as it is there, others of the graph are made to wait for this one.
    """
    state = keys.of(ref, "state")
    compares, puts = ending(keys, ref, history, why)
    return Txn(
        (*guards, unchanged(state, state_mod), *compares, *((absent(keys.hold(hold)),) if hold else ())),
        (*puts, *freed(keys, ref, history)),
        (Get(state), Get(keys.history(ref))),
        "join" if why is None else "end_waiting",
    )


def ending(
    keys: Keys, ref: OperationRef, history: History, why: Cancel | None
) -> tuple[tuple[Compare, ...], tuple[Put, ...]]:
    """What is compared, beside the revision of its state, and put, where an operation ends that has not begun."""
    event = Event.JOIN if why is None else Event.END_WAITING
    return (
        (comes_in(keys, ref, event),),
        (
            *(op for op in enters(keys, ref, event, ends=history.state) if isinstance(op, Put)),
            *((Put(keys.of(ref, "cancel"), why.encode()),) if why is not None else ()),
            Put(keys.history(ref), history.encode()),
        ),
    )


def joined(keys: Keys, ref: OperationRef, election: Compare, state_mod: int, history: History, hold: str) -> Txn:
    """The end of an operation that does nothing but wait for others."""
    nobody = none_within(*keys.edges_range(ref, "after"))
    return end_waiting(keys, ref, state_mod, history, None, election, nobody, hold=hold)


# ----------------------------------------------------------------------- holds


def hold(keys: Keys, id_: str, record: Hold, seen_mod: int) -> Txn:
    """Write a hold, or write it again as it was seen (``seen_mod``; 0: it is new)."""
    key = keys.hold(id_)
    return Txn((unchanged(key, seen_mod),), (Put(key, record.encode()),), (Get(key),), "hold")
