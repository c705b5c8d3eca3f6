"""apply under faults on real daemons: each table is changed exactly once or not at all, and loses no rows.

Tables that only get another schema need no JVM, so that killing a child at each step is cheap. The rewrite of a table
needs Spark.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from distop.storage.confinement import normal_form
from distop_behaviors.apply.apply_loop import MARK
from tests.faults.applied_tables import CatalogTables, DeltaTables, FolderTables, Tables
from tests.faults.s3_lake import FAULTS, SHORT, KilledGateway, S3Lake, throttle
from tests.support import s3_spark, stored_files
from tests.support.daemons import SPARK
from tests.support.icebergrest import configure
from tests.support.lake import MAVEN, jar
from tests.support.needs import need

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.faults.fault_injection import FaultInjector
    from tests.support.daemons import Daemons

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(180), pytest.mark.rotating]

CATALOG = "Iceberg in a catalog"
ICEBERG, DELTA = "Iceberg on a disk", "Delta on a disk"
ICEBERG_ON_S3, DELTA_ON_S3 = "Iceberg on S3", "Delta on S3"
ON_S3 = [pytest.param(ICEBERG_ON_S3, id="iceberg"), pytest.param(DELTA_ON_S3, id="delta")]
ROUND = [f"Applying.{name}.{when}" for name in ("load", "judge") for when in ("before", "after")]
MORE_POINTS = [*ROUND, "Applying.commit.before", "Applying.commit.after", "Applying.settle.before"]
"""The other steps. At these, the table has the same content as at one of the steps of a change."""


def change(target: str) -> list[str]:
    return [f"{target}.swap.before", f"{target}.swap.after", "Applying.settle.after"]


CHANGE_OF_FOLDER = ["commit_file.create.before", "commit_file.create.after", *change("HadoopTarget")]
"""The version hint is written after the metadata file."""


@pytest.fixture
def tables(
    kind: str,
    lake_of_kind: S3Lake | None,
    group: Daemons,
    tmp_path: Path,
    faults: FaultInjector,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Tables]:
    """Tables of the kind in the test's parameter."""
    if kind == CATALOG:
        configure(monkeypatch, type="sql", uri=f"sqlite:///{tmp_path}/lake/catalog.db")
        made = CatalogTables(group, tmp_path, faults)
        yield made
        made.catalog.close()
        return
    root = str(tmp_path / "tables") if lake_of_kind is None else lake_of_kind.location
    yield (FolderTables if "Iceberg" in kind else DeltaTables)(group, tmp_path, faults, root, lake_of_kind)


