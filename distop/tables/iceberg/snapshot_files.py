"""Lists the files of an Iceberg snapshot from its manifests, each with its partition's name, and checks their paths."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from distop.errors import DistopError
from distop.storage.confinement import TableFiles, check_form, table_of
from distop.storage.files import identity
from distop.storage.store_errors import StoreError, unavailable
from distop.tables.iceberg.iceberg_changes import entries, field_of
from distop.tables.iceberg.iceberg_fields import spark_type
from distop.tables.iceberg.manifest_list import manifests_of
from distop.tables.iceberg.row_deletes import VECTOR_FIELDS, check_vector
from distop.tables.parquet.parquet_format import HIVE_NULL, escaped, partition_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from distop.errors import TableUnavailable
    from distop.tables.iceberg.avro import ManifestIO

FileIdentity = tuple[str, ...]
"""The identity of a file (``files.identity``)."""


def data_files(
    source: str, metadata: Any, snapshot: Any, io: ManifestIO, check: Callable[[], None], read_from: list[FileIdentity]
) -> Iterator[tuple[str, str, tuple[str, int, int]]]:
    """All live data files: (prefix of the partition's name, that name or "" without partitions, file).

    A file's time is 0: Iceberg never changes a file, so its path is its identity. ``read_from`` gets the identities of
    the manifest list and the manifests before they are read. Raises TableUnavailable, and InvalidArgument if a data or
    delete file may not belong to the table (confinement).
    """
    from pyiceberg.manifest import FileFormat, ManifestContent

    def read(by: Callable[[], Any]) -> Any:
        try:
            return by()
        except StoreError as error:
            raise unreadable(metadata, snapshot, error) from error
        except DistopError:
            raise
        except Exception as error:  # for a damaged file the reader raises any error, even SystemError
            raise unreadable(metadata, snapshot, error) from error

    naming: dict[int, PartitionNames] = {}
    specs = metadata.specs()
    files = files_of(source, metadata)
    read_from.append(identity(snapshot.manifest_list))
    for manifest in read(partial(manifests_of, snapshot, io)):
        check()
        files.check((manifest.manifest_path,))
        read_from.append(identity(manifest.manifest_path))
        # Also read manifests of delete files, since Spark opens these files.
        deletes = manifest.content != ManifestContent.DATA
        spec_id = manifest.partition_spec_id
        if spec_id not in naming:
            naming[spec_id] = PartitionNames(specs[spec_id], metadata)
        names = naming[spec_id]
        one_more = partial(next, entries([manifest], io, check), None)
        while (found := read(one_more)) is not None:
            entry = found[1]
            file = entry.data_file
            files.check((file.file_path,), deletes=deletes)
            if deletes:
                if file.file_format == FileFormat.PUFFIN:
                    check_vector(file.file_path, *(field_of(entry, name) for name in VECTOR_FIELDS))
                continue
            yield names.prefix, names.name(file.partition), (file.file_path, file.file_size_in_bytes, 0)


def files_of(source: str, metadata: Any) -> TableFiles:
    """The files that may belong to a table. Raises InvalidArgument if its metadata name other files."""
    for one in metadata.snapshots:
        check_form(one.manifest_list)
    for one in metadata.metadata_log:
        check_form(one.metadata_file)
    for one in (*metadata.statistics, *metadata.partition_statistics):
        check_form(one.statistics_path)
    files = TableFiles(table_of(source))
    if (snapshot := metadata.current_snapshot()) is not None:
        files.check((snapshot.manifest_list,))
    return files


def unreadable(metadata: Any, snapshot: Any, error: Exception) -> TableUnavailable:
    """The error for a snapshot whose manifests cannot be read."""
    return unavailable(f"cannot read the snapshot {snapshot.snapshot_id} of {metadata.location!r}: {error}", error)


class PartitionNames:
    """The partition names of one spec: ``day=2013-01-31/bucket=3``.

    Names of all specs but the first have the prefix ``spec-N/``: the same text may have another meaning in each spec,
    and a name is a partition's permanent identity.
    """

    def __init__(self, spec: Any, metadata: Any) -> None:
        from pyiceberg.transforms import VoidTransform

        self.prefix = f"spec-{spec.spec_id}/" if spec.spec_id else ""
        # In format version 1, a removed field of a spec has a void transform: leave it out.
        self._fields = [
            (n, escaped(field.name), field.transform, _result_type(field, metadata))
            for n, field in enumerate(spec.fields)
            if not isinstance(field.transform, VoidTransform)
        ]

    def name(self, values: Any) -> str:
        """The name of the partition with these values; "" for a spec without partitions."""
        parts = []
        for n, name, transform, kind in self._fields:
            value = values[n]
            if value is None:
                parts.append(f"{name}={HIVE_NULL}")
                continue
            text = escaped(_text(value, transform, kind))
            # A value equal to the text for NULL must get another name.
            parts.append(f"{name}=%5F{text[1:]}" if text == HIVE_NULL else f"{name}={text}")
        return "/".join(parts)

    def text(self, values: Any, at: int) -> str:
        """The value of the field at a position of the spec, as in names but not escaped; "" for NULL."""
        found = ((transform, kind) for n, _, transform, kind in self._fields if n == at and values[n] is not None)
        return next((_text(values[at], transform, kind) for transform, kind in found), "")


def values_in(name: str) -> Mapping[str, str | None]:
    """The values of a partition by the names of its fields, from its name; None: NULL."""
    return (partition_values(name) or {}) if name else {}


def partition_types(metadata: Any) -> dict[str, str]:
    """The partition fields of all specs, with the types that their values have in names, in Spark.

    An hour, a month and a year are texts such as ``2026-01``. The newest spec decides.
    """
    from pyiceberg.transforms import HourTransform, MonthTransform, VoidTransform, YearTransform

    found: dict[str, str] = {}
    for _, spec in sorted(metadata.specs().items(), key=lambda one: one[0] == metadata.default_spec_id):
        for field in spec.fields:
            if isinstance(field.transform, VoidTransform):
                continue
            kind = _result_type(field, metadata)
            text = kind is None or isinstance(field.transform, HourTransform | MonthTransform | YearTransform)
            found[field.name] = "string" if text else str(spark_type(kind))
    return found


def _text(value: Any, transform: Any, kind: Any) -> str:
    return str(value) if kind is None else str(transform.to_human_string(kind, value))


def _result_type(field: Any, metadata: Any) -> Any:
    """The type of a partition field's values, from any schema that still has its column; else None."""
    for schema in [metadata.schema(), *reversed(metadata.schemas)]:
        try:
            return field.transform.result_type(schema.find_type(field.source_id))
        except ValueError:
            continue
    return None
