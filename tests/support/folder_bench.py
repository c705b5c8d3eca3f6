"""An Iceberg table given by its folder, on a disk or in an object store, that is validated and changed by ``apply``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyiceberg.io.pyarrow import _dataframe_to_data_files
from pyiceberg.table import Table

from distop.behavior import TableRecord
from distop.storage.location import Location
from distop.tables.iceberg.metadata_file import current_metadata_file, metadata_version, read_file
from distop.testing import MemoryProgress
from distop_behaviors.apply import Apply
from distop_behaviors.validate import Validate
from tests.support.catalog_bench import SCHEMA
from tests.support.context import FakeContext, Ran, run_operation
from tests.support.lake import Remote

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pyspark.sql import SparkSession

    from distop.storage.object_store import ObjectStore
    from distop.tables.iceberg.metadata_file import MetadataFile


def rows(*texts: str | None, first: int = 1) -> pa.Table:
    inner = pa.array([{"a": n} for n in range(len(texts))], pa.struct([("a", pa.int64())]))
    ids = pa.array(range(first, first + len(texts)), pa.int64())
    return pa.table({"id": ids, "c": pa.array(texts, pa.string()), "s": inner})


class FolderBench:
    """A table with two rows, its certificates, and their applications. ``spark``: None if nothing may use Spark.

    ``storage``: pyiceberg's properties for the store. ``given``: properties of the table.
    """

    def __init__(
        self,
        store: ObjectStore,
        work: Path,
        storage: Mapping[str, str],
        spark: SparkSession | None = None,
        given: dict[str, Any] | None = None,
    ) -> None:
        self.store = store
        self.record = TableRecord("t", "iceberg", store.location)
        self._work = work
        self._storage = storage
        self._spark = spark
        self._number = 0
        Remote(store, storage).new(SCHEMA, **(given or {})).append(rows("x", "y"))

    @property
    def source(self) -> str:
        return current_metadata_file(Location.of(self.store.location))

    @property
    def file(self) -> MetadataFile:
        return read_file(self.source)

    @property
    def version(self) -> int:
        """The number of the current metadata file."""
        return metadata_version(self.source)

    @property
    def table(self) -> Table:
        """The table for a writer without distop, whose commits compare nothing but the number of the metadata file."""
        catalog, file = Remote(self.store, self._storage), self.file
        catalog.version = self.version
        return Table(("t",), file.content, file.source, catalog.io, catalog)

    def append_blindly_without_id(self) -> None:
        """Append a row whose id is NULL as a writer with an old plan does, without a comparison with the schema."""
        table = self.table
        data = rows("late").set_column(0, "id", pa.array([None], pa.int64()))
        [file] = _dataframe_to_data_files(table.metadata.model_copy(update={"current_schema_id": 0}), data, table.io)
        with table.transaction() as changing, changing.update_snapshot().fast_append() as appending:
            appending.append_data_file(file)

    def replace(self, key: str, data: bytes) -> None:
        """Replace a file of the table, whoever has written it."""
        self.store.replace_if(key, data, self.store.head(key).version)

    def required(self, column: str = "c") -> bool:
        return bool(self.file.content.schema().find_field(column).required)

    @property
    def properties(self) -> dict[str, str]:
        return dict(self.file.content.properties)

    def append(self, data: pa.Table) -> None:
        """Append as a writer that began after all commits so far."""
        self.table.append(data)

    def context(self) -> FakeContext:
        self._number += 1
        ctx = FakeContext(self._work, self.record, self._spark)
        ctx.operation = f"t/apply/{self._number}"
        ctx.progress = MemoryProgress()
        return ctx

    def certificate(self, *checks: dict[str, Any]) -> dict[str, Any]:
        report = run_operation(Validate(), self.record, {"checks": list(checks)}, lambda _: self.context()).report
        assert report["certificate"] is not None, report
        return dict(report["certificate"])

    def apply(self, ctx: FakeContext, certificate: dict[str, Any]) -> Ran:
        argument = {"certificate": certificate, "settle_seconds": 0}
        return run_operation(Apply(), self.record, argument, lambda _: ctx)
