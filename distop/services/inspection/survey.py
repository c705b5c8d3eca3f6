"""Lists and counts the open operations, filtered, by type and state (lakeFS L27).

Only the keys of open operations are read, in pages, never the history.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.clock import time
from distop.errors import UnreadableRecord
from distop.protocol import keys as K
from distop.protocol import table_registry
from distop.protocol.frozen import frozen
from distop.protocol.json_codec import parse_time
from distop.protocol.operation_labels import has
from distop.protocol.record_reading import read, word
from distop.protocol.records import Phase, Spec, State
from distop.protocol.txn import Get
from distop.services.readable_records import left_out

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Mapping, Sequence

    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef
    from distop.protocol.txn import KeyValue
    from distop.store.client import EtcdClient

_AT_ONCE = 40
"""Maximum operations in one read transaction, with up to three reads each (T1)."""


@frozen
class Filter:
    """The filters of a list of open operations; None or empty: all. ``states`` excludes those of ended operations."""

    table: str | None = None
    type: str | None = None
    states: frozenset[State] | None = None
    labels: Mapping[str, str] | None = None


@frozen
class Open:
    """An operation that has not ended.

    ``created``: the revision of its start. ``waits``: it has not started yet, or it is open and none of its jobs is
    claimed.
    """

    ref: OperationRef
    state: State
    created: int
    waits: bool


@frozen
class Count:
    """How many operations of a type are in a state.

    ``waiting``: how many of them no executor works on: they wait for their start time or for other operations, are
    being planned, or have no claimed job. ``oldest_waiting``: the age of the oldest waiting one in seconds, by the
    clocks of its submitter and of this client; None if none waits.
    """

    type: str
    state: str
    operations: int
    waiting: int
    oldest_waiting: float | None

    def to_json(self) -> dict[str, Any]:
        """The fields for ``--json``."""
        oldest = None if self.oldest_waiting is None else round(self.oldest_waiting, 3)
        return {
            "type": self.type,
            "state": self.state,
            "operations": self.operations,
            "waiting": self.waiting,
            "oldest_waiting_seconds": oldest,
        }


async def survey(etcd: EtcdClient, keys: Keys, wanted: Filter) -> AsyncIterator[Open]:
    """The matching open operations, by name. One with an unreadable record is skipped and logged."""
    phases = await _listed(etcd, keys, wanted)
    refs = sorted(phases)
    for n in range(0, len(refs), _AT_ONCE):
        page = refs[n : n + _AT_ONCE]
        gets = [
            get
            for ref in page
            for get in (
                Get(keys.of(ref, "state")),
                Get(*keys.claims_range(ref), limit=1, count_only=True),
                *((Get(keys.of(ref, "spec")),) if wanted.labels else ()),
            )
        ]
        answers = await etcd.read(*gets)
        size = len(gets) // len(page)
        for m, ref in enumerate(page):
            state, claims, *spec = answers[m * size : (m + 1) * size]
            try:
                found = _judge(ref, phases[ref], state.kv, claims.count, [one.kv for one in spec], wanted)
            except UnreadableRecord as error:
                left_out(etcd, error)
                continue
            if found is not None:
                yield found


async def open_operations(etcd: EtcdClient, keys: Keys) -> frozenset[OperationRef]:
    """The open operations of all tables."""
    return frozenset(await _listed(etcd, keys, Filter()))


async def _listed(etcd: EtcdClient, keys: Keys, wanted: Filter) -> dict[OperationRef, bytes | None]:
    """The open operations, each with its pending phase, or None if it has a gate.

    Both are read at one revision, because an operation moves from one to the other.
    """
    if wanted.table is not None and wanted.type is not None:
        ranges = [table_registry.type_family(keys, family, wanted.table, wanted.type) for family in (K.OPEN, K.PENDING)]
    else:
        ranges = [table_registry.table_family(keys, family, wanted.table) for family in (K.OPEN, K.PENDING)]
    gates, pending = await etcd.read(Get(*ranges[0], keys_only=True), Get(*ranges[1]))
    found: dict[OperationRef, bytes | None] = dict.fromkeys(table_registry.refs(keys, gates.kvs))
    for kv in pending.kvs:
        if kv.value != Phase.CLEANING.encode():
            found |= dict.fromkeys(table_registry.refs(keys, [kv]), kv.value)
    return {ref: phase for ref, phase in found.items() if wanted.type in (None, ref.type)}


def _judge(
    ref: OperationRef,
    phase: bytes | None,
    state: KeyValue | None,
    claims: int,
    spec: Sequence[KeyValue | None],
    wanted: Filter,
) -> Open | None:
    if state is None:
        return None  # it ended and was cleaned up in the meantime
    word_of = read(word(State), state)
    if word_of.terminal or (wanted.states is not None and word_of not in wanted.states):
        return None
    if wanted.labels and (spec[0] is None or not has(read(Spec.decode, spec[0]).labels, wanted.labels)):
        return None
    begun = claims or phase not in (None, Phase.PLANNING.encode())
    waits = word_of is State.PENDING or (word_of is State.RUNNING and not begun)
    return Open(ref, word_of, state.create_revision, waits)


async def counts(etcd: EtcdClient, keys: Keys, wanted: Filter) -> tuple[Count, ...]:
    """The counts of the matching open operations, sorted by type and state."""
    operations: dict[tuple[str, State], int] = {}
    waiting: dict[tuple[str, State], int] = {}
    oldest: dict[tuple[str, State], Open] = {}
    async for one in survey(etcd, keys, wanted):
        group = one.ref.type, one.state
        operations[group] = operations.get(group, 0) + 1
        if one.waits:
            waiting[group] = waiting.get(group, 0) + 1
            if group not in oldest or one.created < oldest[group].created:
                oldest[group] = one
    ages = await _ages(etcd, keys, oldest)
    return tuple(
        Count(type_name, str(state), number, waiting.get((type_name, state), 0), ages.get((type_name, state)))
        for (type_name, state), number in sorted(operations.items())
    )


async def _ages(
    etcd: EtcdClient, keys: Keys, oldest: Mapping[tuple[str, State], Open]
) -> dict[tuple[str, State], float]:
    """The ages of these operations in seconds."""
    found: dict[tuple[str, State], float] = {}
    groups, now = list(oldest), time.time()
    for n in range(0, len(groups), _AT_ONCE):
        page = groups[n : n + _AT_ONCE]
        answers = await etcd.read(*(Get(keys.of(oldest[group].ref, "spec")) for group in page))
        for group, answer in zip(page, answers, strict=True):
            began = parse_time(read(Spec.decode, answer.kv).time) if answer.kv is not None else 0.0
            if began:
                found[group] = max(0.0, now - began)
    return found


def open_states(states: Collection[str] | str | None) -> frozenset[State] | None:
    """The states of a filter of open operations. Raises InvalidArgument."""
    from distop.services.inspection.filters import states_of

    return states_of(states, [state for state in State if not state.terminal], "an operation that has not ended")
