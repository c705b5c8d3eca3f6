"""Clients that start operations with the same id at the same moment, and so race to replace or combine one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.simulator.simulated_behaviors import TYPES

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from tests.simulator.scenario import Submission

RACERS = 3
"""Number of clients; the starts of a single client would share a transaction."""


def racing_starts(chance: random.Random, submissions: Sequence[Submission], *, timed: bool) -> tuple[Submission, ...]:
    """In some seeds, add starts with one id by several clients at the same time, once or twice.

    Needs clocks that are not set back (``timed``).
    """
    from tests.simulator.scenario import Submission

    if chance.random() >= 0.15 or not timed:
        return ()
    model = chance.choice(submissions)
    policies = ("replace", "replace", "combine") if TYPES[model.type].combine else ("replace",)
    arg = {name: value for name, value in model.arg.items() if name not in ("objects", "follows")} | {"partitions": 1}
    begin, due = chance.uniform(0.2, 2.0), chance.uniform(3.0, 5.0)
    found: list[Submission] = []
    for n in range(chance.randint(1, 2)):
        at = begin + n * chance.uniform(0.1, 0.8)
        for client in range(RACERS):
            after = at + chance.choice((0.0, chance.uniform(0.0, 0.02)))
            one = Submission(client, after, model.type, model.table, arg, None, model.policy, ())
            found.append(replace(one, delay=due - after, id="hourly", on_duplicate=chance.choice(policies)))
    return tuple(found)
