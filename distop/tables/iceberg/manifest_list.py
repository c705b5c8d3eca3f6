"""The manifests of an Iceberg snapshot, by its list of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.storage.files import local_path

if TYPE_CHECKING:
    from distop.tables.iceberg.avro import ManifestIO

MANIFESTS = 100_000
"""Of a snapshot at most. Writers merge manifests from a hundred on."""


def manifests_of(snapshot: Any, io: ManifestIO) -> list[Any]:
    """The manifests that the list of a snapshot names, in its order. Raises InvalidArgument where it names one twice or
    too many, and what ``io`` raises.

    pyiceberg's own reader keeps them by their paths: the first list that names a manifest says for all tables of the
    process what is in it.
    """
    from pyiceberg.manifest import (
        DEFAULT_READ_VERSION,
        MANIFEST_LIST_FILE_SCHEMAS,
        ManifestContent,
        ManifestFile,
        PartitionFieldSummary,
    )

    from distop.tables.iceberg.avro_records import RecordFile

    found: list[Any] = []
    named: set[str] = set()
    with RecordFile[ManifestFile](
        io.new_input(snapshot.manifest_list),
        MANIFEST_LIST_FILE_SCHEMAS[DEFAULT_READ_VERSION],
        read_types={-1: ManifestFile, 508: PartitionFieldSummary},
        read_enums={517: ManifestContent},
    ) as reader:
        for manifest in reader:
            path = str(local_path(manifest.manifest_path) or manifest.manifest_path)
            if path in named:
                raise InvalidArgument(
                    f"the list of manifests {snapshot.manifest_list} names the manifest {manifest.manifest_path} twice"
                )
            named.add(path)
            found.append(manifest)
            if len(found) > MANIFESTS:
                raise InvalidArgument(
                    f"the list of manifests {snapshot.manifest_list} names more than {MANIFESTS} manifests, the most "
                    "that are read of a snapshot: have the table's writer merge them"
                )
    return found
