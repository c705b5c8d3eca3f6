"""Names of Spark's FAIR pools, lent to operations while they use them.

Spark makes a pool for each name that it meets and never removes one, and each of its scheduling decisions looks at all
of them. So there are as many names as operations were ever at work at once, and not one for each operation.
"""

from __future__ import annotations

import itertools
import threading


class Pools:
    """Who has which name. An operation has one for all of its threads; a thread works for one operation at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lent: dict[str, tuple[str, set[threading.Thread]]] = {}

    def lend(self, operation: str) -> str:
        """The operation's pool, for the calling thread until it gives it back or ends."""
        thread = threading.current_thread()
        with self._lock:
            self._drop(thread)
            if operation not in self._lent:
                taken = {name for name, _ in self._lent.values()}
                free = next(name for name in (f"distop-{n}" for n in itertools.count(1)) if name not in taken)
                self._lent[operation] = (free, set())
            name, threads = self._lent[operation]
            threads.add(thread)
            return name

    def give_back(self) -> None:
        """The calling thread works for no operation any more."""
        with self._lock:
            self._drop(threading.current_thread())

    def _drop(self, leaving: threading.Thread) -> None:
        """Forget a thread, and those that have ended: a behavior's own threads give nothing back."""
        for operation, (_, threads) in list(self._lent.items()):
            threads -= {thread for thread in threads if thread is leaving or not thread.is_alive()}
            if not threads:
                del self._lent[operation]
