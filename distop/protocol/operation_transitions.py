"""Transactions that start, plan, cancel, pause, resume and alter operations.

There is one function per event.

Guards are one-way: a transaction that was refused once can never apply later. So a refused retry proves that the first
copy is dead (T9). Three kinds of guards are one-way:

- A compare with a mod revision.
- "Absent", for a key that cannot come back while the other guards hold.
- The node key of an incarnation: once deleted, it never comes back.

An exhaustive exploration of a model checked each compare: leaving one out gave a violation. The failure branch reads
what the caller needs to learn which transaction won.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distop.protocol.frozen import frozen
from distop.protocol.identity import id_guards, id_put, request_key_put
from distop.protocol.json_codec import dumps, word
from distop.protocol.operation_options import DEFAULT, Options, Terms
from distop.protocol.pending_operations import ending, link
from distop.protocol.plan import Gate
from distop.protocol.records import Attempts, Cancel, Decision, OperationRef, Phase, Spec, State
from distop.protocol.state_tables import Event, Stage, comes_in, enters
from distop.protocol.txn import (
    MAX_OPERATIONS,
    PARCEL,
    Compare,
    Delete,
    Get,
    GetResult,
    Put,
    Txn,
    TxnOperation,
    absent,
    exists,
    is_not,
    none_within,
    parcels,
    unchanged,
    unpacked,
)
from distop.protocol.user_actions import NO_ACTIONS, recorded

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distop.protocol.identity import Takes
    from distop.protocol.keys import Keys
    from distop.protocol.plan import Plan
    from distop.protocol.txn import KeyValue, TxnOperationResult, TxnResult
    from distop.protocol.user_actions import Actions

NO_TERMS = Terms()
NO_REMOVAL = Txn((), ())
START_BYTES_PER_TXN = 1024 * 1024
"""Bytes of keys and values of operations that are started together. A single operation may have more."""
STARTS_PER_TXN = 64
"""Maximum number of operations that one transaction starts.

All starts on a table compete for its counters. So concurrent starts share one transaction. Writes that exceed one list
(T1) go into nested transactions (:func:`parcels`).
"""
STARTS_PER_LIST = 31
"""Maximum number of starts whose writes fit into one list: four keys each, and two counters; fewer with ids."""
PLAN_BYTES_PER_TXN = 1024 * 1024
CHUNKS_PER_PLAN = 123
CHUNKS_WITH_REMOVAL = 121
"""Maximum number of chunks if the plan also removes the table's record, with two compares."""


# ---------------------------------------------------------------------- start


@frozen
class Counters:
    """runOps and nextInstanceId as read, with their mod revisions (0: absent).

    ``table_mod``: the mod revision of the table's record. Pending starts compare it and so are refused if the table was
    removed. Other starts compare runOps, which the removal writes.
    """

    run_ops: Mapping[str, int]
    run_ops_mod: int
    next_instance: int
    next_instance_mod: int
    table_mod: int | None = None


@frozen
class Predecessor:
    """An operation that a new operation waits for.

    ``mod``: the mod revision of its state, read before it ended; 0: the same transaction starts it. ``on``: "success"
    or "end".
    """

    ref: OperationRef
    on: str = "success"
    mod: int = 0


@frozen
class NewOperation:
    """An operation to start.

    With ``planned`` it has its own plan, and its gate opens at once. With ``waits`` it starts as pending: until a time,
    while a hold exists, or until the operations in ``after`` end.
    """

    ref: OperationRef
    spec: Spec
    arg: bytes
    planned: tuple[Plan, Sequence[bytes]] | None = None
    waits: bool = False
    after: tuple[Predecessor, ...] = ()
    options: Options = DEFAULT
    takes: Takes | None = None
    """The id that it takes."""
    value: bytes = b""
    """The encoded spec, if already known."""
    named: bool = False
    """A key of its request id names it (``protocol.identity``)."""

    @property
    def terms(self) -> Terms:
        """The terms that its gate contains."""
        return Terms(self.options, 0, self.spec.where)


