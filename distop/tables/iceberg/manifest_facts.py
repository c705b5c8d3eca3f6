"""Reads facts of an Iceberg snapshot's data files from its manifests, without a JVM.

Fields are found by their ids. Bounds in manifests need not be values of the column: they can prove that all rows
satisfy a condition, or that no row does, but never that some rows do.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from distop.errors import DistopError
from distop.protocol.frozen import frozen
from distop.runtime.lru_cache import LruCache
from distop.storage.files import NotRegular, check_regular, identity
from distop.storage.store_errors import StoreError, unavailable
from distop.tables.iceberg import iceberg_fields, row_deletes
from distop.tables.iceberg.iceberg_fields import local_path
from distop.tables.iceberg.manifest_list import manifests_of
from distop.tables.iceberg.metadata_file import read_anew
from distop.tables.iceberg.missing_files import check_length, file_gone, snapshot_gone
from distop.tables.iceberg.row_deletes import check_vector
from distop.tables.iceberg.snapshot_checks import note_checked
from distop.tables.iceberg.snapshot_files import files_of
from distop.tables.reading.file_facts import Chunk, FileFacts, Gone, Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from distop.storage.confinement import TableFiles
    from distop.tables.iceberg.avro import ManifestIO
    from distop.tables.iceberg.iceberg_fields import IcebergField
    from distop.tables.reading.file_facts import Path, PlannedFile, SparkType

_DATA, _DELETES = 0, 1
"""The content of a manifest: data files or delete files."""
_ADDED, _REMOVED = 1, 2
"""Values of an entry's status."""
_NEWEST = 3
"""The format version whose entries have all columns; older entries are read with its schema."""
_CHECKED_EVERY = 1_000
"""Number of entries between two checks whether to stop."""

_snapshots: LruCache[IcebergSnapshot] = LruCache(4)


@frozen
class IcebergSnapshot:
    """The current snapshot of a metadata file.

    ``id``: "" if there is no snapshot; ``columns``: the table's; ``fields``: the requested ones; ``files``: the facts
    of each data file, by its path in the manifests; ``spec``: the id of the table's partition spec; ``specs``: the ids
    of the specs of files with another one, by path.
    """

    source: str
    id: str
    columns: Mapping[str, SparkType]
    fields: Mapping[Path, IcebergField]
    files: Mapping[str, FileFacts]
    spec: int
    specs: Mapping[str, int]

    def spec_of(self, path: str) -> int | None:
        """The id of the partition spec of a data file; None if the snapshot does not have the file."""
        return self.specs.get(path, self.spec) if path in self.files else None

    def of(self, file: PlannedFile) -> FileFacts:
        """The facts of a planned file.

        Raises Unreadable if it is not in the snapshot. For a file on a disk, also raises Unreadable if its size differs
        from the manifest, and Gone if it no longer exists: a file that cannot be read must not be judged by its
        statistics. Object stores are not asked, because that takes a request per file.
        """
        path, size, _ = file
        if path not in self.files:
            raise Unreadable(f"the file {path} is not in the snapshot {self.id} of {self.source}")
        local = local_path(path)
        if local is not None:
            self._check_size(path, size, local)
        return self.files[path]

    def _check_size(self, path: str, size: int, local: str) -> None:
        try:
            found = os.stat(local)  # noqa: PTH116
            check_regular(path, found.st_mode)
        except FileNotFoundError:
            raise Gone(file_gone(path, self.id)) from None
        except NotRegular as error:
            raise Unreadable(str(error)) from None
        except OSError as error:
            raise Unreadable(f"the file {path} cannot be read: {error.strerror or error}") from error
        check_length(path, size, found.st_size)


def snapshot_of(source: str, wanted: frozenset[str], check: Callable[[], None] = lambda: None) -> IcebergSnapshot:
    """The snapshot of the metadata file ``source``, with statistics of the ``wanted`` top-level columns.

    ``wanted``: as by ``file_facts.folded``. The snapshot is cached for all partitions and later operations; concurrent
    callers wait for one reading. ``check`` is called regularly during reading and waiting, and raises to stop. Raises
    Gone, Unreadable, and TableUnavailable if its store refuses a file or does not answer.
    """
    return _snapshots.get_once((*identity(source), wanted), lambda: _read(source, wanted, check), check)


