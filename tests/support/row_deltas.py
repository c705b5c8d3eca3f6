"""Commits of Iceberg tables that pyiceberg lacks: partition transforms, position and equality deletes, empty files.

Written in plain Python from Iceberg's specification, for format versions 1 and 2.
"""

from __future__ import annotations

import itertools
import re
import uuid
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg import manifest as written
from pyiceberg.io.pyarrow import schema_to_pyarrow, write_file
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
)
from pyiceberg.partitioning import partition_record_value
from pyiceberg.schema import Schema
from pyiceberg.table import WriteTask
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.update.snapshot import _FastAppendFiles
from pyiceberg.typedef import Record

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Mapping, Sequence

    from pyiceberg.partitioning import PartitionSpec
    from pyiceberg.table import Table

PATH_ID, POSITION_ID = 2147483546, 2147483545
"""The field ids of the columns of position deletes."""
_COUNTS = ("column_sizes", "value_counts", "null_value_counts", "nan_value_counts")


class DeleteManifest(written.ManifestWriterV2):
    """The writer of a manifest of delete files, which pyiceberg does not have."""

    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}

    def _with_partition(self, format_version: Any) -> Schema:
        """The schema of entries. pyiceberg writes equality ids as long, which Iceberg does not read."""
        text = super()._with_partition(format_version).model_dump_json()
        found = re.sub(r'("element-id":136,"element":)"long"', r'\1"int"', text)
        return Schema.model_validate_json(found)


class _RowDelta(_FastAppendFiles):
    """A snapshot that also adds delete files."""

    deletes: Sequence[DataFile] = ()

    def _manifests(self) -> list[written.ManifestFile]:
        by_spec: dict[int, list[DataFile]] = defaultdict(list)
        for file in self.deletes:
            by_spec[file.spec_id].append(file)
        found = []
        for spec_id, files in by_spec.items():
            out = self.new_manifest_output()
            with DeleteManifest(self.spec(spec_id), self.schema(), out, self._snapshot_id, self._compression) as writer:
                for file in files:
                    added = ManifestEntryStatus.ADDED
                    writer.add(ManifestEntry.from_args(status=added, snapshot_id=self._snapshot_id, data_file=file))
            found.append(writer.to_manifest_file())
        return [*found, *super()._manifests()]


class _Key:
    """The partition of a new file, with any transforms."""

    def __init__(self, table: Table, record: Record) -> None:
        self.partition = record
        self._table = table

    def to_path(self) -> str:
        return self._table.spec().partition_to_path(self.partition, self._table.schema())


def commit(
    table: Table, *, data: Iterable[DataFile] = (), deletes: Sequence[DataFile] = (), removed: Iterable[DataFile] = ()
) -> None:
    """Commit a snapshot with these files. ``removed``: data files; not together with deletes."""
    with table.transaction() as transaction:
        removed = list(removed)
        if removed:
            producer: Any = transaction.update_snapshot().overwrite()
            for file in removed:
                producer.delete_data_file(file)
        else:
            producer = _RowDelta(Operation.APPEND, transaction, table.io)
            producer.deletes = deletes
        for file in data:
            producer.append_data_file(file)
        producer.commit()


def new_files(table: Table, rows: pa.Table) -> list[DataFile]:
    """Write rows into one file for each partition of the current spec."""
    tasks, number, schema = [], itertools.count(), table.schema()
    for record, some in _partitions(table, rows):
        key: Any = _Key(table, record) if table.spec().fields else None
        tasks.append(WriteTask(uuid.uuid4(), next(number), schema, some.to_batches(), None, key))
    return list(write_file(table.io, table.metadata, iter(tasks)))


def _partitions(table: Table, rows: pa.Table) -> list[tuple[Record, pa.Table]]:
    spec, schema = table.spec(), table.schema()
    if not spec.fields:
        return [(Record(), rows)]
    found: dict[str, tuple[Record, list[int]]] = {}
    values = {
        one.source_id: rows.column(str(schema.find_column_name(one.source_id))).to_pylist() for one in spec.fields
    }
    for n in range(rows.num_rows):
        record = _record(spec, schema, {source: column[n] for source, column in values.items()})
        found.setdefault(repr(record), (record, []))[1].append(n)
    return [(record, rows.take(numbers)) for record, numbers in found.values()]


def _record(spec: PartitionSpec, schema: Schema, values: Mapping[int, Any]) -> Record:
    found = []
    for one in spec.fields:
        value = values[one.source_id]
        kind = schema.find_field(one.source_id).field_type
        plain = partition_record_value(one, value, schema) if value is not None else None
        found.append(one.transform.transform(kind)(plain))
    return Record(*found)


