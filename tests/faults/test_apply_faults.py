"""apply under faults on real daemons: each table is changed exactly once or not at all, and loses no rows.

Tables of a SQL catalog need no JVM, so that killing a child at each step is cheap. The rewrite of a table needs Spark.
"""

from __future__ import annotations

import json
import re
import uuid
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
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
from tests.faults.s3_lake import FAULTS, S3Lake
from tests.support import stored_files
from tests.support.context import FakeContext, run_operation
from tests.support.daemons import SPARK
from tests.support.icebergrest import configure, sql_catalog
from tests.support.lake import MAVEN, Folder, jar
from tests.support.needs import need

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from distop import Operation
    from tests.support.daemons import Daemons

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(180), pytest.mark.rotating]

SCHEMA = Schema(NestedField(1, "id", LongType(), required=False), NestedField(2, "c", StringType(), required=False))
CHECKS = [{"not_null": "c"}, {"not_null": "id"}]
ROUND = [f"Applying.{name}.{when}" for name in ("load", "judge") for when in ("before", "after")]
CHANGE = ["CatalogTarget.swap.before", "CatalogTarget.swap.after", "Applying.settle.after"]
CHANGE_OF_DELTA = ["DeltaTarget.swap.before", "DeltaTarget.swap.after", "Applying.settle.after"]
MORE_POINTS = [*ROUND, "Applying.commit.before", "Applying.commit.after", "Applying.settle.before"]
"""The other steps. At these, the table has the same content as at one of the steps above."""


NULLABLE = pa.schema([pa.field("id", pa.int64()), pa.field("c", pa.string())])


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


class DeltaTables:
    """Delta tables below a path or a URL, and the faults of their operations."""

    def __init__(self, group: Daemons, root: str, work: Path, faults: FaultInjector) -> None:
        self.group = group
        self.faults = faults
        self._root = root
        self._work = work

    def create(self, name: str, *faults: str) -> dict[str, Any]:
        """Register a table with two rows, set its faults, and return a certificate of the table."""
        written = self._work / "written" / name
        write_deltalake(written, rows(1, 2).cast(NULLABLE))
        for key in stored_files.keys(str(written)):
            stored_files.write(self._location(name), key, stored_files.read(str(written), key))
        record = TableRecord(name, "delta", self._location(name))
        self.group.client.add_table(record)
        self.faults.set_faults(name, *faults)
        made = run_operation(Validate(), record, {"checks": CHECKS}, lambda t: FakeContext(self._work, t))
        return dict(made.report["certificate"])

    def _location(self, name: str) -> str:
        return f"{self._root}/{name}"

    def append(self, name: str, *ids: int) -> None:
        """Append as a writer of Delta does: in the version after the one that it has read, or a later one."""
        data = pa.BufferOutputStream()
        pq.write_table(rows(*ids), data)
        content, where = data.getvalue().to_pybytes(), self._location(name)
        file = f"{uuid.uuid4().hex}.parquet"
        stored_files.write(where, file, content)
        numbers = {"numRecords": len(ids), "nullCount": {"id": 0, "c": 0}}
        add = {"path": file, "partitionValues": {}, "size": len(content), "modificationTime": 0, "dataChange": True}
        text = json.dumps({"add": {**add, "stats": json.dumps(numbers)}}) + "\n"
        while True:
            try:
                stored_files.write(where, f"_delta_log/{len(self.log(name)):020}.json", text.encode())
            except FileExistsError:
                continue  # another writer was first
            return

    def log(self, name: str) -> list[list[dict[str, Any]]]:
        """The actions of each version."""
        where = self._location(name)
        found = [key for key in stored_files.keys(where) if re.fullmatch(r"_delta_log/\d{20}\.json", key)]
        assert found == [f"_delta_log/{n:020}.json" for n in range(len(found))]
        return [[json.loads(line) for line in stored_files.read(where, key).splitlines()] for key in found]

    def start(self, name: str, certificate: dict[str, Any], settle: float = 0) -> Operation:
        argument = {"certificate": self.faults.add_certificate(certificate), "settle_seconds": settle}
        return self.group.client.start_operation("faulty-apply", name, argument)

    def assert_content(self, name: str, operation: str, *ids: int) -> None:
        """Assert that the table has these rows, and one change, by this operation."""
        actions = [action for version in self.log(name) for action in version]
        made = [one["commitInfo"]["operationParameters"] for one in actions if _is_apply(one)]
        assert made == [{"operation": operation}], "changed exactly once"
        metadata = [one["metaData"] for one in actions if "metaData" in one][-1]
        assert json.loads(metadata["configuration"][MARK])["operation"] == operation
        assert [field["nullable"] for field in json.loads(metadata["schemaString"])["fields"]] == [False, False]
        live = [stored_files.read(self._location(name), one["add"]["path"]) for one in actions if "add" in one]
        assert sorted(n for one in live for n in pq.read_table(pa.BufferReader(one))["id"].to_pylist()) == list(ids)
        assert not [key for key in stored_files.keys(self._location(name)) if key.startswith("_distop/")]


