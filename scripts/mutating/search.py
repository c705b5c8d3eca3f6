"""Looking for what kills a mutant: first unit tests, then scenarios, then schedules; it ends at the first kill."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from distop.testing.simulation import Simulation, scenario
from distop.testing.simulation.run import quietly
from mutating.catalogue import COPIES, HELD, LIVES, SCENARIOS, SCHEDULES, UNIT, Place, layer_of
from mutating.children import Steps, in_children
from mutating.held import hold
from mutating.hooks import plant
from mutating.late import arriving, labelling
from mutating.lives import live
from mutating.transactions import Left

TRIED = {UNIT: 25, LIVES: 15, SCENARIOS: 15, SCHEDULES: 40, COPIES: 20, HELD: 20}
"""Places of each layer in which a mutant is run before it counts as a survivor."""


@dataclass
class Verdict:
    """How a mutant fared. ``layer`` "" : it survived. ``how``: what failed; ``places``: where it was run."""

    mutant: str
    layer: str = ""
    killer: str = ""
    how: str = ""
    places: int = 0
    decisive: int = 0
    seconds: float = 0.0
    backed: str = ""
    """Of a guard that survives: another one of its transaction that refuses the same. Both left out are killed."""
    content: str = ""
    """Of the code that it is about."""

    @property
    def killed(self) -> bool:
        return bool(self.layer)


@dataclass
class Hunt:
    """One mutant, and where it is looked for."""

    left: Left
    places: Sequence[Place]
    decisive: int


def hunt(hunts: Sequence[Hunt], items: Mapping[str, pytest.Item], jobs: int) -> Iterator[Verdict]:
    """Run each mutant where it is looked for, in a process of its own."""

    def do(one: Hunt, steps: Steps) -> Any:
        plant(one.left)
        began = time.perf_counter()
        for n, place in enumerate(one.places, 1):
            steps.begin(str(place))
            how = _look(place, items, one.left)
            if how:
                return [str(place), place.layer, how, n, time.perf_counter() - began]
        return ["", "", "", len(one.places), time.perf_counter() - began]

    for ended in in_children(hunts, jobs, do):
        one: Hunt = ended.work
        verdict = Verdict(str(one.left), decisive=one.decisive)
        if ended.answer is not None:
            verdict.killer, verdict.layer, verdict.how, verdict.places, verdict.seconds = ended.answer
        else:
            verdict.killer, verdict.how = ended.step, "hang" if ended.hung else ended.error
            verdict.layer = layer_of(ended.step)
        yield verdict


def _look(place: Place, items: Mapping[str, pytest.Item], left: Left | None) -> str:
    """What fails there; "" where nothing does."""
    if place.test:
        return _test(items[place.test])
    return live(place.life) if place.life >= 0 else _schedule(place, left)


def _test(item: pytest.Item) -> str:
    """What fails in a test; "" where nothing does."""
    for report in runtestprotocol(item, log=False, nextitem=None):
        if report.failed:
            last = str(report.longrepr).strip().splitlines() or [""]
            return f"test fails: {last[-1][:120]}"
    return ""


def _schedule(place: Place, left: Left | None) -> str:
    """What a schedule breaches; "" where nothing is. Of the mutant's transactions, where one is given."""
    with quietly(), contextlib.ExitStack() as stack:
        sim = Simulation(scenario(place.seed))
        if place.copy is not None:
            stack.enter_context(arriving(place.copy, left))
        if place.held is not None:
            hold(sim, stack.enter_context(labelling(left)), place.held)
        breaches = sim.run().breaches
    return breaches[0].kind if breaches else ""


def unfounded(verdicts: Sequence[Verdict], jobs: int) -> Iterator[tuple[Verdict, str]]:
    """Kills by a late copy or a held request that breaches something without any mutant, too: a fault of the code as
    it is.
    """
    copies = [one for one in verdicts if one.layer in (COPIES, HELD)]

    def do(one: Verdict, steps: Steps) -> Any:
        steps.begin(one.killer)
        return _schedule(Place.parse(one.killer), None)

    for ended in in_children(copies, jobs, do):
        if ended.answer != "":
            yield ended.work, ended.answer or ended.error or "hang"
