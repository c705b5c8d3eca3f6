"""apply under faults on real daemons: each table is changed exactly once or not at all, and loses no rows.

Tables of a SQL catalog need no JVM, so that killing a child at each step is cheap. The rewrite of a table needs Spark.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.schema import Schema
from pyiceberg.table import StaticTable
from pyiceberg.types import LongType, NestedField, StringType

from distop.behavior import TableRecord
from distop.storage.location import Location
from distop.tables.iceberg.metadata_file import current_metadata_file, read_metadata
from distop_behaviors.apply.apply_loop import MARK
from distop_behaviors.validate import Validate
from tests.faults.fault_injection import FaultInjector
from tests.support.context import FakeContext, run_operation
from tests.support.daemons import SPARK
from tests.support.icebergrest import configure, sql_catalog
from tests.support.lake import MAVEN, Folder, jar
from tests.support.needs import need

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from distop import Operation
    from tests.support.daemons import Daemons

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(180), pytest.mark.rotating]

SCHEMA = Schema(NestedField(1, "id", LongType(), required=False), NestedField(2, "c", StringType(), required=False))
CHECKS = [{"not_null": "c"}, {"not_null": "id"}]
ROUND = [f"Applying.{name}.{when}" for name in ("load", "judge") for when in ("before", "after")]
CHANGE = ["CatalogTarget.swap.before", "CatalogTarget.swap.after", "Applying.settle.after"]
MORE_POINTS = [*ROUND, "Applying.commit.before", "Applying.commit.after", "Applying.settle.before"]
"""The other steps. At these, the table has the same content as at one of the steps above."""


def rows(*ids: int) -> pa.Table:
    """Rows in a schema without NULLs, which a writer can append before and after the change."""
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("c", pa.string(), nullable=False)])
    return pa.table({"id": ids, "c": [f"c{i}" for i in ids]}, schema)


class Tables:
    """Tables of a catalog in SQLite, and the faults of their operations."""

    def __init__(self, group: Daemons, folder: Path, faults: FaultInjector) -> None:
        self.group = group
        self.faults = faults
        self.folder = folder
        self.catalog = sql_catalog(folder / "lake")
        self.catalog.create_namespace("sales")
        self.commits: dict[str, int] = {}

    def create(self, name: str, *faults: str) -> dict[str, Any]:
        """Register a table with two rows, set its faults, and return a certificate of the table."""
        self.catalog.create_table(f"sales.{name}", SCHEMA).append(rows(1, 2))
        record = TableRecord(name, "iceberg", f"sales.{name}", {"catalog": "prod"})
        self.group.client.add_table(record)
        self.faults.set_faults(name, *faults)
        made = run_operation(Validate(), record, {"checks": CHECKS}, lambda t: FakeContext(self.folder, t))
        self.commits[name] = len(self.metadata(name).metadata_log)
        return dict(made.report["certificate"])

    def metadata(self, name: str) -> Any:
        return self.catalog.load_table(f"sales.{name}").metadata

    def append(self, name: str, *ids: int) -> None:
        while True:
            try:
                self.catalog.load_table(f"sales.{name}").append(rows(*ids))
            except CommitFailedException:
                continue  # another writer was first
            self.commits[name] += 1
            return

    def start(self, name: str, certificate: dict[str, Any], settle: float = 0) -> Operation:
        argument = {"certificate": self.faults.add_certificate(certificate), "settle_seconds": settle}
        return self.group.client.start_operation("faulty-apply", name, argument)

    def assert_content(self, name: str, operation: str | None, *ids: int) -> None:
        """Assert that the table has these rows, and one change by this operation (None: no change)."""
        metadata = self.metadata(name)
        mark = json.loads(metadata.properties.get(MARK, "null"))
        assert (mark and mark["operation"]) == operation
        assert [field.required for field in metadata.schema().fields] == [operation is not None] * 2
        found = self.catalog.load_table(f"sales.{name}").scan().to_arrow()
        assert sorted(found["id"].to_pylist()) == list(ids)
        if operation is not None:
            assert len(metadata.metadata_log) == self.commits[name] + 1, "changed exactly once"


@pytest.fixture
def tables(group: Daemons, tmp_path: Path, faults: FaultInjector, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tables]:
    configure(monkeypatch, type="sql", uri=f"sqlite:///{tmp_path}/lake/catalog.db")
    made = Tables(group, tmp_path, faults)
    yield made
    made.catalog.close()


@pytest.mark.parametrize(
    "points", [pytest.param(CHANGE, id="change"), pytest.param(MORE_POINTS, id="more", marks=pytest.mark.slow)]
)
def test_a_child_killed_at_any_step_changes_the_table_once_beside_a_writer(
    tables: Tables, group: Daemons, faulty_env: dict[str, str], points: list[str]
) -> None:
    certificates = {f"t{n}": tables.create(f"t{n}", f"{point} kill") for n, point in enumerate(points)}
    group.start("ann", "bob", ttl=10, env=faulty_env)
    # One at a time: the kill for one operation would interrupt another one in the same child at a different step.
    for n, (name, certificate) in enumerate(certificates.items()):
        operation = tables.start(name, certificate)
        tables.faults.await_triggered(group, name, seconds=60)
        if n % 2:
            tables.append(name, 3)
        result = operation.wait(90)
        assert result.state == "success", (points[n], result.errors, group.tails())
        tables.assert_content(name, operation.ref, *((1, 2, 3) if n % 2 else (1, 2)))


@pytest.mark.parametrize("moment", ["before", pytest.param("after", marks=pytest.mark.slow)])
def test_an_executor_that_wakes_up_changes_no_table_that_another_took_over(
    tables: Tables, group: Daemons, faulty_env: dict[str, str], moment: str
) -> None:
    certificate = tables.create("frozen", f"CatalogTarget.swap.{moment} hold")
    (ann,) = group.start("ann", env=faulty_env)
    operation = tables.start("frozen", certificate)
    group.eventually(lambda: tables.faults.triggered("frozen"), "ann holds before or after its commit")
    ann.suspend()
    group.start("bob", env=faulty_env)
    result = operation.wait(60)
    assert result.state == "success", group.tails()
    tables.assert_content("frozen", operation.ref, 1, 2)
    tables.append("frozen", 3)
    source = tables.metadata("frozen")
    tables.faults.release("frozen")
    ann.wake()
    group.await_ready("ann")
    assert tables.metadata("frozen") == source
    tables.assert_content("frozen", operation.ref, 1, 2, 3)


def test_a_cancel_reverts_the_change_of_the_table(tables: Tables, group: Daemons, faulty_env: dict[str, str]) -> None:
    certificates = {
        "early": tables.create("early", "CatalogTarget.swap.before hold"),
        "late": tables.create("late", "Applying.settle.before hold"),
    }
    group.start("ann", ttl=10, env=faulty_env)
    for name, certificate in certificates.items():
        operation = tables.start(name, certificate, settle=600)
        group.eventually(lambda name=name: tables.faults.triggered(name), f"the fault of {name} triggers")  # type: ignore[misc]
        operation.cancel("changed my mind")
        tables.append(name, 3)
        tables.faults.release(name)
        assert operation.wait(60).state == "cancelled", group.tails()
        tables.assert_content(name, None, 1, 2, 3)


@pytest.mark.spark
@pytest.mark.slow
def test_a_rewrite_whose_jvm_and_child_are_killed_loses_no_rows_and_leaves_no_files(
    group: Daemons, tmp_path: Path, faults: FaultInjector, faulty_env: dict[str, str]
) -> None:
    need(jar(), MAVEN)
    table = Folder(tmp_path / "orders").new(SCHEMA)
    table.append(rows(1, 2))
    record = TableRecord("orders", "iceberg", str(tmp_path / "orders"))
    group.client.add_table(record)
    checks = [{"fits": {"column": "id", "type": "int"}}]
    made = run_operation(Validate(), record, {"checks": checks}, lambda t: FakeContext(tmp_path, t))
    faults.set_faults("orders", "Narrowing.stage.after kill-jvm", "HadoopTarget.rewrite.after kill")
    options = (*SPARK, "--spark-conf", f"spark.jars={jar()}")
    group.start("ann", ttl=10, env=faulty_env, options=options)
    argument = {"certificate": faults.add_certificate(made.report["certificate"]), "settle_seconds": 0}
    operation = group.client.start_operation("faulty-apply", "orders", argument)
    group.eventually(lambda: faults.triggered("orders"), "the JVM is killed", seconds=90)
    table.append(rows(3, 4))
    result = operation.wait(150)
    assert result.state == "success", group.tails()
    metadata, _ = read_metadata(current_metadata_file(Location.of(str(tmp_path / "orders"))))
    assert [str(field.field_type) for field in metadata.schema().fields] == ["int", "string"]
    assert json.loads(metadata.properties[MARK])["operation"] == operation.ref
    assert len(metadata.snapshots) == 3, "rewritten exactly once"
    assert result.report["rewritten"]["rows"] == 4
    found = StaticTable.from_metadata(current_metadata_file(Location.of(str(tmp_path / "orders")))).scan()
    assert sorted(found.to_arrow()["id"].to_pylist()) == [1, 2, 3, 4]
    live = {task.file.file_path for task in found.plan_files()}
    folders = {str(path) for path in (tmp_path / "orders" / "data").glob("distop-staged/*/*/*/*/*/*")}
    assert folders
    assert [folder for folder in folders if not any(folder in path for path in live)] == []
    assert not list((tmp_path / "orders" / "_distop").glob("*/stage/*/*/*"))
