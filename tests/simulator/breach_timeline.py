"""The timeline of a breach: all events of its job or operation, in order, with their senders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.errors import InvalidArgument
from distop.protocol import keys as K
from tests.simulator.scenario import draw_scenario

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distop.protocol.revisioned import Change
    from tests.simulator.run import Breach, Simulation
    from tests.simulator.scenario import Scenario

MAX_LINES = 60
"""Maximum lines of a timeline; the last ones are kept."""
_VALUE = 150
"""Maximum characters of a value."""


def timeline(sim: Simulation, breach: Breach) -> list[str]:
    """The lines in order of time: faults, writes to the keys of the job or operation, and work with side effects.

    For a breach without an operation: faults, and writes to the key of the breach.
    """
    lines: list[tuple[float, int, str]] = []
    history = dict(sim.etcd.store.history)
    for number, (at, revision, sender, text) in enumerate(sim.log):
        if not revision:
            lines.append((at, number, f"{at:9.3f}          -- {text}"))
            continue
        who = _name(sim, sender)
        lines += [
            (at, number, f"{at:9.3f} r{revision:<6} {who}: {_text(change)}")
            for change in history.get(revision, ())
            if _concerns(sim, breach, change)
        ]
    lines += [
        (effect.begun, -1, f"{effect.begun:9.3f}          ** {effect}")
        for effect in sim.effects.all
        if (effect.op, effect.partition) == (breach.op, breach.partition)
    ]
    texts = [text for at, _, text in sorted(lines, key=lambda line: line[:2]) if at <= breach.at + 0.001]
    left_out = len(texts) - MAX_LINES
    return ([f"({left_out} earlier lines omitted)"] if left_out > 0 else []) + texts[-MAX_LINES:]


def describe(sim: Simulation, breach: Breach, again: str = "") -> Iterator[str]:
    """A breach with its timeline and the command that replays it (by default that of the seed)."""
    yield str(breach)
    yield from (f"  {line}" for line in timeline(sim, breach))
    if again := again or replay(sim.scenario):
        yield f"  replay: {again}"


def replay(scenario: Scenario) -> str:
    """The command that runs a scenario again; "" where its seed draws another one (shrunk, or built by a test)."""
    return f"scripts/simulate --replay {scenario.seed}" if scenario == draw_scenario(scenario.seed) else ""


def _name(sim: Simulation, sender: str) -> str:
    for machine in sim.machines:
        if sender in machine.incarnations:
            return f"{machine.name} ({sender})"
    return sender


def _concerns(sim: Simulation, breach: Breach, change: Change) -> bool:
    if change.kv.key == breach.key:
        return True
    try:
        key = sim.keys.parse(change.kv.key)
    except InvalidArgument:
        return False
    if key.family in (K.NODE, K.NODE_DRAIN, K.COORDINATOR):
        return True
    if not breach.op or str(key.ref) != breach.op:
        return False
    return key.partition == breach.partition if key.partition >= 0 else key.name not in ("arg", "spec")


def _text(change: Change) -> str:
    if change.deleted:
        return f"{change.kv.key} deleted"
    value = change.kv.value.decode(errors="replace")
    return f"{change.kv.key} = {value[:_VALUE]}{'…' if len(value) > _VALUE else ''}"
