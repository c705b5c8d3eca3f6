"""The kernel's counter of processes that it killed for lack of memory (OOM kills).

A child only sees that its JVM is gone. An increased counter shows the cause.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from distop.protocol.frozen import frozen

if TYPE_CHECKING:
    from collections.abc import Iterator

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@frozen
class OomKills:
    """A reading of the counter. ``where``: the file with the counter."""

    where: Path
    count: int


def read_oom_kills(proc: Path = PROC, cgroups: Path = CGROUPS) -> OomKills | None:
    """The counter of this process's control group, else of the machine; None if there is neither.

    cgroup v2 has it in ``memory.events``, v1 in ``memory.oom_control``.
    """
    for path in (*_of_group(proc, cgroups), proc / "vmstat"):
        if (count := _count(path)) is not None:
            return OomKills(path, count)
    return None


def describe(before: OomKills | None, after: OomKills | None) -> str:
    """A phrase about the kills between two readings; "" for none.

    Readings of two different counters are not compared.
    """
    if before is None or after is None or before.where != after.where or after.count <= before.count:
        return ""
    number = after.count - before.count
    what = f"{number} process{'es' if number != 1 else ''}"
    whose = "on this machine" if after.where.name == "vmstat" else "of this executor's control group"
    return f"the kernel killed {what} {whose} for lack of memory meanwhile (oom_kill in {after.where})"


def _of_group(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Paths that may have the control group's counter.

    In a container the path may be one of the host, which is not visible.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            roots, name = [cgroups, cgroups / "unified"], "memory.events"
        elif "memory" in controllers.split(","):
            roots, name = [cgroups / "memory"], "memory.oom_control"
        else:
            continue
        for root in roots:
            yield root / path.lstrip("/") / name
            yield root / name


def _count(path: Path) -> int | None:
    try:
        fields = dict(line.split()[:2] for line in path.read_text().splitlines() if len(line.split()) > 1)
        return int(fields["oom_kill"])
    except (OSError, KeyError, ValueError):
        return None
