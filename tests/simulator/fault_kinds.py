"""The kinds of faults, and how the faults of a seed are drawn.

The numbers refer to the fault list in docs/internals/etcd-rules.md (F1 answer lost, F2 applied late, F3 frozen, …).
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tests.simulator.scenario import Fault

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KINDS: dict[str, tuple[int, float, float]] = {
    # kind: (weight, minimum and maximum duration in seconds)
    "crash": (10, 0.1, 6.0),  # F4, F27
    "freeze": (12, 0.05, 9.0),  # F3, F20, F43
    "stop": (4, 0.1, 4.0),
    "clock": (2, 0.0, 0.0),  # F20, F40
    "client-crash": (2, 0.0, 0.0),
    "client-freeze": (3, 0.1, 5.0),
    "answers-lost": (8, 0.3, 4.0),  # F1
    "requests-lost": (4, 0.3, 4.0),
    "requests-late": (8, 0.3, 4.0),  # F2, F23, F24, F25, F26
    "errors": (5, 0.3, 3.0),
    "cut": (6, 0.0, 0.0),  # F7, F9, F11
    "hole": (6, 0.5, 20.0),  # F7
    "one-way": (8, 0.5, 8.0),  # F6
    "late-renewal": (4, 0.5, 6.0),  # F6, F12
    "refuse": (3, 0.2, 4.0),
    "leader": (5, 0.2, 3.0),  # F5, F12
    "member-parted": (4, 0.5, 6.0),  # F5, F18
    "member-killed": (4, 0.3, 5.0),
    "quorum": (3, 0.5, 9.0),  # F5, F12
    "lag": (5, 0.5, 6.0),  # F11, F18
    "slow-watches": (4, 0.0, 0.0),  # F9
    "watches-end": (4, 0.0, 0.0),  # F11
    "watches-refused": (2, 0.2, 1.5),  # F11
    "compaction": (4, 0.0, 5.0),  # F8
    "space": (3, 0.5, 4.0),  # F15
    "late-revocation": (3, 1.0, 8.0),  # F12
    "renews-revoked": (2, 1.0, 8.0),  # F36
    "deposed": (3, 0.2, 3.0),  # F13, F36
    "cut-at-step": (4, 0.0, 0.0),
    "revoke": (2, 0.0, 0.0),  # L2, F13
}

FURTHER_KINDS: dict[str, tuple[int, float, float]] = {
    "client-again": (3, 0.05, 6.0),  # F1, F29
    "suspend": (2, 0.5, 9.0),  # F20, F34
    "events-lost": (1, 0.5, 6.0),  # etcd#20573
    "stale-reads": (1, 0.05, 3.0),  # etcd#20418
}
"""Further kinds, drawn by a separate generator, so that the draw of ``KINDS`` stays the same."""
LOSES_EVENTS = frozenset({"events-lost"})
"""Kinds after which no watch delivers the missing events: only a listing does."""
USER_KINDS: dict[str, tuple[int, float, float]] = {
    "tokens": (3, 0.0, 0.0),  # F14
    "role": (2, 0.2, 4.0),  # F14
}
"""Faults of authentication; the clusters of these seeds have users."""
DISK_KINDS: dict[str, tuple[int, float, float]] = {
    "disk": (1, 0.3, 8.0),
}
"""Faults of nodes' disks."""
VIEW_KINDS: dict[str, tuple[int, float, float]] = {
    "view-late": (1, 0.5, 90.0),
}
"""Delays of a node's view of the cluster (holds, nodes, gates), while its view of operations is current."""
SEPARATE_DRAWS = (
    ("further faults", FURTHER_KINDS, 0.3, (1, 1, 2)),
    ("users", USER_KINDS, 0.15, (1, 2, 4)),
    ("disks", DISK_KINDS, 0.1, (1, 2, 3)),
    ("views", VIEW_KINDS, 0.1, (1, 1, 2)),
)
"""Draws with a generator of their own, so that they shift no other draw: (name of the generator, kinds, share of the
seeds with such faults, possible counts).
"""


def draw_faults(
    chance: random.Random, busy: Sequence[tuple[float, float]], focus: Sequence[str] = ()
) -> tuple[Fault, ...]:
    """Up to eleven faults, most of them within one of the ``busy`` times. ``focus``: only these kinds."""
    kinds = {**KINDS, **FURTHER_KINDS, **USER_KINDS, **DISK_KINDS, **VIEW_KINDS}
    some = {kind: kinds[kind] for kind in focus} if focus else KINDS
    count = chance.choices((0, 1, 2, 4, 7, 11), (3, 9, 26, 32, 20, 10))[0]
    return _drawn(chance, busy, some, max(count, 6) if focus else count)


def draw_separate_faults(seed: int, busy: Sequence[tuple[float, float]]) -> tuple[Fault, ...]:
    """The faults of ``SEPARATE_DRAWS``, drawn by the seed alone."""
    found: list[Fault] = []
    for name, kinds, share, counts in SEPARATE_DRAWS:
        chance = random.Random(f"{name}/{seed}")
        found += _drawn(chance, busy, kinds, chance.choice(counts) if chance.random() < share else 0)
    return tuple(found)


def _drawn(
    chance: random.Random,
    busy: Sequence[tuple[float, float]],
    kinds: Mapping[str, tuple[int, float, float]],
    count: int,
) -> tuple[Fault, ...]:
    some = chance.choices(list(kinds), [weight for weight, _, _ in kinds.values()], k=count)
    faults = []
    for kind in some:
        _, least, longest = kinds[kind]
        lasts = least + (longest - least) * chance.random() ** 2
        begin, end = chance.choice(busy)
        at = chance.uniform(0.2 if chance.random() < 0.1 else begin, end)
        faults.append(Fault(kind, at, lasts, tuple(chance.random() for _ in range(4))))
    return tuple(sorted(faults, key=lambda fault: fault.at))
