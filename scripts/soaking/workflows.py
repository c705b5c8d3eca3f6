"""Draws the workflows of a soak: sequences of steps by one or several clients, by seed and number alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distop.protocol.records import CLUSTER_TABLE
from soaking.tables import TABLES

if TYPE_CHECKING:
    from pathlib import Path

KINDS = {
    "graph": (
        *("chord", "chord fails", "chord fails at once", "chord wide", "chain", "chain fails"),
        *("after", "after fails", "after end"),
    ),
    "id": ("join", "refuse", "replace", "replace", "combine", "combine", "mixed"),
    "limit": ("limited", "limit removed", "limit removed", "by hand"),
    "transaction": ("holds", "fails", "turns", "turns", "turns and reads"),
    "series": ("series", "series fails", "series on success", "series ended"),
}
"""Lane → its kinds of workflows."""
AT_ONCE = {"graph": 3, "id": 2, "limit": 2, "transaction": 2, "series": 2}
"""Lane → number of concurrent workflows."""
COPIES = {
    **dict.fromkeys(("chord", "chord fails", "chain", "chain fails"), (1, 2, 3)),
    "chord fails at once": (4, 6, 8),
}
"""Kind of graph → possible numbers of copies that are started one after the other."""
WIDE = (40, 60)
"""Range of the number of parts of a graph that needs several transactions."""
RACERS = 3
"""Number of clients that start operations with one id at the same time."""
TIMES = 3
"""Number of operations of a series."""
POLICIES = ("join", "refuse", "replace", "combine")
LIMITED, BY_HAND = "limited", "by-hand"
"""The types whose jobs the actor runs. The second one has no code."""


@dataclass(frozen=True, slots=True)
class Part:
    """An operation of a workflow, with its start ``options``."""

    type: str
    table: str
    arg: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Workflow:
    """A workflow.

    ``parts``: its operations; in a chord the last one waits for all others, in a chain each for the one before.
    ``copies``: number of equal graphs. ``steps``: (seconds after the start or the step before, action). ``pause``:
    seconds until the next workflow.
    """

    name: str
    lane: str
    kind: str
    parts: tuple[Part, ...]
    copies: int
    steps: tuple[tuple[float, str], ...]
    pause: float

    @property
    def request(self) -> str:
        """The prefix of its request ids."""
        return f"soak-{self.name}/"


def draw(seed: int, lane: str, number: int, folder: Path) -> Workflow:
    """The workflow with this number. Each kind is drawn once before any is drawn again."""
    kinds = KINDS[lane]
    around, place = divmod(number, len(kinds))
    kind = random.Random(f"{seed}/{lane}/{around}").sample(kinds, len(kinds))[place]
    name = f"{lane}-{number}"
    chance = random.Random(f"{seed}/workflow/{name}")
    parts, steps = _DRAWS[lane](chance, kind, name, folder)
    copies = chance.choice(COPIES.get(kind, (1,)))
    return Workflow(name, lane, kind, tuple(parts), copies, tuple(steps), chance.uniform(0.5, 3.0))


Drawn = tuple[list[Part], list[tuple[float, str]]]


def _graph(chance: random.Random, kind: str, name: str, folder: Path) -> Drawn:
    """A graph; in some kinds parts fail, and sometimes one is cancelled."""
    if kind == "chord fails at once":
        failing = Part("noop", CLUSTER_TABLE, {"jobs": 1, "fail": ["all"]})
        return [failing] * chance.choice((2, 2, 3)) + [Part("noop", CLUSTER_TABLE, {"jobs": 1})], []
    sizes = (2, 3) if kind.startswith("after") else WIDE if kind == "chord wide" else (3, 6)
    count = chance.randrange(*sizes)
    parts = [_noop(chance) for _ in range(count)]
    if kind not in ("chord", "chain", "after"):
        for place in chance.sample(range(count - 1), chance.randrange(1, min(count, 6))):
            fails = ["all"] if parts[place].table == CLUSTER_TABLE else ["0"]
            parts[place] = Part("noop", parts[place].table, {**parts[place].arg, "fail": fails})
    cancels = chance.random() < 0.2
    return parts, [(chance.uniform(0.0, 2.0), f"cancel {chance.randrange(count)}")] if cancels else []


def _noop(chance: random.Random) -> Part:
    """A no-op. Most are on ``@cluster``, so that many operations of one table end at once."""
    table = chance.choice((CLUSTER_TABLE, CLUSTER_TABLE, *TABLES))
    jobs = 1 if table == CLUSTER_TABLE else chance.randrange(1, 5)
    return Part("noop", table, {"jobs": jobs, "sleep": chance.choice((0.0, chance.uniform(0.0, 1.0)))})


def _id(chance: random.Random, kind: str, name: str, folder: Path) -> Drawn:
    """Two rounds of starts with one id. The operations run until the file ``hold`` exists."""
    parts = []
    for n in range(2 * RACERS):
        policy = chance.choice(POLICIES) if kind == "mixed" else kind
        arg = {"path": name, "files": [f"file-{n}"], "hold": str(folder / f"hold-{name}")}
        options: dict[str, Any] = {"on_duplicate": policy}
        if chance.random() < 0.7:
            options["delay"] = chance.uniform(0.2, 2.0)
        parts.append(Part("purge-path", TABLES[0], arg, options))
    return parts, [(chance.uniform(0.0, 2.0), "next round"), (chance.uniform(0.0, 2.0), "release")]


def _limit(chance: random.Random, kind: str, name: str, folder: Path) -> Drawn:
    """Limits are set and removed while jobs run, which last so long that executors die with some.

    The jobs of ``by hand`` are for the actor.
    """
    jobs = chance.randrange(2, 5) if kind == "by hand" else chance.randrange(4, 13)
    table = chance.choice(TABLES)
    if kind == "by hand":
        return [Part(BY_HAND, table, {}, {"partitions": [str(n) for n in range(jobs)]})], []
    steps = []
    for n in range(chance.randrange(2, 6)):
        limit = 0 if kind == "limit removed" and n % 2 == 0 else chance.randrange(1, 4)
        steps.append((chance.uniform(0.3, 5.0), f"limit {limit}"))
    arg = {"jobs": jobs, "sleep": chance.uniform(0.2, 4.0)}
    return [Part(LIMITED, table, arg, {"max_jobs": chance.randrange(1, 4)})], steps


def _transaction(chance: random.Random, kind: str, name: str, folder: Path) -> Drawn:
    """A client transaction.

    ``fails``: its compare fails. In the kinds with ``turns`` the compare fails and holds in turn, many times.
    """
    part = Part("noop", chance.choice(TABLES), {"jobs": chance.randrange(1, 4)})
    turns = chance.randrange(4, 24) if kind.startswith("turns") else 0
    return [part], [(chance.uniform(0.0, 0.2), "turn") for _ in range(turns)]


def _series(chance: random.Random, kind: str, name: str, folder: Path) -> Drawn:
    fails = kind == "series fails" or (kind == "series on success" and chance.random() < 0.5)
    arg = {"jobs": chance.randrange(1, 4), "fail": ["0"] if fails else []}
    every = {"seconds": chance.uniform(0.2, 2.0), "times": TIMES, "since": chance.choice(("end", "start"))}
    every["on"] = "success" if kind == "series on success" else "any"
    ends = [(chance.uniform(0.0, 6.0), "end")] if kind == "series ended" else []
    return [Part("noop", chance.choice(TABLES), arg, {"every": every})], ends


_DRAWS = {"graph": _graph, "id": _id, "limit": _limit, "transaction": _transaction, "series": _series}
