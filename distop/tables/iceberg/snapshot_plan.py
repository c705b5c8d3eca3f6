"""Plans the current snapshot of an Iceberg metadata file into partitions; plans are cached."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distop.errors import InvalidArgument
from distop.protocol.plan import MAX_PARTITIONS, PartitionPlan, Planned
from distop.runtime.lru_cache import LruCache
from distop.tables.iceberg.avro import Damaged
from distop.tables.iceberg.metadata_file import identity_on_disk, read_file
from distop.tables.iceberg.snapshot_checks import are_same, note_checked
from distop.tables.iceberg.snapshot_files import FileIdentity, data_files, unreadable
from distop.tables.parquet.parquet_format import EMPTY, in_groups, natural

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.protocol.records import TableRecord
    from distop.tables.reading.file_facts import PlannedFile
    from distop.tables.table_options import TableOptions

NO_SNAPSHOT = "no snapshot"
"""The version of a table without any snapshot."""

_CACHED_FILES = 20_000
"""Maximum files of a cached plan: some 10 MB."""

_plans: LruCache[tuple[Planned, tuple[FileIdentity, ...]]] = LruCache(4)
"""Plans, with the manifest list and the manifests that they were read from."""


def plan_metadata(source: str, table: TableRecord, options: TableOptions, check: Callable[[], None]) -> Planned:
    """Plan the current snapshot of a metadata file. The version is the snapshot's id.

    There is one partition per value of each partition spec, and groups of files for a spec without partitions. A table
    without files is one partition without files: unlike an empty folder, it certainly has no rows, and the partition's
    job still checks the columns.

    Metadata files and manifests never change unless forged, so plans are cached, as long as manifests on a disk are the
    same files.

    Raises InvalidArgument for a file that may not belong to the table, and for too many partitions; TableUnavailable if
    metadata or manifests cannot be read.
    """
    key = identity_on_disk(source)
    if key is None:
        return _planned(source, table, options, check)[0]
    key = (*key, str(options.group_bytes), str(options.group_files))

    def make() -> tuple[Planned, tuple[FileIdentity, ...]]:
        return _planned(source, table, options, check)

    planned, manifests = _plans.get(key, make, keep=_is_small)
    if not are_same(manifests):
        # Do not use the cached plan if a manifest cannot be read or was replaced.
        made = make()
        planned, _ = made
        _plans.put(key, made)
    return replace(planned, partitions=list(planned.partitions))


def _is_small(made: tuple[Planned, tuple[FileIdentity, ...]]) -> bool:
    return sum(len(partition.files) for partition in made[0].partitions) <= _CACHED_FILES


def _planned(
    source: str, table: TableRecord, options: TableOptions, check: Callable[[], None]
) -> tuple[Planned, tuple[FileIdentity, ...]]:
    """A new plan, with the manifest list and the manifests that it was read from."""
    file = read_file(source)
    metadata, io = file.content, file.manifests()
    snapshot = metadata.current_snapshot()
    version = str(snapshot.snapshot_id) if snapshot is not None else NO_SNAPSHOT
    folders: dict[str, list[PlannedFile]] = {}
    unpartitioned: dict[str, list[PlannedFile]] = {}
    manifests: list[FileIdentity] = []
    if snapshot is not None:
        try:
            with io.watched():
                for prefix, name, planned in data_files(source, metadata, snapshot, io, check, manifests):
                    group = folders.setdefault(prefix + name, []) if name else unpartitioned.setdefault(prefix, [])
                    group.append(planned)
        except Damaged as error:
            raise unreadable(metadata, snapshot, error) from error
    note_checked(file, manifests)
    for prefix, files in unpartitioned.items():
        for name, group in in_groups(sorted(files, key=lambda f: (natural(f[0]), f[0])), options):
            folders[prefix + name] = group
    if not folders:
        folders[EMPTY] = []
    if len(folders) > MAX_PARTITIONS:
        count = len(folders)
        raise InvalidArgument(f"the table {table.location!r} has {count} partitions: at most a million are supported")
    partitions = []
    for ordinal, name in enumerate(sorted(folders, key=lambda name: (natural(name), name))):
        files = sorted(folders[name], key=lambda f: (natural(f[0]), f[0]))
        partitions.append(PartitionPlan(ordinal, name, sum(f[1] for f in files), tuple(files), source=source))
    return Planned(partitions, version), tuple(manifests)
