"""Where each mutant is decisive: the tests and schedules in which it matters.

A run is deterministic up to the first transaction that a mutant changes. So a mutant is run only where it is decisive:
in all other runs nothing would differ.
"""

from __future__ import annotations

import ast
import re
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from _pytest.runner import runtestprotocol

from mutating import source_mutants
from mutating.child_processes import Ended, Steps, in_children
from mutating.held_requests import VARIANTS, Held, Requests, hold
from mutating.hooks import Observed, observing
from mutating.late_copies import Copy, Late, watching
from mutating.random_lives import live
from mutating.transaction_mutants import GUARDS, Mutant
from tests.simulator import Simulation, draw_scenario
from tests.simulator.run import without_logs

WITH_CHILDREN = "tests/integration/"
"""Tests of the worker with real children. They are slow, so they judge only the worker."""
SEEDS_AT_ONCE = 50
LIVES_AT_ONCE = 100
TESTS_AT_ONCE = 400
"""Schedules, lives or tests that one process observes: it first marks the source mutants, which takes seconds."""


@dataclass
class Place:
    """A test or a schedule in which mutants are decisive.

    ``test``: the id of a test. ``seed``: a schedule; with ``copy``, one late copy of a transaction is added; with
    ``held``, one request is held. ``life``: a random life of the pure core.
    """

    test: str = ""
    seed: int = 0
    seconds: float = 0.0
    copy: Copy | None = None
    held: Held | None = None
    life: int = -1

    @property
    def layer(self) -> str:
        """The layer of tests that it belongs to."""
        return layer_of(str(self))

    def __str__(self) -> str:
        if self.life >= 0:
            return f"life {self.life}"
        if self.copy is not None:
            return f"seed {self.seed}, copy of {self.copy[0]} at {self.copy[1]}"
        if self.held is not None:
            killed = " after its sender was killed" if self.held[2] else ""
            return f"seed {self.seed}, request {self.held[0]} held for {self.held[1]:g} s{killed}"
        return self.test or f"seed {self.seed}"

    @classmethod
    def parse(cls, text: str) -> Place:
        """The place with this text (the inverse of ``str``)."""
        if found := _LIFE.fullmatch(text):
            return cls(life=int(found.group(1)))
        if found := _PLACE.fullmatch(text):
            seed, number, revision, request, lasts, killed = found.groups()
            copy = (int(number), int(revision)) if number else None
            return cls(seed=int(seed), copy=copy, held=(int(request), float(lasts), bool(killed)) if request else None)
        return cls(text)


def imports(file: str, name: str) -> bool:
    """Whether a test file imports the module of a name such as ``distop.store.watch.Watch.close``. False for the label
    of a transaction.
    """
    parts = name.split(".")
    modules = (parts[:n] for n in range(len(parts), 1, -1))
    module = next((one for one in modules if Path(*one).with_suffix(".py").exists()), None)
    return bool(file) and module is not None and ".".join(module) in _imported(file)


