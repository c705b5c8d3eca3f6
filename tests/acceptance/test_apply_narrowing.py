"""apply with a narrower column type: the table is rewritten, and no row of any writer is lost or changed."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distop.behavior import OperationFailed, OutcomeRow, PartitionPlan, Summary, TableRecord
from distop.errors import InvalidArgument, UnsafePath
from distop.storage.deletion import Place
from distop.storage.location import Location
from distop.storage.places import TABLE_MARKER
from distop.tables import reachability_of
from distop.tables.commits import CommitUnknown
from distop.tables.iceberg import new_metadata
from distop.tables.iceberg.metadata_file import current_metadata_file, read_metadata
from distop_behaviors.apply import Apply
from distop_behaviors.apply.apply_loop import MARK, ROUNDS, Applying
from distop_behaviors.apply.hadoop_commit import HadoopTarget
from distop_behaviors.apply.rewrite_publication import Narrowing
from distop_behaviors.validate import Validate
from tests.acceptance.applying import At
from tests.acceptance.applying import Staging as Context
from tests.acceptance.sparklake import DELETING, Lake
from tests.support.context import Ran, run_operation, store_certificate, sweep_stages
from tests.support.footers import misplaced
from tests.support.lake import MAVEN, jar
from tests.support.needs import need

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from distop.storage.object_store import ObjectStore

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240), pytest.mark.rotating]

FITS = {"fits": {"column": "n", "type": "int"}}
COLUMNS = "id bigint, n bigint comment 'how many', k string"
BIG = 1 << 40
"""A value that does not fit an int."""


class NarrowingBench:
    """A table with a column to narrow. Creates certificates of the table, and applies them."""

    instances = 0

    def __init__(self, lake: Lake, spark: SparkSession, work: Path, name: str) -> None:
        self.lake = lake
        self.name = name
        self._spark = spark
        self.work = work
        self.record: TableRecord = lake.record(name)

    def context(self) -> Context:
        """The context of a new operation."""
        NarrowingBench.instances += 1
        ctx = Context(self.work, self.record, self._spark)
        ctx.operation = f"{self.name}/apply/{NarrowingBench.instances}"
        return ctx

    def certificate(self, *checks: dict[str, Any], **arg: Any) -> dict[str, Any]:
        argument = {"checks": list(checks or (FITS,)), **arg}
        report = run_operation(Validate(), self.record, argument, lambda _: self.context()).report
        assert report["certificate"] is not None, report
        return dict(report["certificate"])

    def apply(self, certificate: dict[str, Any], ctx: Context | None = None, settle: float = 0) -> Ran:
        mine = ctx or self.context()
        return run_operation(
            Apply(), self.record, {"certificate": certificate, "settle_seconds": settle}, lambda _: mine
        )

    @property
    def metadata(self) -> Any:
        return read_metadata(current_metadata_file(Location.of(str(self.lake.path(self.name)))))[0]

    @property
    def kind(self) -> str:
        return str(self.metadata.schema().find_field("n").field_type)

    def rows(self, order: str = "id") -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self.lake.rows(self.name).orderBy(order).collect()]

    def folders(self) -> set[str]:
        """The folders of attempts, below the table's data."""
        data = self.lake.path(self.name) / "data"
        return {str(path.relative_to(data)) for path in data.glob("distop-staged/*/*/*/*/*/*")}

    def live_folders(self) -> set[str]:
        """The folders of attempts with files of any version of the table."""
        paths = [Path(file.path).parts for file in reachability_of(self.record).all_files(removed=True)]
        begin = [(parts, parts.index("distop-staged")) for parts in paths if "distop-staged" in parts]
        return {"/".join(parts[at : at + 7]) for parts, at in begin}

    def sweep(self) -> None:
        """Remove stages as executors do after the end of operations."""
        ctx = Context(self.work, self.record, self._spark)
        ctx.operation = f"{self.name}/apply/{NarrowingBench.instances}"
        sweep_stages(Apply(), ctx)

    def assert_no_leftovers(self) -> None:
        """Assert that executors leave no files except those of the table's versions."""
        self.sweep()
        assert self.folders() == self.live_folders()
        assert not list(self.work.glob("stage/*/*/*"))


