"""Runs the second audit on a working cluster: follows its history in a thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from auditing.auditor import SecondAuditor
from auditing.history import Watch, WatchEnded, revisions, watch_command

if TYPE_CHECKING:
    from collections.abc import Sequence

PAUSE = 0.5
"""Seconds before a watch that ended is started again."""


class SecondFollower:
    """Audits a cluster while the context is open.

    ``options``: those of etcdctl, such as the endpoints.
    """

    def __init__(
        self, etcdctl: str, options: Sequence[str], namespace: str = "", auditor: SecondAuditor | None = None
    ) -> None:
        self.auditor = auditor if auditor is not None else SecondAuditor(namespace)
        self.failure: BaseException | None = None
        """The error that ended the audit early."""
        self._words = (etcdctl, tuple(options), namespace)
        self._watch: Watch | None = None
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> SecondFollower:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._over.set()
            if self._watch is not None:
                self._watch.stop()
        self._thread.join(20)

    def problems(self, last: int) -> list[str]:
        """The violations up to revision ``last``, or why the audit did not get there."""
        found = [f"second audit: {violation}" for violation in self.auditor.violations]
        if self.failure is not None:
            found.append(f"the second audit ended: {self.failure!r}")
        elif self.auditor.revision < last:
            found.append(f"the second audit stopped at revision {self.auditor.revision} of {last}")
        return found

    def summary(self) -> str:
        """The last checked revision and the number of operations, in one line."""
        auditor = self.auditor
        return f"second audit: up to revision {auditor.revision}, {auditor.operations:,} operations"

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._follow()
                self._over.wait(PAUSE)
        except BaseException as error:
            self.failure = error

    def _follow(self) -> None:
        """Judge revisions until the watch ends. Raises HistoryLost."""
        etcdctl, options, namespace = self._words
        watch = Watch(watch_command(etcdctl, options, namespace, self.auditor.revision + 1))
        with self._lock:
            if self._over.is_set():
                return
            self._watch = watch.__enter__()
        try:
            for revision in revisions(watch.lines):
                self.auditor.feed(revision)
        except WatchEnded:
            return  # a member was restarted, or a token expired: the next watch starts where this one ended
        finally:
            watch.__exit__()