@cache
def _imported(file: str) -> frozenset[str]:
    """All names that a file imports, and the modules of these names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(Path(file).read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return frozenset(found)


_PLACE = re.compile(
    r"seed (\d+)(?:, copy of (\d+) at (\d+)|, request (\d+) held for ([0-9.]+) s( after its sender was killed)?)?"
)
_LIFE = re.compile(r"life (\d+)")
UNIT, LIVES, CHILDREN, SCENARIOS, SCHEDULES, COPIES, HELD = LAYERS = (
    "unit", "lives", "children", "scenarios", "schedules", "late copies", "held requests",
)  # fmt: skip
"""Unit tests; random lives of the pure core; tests of the worker with real children; other tests on the simulator;
drawn schedules; these with one late copy of a transaction; these with one request that is held.
"""


def layer_of(place: str) -> str:
    """The layer of a place, given as text."""
    if place.startswith("life "):
        return LIVES
    if found := _PLACE.fullmatch(place):
        return COPIES if found.group(2) else HELD if found.group(4) else SCHEDULES
    if place.startswith(WITH_CHILDREN):
        return CHILDREN
    return UNIT if place.startswith("tests/unit/") else SCENARIOS


@dataclass
class Catalogue:
    """All mutants that were seen, and where each is decisive: (place, how often)."""

    decisive: dict[Mutant, list[tuple[Place, int]]] = field(default_factory=lambda: defaultdict(list))
    mutants: set[Mutant] = field(default_factory=set)
    simulated: set[Mutant] = field(default_factory=set)
    """Mutants of transactions that the schedules build."""
    broken: list[str] = field(default_factory=list)
    """Tests and schedules that fail without any mutant; they are not used."""
    schedules: int = 0
    statements: bool = False
    """Whether source mutants were observed, too."""
    idle: dict[str, str] = field(default_factory=dict)
    """Test files that reach no mutant, with their hashes; they need not be observed again."""
    sent: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """Label → requests with this label: (seed, number)."""

    def pairs(self, mutant: Mutant) -> list[Mutant]:
        """Pairs of guards that contain this guard, most often decisive first."""
        alike = [one for one in self.decisive if (one.place, one.mode) == (mutant.place, mutant.mode)]
        found = [one for one in alike if one.what != mutant.what and mutant.what in one.kinds]
        return sorted(found, key=lambda one: (-len(self.decisive[one]), one))

    def requests(self, most: int) -> list[Place]:
        """``most`` requests of each label, each held in several ways; the same each time."""
        found = []
        for sent in self.sent.values():
            chosen = sorted(sent, key=lambda one: crc32(f"{one}".encode()))[:most]
            found += [Place(seed=seed, held=(number, *how)) for seed, number in chosen for how in VARIANTS]
        return found

    def places(self, mutant: Mutant, layer: str) -> list[Place]:
        """Where a mutant is decisive in this layer. First tests of files that import the mutant's module. Among these,
        and among the others, frequent and quick places first, but those of one test file after as many of each other
        file, since tests of one file look at the same.
        """
        found = [(place, count) for place, count in self.decisive.get(mutant, ()) if place.layer == layer]
        found.sort(key=lambda one: (one[0].seconds / min(one[1], 5), str(one[0])))
        before: Counter[str] = Counter()
        turns = []
        for place, _ in found:
            file = place.test.partition("::")[0]
            turns.append((not imports(file, mutant.place), before[file] if file else 0, place))
            before[file] += 1
        return [place for *_, place in sorted(turns, key=lambda one: one[:2])]

    def as_json(self) -> Any:
        listed = sorted(self.mutants | self.decisive.keys())
        names = {mutant: n for n, mutant in enumerate(listed)}
        places: dict[str, list[Any]] = {}
        for mutant, found in self.decisive.items():
            for place, count in found:
                entry = places.setdefault(str(place), [str(place), round(place.seconds, 3), []])
                entry[2].append([names[mutant], count])
        return {
            "listed": [_fields(mutant) for mutant in listed],
            "mutants": sorted(names[mutant] for mutant in self.mutants),
            "simulated": sorted(names[mutant] for mutant in self.simulated),
            "places": list(places.values()),
            "broken": self.broken,
            "schedules": self.schedules,
            "statements": self.statements,
            "sent": self.sent,
            "idle": self.idle,
        }

    @classmethod
    def from_json(cls, stored: Any) -> Catalogue:
        found = cls()
        listed = [Mutant(*one) for one in stored["listed"]]
        found.mutants = {listed[n] for n in stored["mutants"]}
        found.simulated = {listed[n] for n in stored["simulated"]}
        found.broken, found.schedules = list(stored["broken"]), stored["schedules"]
        found.statements = stored.get("statements", True)
        found.idle = stored.get("idle", {})
        found.sent.update({label: [(seed, number) for seed, number in sent] for label, sent in stored["sent"].items()})
        for text, seconds, counts in stored["places"]:
            place = replace(Place.parse(text), seconds=seconds)
            for n, count in counts:
                found.decisive[listed[n]].append((place, count))
        return found


def collected(
    items: Sequence[pytest.Item], seeds: Sequence[int], lives: int, requests_held: int, jobs: int, *, statements: bool
) -> Catalogue:
    """Run all these tests, schedules and lives once without a mutant.

    Then run schedules in which one request is held, ``requests_held`` for each label. Without ``statements``, source
    mutants are not observed: marking their statements takes seconds in each process, and slows all code down.
    """
    by_id = {item.nodeid: item for item in items}
    ids = list(by_id)
    work: list[Any] = [("tests", ids[n : n + TESTS_AT_ONCE]) for n in range(0, len(ids), TESTS_AT_ONCE)]
    work += [("seeds", list(seeds[n : n + SEEDS_AT_ONCE])) for n in range(0, len(seeds), SEEDS_AT_ONCE)]

    work += [("lives", list(range(n, min(n + LIVES_AT_ONCE, lives)))) for n in range(0, lives, LIVES_AT_ONCE)]

    def do(one: Any, steps: Steps) -> Any:
        kind, listed = one
        observed = Observed()
        with observing(observed, statements=statements):
            if kind == "lives":
                return _observe_lives(listed, observed, steps)
            if kind == "held":
                return _observe_held(listed, observed, steps)
            if kind == "seeds":
                return _observe_seeds(listed, observed, steps)
            return _observe_tests(listed, by_id, observed, steps)

    found = Catalogue(schedules=len(seeds), statements=statements)
    if statements:
        found.mutants |= source_mutants.sites().keys()
    for ended in in_children(work, jobs, do):
        _add(found, ended)
    requests = [str(place) for place in found.requests(requests_held)]
    work = [("held", requests[n : n + SEEDS_AT_ONCE]) for n in range(0, len(requests), SEEDS_AT_ONCE)]
    for ended in in_children(work, jobs, do):
        _add(found, ended)
    return found


def _observe_tests(ids: Sequence[str], by_id: dict[str, pytest.Item], observed: Observed, steps: Steps) -> Any:
    results = []
    for name in ids:
        steps.begin(name)
        observed.reset()
        began = time.perf_counter()
        reports = runtestprotocol(by_id[name], log=False, nextitem=None)
        observed.read_children()
        if name.startswith(WITH_CHILDREN):
            observed.keep(source_mutants.IN_CHILDREN)
        fails = any(report.failed for report in reports)
        results.append([name, time.perf_counter() - began, _counted(observed), fails])
    return [results, _listed(observed), []]


def _observe_seeds(seeds: Sequence[int], observed: Observed, steps: Steps) -> Any:
    results, late, requests, sent = [], Late(observed), Requests(observed), list[Any]()
    with watching(late), without_logs():
        for seed in seeds:
            steps.begin(f"seed {seed}")
            observed.reset()
            late.reset()
            began = time.perf_counter()
            sim = Simulation(draw_scenario(seed))
            requests.watch(sim)
            breaches = sim.run().breaches
            sent += [[label, seed, number] for label, numbers in requests.labels.items() for number in numbers]
            took = time.perf_counter() - began
            results.append([str(Place(seed=seed)), took, _counted(observed), bool(breaches)])
            for mutant, copies in late.copies.items():
                counts = [[*_fields(mutant), 1]]
                results += [[str(Place(seed=seed, copy=one)), took, counts, bool(breaches)] for one in copies]
    return [results, _listed(observed), sent]


def _observe_lives(numbers: Sequence[int], observed: Observed, steps: Steps) -> Any:
    results = []
    for number in numbers:
        place = Place(life=number)
        steps.begin(str(place))
        observed.reset()
        began = time.perf_counter()
        how = live(number)
        results.append([str(place), time.perf_counter() - began, _counted(observed), bool(how)])
    return [results, _listed(observed), []]


def _observe_held(places: Sequence[str], observed: Observed, steps: Steps) -> Any:
    results = []
    with without_logs():
        for text in places:
            steps.begin(text)
            observed.reset()
            began, place = time.perf_counter(), Place.parse(text)
            sim = Simulation(draw_scenario(place.seed))
            assert place.held is not None
            hold(sim, observed, place.held)
            breaches = sim.run().breaches
            guards = [[*_fields(mutant), count] for mutant, count in observed.decisive.items() if mutant.mode in GUARDS]
            results.append([text, time.perf_counter() - began, guards, bool(breaches)])
    return [results, _listed(observed), []]


def _counted(observed: Observed) -> Any:
    return [[*_fields(mutant), count] for mutant, count in observed.decisive.items()]


def _fields(mutant: Mutant) -> list[str]:
    return [mutant.place, mutant.mode, mutant.what]


def _listed(observed: Observed) -> Any:
    return [_fields(mutant) for mutant in observed.seen]


def _add(found: Catalogue, ended: Ended) -> None:
    if ended.answer is None:
        found.broken.append(f"{ended.step}: {'hangs' if ended.hung else ended.error}")
        return
    results, seen, sent = ended.answer
    listed = {Mutant(*one) for one in seen}
    found.mutants |= listed
    for label, seed, number in sent:
        found.sent[label].append((seed, number))
    for text, seconds, counts, fails in results:
        place = replace(Place.parse(text), seconds=seconds)
        if place.seed:
            found.simulated |= listed
        if fails:
            if place.copy is None:
                found.broken.append(text)
            continue
        for where, mode, what, count in counts:
            found.decisive[Mutant(where, mode, what)].append((place, count))
