"""The jobs of an operation on its page: a map, the failed and open ones, durations, and executors. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distop.cli.output import duration
from distop.protocol.plan import is_wide
from distop.services.operation_results import first_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from distop.protocol.records import Node
    from distop.services.inspection.partitions import Partition

CELLS = 2_000
"""Cells of a map, roughly: with more partitions, neighbours share a cell."""
ROWS = 1_000
"""Partitions that are listed in full; of others only the names are listed."""
_SLOWEST = 10
_GROUPS = 100
"""Rows of a map, when it has a row for each folder."""
_ALIKE = 1.1
_TOLD = 3
_TITLE = 200


@dataclass(frozen=True, slots=True)
class Kind:
    """The state of a job on a page. ``mark``: its sign without colour."""

    name: str
    mark: str
    text: str


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("failed", "✕", "failed"),
        Kind("lost", "?", "claimed by a lost executor"),
        Kind("waiting", "↻", "waiting for a retry"),
        Kind("running", "▶", "running"),
        Kind("unended", "–", "not ended"),
        Kind("open", "·", "not started"),
        Kind("success", "✓", "succeeded"),
    )
}
"""The worst first: a cell of several partitions has the colour of its worst one."""
ENDED = Kind("ended", "●", "ended")
"""Succeeded or failed, if these are not distinguished."""
_RANK = {name: rank for rank, name in enumerate(KINDS)}
_LEGEND = ("success", "failed", "running", "waiting", "lost", "open", "unended")


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of the map: one partition, or several neighbours; ``kind``: the worst of them."""

    kind: Kind
    title: str


@dataclass(frozen=True, slots=True)
class FolderRow:
    """A row of the map: the partitions in one folder, a job over several of them, or (``name`` "") all others."""

    name: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class PartitionRow:
    """The details of a partition. ``more``: the lines of its error after the first."""

    name: str
    kind: Kind
    attempt: str
    executor: str
    took: str
    error: str
    more: str


@dataclass(frozen=True, slots=True)
class KindList:
    """The partitions of one kind: details of the first ones, and the names of the others."""

    kind: Kind
    rows: tuple[PartitionRow, ...]
    names: tuple[str, ...]

    @property
    def count(self) -> int:
        """The number of partitions of this kind."""
        return len(self.rows) + len(self.names)


@dataclass(frozen=True, slots=True)
class ExecutorWork:
    """The work of one executor. ``host``: "" if it is not alive. ``current``: jobs that it holds now."""

    name: str
    host: str
    success: int
    failed: int
    current: int
    span: str


@dataclass(frozen=True, slots=True)
class JobMap:
    """All jobs of an operation.

    ``by_kind``: the jobs that did not succeed, the worst kind first, with details for up to :data:`ROWS` of them.
    ``shared``: the number of partitions in each cell of the map. ``slowest``: empty if all took about the same time.
    ``first`` and ``last``: when the first job started and the last one ended (0: unknown).
    """

    total: int
    ended: int
    counts: tuple[tuple[Kind, int], ...]
    groups: tuple[FolderRow, ...]
    shared: int
    by_kind: tuple[KindList, ...]
    slowest: tuple[PartitionRow, ...]
    typical: str
    executors: tuple[ExecutorWork, ...]
    first: float
    last: float


def jobs_of(partitions: Sequence[Partition], nodes: Mapping[str, Node], *, ended: bool) -> JobMap:
    """The jobs of these partitions. ``nodes``: live executors by incarnation."""
    kinds = [KINDS[_kind(p, nodes, ended=ended)] for p in partitions]
    counts = Counter(kind.name for kind in kinds)
    groups, shared = _map(partitions, kinds)
    timed = [(seconds, p, kind) for p, kind in zip(partitions, kinds, strict=True) if (seconds := _seconds(p)) >= 0]
    slowest = sorted(timed, key=lambda one: (-one[0], one[1].ordinal))[:_SLOWEST]
    typical, alike = _typical([seconds for seconds, _, _ in timed])
    return JobMap(
        len(partitions),
        counts["success"] + counts["failed"],
        tuple((KINDS[name], counts[name]) for name in _LEGEND if counts[name]),
        groups,
        shared,
        tuple(_kind_lists(partitions, kinds)),
        () if alike else tuple(_row(p, kind) for _, p, kind in slowest),
        typical,
        tuple(_executors(partitions, kinds, nodes)),
        min((p.started for p in partitions if p.started), default=0.0),
        max((p.finished for p in partitions if p.finished), default=0.0),
    )


_NAMED = {"success", "open", "unended"}
"""Kinds whose partitions are listed by name only."""


def _kind_lists(partitions: Sequence[Partition], kinds: Sequence[Kind]) -> Iterator[KindList]:
    of: dict[str, list[Partition]] = {}
    for kind, p in zip(kinds, partitions, strict=True):
        if kind.name != "success":
            of.setdefault(kind.name, []).append(p)
    room = ROWS
    for name, kind in KINDS.items():
        if found := of.get(name):
            full = 0 if name in _NAMED else min(room, len(found))
            room -= full
            yield KindList(kind, tuple(_row(p, kind) for p in found[:full]), tuple(map(name_of, found[full:])))


