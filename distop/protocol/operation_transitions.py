"""What happens to operations: one function per event that returns the transaction which makes it happen.

Guards are one-way: a transaction that was refused once can never apply later, so a refused repetition proves that
the first copy is dead (T9). Equality with a mod revision is one-way; "absent" is used only for keys that cannot
come back while the other guards hold; the node key of an incarnation never comes back. Each clause was checked by
exhaustive exploration of a model: leaving one out gave a violation. The failure branch reads who won.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distop.protocol.frozen import frozen
from distop.protocol.identity import free_for, noted, taken
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
    Operation,
    Put,
    Txn,
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
    from distop.protocol.txn import KeyValue, Result, TxnResult
    from distop.protocol.user_actions import Actions

NOTHING_SAID = Terms()
START_BYTES_PER_TXN = 1024 * 1024
"""Of keys and values of operations that are started together; one alone may have more."""
STARTS_PER_TXN = 64
"""Operations that one transaction starts at most. All starts on a table take turns at its counters, so as many as ask
for it at a time share one turn: what is more than a list takes (T1) goes in parcels.
"""
STARTS_PER_LIST = 31
"""As many as one list takes at most: four keys of each, and the two counters; fewer with ids."""
PLAN_BYTES_PER_TXN = 1024 * 1024
CHUNKS_PER_PLAN = 123


# ---------------------------------------------------------------------- start


@frozen
class Counters:
    """runOps and nextInstanceId as they were read, with their mod revisions (0: absent); ``table_mod``: of the table's
    record, by which those that wait are refused where it was removed meanwhile, as the others are by runOps.
    """

    run_ops: Mapping[str, int]
    run_ops_mod: int
    next_instance: int
    next_instance_mod: int
    table_mod: int | None = None


@frozen
class Predecessor:
    """An operation that another one shall wait for. ``mod``: of its state, as it was read before it had ended; 0: it is
    started in the same transaction. ``on``: "success" or "end".
    """

    ref: OperationRef
    on: str = "success"
    mod: int = 0


@frozen
class NewOperation:
    """An operation that is to be started. With ``planned`` it brings its own plan and opens at once; with ``waits`` it
    has to wait, for a time, for a hold, or ``after`` others.
    """

    ref: OperationRef
    spec: Spec
    arg: bytes
    planned: tuple[Plan, Sequence[bytes]] | None = None
    waits: bool = False
    after: tuple[Predecessor, ...] = ()
    options: Options = DEFAULT
    takes: Takes | None = None
    """Its id."""
    value: bytes = b""
    """Of the spec's key, where it is known already."""
    named: bool = False
    """It is to be found by a key of its request id (``protocol.identity``)."""

    @property
    def terms(self) -> Terms:
        """What its gate says."""
        return Terms(self.options, 0, self.spec.where)


