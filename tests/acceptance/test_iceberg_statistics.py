"""Statistics of Iceberg's manifests and footers agree with a scan, with deletes and after schema changes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as F

from distop.errors import InvalidArgument
from distop.storage.files import local_path
from distop.storage.location import Location
from distop.tables import plan_table, reader_of
from distop.tables.iceberg import iceberg_rows, manifest_facts
from distop.tables.iceberg.metadata_file import current_metadata_file, read_metadata
from distop_behaviors.reading.check_session import session_of
from distop_behaviors.validate import Validate, scan
from tests.acceptance.sparklake import Lake
from tests.support.context import run_operation
from tests.support.evolving_tables import evolve
from tests.support.lake import MAVEN, jar
from tests.support.needs import need

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from distop.behavior import TableRecord
    from tests.support.context import FakeContext, Ran
    from tests.support.evolving_tables import Evolved

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240), pytest.mark.rotating]

SEEDS = [100, 101, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(102, 106))]
"""Each run: position deletes and deletion vectors, with and without partitions."""
NOT_NULL = {"not_null": "c"}


@pytest.fixture(scope="module")
def lake(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    need(jar(), MAVEN)
    return Lake(spark, tmp_path_factory.mktemp("lake"))


@pytest.fixture
def run(lake: Lake, context: Callable[[TableRecord], FakeContext]) -> Callable[..., Ran]:
    def run(name: str, *checks: dict[str, Any], partitions: Any = None, **arg: Any) -> Ran:
        argument = {"checks": list(checks), **arg}
        return run_operation(Validate(), lake.record(name), argument, context, partitions=partitions)

    return run


def current_list(lake: Lake, name: str) -> Path:
    """The manifest list of a table's current snapshot."""
    snapshot = read_metadata(current_metadata_file(Location.of(str(lake.path(name)))))[0].current_snapshot()
    return Path(str(local_path(snapshot.manifest_list)))


def found(ran: Ran) -> list[tuple[str, int, bool]]:
    return [(c["verdict"], c["violations"], c["exact"]) for c in ran.report["checks"]]


def evidence(ran: Ran) -> list[tuple[int, int]]:
    return [(c["evidence"]["files_statistics"], c["evidence"]["files_scanned"]) for c in ran.report["checks"]]


@pytest.mark.parametrize("seed", SEEDS, ids=lambda s: f"seed={s}")
def test_statistics_and_a_scan_agree_with_every_row(seed: int, lake: Lake, run: Callable[..., Ran]) -> None:
    name = f"evolved{seed}"
    made = evolve(seed, lake.path(name), **{"write.delete.mode": "merge-on-read"})
    _delete(made, lake, name, seed)
    checks = [{**case.check, "name": f"c{n}"} for n, case in enumerate(made.cases)]
    expected = [sum(map(case.violates, made.rows)) for case in made.cases]
    for mode in ("auto", "never"):
        ran = run(name, *checks, statistics=mode, sample=0)
        for case, total, got in zip(made.cases, expected, found(ran), strict=True):
            assert got == ("violated" if total else "valid", total, True), (seed, mode, case.check)
        assert ran.report["rows"] == len(made.rows)
    alone = run(name, *checks, statistics="only")
    for case, total, (verdict, count, exact) in zip(made.cases, expected, found(alone), strict=True):
        assert verdict != "valid" or total == 0, (seed, case.check)
        assert verdict != "violated" or (0 < count <= total and (count == total or not exact)), (seed, case.check)
    assert alone.report["rows"] in (None, len(made.rows))
    _assert_deletes_are_known(lake, name)


def _delete(made: Evolved, lake: Lake, name: str, seed: int) -> None:
    """Delete rows: v2 position deletes (even seeds), deletion vectors (odd seeds), equality deletes (no partitions)."""
    if seed % 2:
        lake.sql(f"alter table {{{name}}} set tblproperties ('format-version'='3')")
    gone = [row["id"] for row in made.rows if row["id"] % 3 == seed % 3 or row["n"] is None]
    if gone:
        lake.delete(name, f"id in ({', '.join(map(str, gone))})")
    if lake.load(name).spec().isUnpartitioned():
        lake.delete_equal(name, "k", "x")
        gone += [row["id"] for row in made.rows if row["k"] == "x"]
    made.rows = [row for row in made.rows if row["id"] not in gone]


