"""What happens to operations: one function per event that returns the transaction which makes it happen.

Guards are one-way: a transaction that was refused once can never apply later, so a refused repetition proves that
the first copy is dead (T9). Equality with a mod revision is one-way; "absent" is used only for keys that cannot
come back while the other guards hold; the node key of an incarnation never comes back. Each clause was checked by
exhaustive exploration of a model: leaving one out gave a violation. The failure branch reads who won.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.core.codec import dumps, word
from distop.core.frozen import frozen
from distop.core.model import (
    Attempts,
    Cancel,
    Decision,
    OperationRef,
    Phase,
    Spec,
    State,
)
from distop.core.plan import Gate
from distop.core.txn import Compare, Delete, Get, Operation, Put, Txn, absent, exists, unchanged, value_is

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distop.core.keys import Keys
    from distop.core.plan import Plan

PLAN_BYTES_PER_TXN = 1024 * 1024
CHUNKS_PER_PLAN = 124


# ---------------------------------------------------------------------- start


@frozen
class Counters:
    """runOps and nextInstanceId as they were read, with their mod revisions (0: absent)."""

    run_ops: Mapping[str, int]
    run_ops_mod: int
    next_instance: int
    next_instance_mod: int


def start(
    keys: Keys,
    ref: OperationRef,
    seen: Counters,
    spec: Spec,
    arg: bytes,
    planned: tuple[Plan, Sequence[bytes]] | None = None,
) -> Txn:
    """Submit an operation (I39). With ``planned`` it brings its own plan and opens at once.

    The failure branch reads runOps, nextInstanceId, this instance's spec and history, and ``.current``: the request
    id in the spec or the history tells whether an earlier copy of this transaction won. Raises ValueError where the
    instance is not the next one.
    """
    if ref.instance != seen.next_instance:
        raise ValueError(f"{ref} cannot be started: the next instance is {seen.next_instance}")
    counts = dict(seen.run_ops)
    counts[ref.type] = counts.get(ref.type, 0) + 1
    run_ops, following = keys.run_ops(ref.table), keys.next_instance(ref.table, ref.type)
    current = keys.current(ref.table, ref.type, ref.object)
    compares = [unchanged(run_ops, seen.run_ops_mod), unchanged(following, seen.next_instance_mod)]
    ops: list[Operation] = [
        Put(run_ops, dumps(counts)),
        Put(following, word(str(ref.instance + 1))),
        Put(keys.of(ref, "arg"), arg),
        Put(keys.of(ref, "spec"), spec.encode()),
        Put(keys.of(ref, "state"), word(State.RUNNING)),
    ]
    if spec.one_at_a_time:
        compares.append(absent(current))
        ops.append(Put(current, word(str(ref.instance))))
    if planned is None:
        ops.append(Put(keys.pending(ref), word(Phase.PLANNING)))
    else:
        plan, chunks = planned
        ops += [Put(keys.chunk(ref, n), chunk) for n, chunk in enumerate(chunks)]
        ops += [Put(keys.of(ref, "plan"), plan.encode()), Put(keys.gate(ref), Gate(plan.count).encode())]
    return Txn(
        tuple(compares),
        tuple(ops),
        (Get(run_ops), Get(following), Get(keys.of(ref, "spec")), Get(keys.history(ref)), Get(current)),
        "start",
    )


# ----------------------------------------------------------------------- plan


def write_chunk(keys: Keys, ref: OperationRef, election: Compare, number: int, seen_mod: int, chunk: bytes) -> Txn:
    """One chunk of the plan, before the plan itself. ``seen_mod``: its mod revision as seen (0: absent)."""
    return Txn(
        (
            election,
            value_is(keys.of(ref, "state"), word(State.RUNNING)),
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
) -> Txn:
    """The plan and the gate: claims are allowed from here on.

    ``chunk_mods``: the mod revision of each chunk as written. A small plan brings its ``chunks`` along (each then
    still at its ``chunk_mods``), which is the same as writing them just before. Chunks beyond these, left by a planning
    that died and had more of them, are deleted.
    """
    beyond = Delete(keys.chunk(ref, len(chunk_mods)), keys.chunks_range(ref)[1])
    return Txn(
        (
            election,
            value_is(keys.of(ref, "state"), word(State.RUNNING)),
            absent(keys.of(ref, "plan")),
            absent(keys.of(ref, "decision")),
            *(unchanged(keys.chunk(ref, n), mod) for n, mod in enumerate(chunk_mods)),
        ),
        (
            *(Put(keys.chunk(ref, n), chunk) for n, chunk in enumerate(chunks)),
            Put(keys.of(ref, "plan"), plan.encode()),
            Put(keys.gate(ref), Gate(plan.count).encode()),
            Delete(keys.pending(ref)),
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
            value_is(keys.of(ref, "state"), word(State.RUNNING)),
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
            value_is(keys.of(ref, "state"), word(State.RUNNING)),
            absent(keys.of(ref, "plan")),
            absent(keys.of(ref, "decision")),
        ),
        (Put(keys.of(ref, "decision"), decision.encode()), Put(keys.pending(ref), word(Phase.COMPLETING))),
        (Get(keys.of(ref, "state")),),
        "give_up",
    )


# -------------------------------------------------------------------- commands


def cancel(keys: Keys, ref: OperationRef, state_mod: int, why: Cancel, election: Compare | None = None) -> Txn:
    """Two-phase: no more claims from here on; holders stop, then the coordinator finishes. With ``election`` it is
    the coordinator's own (fail fast).
    """
    return Txn(
        (
            *((election, exists(keys.gate(ref))) if election else ()),
            unchanged(keys.of(ref, "state"), state_mod),
            exists(keys.of(ref, "state")),
            absent(keys.of(ref, "decision")),
            absent(keys.of(ref, "cancel")),
            absent(keys.history(ref)),
        ),
        (
            Put(keys.of(ref, "state"), word(State.CANCELLING)),
            Put(keys.of(ref, "cancel"), why.encode()),
            Delete(keys.gate(ref)),
            Put(keys.pending(ref), word(Phase.CANCELLING)),
        ),
        _who_won(keys, ref),
        "fail_fast" if election else "cancel",
    )


def pause(keys: Keys, ref: OperationRef, state_mod: int, *, now: bool = False, seen: State = State.RUNNING) -> Txn:
    """No more claims until it is resumed. Running jobs finish; with ``now`` they are told to stop, also those of an
    operation that is paused already (``seen``), whose state is written again so that no copy of this applies later.
    """
    if seen is not State.RUNNING and not (now and seen is State.PAUSED):
        raise ValueError(f"{ref} cannot be paused while it is {seen}")
    return Txn(
        (
            unchanged(keys.of(ref, "state"), state_mod),
            value_is(keys.of(ref, "state"), word(seen)),
            absent(keys.of(ref, "decision")),
        ),
        (
            Put(keys.of(ref, "state"), word(State.PAUSED)),
            Delete(keys.gate(ref)),
            Put(keys.pending(ref), word(Phase.HALTED if now else Phase.PAUSED)),
        ),
        _who_won(keys, ref),
        "pause_now" if now else "pause",
    )


def resume(keys: Keys, ref: OperationRef, state_mod: int, planned: bool) -> Txn:
    """Back to where it was paused: open, or planning when it had no plan yet (both are compared)."""
    plan = keys.of(ref, "plan")
    after: tuple[Operation, ...]
    if planned:
        after = (Put(keys.gate(ref), Gate().encode()), Delete(keys.pending(ref)))
    else:
        after = (Put(keys.pending(ref), word(Phase.PLANNING)),)
    return Txn(
        (
            unchanged(keys.of(ref, "state"), state_mod),
            value_is(keys.of(ref, "state"), word(State.PAUSED)),
            exists(plan) if planned else absent(plan),
            absent(keys.of(ref, "decision")),
        ),
        (Put(keys.of(ref, "state"), word(State.RUNNING)), *after),
        _who_won(keys, ref),
        "resume",
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


def election_guard(keys: Keys, table: str, type_name: str, fence: int) -> Compare:
    """ "My election": the guard of every coordinator write (invariant 8)."""
    return unchanged(keys.coordinator(table, type_name), fence)
