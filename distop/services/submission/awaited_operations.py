"""Reads the predecessors of starting operations, and compares them at the start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.errors import NotFound, OperationStartError
from distop.protocol import operation_transitions as t
from distop.protocol.frozen import frozen
from distop.protocol.record_reading import read, word
from distop.protocol.records import History, State
from distop.protocol.txn import Get

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef
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


async def standings(
    etcd: EtcdClient, keys: Keys, refs: Iterable[OperationRef]
) -> dict[OperationRef, Standing | NotFound]:
    """The states of these predecessors.

    NotFound stands for one that does not exist, or whose history record is deleted.
    """
    wanted = sorted(set(refs))
    found: dict[OperationRef, Standing | NotFound] = {}
    for n in range(0, len(wanted), READS):
        page = wanted[n : n + READS]
        gets = [Get(key) for ref in page for key in (keys.of(ref, "state"), keys.history(ref))]
        answers = await etcd.read(*gets)
        for ref, state, history in zip(page, answers[::2], answers[1::2], strict=True):
            if history.kv is not None:
                found[ref] = Standing(ref, read(History.decode, history.kv).state, 0)
            elif state.kv is not None:
                found[ref] = Standing(ref, read(word(State), state.kv), state.kv.mod_revision)
            else:
                found[ref] = NotFound(f"there is no operation {ref} to wait for, and no record of one that has ended")
    return found


def predecessors(
    after: Iterable[After], standing: Mapping[OperationRef, Standing | NotFound]
) -> tuple[t.Predecessor, ...]:
    """The predecessors that have not ended; one that has succeeded is skipped (L16).

    Raises NotFound; OperationStartError if a predecessor ended so that the operation could never start.
    """
    waited: list[t.Predecessor] = []
    for one in after:
        seen = standing[one.ref]
        if isinstance(seen, NotFound):
            raise NotFound(str(seen))
        if seen.mod:
            waited.append(t.Predecessor(one.ref, one.on, seen.mod))
        elif one.on == "success" and seen.state is not State.SUCCESS:
            raise OperationStartError(
                f"{one.ref} ended as {seen.state}, so an operation that waits for its success could never start; wait "
                'for its end instead (on="end"), or leave it out'
            )
    return tuple(waited)
