"""Reads the manifest list of an Iceberg snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.storage.files import local_path

if TYPE_CHECKING:
    from distop.tables.iceberg.avro import ManifestIO

MANIFESTS = 100_000
"""Maximum manifests of a snapshot. Writers merge manifests when there are more than a hundred."""


def manifests_of(snapshot: Any, io: ManifestIO) -> list[Any]:
    """The manifests in a snapshot's list, in order.

    Not with pyiceberg's own function, which caches manifests by path: then one table's list could determine the entry
    of a manifest in another table's list. Raises InvalidArgument for a manifest that is listed twice, and for too many;
    the errors of ``io``.
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
                    f"the manifest list {snapshot.manifest_list} has the manifest {manifest.manifest_path} twice"
                )
            named.add(path)
            found.append(manifest)
            if len(found) > MANIFESTS:
                raise InvalidArgument(
                    f"the manifest list {snapshot.manifest_list} has more than {MANIFESTS} manifests, the limit for a "
                    "snapshot: let the table's writer merge them"
                )
    return found
