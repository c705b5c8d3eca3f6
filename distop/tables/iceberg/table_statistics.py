"""Statistics of an Iceberg table: its snapshots from the metadata file, its files from the manifests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.clock import time
from distop.errors import DistopError
from distop.storage.store_errors import StoreError
from distop.tables.iceberg import manifest_facts
from distop.tables.iceberg.manifest_list import manifests_of
from distop.tables.iceberg.metadata_file import read_file
from distop.tables.iceberg.snapshot_files import PartitionNames, files_of, unreadable
from distop.tables.iceberg.snapshot_plan import NO_SNAPSHOT
from distop.tables.statistics import FileTotals, TableStatistics

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any

OF_METADATA = frozenset({"snapshots", "oldest_snapshot"})
"""Statistics that need no manifest."""
_DATA = 0
"""The content of a manifest of data files."""


def statistics(source: str, names: Collection[str], small_bytes: int, check: Callable[[], None]) -> TableStatistics:
    """The statistics of the metadata file ``source``; the version is the id of its current snapshot.

    Rows of delete files count as deleted, of equality deletes too, which may match any number of rows. Delete files
    that apply to no data file do not count, since no compaction changes that. Raises InvalidArgument and
    TableUnavailable as planning does.
    """
    metadata = read_file(source).content
    snapshot = metadata.current_snapshot()
    version = str(snapshot.snapshot_id) if snapshot is not None else NO_SNAPSHOT
    oldest = min((one.timestamp_ms for one in metadata.snapshots), default=None)
    age = max(0.0, time.time() - oldest / 1_000) if oldest is not None else 0.0
    of_metadata = TableStatistics(version, snapshots=len(metadata.snapshots), oldest_snapshot=age)
    if not set(names) - OF_METADATA:
        return of_metadata
    totals, rows, deleted = FileTotals(small_bytes), 0, 0
    if snapshot is not None:
        try:
            rows, deleted = _add_files(source, metadata, snapshot, totals, check)
        except StoreError as error:
            raise unreadable(metadata, snapshot, error) from error
        except DistopError:
            raise
        except Exception as error:  # for a damaged file the reader raises any error, even SystemError
            raise unreadable(metadata, snapshot, error) from error
    return totals.statistics(of_metadata, deleted / rows if rows else 0.0)


def _add_files(
    source: str, metadata: Any, snapshot: Any, totals: FileTotals, check: Callable[[], None]
) -> tuple[int, int]:
    """Add the data files of a snapshot. Returns the numbers of rows, and of deleted rows."""
    rows = deleted = 0
    io, files, specs = read_file(source).manifests(), files_of(source, metadata), metadata.specs()
    with io.watched():
        manifests = manifests_of(snapshot, io)
        deletes = manifest_facts.deletes_of(manifests, metadata, io, files, check)
        for manifest in manifests:
            if manifest.content != _DATA:
                continue
            names = PartitionNames(specs[manifest.partition_spec_id], metadata)
            for entry in manifest_facts.live_entries(manifest, io, files, check):
                file = entry.file
                rows += file.record_count
                totals.add(names.prefix + names.name(file.partition), file.file_size_in_bytes)
                if deletes.any:
                    key = manifest_facts.partition_key(manifest, file)
                    deleted += sum(one.rows for one in deletes.take(file.file_path, key, entry.sequence))
    return rows, deleted
