"""Iceberg tables for tests, written by pyiceberg without a JVM; and Iceberg's jar for tests with Spark."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.io import load_file_io
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.serializers import ToOutputFile
from pyiceberg.table import CommitTableResponse, Table
from pyiceberg.table.metadata import new_table_metadata
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER
from pyiceberg.table.update import update_table_metadata

from scripts import spark_jars

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyiceberg.io import FileIO
    from pyiceberg.partitioning import PartitionSpec
    from pyiceberg.schema import Schema

    from distop.storage.object_store import ObjectStore

ARTIFACT = spark_jars.ICEBERG.artifact
COORDINATES = str(spark_jars.ICEBERG)
MAVEN = f"Iceberg's jar: run scripts/iceberg-jar with access to Maven Central, for {COORDINATES}"


@functools.cache
def jar(artifact: str = ARTIFACT) -> Path | None:
    """Iceberg's jar for Spark, from the user's cache; None if it is not there and cannot be downloaded.

    ``artifact``: the jar for another version of Spark. Raises Unverified.
    """
    return spark_jars.find(spark_jars.ICEBERG._replace(artifact=artifact))


class Versions(NoopCatalog):
    """A table at a location, of which each commit writes a metadata file with the next number."""

    location: str
    io: FileIO
    version = 0

    def new(self, schema: Schema, spec: PartitionSpec = UNPARTITIONED_PARTITION_SPEC, **properties: str) -> Table:
        metadata = new_table_metadata(
            location=self.location,
            schema=schema,
            partition_spec=spec,
            sort_order=UNSORTED_SORT_ORDER,
            properties=properties,
        )
        return Table(("t",), metadata, self.write(metadata), self.io, self)

    def write(self, metadata: Any) -> str:
        """Write the next version of the metadata; returns its path or URL."""
        raise NotImplementedError

    def commit_table(self, table: Table, requirements: Any, updates: Any) -> CommitTableResponse:
        metadata = update_table_metadata(table.metadata, updates)
        return CommitTableResponse(metadata=metadata, metadata_location=self.write(metadata))


class Remote(Versions):
    """Like :class:`Folder` in an object store. ``properties``: pyiceberg's for the store."""

    def __init__(self, store: ObjectStore, properties: Mapping[str, str]) -> None:
        super().__init__("remote")
        self.store = store
        self.location = store.location
        self.io = load_file_io(dict(properties), store.location)

    def write(self, metadata: Any) -> str:
        """Write the next version of the metadata; returns its URL."""
        self.version += 1
        key = f"metadata/v{self.version}.metadata.json"
        self.store.put_new(key, metadata.model_dump_json().encode())
        return f"{self.store.location}/{key}"


class Folder(Versions):
    """A table in a folder, like Iceberg's file-system tables, with metadata files ``vN.metadata.json`` and a hint."""

    def __init__(self, root: Path) -> None:
        super().__init__("folder")
        self.root = root
        self.location = str(root)
        self.io = load_file_io({}, str(root))

    def write(self, metadata: Any) -> str:
        """Write the next version of the metadata; returns its path."""
        self.version += 1
        path = self.root / "metadata" / f"v{self.version}.metadata.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        ToOutputFile.table_metadata(metadata, self.io.new_output(str(path)))
        (path.parent / "version-hint.text").write_text(str(self.version))
        return str(path)
