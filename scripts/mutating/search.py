"""Runs mutants where they are decisive, until a test or schedule kills them.

Unit tests come first, then scenarios, then schedules.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from mutating.catalogue import CHILDREN, COPIES, HELD, LIVES, SCENARIOS, SCHEDULES, UNIT, Place, layer_of
from mutating.child_processes import Steps, in_children
from mutating.held_requests import hold
from mutating.hooks import plant
from mutating.late_copies import arriving, labelling
from mutating.random_lives import live
from mutating.transaction_mutants import Mutant
from tests.simulator import Simulation, draw_scenario
from tests.simulator.run import without_logs

TRIED = {UNIT: 60, LIVES: 15, CHILDREN: 200, SCENARIOS: 15, SCHEDULES: 40, COPIES: 20, HELD: 20}
"""Places of each layer in which a mutant is run before it counts as a survivor."""


@dataclass
class Verdict:
    """How a mutant fared.

    ``layer``: where it was killed, or "" where it survived. ``how``: what failed. ``places``: in how many places it
    was run.
    """

    mutant: str
    layer: str = ""
    killer: str = ""
    how: str = ""
    places: int = 0
    decisive: int = 0
    seconds: float = 0.0
    backed: str = ""
    """For a guard that survives: another guard that refuses the same; leaving out both is noticed."""
    content: str = ""
    """The hash of the judged code."""

    @property
    def killed(self) -> bool:
        return bool(self.layer)


@dataclass
class Hunt:
    """One mutant, and the places in which it is run."""

    mutant: Mutant
    places: Sequence[Place]
    decisive: int


def hunt(hunts: Sequence[Hunt], items: Mapping[str, pytest.Item], jobs: int) -> Iterator[Verdict]:
    """Run each mutant in its places, in a process of its own."""

    def do(one: Hunt, steps: Steps) -> Any:
        plant(one.mutant)
        began = time.perf_counter()
        for n, place in enumerate(one.places, 1):
            steps.begin(str(place))
            how = _look(place, items, one.mutant)
            if how:
                return [str(place), place.layer, how, n, time.perf_counter() - began]
        return ["", "", "", len(one.places), time.perf_counter() - began]

    for ended in in_children(hunts, jobs, do):
        one: Hunt = ended.work
        verdict = Verdict(str(one.mutant), decisive=one.decisive)
        if ended.answer is not None:
            verdict.killer, verdict.layer, verdict.how, verdict.places, verdict.seconds = ended.answer
        elif not ended.step:
            raise RuntimeError(f"cannot plant {one.mutant}: {ended.error}")
        else:
            verdict.killer, verdict.how = ended.step, "hang" if ended.hung else ended.error
            verdict.layer = layer_of(ended.step)
        yield verdict


def _look(place: Place, items: Mapping[str, pytest.Item], mutant: Mutant | None) -> str:
    """What fails there; "" where nothing does."""
    if place.test:
        return _test(items[place.test])
    return live(place.life) if place.life >= 0 else _schedule(place, mutant)


def _test(item: pytest.Item) -> str:
    """What fails in a test; "" where nothing does."""
    for report in runtestprotocol(item, log=False, nextitem=None):
        if report.failed:
            last = str(report.longrepr).strip().splitlines() or [""]
            return f"test fails: {last[-1][:120]}"
    return ""


def _schedule(place: Place, mutant: Mutant | None) -> str:
    """What a schedule breaches, with the mutant if one is given; "" where nothing."""
    with without_logs(), contextlib.ExitStack() as stack:
        sim = Simulation(draw_scenario(place.seed))
        if place.copy is not None:
            stack.enter_context(arriving(place.copy, mutant))
        if place.held is not None:
            hold(sim, stack.enter_context(labelling(mutant)), place.held)
        breaches = sim.run().breaches
    return breaches[0].kind if breaches else ""


def breaches_without_mutant(verdicts: Sequence[Verdict], jobs: int) -> Iterator[tuple[Verdict, str]]:
    """Kills by a late copy or a held request that also breach without the mutant.

    Such a breach is a bug of distop.
    """
    copies = [one for one in verdicts if one.layer in (COPIES, HELD)]

    def do(one: Verdict, steps: Steps) -> Any:
        steps.begin(one.killer)
        return _schedule(Place.parse(one.killer), None)

    for ended in in_children(copies, jobs, do):
        if ended.answer != "":
            yield ended.work, ended.answer or ended.error or "hang"
