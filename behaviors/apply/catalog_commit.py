"""Changes the schema and the files of an Iceberg table in a catalog."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.tables.iceberg.catalog_publisher import CatalogPublisher
from distop_behaviors.apply.iceberg_schema import IcebergHeadSchema

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from distop.tables.commits import Head
    from distop.tables.iceberg.new_metadata import Rewrite
    from distop_behaviors.apply.schema_target import SchemaChange


class CatalogTarget(CatalogPublisher):
    """A table in a catalog that pyiceberg connects to."""

    def schema(self, head: Head) -> IcebergHeadSchema:
        """See Target."""
        return IcebergHeadSchema(head.source, self._table)

    def swap(self, head: Head, change: SchemaChange) -> None:
        """See Target."""
        self.commit(head, lambda metadata: list(table_updates(metadata, change)))

    def rewrite(self, head: Head, rewrite: Rewrite) -> None:
        """See Target. Removes the written manifests if the commit fails."""
        self.commit_produced(head, lambda production: production.rewritten(rewrite))

    def roll_back(
        self, head: Head, schema: int, snapshot: int | None, kept: frozenset[str], change: Mapping[str, str | None]
    ) -> None:
        """See Target."""
        self.commit_produced(head, lambda production: production.rolled_back(schema, snapshot, kept, change))


def table_updates(metadata: Any, change: SchemaChange) -> Iterator[Any]:
    """The table updates of the catalog protocol that make a change of this metadata."""
    from pyiceberg.table import update

    schema = changed_schema(metadata, change)
    if schema != metadata.schema():
        # A catalog does not accept a schema twice. After a revert, the table already has this schema.
        known = next((former.schema_id for former in metadata.schemas if former == schema), None)
        if known is None:
            yield update.AddSchemaUpdate.model_validate({"schema": schema})
        yield update.SetCurrentSchemaUpdate.model_validate({"schema-id": -1 if known is None else known})
    properties = change.properties or {}
    if values := {name: value for name, value in properties.items() if value is not None}:
        yield update.SetPropertiesUpdate(updates=values)
    if removals := [name for name, value in properties.items() if value is None and name in metadata.properties]:
        yield update.RemovePropertiesUpdate(removals=removals)


def changed_schema(metadata: Any, change: SchemaChange) -> Any:
    """The current schema with the change, under the next schema id."""
    from pyiceberg.schema import Schema

    schema = metadata.schema()
    wanted = dict.fromkeys(change.required, True) | dict.fromkeys(change.optional, False)
    return Schema(
        *(_changed(field, wanted) for field in schema.fields),
        schema_id=max(former.schema_id for former in metadata.schemas) + 1,
        identifier_field_ids=schema.identifier_field_ids,
    )


def _changed(field: Any, wanted: dict[int, bool]) -> Any:
    """A field with its inner fields, if it is a struct. Fields in lists and maps never change."""
    from pyiceberg.types import StructType

    kind = field.field_type
    if isinstance(kind, StructType):
        kind = StructType(*(_changed(inner, wanted) for inner in kind.fields))
    required = wanted.get(field.field_id, field.required)
    return field.model_copy(update={"field_type": kind, "required": required})