def _is_apply(action: dict[str, Any]) -> bool:
    return bool(action.get("commitInfo", {}).get("operation") == "distop apply")


@pytest.fixture
def delta(lake_of_kind: S3Lake | None, group: Daemons, tmp_path: Path, faults: FaultInjector) -> DeltaTables:
    root = str(tmp_path / "delta") if lake_of_kind is None else lake_of_kind.location
    return DeltaTables(group, root, tmp_path, faults)


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


@pytest.mark.parametrize(
    ("kind", "points"),
    [
        pytest.param("disk", CHANGE_OF_DELTA, id="disk-change", marks=pytest.mark.slow),
        pytest.param("disk", MORE_POINTS, id="disk-more", marks=pytest.mark.slow),
        pytest.param("S3", CHANGE_OF_DELTA, id="s3-change"),
        pytest.param("S3", MORE_POINTS, id="s3-more", marks=pytest.mark.slow),
    ],
)
def test_a_child_killed_at_any_step_changes_a_delta_table_once_beside_a_writer(
    kind: str, delta: DeltaTables, group: Daemons, faulty_env: dict[str, str], points: list[str]
) -> None:
    certificates = {f"t{n}": delta.create(f"t{n}", f"{point} kill") for n, point in enumerate(points)}
    group.start("ann", "bob", ttl=10, env=faulty_env)
    for n, (name, certificate) in enumerate(certificates.items()):
        operation = delta.start(name, certificate)
        delta.faults.await_triggered(group, name, seconds=60)
        if n % 2:
            delta.append(name, 3)
        result = operation.wait(90)
        assert result.state == "success", (points[n], result.errors, group.tails())
        delta.assert_content(name, operation.ref, *((1, 2, 3) if n % 2 else (1, 2)))


@pytest.mark.parametrize("kind", ["S3"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_delta_table_is_changed_once_whatever_happens_to_the_answers_of_its_store(
    kind: str,
    fault: Callable[[S3Lake], None],
    lake: S3Lake,
    delta: DeltaTables,
    group: Daemons,
    faulty_env: dict[str, str],
) -> None:
    """Of two executions, another writer commits during the second one."""
    certificates = [delta.create("t0"), delta.create("t1", "DeltaTarget.swap.before hold")]
    group.start("ann", ttl=10, env=faulty_env)
    fault(lake)
    for n, certificate in enumerate(certificates):
        operation = delta.start(f"t{n}", certificate)
        if n:
            delta.faults.await_triggered(group, "t1", seconds=60)
            delta.append("t1", 3)
            delta.faults.release("t1")
        result = operation.wait(90)
        assert result.state == "success", (result.errors, group.tails())
        delta.assert_content(f"t{n}", operation.ref, *((1, 2, 3) if n else (1, 2)))


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
