"""Measures the memory of all processes of a soak, and checks that it does not grow."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from distop.worker.guardian import session_members
from tests.support.processes import children, children_of_guardian

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tests.support.daemons import Daemon

EACH = 2.0
"""Seconds between two measurements."""
WARM = 30.0
"""Ignored seconds at the start of a process, during which it loads code and fills caches."""
CACHES = 900.0
"""Ignored seconds at the start of a daemon. Its bounded caches fill with thousands of operations, so it grows from 55
MB to about 75 MB.
"""
LEAST = 150.0
"""Minimum seconds of the judged half of a life."""
ARENA = 3.0
"""MB that the allocator may take or return at once. A half that has grown by less is too short to judge."""
STEEPEST = 0.5
"""Maximum growth in MB per minute in the second half of a life.

Under this load, with hundreds of operations and faults per hour, 0.5 would be 0.7 GB per day: such a process would need
a restart every few days. A process without a leak stays far below.
"""
JVM_BEYOND_HEAP = 500.0
"""Maximum MB of a JVM besides its heap (metaspace, code, threads, direct buffers).

A heap grows to its limit whatever is in it, so a JVM is judged by its size.
"""
LONG = 1_500.0
"""Seconds of a soak from which on the memory of at least one daemon has to be judged."""
DAEMON = "daemon"
POINTS = 250
"""Maximum measurements of a half that are compared pairwise; the work grows with the square."""

Life = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict on one kind of process of an executor; ``problem`` "": none."""

    text: str
    problem: str = ""
    role: str = ""
    certain: bool = True
    """Whether the process lived long enough to be judged."""


class Memory:
    """The resident sizes of daemons, guardians, children and their processes. ``heap``: maximum MB of a JVM's heap."""

    def __init__(self, heap: float) -> None:
        self._heap = heap
        self._lives: dict[tuple[str, str, int], Life] = defaultdict(list)
        self._measured = 0.0

    def measure(self, daemons: Mapping[str, Daemon]) -> None:
        """Measure all sizes, if the interval has passed."""
        now = time.monotonic()
        if now - self._measured < EACH:
            return
        self._measured = now
        for name, daemon in daemons.items():
            for role, pid in processes(daemon.pid):
                size = resident(pid)
                if size is not None:
                    self._lives[name, role, pid].append((now, size))

    def judge(self) -> list[Judged]:
        """Judge each kind of process of each executor: the longest life, and for a JVM the largest size."""
        found = []
        for name, role in sorted({(name, role) for name, role, _ in self._lives}):
            lives = [life for (n, r, _), life in self._lives.items() if (n, r) == (name, role)]
            largest = max(size for life in lives for _, size in life)
            longest = max(lives, key=lambda life: life[-1][0] - life[0][0])
            warm = CACHES if role == DAEMON else WARM
            judged = judge(f"{name}, {role}", longest, len(lives), largest, self._limit(role), warm)
            found.append(replace(judged, role=role))
        return found

    def _limit(self, role: str) -> float | None:
        return self._heap + JVM_BEYOND_HEAP if role == "JVM" else None


def judge(who: str, life: Life, lives: int, largest: float, limit: float | None, warm: float = WARM) -> Judged:
    """Judge one life: by its size if a limit is given, else by the slope of its second half after ``warm`` seconds."""
    text = f"{who}: {lives} processes, the largest {largest:.0f} MB; the longest life {_minutes(life):.1f} min"
    if limit is not None:
        if largest > limit:
            return Judged(f"{text}; limit {limit:.0f} MB", f"the memory of {who}: {largest:.0f} MB of {limit:.0f}")
        return Judged(f"{text}; limit {limit:.0f} MB: ok")
    half = second_half(life, warm)
    if not half or half[-1][0] - half[0][0] < LEAST:
        return Judged(f"{text}; too short to be judged", certain=False)
    steep = slope(half) * 60
    text += f", from {half[0][1]:.1f} to {half[-1][1]:.1f} MB in its second half, slope {steep:+.2f} MB/min"
    if steep > STEEPEST and steep / 60 * (half[-1][0] - half[0][0]) < ARENA:
        return Judged(f"{text}: too short to be judged", certain=False)
    if steep > STEEPEST:
        return Judged(text, f"the memory of {who} grows by {steep:.2f} MB per minute")
    return Judged(f"{text}: flat")


def unjudged(found: Iterable[Judged], seconds: float) -> list[str]:
    """A problem if no daemon's memory was judged in a soak that was long enough."""
    certain = any(one.role == DAEMON and one.certain for one in found)
    return [] if certain or seconds < LONG else ["no daemon lived long enough for its memory to be judged"]


def second_half(life: Sequence[tuple[float, float]], warm: float) -> Life:
    """The second half, by time, of the measurements after the first ``warm`` seconds."""
    later = [point for point in life if point[0] - life[0][0] >= warm]
    if not later:
        return []
    middle = (later[0][0] + later[-1][0]) / 2
    return [point for point in later if point[0] >= middle]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The median of the slopes between all pairs (Theil–Sen), which few outliers or one step do not change."""
    some = points[:: max(1, len(points) // POINTS)]
    return statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(some, 2))


def _minutes(life: Life) -> float:
    return (life[-1][0] - life[0][0]) / 60


# ----------------------------------------------------------------- processes


def processes(daemon: int) -> Iterator[tuple[str, int]]:
    """(role, process id) of a daemon and all its child processes."""
    yield DAEMON, daemon
    for guardian in children(daemon):
        yield "guardian", guardian
        for child in children_of_guardian(guardian):
            yield "child", child
            for member in session_members(child):
                if member != child:
                    yield _role(member), member


def _role(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "other"
    if words[0].endswith(b"java"):
        return "JVM"
    return "Python workers" if any(b"pyspark" in word for word in words) else "other"


def resident(pid: int) -> float | None:
    """The resident size in MB; None: the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    return None
