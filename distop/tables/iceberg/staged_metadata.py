"""Checks an attempt's staged table metadata in Python before Java opens the files that they name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.errors import InvalidArgument, TableUnavailable
from distop.storage.confinement import TableFiles, table_of
from distop.tables.iceberg.avro import Damaged
from distop.tables.iceberg.iceberg_changes import entries
from distop.tables.iceberg.manifest_list import manifests_of
from distop.tables.iceberg.snapshot_files import files_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.tables.iceberg.metadata_file import MetadataFile

_DATA = 0
"""The content type of a manifest of data files."""


def check_staged(file: MetadataFile, data: str, check: Callable[[], None] = lambda: None) -> list[str]:
    """The manifests of the current snapshot, after a check of all paths.

    Manifest list and manifests must be in the table's folder, and have only data files in the folder ``data``. Raises
    InvalidArgument for other paths, TableUnavailable if a file cannot be read.
    """
    metadata, io, folder = file.content, file.manifests(), table_of(file.source)
    files_of(file.source, metadata)
    own, rows, found = TableFiles(folder), TableFiles(data), list[str]()
    own.check((one.manifest_list for one in metadata.snapshots), below=True)
    snapshot = metadata.current_snapshot()
    if snapshot is None:
        return found
    try:
        with io.watched():
            for manifest in manifests_of(snapshot, io):
                check()
                own.check((manifest.manifest_path,), below=True)
                if manifest.content != _DATA:
                    raise InvalidArgument(f"the staged table {folder} has delete files: nothing was changed")
                rows.check((entry.data_file.file_path for _, entry in entries([manifest], io, check)), below=True)
                found.append(str(manifest.manifest_path))
    except (Damaged, OSError) as error:
        text = f"cannot read the metadata of the staged table {folder}: {error}"
        raise TableUnavailable(text) from error
    return found
