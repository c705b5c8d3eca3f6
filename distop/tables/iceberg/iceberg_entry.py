"""The entry of an Iceberg table in a catalog that pyiceberg connects to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.tables.catalog_entry import CatalogEntry, CatalogEntryState
from distop.tables.iceberg.iceberg_catalogs import NoTable, opened

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.protocol.records import TableRecord


class IcebergEntry(CatalogEntry):
    """The entry of a table with the option ``catalog``."""

    def __init__(self, table: TableRecord, check: Callable[[], None]) -> None:
        self._table = table
        self._check = check

    def find(self) -> CatalogEntryState | None:
        try:
            with opened(self._table, self._check) as found:
                return CatalogEntryState(str(found.metadata.table_uuid), found.source)
        except NoTable:
            return None

    def drop(self) -> None:
        try:
            with opened(self._table, self._check) as found:
                found.drop()
        except NoTable:
            return
