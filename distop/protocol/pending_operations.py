"""Transactions of pending operations; one function per event.

They wait for a time, for others, for a hold, or for conflicting types. ``protocol.operation_transitions`` explains
one-way guards.

A pending operation has the state ``pending`` and is not in runOps. It waits for another operation by an *edge*. An edge
is two keys: ``<root>.after.<edge>`` of the successor and ``<root>.next.<edge>`` of the predecessor. When the
predecessor has ended, its coordinator deletes both. So a wide join is many separate keys, and no key is written by all
predecessors.

Both operations determine the name of the edge (``identity.edge_id``). An edge never comes back: no operation starts to
wait for one that has ended. An exhaustive exploration of a model checked the compares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.errors import InvalidArgument
from distop.protocol.dependencies import Edge
from distop.protocol.frozen import frozen
from distop.protocol.identity import edge_id, id_releases
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
    Put,
    Txn,
    TxnOperation,
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
"""Maximum number of operations that one transaction begins: four compares each, the election and runOps (T1)."""
ENDS_PER_TXN = 31
"""Maximum number of pending operations that one transaction ends."""
SIGNALS_PER_TXN = 60
"""Maximum number of edges that one transaction deletes: two keys each (T1)."""
SEEN_PER_TXN = 60
"""Maximum number of states that new edges compare: both ends, and all direct and indirect predecessors."""


# ----------------------------------------------------------------------- links


def link(keys: Keys, before: OperationRef, after: OperationRef, on: str) -> tuple[Put, Put]:
    """The two keys of an edge. ``on``: "success", or "end" (any terminal state)."""
    edge = edge_id(before, after)
    return (
        Put(keys.edge(after, "after", edge), Edge(str(before), on).encode()),
        Put(keys.edge(before, "next", edge), Edge(str(after), on).encode()),
    )


@frozen
class SeenState:
    """An operation's state as read, with its mod revision."""

    ref: OperationRef
    state: State
    mod: int


