"""Publishes metadata of an Iceberg table in a catalog, by a commit of the catalog.

Only replacing files needs a JVM: Iceberg's own transaction computes the updates, which are then sent to the catalog.
The compare-and-swap is expressed as requirements of the commit: the loaded table, snapshot, schema, last field id,
partition spec and sort order. The protocol has no requirement for table properties: concurrent changes of others are
kept.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument, OutcomeUnknown, UnsafePath
from distop.storage.confinement import table_of
from distop.tables.commits import CommitUnknown, Conflict, Head
from distop.tables.iceberg import iceberg_catalogs
from distop.tables.iceberg.iceberg_fields import local_path
from distop.tables.iceberg.iceberg_jar import check_installed
from distop.tables.iceberg.new_metadata import Production, without_catalog
from distop.tables.iceberg.written_folders import check_data_folder, check_metadata_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from distop.protocol.records import TableRecord
    from distop.tables.commits import CommitContext

_WRITES = 2
"""The highest format version whose metadata pyiceberg writes."""
_FORMER = ("schema", "partition-spec")
"""Redundant fields in metadata of format version 1, which current readers do not need."""


class CatalogPublisher:
    """A table in a catalog that pyiceberg connects to.

    ``check`` is called while waiting for the catalog, and raises to stop waiting.
    """

    def __init__(self, table: TableRecord, ctx: CommitContext, check: Callable[[], None]) -> None:
        self._table = table
        self._ctx = ctx
        self._check = check

    def check_folders(self, *, rewritten: bool) -> None:
        """See FolderPublisher. A catalog server that writes metadata itself has its own access rights."""
        with iceberg_catalogs.opened(self._table, self._check) as found:
            folder = table_of(found.source)
            if rewritten or not found.writes_metadata:
                check_metadata_folder(folder, missing=True)
            if rewritten:
                check_data_folder(folder)

    def load(self) -> Head:
        """The current metadata, not cached. Raises InvalidArgument if the catalog no longer has the table."""
        with iceberg_catalogs.opened(self._table, self._check) as found:
            return Head(local_path(found.source) or found.source, dict(found.metadata.properties), found.source)

    def commit(self, head: Head, updates: Callable[[Any], Sequence[Any]], *, exact: bool = False) -> None:
        """Commit updates of the catalog protocol if the table's metadata is still ``head``.

        ``updates``: returns them for the current metadata. ``exact``: a change of others at the same moment is a
        conflict; but the protocol of REST catalogs compares only the main branch, schema, and specs. Raises Conflict,
        CommitUnknown, InvalidArgument if the commit would lose a part of the metadata, and TableUnavailable.
        """
        with self._same(head) as found:
            self._commit(found, updates(found.metadata), exact=exact)

    def commit_produced(self, head: Head, produce: Callable[[Production], Any]) -> None:
        """Commit the updates that an Iceberg transaction produces. Removes its manifests if it is not committed.

        Raises the errors of :meth:`commit`.
        """
        session: Any = self._ctx.spark
        check_installed(session._jvm)
        with self._same(head) as found, without_catalog(session, head.source) as table:
            production = Production(session, table, self._ctx.operation)
            parser = session._jvm.org.apache.iceberg.MetadataUpdateParser
            try:
                steps = [parse_update(parser.toJson(step)) for step in produce(production).changes()]
            except BaseException:
                production.discard()
                raise
            try:
                self._commit(found, steps)
            except (Conflict, InvalidArgument, UnsafePath):
                production.discard()
                raise
            # After any other error the commit may have succeeded, so the manifests stay.

    @contextmanager
    def _same(self, head: Head) -> Iterator[iceberg_catalogs.CatalogTable]:
        """The table, if it is unchanged since it was loaded.

        Raises Conflict, and InvalidArgument if a commit would lose a part of its metadata.
        """
        with iceberg_catalogs.opened(self._table, self._check) as found:
            if found.source != head.base:
                raise Conflict(
                    f"the metadata of the table {self._table.location!r} has changed: it is now {found.source}"
                )
            check_nothing_lost(found)
            yield found

    @staticmethod
    def _commit(found: iceberg_catalogs.CatalogTable, steps: Sequence[Any], *, exact: bool = False) -> None:
        from pyiceberg.table import update

        metadata = found.metadata
        same = (
            update.AssertLastAssignedFieldId.model_validate({"last-assigned-field-id": metadata.last_column_id}),
            update.AssertDefaultSpecId.model_validate({"default-spec-id": metadata.default_spec_id}),
            update.AssertDefaultSortOrderId.model_validate({"default-sort-order-id": metadata.default_sort_order_id}),
        )
        try:
            found.commit(steps, same, exact=exact)
        except iceberg_catalogs.Changed as error:
            raise Conflict(str(error)) from error
        except OutcomeUnknown as error:
            raise CommitUnknown(str(error)) from error


def parse_update(step: str) -> Any:
    """The pyiceberg object of a table update in JSON."""
    from pydantic import TypeAdapter
    from pyiceberg.table.update import TableUpdate

    return TypeAdapter(TableUpdate).validate_json(str(step))


def check_nothing_lost(found: iceberg_catalogs.CatalogTable) -> None:
    """Raises InvalidArgument if the metadata has a field that pyiceberg does not know and would drop.

    A REST catalog writes its metadata itself; for other catalogs pyiceberg writes it.
    """
    from pyiceberg.serializers import Compressor

    if found.writes_metadata:
        return
    table = found.loaded
    if found.metadata.format_version > _WRITES:
        raise InvalidArgument(
            f"the table {'.'.join(table.name())!r} has the Iceberg format version {found.metadata.format_version}, but "
            f"pyiceberg writes metadata only up to version {_WRITES}: use a REST catalog"
        )
    compressor = Compressor.get_compressor(found.source)
    with compressor.stream_decompressor(table.io.new_input(found.source).open()) as file:
        had = json.loads(file.read())
    name = first_missing(
        {n: v for n, v in had.items() if n not in _FORMER}, json.loads(found.metadata.model_dump_json())
    )
    if name is not None:
        raise InvalidArgument(
            f"the metadata of the table {'.'.join(table.name())!r} has a field {name!r} that pyiceberg does not know: "
            "a commit through this catalog would lose it"
        )


def first_missing(had: Any, has: Any, path: str = "") -> str | None:
    """The path of the first name in one JSON value that is missing in another, or None."""
    if isinstance(had, dict):
        for name, value in had.items():
            here = f"{path}.{name}" if path else str(name)
            if value is None:
                continue
            if not isinstance(has, dict) or name not in has:
                return here
            if (found := first_missing(value, has[name], here)) is not None:
                return found
    if isinstance(had, list):
        for n, value in enumerate(had):
            if not isinstance(has, list) or n >= len(has):
                return path
            if (found := first_missing(value, has[n], path)) is not None:
                return found
    return None
