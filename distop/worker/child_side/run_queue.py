"""Runs that take turns in one thread of the child."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.worker.child_side.runner import Run


class Lines:
    """By their numbers. ``work`` does one run; ``rest`` is called when nobody waits in a line any more."""

    def __init__(self, work: Callable[[Run], None], rest: Callable[[], None]) -> None:
        self._work = work
        self._rest = rest
        self._lock = threading.Lock()
        self._waiting: dict[int, deque[Run]] = {}

    def add(self, run: Run) -> None:
        """Put a run at the end of its line."""
        with self._lock:
            waiting = self._waiting.get(run.line)
            if waiting is not None:
                waiting.append(run)
                return
            self._waiting[run.line] = deque([run])
        threading.Thread(target=self._serve, args=(run.line,), name=f"line-{run.line}", daemon=True).start()

    def take_out(self, run: Run) -> bool:
        """Whether the run had not begun; it will not be begun here."""
        with self._lock:
            waiting = self._waiting.get(run.line)
            if waiting is None or run not in waiting:
                return False
            waiting.remove(run)
            return True

    def take_all(self, line: int) -> list[Run]:
        """The runs of a line that have not begun; they will not be begun here."""
        with self._lock:
            waiting = self._waiting.get(line)
            taken = list(waiting or ())
            if waiting is not None:
                waiting.clear()
            return taken

    def _serve(self, line: int) -> None:
        while True:
            with self._lock:
                waiting = self._waiting[line]
                if not waiting:
                    del self._waiting[line]
                    break
                run = waiting.popleft()
            self._work(run)
        self._rest()
