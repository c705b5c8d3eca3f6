"""The metadata of an Iceberg table by path, swapped by Iceberg itself.

``TableOperations.commit`` takes the very object that was loaded, and refuses any other: one by another writer meanwhile
has a file of the next number, which is not overwritten. ``UpdateSchema.commit`` is not called, it only makes the
schema: it builds on whatever is current when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.behavior import TableUnavailable
from distop_behaviors.apply.target import Change, Head, Moved, Unsure
from distop_behaviors.reading.fields import local_path
from distop_behaviors.reading.iceberg import check_installed

if TYPE_CHECKING:
    from distop.behavior import JobContext, TableRecord

_PACKAGE = "org.apache.iceberg.exceptions"
_FAILED, _UNKNOWN, _NONE = (
    f"{_PACKAGE}.{name}" for name in ("CommitFailedException", "CommitStateUnknownException", "NoSuchTableException")
)


class HadoopTarget:
    """A table of a Hadoop catalog, or made by path."""

    def __init__(self, table: TableRecord, ctx: JobContext) -> None:
        self._table = table
        self._ctx = ctx

    def load(self) -> Head:
        """See Target. Raises also FatalError where Spark has no Iceberg."""
        from py4j.protocol import Py4JJavaError

        session: Any = self._ctx.spark
        jvm = session._jvm
        check_installed(jvm)
        conf = session._jsparkSession.sessionState().newHadoopConf()
        location = self._table.location
        try:
            # Loaded anew, so that what is kept by nobody is compared.
            table = jvm.org.apache.iceberg.hadoop.HadoopTables(conf).load(
                f"file://{location}" if location.startswith("/") else location
            )
        except Py4JJavaError as error:
            self._ctx.check_reachable()
            if _name(error) == _NONE:
                raise TableUnavailable(f"there is no Iceberg table at {location!r} any more: it was dropped") from error
            raise
        base = table.operations().current()
        source = str(base.metadataFileLocation())
        return Head(local_path(source) or source, dict(base.properties()), (table, base, jvm))

    def swap(self, head: Head, change: Change) -> None:
        """See Target."""
        from py4j.protocol import Py4JJavaError

        table, base, jvm = head.base
        operations = table.operations()
        update = table.updateSchema().allowIncompatibleChanges()
        for field_id in change.required:
            update.requireColumn(base.schema().findColumnName(field_id))
        for field_id in change.optional:
            update.makeColumnOptional(base.schema().findColumnName(field_id))
        properties = jvm.java.util.HashMap(base.properties())
        for name, value in (change.properties or {}).items():
            if value is None:
                properties.remove(name)
            else:
                properties.put(name, value)
        updated = base.updateSchema(update.apply()).replaceProperties(properties)
        try:
            operations.commit(base, updated)
        except Py4JJavaError as error:
            name = _name(error)
            if name == _FAILED:
                raise Moved(str(error.java_exception.getMessage())) from error
            if name == _UNKNOWN:
                raise Unsure(str(error.java_exception.getMessage())) from error
            raise


def _name(error: Any) -> str:
    return str(error.java_exception.getClass().getName())
