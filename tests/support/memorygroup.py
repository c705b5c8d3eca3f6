"""A control group with a memory limit: the kernel kills a process that exceeds it."""

from __future__ import annotations

import os
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.needs import need

if TYPE_CHECKING:
    from collections.abc import Iterator

CGROUPS = Path("/sys/fs/cgroup")


@contextmanager
def memory_group(size: int) -> Iterator[tuple[str, ...]]:
    """A group with ``size`` bytes; yields the prefix of commands that run in it.

    The group is empty at the end.
    """
    first = (CGROUPS / "cgroup.controllers").exists()
    folder = (CGROUPS if first else CGROUPS / "memory") / f"distop-{uuid.uuid4().hex[:8]}"
    limits = {"memory.max": size, "memory.swap.max": 0} if first else {"memory.limit_in_bytes": size}
    try:
        folder.mkdir()
        made = all((folder / name).exists() for name in list(limits)[:1])
        for name in [name for name in limits if (folder / name).exists()]:
            (folder / name).write_text(str(limits[name]))
    except OSError:
        made = False
    try:
        need(made, "the right to make control groups with a limit of memory: run it as root")
        yield ("/bin/sh", "-c", f'echo $$ > {folder / "cgroup.procs"} && exec "$@"', "sh")
    finally:
        if folder.exists():
            os.rmdir(folder)  # noqa: PTH106
