"""Random lives of the pure core on the model store: events and their late copies.

A life is a thousand times as fast as a schedule: no daemon runs, and each event is built as its sender would build it
(``tests.support.random_events``). Each life prefers some events, so that rare ones meet each other. The invariants are
checked.
"""

from __future__ import annotations

import random
from typing import Any

from distop.invariants.checker import check
from distop.protocol.txn import Txn
from tests.support import random_events
from tests.support.world import World

EVENTS = 120
DRAWS = 4
"""Events that are drawn until one of them is possible."""
PREFERRED = 5
"""Kinds of events that one life prefers."""
MAY_COME_LATE = frozenset({"elect", "chunk", "plan", "plan_attempt", "clean", "end", "progress", "begin", "join"})
"""Transactions that may apply after they were refused (tests/unit/protocol/test_operation_transitions.py says why)."""


class _Chance(random.Random):
    """A random generator that prefers some events."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        listed = sorted(set(random_events._RANDOM_EVENTS))
        self._listed = [*random_events._RANDOM_EVENTS, *(random.Random(seed).sample(listed, PREFERRED) * 8)]

    def choice(self, seq: Any) -> Any:
        return super().choice(self._listed if seq is random_events._RANDOM_EVENTS else seq)


def live(seed: int) -> str:
    """What a life breaches; "" where nothing.

    An invariant, or a transaction that was refused and applies later.
    """
    world, _ = random_events.world_with_node(seed)
    rng = _Chance(seed)
    late: list[Txn] = []
    refused: list[Txn] = []
    for _ in range(EVENTS):
        txn = next(
            (one for one in (random_events.random_event(world, rng) for _ in range(DRAWS)) if one is not None), None
        )
        if txn is not None:
            late.append(txn)
            if rng.random() < 0.8:
                _apply(world, txn, refused)
        if late and rng.random() < 0.3:  # a copy that was delayed, or a repetition
            _apply(world, late[rng.randrange(len(late))], refused)
        if refused and rng.random() < 0.3 and world.store.apply(old := rng.choice(refused)).succeeded:
            return f"{old.label} was refused, and applies later"
    faults = check(world.keys, world.store.history)
    return f"invariant {faults[0].invariant}" if faults else ""


def _apply(world: World, txn: Txn, refused: list[Txn]) -> None:
    if not world.store.apply(txn).succeeded and txn.label not in MAY_COME_LATE:
        refused.append(txn)