def starts(
    keys: Keys,
    seen: Counters,
    new: Sequence[NewOperation],
    *,
    begun: Sequence[Sequence[Put]] | None = None,
    looks: bool = True,
) -> Txn:
    """Submit operations of one type on one table, all or none (I39). They take the next numbers in their order, and
    what is guarded is the same however many they are: both counters as they were read; runOps only where one of them is
    to run at once, and the table's record where one waits, which is removed under the guard of runOps. Those that wait
    for others are guarded by these as well: they have not ended.

    The failure branch reads runOps and nextInstanceId, then of each operation its spec, its history and ``.current``
    (:func:`found_instead`): the request id in the spec or the history tells whether an earlier copy of this
    transaction won. ``begun``: :func:`begin_with` of each, where it is known already; not ``looks``: the failure
    branch reads the counters alone. Raises ValueError where the instances are not the next ones, or two of them exclude
    each other.
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
    reads: Sequence[Operation] = instead_of(keys, [one.ref for one in new]) if looks else []
    puts: Sequence[Operation] = [put for each in (begun or (begin_with(keys, one) for one in new)) for put in each]
    if max(len(puts), len(reads)) > _IN_ONE_LIST:
        puts, reads = parcels(puts), parcels(reads)
    return Txn(
        (
            *((unchanged(run_ops, seen.run_ops_mod),) if running else ()),
            unchanged(following, seen.next_instance_mod),
            *((unchanged(keys.table(first.table), seen.table_mod),) if waiting and seen.table_mod is not None else ()),
            *(absent(current) for current in alone),
            *_not_ended(keys, new),
            *(compare for one in new for compare in _free_for(keys, one)),
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
"""Operations beside the two counters."""


def _not_ended(keys: Keys, new: Sequence[NewOperation]) -> list[Compare]:
    """Those that others wait for, as they were read."""
    seen = {pred.ref: pred.mod for one in new for pred in one.after if pred.mod}
    return [unchanged(keys.of(ref, "state"), mod) for ref, mod in sorted(seen.items())]


def _free_for(keys: Keys, one: NewOperation) -> tuple[Compare, ...]:
    """Its id is free, or held as it was seen; whom it replaces has not begun."""
    takes = one.takes
    if takes is None:
        return ()
    compares = free_for(keys, one.ref, takes)
    if takes.replaced is not None and takes.holder is not None:
        compares += ending(keys, takes.holder, *takes.replaced)[0]
    return compares


def begin_with(keys: Keys, one: NewOperation) -> list[Put]:
    """What an operation begins with; these keys are its own, but for ``.current``, its id, and whom it replaces."""
    ref, takes = one.ref, one.takes
    puts = [
        *((noted(keys, ref, one.spec),) if one.named else ()),
        *((taken(keys, ref, takes),) if takes is not None else ()),
        *(ending(keys, takes.holder, *takes.replaced)[1] if takes and takes.holder and takes.replaced else ()),
        Put(keys.of(ref, "arg"), one.arg),
        Put(keys.of(ref, "spec"), one.value or one.spec.encode()),
        *_puts(enters(keys, ref, begin_event(one))),
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


def _puts(ops: Iterable[Put | Delete]) -> list[Put]:
    """Nothing is there to delete before the first event of an operation."""
    return [op for op in ops if isinstance(op, Put)]


def begin_event(one: NewOperation) -> Event:
    """How an operation is started: to wait, with its own plan, or to be planned."""
    if one.waits:
        return Event.SUBMIT
    return Event.START if one.planned is None else Event.START_PLANNED


def gate(terms: Terms, count: int = 0) -> bytes:
    """The value of a gate."""
    return Gate(count, terms.options, terms.where, terms.beside).encode()


def start_together(
    keys: Keys, new: Sequence[NewOperation], begun: Sequence[Sequence[Put]] | None = None, *, flat: bool = False
) -> int:
    """How many of these, from the first one on, one transaction starts: as many as etcd takes (T1, T2), and one at
    least. ``begun`` as in :func:`starts`; ``flat``: without parcels, and with room for one write more (of a hold).
    """
    puts, compares, size = int(flat), 3, 0
    behind: set[OperationRef] = set()
    for n, one in enumerate(new):
        written = begun[n] if begun is not None else begin_with(keys, one)
        puts += len(written)
        size += sum([len(put.key) + len(put.value) for put in written])
        behind.update(pred.ref for pred in one.after if pred.mod)
        compares += one.spec.one_at_a_time + len(_free_for(keys, one))
        packed = puts > _IN_ONE_LIST or 3 * (n + 1) > _IN_ONE_LIST
        room = MAX_OPERATIONS - (PARCEL if packed else 0)
        full = n >= STARTS_PER_TXN or size > START_BYTES_PER_TXN or (flat and packed)
        if n and (full or compares + len(behind) > room):
            return n
    return len(new)


def instead_of(keys: Keys, refs: Iterable[OperationRef]) -> list[Get]:
    """What tells, of operations that were to begin, what is there instead (:func:`found_in`)."""
    return [
        Get(key)
        for ref in refs
        for key in (keys.of(ref, "spec"), keys.history(ref), keys.current(ref.table, ref.type, ref.object))
    ]


@frozen
class FoundInstead:
    """What a start that was refused found where its operation was to begin."""

    spec: KeyValue | None
    history: KeyValue | None
    current: KeyValue | None


def found_instead(refused: TxnResult) -> list[FoundInstead]:
    """What the failure branch of :func:`starts` read, for each operation in its order."""
    return found_in(unpacked(refused.responses[2:]))


def found_in(answers: Iterable[Result]) -> list[FoundInstead]:
    """What :func:`instead_of` read."""
    found = [answer.kv if isinstance(answer, GetResult) else None for answer in answers]
    return [FoundInstead(*found[n : n + 3]) for n in range(0, len(found), 3)]


# ----------------------------------------------------------------------- plan


def write_chunk(keys: Keys, ref: OperationRef, election: Compare, number: int, seen_mod: int, chunk: bytes) -> Txn:
    """One chunk of the plan, before the plan itself. ``seen_mod``: its mod revision as seen (0: absent)."""
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
    terms: Terms = NOTHING_SAID,
) -> Txn:
    """The plan and the gate, which says what the options say: claims are allowed from here on.

    ``chunk_mods``: the mod revision of each chunk as written. A small plan brings its ``chunks`` along (each then
    still at its ``chunk_mods``), which is the same as writing them just before. Chunks beyond these, left by a planning
    that died and had more of them, are deleted.
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
        ),
        (
            *(Put(keys.chunk(ref, n), chunk) for n, chunk in enumerate(chunks)),
            Put(keys.of(ref, "plan"), plan.encode()),
            Put(keys.gate(ref), gate(terms, plan.count)),
            *enters(keys, ref, Event.PLAN),
            Delete(keys.of(ref, "planning")),
            beyond,
        ),
        (Get(keys.of(ref, "plan")), Get(keys.of(ref, "state"))),
        "plan",
    )


