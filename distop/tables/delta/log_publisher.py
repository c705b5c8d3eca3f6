"""Publishes a commit in the log of a Delta table, without a JVM.

The commit is the file of the next version, which is created only if nobody has created it: so it asserts the version
that was loaded.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument, TableUnavailable
from distop.storage import deletion
from distop.storage.deletion import Place
from distop.storage.location import Location, root_of
from distop.tables import commit_file
from distop.tables.commits import Conflict, Head
from distop.tables.delta import metadata_commit
from distop.tables.delta.delta_log import current_snapshot
from distop.tables.delta.log_files import LogFiles
from distop.tables.delta.table_paths import LOG, commit_name

if TYPE_CHECKING:
    from distop.protocol.records import TableRecord
    from distop.tables.commits import CommitContext
    from distop.tables.delta.delta_log import DeltaSnapshot

_UNSAFE = (
    "the table is not changed, because others could change its log",
    f"let only the executors' user and root change or replace the table's folder and its {LOG}",
)


class LogPublisher:
    """Commits to a Delta table in a folder."""

    def __init__(self, table: TableRecord, ctx: CommitContext) -> None:
        self._table = table
        self._ctx = ctx
        self._root = root_of(table.location)

    @property
    def root(self) -> str:
        """The table's folder."""
        return self._root

    def check_folders(self, *, rewritten: bool) -> None:
        """Raises UnsafePath if other users may change the log on a disk, InvalidArgument for an unsuitable store.

        In an unsuitable object store, two writers may both create the same file.
        """
        deletion.check_own(Place(self._root, LOG), _UNSAFE, missing=True)
        commit_file.check_suitable(self._root)

    def load(self) -> Head:
        """The newest version, not cached. Raises TableUnavailable if there is no table."""
        try:
            # The log is listed anew each time; a version that was read before is only read again if it has changed.
            snapshot = current_snapshot(Location.of(self._table.location), self._ctx.check_cancelled)
        except (InvalidArgument, TableUnavailable):
            self._ctx.check_reachable()
            raise
        return Head(snapshot.source, metadata_commit.configuration(snapshot), snapshot)

    def commit(self, snapshot: DeltaSnapshot, data: bytes) -> None:
        """Create the next version with these bytes, if this snapshot is still the newest version.

        Raises Conflict, CommitUnknown, TableUnavailable if the store refuses, UnsafePath, and InvalidArgument.
        """
        self.check_folders(rewritten=False)
        if LogFiles(self._root).digest(snapshot.version) != snapshot.digest:
            raise Conflict(f"version {snapshot.version} of {self._root} is now another one: the table was replaced")
        commit_file.create(Place(self._root, LOG), commit_name(snapshot.version + 1), data)

    def info(self, snapshot: DeltaSnapshot, operation: str, parameters: dict[str, Any]) -> dict[str, Any]:
        """The information about a commit for the table's history. ``txnId`` makes each commit unique."""
        return {
            "timestamp": int(time.time() * 1000),
            "operation": operation,
            "operationParameters": parameters,
            "readVersion": snapshot.version,
            "isolationLevel": "Serializable",
            "isBlindAppend": False,
            "operationMetrics": {},
            "engineInfo": "distop",
            "txnId": str(uuid.uuid4()),
        }