def starts(
    keys: Keys,
    seen: Counters,
    new: Sequence[NewOperation],
    *,
    begun: Sequence[Sequence[Put]] | None = None,
    looks: bool = True,
) -> Txn:
    """Start operations of one type on one table, all or none (I39).

    They take the next instance numbers in order. The guards do not depend on their number:

    - nextInstanceId is unchanged. Each start writes it, so an old copy of this transaction stays refused.
    - runOps is unchanged, if at least one operation runs at once. Changing or removing the table writes runOps as well.
    - The table's record is unchanged, if at least one operation starts as pending: pending operations are not in
      runOps.
    - ``.current`` is absent, for each that runs at once and one at a time.
    - The state of each predecessor is unchanged: it has not ended.
    - Each id is free, or held as read (:func:`identity.id_guards`).

    The failure branch reads runOps and nextInstanceId, then the spec, history and ``.current`` of each operation
    (:func:`found_instead`). The request id in the spec or history shows whether an earlier copy of this transaction
    won. ``begun``: :func:`begin_with` of each operation, if already computed. Without ``looks`` the failure branch
    reads only the counters.

    Raises ValueError if the instances are not the next ones, or if two of the operations exclude each other.
    """
    first = new[0].ref
    places = [(one.ref.table, one.ref.type, one.ref.instance) for one in new]
    if places != [(first.table, first.type, seen.next_instance + n) for n in range(len(new))]:
        raise ValueError(
            f"{', '.join(str(one.ref) for one in new)} cannot be started: the next instance is {seen.next_instance}"
        )
    running, waiting = [one for one in new if not one.waits], any(one.waits for one in new)
    alone = [keys.current(first.table, first.type, one.ref.object) for one in running if one.spec.one_at_a_time]
    if len(set(alone)) < len(alone):
        raise ValueError(f"operations that run one at a time cannot be started together: {', '.join(alone)}")
    counts = dict(seen.run_ops)
    counts[first.type] = counts.get(first.type, 0) + len(running)
    run_ops, following = keys.run_ops(first.table), keys.next_instance(first.table, first.type)
    reads: Sequence[TxnOperation] = conflict_reads(keys, [one.ref for one in new]) if looks else []
    puts: Sequence[TxnOperation] = [put for each in (begun or (begin_with(keys, one) for one in new)) for put in each]
    if max(len(puts), len(reads)) > _IN_ONE_LIST:
        puts, reads = parcels(puts), parcels(reads)
    return Txn(
        (
            *((unchanged(run_ops, seen.run_ops_mod),) if running else ()),
            unchanged(following, seen.next_instance_mod),
            *((unchanged(keys.table(first.table), seen.table_mod),) if waiting and seen.table_mod is not None else ()),
            *(absent(current) for current in alone),
            *_predecessor_guards(keys, new),
            *(compare for one in new for compare in _start_id_guards(keys, one)),
        ),
        (
            *((Put(run_ops, dumps(counts)),) if running else ()),
            Put(following, word(str(seen.next_instance + len(new)))),
            *puts,
        ),
        (Get(run_ops), Get(following), *reads),
        "start",
    )


_IN_ONE_LIST = MAX_OPERATIONS - 2
"""Operations in one list beside the two counters."""


def _predecessor_guards(keys: Keys, new: Sequence[NewOperation]) -> list[Compare]:
    """Guards: the states of predecessors are unchanged, so none of them has ended."""
    seen = {pred.ref: pred.mod for one in new for pred in one.after if pred.mod}
    return [unchanged(keys.of(ref, "state"), mod) for ref, mod in sorted(seen.items())]


def _start_id_guards(keys: Keys, one: NewOperation) -> tuple[Compare, ...]:
    """Guards: the operation's id is free, or held as read; the operation that it replaces is still pending."""
    takes = one.takes
    if takes is None:
        return ()
    compares = id_guards(keys, one.ref, takes)
    if takes.replaced is not None and takes.holder is not None:
        compares += ending(keys, takes.holder, *takes.replaced)[0]
    return compares


def begin_with(keys: Keys, one: NewOperation) -> list[Put]:
    """The writes that create an operation.

    They are its own keys, ``.current``, its id and request key, and the end of the operation that it replaces.
    """
    ref, takes = one.ref, one.takes
    puts = [
        *((request_key_put(keys, ref, one.spec),) if one.named else ()),
        *((id_put(keys, ref, takes),) if takes is not None else ()),
        *(ending(keys, takes.holder, *takes.replaced)[1] if takes and takes.holder and takes.replaced else ()),
        Put(keys.of(ref, "arg"), one.arg),
        Put(keys.of(ref, "spec"), one.value or one.spec.encode()),
        *_only_puts(enters(keys, ref, begin_event(one))),
    ]
    if one.options != DEFAULT:
        puts.append(Put(keys.of(ref, "options"), one.options.encode()))
    if one.waits:
        links = [put for pred in one.after for put in link(keys, pred.ref, ref, pred.on)]
        return [*puts, *links]
    if one.spec.one_at_a_time:
        puts.append(Put(keys.current(ref.table, ref.type, ref.object), word(str(ref.instance))))
    if one.planned is None:
        return puts
    plan, chunks = one.planned
    puts += [Put(keys.chunk(ref, n), chunk) for n, chunk in enumerate(chunks)]
    return [*puts, Put(keys.of(ref, "plan"), plan.encode()), Put(keys.gate(ref), gate(one.terms, plan.count))]


