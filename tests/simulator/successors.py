"""Joins, operations that follow one of the same id, and series with an id.

Each is drawn by its own random generator, so that a seed stands for the same of everything else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distop.protocol.records import CLUSTER_TABLE
from tests.simulator.simulated_behaviors import TYPES
from tests.simulator.slow_graphs import plain_of

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from tests.simulator.scenario import Act, Wish

JOIN = "join"
"""The type of the simulation that only waits."""


def joins(chance: random.Random, wishes: Sequence[Wish]) -> tuple[Wish, ...]:
    """In some seeds, add operations of a type that only waits for others.

    Some have an id. Half of them are cancelled at about the time at which they would end. Some clients declare a type
    of their own meanwhile.
    """
    named = [n for n, wish in enumerate(wishes) if not (wish.graph or wish.within or wish.prepared)]
    if chance.random() >= 0.1 or not named:
        return ()
    found: list[Wish] = []
    for n in range(chance.randint(1, 3)):
        behind = chance.sample(named, chance.randint(1, min(3, len(named))))
        model = plain_of(wishes[behind[0]], chance.uniform(0.2, 3.0))
        acts = (_act(chance, 4.0, "cancel"),) if chance.random() < 0.5 else (_act(chance, 2.0, "register"),)
        found.append(
            replace(
                model,
                type=JOIN,
                table=CLUSTER_TABLE,
                acts=acts,
                behind=tuple((one, chance.choice(("success", "end"))) for one in sorted(behind)),
                id=chance.choice(("", f"join-{n}")),
            )
        )
    return tuple(found)


def followers(chance: random.Random, wishes: Sequence[Wish]) -> tuple[Wish, ...]:
    """In some seeds, add operations that follow a running one of the same id.

    Mostly the client cancels such an operation while the running one still runs, or at about the time at which it
    ends.
    """
    models = [wish for wish in wishes if TYPES[wish.type].combine]
    if chance.random() >= 0.1 or not models:
        return ()
    model = plain_of(chance.choice(models), chance.uniform(0.3, 2.0))
    first = replace(model, arg={**model.arg, "pace": 2.0}, id="followed", on_duplicate="combine")
    found = [first]
    for _ in range(chance.randint(1, 3)):
        after = model.after + chance.uniform(0.3, 2.0)
        acts = (_act(chance, 2.0, "cancel"),) if chance.random() < 0.8 else ()
        found.append(replace(first, after=after, arg={**model.arg, "seed": chance.randrange(1 << 30)}, acts=acts))
    return tuple(found)


def with_id(chance: random.Random, wishes: tuple[Wish, ...]) -> tuple[Wish, ...]:
    """Half of the series have an id."""
    return tuple(
        replace(wish, id="series") if wish.every and not wish.id and chance.random() < 0.5 else wish for wish in wishes
    )


def _act(chance: random.Random, latest: float, what: str) -> Act:
    from tests.simulator.scenario import Act

    return Act(chance.uniform(0.0, latest), what)