def _assert_deletes_are_known(lake: Lake, name: str) -> None:
    """Assert that each file with deletes in Iceberg's own reader counts as one with deleted rows."""
    source = plan_table(lake.record(name)).partitions[0].source
    known = manifest_facts.snapshot_of(source, frozenset({"id"})).files
    tasks = iceberg_rows._snapshot(lake.spark, source).tasks.of_files(known)
    applied = {str(task.file().location()): not task.deletes().isEmpty() for task in tasks}
    assert applied.keys() == known.keys()
    assert not [path for path, some in applied.items() if some and known[path].deleted == 0]


def test_violations_found_by_statistics_have_samples_without_a_scan(lake: Lake, run: Callable[..., Ran]) -> None:
    lake.create("shown", "id bigint, c string, x double", "partitioned by (bucket(3, id))", 2)
    lake.sql("insert into {shown} select id, if(id % 5 = 0, null, 'v'), if(id = 7, double('nan'), id) from range(100)")
    checks = [NOT_NULL, {"range": {"column": "x", "max": 1e9}}, {"range": {"column": "id", "min": 0, "max": 99}}]
    ran = run("shown", *checks, sample=100)
    # Iceberg's writer counts the NaN, which is above every bound.
    assert found(ran) == [("violated", 20, True), ("violated", 1, True), ("valid", 0, True)]
    assert evidence(ran) == [(3, 0)] * 3
    assert ran.report["rows"] == 100
    assert [len(c["samples"]) for c in ran.report["checks"]] == [20, 1, 0]
    assert found(run("shown", *checks, statistics="never")) == found(ran)
    assert found(run("shown", *checks, statistics="only")) == found(ran)
    # One check needs a scan; the others are still decided by statistics.
    ran = run("shown", *checks, {"check": "length(c) < 9"})
    assert evidence(ran) == [(3, 0)] * 3 + [(0, 3)]


def test_a_null_in_a_column_that_the_table_requires_is_found(lake: Lake, run: Callable[..., Ran]) -> None:
    lake.create("forced", "id bigint not null, c string, s struct<a: int, l: array<int>>", "", 2)
    lake.sql("insert into {forced} values (1, null, null), (2, 'x', named_struct('a', 1, 'l', array(null)))")
    update: Any = lake.load("forced").updateSchema().allowIncompatibleChanges()
    update.requireColumn("c").requireColumn("s").requireColumn("s.a").setIdentifierFields(["id"]).commit()
    checks = [NOT_NULL, {"not_null": "s.a"}, {"not_null": "id"}, {"check": "s.l[0] IS NOT NULL"}]
    expected = [("violated", 1, True), ("violated", 1, True), ("valid", 0, True), ("violated", 2, True)]
    assert found(run("forced", *checks, statistics="never")) == expected
    assert found(run("forced", *checks)) == expected
    assert found(run("forced", NOT_NULL, statistics="only")) == expected[:1]


@pytest.mark.parametrize("version", [2, 3])
def test_rows_are_counted_with_deletion_vectors_but_not_with_position_deletes(
    version: int, lake: Lake, run: Callable[..., Ran]
) -> None:
    name = f"counted{version}"
    lake.create(name, "id bigint, k int, c string", "partitioned by (k)", version)
    lake.fill(name)
    lake.delete(name, "id in (1, 2, 3, 4)")
    checks = [{"not_null": "id"}, NOT_NULL]
    for partitions, rows in ((None, 96), (plan_table(lake.record(name)).partitions[:1], 33)):
        ran = run(name, *checks, statistics="only", partitions=partitions)
        assert ran.report["rows"] == (rows if version == 3 else None)
        assert found(ran) == [("valid", 0, True), ("unknown", 0, False)]
    ran = run(name, {"not_null": "id"})
    assert (found(ran), evidence(ran), ran.report["rows"]) == ([("valid", 0, True)], [(3, 0)], 96)


def test_a_column_default_for_older_files_is_no_null(lake: Lake, run: Callable[..., Ran]) -> None:
    lake.create("defaulted", "id bigint", "", 3)
    lake.sql("insert into {defaulted} values (1), (2)")
    jvm: Any = lake.spark._jvm
    number = jvm.org.apache.iceberg.types.Types.IntegerType.get()
    update: Any = lake.load("defaulted").updateSchema()
    update.addColumn("given", number, jvm.org.apache.iceberg.expressions.Literal.of(7)).addColumn(
        "late", number
    ).commit()
    checks = [{"not_null": "given"}, {"not_null": "late"}, {"range": {"column": "given", "min": 8}}]
    ran = run("defaulted", *checks)
    assert found(ran) == [("valid", 0, True), ("violated", 2, True), ("violated", 2, True)]
    assert evidence(ran) == [(0, 2), (2, 0), (0, 2)]


