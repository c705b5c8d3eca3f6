"""Changes the metadata of an Iceberg table by path, by a commit of Iceberg in the JVM.

``TableOperations.commit`` is a compare-and-swap: it fails if the loaded metadata is not current. Another writer has
then created the metadata file with the next number, which is not overwritten. ``UpdateSchema`` only computes the
schema; its ``commit`` is not called, because it applies the change to the metadata that is current at that moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.behavior import TableUnavailable
from distop.errors import InvalidArgument, UnsafePath
from distop.storage.confinement import check_metadata
from distop.storage.location import Location
from distop.tables.iceberg import iceberg_format
from distop.tables.iceberg.iceberg_fields import local_path
from distop.tables.iceberg.iceberg_jar import check_installed
from distop.tables.iceberg.java_tables import uri
from distop.tables.iceberg.metadata_file import current_metadata_file, read_metadata
from distop.tables.iceberg.written_folders import check_data_folder, check_metadata_folder
from distop_behaviors.apply.iceberg_schema import IcebergHeadSchema
from distop_behaviors.apply.new_metadata import Production, properties, with_full_log
from distop_behaviors.apply.schema_target import CommitUnknown, Conflict, Head, SchemaChange

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distop.behavior import JobContext, TableRecord
    from distop_behaviors.apply.schema_target import Rewrite

_PACKAGE = "org.apache.iceberg.exceptions"
_FAILED, _UNKNOWN, _NONE = (
    f"{_PACKAGE}.{name}" for name in ("CommitFailedException", "CommitStateUnknownException", "NoSuchTableException")
)


class HadoopTarget:
    """A table of a Hadoop catalog, or one that was created by path."""

    def __init__(self, table: TableRecord, ctx: JobContext) -> None:
        self._table = table
        self._ctx = ctx

    def check_folders(self, *, rewritten: bool) -> None:
        """See Target."""
        folder = self._folder
        check_metadata_folder(folder, missing=True)
        if rewritten:
            check_data_folder(folder)

    @property
    def _folder(self) -> str:
        folder = iceberg_format.FORMAT.folder_of(self._table)
        assert folder is not None, "a table whose catalog alone knows its folder"
        return folder

    def load(self) -> Head:
        """See Target. Also raises FatalError if Spark does not have Iceberg."""
        from py4j.protocol import Py4JJavaError

        session: Any = self._ctx.spark
        jvm = session._jvm
        check_installed(jvm)
        location = self._folder
        # Iceberg loads the table by path, so no other user may be able to change that folder.
        check_metadata_folder(location, missing=True)
        # Spark follows links and reads files of any size, so the metadata file is checked before.
        try:
            read_metadata(current_metadata_file(Location.of(location)))
        except (InvalidArgument, TableUnavailable):
            self._ctx.check_reachable()
            raise
        try:
            # Not cached: a cached table could be outdated.
            table = jvm.org.apache.iceberg.hadoop.HadoopTables(self._conf()).load(uri(location))
        except Py4JJavaError as error:
            self._ctx.check_reachable()
            if _name(error) == _NONE:
                raise TableUnavailable(f"the Iceberg table at {location!r} no longer exists: it was dropped") from error
            raise
        base = table.operations().current()
        check_metadata(_source(base))
        return Head(_source(base), dict(base.properties()), (table, base, jvm))

    def schema(self, head: Head) -> IcebergHeadSchema:
        """See Target."""
        return IcebergHeadSchema(head.source, self._table)

    def swap(self, head: Head, change: SchemaChange) -> None:
        """See Target."""
        table, base, jvm = head.base
        operations = table.operations()
        update = table.updateSchema().allowIncompatibleChanges()
        for field_id in change.required:
            update.requireColumn(base.schema().findColumnName(field_id))
        for field_id in change.optional:
            update.makeColumnOptional(base.schema().findColumnName(field_id))
        changed = properties(jvm, base, change.properties or {})
        self._commit(operations, base, with_full_log(jvm, base).updateSchema(update.apply()).replaceProperties(changed))

    def rewrite(self, head: Head, rewrite: Rewrite) -> None:
        """See Target. Removes the written manifests if the commit fails."""
        table, production = self._production(head)
        outcome = production.rewritten(rewrite)
        try:
            self._commit(table.operations(), production.base, outcome)
        except (Conflict, UnsafePath):
            production.discard()
            raise

    def roll_back(
        self, head: Head, schema: int, snapshot: int | None, kept: frozenset[str], change: Mapping[str, str | None]
    ) -> None:
        """See Target."""
        table, production = self._production(head)
        outcome = production.rolled_back(schema, snapshot, kept, change)
        try:
            self._commit(table.operations(), production.base, outcome)
        except (Conflict, UnsafePath):
            production.discard()
            raise

    def _production(self, head: Head) -> tuple[Any, Production]:
        """A transaction on the loaded table. Raises Conflict if the table has changed since."""
        table, _, _ = head.base
        check_metadata_folder(self._folder)  # manifests are written there
        production = Production(self._ctx.spark, table, self._ctx.operation)
        if (source := _source(production.base)) != head.source:
            raise Conflict(f"the metadata of the table has changed: it is now {source}")
        return table, production

    def _conf(self) -> Any:
        session: Any = self._ctx.spark
        return session._jsparkSession.sessionState().newHadoopConf()

    def _commit(self, operations: Any, base: Any, updated: Any) -> None:
        from py4j.protocol import Py4JJavaError

        check_metadata(_source(base))
        check_metadata_folder(self._folder)
        try:
            operations.commit(base, updated)
        except Py4JJavaError as error:
            name = _name(error)
            if name == _FAILED:
                raise Conflict(str(error.java_exception.getMessage())) from error
            if name == _UNKNOWN:
                raise CommitUnknown(str(error.java_exception.getMessage())) from error
            raise


def _source(metadata: Any) -> str:
    """The path of a metadata file, like in a plan."""
    source = str(metadata.metadataFileLocation())
    return local_path(source) or source


def _name(error: Any) -> str:
    return str(error.java_exception.getClass().getName())
