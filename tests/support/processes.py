"""The processes of an executor's machine: its daemon, and all that this started, directly or not."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from distop.worker.guardian import session_members

if TYPE_CHECKING:
    from collections.abc import Iterable


def children(pid: int) -> list[int]:
    """The processes that one started; none of one that is gone."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(word) for task in tasks for word in (task / "children").read_text().split()]
    except OSError:
        return []


def children_of_guardian(guardian: int) -> list[int]:
    """The child. Beside it a guardian has its second process, which is in the guardian's session as the child is not,
    and those of the child's session that lost who started them.
    """
    return [pid for pid in children(guardian) if _leads_a_session(pid)]


def machine(daemon: int) -> list[int]:
    """The daemon, its guardian and that one's second process, its child and all of the child's session. The guardian
    first: it meets nothing where all are ended in this order.
    """
    guardians = children(daemon)
    below = [pid for guardian in guardians for started in children(guardian) for pid in _with_session(started)]
    return list(dict.fromkeys([*guardians, daemon, *below]))


def suspend(daemon: int) -> list[int]:
    """Let all processes of a daemon's machine stand still; which. One that a signal waits for starts no other any more,
    so nothing is missed once a look finds nothing new.
    """
    found = list[int]()
    while new := [pid for pid in machine(daemon) if pid not in found]:
        signal_all(new, signal.SIGSTOP)
        found += new
    return found


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _leads_a_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def _with_session(pid: int) -> list[int]:
    return [pid, *(session_members(pid) if _leads_a_session(pid) else ())]
