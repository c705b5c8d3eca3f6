"""Statistics of a Delta table, from its log."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from distop.clock import time
from distop.tables.delta.delta_log import commit, current_snapshot, current_version
from distop.tables.delta.delta_plan import partition_name
from distop.tables.delta.log_files import LogFiles
from distop.tables.reading.file_facts import Gone
from distop.tables.statistics import FileTotals, TableStatistics

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from distop.storage.location import Location
    from distop.tables.delta.delta_log import AddedFile

_COMMIT = re.compile(r"([0-9]{20})\.json")


def statistics(
    location: Location, names: Collection[str], small_bytes: int, check: Callable[[], None]
) -> TableStatistics:
    """The statistics of the newest version. A snapshot is a version whose commit the log has.

    ``delete_ratio`` is None if rows are deleted and a file has no number of rows in the log. Raises InvalidArgument and
    TableUnavailable as planning does.
    """
    if not names and (version := _version(location)):
        return TableStatistics(version)
    snapshot = current_snapshot(location, check)
    versions, oldest = _versions(location)
    of_log = TableStatistics(snapshot.id, snapshots=versions, oldest_snapshot=oldest)
    totals, rows, deleted = FileTotals(small_bytes), 0, 0
    counted = True
    for file in snapshot.files.values():
        totals.add(partition_name(snapshot.schema, file.values), file.size)
        count = _rows(file)
        counted = counted and count is not None
        rows += count or 0
        deleted += file.vector.rows if file.vector is not None else 0
    ratio = deleted / rows if rows and counted else None
    return totals.statistics(of_log, ratio if deleted else 0.0)


def _version(location: Location) -> str:
    """The newest version, named as in plans; "" if its commit was removed after a checkpoint."""
    version = current_version(location)
    digest = LogFiles(location.text).digest(version)
    return f"{version}-{digest}" if digest else ""


def _versions(location: Location) -> tuple[int, float | None]:
    """The number of versions whose commits exist, and the age of the oldest one in seconds, if its commit has it."""
    log = LogFiles(location.text)
    known = sorted(int(found[1]) for found in map(_COMMIT.fullmatch, log.names()) if found)
    if not known:
        return 0, None
    try:
        for action in commit(log, known[0]):
            info = action.get("commitInfo")
            if isinstance(info, dict) and isinstance(stamp := info.get("timestamp"), int):
                return len(known), max(0.0, time.time() - stamp / 1_000)
    except Gone:  # a cleanup of the log since the listing
        pass
    return len(known), None


def _rows(file: AddedFile) -> int | None:
    """The number of rows of a file with its deleted rows; None if the log does not have it."""
    found = file.statistics
    try:
        parsed = json.loads(found) if isinstance(found, str) else found
        count = parsed["numRecords"] if parsed is not None else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return count if isinstance(count, int) and not isinstance(count, bool) and count >= 0 else None
