"""Iceberg tables for tests: written by pyiceberg without a JVM, and Iceberg's jar for those that need Spark."""

from __future__ import annotations

import fcntl
import functools
import subprocess
import tempfile
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

from distop_behaviors.reading.iceberg import VERSION

if TYPE_CHECKING:
    from pyiceberg.partitioning import PartitionSpec
    from pyiceberg.schema import Schema

ARTIFACT = "iceberg-spark-runtime-4.1_2.13"
COORDINATES = f"org.apache.iceberg:{ARTIFACT}:{VERSION}"
MAVEN = f"Iceberg's jar: Spark must reach a Maven repository once, for {COORDINATES}"


@functools.cache
def jar(artifact: str = ARTIFACT) -> Path | None:
    """Iceberg's jar for Spark, as Spark resolves it; None where it cannot. It stays in Spark's cache of this user.
    ``artifact``: that for another Spark.
    """
    import pyspark

    cache = Path.home() / ".ivy2.5.2"
    found = cache / "jars" / f"org.apache.iceberg_{artifact}-{VERSION}.jar"
    # Several test processes come here at once, and Ivy's cache is made for one.
    with (Path(tempfile.gettempdir()) / "distop-iceberg-jar.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
            with tempfile.NamedTemporaryFile(suffix=".py") as nothing:
                coordinates = COORDINATES.replace(ARTIFACT, artifact)
                command = [submit, "--packages", coordinates, "--conf", f"spark.jars.ivy={cache}", nothing.name]
                subprocess.run(command, capture_output=True, timeout=100, check=False)
    return found if found.exists() else None


class Folder(NoopCatalog):
    """Tables by path, in the form of Iceberg's file-system tables: ``metadata/vN.metadata.json`` and a hint."""

    def __init__(self, root: Path) -> None:
        super().__init__("folder")
        self.root = root
        self.io = load_file_io({}, str(root))
        self.version = 0

    def new(self, schema: Schema, spec: PartitionSpec = UNPARTITIONED_PARTITION_SPEC, **properties: str) -> Table:
        metadata = new_table_metadata(
            location=str(self.root),
            schema=schema,
            partition_spec=spec,
            sort_order=UNSORTED_SORT_ORDER,
            properties=properties,
        )
        return Table(("t",), metadata, self.write(metadata), self.io, self)

    def write(self, metadata: Any) -> str:
        """The next version of the metadata; where it is."""
        self.version += 1
        path = self.root / "metadata" / f"v{self.version}.metadata.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        ToOutputFile.table_metadata(metadata, self.io.new_output(str(path)))
        (path.parent / "version-hint.text").write_text(str(self.version))
        return str(path)

    def commit_table(self, table: Table, requirements: Any, updates: Any) -> CommitTableResponse:
        metadata = update_table_metadata(table.metadata, updates)
        return CommitTableResponse(metadata=metadata, metadata_location=self.write(metadata))
