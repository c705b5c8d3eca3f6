"""The schema and files in the loaded metadata of an Iceberg table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.tables.iceberg.iceberg_version import IcebergVersion
from distop.tables.iceberg.metadata_file import read_metadata
from distop.tables.iceberg.snapshot_plan import NO_SNAPSHOT, plan_metadata
from distop.tables.table_options import check_options
from distop_behaviors.apply.schema_target import HeadSchema

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from distop.behavior import TableRecord
    from distop.tables.reading.file_facts import PlannedFile
    from distop_behaviors.apply.constraints import SchemaChanges


class IcebergHeadSchema(HeadSchema):
    """The schema in a metadata file, which was loaded before."""

    def __init__(self, source: str, table: TableRecord) -> None:
        metadata, io = read_metadata(source)
        current = metadata.current_snapshot()
        self.version = IcebergVersion(source, metadata, io)
        self.snapshot = str(current.snapshot_id) if current is not None else NO_SNAPSHOT
        self._schema = metadata.schema()
        self._source = source
        self._table = table

    def required(self, field_id: int) -> bool:
        return bool(self._schema.find_field(field_id).required)

    def check_change(self, required: Collection[int], wanted: SchemaChanges) -> None:
        """An Iceberg table can get any of them."""

    def files(self, check: Callable[[], None]) -> Sequence[PlannedFile]:
        options = check_options(self._table.options, "iceberg")
        planned = plan_metadata(self._source, self._table, options, check)
        return [file for partition in planned.partitions for file in partition.files]
