"""The timeline of an operation: what its executors did when, with takeovers and retries marked. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from distop.server.page.partition_states import PartitionStage
from distop.services.operation_results import first_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.server.page.partition_states import PartitionStates

MOST_BARS = 600
"""Jobs that are drawn one by one. More are drawn as the number of jobs that run at a time."""
MOST_LANES = 24
"""Jobs that an executor runs at a time and that are drawn one by one; else as their number, too."""
MOST_MARKS = 300
MOST_ROWS = 60
BINS = 240


def timeline(states: PartitionStates, now: float) -> dict[str, Any]:
    """The rows of executors, each with ``bars`` or ``busy``, and the marks.

    A bar: ordinal, first and last second since ``begin``, lane, state (as ``PartitionStage``), attempt. ``busy``: the
    mean number of jobs that run in each of :data:`BINS` intervals. A mark: its kind (``takeover``, ``retry`` or
    ``failed``), the second, the row, the ordinal and a text.
    """
    drawn = np.flatnonzero(states.started > 0)
    if not drawn.size:
        return {"begin": 0, "seconds": 0, "rows": [], "marks": [], "left": 0}
    started = states.started[drawn]
    stages = states.stage[drawn]
    ends = np.where(stages == PartitionStage.RUNNING, now, np.maximum(states.finished[drawn], started))
    begin, last = float(started.min()), float(ends.max())
    span = max(last - begin, 0.001)
    numbers = sorted({int(one) for one in np.unique(states.executor[drawn])}, key=lambda n: states.executors[n])
    rows = []
    for number in numbers[:MOST_ROWS]:
        mine = states.executor[drawn] == number
        row: dict[str, Any] = {"executor": states.executors[number] or "unknown", "jobs": int(mine.sum())}
        if drawn.size <= MOST_BARS:
            row |= _bars(states, drawn[mine], started[mine] - begin, ends[mine] - begin)
        if row.get("lanes", MOST_LANES + 1) > MOST_LANES:
            row |= {"bars": None, "busy": _busy(started[mine] - begin, ends[mine] - begin, span)}
        rows.append(row)
    place = {number: n for n, number in enumerate(numbers[:MOST_ROWS])}
    return {
        "begin": begin,
        "seconds": span,
        "rows": rows,
        "marks": _marks(states, drawn, begin, place),
        "left": len(numbers) - len(rows),
    }


def _bars(states: PartitionStates, ordinals: Any, first: Any, last: Any) -> dict[str, Any]:
    """The bars of one executor, in lanes, so that none covers another."""
    free: list[float] = []
    bars = []
    for n in np.argsort(first, kind="stable"):
        lane = next((lane for lane, until in enumerate(free) if until <= first[n] + 1e-6), len(free))
        if lane == len(free):
            free.append(0.0)
        free[lane] = float(last[n])
        p = int(ordinals[n])
        bars.append(
            [p, round(float(first[n]), 3), round(float(last[n]), 3), lane, int(states.stage[p]), int(states.attempt[p])]
        )
    return {"bars": bars, "lanes": len(free)}


def _busy(first: Any, last: Any, span: float) -> list[float]:
    """The mean number of jobs in each interval."""
    edges = np.linspace(0.0, span, BINS + 1)
    width = span / BINS
    # The seconds of work before each edge: those of a job are its length cut at the edge.
    begun, ended = np.sort(first), np.sort(last)
    sums_begun, sums_ended = np.concatenate(([0.0], np.cumsum(begun))), np.concatenate(([0.0], np.cumsum(ended)))
    n_begun, n_ended = np.searchsorted(begun, edges, "right"), np.searchsorted(ended, edges, "right")
    done = (n_begun * edges - sums_begun[n_begun]) - (n_ended * edges - sums_ended[n_ended])
    found: list[float] = np.round(np.maximum(np.diff(done), 0.0) / width, 2).tolist()
    return found


def _marks(states: PartitionStates, drawn: Any, begin: float, place: dict[int, int]) -> list[dict[str, Any]]:
    """The takeovers, the retries and the failed jobs, the first ones."""
    retried = [p for p, former in list(states.former.items()) if former.failures and states.started[p] > 0]
    failed = drawn[states.stage[drawn] == PartitionStage.FAILED]
    seen: dict[tuple[str, int, float, str], list[int]] = {}
    for p in sorted(retried, key=lambda p: (float(states.started[p]), p)):
        former = states.former[p]
        before = former.tried[-1] if former.tried else None
        why = f": attempt {before.attempt} on {before.executor} ended with: {first_line(before.text)}" if before else ""
        _note(seen, "takeover" if former.losses else "retry", states, p, states.started[p] - begin, why, place)
    for p in map(int, failed[:MOST_MARKS]):
        _note(seen, "failed", states, p, states.finished[p] - begin, "", place)
    return [
        {"kind": kind, "at": at, "row": row, "partition": jobs[0], "jobs": len(jobs), "text": f"{_jobs(jobs)}{why}"}
        for (kind, row, at, why), jobs in list(seen.items())[:MOST_MARKS]
    ]


def _note(
    seen: dict[tuple[str, int, float, str], list[int]],
    kind: str,
    states: PartitionStates,
    p: int,
    at: Any,
    why: str,
    place: dict[int, int],
) -> None:
    """Add a job to the mark of those to which the same happened at the same time."""
    seen.setdefault((kind, place.get(int(states.executor[p]), 0), round(float(at), 1), why), []).append(p)


def _jobs(jobs: Sequence[int]) -> str:
    return f"partition {jobs[0]}" if len(jobs) == 1 else f"{len(jobs)} partitions from {min(jobs)} on"
