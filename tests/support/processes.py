"""The processes of an executor: its daemon and all processes that the daemon started, directly or indirectly."""

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
    """The child processes of a process; none if it has ended."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(word) for task in tasks for word in (task / "children").read_text().split()]
    except OSError:
        return []


def children_of_guardian(guardian: int) -> list[int]:
    """The children of a guardian that lead a session: the executor's child.

    Not its second process, which is in the guardian's session, and not orphans of the child's session.
    """
    return [pid for pid in children(guardian) if _leads_a_session(pid)]


def machine(daemon: int) -> list[int]:
    """The daemon, its guardian with its second process, the child, and all processes of the child's session.

    The guardian comes first: if all are killed in this order, it does not notice the end of another one.
    """
    guardians = children(daemon)
    below = [pid for guardian in guardians for started in children(guardian) for pid in _with_session(started)]
    return list(dict.fromkeys([*guardians, daemon, *below]))


def suspend(daemon: int) -> list[int]:
    """Stop (SIGSTOP) all processes of a daemon; returns them.

    A process with a pending SIGSTOP starts no other process, so none is missed once a search finds no new one.
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
