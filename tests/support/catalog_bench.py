"""An Iceberg table in a catalog that is validated and changed by ``apply``, on a disk or in an object store."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, StringType, StructType

from distop.behavior import TableRecord
from distop_behaviors.apply import Apply
from distop_behaviors.apply.apply_loop import MARK
from distop_behaviors.validate import Validate
from tests.acceptance.applying import Staging
from tests.support.context import FakeContext, Ran, run_operation
from tests.support.icebergrest import RestCatalogServer, configure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from pyspark.sql import SparkSession

NOT_NULL = {"not_null": "c"}
NAME = "sales.orders"
SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=False),
    NestedField(2, "c", StringType(), required=False, doc="what it is called"),
    NestedField(3, "s", StructType(NestedField(4, "a", LongType(), required=False)), required=False),
)
INSIDE = pa.array([{"a": 1}, {"a": 2}], pa.struct([("a", pa.int64())]))
ROWS = pa.table({"id": pa.array([1, 2], pa.int64()), "c": ["x", "y"], "s": INSIDE})
REQUIRED = ROWS.cast(pa.schema([f.with_nullable(f.name != "c") for f in ROWS.schema]))
NULLS = pa.table({"id": pa.array([100], pa.int64()), "c": pa.array([None], pa.string()), "s": INSIDE[:1]})


class CatalogBench:
    """A table in a catalog. Creates certificates of the table, and applies them."""

    def __init__(self, server: RestCatalogServer, kind: str, folder: Path, spark: SparkSession | None) -> None:
        self.server = server
        self._tables = server.tables
        self._folder = folder
        self._spark = spark
        self._number = 0
        self.kind = kind
        self.record = TableRecord("t", "iceberg", NAME, {"catalog": "prod"})
        self._tables.create_namespace("sales")
        self._tables.create_table(NAME, SCHEMA).append(ROWS)
        self._nulls = self._tables.create_table("sales.nulls", SCHEMA)
        self._nulls.append(NULLS)

    @property
    def loaded(self) -> Any:
        return self._tables.load_table(NAME)

    @property
    def required(self) -> bool:
        return bool(self.loaded.schema().find_field("c").required)

    @property
    def mark(self) -> Any:
        return json.loads(self.loaded.properties.get(MARK, "null"))

    def versions(self) -> int:
        """The number of previous metadata files."""
        return len(self.loaded.metadata.metadata_log)

    def append_null(self) -> None:
        """Append a NULL as a writer with an old plan does, without a comparison with the current schema."""
        (task,) = self._nulls.scan().plan_files()
        with self.loaded.transaction() as changing, changing.update_snapshot().fast_append() as appending:
            appending.append_data_file(task.file)

    def context(self) -> FakeContext:
        """The context of a new operation."""
        self._number += 1
        ctx = Staging(self._folder, self.record, self._spark)
        ctx.operation = f"t/apply/{self._number}"
        return ctx

    def validate(self, *checks: dict[str, Any], **arg: Any) -> Ran:
        argument = {"checks": list(checks), **arg}
        return run_operation(Validate(), self.record, argument, lambda _: self.context())

    def certificate(self, *checks: dict[str, Any]) -> dict[str, Any]:
        return dict(self.validate(*(checks or (NOT_NULL,))).report["certificate"])

    def apply(self, certificate: dict[str, Any], ctx: FakeContext | None = None, settle: float = 0) -> Ran:
        mine = ctx or self.context()
        argument = {"certificate": certificate, "settle_seconds": settle}
        return run_operation(Apply(), self.record, argument, lambda _: mine)


@contextmanager
def catalog_bench(
    kind: str,
    folder: Path,
    spark: SparkSession | None = None,
    *,
    warehouse: str = "",
    storage: Mapping[str, str] | None = None,
) -> Iterator[CatalogBench]:
    """A bench with a new catalog. ``warehouse`` and ``storage``: see ``sql_catalog``."""
    with RestCatalogServer(folder / "lake", warehouse, storage) as server, pytest.MonkeyPatch.context() as patch:
        configure(patch, type=kind, uri=server.uri if kind == "rest" else f"sqlite:///{folder}/lake/catalog.db")
        yield CatalogBench(server, kind, folder, spark)
