"""Changes the schema and the files of an Iceberg table by path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.clock import time
from distop.tables.iceberg.folder_publisher import FolderPublisher
from distop.tables.iceberg.metadata_change import changed_metadata
from distop_behaviors.apply.iceberg_schema import IcebergHeadSchema

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distop.tables.commits import Head
    from distop.tables.iceberg.new_metadata import Rewrite
    from distop_behaviors.apply.schema_target import SchemaChange


class HadoopTarget(FolderPublisher):
    """A table of a Hadoop catalog, or one that was created by path."""

    def schema(self, head: Head) -> IcebergHeadSchema:
        """See Target."""
        return IcebergHeadSchema(head.source, self._table)

    def swap(self, head: Head, change: SchemaChange) -> None:
        """See Target. Also raises TableUnavailable if the store refuses, UnsafePath, and InvalidArgument."""
        required = dict.fromkeys(change.required, True) | dict.fromkeys(change.optional, False)
        self.commit(head, changed_metadata(head.base, required, change.properties or {}, time.time()))

    def rewrite(self, head: Head, rewrite: Rewrite) -> None:
        """See Target. Removes the written manifests if the commit fails."""
        self.commit_produced(head, lambda production: production.rewritten(rewrite))

    def roll_back(
        self, head: Head, schema: int, snapshot: int | None, kept: frozenset[str], change: Mapping[str, str | None]
    ) -> None:
        """See Target."""
        self.commit_produced(head, lambda production: production.rolled_back(schema, snapshot, kept, change))
