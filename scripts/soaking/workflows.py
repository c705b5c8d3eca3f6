"""The workflows of a soak: what clients do in several steps, or several clients at once, by seed and number alone."""

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
"""Lane → the kinds of workflows in it."""
AT_ONCE = {"graph": 3, "id": 2, "limit": 2, "transaction": 2, "series": 2}
"""Lane → workflows that run at a time."""
COPIES = {
    **dict.fromkeys(("chord", "chord fails", "chain", "chain fails"), (1, 2, 3)),
    "chord fails at once": (4, 6, 8),
}
"""Kind of graph → how many of the same one are started one after the other."""
WIDE = (40, 60)
"""Parts of a graph that one transaction does not take."""
RACERS = 3
"""Clients that start operations of one id at the same time."""
TIMES = 3
"""Operations of a series."""
POLICIES = ("join", "refuse", "replace", "combine")
LIMITED, BY_HAND = "limited", "by-hand"
"""The types whose jobs the actor runs. The second has no code."""


@dataclass(frozen=True, slots=True)
class Part:
    """An operation that a client asks for. ``options``: of the start."""

    type: str
    table: str
    arg: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Workflow:
    """``parts``: of a graph the last one waits for the others, or each for the one before. ``copies``: how many of the
    same graph. ``steps``: (seconds after the start or the step before, what is done then). ``pause``: seconds until the
    next workflow.
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
        """How the request ids of its operations begin."""
        return f"soak-{self.name}/"


def draw(seed: int, lane: str, number: int, folder: Path) -> Workflow:
    """The workflow of this number. Each kind comes once before any comes again."""
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
    """Parts of which some fail; now and then one is cancelled."""
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
    """Most are on ``@cluster``, so that many of one table end at once."""
    table = chance.choice((CLUSTER_TABLE, CLUSTER_TABLE, *TABLES))
    jobs = 1 if table == CLUSTER_TABLE else chance.randrange(1, 5)
    return Part("noop", table, {"jobs": jobs, "sleep": chance.choice((0.0, chance.uniform(0.0, 1.0)))})


def _id(chance: random.Random, kind: str, name: str, folder: Path) -> Drawn:
    """Two rounds of starts of one id. Its operations run until the file ``hold`` exists."""
    parts = []
    for n in range(2 * RACERS):
        policy = chance.choice(POLICIES) if kind == "mixed" else kind
        arg = {"path": name, "files": [f"file-{n}"], "hold": str(folder / f"hold-{name}")}
        options: dict[str, Any] = {"on_duplicate": policy}
        if chance.random() < 0.7:
            options["delay"] = chance.uniform(0.2, 2.0)
        parts.append(Part("purge", TABLES[0], arg, options))
    return parts, [(chance.uniform(0.0, 2.0), "next round"), (chance.uniform(0.0, 2.0), "release")]


def _limit(chance: random.Random, kind: str, name: str, folder: Path) -> Drawn:
    """Limits are set and removed while jobs run, long enough that executors die with some. The jobs of ``by hand`` are
    for the actor.
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
    """``fails``: the compare does not hold. Where it turns, it does so often, before the transaction and after."""
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