def _only_puts(ops: Iterable[Put | Delete]) -> list[Put]:
    """Only the puts: before its first event, an operation has no keys to delete."""
    return [op for op in ops if isinstance(op, Put)]


def begin_event(one: NewOperation) -> Event:
    """The event that starts the operation: as pending, with its own plan, or to be planned."""
    if one.waits:
        return Event.SUBMIT
    return Event.START if one.planned is None else Event.START_PLANNED


def gate(terms: Terms, count: int = 0) -> bytes:
    """The value of a gate."""
    return Gate(count, terms.options, terms.where, terms.beside).encode()


def fitting_starts(
    keys: Keys, new: Sequence[NewOperation], begun: Sequence[Sequence[Put]] | None = None, *, flat: bool = False
) -> int:
    """The number of operations, in order, that one transaction starts; at least one.

    As many as T1 and T2 allow. ``begun`` as in :func:`starts`. ``flat``: without parcels, and with room for one more
    write (of a hold).
    """
    puts, compares, size = int(flat), 3, 0
    behind: set[OperationRef] = set()
    for n, one in enumerate(new):
        written = begun[n] if begun is not None else begin_with(keys, one)
        puts += len(written)
        size += sum([len(put.key) + len(put.value) for put in written])
        behind.update(pred.ref for pred in one.after if pred.mod)
        compares += one.spec.one_at_a_time + len(_start_id_guards(keys, one))
        packed = puts > _IN_ONE_LIST or 3 * (n + 1) > _IN_ONE_LIST
        room = MAX_OPERATIONS - (PARCEL if packed else 0)
        full = n >= STARTS_PER_TXN or size > START_BYTES_PER_TXN or (flat and packed)
        if n and (full or compares + len(behind) > room):
            return n
    return len(new)


def conflict_reads(keys: Keys, refs: Iterable[OperationRef]) -> list[Get]:
    """Reads that show what exists in place of the new operations (:func:`conflicts_in`)."""
    return [
        Get(key)
        for ref in refs
        for key in (keys.of(ref, "spec"), keys.history(ref), keys.current(ref.table, ref.type, ref.object))
    ]


@frozen
class FoundInstead:
    """What a refused start found at the keys of one new operation."""

    spec: KeyValue | None
    history: KeyValue | None
    current: KeyValue | None


def found_instead(refused: TxnResult) -> list[FoundInstead]:
    """What the failure branch of :func:`starts` read for each operation, in order."""
    return conflicts_in(unpacked(refused.responses[2:]))


def conflicts_in(answers: Iterable[TxnOperationResult]) -> list[FoundInstead]:
    """The answers to the reads of :func:`conflict_reads`, for each operation."""
    found = [answer.kv if isinstance(answer, GetResult) else None for answer in answers]
    return [FoundInstead(*found[n : n + 3]) for n in range(0, len(found), 3)]


# ----------------------------------------------------------------------- plan


def write_chunk(keys: Keys, ref: OperationRef, election: Compare, number: int, seen_mod: int, chunk: bytes) -> Txn:
    """Write one chunk of a plan, before the plan itself.

    Guards: my election; the operation is being planned and has no plan and no decision; the chunk is unchanged
    (``seen_mod``: its mod revision as read, 0: absent), so a late copy does not replace a newer chunk.
    """
    return Txn(
        (
            election,
            comes_in(keys, ref, Event.PLAN),
            absent(keys.of(ref, "plan")),
            absent(keys.of(ref, "decision")),
            unchanged(keys.chunk(ref, number), seen_mod),
        ),
        (Put(keys.chunk(ref, number), chunk),),
        (Get(keys.chunk(ref, number)),),
        "chunk",
    )


