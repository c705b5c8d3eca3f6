"""Statistics files of Iceberg tables, and what a table's folder has on a disk, for tests of operations that delete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyiceberg.table import CommitTableResponse
from pyiceberg.table.metadata import TableMetadataUtil
from pyiceberg.table.update import update_table_metadata

from tests.support.lake import Folder, Remote

if TYPE_CHECKING:
    from pyiceberg.table import Table

    from tests.support.lake import Versions


class LoggedFolder(Folder):
    """A table in a folder whose metadata have the log of earlier metadata files."""

    def commit_table(self, table: Table, requirements: Any, updates: Any) -> CommitTableResponse:
        metadata = update_table_metadata(table.metadata, updates, metadata_location=table.metadata_location)
        return CommitTableResponse(metadata=metadata, metadata_location=self.write(metadata))


class LoggedRemote(Remote):
    """The same in an object store."""

    def commit_table(self, table: Table, requirements: Any, updates: Any) -> CommitTableResponse:
        metadata = update_table_metadata(table.metadata, updates, metadata_location=table.metadata_location)
        return CommitTableResponse(metadata=metadata, metadata_location=self.write(metadata))


def with_statistics(table: Table, *snapshots: int) -> list[str]:
    """Commit a statistics file and a partition statistics file for each snapshot; returns their paths."""
    text: dict[str, Any] = json.loads(table.metadata.model_dump_json())
    paths = []
    for snapshot in snapshots:
        common = {"snapshot-id": snapshot, "file-size-in-bytes": 4}
        for key, end in (("statistics", "stats"), ("partition-statistics", "parquet")):
            path = f"{table.metadata.location}/metadata/{snapshot}.{end}"
            Path(path).write_bytes(b"PFA1")
            more = {"file-footer-size-in-bytes": 4, "blob-metadata": []} if key == "statistics" else {}
            text[key] = [*(text.get(key) or ()), {**common, **more, "statistics-path": path}]
            paths.append(path)
    former = {"timestamp-ms": text["last-updated-ms"], "metadata-file": table.metadata_location}
    text["metadata-log"] = [*(text.get("metadata-log") or ()), former]
    catalog: Versions = table.catalog  # type: ignore[assignment]
    table.metadata = TableMetadataUtil.parse_raw(json.dumps(text))
    table.metadata_location = catalog.write(table.metadata)
    return paths


def on_disk(folder: Path) -> set[str]:
    """The paths of all files below a folder."""
    return {str(path) for path in folder.rglob("*") if not path.is_dir()}
