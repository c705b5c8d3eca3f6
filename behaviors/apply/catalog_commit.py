"""The metadata of an Iceberg table that a catalog knows, swapped by the catalog.

No JVM is asked, but where files are replaced: Iceberg's own transaction does that, and the catalog is told its steps.
What is compared is told to the catalog as requirements: the table, the snapshot and the schema that
were loaded, the last field id, the partition spec and the sort order. Of table properties the protocol compares none:
those that others have set meanwhile stay as they are.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument, OutcomeUnknown
from distop.storage.confinement import table_of
from distop.tables.iceberg import iceberg_catalogs
from distop.tables.iceberg.iceberg_fields import local_path
from distop.tables.iceberg.iceberg_rows import check_installed
from distop.tables.iceberg.written_folders import check_data_folder, check_metadata_folder
from distop_behaviors.apply.new_metadata import Production, detached
from distop_behaviors.apply.schema_target import Change, Head, Moved, Unsure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from distop.behavior import JobContext, TableRecord
    from distop_behaviors.apply.schema_target import Rewrite

_WRITES = 2
"""The last version of the format of which pyiceberg writes metadata."""
_FORMER = ("schema", "partition-spec")
"""What metadata of the first version have twice: no reader of today needs them."""


class CatalogTarget:
    """A table of a catalog that pyiceberg asks. ``check`` is called while it is waited for, and raises where that is to
    stop.
    """

    def __init__(self, table: TableRecord, ctx: JobContext, check: Callable[[], None]) -> None:
        self._table = table
        self._ctx = ctx
        self._check = check

    def check_folders(self, *, rewritten: bool) -> None:
        """See Target. A server that writes metadata by itself has rights of its own."""
        with iceberg_catalogs.opened(self._table, self._check) as found:
            folder = table_of(found.source)
            if rewritten or not found.writes_metadata:
                check_metadata_folder(folder, missing=True)
            if rewritten:
                check_data_folder(folder)

    def load(self) -> Head:
        """See Target. Raises InvalidArgument where the catalog has no such table any more."""
        with iceberg_catalogs.opened(self._table, self._check) as found:
            return Head(local_path(found.source) or found.source, dict(found.metadata.properties), found.source)

    def swap(self, head: Head, change: Change) -> None:
        """See Target."""
        with self._same(head) as found:
            self._commit(found, list(updates(found.metadata, change)))

    def rewrite(self, head: Head, rewrite: Rewrite) -> None:
        """See Target. What was written on the way is removed where it was refused."""
        self._produced(head, lambda production: production.rewritten(rewrite))

    def roll_back(
        self, head: Head, schema: int, snapshot: int | None, kept: frozenset[str], change: Mapping[str, str | None]
    ) -> None:
        """See Target."""
        self._produced(head, lambda production: production.rolled_back(schema, snapshot, kept, change))

    def _produced(self, head: Head, outcome: Callable[[Production], Any]) -> None:
        session: Any = self._ctx.spark
        check_installed(session._jvm)
        with self._same(head) as found, detached(session, head.source) as table:
            production = Production(session, table, self._ctx.operation)
            parser = session._jvm.org.apache.iceberg.MetadataUpdateParser
            try:
                steps = [parsed(parser.toJson(step)) for step in outcome(production).changes()]
                self._commit(found, steps)
            except Unsure:
                raise  # it may be the table's by now
            except BaseException:
                production.discard()
                raise

    @contextmanager
    def _same(self, head: Head) -> Iterator[iceberg_catalogs.CatalogTable]:
        """The table, if it is still what was loaded. Raises Moved, and InvalidArgument where a commit would lose
        something of it.
        """
        with iceberg_catalogs.opened(self._table, self._check) as found:
            if found.source != head.base:
                raise Moved(f"the table {self._table.location!r} has other metadata by now: {found.source}")
            check_kept(found)
            yield found

    @staticmethod
    def _commit(found: iceberg_catalogs.CatalogTable, steps: Sequence[Any]) -> None:
        from pyiceberg.table import update

        metadata = found.metadata
        same = (
            update.AssertLastAssignedFieldId.model_validate({"last-assigned-field-id": metadata.last_column_id}),
            update.AssertDefaultSpecId.model_validate({"default-spec-id": metadata.default_spec_id}),
            update.AssertDefaultSortOrderId.model_validate({"default-sort-order-id": metadata.default_sort_order_id}),
        )
        try:
            found.commit(steps, same)
        except iceberg_catalogs.Changed as error:
            raise Moved(str(error)) from error
        except OutcomeUnknown as error:
            raise Unsure(str(error)) from error


def parsed(step: str) -> Any:
    """A step of a change, as JSON, as pyiceberg has it."""
    from pydantic import TypeAdapter
    from pyiceberg.table.update import TableUpdate

    return TypeAdapter(TableUpdate).validate_json(str(step))


def updates(metadata: Any, change: Change) -> Iterator[Any]:
    """A change of these metadata as the steps that a catalog takes."""
    from pyiceberg.table import update

    schema = changed(metadata, change)
    if schema != metadata.schema():
        # A catalog takes no schema twice, and what was taken back was there before.
        known = next((former.schema_id for former in metadata.schemas if former == schema), None)
        if known is None:
            yield update.AddSchemaUpdate.model_validate({"schema": schema})
        yield update.SetCurrentSchemaUpdate.model_validate({"schema-id": -1 if known is None else known})
    told = change.properties or {}
    if values := {name: value for name, value in told.items() if value is not None}:
        yield update.SetPropertiesUpdate(updates=values)
    if removals := [name for name, value in told.items() if value is None and name in metadata.properties]:
        yield update.RemovePropertiesUpdate(removals=removals)


def changed(metadata: Any, change: Change) -> Any:
    """The current schema with the change, under the next number."""
    from pyiceberg.schema import Schema

    schema = metadata.schema()
    wanted = dict.fromkeys(change.required, True) | dict.fromkeys(change.optional, False)
    return Schema(
        *(_changed(field, wanted) for field in schema.fields),
        schema_id=max(former.schema_id for former in metadata.schemas) + 1,
        identifier_field_ids=schema.identifier_field_ids,
    )


def _changed(field: Any, wanted: dict[int, bool]) -> Any:
    """A field, and those that are in a struct of it: in lists and maps nothing is ever changed."""
    from pyiceberg.types import StructType

    kind = field.field_type
    if isinstance(kind, StructType):
        kind = StructType(*(_changed(inner, wanted) for inner in kind.fields))
    required = wanted.get(field.field_id, field.required)
    return field.model_copy(update={"field_type": kind, "required": required})


def check_kept(found: iceberg_catalogs.CatalogTable) -> None:
    """Raises InvalidArgument where the metadata have what pyiceberg does not know, and would leave out. A REST catalog
    writes its metadata by itself; for all others pyiceberg does.
    """
    from pyiceberg.serializers import Compressor

    if found.writes_metadata:
        return
    table = found.loaded
    if found.metadata.format_version > _WRITES:
        raise InvalidArgument(
            f"the table {'.'.join(table.name())!r} is of the format version {found.metadata.format_version} of Iceberg,"
            f" whose metadata pyiceberg does not write: only of a REST catalog are such beyond {_WRITES} changed"
        )
    compressor = Compressor.get_compressor(found.source)
    with compressor.stream_decompressor(table.io.new_input(found.source).open()) as file:
        had = json.loads(file.read())
    name = lost({n: v for n, v in had.items() if n not in _FORMER}, json.loads(found.metadata.model_dump_json()))
    if name is not None:
        raise InvalidArgument(
            f"the metadata of the table {'.'.join(table.name())!r} have a field {name!r}, which pyiceberg does not "
            "know: it would be lost in a commit through this catalog"
        )


def lost(had: Any, has: Any, path: str = "") -> str | None:
    """The first name in one JSON value that another one lacks; None: it has all of them."""
    if isinstance(had, dict):
        for name, value in had.items():
            here = f"{path}.{name}" if path else str(name)
            if value is None:
                continue
            if not isinstance(has, dict) or name not in has:
                return here
            if (found := lost(value, has[name], here)) is not None:
                return found
    if isinstance(had, list):
        for n, value in enumerate(had):
            if not isinstance(has, list) or n >= len(has):
                return path
            if (found := lost(value, has[n], path)) is not None:
                return found
    return None