def data_files(table: Table) -> list[DataFile]:
    """The data files of the current snapshot, with their specs."""
    snapshot = table.metadata.current_snapshot()
    if snapshot is None:
        return []
    manifests = [one for one in snapshot.manifests(table.io) if one.content == ManifestContent.DATA]
    return [entry.data_file for one in manifests for entry in one.fetch_manifest_entry(table.io)]


def empty_file(table: Table) -> DataFile | None:
    """A new data file without rows, with the partition of some other one; None if the current spec has no file."""
    schema = schema_to_pyarrow(table.schema())
    spec = table.spec().spec_id
    like = next((file for file in data_files(table) if file.spec_id == spec), None)
    if like is None:
        return None
    path = _new_path(table, "parquet")
    pq.write_table(schema.empty_table(), path)
    return _file(table, path, DataFileContent.DATA, spec, like.partition, 0)


def position_deletes(table: Table, chance: random.Random, share: float = 0.3) -> list[DataFile]:
    """Delete files that delete some rows of some data files of one partition each."""
    groups: dict[tuple[int, str], list[DataFile]] = defaultdict(list)
    for file in data_files(table):
        if file.record_count:
            groups[file.spec_id, repr(file.partition)].append(file)
    found = []
    for (spec_id, _), files in sorted(groups.items(), key=lambda pair: pair[0]):
        chosen = [file for file in files if chance.random() < 0.7]
        rows: list[tuple[str, int]] = []
        for file in chosen:
            count = max(1, int(file.record_count * share * chance.random()))
            rows += [(file.file_path, n) for n in chance.sample(range(file.record_count), count)]
        if not rows:
            continue
        rows.sort()
        path, paths = _new_path(table, "parquet"), [one for one, _ in rows]
        fields = [
            pa.field("file_path", pa.string(), nullable=False, metadata=_id(PATH_ID)),
            pa.field("pos", pa.int64(), nullable=False, metadata=_id(POSITION_ID)),
        ]
        columns = [pa.array(paths), pa.array([position for _, position in rows], pa.int64())]
        pq.write_table(pa.table(columns, schema=pa.schema(fields)), path)
        bounds = {}
        if chance.random() < 0.7:
            bounds = {"lower_bounds": {PATH_ID: min(paths).encode()}, "upper_bounds": {PATH_ID: max(paths).encode()}}
        kind = DataFileContent.POSITION_DELETES
        found.append(_file(table, path, kind, spec_id, chosen[0].partition, len(rows), **bounds))
    return found


def equality_deletes(table: Table, names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[DataFile]:
    """Delete files that delete rows equal to these in the columns ``names``.

    One in the unpartitioned spec if the table has one, else one for each partition that has files.
    """
    schema = table.schema()
    part = Schema(*(schema.find_field(name) for name in names))
    path = _new_path(table, "parquet")
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows], schema=schema_to_pyarrow(part)), path)
    ids = [field.field_id for field in part.fields]
    kind = DataFileContent.EQUALITY_DELETES
    for spec_id, spec in table.specs().items():
        if not spec.fields:
            return [_file(table, path, kind, spec_id, None, len(rows), equality_ids=ids)]
    partitions = {(file.spec_id, repr(file.partition)): file for file in data_files(table)}
    found = []
    for (spec_id, _), file in sorted(partitions.items(), key=lambda pair: pair[0]):
        copied = _new_path(table, "parquet")
        with pa.OSFile(path, "rb") as source, pa.OSFile(copied, "wb") as out:
            out.write(source.read())
        found.append(_file(table, copied, kind, spec_id, file.partition, len(rows), equality_ids=ids))
    return found


def _new_path(table: Table, ending: str) -> str:
    provider = table.location_provider()
    return provider.new_data_location(f"{uuid.uuid4()}.{ending}")


def _file(
    table: Table,
    path: str,
    content: DataFileContent,
    spec_id: int,
    partition: Record | None,
    rows: int,
    **given: Any,
) -> DataFile:
    file = DataFile.from_args(
        _table_format_version=2,
        content=content,
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=partition if partition is not None else Record(),
        record_count=rows,
        file_size_in_bytes=len(table.io.new_input(path)),
        **{**dict.fromkeys(_COUNTS), **given},
    )
    file.spec_id = spec_id
    return file


def _id(number: int) -> dict[str, str]:
    return {"PARQUET:field_id": str(number)}