@pytest.mark.parametrize(
    ("kind", "points"),
    [
        pytest.param(CATALOG, change("CatalogTarget"), id="catalog-change"),
        pytest.param(CATALOG, MORE_POINTS, id="catalog-more", marks=pytest.mark.slow),
        pytest.param(ICEBERG, CHANGE_OF_FOLDER, id="iceberg-disk-change", marks=pytest.mark.slow),
        pytest.param(ICEBERG, MORE_POINTS, id="iceberg-disk-more", marks=pytest.mark.slow),
        pytest.param(ICEBERG_ON_S3, CHANGE_OF_FOLDER, id="iceberg-s3-change"),
        pytest.param(ICEBERG_ON_S3, MORE_POINTS, id="iceberg-s3-more", marks=pytest.mark.slow),
        pytest.param(DELTA, change("DeltaTarget"), id="delta-disk-change", marks=pytest.mark.slow),
        pytest.param(DELTA, MORE_POINTS, id="delta-disk-more", marks=pytest.mark.slow),
        pytest.param(DELTA_ON_S3, change("DeltaTarget"), id="delta-s3-change"),
        pytest.param(DELTA_ON_S3, MORE_POINTS, id="delta-s3-more", marks=pytest.mark.slow),
    ],
)
def test_a_child_killed_at_any_step_changes_the_table_once_beside_a_writer(
    kind: str, tables: Tables, group: Daemons, faulty_env: dict[str, str], points: list[str]
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


@pytest.mark.parametrize("kind", ON_S3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_table_is_changed_once_whatever_happens_to_the_answers_of_its_store(
    kind: str,
    fault: Callable[[S3Lake], None],
    lake: S3Lake,
    tables: Tables,
    group: Daemons,
    faulty_env: dict[str, str],
) -> None:
    """Of two executions, another writer commits during the second one."""
    certificates = [tables.create("t0"), tables.create("t1", f"{tables.target}.swap.before hold")]
    group.start("ann", ttl=10, env={**faulty_env, **lake.env(SHORT if fault is throttle else 20.0)})
    fault(lake)
    for n, certificate in enumerate(certificates):
        operation = tables.start(f"t{n}", certificate)
        if n:
            tables.faults.await_triggered(group, "t1", seconds=60)
            tables.append("t1", 3)
            tables.faults.release("t1")
        result = operation.wait(90)
        assert result.state == "success", (result.errors, group.tails())
        tables.assert_content(f"t{n}", operation.ref, *((1, 2, 3) if n else (1, 2)))


@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        pytest.param(CATALOG, "before", id="catalog-before"),
        pytest.param(CATALOG, "after", id="catalog-after", marks=pytest.mark.slow),
        pytest.param(ICEBERG_ON_S3, "before", id="iceberg-s3-before"),
        pytest.param(ICEBERG_ON_S3, "after", id="iceberg-s3-after", marks=pytest.mark.slow),
        pytest.param(DELTA_ON_S3, "before", id="delta-s3-before", marks=pytest.mark.slow),
        pytest.param(DELTA_ON_S3, "after", id="delta-s3-after", marks=pytest.mark.slow),
    ],
)
def test_an_executor_that_wakes_up_changes_no_table_that_another_took_over(
    kind: str, moment: str, tables: Tables, group: Daemons, faulty_env: dict[str, str]
) -> None:
    certificate = tables.create("frozen", f"{tables.target}.swap.{moment} hold")
    (ann,) = group.start("ann", env=faulty_env)
    operation = tables.start("frozen", certificate)
    group.eventually(lambda: tables.faults.triggered("frozen"), "ann holds before or after its commit")
    ann.suspend()
    group.start("bob", env=faulty_env)
    result = operation.wait(60)
    assert result.state == "success", group.tails()
    tables.assert_content("frozen", operation.ref, 1, 2)
    tables.append("frozen", 3)
    content = tables.content("frozen")
    tables.faults.release("frozen")
    ann.wake()
    group.await_ready("ann")
    assert tables.content("frozen") == content
    tables.assert_content("frozen", operation.ref, 1, 2, 3)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(CATALOG, id="catalog"),
        pytest.param(ICEBERG_ON_S3, id="iceberg-s3", marks=pytest.mark.slow),
        pytest.param(DELTA_ON_S3, id="delta-s3", marks=pytest.mark.slow),
    ],
)
def test_a_cancel_reverts_the_change_of_the_table(
    kind: str, tables: Tables, group: Daemons, faulty_env: dict[str, str]
) -> None:
    certificates = {
        "early": tables.create("early", f"{tables.target}.swap.before hold"),
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


@pytest.mark.parametrize("lake", ["versitygw"], indirect=True)
@pytest.mark.parametrize("kind", ON_S3)
@pytest.mark.parametrize("applied", [False, True], ids=["before", "after"])
def test_a_table_is_changed_once_if_the_gateway_is_killed_around_the_commit(
    kind: str, applied: bool, lake: S3Lake, tables: Tables, group: Daemons, faulty_env: dict[str, str]
) -> None:
    certificate = tables.create("t0")
    group.start("ann", ttl=10, env={**faulty_env, **lake.env()})
    gateway = KilledGateway(lake, tables.commit_part, applied=applied)
    operation = tables.start("t0", certificate)
    group.eventually(lambda: gateway.requests_without_server() > 1, "requests fail after the commit")
    assert gateway.process.start()
    result = operation.wait(90)
    assert result.state == "success", (result.errors, group.tails())
    assert {one.attempt for one in operation.results()} == {1}
    tables.assert_content("t0", operation.ref, 1, 2)


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [pytest.param(ICEBERG, id="disk"), pytest.param(ICEBERG_ON_S3, id="s3")])
def test_a_rewrite_whose_jvm_and_child_are_killed_loses_no_rows_and_leaves_no_files(
    kind: str, tables: FolderTables, group: Daemons, faulty_env: dict[str, str]
) -> None:
    need(jar(), MAVEN)
    jars = [jar()]
    if kind == ICEBERG_ON_S3:
        need(s3_spark.jars(), s3_spark.MAVEN)
        jars += s3_spark.jars() or []
    checks = [{"fits": {"column": "id", "type": "int"}}]
    faults = ("Narrowing.stage.after kill-jvm", "HadoopTarget.rewrite.after kill")
    certificate = tables.create("orders", *faults, checks=checks)
    # The servers of tests answer no request without its body, for which the client would wait three seconds.
    hadoop = ("--spark-conf", "spark.hadoop.fs.s3a.bucket.lake.connection.expect.continue=false")
    options = (*SPARK, "--spark-conf", f"spark.jars={','.join(map(str, jars))}", *hadoop)
    group.start("ann", ttl=10, env=faulty_env, options=options)
    operation = tables.start("orders", certificate)
    tables.faults.await_triggered(group, "orders", seconds=120)
    tables.append("orders", 3, 4)
    result = operation.wait(150)
    assert result.state == "success", (result.errors, group.tails())
    table = tables.table("orders")
    assert [str(field.field_type) for field in table.schema().fields] == ["int", "string"]
    assert json.loads(table.properties[MARK])["operation"] == operation.ref
    assert len(table.metadata.snapshots) == 3, "rewritten exactly once"
    assert result.report["rewritten"]["rows"] == 4
    assert sorted(table.scan().to_arrow()["id"].to_pylist()) == [1, 2, 3, 4]
    live = {normal_form(task.file.file_path) for task in table.scan().plan_files()}

    def nothing_staged() -> bool:
        return not any(key.startswith("_distop/") for key in stored_files.keys(tables.location("orders")))

    group.eventually(nothing_staged, "the stages are removed")
    found = stored_files.keys(tables.location("orders"))
    written = {f"{tables.location('orders')}/{key}" for key in found if re.match(r"data/distop-staged/.*parquet$", key)}
    assert written
    assert written <= live
    if kind == ICEBERG:
        root = Path(tables.location("orders"))
        folders = [str(path) for path in root.glob("data/distop-staged/*/*/*/*/*/*")]
        assert [folder for folder in folders if not any(folder in path for path in live)] == []
        assert not list(root.glob("_distop/*/stage/*/*/*"))
