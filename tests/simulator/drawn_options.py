"""Priorities, limits, selectors and failure budgets that a seed gives to its operations, and who alters them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.simulator.scenario import Act, Fault

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from tests.simulator.scenario import Host, Wish

ZONES = ("a", "b")


def draw_limits(
    chance: random.Random, wishes: Sequence[Wish], hosts: Sequence[Host]
) -> tuple[tuple[Wish, ...], tuple[Host, ...]]:
    """In a third of the seeds. What is drawn is drawn by itself: so a seed stands for the same cluster as without."""
    if chance.random() >= 0.35:
        return tuple(wishes), tuple(hosts)
    hosts = tuple(replace(host, labels={"zone": chance.choice(ZONES)}) for host in hosts)
    return tuple(_bounded(chance, wish, hosts) for wish in wishes), hosts


def _bounded(chance: random.Random, wish: Wish, hosts: Sequence[Host]) -> Wish:
    if chance.random() < 0.3:
        return wish
    options = _options(chance)
    zones = {host.labels["zone"] for host in hosts if wish.type in host.types and wish.type not in host.unable}
    if chance.random() < 0.3 and zones:
        options["where"] = {"zone": chance.choice(sorted(zones))}
    acts = list(wish.acts)
    if chance.random() < 0.5:
        for _ in range(chance.randint(1, 4)):
            act = Act(chance.uniform(0.05, 1.5), _alter(_options(chance, anew=True)))
            acts.insert(chance.randint(0, len(acts)), act)
    return replace(wish, options=options, acts=tuple(acts))


def limits_that_change(chance: random.Random, wishes: Sequence[Wish], actors: int) -> tuple[Wish, ...]:
    """In half of the seeds with actors, set, remove and restore a job limit.

    That happens while jobs run. Actors take no permits.
    """
    if not actors or chance.random() < 0.5:
        return tuple(wishes)
    n = chance.randrange(len(wishes))
    limits = [most for _ in range(chance.randint(1, 3)) for most in (0, chance.choice((1, 1, 2)))]
    acts = tuple(Act(chance.uniform(0.1, 1.5), _alter({"max_jobs": most})) for most in limits)
    limited = replace(wishes[n], options={**wishes[n].options, "max_jobs": 1}, acts=(*acts, *wishes[n].acts))
    return (*wishes[:n], limited, *wishes[n + 1 :])


def losses_within_a_limit(chance: random.Random, wishes: Sequence[Wish]) -> tuple[tuple[Wish, ...], tuple[Fault, ...]]:
    """In one of ten seeds, lower the limit of an operation below what runs, then kill executors."""
    if chance.random() >= 0.1:
        return tuple(wishes), ()
    n = chance.randrange(len(wishes))
    wish = wishes[n]
    lowered = Act(chance.uniform(0.5, 1.0), _alter({"max_jobs": chance.choice((1, 1, 2))}))
    arg = {**wish.arg, "pace": chance.choice((1.0, 2.0))}
    limited = replace(wish, arg=arg, options={}, acts=(lowered, *wish.acts))
    at = wish.after + 1.0 + chance.uniform(0.1, 1.0)
    crashes = (Fault("crash", at, chance.uniform(0.5, 3.0), (chance.random(), 0.0, 0.0, 0.0)) for _ in range(3))
    return (*wishes[:n], limited, *wishes[n + 1 :]), tuple(crashes)


def _options(chance: random.Random, *, anew: bool = False) -> dict[str, Any]:
    """``anew``: what was said may be taken back."""
    found: dict[str, Any] = {}
    if chance.random() < 0.5:
        found["priority"] = chance.choice((-5, 0, 1, 9))
    if chance.random() < 0.6:
        found["max_jobs"] = chance.choice((1, 2, 3, 5, *((0, 1) if anew else ())))
    if chance.random() < 0.25:
        found["max_jobs_per_executor"] = chance.choice((1, 2, *((0,) if anew else ())))
    if chance.random() < 0.2:
        found["max_failed"] = chance.choice(("0", "2", "20%"))
    return found


def _alter(options: dict[str, Any]) -> str:
    return " ".join(["alter", *(f"{name}={value}" for name, value in (options or {"priority": 3}).items())])


def altered(what: str) -> dict[str, Any]:
    """What an act ``alter name=value …`` gives to ``Operation.alter``."""
    pairs = (one.split("=", 1) for one in what.split()[1:])
    return {name: value if name == "max_failed" else int(value) for name, value in pairs}