def _read(source: str, wanted: frozenset[str], check: Callable[[], None]) -> IcebergSnapshot:
    try:
        file = read_anew(source)
        metadata, io = file.content, file.manifests()
        schema = metadata.schema()
        found = iceberg_fields.fields_of(schema, wanted)
        columns = iceberg_fields.columns_of(schema)
        snapshot = metadata.current_snapshot()
        files: dict[str, FileFacts] = {}
        specs: dict[str, int] = {}
        read_from: list[tuple[str, ...]] = []
        if snapshot is not None:
            read_from.append(identity(snapshot.manifest_list))
            allowed = files_of(source, metadata)
            with io.watched():
                manifests = manifests_of(snapshot, io)
                read_from += [identity(manifest.manifest_path) for manifest in manifests]
                removed = deletes_of(manifests, metadata, io, allowed, check)
                for manifest in manifests:
                    if manifest.content == _DATA:
                        spec = int(manifest.partition_spec_id)
                        facts = _Facts(metadata.specs()[spec], columns, found, removed)
                        for entry in live_entries(manifest, io, allowed, check):
                            path = entry.file.file_path
                            files[path] = facts.of(entry)
                            if spec != metadata.default_spec_id:
                                specs[path] = spec
    except FileNotFoundError as error:
        raise Gone(snapshot_gone(source, f"{error.filename or 'a manifest'} is gone")) from error
    except StoreError as error:
        raise unavailable(f"cannot read the metadata of {source}: {error}", error) from error
    except (DistopError, Unreadable):
        raise
    except Exception as error:  # for a damaged file the reader raises any error, even SystemError
        reason = str(error).strip().split("\n")[0]
        raise Unreadable(f"the metadata of {source} cannot be read: {reason}") from error
    note_checked(file, read_from)
    number = str(snapshot.snapshot_id) if snapshot is not None else ""
    return IcebergSnapshot(source, number, columns, found, files, int(metadata.default_spec_id), specs)


def deletes_of(
    manifests: Sequence[Any], metadata: Any, io: ManifestIO, allowed: TableFiles, check: Callable[[], None]
) -> row_deletes.Deletes:
    """The delete files of a snapshot with these manifests. Raises InvalidArgument for one outside of the table."""
    from pyiceberg.transforms import VoidTransform

    found = row_deletes.Deletes()
    for manifest in manifests:
        if manifest.content != _DELETES:
            continue
        spec = metadata.specs()[manifest.partition_spec_id]
        everywhere = all(isinstance(field.transform, VoidTransform) for field in spec.fields)
        for entry in live_entries(manifest, io, allowed, check):
            partition = row_deletes.partition_of(spec.spec_id, values_of(entry.file))
            found.add(row_deletes.delete_of(entry, partition, everywhere=everywhere))
    return found


def delete_counts(
    manifests: Sequence[Any], metadata: Any, io: ManifestIO, allowed: TableFiles, check: Callable[[], None]
) -> Mapping[str, int]:
    """The number of delete files that apply to each data file, by path; {} in a snapshot without delete files."""
    deletes = deletes_of(manifests, metadata, io, allowed, check)
    if not deletes.any:
        return {}
    return {
        entry.file.file_path: deletes.count(entry.file.file_path, partition_key(manifest, entry.file), entry.sequence)
        for manifest in manifests
        if manifest.content == _DATA
        for entry in live_entries(manifest, io, allowed, check)
    }


def partition_key(manifest: Any, file: File) -> row_deletes.PartitionKey:
    """The key of a file's partition."""
    return row_deletes.partition_of(int(manifest.partition_spec_id), values_of(file))


class _Facts:
    """Creates the facts of the files in one manifest."""

    def __init__(
        self,
        spec: Any,
        columns: Mapping[str, SparkType],
        found: Mapping[Path, IcebergField],
        removed: row_deletes.Deletes,
    ) -> None:
        from pyiceberg.transforms import IdentityTransform

        self._spec_id = spec.spec_id
        self._columns = columns
        self._fields = found
        self._leaves = {path: field.leaf for path, field in found.items()}
        self._deletes = removed
        self._constant = {
            part.source_id: n for n, part in enumerate(spec.fields) if isinstance(part.transform, IdentityTransform)
        }

    def of(self, entry: ManifestEntry) -> FileFacts:
        file = entry.file
        values = values_of(file)
        chunks: dict[Path, tuple[Chunk, ...]] = {}
        for path, field in self._fields.items():
            if len(path) == 1 and field.id in self._constant:
                # Iceberg reads the partition's value instead of the file's.
                chunks[path] = (_of_constant(field, values[self._constant[field.id]], file.record_count),)
            elif (chunk := _chunk(field, file)) is not None:
                chunks[path] = (chunk,)
        deleted = self._deletes.of(file.file_path, row_deletes.partition_of(self._spec_id, values), entry.sequence)
        if deleted is not None and deleted > file.record_count:
            deleted = None
        return FileFacts(file.file_path, file.record_count, self._columns, self._leaves, chunks, deleted)


