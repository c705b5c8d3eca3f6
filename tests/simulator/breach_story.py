"""The story of a breach: what happened to this job or operation, in order, and who did it; nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.errors import InvalidArgument
from distop.protocol import keys as K
from tests.simulator.scenario import scenario

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distop.protocol.revisioned import Change
    from tests.simulator.run import Breach, Simulation
    from tests.simulator.scenario import Scenario

LONGEST = 60
"""Lines of a story; the last ones are told."""
_VALUE = 150


def story(sim: Simulation, breach: Breach) -> list[str]:
    """Lines in order: faults and what processes go through, the writes to the keys concerned with their senders, and
    what was at work. Without an operation to tell of: the faults, and the writes to the key itself.
    """
    lines: list[tuple[float, int, str]] = []
    history = dict(sim.etcd.store.history)
    for number, (at, revision, sender, text) in enumerate(sim.log):
        if not revision:
            lines.append((at, number, f"{at:9.3f}          -- {text}"))
            continue
        who = _name(sim, sender)
        lines += [
            (at, number, f"{at:9.3f} r{revision:<6} {who}: {_tell(change)}")
            for change in history.get(revision, ())
            if _concerns(sim, breach, change)
        ]
    lines += [
        (effect.begun, -1, f"{effect.begun:9.3f}          ** {effect}")
        for effect in sim.effects.all
        if (effect.op, effect.partition) == (breach.op, breach.partition)
    ]
    told = [text for at, _, text in sorted(lines, key=lambda line: line[:2]) if at <= breach.at + 0.001]
    left_out = len(told) - LONGEST
    return ([f"({left_out} lines before)"] if left_out > 0 else []) + told[-LONGEST:]


def describe(sim: Simulation, breach: Breach, again: str = "") -> Iterator[str]:
    """A breach with its story, and how to see it again: by its seed, or by this command."""
    yield str(breach)
    yield from (f"  {line}" for line in story(sim, breach))
    if again := again or replay(sim.scenario):
        yield f"  replay: {again}"


def replay(wanted: Scenario) -> str:
    """The command that runs it again; "" where there is none, since its seed stands for another one: it was made by
    hand, or smaller.
    """
    return f"scripts/simulate --replay {wanted.seed}" if wanted == scenario(wanted.seed) else ""


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


def _tell(change: Change) -> str:
    if change.deleted:
        return f"{change.kv.key} deleted"
    value = change.kv.value.decode(errors="replace")
    return f"{change.kv.key} = {value[:_VALUE]}{'…' if len(value) > _VALUE else ''}"
