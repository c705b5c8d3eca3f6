"""The kernel's count of processes that it killed for lack of memory.

A child whose JVM was killed sees only that it is gone. The counter tells why, without a guess: it moves for that alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from distop.core.frozen import frozen

if TYPE_CHECKING:
    from collections.abc import Iterator

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@frozen
class Kills:
    """How many processes were killed. ``where``: the file that counts them."""

    where: Path
    count: int


def oom_kills(proc: Path = PROC, cgroups: Path = CGROUPS) -> Kills | None:
    """The counter of this process's control group; of the machine where its group has none; None: nobody counts.

    ``memory.events`` is that of cgroup v2, ``memory.oom_control`` that of v1.
    """
    for path in (*_of_group(proc, cgroups), proc / "vmstat"):
        if (count := _count(path)) is not None:
            return Kills(path, count)
    return None


def said(before: Kills | None, after: Kills | None) -> str:
    """What two readings of the counter say of the time between them; "" where it did not move, or is another."""
    if before is None or after is None or before.where != after.where or after.count <= before.count:
        return ""
    number = after.count - before.count
    what = f"{number} process{'es' if number != 1 else ''}"
    whose = "on this machine" if after.where.name == "vmstat" else "of this executor's control group"
    return f"the kernel killed {what} {whose} for lack of memory meanwhile (oom_kill in {after.where})"


def _of_group(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Where the group's counter may be. In a container its path may be that of the host, which is not to be seen."""
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