def write_plan(
    keys: Keys,
    ref: OperationRef,
    election: Compare,
    plan: Plan,
    chunk_mods: Sequence[int],
    chunks: Sequence[bytes] = (),
    terms: Terms = NO_TERMS,
    removal: Txn = NO_REMOVAL,
) -> Txn:
    """Write the plan of an operation and open its gate.

    Jobs can be claimed from here on. The gate contains the options. ``chunk_mods``: the mod revision of each chunk as
    written. A small plan includes its ``chunks``, each compared with its ``chunk_mods``; this equals writing them just
    before. Chunks beyond these are deleted: a coordinator that died while planning may have left them. ``removal``: of
    the table's record (``table_registry.removal``), which is removed only together with a durable plan.

    Guards: my election; the operation is being planned and has no plan and no decision; the options are unchanged, so
    the gate contains the current ones; each chunk is unchanged; those of the removal.
    """
    beyond = Delete(keys.chunk(ref, len(chunk_mods)), keys.chunks_range(ref)[1])
    return Txn(
        (
            election,
            comes_in(keys, ref, Event.PLAN),
            absent(keys.of(ref, "plan")),
            absent(keys.of(ref, "decision")),
            unchanged(keys.of(ref, "options"), terms.mod),
            *(unchanged(keys.chunk(ref, n), mod) for n, mod in enumerate(chunk_mods)),
            *removal.compares,
        ),
        (
            *(Put(keys.chunk(ref, n), chunk) for n, chunk in enumerate(chunks)),
            Put(keys.of(ref, "plan"), plan.encode()),
            Put(keys.gate(ref), gate(terms, plan.count)),
            *enters(keys, ref, Event.PLAN),
            Delete(keys.of(ref, "planning")),
            beyond,
            *removal.success,
        ),
        (Get(keys.of(ref, "plan")), Get(keys.of(ref, "state"))),
        "plan",
    )


def plan_attempt(keys: Keys, ref: OperationRef, election: Compare, seen_mod: int, attempts: Attempts) -> Txn:
    """Count a planning attempt that ended with an unexpected error.

    Guards: my election; the operation is being planned and has no plan and no decision; the counter is unchanged.
    """
    return Txn(
        (
            election,
            comes_in(keys, ref, Event.PLAN),
            absent(keys.of(ref, "plan")),
            absent(keys.of(ref, "decision")),
            unchanged(keys.of(ref, "planning"), seen_mod),
        ),
        (Put(keys.of(ref, "planning"), attempts.encode()),),
        (Get(keys.of(ref, "planning")),),
        "plan_attempt",
    )


def give_up(keys: Keys, ref: OperationRef, election: Compare, state_mod: int, decision: Decision) -> Txn:
    """Decide an operation as failed because no plan can be made.

    Guards: my election; the state is unchanged and planning; no plan and no decision exist.
    """
    return Txn(
        (
            election,
            unchanged(keys.of(ref, "state"), state_mod),
            comes_in(keys, ref, Event.PLAN),
            absent(keys.of(ref, "plan")),
            absent(keys.of(ref, "decision")),
        ),
        (Put(keys.of(ref, "decision"), decision.encode()), *enters(keys, ref, Event.GIVE_UP)),
        (Get(keys.of(ref, "state")),),
        "give_up",
    )


# -------------------------------------------------------------------- commands


def cancel(keys: Keys, ref: OperationRef, state_mod: int, why: Cancel, election: Compare | None = None) -> Txn:
    """Cancel an operation, phase one of two: the gate closes.

    No job is claimed from here on. Holders then stop their jobs, and the coordinator finishes the operation.

    Guards of a person's cancel: the state is unchanged and not pending; no decision, no cancel and no history record
    exist. With ``election`` the coordinator cancels (fail fast). Guards: the state is unchanged; my election; the gate
    exists, which implies that the operation runs and is neither cancelled nor decided.
    """
    goes_on = (
        is_not(keys.of(ref, "state"), word(State.PENDING)),
        absent(keys.of(ref, "decision")),
        absent(keys.of(ref, "cancel")),
        absent(keys.history(ref)),
    )
    return Txn(
        (
            unchanged(keys.of(ref, "state"), state_mod),
            *((election, exists(keys.gate(ref))) if election else goes_on),
        ),
        (
            Put(keys.of(ref, "cancel"), why.encode()),
            *enters(keys, ref, Event.FAIL_FAST if election else Event.CANCEL),
        ),
        _conflict_reads(keys, ref),
        "fail_fast" if election else "cancel",
    )


def _action_writes(keys: Keys, ref: OperationRef, actions: Actions) -> tuple[Put, ...]:
    """The write of the operation's recorded actions, including the current one.

    Each transaction that writes them also writes the state and compares its revision. So no recorded action is
    overwritten, and an end that has not seen an action is refused.
    """
    return recorded(keys.of(ref, "actions"), actions)


