"""Clients that race to replace or combine the same pending operation.

They start operations with the same id at the same moment.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.simulator.simulated_behaviors import TYPES

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from tests.simulator.scenario import Wish

RACERS = 3
"""Clients that race: those of one client share transactions instead."""


def racing(chance: random.Random, wishes: Sequence[Wish], *, timed: bool) -> tuple[Wish, ...]:
    """In some seeds, have several clients start operations of one id at the same time.

    Only where no clock is set back (``timed``). They do so once or twice.
    """
    from tests.simulator.scenario import Wish

    if chance.random() >= 0.15 or not timed:
        return ()
    model = chance.choice(wishes)
    policies = ("replace", "replace", "combine") if TYPES[model.type].combine else ("replace",)
    arg = {name: value for name, value in model.arg.items() if name not in ("objects", "follows")} | {"partitions": 1}
    begin, due = chance.uniform(0.2, 2.0), chance.uniform(3.0, 5.0)
    found: list[Wish] = []
    for n in range(chance.randint(1, 2)):
        at = begin + n * chance.uniform(0.1, 0.8)
        for client in range(RACERS):
            after = at + chance.choice((0.0, chance.uniform(0.0, 0.02)))
            one = Wish(client, after, model.type, model.table, arg, None, model.policy, ())
            found.append(replace(one, delay=due - after, id="hourly", on_duplicate=chance.choice(policies)))
    return tuple(found)
