"""What a seed stands for: the cluster, the operations, what clients do to them, and the faults. Pure: a value."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from distop.testing.simulation.behaviors import TYPES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TABLES = ("a", "a.b", "ab")
"""Names that are prefixes of each other, with a delimiter in one (fault 19)."""


@dataclass(frozen=True, slots=True)
class Host:
    """One executor. ``skew``: how far its wall clock is wrong, in seconds. ``unable``: types that it offers, and turns
    out not to be able to run.
    """

    name: str
    types: tuple[str, ...]
    slots: int
    skew: float
    unable: tuple[str, ...] = ()


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
    rerun: str = ""
    """What is run again once it has ended: ``failed`` or ``unfinished`` partitions; "": nothing."""


@dataclass(frozen=True, slots=True)
class DrainAct:
    """Somebody drains an executor, and lets it work again ``lasts`` seconds later, or (``waits``) once it is empty."""

    after: float
    executor: str
    lasts: float
    waits: bool


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
    drains: tuple[DrainAct, ...] = ()
    election: float = 1.0
    """Seconds of etcd's election timeout."""

    @property
    def partitions(self) -> int:
        """Of the largest operation."""
        return max(int(wish.arg["partitions"]) for wish in self.wishes)

    @property
    def coordinators(self) -> int:
        """Executors that may coordinate the first operation's type."""
        return sum(self.wishes[0].type in host.types for host in self.hosts)


def plain(
    seed: int,
    hosts: int,
    wishes: Sequence[Wish],
    *faults: Fault,
    types: Sequence[str] = (),
    slots: int = 2,
    ttl: int = 4,
    poll: float = 30.0,
    calm: float = 0.0,
) -> Scenario:
    """A scenario of which nothing is drawn: hosts that are alike and offer the types of the wishes and these, one
    member of etcd, one table, one client.
    """
    offered = tuple(dict.fromkeys((*(wish.type for wish in wishes), *types)))
    return Scenario(
        seed=seed,
        hosts=tuple(Host(f"exec-{n}", offered, slots, 0.0) for n in range(hosts)),
        members=1,
        version="3.5.33",
        ttl=ttl,
        poll=poll,
        batch=1000,
        fragments=0,
        tables=("a",),
        clients=1,
        wishes=tuple(wishes),
        faults=faults,
        calm=max((fault.at + fault.lasts for fault in faults), default=calm),
    )


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
    # What people do besides is drawn by itself: so a seed stands for the same cluster, whatever is added here.
    people = random.Random(f"people/{seed}")
    some = _unable(people, some)
    wishes = tuple(_insistent(people, wish) for wish in wishes)
    drains = _drains(people, some)
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
        drains,
        people.choice((0.2, 0.5, 1.0)),
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


def _unable(chance: random.Random, hosts: tuple[Host, ...]) -> tuple[Host, ...]:
    """Some hosts cannot run a type that they offer. Mostly another one can; where none can, its operations have to
    fail, and so this spares the type whose jobs are not allowed to.
    """
    unable: dict[str, list[str]] = {}
    for type_name in sorted({t for host in hosts for t in host.types}):
        offering = [host.name for host in hosts if type_name in host.types]
        if chance.random() >= 0.12:
            continue
        most = len(offering) if TYPES[type_name].can_fail and chance.random() < 0.2 else len(offering) - 1
        for name in chance.sample(offering, chance.randint(min(1, most), most)):
            unable.setdefault(name, []).append(type_name)
    return tuple(replace(host, unable=tuple(unable.get(host.name, ()))) for host in hosts)


def _insistent(chance: random.Random, wish: Wish) -> Wish:
    """Half of the pauses do not wait for running jobs; some of what ends is run again."""
    acts: list[Act] = []
    for act in wish.acts:
        hasty = act.what == "pause" and chance.random() < 0.5
        acts.append(replace(act, what="pause-now") if hasty else act)
        if act.what == "pause" and not hasty and chance.random() < 0.2:
            acts.append(Act(chance.uniform(0.05, 1.0), "pause-now"))
    rerun = chance.choices(("", "failed", "unfinished"), (70, 20, 10))[0]
    return replace(wish, acts=tuple(acts), rerun=rerun)


def _drains(chance: random.Random, hosts: tuple[Host, ...]) -> tuple[DrainAct, ...]:
    if chance.random() >= 0.25:
        return ()
    return tuple(
        DrainAct(
            chance.uniform(1.0, 7.0),
            chance.choice(hosts).name,
            chance.choices((chance.uniform(0.1, 8.0), 45.0), (85, 15))[0],
            chance.random() < 0.4,
        )
        for _ in range(chance.choice((1, 1, 2, 3)))
    )