def pause(
    keys: Keys,
    ref: OperationRef,
    state_mod: int,
    *,
    now: bool = False,
    seen: State = State.RUNNING,
    actions: Actions = NO_ACTIONS,
) -> Txn:
    """Pause an operation: no job is claimed until it is resumed. Running jobs finish.

    With ``now`` running jobs are told to stop, also those of an operation that is already paused (``seen``). Its state
    is then written again, so that no copy of this transaction applies later.

    Guards: the state is unchanged and allows the event; no decision exists.
    """
    event = Event.PAUSE_NOW if now else Event.PAUSE
    return Txn(
        (
            unchanged(keys.of(ref, "state"), state_mod),
            comes_in(keys, ref, event, seen),
            absent(keys.of(ref, "decision")),
        ),
        (
            *enters(keys, ref, event, phase=Phase.HALTED if now else None),
            *_action_writes(keys, ref, actions),
        ),
        _conflict_reads(keys, ref),
        "pause_now" if now else "pause",
    )


def resume(
    keys: Keys,
    ref: OperationRef,
    state_mod: int,
    planned: bool,
    terms: Terms = NO_TERMS,
    actions: Actions = NO_ACTIONS,
) -> Txn:
    """Resume a paused operation: it is open again, or being planned if it had no plan.

    Guards: the state is unchanged and paused; the plan exists or not, as the caller saw; no decision exists.
    """
    plan = keys.of(ref, "plan")
    stage = Stage.OPEN if planned else Stage.PLANNING
    return Txn(
        (
            unchanged(keys.of(ref, "state"), state_mod),
            comes_in(keys, ref, Event.RESUME),
            exists(plan) if planned else absent(plan),
            absent(keys.of(ref, "decision")),
        ),
        (
            *((Put(keys.gate(ref), gate(terms)),) if planned else ()),
            *enters(keys, ref, Event.RESUME, stage),
            *_action_writes(keys, ref, actions),
        ),
        _conflict_reads(keys, ref),
        "resume",
    )


def alter(
    keys: Keys,
    ref: OperationRef,
    state: State,
    state_mod: int,
    new: Options,
    opened: tuple[Gate, int] | None,
    actions: Actions = NO_ACTIONS,
) -> Txn:
    """Change the options of an operation.

    ``opened``: the gate and its mod revision, if the gate is open. The gate is written again, so that a claim based on
    the former options is refused. The state is also written again, so that an end that has not seen this action is
    refused.

    Guards: the state is unchanged and allows the event; no decision exists; the gate is unchanged or still absent.
    """
    written, mod = opened if opened is not None else (None, 0)
    again = (Put(keys.gate(ref), replace(written, options=new).encode()),) if written is not None else ()
    return Txn(
        (
            unchanged(keys.of(ref, "state"), state_mod),
            comes_in(keys, ref, Event.ALTER, state),
            absent(keys.of(ref, "decision")),
            unchanged(keys.gate(ref), mod),
        ),
        (
            Put(keys.of(ref, "state"), word(state)),
            Put(keys.of(ref, "options"), new.encode()),
            *again,
            *_action_writes(keys, ref, actions),
        ),
        _conflict_reads(keys, ref),
        "alter",
    )


def _conflict_reads(keys: Keys, ref: OperationRef) -> tuple[TxnOperation, ...]:
    """Reads that show which other transaction won."""
    return (Get(keys.of(ref, "state")), Get(keys.of(ref, "decision")), Get(keys.of(ref, "cancel")))


# -------------------------------------------------------------------- election


def elect(keys: Keys, table: str, type_name: str, incarnation: str, seen_mod: int, holder: str) -> Txn:
    """Become the coordinator of a type on a table.

    The mod revision of the election key is the fence of all coordinator writes. Guards: the key is absent (``seen_mod``
    0), or unchanged and the node key of its incarnation is absent; my node key exists.
    """
    key = keys.coordinator(table, type_name)
    gone = (absent(keys.node(holder)),) if seen_mod else ()
    return Txn(
        (unchanged(key, seen_mod), *gone, exists(keys.node(incarnation))),
        (Put(key, word(incarnation)),),
        (Get(key), Get(keys.node(incarnation))),
        "elect",
    )


def resign(keys: Keys, table: str, type_name: str, fence: int) -> Txn:
    """Resign as coordinator. Guard: the election is still mine."""
    key = keys.coordinator(table, type_name)
    return Txn((unchanged(key, fence),), (Delete(key),), (), "resign")


def drop_stray(keys: Keys, ref: OperationRef) -> Txn:
    """Delete a pending key whose operation has no other key.

    A submitter wrote it by hand. Guard: no key of the operation exists. A refusal means that the operation exists.
    """
    key = keys.pending(ref)
    return Txn((none_within(*keys.own_range(ref)),), (Delete(key),), (Get(key),), "stray")


def election_guard(keys: Keys, table: str, type_name: str, fence: int) -> Compare:
    """Guard "my election": the guard of every coordinator write (invariant 8)."""
    return unchanged(keys.coordinator(table, type_name), fence)
