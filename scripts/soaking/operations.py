"""Draws the operations of a soak: kinds, arguments and commands, by the seed and the number alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from soaking.tables import CHECKS
from tests.support.writing import Journal

if TYPE_CHECKING:
    from pathlib import Path

KINDS = {
    "plain": (
        *("writing", "writing", "writing", "step", "step", "step", "step breaks", "step fails", "followed"),
        *("deaf", "noop", "noop", "large", "crash", "break", "error", "rerun", "rerun"),
        *("plan elsewhere", "plan fails", "complete elsewhere", "complete fails"),
    ),
    "lone": ("lone", "lone", "lone fails"),
    "spark": ("spark", "spark", "validate", "validate", "kill-jvm", "hang-jvm", "memory", "stop-context"),
}
"""Lane → its kinds. Lanes are independent: slow Spark operations, and operations that wait for another one of their
object, delay no other lane.
"""
STUMBLES = {"step breaks": "error", "step fails": "fail", "lone fails": "fail"}
"""Kind → what the first of several jobs does in the middle."""
TRIPS = {
    "plan elsewhere": {"plan": "node"},
    "plan fails": {"plan": "error"},
    "complete elsewhere": {"complete": "node"},
    "complete fails": {"complete": "error"},
}
"""Kinds whose planning or completion raises, on some nodes or on all. The jobs of their type cannot fail."""
OBJECTS = ("one thing", "another.thing")
POLICIES = ("fail_fast", "collect_all")
OF_JVM = frozenset({"kill-jvm", "hang-jvm", "memory", "stop-context"})
"""Kinds that restart the JVM several times; one runs at a time, alone."""
ROUGH = frozenset({"deaf", "crash"})
"""Kinds that kill the child in which they run."""


@dataclass(frozen=True, slots=True)
class Submission:
    """An operation to submit.

    ``actions``: its commands, each as (seconds after the start or the command before, command). ``policy``: the failure
    policy; None: that of the type. ``then``: whether a success has a follow-up operation.
    """

    name: str
    number: int
    kind: str
    type: str
    arg: dict[str, Any]
    rows: int
    journal: Journal | None
    actions: tuple[tuple[float, str], ...]
    policy: str | None = None
    then: bool = False


def kind_of(seed: int, lane: str, number: int) -> str:
    """The kind of an operation. Each kind comes once before any comes again."""
    kinds = KINDS[lane]
    around, place = divmod(number, len(kinds))
    return random.Random(f"{seed}/{lane}/{around}").sample(kinds, len(kinds))[place]


def draw(seed: int, lane: str, number: int, folder: Path) -> Submission:
    """The operation with this number."""
    kind, name = kind_of(seed, lane, number), f"{lane}-{number}"
    chance = random.Random(f"{seed}/operation/{name}")
    actions, policy = _acts(chance, kind), chance.choice(POLICIES)
    if kind.startswith("step") or kind in ("followed", "lone", "lone fails"):
        return _stepping(chance, lane, number, kind, folder, actions, policy)
    if kind in ("writing", "deaf", "spark") or kind in OF_JVM:
        path = folder / f"journal-{name}.jsonl"
        rows = chance.randrange(2, 12)
        arg = {"jobs": chance.randrange(1, 16), "rows": rows, "journal": str(path), **_writing(chance, kind)}
        if lane == "spark":
            arg["jobs"] = 2 if kind in OF_JVM else min(arg["jobs"], 6)
        type_name = "sparkwriting" if lane == "spark" else "writing"
        return Submission(name, number, kind, type_name, arg, rows, Journal(path), actions, policy)
    if kind in TRIPS:
        arg = {"diary": str(folder / f"diary-{name}"), **TRIPS[kind]}
        return Submission(name, number, kind, "tripping", arg, 0, None, actions, policy)
    if kind == "validate":
        return Submission(name, number, kind, "validate", {"checks": list(CHECKS)}, 0, None, actions)
    type_name = "rough" if kind in ("crash", "break", "error") else "noop"
    return Submission(name, number, kind, type_name, _noop(chance, kind), 0, None, actions, policy)


def _stepping(
    chance: random.Random,
    lane: str,
    number: int,
    kind: str,
    folder: Path,
    actions: tuple[tuple[float, str], ...],
    policy: str,
) -> Submission:
    """An operation whose jobs take some seconds, so that faults happen between two checkpoints."""
    name, rows = f"{lane}-{number}", chance.randrange(4, 30)
    path = folder / f"journal-{name}.jsonl"
    arg: dict[str, Any] = {"jobs": chance.randrange(1, 9), "rows": rows, "pause": chance.uniform(0.02, 0.25)}
    arg |= {"journal": str(path), "held": str(folder / f"held-{name}"), "forced": chance.random() < 0.6}
    if kind in STUMBLES:
        arg |= {"jobs": max(2, arg["jobs"]), "does": {"p=0": STUMBLES[kind]}}
    if kind == "followed":
        arg["then"] = name
    if lane == "lone":
        arg["object"] = chance.choice(OBJECTS)
    type_name = "lone" if lane == "lone" else "stepwriting"
    return Submission(name, number, kind, type_name, arg, rows, Journal(path), actions, policy, kind == "followed")


def _writing(chance: random.Random, kind: str) -> dict[str, Any]:
    if kind == "writing":
        return {"pause": chance.uniform(0.01, 0.3)}
    if kind == "deaf":
        return {"does": {"p=0": "deaf"}}
    return {"pause": 0.05} if kind == "spark" else {"does": {"p=1": kind}}


def _noop(chance: random.Random, kind: str) -> dict[str, Any]:
    jobs = chance.randrange(1, 40)
    one = str(chance.randrange(jobs))
    arg: dict[str, Any] = {"jobs": jobs, "sleep": chance.uniform(0, 0.2)}
    if kind == "large":
        return {"jobs": 1_500}
    if kind == "crash":
        return {**arg, "crash": [one]}
    if kind == "break":
        return {**arg, "batch_error": [one]}
    if kind == "error":
        return {**arg, "error": [one], "fail": [str(chance.randrange(jobs))]}
    return arg


def _acts(chance: random.Random, kind: str) -> tuple[tuple[float, str], ...]:
    if kind == "deaf":
        return ((chance.uniform(2, 10), "cancel"),)  # a deaf job never ends by itself
    actions: list[tuple[float, str]] = []
    luck = chance.random()
    if luck < 0.15:
        actions.append((chance.uniform(0, 6), "cancel"))
    elif luck < 0.5:
        for _ in range(chance.choice((1, 1, 2))):
            actions.append((chance.uniform(0, 4), chance.choice(("pause", "pause now"))))
            actions.append((chance.uniform(0.2, 8), chance.choice(("resume", "resume", "resume", "cancel"))))
    return tuple(actions)
