"""A Delta table that is validated and changed by ``apply``, beside writers of other libraries."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, write_deltalake

from distop.behavior import TableRecord
from distop.storage.opened_stores import open_store
from distop.testing import MemoryProgress
from distop_behaviors.apply import Apply
from distop_behaviors.validate import Validate
from tests.support.context import FakeContext, Ran, run_operation
from tests.support.delta_logs import statistics

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pyspark.sql import SparkSession

    from distop.storage.object_store import ObjectStore

LOG_NAME = "_delta_log"
VALUE = "delta.constraints.positive"


def rows(*texts: str | None, first: int = 1) -> pa.Table:
    return pa.table({"id": list(range(first, first + len(texts))), "c": pa.array(texts, pa.string())})


class Bench:
    """A Delta table ``t``, its certificates, and their applications. ``spark``: None if nothing may use Spark."""

    def __init__(self, folder: Path, spark: SparkSession | None = None) -> None:
        self._spark = spark
        self.path = folder / "t"
        self.work = folder / "work"
        self.record = TableRecord("t", "delta", str(self.path))
        self._number = 0

    def create(self, **given: Any) -> Bench:
        write_deltalake(self.path, rows("x", "y"), **given)
        return self

    def context(self) -> FakeContext:
        self._number += 1
        ctx = FakeContext(self.work, self.record, self._spark)
        ctx.operation = f"t/apply/{self._number}"
        ctx.progress = MemoryProgress()
        return ctx

    def validate(self, *checks: dict[str, Any], **arg: Any) -> Ran:
        given = {"checks": list(checks), **arg}
        return run_operation(Validate(), self.record, given, lambda table: FakeContext(self.work, table, self._spark))

    def certificate(self, *checks: dict[str, Any], **arg: Any) -> dict[str, Any]:
        report = self.validate(*checks, **arg).report
        assert report["certificate"] is not None, report
        return dict(report["certificate"])

    def apply(self, ctx: FakeContext, certificate: dict[str, Any]) -> Ran:
        argument = {"certificate": certificate, "settle_seconds": 0}
        return run_operation(Apply(), self.record, argument, lambda _: ctx)

    @property
    def table(self) -> DeltaTable:
        return DeltaTable(self.path)

    @property
    def version(self) -> int:
        return self.table.version()

    def required(self, column: str = "c") -> bool:
        return not next(f for f in self.table.schema().fields if f.name == column).nullable

    @property
    def properties(self) -> dict[str, str]:
        return dict(self.table.metadata().configuration)

    def append_blindly(self, data: pa.Table) -> None:
        """Append as a writer that does not compare the metadata, against Delta's rules."""
        version, written = self.version + 1, io.BytesIO()
        name = f"blind-{version}.parquet"
        pq.write_table(data, written)
        add = {
            "path": name,
            "partitionValues": {},
            "size": len(written.getvalue()),
            "modificationTime": 0,
            "dataChange": True,
            "stats": statistics(data.num_rows, nullCount={"id": 0, "c": data["c"].null_count}),
        }
        store = open_store(self.record.location)
        store.put_new(name, written.getvalue())
        store.put_new(f"{LOG_NAME}/{version:020}.json", (json.dumps({"add": add}) + "\n").encode())


class RemoteBench(Bench):
    """A Delta table in S3. ``options``: delta-rs's for the bucket, so that its writers need no configuration."""

    def __init__(
        self, store: ObjectStore, work: Path, options: Mapping[str, str], spark: SparkSession | None = None
    ) -> None:
        super().__init__(work, spark)
        self.store = store
        self.record = TableRecord("t", "delta", store.location)
        self.options = dict(options)

    def create(self, **given: Any) -> RemoteBench:
        write_deltalake(self.store.location, rows("x", "y"), storage_options=self.options, **given)
        return self

    @property
    def table(self) -> DeltaTable:
        return DeltaTable(self.store.location, storage_options=self.options)

    def append(self, data: pa.Table) -> None:
        """Append as a writer that began after all commits so far."""
        write_deltalake(self.table, data, mode="append")