def _of_constant(field: IcebergField, value: Any, rows: int) -> Chunk:
    if value is None:
        return Chunk(rows, rows)
    if isinstance(value, float) and math.isnan(value):
        return Chunk(rows, 0, nans=rows)
    found = iceberg_fields.constant(field, value)
    return Chunk(rows, 0, found, found, nans=0)


def _chunk(field: IcebergField, file: File) -> Chunk | None:
    """The statistics of a whole file; None if the manifest has none of the field, for example if the file lacks it."""
    rows = file.record_count
    nulls, nans = (_count(counts, field.id, rows) for counts in (file.null_value_counts, file.nan_value_counts))
    low, high = (
        iceberg_fields.physical(field, (bounds or {}).get(field.id))
        for bounds in (file.lower_bounds, file.upper_bounds)
    )
    if file.file_format.upper() != "PARQUET" or (field.leaf.kind in ("string", "binary") and not _one_group(file)):
        # Iceberg rounds bounds of other file formats. And pyiceberg ignores row groups without bounds, which Parquet
        # omits for long texts.
        low = high = None
    if nulls is nans is low is high is None:
        return None
    return Chunk(rows, nulls, low, high, nans, tight=False)


def _count(counts: Mapping[int, int] | None, field_id: int, rows: int) -> int | None:
    found = (counts or {}).get(field_id)
    return found if found is not None and 0 <= found <= rows else None


def _one_group(file: File) -> bool:
    return len(file.split_offsets or ()) == 1


def values_of(file: File) -> list[Any]:
    """The values of a file's partition."""
    return [file.partition[n] for n in range(len(file.partition))]


# ------------------------------------------------------------------ entries


@frozen
class File:
    """A data or delete file in a manifest; ``content``: see ``row_deletes``."""

    content: int
    file_path: str
    file_format: str
    partition: Any
    record_count: int
    file_size_in_bytes: int
    null_value_counts: Mapping[int, int] | None
    nan_value_counts: Mapping[int, int] | None
    lower_bounds: Mapping[int, bytes] | None
    upper_bounds: Mapping[int, bytes] | None
    split_offsets: Sequence[int] | None
    referenced_data_file: str | None
    content_offset: int | None
    content_size_in_bytes: int | None


@frozen
class ManifestEntry:
    """A live entry of a manifest. ``sequence``: the sequence number of its data, its own or the manifest's."""

    sequence: int | None
    file: File


def live_entries(
    manifest: Any, io: ManifestIO, allowed: TableFiles, check: Callable[[], None]
) -> Iterator[ManifestEntry]:
    """The live entries of a manifest, with a delete file's data file, which pyiceberg's own entries lack.

    Raises InvalidArgument for a file that may not belong to the table.
    """
    from pyiceberg.manifest import MANIFEST_ENTRY_SCHEMAS

    from distop.tables.iceberg.avro_records import RecordFile

    schema = MANIFEST_ENTRY_SCHEMAS[_NEWEST]
    struct: Any = schema.find_type("data_file")
    columns = [field.name for field in struct.fields]
    places = [columns.index(name) for name in File.__annotations__]
    top = [field.name for field in schema.fields]
    status_at, sequence_at, file_at = (top.index(name) for name in ("status", "sequence_number", "data_file"))
    allowed.check((manifest.manifest_path,))
    with RecordFile[Any](io.new_input(manifest.manifest_path), schema) as reader:
        for n, entry in enumerate(reader):
            if n % _CHECKED_EVERY == 0:
                check()
                io.alive()
            status, sequence, file = entry[status_at], entry[sequence_at], entry[file_at]
            if status == _REMOVED:
                continue
            if sequence is None and (manifest.sequence_number == 0 or status == _ADDED):
                sequence = manifest.sequence_number
            found = File(*(file[place] for place in places))
            allowed.check((found.file_path,), deletes=manifest.content == _DELETES)
            if manifest.content == _DELETES and found.file_format.upper() == row_deletes.VECTORS:
                check_vector(found.file_path, found.content_offset, found.content_size_in_bytes)
            yield ManifestEntry(sequence, found)
