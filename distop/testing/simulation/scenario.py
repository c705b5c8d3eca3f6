"""What a seed stands for: the cluster, the operations, what clients do to them, and the faults. Pure: a value."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distop.testing.simulation.behaviors import TYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

TABLES = ("a", "a.b", "ab")
"""Names that are prefixes of each other, with a delimiter in one (fault 19)."""


@dataclass(frozen=True, slots=True)
class Host:
    """One executor. ``skew``: how far its wall clock is wrong, in seconds."""

    name: str
    types: tuple[str, ...]
    slots: int
    skew: float


@dataclass(frozen=True, slots=True)
class Act:
    """What a client does to the operation that it started, ``after`` seconds later."""

    after: float
    what: str


@dataclass(frozen=True, slots=True)
class Wish:
    """An operation that a client wants."""

    client: int
    after: float
    type: str
    table: str
    arg: Mapping[str, Any]
    names: tuple[str, ...] | None
    policy: str | None
    acts: tuple[Act, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: its kind, when it begins, how long it lasts, and what it strikes (numbers in [0, 1))."""

    kind: str
    at: float
    lasts: float
    aim: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that a run depends on."""

    seed: int
    hosts: tuple[Host, ...]
    members: int
    version: str
    ttl: int
    poll: float
    batch: int
    fragments: int
    tables: tuple[str, ...]
    clients: int
    wishes: tuple[Wish, ...]
    faults: tuple[Fault, ...] = ()
    calm: float = 0.0
    """When the last fault is over."""
    skews: tuple[float, ...] = field(default=())

    @property
    def partitions(self) -> int:
        """Of the largest operation."""
        return max(int(wish.arg["partitions"]) for wish in self.wishes)

    @property
    def coordinators(self) -> int:
        """Executors that may coordinate the first operation's type."""
        return sum(self.wishes[0].type in host.types for host in self.hosts)


def scenario(seed: int, *, faults: bool = True, focus: tuple[str, ...] = ()) -> Scenario:
    """The scenario of a seed; with faults of these kinds alone, if some are named, and then many."""
    from distop.testing.simulation.faults import draw_faults

    chance = random.Random(f"scenario/{seed}")
    hosts = chance.choices((1, 2, 3, 4, 5), (8, 20, 36, 22, 14))[0]
    coordinators = min(hosts, chance.choices((1, 2, 3), (20, 35, 45))[0])
    tables = TABLES[: chance.choices((1, 2, 3), (60, 25, 15))[0]]
    wanted = [chance.choice(list(TYPES)) for _ in range(chance.choices((1, 2, 3), (45, 35, 20))[0])]
    offered = list(dict.fromkeys(wanted))
    if "check" not in offered:
        offered.append("check")  # what follows is of this type
    some = tuple(
        Host(
            f"exec-{n}",
            tuple(t for t in offered if n < coordinators or (t != wanted[0] and chance.random() < 0.5)),
            chance.choices((1, 2, 4), (40, 40, 20))[0],
            chance.choice((0.0, 0.0, chance.uniform(-5, 5), 3600.0)) if faults else 0.0,
        )
        for n in range(hosts)
    )
    clients = chance.choices((1, 2, 3), (50, 35, 15))[0]
    wishes = tuple(_wish(chance, n, clients, type_name, tables) for n, type_name in enumerate(wanted))
    listed = draw_faults(chance, focus) if faults else ()
    return Scenario(
        seed,
        some,
        chance.choice((1, 3)),
        chance.choices(("3.5.33", "3.4.23"), (80, 20))[0],
        chance.choice((2, 3, 4)),
        chance.choice((2.0, 5.0, 10.0)),
        chance.choice((1, 3, 10)),
        chance.choice((0, 0, 1, 2, 5)),
        tables,
        clients,
        wishes,
        listed,
        max((fault.at + fault.lasts for fault in listed), default=0.0),
    )


def _wish(chance: random.Random, n: int, clients: int, type_name: str, tables: tuple[str, ...]) -> Wish:
    partitions = min(60, max(1, round(chance.lognormvariate(2.75, 0.75))))
    names = None
    if chance.random() < 0.15:
        names = tuple(f"p={p}" for p in sorted(chance.sample(range(partitions), max(1, partitions // 2))))
    acts: list[Act] = []
    luck = chance.random()
    if luck < 0.18:
        acts.append(Act(chance.uniform(0, 6), "cancel"))
    elif luck < 0.42:
        acts.append(Act(chance.uniform(0, 4), "pause"))
        if chance.random() < 0.85:
            acts.append(Act(chance.uniform(0.1, 5), chance.choices(("resume", "cancel"), (80, 20))[0]))
        if chance.random() < 0.3:
            acts += [Act(chance.uniform(0.1, 2), "pause"), Act(chance.uniform(0.1, 2), "resume")]
    elif luck < 0.5:
        acts.append(Act(chance.uniform(0, 3), "look"))
    arg: dict[str, Any] = {
        "seed": chance.randrange(1 << 30),
        "partitions": partitions,
        "pace": chance.choices((0.02, 0.1, 0.3, 1.0), (30, 35, 25, 10))[0],
        "calls": chance.choices((0.05, 0.2, 2.0), (40, 40, 20))[0],
        "trouble": chance.choices((0.0, 0.4, 1.0), (40, 40, 20))[0],
        "chunk": chance.choice((200, 1000, 100_000)),
    }
    if TYPES[type_name].object_field:
        arg["name"] = chance.choice(("x", "7", "y.z"))
    if chance.random() < 0.1:
        arg["objects"] = True
    elif chance.random() < 0.1:
        arg["follows"] = True
    policy = chance.choice((None, None, "fail_fast", "collect_all"))
    return Wish(n % clients, chance.uniform(0, 3), type_name, chance.choice(tables), arg, names, policy, tuple(acts))