@pytest.fixture(scope="module")
def lake(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    need(jar(), MAVEN)
    return Lake(spark, tmp_path_factory.mktemp("lake"))


@pytest.fixture
def bench(lake: Lake, spark: SparkSession, tmp_path: Path, request: pytest.FixtureRequest) -> NarrowingBench:
    """A table with three partitions, two of them with deletes."""
    name = f"t{abs(hash(request.node.nodeid)) % 10**9}"
    lake.create(name, COLUMNS, "partitioned by (k)", 2)
    lake.sql(f"insert into {{{name}}} values (1, 10, 'a'), (2, 20, 'a'), (3, null, 'b'), (4, 40, 'b'), (5, 50, null)")
    lake.delete(name, "id in (2, 3)")
    return NarrowingBench(lake, spark, tmp_path, name)


ROWS = [(1, 10, "a"), (4, 40, "b"), (5, 50, None)]


def late_files(bench: NarrowingBench, *values: tuple[int, int | None, str]) -> Any:
    """Files with these rows, written by a writer that has planned but not committed yet."""
    bench.lake.create(f"{bench.name}_late", COLUMNS, "partitioned by (k)", 2)
    for row in values:
        literals = ", ".join("null" if v is None else repr(v) for v in row)
        bench.lake.sql(f"insert into {{{bench.name}_late}} values ({literals})")
    return bench.lake.files(f"{bench.name}_late")


def test_a_column_is_narrowed_and_the_rows_are_the_same(bench: NarrowingBench) -> None:
    lake, name = bench.lake, bench.name
    before = bench.metadata
    certificate = bench.certificate(FITS, {"not_null": "id"}, {"range": {"column": "n", "max": 100}, "name": "few"})
    lake.sql(f"insert into {{{name}}} values (6, 60, 'c')")
    ran = bench.apply(certificate)
    report = ran.report
    assert report["verdict"] == "applied", ran.message
    assert [o.name for o in ran.outcomes] == ["k=__HIVE_DEFAULT_PARTITION__", "k=a", "k=b", "k=c"]
    assert {c["check"]: (c["type"], c["before"]) for c in report["changes"]} == {
        "n_fits_int": ("int", "other"), "id_not_null": (None, "other"), "few": (None, "other"),
    }  # fmt: skip
    assert (report["rewritten"]["rows"], report["rewritten"]["late"]) == (4, 0)
    assert bench.rows() == [*ROWS, (6, 60, "c")]
    after = bench.metadata
    field, old_field = after.schema().find_field("n"), before.schema().find_field("n")
    assert [f.name for f in after.schema().fields] == ["id", "n", "k"]
    assert (str(field.field_type), field.doc, field.required) == ("int", "how many", False)
    assert field.field_id > old_field.field_id
    assert after.schema().find_field("id").required
    assert after.spec() == before.spec()
    assert lake.delete_files(name) == 0
    kept = json.loads(after.properties["distop.constraint.few"])
    assert kept["field_ids"]["n"] == field.field_id
    # Previous snapshots are unchanged.
    old = lake.spark.sql(f"select * from lake.db.{name} version as of {before.current_snapshot_id}")
    assert sorted(tuple(row) for row in old.collect()) == ROWS
    assert dict(old.dtypes)["n"] == "bigint"
    bench.assert_no_leftovers()
    # The rewrite is one commit, with Iceberg's own manifests and statistics.
    snapshot = after.current_snapshot()
    assert (
        snapshot.parent_snapshot_id == before.current_snapshot_id or len(after.snapshots) == len(before.snapshots) + 2
    )
    assert str(snapshot.summary.operation.value) == "replace"
    valid = bench.certificate({"range": {"column": "n", "min": 10, "max": 60}})
    assert sum(c["files_scanned"] for c in valid["checks"]) == 0
    lake.sql(f"insert into {{{name}}} values (7, 70, 'c')")
    assert bench.rows()[-1] == (7, 70, "c")


def test_a_column_is_narrowed_with_a_shared_directory_in_an_object_store(
    bench: NarrowingBench, s3_store: ObjectStore
) -> None:
    certificate, ctx = bench.certificate(), bench.context()
    ctx.shared = Place(s3_store.location, "shared/c0ffee")
    ran = bench.apply(certificate, ctx)
    assert ran.report["verdict"] == "applied", ran.message
    assert (bench.kind, bench.rows()) == ("int", ROWS)
    assert bench.folders() == bench.live_folders()
    assert [one.key for one in s3_store.list()] == []


def test_hole_2_properties_of_a_table_choose_no_file_system_of_its_writer(bench: NarrowingBench) -> None:
    """Iceberg's Parquet writer copies the properties into the Hadoop configuration that opens files."""
    certificate = bench.certificate(FITS)
    hostile = {
        "fs.file.impl": "org.example.FileSystem",
        "fs.file.impl.disable.cache": "true",
        "write.location-provider.impl": "org.example.Provider",
    }
    properties = ", ".join(f"'{name}' = '{value}'" for name, value in hostile.items())
    bench.lake.sql(f"alter table {{{bench.name}}} set tblproperties ({properties})")
    ran = bench.apply(certificate)
    assert ran.report["verdict"] == "applied", ran.message
    assert bench.rows() == ROWS
    assert bench.metadata.properties.items() >= hostile.items(), "the table keeps its properties"


@pytest.mark.slow
def test_a_thread_without_a_session_can_rewrite(bench: NarrowingBench) -> None:
    """Jobs run in threads of the child, and share one session."""
    certificate = bench.certificate()
    ran: list[Ran] = []
    thread = threading.Thread(target=lambda: ran.append(bench.apply(certificate)))
    thread.start()
    thread.join()
    assert [one.report["verdict"] for one in ran] == ["applied"]
    assert bench.rows() == ROWS


@pytest.mark.parametrize(
    ("kind", "literals", "target", "iceberg"),
    [
        ("double", ["1.5", "-0.0D", "double('NaN')", "null"], "float", "float"),
        ("decimal(12,2)", ["1.25", "-99999.99", "null"], "decimal(7,2)", "decimal(7, 2)"),
        ("string", ["'12'", "'-7'", "null"], "int", "int"),
        pytest.param("string", ["'123456789012'"], "bigint", "long", marks=pytest.mark.slow),
        pytest.param("string", ["'2013-01-31'", "null"], "date", "date", marks=pytest.mark.slow),
        pytest.param("timestamp", ["timestamp'2013-01-31 00:00:00Z'"], "date", "date", marks=pytest.mark.slow),
        ("bigint", ["1", "null"], "decimal(3,0)", "decimal(3, 0)"),
    ],
)
def test_a_column_is_narrowed_without_changing_its_values(
    lake: Lake, spark: SparkSession, tmp_path: Path, kind: str, literals: list[str], target: str, iceberg: str
) -> None:
    name = f"types_{abs(hash((kind, target))) % 10**9}"
    lake.create(name, f"id int, n {kind}, k string", "", 2)
    rows = ", ".join(f"({n}, {text}, 'x')" for n, text in enumerate(literals))
    lake.sql(f"insert into {{{name}}} values {rows}")
    bench = NarrowingBench(lake, spark, tmp_path, name)
    before = lake.spark.sql(f"select id, cast(n as {target}) n, k from lake.db.{name} order by id").collect()
    ran = bench.apply(bench.certificate({"fits": {"column": "n", "type": target}}))
    assert (ran.report["verdict"], bench.kind) == ("applied", iceberg), ran.message
    assert [str(row) for row in lake.rows(name).orderBy("id").collect()] == [str(row) for row in before]
    bench.assert_no_leftovers()


@pytest.mark.parametrize(
    ("version", "deleted"),
    [
        (2, ""),
        (2, "id in (2, 3)"),
        pytest.param(2, "id = 3", marks=pytest.mark.slow),
        pytest.param(3, "", marks=pytest.mark.slow),
        (3, "id in (2, 3)"),
    ],
)
def test_rows_that_spark_skips_fail_the_rewrite(
    lake: Lake, spark: SparkSession, tmp_path: Path, version: int, deleted: str
) -> None:
    """Statistics certify the column, but a footer with wrong positions hides rows from the reader."""
    name = f"lost_{version}_{len(deleted)}"
    lake.create(name, COLUMNS, "partitioned by (k)", version)
    lake.sql(f"insert into {{{name}}} values (1, 10, 'a'), (2, 20, 'a'), (3, null, 'b'), (4, 40, 'b'), (5, 50, 'c')")
    if deleted:
        lake.delete(name, deleted)
        assert lake.delete_files(name) > 0
    bench = NarrowingBench(lake, spark, tmp_path, name)
    bad = hide_rows(next(str(f.location()) for f in lake.files(name) if "k=a" in str(f.location())))
    certificate, before = bench.certificate(), bench.metadata
    ran = bench.apply(certificate)
    assert ran.report["verdict"] == "error", ran.message
    assert str(bad) in ran.message
    assert str(bad.parent.parent / "k=b") not in ran.message
    assert [o.name for o in ran.outcomes if not o.success] == ["k=a"]
    assert (bench.metadata.schema(), bench.metadata.current_snapshot_id) == (
        before.schema(),
        before.current_snapshot_id,
    )
    bench.assert_no_leftovers()


def test_a_rewrite_counts_rows_despite_equality_deletes_and_names_files_with_hidden_rows(
    lake: Lake, spark: SparkSession, tmp_path: Path
) -> None:
    for name in ("counted", "hidden"):
        lake.create(name, COLUMNS, "", 2)
        for n in range(1, 4):
            lake.sql(f"insert into {{{name}}} values ({n}, {10 * n}, 'a'), ({10 * n}, {n}, 'b')")
        lake.delete_equal(name, "k", "b")
        bench = NarrowingBench(lake, spark, tmp_path / name, name)
        bad = [hide_rows(str(file.location())) for file in lake.files(name)[1:]] if name == "hidden" else []
        ran = bench.apply(bench.certificate())
        if bad:
            assert ran.report["verdict"] == "error", ran.message
            assert all(str(path) in ran.message for path in bad), ran.message
            assert f"{len(bad) - 1} other files have the same problem: " in ran.message
            assert bench.kind == "long"
        else:
            assert (ran.report["verdict"], ran.report["rewritten"]["rows"]) == ("applied", 3), ran.message
            assert bench.rows() == [(1, 10, "a"), (2, 20, "a"), (3, 30, "a")]
        bench.assert_no_leftovers()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "after"])
