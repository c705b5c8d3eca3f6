"""Queues of runs in the child: the runs of one queue run one after the other in one thread."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.worker.child_side.runner import Run


class RunQueues:
    """The queues by number. ``execute`` runs one run; ``on_empty`` is called when a queue is empty."""

    def __init__(self, execute: Callable[[Run], None], on_empty: Callable[[], None]) -> None:
        self._execute = execute
        self._on_empty = on_empty
        self._lock = threading.Lock()
        self._waiting: dict[int, deque[Run]] = {}

    def add(self, run: Run) -> None:
        """Append a run to its queue, ``run.line``."""
        with self._lock:
            waiting = self._waiting.get(run.line)
            if waiting is not None:
                waiting.append(run)
                return
            self._waiting[run.line] = deque([run])
        threading.Thread(target=self._serve, args=(run.line,), name=f"line-{run.line}", daemon=True).start()

    def remove(self, run: Run) -> bool:
        """Remove a run that has not started. False: it has started."""
        with self._lock:
            waiting = self._waiting.get(run.line)
            if waiting is None or run not in waiting:
                return False
            waiting.remove(run)
            return True

    def remove_all(self, line: int) -> list[Run]:
        """Remove and return the runs of a queue that have not started."""
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
            self._execute(run)
        self._on_empty()
