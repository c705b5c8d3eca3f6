"""A snapshot of an Iceberg table as a version for certificates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.tables.iceberg.iceberg_changes import new_files
from distop.tables.iceberg.metadata_file import read_metadata
from distop.tables.iceberg.snapshot_plan import NO_SNAPSHOT
from distop.tables.table_version import Field, TableVersion

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from distop.tables.iceberg.avro import ManifestIO
    from distop.tables.reading.file_facts import PlannedFile


class IcebergVersion(TableVersion):
    """The current snapshot of the metadata in the file ``source``. ``io``: for its manifests."""

    def __init__(self, source: str, metadata: Any, io: ManifestIO | None = None) -> None:
        self.metadata_file = source
        self.table_id = str(metadata.table_uuid)
        self._metadata = metadata
        self._io = io
        self._schema = metadata.schema()

    @classmethod
    def of(cls, source: str) -> IcebergVersion:
        """The version in a metadata file. Raises InvalidArgument and TableUnavailable if it cannot be read."""
        return cls(source, *read_metadata(source))

    @property
    def version(self) -> str:  # type: ignore[override]
        snapshot = self._metadata.current_snapshot()
        return str(snapshot.snapshot_id) if snapshot is not None else NO_SNAPSHOT

    @property
    def schema_id(self) -> int:  # type: ignore[override]
        return int(self._schema.schema_id)

    def names(self) -> Sequence[str]:
        return [field.name for field in self._schema.fields]

    def fields(self, tops: Collection[str]) -> Mapping[str, Field]:
        found: dict[str, Field] = {}
        for field in self._schema.fields:
            if field.name in tops:
                found |= _with_nested(field, field.name)
        return found

    def name_of(self, field_id: int) -> str | None:
        found: str | None = self._schema.find_column_name(field_id)
        return found

    def new_files(self, since: str, check: Callable[[], None]) -> Sequence[PlannedFile] | None:
        assert self._io is not None
        return new_files(self._metadata, self._io, since, check)


def _with_nested(field: Any, name: str) -> Iterator[tuple[str, Field]]:
    """A field and all its nested fields, by dotted names."""
    from pyiceberg import types

    kind = field.field_type
    inside: list[Any] = []
    text = str(kind)
    if isinstance(kind, types.StructType):
        text, inside = "struct", list(kind.fields)
    elif isinstance(kind, types.ListType):
        text, inside = "list", [kind.element_field]
    elif isinstance(kind, types.MapType):
        text, inside = "map", [kind.key_field, kind.value_field]
    yield name, Field(field.field_id, text)
    for inner in inside:
        yield from _with_nested(inner, f"{name}.{inner.name}")
