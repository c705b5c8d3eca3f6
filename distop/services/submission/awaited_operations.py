"""Reads the predecessors of starting operations, and compares them at the start."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from distop.errors import NotFound, OperationStartError, UnreadableRecord
from distop.protocol import operation_transitions as t
from distop.protocol.frozen import frozen
from distop.protocol.record_reading import read, word
from distop.protocol.records import History, State
from distop.protocol.txn import Get

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef
    from distop.protocol.txn import KeyValue
    from distop.services.submission.option_values import After
    from distop.store.client import EtcdClient

READS = 60
"""Operations whose state and history are read at once."""


@frozen
class Standing:
    """The state of a predecessor. ``mod``: of its state; 0: it has ended as ``state``."""

    ref: OperationRef
    state: State
    mod: int


FoundStanding: TypeAlias = Standing | NotFound | UnreadableRecord
"""A predecessor's state, or why it is not known.

NotFound: it does not exist, or its history record is deleted. UnreadableRecord: its state cannot be read.
"""


async def standings(etcd: EtcdClient, keys: Keys, refs: Iterable[OperationRef]) -> dict[OperationRef, FoundStanding]:
    """The states of these predecessors."""
    wanted = sorted(set(refs))
    found: dict[OperationRef, FoundStanding] = {}
    for n in range(0, len(wanted), READS):
        page = wanted[n : n + READS]
        gets = [Get(key) for ref in page for key in (keys.of(ref, "state"), keys.history(ref))]
        answers = await etcd.read(*gets)
        for ref, state, history in zip(page, answers[::2], answers[1::2], strict=True):
            try:
                found[ref] = _standing(ref, state.kv, history.kv)
            except UnreadableRecord as error:
                found[ref] = error
    return found


def _standing(ref: OperationRef, state: KeyValue | None, history: KeyValue | None) -> Standing | NotFound:
    if history is not None:
        return Standing(ref, read(History.decode, history).state, 0)
    if state is not None:
        return Standing(ref, read(word(State), state), state.mod_revision)
    return NotFound(f"there is no operation {ref} to wait for, and no record of one that has ended")


def known(found: FoundStanding) -> Standing:
    """The state that was found. Raises NotFound, UnreadableRecord."""
    if isinstance(found, Standing):
        return found
    raise type(found)(str(found))  # an exception that several callers raise would mix their tracebacks


def predecessors(after: Iterable[After], standing: Mapping[OperationRef, FoundStanding]) -> tuple[t.Predecessor, ...]:
    """The predecessors that have not ended; one that has succeeded is skipped (L16).

    Raises NotFound; UnreadableRecord; OperationStartError if a predecessor ended so that the operation could never
    start.
    """
    waited: list[t.Predecessor] = []
    for one in after:
        seen = known(standing[one.ref])
        if seen.mod:
            waited.append(t.Predecessor(one.ref, one.on, seen.mod))
        elif one.on == "success" and seen.state is not State.SUCCESS:
            raise OperationStartError(
                f"{one.ref} ended as {seen.state}, so an operation that waits for its success could never start; wait "
                'for its end instead (on="end"), or leave it out'
            )
    return tuple(waited)
