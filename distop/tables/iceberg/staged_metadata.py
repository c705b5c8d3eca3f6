"""The metadata of a table that an attempt has staged: whatever they name is read in Python before Java opens it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.errors import InvalidArgument, TableUnavailable
from distop.storage.confinement import TableFiles, table_of
from distop.tables.iceberg.avro import Damaged
from distop.tables.iceberg.iceberg_changes import entries
from distop.tables.iceberg.iceberg_format import files_of
from distop.tables.iceberg.manifest_list import manifests_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.tables.iceberg.metadata_file import MetadataFile

_DATA = 0
"""What a manifest of data files says that it lists."""


def check_staged(file: MetadataFile, data: str, check: Callable[[], None] = lambda: None) -> list[str]:
    """The manifests that the current snapshot of a metadata file names, which lie in its table's folder, as the list
    of them does; all files in these are data files in the folder ``data``. Raises InvalidArgument where anything lies
    elsewhere, TableUnavailable where it cannot be read.
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
                    raise InvalidArgument(f"the staged table {folder} has deletes: nothing was changed")
                rows.check((entry.data_file.file_path for _, entry in entries([manifest], io, check)), below=True)
                found.append(str(manifest.manifest_path))
    except (Damaged, OSError) as error:
        text = f"the metadata of the staged table {folder} cannot be read: {error}"
        raise TableUnavailable(text) from error
    return found