def test_imported_files_without_field_ids_are_scanned(lake: Lake, run: Callable[..., Ran]) -> None:
    lake.create("imported", "id bigint, c string, k int", "partitioned by (k)", 2)
    path = lake.path("imported") / "data" / "k=4" / "part.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"c": ["a", None, "b"], "id": [1, 2, 3]}), path)
    table, core = lake.load("imported"), lake.spark._jvm.org.apache.iceberg  # type: ignore[union-attr]
    mapping = core.mapping.NameMappingParser.toJson(core.mapping.MappingUtil.create(table.schema()))
    table.updateProperties().set("schema.name-mapping.default", mapping).commit()
    file = core.DataFiles.builder(table.spec()).withPath(str(path)).withFileSizeInBytes(path.stat().st_size)
    file = file.withPartitionPath("k=4").withRecordCount(3).withFormat("parquet").build()
    table.newAppend().appendFile(file).commit()
    ran = run("imported", NOT_NULL, {"not_null": "k"}, {"in_set": {"column": "k", "values": [5]}})
    assert found(ran) == [("violated", 1, True), ("valid", 0, True), ("violated", 3, True)]
    assert evidence(ran) == [(0, 1), (1, 0), (1, 0)]


@pytest.mark.parametrize("version", [2, 3])
def test_hole_1_a_delete_file_replaced_by_a_link_is_refused(
    version: int, lake: Lake, run: Callable[..., Ran], tmp_path: Path
) -> None:
    """Spark caches only file names of a snapshot, and its reader would quote bytes of the link's target."""
    name = f"replaced{version}"
    lake.create(name, "id bigint, c string", "", version)
    lake.sql(f"insert into {{{name}}} select id, 'v' from range(100)")
    lake.delete(name, "id % 3 = 0")
    check = {"check": "id is not null"}
    assert found(run(name, check, statistics="never")) == [("valid", 0, True)]
    secret = tmp_path / "secret"
    secret.write_text("SECRET" * 100)
    replaced = [*lake.path(name).rglob("*.puffin"), *lake.path(name).rglob("*-deletes.parquet")]
    assert replaced
    for path in replaced:
        path.unlink()
        path.symlink_to(secret)
    with pytest.raises(InvalidArgument, match="lies outside of its table"):
        run(name, check, statistics="never")


def test_hole_1_cached_tasks_of_a_reloaded_snapshot_are_not_run(lake: Lake, tmp_path: Path) -> None:
    """The JVM once ran cached tasks of earlier reads for a snapshot that was loaded and checked after them."""
    lake.create("reloaded", "id bigint, c string", "", 3)
    lake.sql("insert into {reloaded} select id, 'v' from range(100)")
    before = current_list(lake, "reloaded")
    lake.delete("reloaded", "id % 3 = 0")
    session, is_null = session_of(lake.spark), F.col("id").isNull()

    def rows(source: str) -> int:
        """The row count from a frame and from a cached query, which must agree."""
        reader = reader_of(lake.record("reloaded"), [replace(planned, source=source)])
        group = scan.FileGroup(tuple(planned.files), {"id": "bigint"}, reader, all_rows=True)
        found = scan.count(session, group, {0: is_null}, None, lasting=True)
        counted = sum(file.rows or 0 for file in found.counts.values())
        assert counted == iceberg_rows.read(session, source, planned.files).count()
        return counted

    source, listed = current_metadata_file(Location.of(str(lake.path("reloaded")))), current_list(lake, "reloaded")
    (planned,) = plan_table(lake.record("reloaded")).partitions
    assert rows(source) == 66
    for number in range(4):  # the number of cached snapshots
        copy = Path(source).with_name(f"copy{number}.metadata.json")
        shutil.copy(source, copy)
        assert rows(str(copy)) == 66
    # The metadata now names manifests without the vectors, which are links to another file.
    shutil.copy(before, listed)
    (tmp_path / "secret").write_text("SECRET" * 100)
    for vector in lake.path("reloaded").rglob("*.puffin"):
        vector.unlink()
        vector.symlink_to(tmp_path / "secret")
    assert rows(source) == 100