def test_hidden_rows_of_a_concurrently_added_file_stay_in_the_table(
    bench: NarrowingBench, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """A writer with an old plan adds the file before or after the commit."""
    certificate, (file,) = bench.certificate(), late_files(bench, (6, 60, "a"))
    bad, before = hide_rows(str(file.location())), bench.metadata
    at = At(HadoopTarget, "rewrite", 1, moment, lambda: bench.lake.append(bench.name, file))
    monkeypatch.setattr(HadoopTarget, "rewrite", at.wrapped)
    ran = bench.apply(certificate)
    assert (ran.report["verdict"], ran.report["reverted"]) == ("error", moment == "after"), ran.message
    assert str(bad) in ran.message
    assert bench.metadata.schema() == before.schema()
    assert bad in [Path(str(f.location()).removeprefix("file:")) for f in bench.lake.files(bench.name)]
    bench.assert_no_leftovers()


def hide_rows(location: str) -> Path:
    """Damage the footer of a data file so that Iceberg's reader silently skips its rows."""
    path = Path(location.removeprefix("file:"))
    misplaced(path, padded=True)
    path.with_name(f".{path.name}.crc").unlink()  # Hadoop's checksum of the original file
    return path


def test_concurrently_added_files_are_validated_and_rewritten(
    bench: NarrowingBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake, name = bench.lake, bench.name
    certificate = bench.certificate()
    before = len(bench.metadata.snapshots)

    def add_files() -> None:
        lake.sql(f"insert into {{{name}}} values (6, 60, 'a'), (7, 70, 'z')")
        lake.delete(name, "id = 4")

    # Once after the jobs, and once directly before the commit.
    patched = At(Narrowing, "publish", 1, "before", add_files)
    monkeypatch.setattr(Narrowing, "publish", patched.wrapped)
    at = At(HadoopTarget, "rewrite", 1, "before", lambda: lake.sql(f"insert into {{{name}}} values (8, 80, 'a')"))
    monkeypatch.setattr(HadoopTarget, "rewrite", at.wrapped)
    ran = bench.apply(certificate)
    assert (ran.report["verdict"], ran.report["rounds"], bench.kind) == ("applied", 2, "int"), ran.message
    assert bench.rows() == [(1, 10, "a"), (5, 50, None), (6, 60, "a"), (7, 70, "z"), (8, 80, "a")]
    assert len(bench.metadata.snapshots) == before + 4
    bench.assert_no_leftovers()


@pytest.mark.parametrize("moment", ["planned", pytest.param("staged", marks=pytest.mark.slow), "swapping"])
def test_a_row_that_does_not_fit_fails_the_rewrite(
    bench: NarrowingBench, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    certificate = bench.certificate()

    def big() -> None:
        bench.lake.sql(f"insert into {{{bench.name}}} values (9, {BIG}, 'a')")

    if moment == "planned":
        big()
    else:
        where = (Narrowing, "publish") if moment == "staged" else (HadoopTarget, "rewrite")
        monkeypatch.setattr(*where, At(*where, 1, "before", big).wrapped)
    ran = bench.apply(certificate)
    assert ran.report["verdict"] == "violated"
    assert "n_fits_int: 1 violation" in ran.message
    assert [s["values"] for s in ran.report["checks"][0]["samples"]] == [{"n": BIG}]
    assert (bench.kind, MARK in bench.metadata.properties) == ("long", False)
    assert bench.rows() == [*ROWS, (9, BIG, "a")]
    bench.assert_no_leftovers()


@pytest.mark.slow
def test_a_late_file_is_rewritten(bench: NarrowingBench, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, files = bench.certificate(), late_files(bench, (6, 60, "a"), (7, None, "q"))

    def late() -> None:
        bench.lake.append(bench.name, files[0])
        bench.lake.sql(f"insert into {{{bench.name}}} values (8, 80, 'a')")
        bench.lake.append(bench.name, files[1])

    monkeypatch.setattr(HadoopTarget, "rewrite", At(HadoopTarget, "rewrite", 1, "after", late).wrapped)
    ran = bench.apply(certificate)
    assert (ran.report["verdict"], ran.report["rewritten"]["late"]) == ("applied", 2), ran.message
    assert bench.rows() == [*ROWS, (6, 60, "a"), (7, None, "q"), (8, 80, "a")]
    bench.assert_no_leftovers()


@pytest.mark.slow
def test_a_late_row_that_does_not_fit_is_reported_if_a_revert_is_impossible(
    bench: NarrowingBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, (file,) = bench.certificate(), late_files(bench, (9, BIG, "a"))

    def late() -> None:
        bench.lake.sql(f"insert into {{{bench.name}}} values (8, 80, 'a')")
        bench.lake.append(bench.name, file)

    monkeypatch.setattr(HadoopTarget, "rewrite", At(HadoopTarget, "rewrite", 1, "after", late).wrapped)
    ran = bench.apply(certificate)
    assert (ran.report["verdict"], ran.report["reverted"], bench.kind) == ("violated", False, "int")
    assert ran.message.startswith("the change was committed, but the rows of ")
    assert Path(str(file.location())).name in ran.message
    assert bench.rows() == [*ROWS, (8, 80, "a"), (9, None, "a")]


@pytest.mark.slow
def test_a_concurrent_schema_change_fails_the_rewrite_and_leaves_nothing(
    bench: NarrowingBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = bench.certificate()
    for statement, sentence in (
        ("add column more int", "another writer has changed the table's schema since planning"),
        ("rename column n to m", "the column 'n' was renamed to 'm' since"),
    ):

        def change_schema(statement: str = statement) -> None:
            bench.lake.sql(f"alter table {{{bench.name}}} {statement}")

        with monkeypatch.context() as patch:
            patch.setattr(Narrowing, "publish", At(Narrowing, "publish", 1, "before", change_schema).wrapped)
            assert sentence in bench.apply(certificate).message
        bench.assert_no_leftovers()
    assert bench.folders() == set()


def test_a_late_row_that_does_not_fit_reverts_the_change(
    bench: NarrowingBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.lake.sql(f"alter table {{{bench.name}}} set tblproperties ('distop.constraint.few' = 'mine')")
    before = bench.metadata
    certificate = bench.certificate(FITS, {"range": {"column": "id", "min": 0}, "name": "few"})
    files = late_files(bench, (6, 60, "a"), (9, BIG, "a"))

    def late() -> None:
        for file in files:
            bench.lake.append(bench.name, file)

    monkeypatch.setattr(HadoopTarget, "rewrite", At(HadoopTarget, "rewrite", 1, "after", late).wrapped)
    ran = bench.apply(certificate)
    assert (ran.report["verdict"], ran.report["reverted"]) == ("violated", True), ran.message
    assert ran.message.startswith("the change was reverted")
    assert bench.rows() == [*ROWS, (6, 60, "a"), (9, BIG, "a")]
    assert bench.metadata.schema() == before.schema()
    assert dict(bench.metadata.properties) == dict(before.properties)


@pytest.mark.parametrize("narrowed", [False, True])
def test_a_forged_mark_does_not_replace_a_rewrite(
    bench: NarrowingBench, monkeypatch: pytest.MonkeyPatch, narrowed: bool
) -> None:
    """``narrowed``: the forger also replaces the column, and adds a row that was not validated."""
    certificate, ctx, before = bench.certificate(FITS, {"not_null": "id"}), bench.context(), bench.metadata
    lake, name, old = bench.lake, bench.name, before.schema().find_field("n").field_id

    def plant() -> None:
        if narrowed:
            lake.sql(f"alter table {{{name}}} drop column n")
            lake.sql(f"alter table {{{name}}} add column n int")
            lake.sql(f"insert into {{{name}}} (id, n, k) values (null, 6, 'c')")
            lake.load(name).updateSchema().allowIncompatibleChanges().requireColumn("id").commit()
        metadata = bench.metadata
        mark = {
            "operation": ctx.operation,
            "certificate": certificate["digest"],
            "before": str(before.current_snapshot_id),
            "snapshot": str(metadata.current_snapshot_id),
            "schema": before.current_schema_id,
            "narrowed": {str(old): metadata.schema().find_field("n").field_id},
            "required": [1],
            "properties": {},
            "rewritten": {"files": 0, "rows": 0, "bytes": 0},
        }
        lake.load(name).updateProperties().set(MARK, json.dumps(mark)).commit()

    monkeypatch.setattr(Narrowing, "publish", At(Narrowing, "publish", 1, "before", plant).wrapped)
    ran = bench.apply(certificate, ctx)
    if narrowed:
        assert (ran.report["verdict"], ran.report["reverted"]) == ("violated", False), ran.message
        assert [c["violations"] for c in ran.report["checks"] if c["name"] == "id_not_null"] == [1]
    else:
        assert (ran.report["verdict"], ran.report["rewritten"]["rows"]) == ("applied", 3), ran.message
        assert bench.kind == "int"


def test_a_rewrite_deletes_no_file_that_the_metadata_names(bench: NarrowingBench, tmp_path: Path) -> None:
    victims = [tmp_path / f"victim{n}" for n in range(3)]
    for victim in victims:
        victim.write_text("of another user")
    bench.lake.name_victims(bench.name, *victims)
    assert bench.apply(bench.certificate()).report["verdict"] == "applied"
    assert [victim.exists() for victim in victims] == [True] * 3
    assert bench.metadata.properties.items() >= DELETING.items()


@pytest.mark.parametrize(
    ("where", "owner", "method"),
    [
        ("data", Apply, "partitions"),
        ("data", Narrowing, "stage"),
        ("metadata", Apply, "partitions"),
        ("metadata", HadoopTarget, "rewrite"),
    ],
)
def test_hole_3_nothing_is_rewritten_into_folders_of_other_users(
    bench: NarrowingBench, monkeypatch: pytest.MonkeyPatch, where: str, owner: Any, method: str
) -> None:
    """Iceberg overwrites existing files, and the names of later manifests and files are predictable."""
    folder = bench.lake.path(bench.name) / where
    certificate, before = bench.certificate(), set(folder.rglob("*"))
    monkeypatch.setattr(owner, method, At(owner, method, 1, "before", lambda: folder.chmod(0o777)).wrapped)
    try:
        message = bench.apply(certificate).message
    except UnsafePath as error:
        message = str(error)
    assert re.search(
        f"(the table is not changed, because .*|nothing is staged below) {folder}, which is writable", message
    )
    assert bench.kind == "long"
    written = {path for path in set(folder.rglob("*")) - before if path.is_file()}
    assert not written
    folder.chmod(0o755)
    assert bench.apply(certificate).report["verdict"] == "applied"


@pytest.mark.parametrize("when", ["after", pytest.param("before", marks=pytest.mark.slow)])
def test_a_crash_at_any_step_changes_the_table_once(
    lake: Lake, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A crash before a step has the same effects as one after the previous step."""

    def crash() -> None:
        raise ConnectionError("the process dies")

    steps = [(Narrowing, "stage"), (Narrowing, "publish"), (Narrowing, "_current_units"), (HadoopTarget, "rewrite")]
    steps += [(Applying, "load"), (Narrowing, "settle")]
    for number, method in enumerate(steps):
        name = f"crash_{when}_{number}"
        lake.create(name, COLUMNS, "", 2)
        lake.sql(f"insert into {{{name}}} values (1, 10, 'a'), (2, 20, 'a')")
        bench = NarrowingBench(lake, spark, tmp_path / name, name)
        certificate, ctx, before = bench.certificate(), bench.context(), len(bench.metadata.snapshots)
        operation = ResumedOperation(bench, certificate, ctx)
        with monkeypatch.context() as patch:
            at = At(*method, 1, when, crash)
            patch.setattr(*method, at.wrapped)
            with pytest.raises(ConnectionError):
                operation.run()
        assert at.happened
        ctx.fence += 1
        report = operation.run()
        assert (report["verdict"], bench.kind) == ("applied", "int"), f"{when} {method[1]}"
        assert len(bench.metadata.snapshots) == before + 1, f"changed once, with a crash {when} {method[1]}"
        assert bench.rows() == [(1, 10, "a"), (2, 20, "a")]
        bench.assert_no_leftovers()


class ResumedOperation:
    """An operation that can run again after a crash, and keeps the outcomes of jobs that have ended."""

    def __init__(self, bench: NarrowingBench, certificate: dict[str, Any], ctx: Context) -> None:
        self._ctx = ctx
        self._argument = Apply.Arg.model_validate({"certificate": store_certificate(certificate), "settle_seconds": 0})
        self._planned = Apply().partitions(bench.record, self._argument, ctx)
        self._rows: dict[int, OutcomeRow] = {}

    def run(self) -> Any:
        """Run the jobs without outcomes and the completion, and return the report."""
        for plan in self._planned.partitions:
            self._job(plan)
        rows = list(self._rows.values())
        summary = Summary(
            *("success", len(rows), len(rows), 0, lambda: iter(rows)),
            version=self._planned.version,
            whole=True,
            plan=lambda: iter(self._planned.partitions),
        )
        return Apply().complete_operation(self._argument, self._ctx.table, summary, self._ctx).model_dump()

    def _job(self, plan: PartitionPlan) -> None:
        if plan.partition not in self._rows:
            self._ctx.partition = plan
            made = Apply().start_or_resume_job(self._argument, plan, self._ctx)
            self._rows[plan.partition] = OutcomeRow(
                plan.partition, plan.name, True, made.model_dump(mode="json"), "", self._ctx.stage_place
            )


@pytest.mark.slow
def test_after_an_unknown_outcome_of_a_rewrite_the_table_is_loaded_again(
    bench: NarrowingBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost() -> None:
        raise CommitUnknown("no answer")

    certificate, before = bench.certificate(), len(bench.metadata.snapshots)
    monkeypatch.setattr(HadoopTarget, "rewrite", At(HadoopTarget, "rewrite", 1, "after", lost).wrapped)
    ran = bench.apply(certificate)
    assert (ran.report["verdict"], ran.report["rounds"]) == ("applied", 1)
    assert len(bench.metadata.snapshots) == before + 1
    assert bench.rows() == ROWS


@pytest.mark.slow
def test_a_rewrite_fails_and_leaves_nothing_if_other_writers_always_commit_first(
    bench: NarrowingBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, original = bench.certificate(), HadoopTarget.rewrite

    def rewrite(self: HadoopTarget, head: Any, wanted: Any) -> None:
        bench.lake.load(bench.name).updateProperties().set("n", str(len(bench.metadata.metadata_log))).commit()
        original(self, head, wanted)

    monkeypatch.setattr(HadoopTarget, "rewrite", rewrite)
    ran = bench.apply(certificate)
    assert (ran.report["verdict"], ran.report["rounds"], bench.kind) == ("unknown", ROUNDS, "long")
    assert f"other writers committed first in {ROUNDS} attempts, so nothing was changed" in ran.message
    assert bench.folders() == set()
    bench.assert_no_leftovers()
    metadata = bench.lake.path(bench.name) / "metadata"
    lists = {Path(s.manifest_list).name for s in bench.metadata.snapshots}
    assert {path.name for path in metadata.glob("snap-*.avro")} == lists


def test_cleaning_up_a_job_removes_its_files_unless_they_are_published(bench: NarrowingBench) -> None:
    argument = Apply.Arg.model_validate({"certificate": store_certificate(bench.certificate()), "settle_seconds": 0})
    ctx = bench.context()
    planned = Apply().partitions(bench.record, argument, ctx)
    ctx.partition = planned.partitions[1]
    Apply().start_or_resume_job(argument, ctx.partition, ctx)
    assert len(bench.folders()) == 1
    for _ in range(2):
        Apply().cancel_job_and_cleanup(argument, ctx.partition, ctx)
        assert bench.folders() == set()
    made = Apply().start_or_resume_job(argument, ctx.partition, ctx)
    rows = [OutcomeRow(1, ctx.partition.name, True, made.model_dump(mode="json"), "", ctx.stage_place)]
    cancelled = Summary("cancelled", 3, 1, 0, lambda: iter(rows), plan=lambda: iter(planned.partitions))
    assert Apply().complete_operation(argument, bench.record, cancelled, ctx) is None
    bench.sweep()
    assert (bench.folders(), bench.kind) == (set(), "long")
    bench.assert_no_leftovers()
    # A late cleanup, when the files belong to the table.
    bench.apply(bench.certificate())
    live = bench.folders()
    ctx.operation = f"{bench.name}/apply/{NarrowingBench.instances}"
    ctx.superseded = True
    for staged in (False, True):
        late = Path(ctx.stage_place.location) / TABLE_MARKER
        if staged:
            late.parent.mkdir(parents=True)
            late.touch()
        Apply().cancel_job_and_cleanup(argument, ctx.partition, ctx)
        assert not late.exists()
        assert bench.folders() == live
        assert bench.rows() == ROWS


@pytest.mark.parametrize("other", ["type", "certificate"])
def test_hole_8_files_written_for_another_argument_are_not_published(bench: NarrowingBench, other: str) -> None:
    """A submitter can overwrite the argument while jobs run, which once published integers as timestamps."""
    mine = bench.certificate()
    check = {"fits": {"column": "n", "type": "timestamp"}} if other == "type" else FITS
    arguments = [
        Apply.Arg.model_validate({"certificate": store_certificate(one), "settle_seconds": 0})
        for one in (mine, bench.certificate(check))
    ]
    ctx = bench.context()
    planned = Apply().partitions(bench.record, arguments[0], ctx)
    rows = []
    for ctx.partition in planned.partitions:
        result = Apply().start_or_resume_job(arguments[0], ctx.partition, ctx).model_dump(mode="json")
        rows.append(OutcomeRow(ctx.partition.partition, ctx.partition.name, True, result, "", ctx.stage_place))
    done = Summary("success", 3, 3, 0, lambda: iter(rows), plan=lambda: iter(planned.partitions))
    with pytest.raises(OperationFailed, match="the argument was changed after planning, so nothing was changed"):
        Apply().complete_operation(arguments[1], bench.record, done, ctx)
    assert (bench.kind, bench.rows()) == ("long", ROWS)
    bench.assert_no_leftovers()


def test_hole_8_a_plan_that_rewrites_nothing_narrows_no_column(bench: NarrowingBench) -> None:
    argument = Apply.Arg.model_validate({"certificate": store_certificate(bench.certificate()), "settle_seconds": 0})
    ctx = bench.context()
    ctx.partition = PartitionPlan(0, "table")
    with pytest.raises(InvalidArgument, match="rewrites no files, but its argument narrows a column"):
        Apply().start_or_resume_job(argument, ctx.partition, ctx)


@pytest.mark.parametrize("forged", ["list", "mode"])
def test_hole_2_java_opens_no_unchecked_files_of_a_stage(
    bench: NarrowingBench, monkeypatch: pytest.MonkeyPatch, forged: str
) -> None:
    """Java would connect to any host in the location of a manifest list."""
    opened: list[str] = []

    def forge() -> None:
        (stage,) = bench.work.glob(f"stage/{bench.name}/apply/*/000000/*")
        if forged == "mode":
            stage.chmod(0o777)
            return
        metadata = stage / "table" / "metadata" / "v2.metadata.json"
        content = json.loads(metadata.read_text())
        content["snapshots"][0]["manifest-list"] = "hdfs://127.0.0.1:1/snap.avro"
        metadata.write_text(json.dumps(content))

    real = new_metadata.uri
    monkeypatch.setattr(new_metadata, "uri", lambda path: (opened.append(path), real(path))[1])
    monkeypatch.setattr(HadoopTarget, "rewrite", At(HadoopTarget, "rewrite", 1, "before", forge).wrapped)
    message = bench.apply(bench.certificate()).message
    assert re.search("names the host|which is writable by its group or by others", message)
    assert [path for path in opened if "/000000/" in path] == []
    assert bench.kind == "long"


@pytest.mark.parametrize("forged", ["outcomes", "files", "twice"])
def test_hole_8_forged_outcomes_and_plans_remove_no_rows(bench: NarrowingBench, forged: str) -> None:
    """An outcome without staged files once replaced the files of its partition by none."""
    argument = Apply.Arg.model_validate({"certificate": store_certificate(bench.certificate()), "settle_seconds": 0})
    ctx = bench.context()
    planned = Apply().partitions(bench.record, argument, ctx)
    partitions, rows = list(planned.partitions), []
    if forged == "twice":
        partitions.append(replace(partitions[0], partition=3, name="again"))
    for partition in partitions:
        ctx.partition = partition
        result = {"staged": {"files": 0, "rows": 0, "bytes": 0}}
        place = ctx.stage_place
        if forged != "outcomes":
            result = Apply().start_or_resume_job(argument, partition, ctx).model_dump(mode="json")
        rows.append(OutcomeRow(partition.partition, partition.name, True, result, "", place))
    if forged == "files":
        # Each partition has the same number of rows, and the stage of another partition.
        files = [partition.files for partition in partitions]
        partitions = [replace(one, files=other) for one, other in zip(partitions, files[1:] + files[:1], strict=True)]
    count = len(partitions)
    done = Summary(
        "success", count, count, 0, lambda: iter(rows), version=planned.version, plan=lambda: iter(partitions)
    )
    if forged == "twice":
        with pytest.raises(OperationFailed, match="has files of partition again in two partitions"):
            Apply().complete_operation(argument, bench.record, done, ctx)
        assert bench.kind == "long"
    else:
        assert Apply().complete_operation(argument, bench.record, done, ctx).verdict == "applied"
        assert bench.kind == "int"
    assert bench.rows() == ROWS


def test_tables_that_cannot_be_narrowed_are_refused(lake: Lake, spark: SparkSession, tmp_path: Path) -> None:
    def refuse(
        name: str, columns: str, sentence: str, *checks: Any, by: str = "", version: int = 2, **arg: Any
    ) -> None:
        lake.create(name, columns, by, version)
        lake.sql(f"insert into {{{name}}} select {', '.join(VALUES[c.split()[0]] for c in columns.split(', '))}")
        bench = NarrowingBench(lake, spark, tmp_path, name)
        if name == "keyed":
            lake.sql("alter table {keyed} alter column id drop not null") if False else None
            lake.load(name).updateSchema().allowIncompatibleChanges().requireColumn("n").setIdentifierFields(
                ["n"]
            ).commit()
        if name == "sorted":
            set_sort_order(lake, name, "n")
        if name == "branched":
            snapshot = bench.metadata.current_snapshot_id
            lake.load(name).manageSnapshots().createBranch("other", snapshot).commit()
        if name == "equal":
            lake.delete_equal(name, "n", BIG)
        before = current_metadata_file(Location.of(str(lake.path(name))))
        with pytest.raises(InvalidArgument, match=sentence):
            bench.apply(bench.certificate(*(checks or (FITS,)), **arg))
        assert current_metadata_file(Location.of(str(lake.path(name)))) == before

    plain = "id bigint, n bigint"
    refuse("parts", plain, "the table is partitioned by 'n'", by="partitioned by (n)")
    refuse("buckets", plain, "the table is partitioned by 'n'", by="partitioned by (bucket(4, n))")
    refuse("keyed", plain, "'n' is an identifier field of the table")
    refuse("sorted", plain, "the table's sort order uses 'n'")
    refuse("branched", plain, "the branch 'other' of the table would keep")
    refuse("equal", plain, "equality deletes that still apply compare 'n'")
    inside = {"fits": {"column": "s.a", "type": "int"}}
    refuse("nested", "id bigint, s struct<a:bigint>", "'s.a' is inside another column", inside)
    refuse(
        "small",
        plain,
        "Iceberg has no type smallint .its smallest whole number is int",
        {"fits": {"column": "n", "type": "smallint"}},
    )
    refuse("some", plain, "all rows must fit the new type of a column, .* where id > 0:", where="id > 0")
    two = {"fits": {"column": "n", "type": "decimal(5,0)"}}
    refuse("both", plain, "the column 'n' cannot have both types", FITS, two)
    text = ({"fits": {"column": "c", "type": "int"}}, {"matches": {"column": "c", "pattern": "^[0-9]"}})
    refuse("text", "id bigint, c string", "c_matches checks 'c' as text", *text)


@pytest.mark.slow
def test_rows_of_a_v3_table_keep_their_ids(
    lake: Lake, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table has deletion vectors, several partitions, and a file added late by a writer with an old plan."""

    def ids() -> dict[int, tuple[int, int]]:
        found = lake.spark.sql("select id, _row_id, _last_updated_sequence_number from lake.db.third").collect()
        return {row[0]: (row[1], row[2]) for row in found}

    def kept(of: dict[int, tuple[int, int]]) -> dict[int, int]:
        return {n: row for n, (row, _) in of.items()}

    for name in ("third", "third_late"):
        lake.create(name, COLUMNS, "partitioned by (k)", 3)
    lake.sql("insert into {third} values (1, 10, 'a'), (2, 20, 'a'), (3, null, 'b'), (4, 40, 'b'), (5, 50, null)")
    lake.sql("insert into {third} values (6, 60, 'b')")
    lake.delete("third", "id in (2, 3)")
    assert lake.delete_files("third")
    lake.sql("insert into {third_late} values (7, 70, 'a')")
    bench, (late,) = NarrowingBench(lake, spark, tmp_path, "third"), lake.files("third_late")
    certificate, before = bench.certificate(), ids()
    assert len(set(kept(before).values())) == 4
    at = At(HadoopTarget, "rewrite", 1, "after", lambda: lake.append("third", late))
    monkeypatch.setattr(HadoopTarget, "rewrite", at.wrapped)
    ran = bench.apply(certificate)
    assert (ran.report["verdict"], bench.kind, bench.metadata.format_version) == ("applied", "int", 3), ran.message
    assert bench.rows() == [(1, 10, "a"), (4, 40, "b"), (5, 50, None), (6, 60, "b"), (7, 70, "a")]
    assert {n: row for n, row in ids().items() if n != 7} == before
    assert lake.delete_files("third") == 0
    lake.sql("insert into {third} values (8, 80, 'a')")
    assert kept(ids()).items() >= kept(before).items()
    assert len(set(kept(ids()).values())) == 6
    bench.assert_no_leftovers()


def set_sort_order(lake: Lake, name: str, column: str) -> None:
    """Set the table's sort order."""
    iceberg, table = lake.spark._jvm.org.apache.iceberg, lake.load(name)  # type: ignore[union-attr]
    base = table.operations().current()
    first = iceberg.NullOrder.NULLS_FIRST
    order = iceberg.SortOrder.builderFor(base.schema()).sortBy(column, iceberg.SortDirection.ASC, first).build()
    table.operations().commit(base, base.replaceSortOrder(order))


VALUES = {"id": "1L as id", "n": "7L as n", "s": "named_struct('a', 1L) as s", "c": "'12' as c"}


def test_a_column_that_already_has_the_type_is_not_rewritten(lake: Lake, spark: SparkSession, tmp_path: Path) -> None:
    lake.create("same", "id bigint, n int", "", 2)
    lake.sql("insert into {same} values (1, 1)")
    bench = NarrowingBench(lake, spark, tmp_path, "same")
    files = [str(f.location()) for f in lake.files("same")]
    ran = bench.apply(bench.certificate(FITS))
    assert [(c["type"], c["before"]) for c in ran.report["changes"]] == [("int", "same")]
    assert ran.report["rewritten"] is None
    assert [str(f.location()) for f in lake.files("same")] == files


@pytest.mark.slow
def test_tables_without_rows_or_files_and_of_format_v1_are_narrowed(
    lake: Lake, spark: SparkSession, tmp_path: Path
) -> None:
    for name, version, rows in (("void", 2, []), ("first", 1, [(1, 10, "a")]), ("deleted", 2, [])):
        lake.create(name, COLUMNS, "", version)
        if name != "void":
            lake.sql(f"insert into {{{name}}} values (1, 10, 'a')")
        if name == "deleted":
            lake.sql("insert into {deleted} values (2, 20, 'a'), (3, 30, 'a')")
            lake.delete("deleted", "id in (1, 2)")
            lake.delete("deleted", "id = 3")
        bench = NarrowingBench(lake, spark, tmp_path / name, name)
        ran = bench.apply(bench.certificate())
        assert (ran.report["verdict"], bench.kind, bench.rows()) == ("applied", "int", rows), ran.message
        lake.sql(f"insert into {{{name}}} values (9, 90, 'z')")
        assert bench.rows() == [*rows, (9, 90, "z")]
