"""Draws joins, operations that follow a running one with the same id, and series with an id.

Each draw has its own random generator, so that it changes no other draw.
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

    from tests.simulator.scenario import Action, Submission

JOIN = "join"
"""The simulated type that only waits for other operations."""


def joins(chance: random.Random, submissions: Sequence[Submission]) -> tuple[Submission, ...]:
    """In some seeds, add joins, some with an id.

    Half of them are cancelled at about the time at which they would end; clients of the others declare a type.
    """
    named = [
        n
        for n, submission in enumerate(submissions)
        if not (submission.graph or submission.in_transaction or submission.prepared)
    ]
    if chance.random() >= 0.1 or not named:
        return ()
    found: list[Submission] = []
    for n in range(chance.randint(1, 3)):
        predecessors = chance.sample(named, chance.randint(1, min(3, len(named))))
        model = plain_of(submissions[predecessors[0]], chance.uniform(0.2, 3.0))
        actions = (_action(chance, 4.0, "cancel"),) if chance.random() < 0.5 else (_action(chance, 2.0, "register"),)
        found.append(
            replace(
                model,
                type=JOIN,
                table=CLUSTER_TABLE,
                actions=actions,
                predecessors=tuple((one, chance.choice(("success", "end"))) for one in sorted(predecessors)),
                id=chance.choice(("", f"join-{n}")),
            )
        )
    return tuple(found)


def followers(chance: random.Random, submissions: Sequence[Submission]) -> tuple[Submission, ...]:
    """In some seeds, add operations that follow a running one with the same id.

    Most of them are cancelled while that one runs, or at about the time at which it ends.
    """
    models = [submission for submission in submissions if TYPES[submission.type].combine]
    if chance.random() >= 0.1 or not models:
        return ()
    model = plain_of(chance.choice(models), chance.uniform(0.3, 2.0))
    first = replace(model, arg={**model.arg, "pace": 2.0}, id="followed", on_duplicate="combine")
    found = [first]
    for _ in range(chance.randint(1, 3)):
        after = model.after + chance.uniform(0.3, 2.0)
        actions = (_action(chance, 2.0, "cancel"),) if chance.random() < 0.8 else ()
        found.append(replace(first, after=after, arg={**model.arg, "seed": chance.randrange(1 << 30)}, actions=actions))
    return tuple(found)


def with_id(chance: random.Random, submissions: tuple[Submission, ...]) -> tuple[Submission, ...]:
    """Give half of the series an id."""
    return tuple(
        replace(submission, id="series")
        if submission.every and not submission.id and chance.random() < 0.5
        else submission
        for submission in submissions
    )


def _action(chance: random.Random, latest: float, what: str) -> Action:
    from tests.simulator.scenario import Action

    return Action(chance.uniform(0.0, latest), what)