def _kind(p: Partition, nodes: Mapping[str, Node], *, ended: bool) -> str:
    if p.state == "running" and p.incarnation and p.incarnation not in nodes and not ended:
        return "lost"
    if ended and p.state not in ("success", "failed"):
        return "unended"
    return p.state if p.state in KINDS else "open"


def name_of(p: Partition) -> str:
    """The partition's name, or its ordinal if it has none."""
    return p.name or f"partition {p.ordinal}"


def _seconds(p: Partition) -> float:
    """How long the last attempt took by its executor's clock; -1 if unknown."""
    return p.finished - p.started if p.started and p.finished >= p.started else -1.0


def _took(p: Partition) -> str:
    seconds = _seconds(p)
    return duration(seconds) if seconds >= 0 else ""


def split_error(text: str) -> tuple[str, str]:
    """The first line of an error, and the lines after it."""
    return first_line(text), text.strip().partition("\n")[2].strip("\n")


def _row(p: Partition, kind: Kind) -> PartitionRow:
    line, rest = split_error(p.error)
    attempts = [f"attempt {one.attempt} on {one.executor}: {one.text.strip()}" for one in p.tried]
    more = "\n".join([*([rest] if rest else []), *(attempts if len(attempts) > 1 or not line else [])])
    return PartitionRow(name_of(p), kind, str(p.attempt) if p.attempt else "", p.executor, _took(p), line, more)


# -------------------------------------------------------------------------- map


def _map(partitions: Sequence[Partition], kinds: Sequence[Kind]) -> tuple[tuple[FolderRow, ...], int]:
    shared = max(1, -(-len(partitions) // CELLS))
    runs: list[tuple[str, int, int]] = []
    for n, p in enumerate(partitions):
        folder = p.name if is_wide(p.name) else p.name.rpartition("/")[0]
        if runs and runs[-1][0] == folder:
            runs[-1] = (folder, runs[-1][1], n + 1)
        else:
            runs.append((folder, n, n + 1))
    if not 2 <= len(runs) <= _GROUPS or len(runs) * 2 > len(partitions) or len({run[0] for run in runs}) < len(runs):
        runs = [("", 0, len(partitions))]
    return tuple(
        FolderRow(name, tuple(_cell(partitions[n : min(n + shared, end)], kinds[n : min(n + shared, end)])
                          for n in range(first, end, shared)))
        for name, first, end in runs
    ), shared  # fmt: skip


def _cell(partitions: Sequence[Partition], kinds: Sequence[Kind]) -> Cell:
    if len(partitions) == 1:
        return Cell(kinds[0], _title(partitions[0], kinds[0]))
    counts = Counter(kind.name for kind in kinds)
    counted = ", ".join(f"{counts[name]} {KINDS[name].text}" for name in _LEGEND if counts[name])
    lines = [f"{name_of(partitions[0])} … {name_of(partitions[-1])}: {counted}"]
    seen = [(kind, p) for kind, p in zip(kinds, partitions, strict=True) if kind.name not in _NAMED]
    lines += [_title(p, kind) for kind, p in seen[:_TOLD]]
    if len(seen) > _TOLD:
        lines.append(f"and {len(seen) - _TOLD} more")
    return Cell(min(kinds, key=lambda kind: _RANK[kind.name]), "\n".join(lines))


def _title(p: Partition, kind: Kind) -> str:
    parts = [f"{name_of(p)}: {kind.text}"]
    if p.attempt:
        parts.append(f"attempt {p.attempt}" + (f" on {p.executor}" if p.executor else ""))
    if took := _took(p):
        parts.append(took)
    if p.error:
        line = first_line(p.error)
        parts.append(line if len(line) <= _TITLE else f"{line[:_TITLE]}…")
    return " · ".join(parts)


# ------------------------------------------------------------- times and executors


def _typical(seconds: Sequence[float]) -> tuple[str, bool]:
    """A sentence about how long the jobs took, and whether all took about the same time."""
    if len(seconds) < 2:
        return "", False
    ordered = sorted(seconds)
    least, median, slowest = ordered[0], statistics.median(ordered), ordered[-1]
    if slowest <= least * _ALIKE:
        return f"All jobs took about {duration(median)}.", True
    most = ordered[-(-95 * len(ordered) // 100) - 1]
    return (
        f"Half of the jobs took up to {duration(median)}, 95 % up to {duration(most)}, the slowest {duration(slowest)}."
    ), False


def _executors(partitions: Sequence[Partition], kinds: Sequence[Kind], nodes: Mapping[str, Node]) -> list[ExecutorWork]:
    hosts = {node.executor: node.host for node in nodes.values()}
    of: dict[str, list[tuple[Partition, str]]] = {}
    for p, kind in zip(partitions, kinds, strict=True):
        if p.executor and kind.name in ("success", "failed", "running"):
            of.setdefault(p.executor, []).append((p, kind.name))
    found = []
    for name in sorted(of):
        count = Counter(kind for _, kind in of[name])
        began = [p.started for p, _ in of[name] if p.started]
        ended = [p.finished for p, _ in of[name] if p.finished]
        span = duration(max(0.0, max(ended) - min(began))) if began and ended else ""
        found.append(ExecutorWork(name, hosts.get(name, ""), count["success"], count["failed"], count["running"], span))
    return found