def add_dependencies(keys: Keys, links: Sequence[tuple[SeenState, SeenState, str]], above: Sequence[SeenState]) -> Txn:
    """Let pending operations wait for more predecessors (L26), all or none.

    ``links``: (predecessor, successor, ``on``). ``above``: all direct and indirect predecessors of the new
    predecessors; no successor is among them, so there is no cycle. A concurrent new edge could still close one. It
    writes the state of its successor again, and this transaction compares the state of each operation in ``above``. So
    one of the two is refused.

    Guards: each successor is pending; the states of all these operations are unchanged.
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
    """Signal an ended operation's result to its successors, and delete their edges.

    The edges of successors that may continue are deleted. In the edges of the others the failure is recorded; their own
    coordinator ends them. ``links``: edge → value of its ``next`` key. Signals of several operations are grouped
    (``protocol.job_transitions.group``).

    An edge whose name does not match this operation and the one in its value was written by hand. It is only deleted.
    Otherwise it could reach an operation that does not wait for this one, on any table.

    Guards: the state is unchanged; my election; the phase is cleaning.
    """
    ops: list[TxnOperation] = []
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
    """The operation that waits for ``ref`` by this edge; None if the edge names none."""
    try:
        successor = OperationRef.parse(link.op)
    except InvalidArgument:
        return None
    return successor if edge == edge_id(ref, successor) else None


# ----------------------------------------------------------------------- begin


@frozen
class Beginning:
    """A pending operation to begin. ``planned``: it has its own plan, and its gate opens at once."""

    ref: OperationRef
    state_mod: int
    one_at_a_time: bool
    hold: str = ""
    planned: tuple[Plan, Sequence[bytes]] | None = None
    terms: Terms = Terms()


def begins(
    keys: Keys, election: Compare, run_ops: Mapping[str, int], run_ops_mod: int, new: Sequence[Beginning]
) -> Txn:
    """Begin pending operations of one type on one table, all or none.

    Guards: my election; runOps is unchanged, so no conflicting type has started. Of each operation: the state is
    unchanged and pending; it has no predecessor left; its hold is absent; ``.current`` is absent, if it runs one at a
    time.

    The failure branch reads runOps, then the state and ``.current`` of each operation (:func:`begin_refused`).
    """
    first = new[0].ref
    counts = dict(run_ops)
    counts[first.type] = counts.get(first.type, 0) + len(new)
    common = _common(keys, first.table, election, run_ops_mod, counts)
    return merged([_part(keys, one) for one in new], common)


def _common(keys: Keys, table: str, election: Compare, run_ops_mod: int, counts: Mapping[str, int]) -> Txn:
    """The shared part of a begin: what it compares, writes and reads once for all operations."""
    run_ops = keys.run_ops(table)
    return Txn((election, unchanged(run_ops, run_ops_mod)), (Put(run_ops, dumps(counts)),), (Get(run_ops),), "begin")


def _part(keys: Keys, one: Beginning) -> Txn:
    """The part of one operation in a begin of several."""
    ref = one.ref
    reads = (Get(keys.of(ref, "state")), Get(keys.current(ref.table, ref.type, ref.object)))
    return Txn(tuple(_begin_guards(keys, one)), tuple(_begin_writes(keys, one)), reads)


def _begin_guards(keys: Keys, one: Beginning) -> list[Compare]:
    """Guards of one operation that begins: nothing is left to wait for."""
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


def _begin_writes(keys: Keys, one: Beginning) -> list[Put | Delete]:
    """The writes of one operation that begins."""
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


def fitting_begins(keys: Keys, election: Compare, new: Sequence[Beginning]) -> int:
    """The number of operations, in order, that begin in one transaction; at least one.

    See ``transaction_groups.Room``.
    """
    common = _common(keys, new[0].ref.table, election, 0, {})
    return fitting_count((_part(keys, one) for one in new), common)


@frozen
class BeginRefused:
    """Why operations could not begin, as far as the failure branch shows."""

    run_ops: KeyValue | None
    moved: bool
    """runOps has changed."""
    gone: tuple[bool, ...]
    """For each operation: its state has changed, or another operation holds ``.current``."""


def begin_refused(refused: TxnResult, run_ops_mod: int, new: Sequence[Beginning]) -> BeginRefused:
    """What the failure branch of :func:`begins` read.

    If neither runOps nor an operation has changed, the cause was the election, an edge or a hold.
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
    """End a pending operation.

    None of its jobs runs and runOps does not count it, so nothing has to stop first. Its successors are signalled and
    its keys are deleted as usual. A person's cancel ends it; or the coordinator, with the election among the
    ``guards``: a join whose predecessors have all ended, an operation whose predecessor failed, or one whose hold was
    denied.

    ``hold``: must be absent in etcd, not only in the view. While it exists, more operations of the graph may be added
    as predecessors.

    Guards: the state is unchanged and pending; the hold is absent; ``guards``.
    """
    state = keys.of(ref, "state")
    compares, puts = ending(keys, ref, history, why)
    return Txn(
        (*guards, unchanged(state, state_mod), *compares, *((absent(keys.hold(hold)),) if hold else ())),
        (*puts, *id_releases(keys, ref, history)),
        (Get(state), Get(keys.history(ref))),
        "join" if why is None else "end_waiting",
    )


def ending(
    keys: Keys, ref: OperationRef, history: History, why: Cancel | None
) -> tuple[tuple[Compare, ...], tuple[Put, ...]]:
    """The compares, beside the state's revision, and the puts that end a pending operation."""
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
    """End an operation that only waits for others.

    Guards, besides those of :func:`end_waiting`: my election; no predecessor is left.
    """
    nobody = none_within(*keys.edges_range(ref, "after"))
    return end_waiting(keys, ref, state_mod, history, None, election, nobody, hold=hold)


# ----------------------------------------------------------------------- holds


def hold(keys: Keys, id_: str, record: Hold, seen_mod: int) -> Txn:
    """Write a hold. Guard: it is unchanged (``seen_mod``: its mod revision as read, 0: it is new)."""
    key = keys.hold(id_)
    return Txn((unchanged(key, seen_mod),), (Put(key, record.encode()),), (Get(key),), "hold")
