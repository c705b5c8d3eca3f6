"""Statistics of an Iceberg table: its snapshots from the metadata file, its files from the manifests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.clock import time
from distop.errors import DistopError
from distop.storage.store_errors import StoreError
from distop.tables.iceberg.iceberg_changes import entries
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


def statistics(source: str, names: Collection[str], small_bytes: int, check: Callable[[], None]) -> TableStatistics:
    """The statistics of the metadata file ``source``; the version is the id of its current snapshot.

    Rows of delete files count as deleted, of equality deletes too, which may match any number of rows. Raises
    InvalidArgument and TableUnavailable as planning does.
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
    from pyiceberg.manifest import ManifestContent

    rows = deleted = 0
    io, files, specs = read_file(source).manifests(), files_of(source, metadata), metadata.specs()
    with io.watched():
        for manifest in manifests_of(snapshot, io):
            files.check((manifest.manifest_path,))
            names = PartitionNames(specs[manifest.partition_spec_id], metadata)
            for _, entry in entries([manifest], io, check):
                file = entry.data_file
                if manifest.content != ManifestContent.DATA:
                    deleted += file.record_count
                    continue
                rows += file.record_count
                totals.add(names.prefix + names.name(file.partition), file.file_size_in_bytes)
    return rows, deleted