def plan_attempt(keys: Keys, ref: OperationRef, election: Compare, seen_mod: int, attempts: Attempts) -> Txn:
    """Count an attempt to plan that ended in an unexpected error."""
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
    """No plan can be made: the operation is decided as failed without one."""
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
    """Two-phase: no more claims from here on; holders stop, then the coordinator finishes. With ``election`` it is
    the coordinator's own (fail fast), of what has an open gate: that runs, and is neither cancelled nor decided.
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
        _who_won(keys, ref),
        "fail_fast" if election else "cancel",
    )


def _recorded(keys: Keys, ref: OperationRef, actions: Actions) -> tuple[Put, ...]:
    """Who did what to an operation, with what is done now. Whatever writes that writes the state as well, and compares
    its revision: so nothing that was recorded is overwritten, and no end leaves out what it does not know of.
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
    """No more claims until it is resumed. Running jobs finish; with ``now`` they are told to stop, also those of an
    operation that is paused already (``seen``), whose state is written again so that no copy of this applies later.
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
            *_recorded(keys, ref, actions),
        ),
        _who_won(keys, ref),
        "pause_now" if now else "pause",
    )


def resume(
    keys: Keys,
    ref: OperationRef,
    state_mod: int,
    planned: bool,
    terms: Terms = NOTHING_SAID,
    actions: Actions = NO_ACTIONS,
) -> Txn:
    """Back to where it was paused: open, or planning when it had no plan yet (both are compared)."""
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
            *_recorded(keys, ref, actions),
        ),
        _who_won(keys, ref),
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
    """Change the options. ``opened``: the gate with its mod revision, where it is open: it is written again, so that a
    claim that was decided by the former ones is refused. The state is written again as well: an end that does not know
    of this action is refused.
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
            *_recorded(keys, ref, actions),
        ),
        _who_won(keys, ref),
        "alter",
    )


def _who_won(keys: Keys, ref: OperationRef) -> tuple[Operation, ...]:
    return (Get(keys.of(ref, "state")), Get(keys.of(ref, "decision")), Get(keys.of(ref, "cancel")))


# -------------------------------------------------------------------- election


def elect(keys: Keys, table: str, type_name: str, incarnation: str, seen_mod: int, holder: str) -> Txn:
    """Become the coordinator of a type on a table: the key is absent (``seen_mod`` 0), or unchanged with its
    incarnation gone. Its mod revision is the fence in every coordinator write.
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
    """Give up the election, if it is still held."""
    key = keys.coordinator(table, type_name)
    return Txn((unchanged(key, fence),), (Delete(key),), (), "resign")


def drop_stray(keys: Keys, ref: OperationRef) -> Txn:
    """Delete the pending key of an operation that has no record of its own: a submitter wrote the key by hand. Refused:
    the operation exists.
    """
    key = keys.pending(ref)
    return Txn((none_within(*keys.own_range(ref)),), (Delete(key),), (Get(key),), "stray")


def election_guard(keys: Keys, table: str, type_name: str, fence: int) -> Compare:
    """ "My election": the guard of every coordinator write (invariant 8)."""
    return unchanged(keys.coordinator(table, type_name), fence)
