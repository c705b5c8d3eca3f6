"""apply on Iceberg tables: rows of concurrent writers are validated, and a repeated apply changes the table once."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from distop.behavior import JobCancelled, OperationFailed, OutcomeRow, Summary, TableUnavailable
from distop.errors import InvalidArgument, UnsafePath
from distop.storage.location import Location
from distop.tables import plan_table
from distop.tables.commits import CommitUnknown
from distop.tables.iceberg import folder_publisher
from distop.tables.iceberg.metadata_file import current_metadata_file, metadata_version, read_file, read_metadata
from distop.testing import MemoryProgress
from distop_behaviors.apply import Apply
from distop_behaviors.apply.apply_loop import MARK, ROUNDS, Applying
from distop_behaviors.apply.hadoop_commit import HadoopTarget
from distop_behaviors.validate import Validate
from distop_behaviors.validate.certificate import digest_of
from tests.acceptance.applying import At, after_the_change, before_the_change, crashes
from tests.acceptance.sparklake import DELETING, Lake
from tests.support.context import FakeContext, Ran, run_operation, store_certificate
from tests.support.lake import MAVEN, jar
from tests.support.needs import need
from tests.support.slow_cases import mostly_slow

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]

NOT_NULL = {"not_null": "c"}
COLUMNS = "id bigint, c string"


class TableBench:
    """Creates certificates of tables, and applies them. All attempts of an operation share a context."""

    def __init__(self, lake: Lake, spark: SparkSession, work: Path) -> None:
        self.lake = lake
        self._spark = spark
        self._work = work
        self._number = 0

    def context(self, name: str) -> FakeContext:
        """The context of a new operation."""
        self._number += 1
        ctx = FakeContext(self._work, self.lake.record(name), self._spark)
        ctx.operation = f"{name}/apply/{self._number}"
        return ctx

    def validate(self, name: str, *checks: dict[str, Any], **arg: Any) -> Ran:
        return run_operation(
            Validate(), self.lake.record(name), {"checks": list(checks), **arg},
            lambda table: FakeContext(self._work, table, self._spark),
        )  # fmt: skip

    def certificate(self, name: str, *checks: dict[str, Any], **arg: Any) -> dict[str, Any]:
        report = self.validate(name, *checks, **arg).report
        assert report["certificate"] is not None, report
        return dict(report["certificate"])

    def apply(self, ctx: FakeContext, certificate: dict[str, Any], settle: float = 0) -> Ran:
        assert ctx.table is not None
        argument = {"certificate": certificate, "settle_seconds": settle}
        return run_operation(Apply(), ctx.table, argument, lambda _: ctx)

    def source(self, name: str) -> str:
        """The current metadata file."""
        return current_metadata_file(Location.of(str(self.lake.path(name))))

    def metadata(self, name: str) -> Any:
        return read_metadata(self.source(name))[0]

    def version(self, name: str) -> int:
        """The number of the current metadata file."""
        return metadata_version(self.source(name))

    def required(self, name: str, column: str = "c") -> bool:
        return bool(self.metadata(name).schema().find_field(column).required)

    def mark(self, name: str) -> Any:
        return json.loads(self.metadata(name).properties.get(MARK, "null"))


@pytest.fixture(scope="module")
def lake(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """A warehouse with a table ``nulls``, whose file other writers commit to other tables."""
    need(jar(), MAVEN)
    warehouse = Lake(spark, tmp_path_factory.mktemp("lake"))
    warehouse.create("nulls", COLUMNS, "", 2)
    warehouse.sql("insert into {nulls} values (100, null)")
    return warehouse


@pytest.fixture
def bench(lake: Lake, spark: SparkSession, tmp_path: Path) -> TableBench:
    return TableBench(lake, spark, tmp_path)


@pytest.fixture(scope="module")
def append_null(lake: Lake) -> Callable[[str], None]:
    """Appends a row with NULL in ``c``, as a writer that planned before the change of the schema."""
    (file,) = lake.files("nulls")
    return lambda name: lake.append(name, file)


def new_table(lake: Lake, name: str, version: int = 2) -> None:
    lake.create(name, COLUMNS, "", version)
    lake.sql(f"insert into {{{name}}} values (1, 'x'), (2, 'y')")


BEFORE_THE_CHANGE, AFTER_THE_CHANGE = before_the_change(HadoopTarget), after_the_change(HadoopTarget)


@pytest.fixture(scope="module")
def certified(lake: Lake, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Create the table ``moments``, and return its certificate."""
    new_table(lake, "moments")
    return TableBench(lake, spark, tmp_path_factory.mktemp("work")).certificate("moments", NOT_NULL)


@pytest.mark.parametrize(
    ("owner", "method", "n", "when"), mostly_slow(BEFORE_THE_CHANGE, 3) + mostly_slow(AFTER_THE_CHANGE, 3)
)
def test_a_null_of_a_concurrent_writer_is_found_at_any_moment(
    bench: TableBench, certified: dict[str, Any], append_null: Callable[[str], None], monkeypatch: pytest.MonkeyPatch,
    owner: Any, method: str, n: int, when: str,
) -> None:  # fmt: skip
    at, before = At(owner, method, n, when, lambda: append_null("moments")), bench.version("moments")
    monkeypatch.setattr(owner, method, at.wrapped)
    ran = bench.apply(bench.context("moments"), certified)
    assert at.happened
    assert (ran.report["verdict"], ran.report["checks"][0]["violations"]) == ("violated", 1), ran.message
    assert [s["values"] for s in ran.report["checks"][0]["samples"]] == [{"c": None}]
    assert "c_not_null: 1 violation" in ran.message
    assert not bench.required("moments")
    assert bench.mark("moments") is None
    late = (owner, method, n, when) in AFTER_THE_CHANGE
    assert (ran.report["reverted"], ran.message.startswith("the change was reverted")) == (late, late)
    assert bench.version("moments") == before + (3 if late else 1)
    bench.lake.drop_file("moments", bench.lake.files("nulls")[0])


def test_a_commit_after_the_last_check_is_found_by_the_next_validation(
    bench: TableBench, append_null: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    new_table(bench.lake, "late")
    certificate = bench.certificate("late", NOT_NULL)
    at = At(Applying, "settle", 1, "after", lambda: append_null("late"))
    monkeypatch.setattr(Applying, "settle", at.wrapped)
    assert bench.apply(bench.context("late"), certificate).report["verdict"] == "applied"
    # validate does not rely on the required column.
    assert bench.required("late")
    for arg in ({}, {"since": certificate}):
        ran = bench.validate("late", NOT_NULL, **arg)
        assert (ran.report["verdict"], ran.report["checks"][0]["violations"]) == ("violated", 1)


def test_a_forged_mark_does_not_replace_a_validation(bench: TableBench, append_null: Callable[[str], None]) -> None:
    new_table(bench.lake, "planted")
    certificate, ctx = bench.certificate("planted", NOT_NULL), bench.context("planted")
    bench.lake.load("planted").updateSchema().allowIncompatibleChanges().requireColumn("c").commit()
    append_null("planted")
    mark = {
        "operation": ctx.operation,
        "certificate": certificate["digest"],
        "snapshot": bench.metadata("planted").current_snapshot_id,
        "required": [2],
        "properties": {},
    }
    bench.lake.load("planted").updateProperties().set(MARK, json.dumps(mark)).commit()
    ran = bench.apply(ctx, certificate)
    assert (ran.report["verdict"], ran.report["rounds"]) == ("violated", 1), ran.message
    assert ran.report["checks"][0]["violations"] == 1


def test_a_commit_deletes_no_file_that_the_metadata_names(bench: TableBench, tmp_path: Path) -> None:
    new_table(bench.lake, "named")
    victims = [tmp_path / f"victim{n}" for n in range(3)]
    for victim in victims:
        victim.write_text("of another user")
    bench.lake.name_victims("named", *victims)
    certificate = bench.certificate("named", NOT_NULL)
    assert bench.apply(bench.context("named"), certificate).report["verdict"] == "applied"
    assert [victim.exists() for victim in victims] == [True] * 3
    # The user's properties are unchanged.
    assert bench.metadata("named").properties.items() >= DELETING.items()
    assert len(bench.metadata("named").metadata_log) == 4


@pytest.mark.parametrize("moment", ["planned", "swapping"])
@pytest.mark.parametrize("plant", ["", "metadata", "a folder", "a link"])
def test_hole_3_nothing_is_committed_into_folders_of_other_users(
    bench: TableBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: str, moment: str
) -> None:
    """Hadoop's file system would follow another user's link, and remove the content of another user's folder."""
    name = f"others_{plant.replace(' ', '_')}_{moment}"
    new_table(bench.lake, name)
    certificate, metadata = bench.certificate(name, NOT_NULL), bench.lake.path(name) / "metadata"
    crc = metadata / f".v{bench.version(name) + 1}.metadata.json.crc"
    actions = {"a folder": crc.mkdir, "a link": lambda: crc.symlink_to(tmp_path / "victim")}
    act = actions.get(plant, lambda: (bench.lake.path(name) / plant).chmod(0o777))
    if moment == "planned":
        act()
    else:
        monkeypatch.setattr(HadoopTarget, "swap", At(HadoopTarget, "swap", 1, "before", act).wrapped)
    before = bench.version(name)
    with pytest.raises(UnsafePath, match="the table is not changed, because "):
        bench.apply(bench.context(name), certificate)
    assert (bench.version(name), bench.mark(name)) == (before, None)
    assert not list(metadata.glob("*.tmp"))
    assert not (tmp_path / "victim").exists()


def test_a_crash_at_any_step_changes_the_table_once(
    bench: TableBench, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash() -> None:
        raise ConnectionError("the process dies")

    for number, (method, when) in enumerate(crashes(HadoopTarget)):
        name = f"crash{number}"
        new_table(lake, name)
        certificate = bench.certificate(name, NOT_NULL, {"range": {"column": "id", "min": 0}, "name": "positive"})
        before, ctx = bench.version(name), bench.context(name)
        with monkeypatch.context() as patch:
            patch.setattr(*method, At(*method, 1, when, crash).wrapped)
            with pytest.raises(ConnectionError):
                bench.apply(ctx, certificate)
        ran = bench.apply(ctx, certificate)
        assert (ran.report["verdict"], bench.required(name)) == ("applied", True)
        assert bench.version(name) == before + 1, f"changed once, with a crash {when} {method[1]}"
        assert [c["before"] for c in ran.report["changes"]] == ["other", "other"]
        assert bench.mark(name)["operation"] == ctx.operation


def test_after_an_unknown_outcome_the_table_is_loaded_again(bench: TableBench, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise CommitUnknown("no answer")

    for number, when in enumerate(("before", "after")):
        name = f"unsure{number}"
        new_table(bench.lake, name)
        certificate, before = bench.certificate(name, NOT_NULL), bench.version(name)
        with monkeypatch.context() as patch:
            patch.setattr(HadoopTarget, "swap", At(HadoopTarget, "swap", 1, when, lost).wrapped)
            ran = bench.apply(bench.context(name), certificate)
        assert (ran.report["verdict"], bench.version(name)) == ("applied", before + 1)
        assert ran.report["rounds"] == (2 if when == "before" else 1)


def test_a_change_that_another_jvm_has_overwritten_is_made_again(
    bench: TableBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename on a local file system replaces an existing file, and Iceberg's check before it is not atomic."""
    new_table(bench.lake, "over")
    certificate = bench.certificate("over", NOT_NULL)

    def overwrite() -> None:
        folder, version = bench.lake.path("over") / "metadata", bench.version("over")
        other = json.loads((folder / f"v{version - 1}.metadata.json").read_text())
        other["properties"]["other"] = "mine"
        (folder / f".v{version}.metadata.json.crc").unlink(missing_ok=True)
        (folder / f"v{version}.metadata.json").write_text(json.dumps(other))

    monkeypatch.setattr(HadoopTarget, "swap", At(HadoopTarget, "swap", 1, "after", overwrite).wrapped)
    ran = bench.apply(bench.context("over"), certificate)
    assert (ran.report["verdict"], ran.report["rounds"]) == ("applied", 2)
    assert bench.required("over")
    assert bench.metadata("over").properties["other"] == "mine"


def test_iceberg_renames_the_file_where_none_can_be_created_conditionally(
    bench: TableBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on HDFS. A writer that commits directly before is found by Iceberg."""
    monkeypatch.setattr(folder_publisher, "has_store", lambda folder: False)
    new_table(bench.lake, "renamed")
    certificate = bench.certificate("renamed", NOT_NULL)
    other = At(
        HadoopTarget, "load_in_java", 1, "after", lambda: bench.lake.sql("insert into {renamed} values (3, 'z')")
    )
    monkeypatch.setattr(HadoopTarget, "load_in_java", other.wrapped)
    ran = bench.apply(bench.context("renamed"), certificate)
    assert (ran.report["verdict"], ran.report["rounds"], ran.report["rows"]) == ("applied", 2, 1), ran.message
    assert (bench.version("renamed"), bench.required("renamed")) == (4, True)
    assert (bench.lake.path("renamed") / "metadata" / ".v4.metadata.json.crc").exists(), "written by Hadoop"


@pytest.mark.parametrize("version", [1, 3])
def test_iceberg_continues_with_the_written_metadata_in_each_format_version(bench: TableBench, version: int) -> None:
    name = f"format{version}"
    new_table(bench.lake, name, version)
    before = json.loads(read_file(bench.source(name)).text)
    assert bench.apply(bench.context(name), bench.certificate(name, NOT_NULL)).report["verdict"] == "applied"
    written = json.loads(read_file(bench.source(name)).text)
    assert written.keys() - before.keys() <= {"schemas", "current-schema-id"}
    assert before.keys() <= written.keys()
    with pytest.raises(Exception, match="[Nn]ull"):
        bench.lake.sql(f"insert into {{{name}}} values (3, null)")
    bench.lake.sql(f"insert into {{{name}}} values (3, 'z')")
    bench.lake.delete(name, "id = 1")
    assert sorted(row.id for row in bench.lake.rows(name).collect()) == [2, 3]
    after = json.loads(read_file(bench.source(name)).text)
    assert (after["format-version"], after["current-schema-id"]) == (version, written["current-schema-id"])


def test_checksums_that_hadoop_left_behind_do_not_hide_the_change(bench: TableBench) -> None:
    """Somebody has removed the next metadata file without its checksum; Hadoop compares the two."""
    new_table(bench.lake, "checksums")
    certificate, folder = bench.certificate("checksums", NOT_NULL), bench.lake.path("checksums") / "metadata"
    stale = (folder / ".v2.metadata.json.crc").read_bytes()
    (folder / ".v3.metadata.json.crc").write_bytes(stale)
    assert (folder / ".version-hint.text.crc").exists()
    assert bench.apply(bench.context("checksums"), certificate).report["verdict"] == "applied"
    assert (folder / "version-hint.text").read_text() == "3"
    assert bench.lake.rows("checksums").count() == 2
    with pytest.raises(Exception, match="[Nn]ull"):
        bench.lake.sql("insert into {checksums} values (3, null)")
    bench.lake.sql("insert into {checksums} values (3, 'z')")
    assert bench.version("checksums") == 4


def test_apply_fails_if_other_writers_always_commit_first(bench: TableBench, monkeypatch: pytest.MonkeyPatch) -> None:
    new_table(bench.lake, "busy")
    certificate = bench.certificate("busy", NOT_NULL)
    original = HadoopTarget.swap

    def swap(self: HadoopTarget, head: Any, change: Any) -> None:
        bench.lake.load("busy").updateProperties().set("n", str(bench.version("busy"))).commit()
        original(self, head, change)

    monkeypatch.setattr(HadoopTarget, "swap", swap)
    ran = bench.apply(bench.context("busy"), certificate)
    assert (ran.report["verdict"], ran.report["rounds"]) == ("unknown", ROUNDS)
    assert f"other writers committed first in {ROUNDS} attempts, so nothing was changed" in ran.message
    assert not bench.required("busy")


@pytest.mark.parametrize("version", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_deletes_and_rewrites_of_certified_files_do_not_stop_apply(bench: TableBench, version: int) -> None:
    name, lake = f"deleted{version}", bench.lake
    lake.create(name, "id bigint, k int, c string", "partitioned by (k)", version)
    lake.fill(name)
    positive = {"range": {"column": "id", "min": 0}}
    certificate = bench.certificate(name, positive)
    lake.delete(name, "c is null")
    ran = bench.validate(name, positive, since=certificate)
    assert [o.name for o in ran.outcomes] == ["nothing-new"]
    assert (ran.report["verdict"], ran.report["rows"]) == ("valid", 0)
    assert (ran.report["certificate"]["rows"], certificate["rows"]) == (100, 100)
    certificate = bench.certificate(name, NOT_NULL)
    lake.delete(name, "id = 1")
    ran = bench.validate(name, NOT_NULL, since=certificate)
    # The deletes of its file were rewritten, and need not include all previous ones.
    assert [o.name for o in ran.outcomes] == ["k=1"]
    assert (ran.report["verdict"], ran.report["rows"]) == ("valid", 26)
    certificate = ran.report["certificate"]
    # The snapshot before the delete has the NULLs again.
    snapshot = bench.metadata(name).snapshots[0].snapshot_id
    lake.load(name).manageSnapshots().rollbackTo(snapshot).commit()
    ran = bench.validate(name, NOT_NULL, since=certificate)
    assert (ran.report["verdict"], ran.report["checks"][0]["violations"]) == ("violated", 20)
    ran = bench.apply(bench.context(name), certificate)
    assert (ran.report["verdict"], ran.report["checks"][0]["violations"]) == ("violated", 20)


def test_since_finds_rows_that_a_rolled_back_delete_restores(bench: TableBench) -> None:
    lake = bench.lake
    lake.create("equal", COLUMNS, "", 2)
    lake.fill("equal", "id, c")
    lake.delete_equal("equal", "c", None)
    certificate = bench.certificate("equal", NOT_NULL)
    lake.sql("insert into {equal} values (200, 'z')")
    ran = bench.validate("equal", NOT_NULL, since=certificate)
    assert (ran.report["verdict"], ran.report["rows"]) == ("valid", 1)
    lake.load("equal").manageSnapshots().rollbackTo(bench.metadata("equal").snapshots[0].snapshot_id).commit()
    ran = bench.validate("equal", NOT_NULL, since=ran.report["certificate"])
    assert (ran.report["verdict"], ran.report["checks"][0]["violations"]) == ("violated", 20)


def test_an_attempt_that_lost_its_claim_changes_nothing(bench: TableBench) -> None:
    class Lost(MemoryProgress):
        def save(self, value: Any, *, force: bool = False) -> bool:
            return False

    new_table(bench.lake, "lost")
    ctx, certificate = bench.context("lost"), bench.certificate("lost", NOT_NULL)
    ctx.progress = Lost()
    with pytest.raises(RuntimeError, match="could not be saved: nothing was changed"):
        bench.apply(ctx, certificate)
    assert not bench.required("lost")


def test_constraints_are_kept_as_properties_next_to_required_columns(bench: TableBench) -> None:
    new_table(bench.lake, "kept")
    bench.lake.sql("alter table {kept} set tblproperties ('distop.constraint.small' = 'mine')")
    checks = [
        NOT_NULL,
        {"range": {"column": "id", "min": 0, "max": 10}, "name": "small"},
        {"in_set": {"column": "c", "values": ["x", "y", "it's"]}},
        {"matches": {"column": "c", "pattern": "^[xy]"}},
        {"check": "id > 0 OR c = 'z'", "name": "either"},
    ]
    certificate = bench.certificate("kept", *checks)
    assert set(certificate["columns"]) == {"id", "c"}
    ran = bench.apply(bench.context("kept"), certificate)
    assert [(c["check"], c["column"], c["before"]) for c in ran.report["changes"]][:2] == [
        ("c_not_null", "c", "other"),
        ("small", None, "other"),
    ]
    found = {n: json.loads(v) for n, v in bench.metadata("kept").properties.items() if n.startswith("distop.constr")}
    assert {n.removeprefix("distop.constraint."): v["sql"] for n, v in found.items()} == {
        "small": "`id` >= 0 AND `id` <= 10",
        "c_in_set": "`c` IN ('x', 'y', 'it\\'s')",
        "c_matches": "`c` RLIKE '^[xy]'",
        "either": "id > 0 OR c = 'z'",
    }
    # The properties have SQL that holds for the rows.
    rows = bench.lake.rows("kept")
    assert [rows.where(v["sql"]).count() for v in found.values()] == [2] * 4
    # A second apply finds all constraints unchanged.
    again = bench.apply(bench.context("kept"), certificate)
    assert (again.report["verdict"], {c["before"] for c in again.report["changes"]}) == ("applied", {"same"})
    assert bench.required("kept")


def test_a_revert_restores_the_schema_and_properties(
    bench: TableBench, append_null: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    new_table(bench.lake, "back")
    bench.lake.sql("alter table {back} set tblproperties ('distop.constraint.small' = 'mine', 'other' = 'x')")
    certificate = bench.certificate("back", NOT_NULL, {"range": {"column": "id", "min": 0}, "name": "small"})
    before = dict(bench.metadata("back").properties)
    monkeypatch.setattr(Applying, "settle", At(Applying, "settle", 1, "before", lambda: append_null("back")).wrapped)
    assert bench.apply(bench.context("back"), certificate).report["reverted"]
    assert dict(bench.metadata("back").properties) == before
    assert not bench.required("back")


def test_a_cancel_reverts_an_unconfirmed_change(bench: TableBench, monkeypatch: pytest.MonkeyPatch) -> None:
    new_table(bench.lake, "cancelled")
    certificate = bench.certificate("cancelled", NOT_NULL)
    argument = Apply.Arg.model_validate({"certificate": store_certificate(certificate), "settle_seconds": 60})
    for n, (method, changed) in enumerate((((Applying, "commit"), False), ((Applying, "settle"), True))):
        ctx, before = bench.context("cancelled"), bench.version("cancelled")
        (job,) = Apply().partitions(bench.lake.record("cancelled"), argument, ctx).partitions
        with monkeypatch.context() as patch:
            patch.setattr(*method, At(*method, 1, "before", lambda ctx=ctx: setattr(ctx, "stopped", True)).wrapped)  # type: ignore[misc]
            with pytest.raises(JobCancelled):
                Apply().start_or_resume_job(argument, job, ctx)
        assert bench.required("cancelled") == changed
        ctx.superseded = True
        Apply().cancel_job_and_cleanup(argument, job, ctx)
        assert bench.required("cancelled") == changed, "a superseded attempt reverts nothing"
        ctx.superseded = False
        for _ in range(2):
            Apply().cancel_job_and_cleanup(argument, job, ctx)
            assert not bench.required("cancelled")
        assert bench.version("cancelled") == before + 2 * n


def test_two_simultaneous_applies_are_both_correct(bench: TableBench, monkeypatch: pytest.MonkeyPatch) -> None:
    new_table(bench.lake, "both")
    first, second = bench.certificate("both", NOT_NULL), bench.certificate("both", {"not_null": "id"})
    other: list[Ran] = []

    def apply_second() -> None:
        other.append(bench.apply(bench.context("both"), second))

    monkeypatch.setattr(HadoopTarget, "swap", At(HadoopTarget, "swap", 1, "before", apply_second).wrapped)
    ran = bench.apply(bench.context("both"), first)
    assert (ran.report["verdict"], ran.report["rounds"]) == ("applied", 2)
    assert (other[0].report["verdict"], other[0].report["rounds"]) == ("applied", 1)
    assert bench.required("both", "c")
    assert bench.required("both", "id")


def test_apply_after_other_changes_of_the_table(bench: TableBench, tmp_path: Path) -> None:
    lake = bench.lake
    new_table(lake, "changing")
    certificate = bench.certificate("changing", NOT_NULL)
    # The certified snapshot has expired, so all files are validated.
    lake.sql("insert into {changing} values (3, 'z')")
    lake.load("changing").expireSnapshots().expireSnapshotId(int(certificate["version"])).commit()
    ran = bench.apply(bench.context("changing"), certificate)
    assert (ran.report["verdict"], ran.report["rows"]) == ("applied", 3)
    # First the column is renamed, then the table is replaced.
    lake.sql("alter table {changing} rename column c to d")
    with pytest.raises(InvalidArgument, match="the column 'c' was renamed to 'd' since"):
        bench.apply(bench.context("changing"), certificate)
    with pytest.raises(InvalidArgument, match="the column 'c' was renamed to 'd' since"):
        bench.validate("changing", NOT_NULL, since=certificate)
    lake.sql("drop table {changing} purge")
    shutil.rmtree(lake.path("changing"), ignore_errors=True)
    with pytest.raises(TableUnavailable, match="there is no Iceberg table at"):
        bench.apply(bench.context("changing"), certificate)
    new_table(lake, "changing")
    with pytest.raises(InvalidArgument, match="the table 'changing' was replaced by another table since"):
        bench.apply(bench.context("changing"), certificate)


def test_checks_that_cannot_be_applied_are_refused_at_planning(bench: TableBench, tmp_path: Path) -> None:
    new_table(bench.lake, "refused")
    certificate = bench.certificate("refused", NOT_NULL)
    before = bench.version("refused")
    some = bench.certificate("refused", NOT_NULL, where="id > 1")
    with pytest.raises(InvalidArgument, match="a required column must not be NULL in any row, .* where id > 1:"):
        bench.apply(bench.context("refused"), some)
    with pytest.raises(InvalidArgument, match="'refused/validate/1' is not a validation of the table 'nulls'"):
        bench.apply(bench.context("nulls"), bench.certificate("refused", NOT_NULL))
    folder = {**certificate, "format": "parquet"}
    with pytest.raises(InvalidArgument, match="a folder of parquet files, which has no schema"):
        table = bench.lake.record("refused")
        ctx = FakeContext(tmp_path, type(table)(table.name, "parquet", table.location))
        bench.apply(ctx, {**folder, "digest": digest_of(folder)})
    assert bench.version("refused") == before


def test_a_table_without_rows_is_certified_and_applied(bench: TableBench) -> None:
    bench.lake.create("void", "id bigint, s struct<a: int, b: int>, c string", "", 2)
    assert plan_table(bench.lake.record("void")).version == "no snapshot"
    certificate = bench.certificate("void", {"not_null": "s.a"}, {"not_null": "C"})
    ran = bench.apply(bench.context("void"), certificate)
    assert ran.report["verdict"] == "applied"
    assert [bench.required("void", name) for name in ("s", "s.a", "s.b", "c")] == [False, True, False, True]


def test_the_completion_of_an_operation_without_a_result_has_no_report(bench: TableBench) -> None:
    new_table(bench.lake, "crashed")
    argument = Apply.Arg.model_validate({"certificate": store_certificate(bench.certificate("crashed", NOT_NULL))})
    row = OutcomeRow(0, "table", False, None, "the worker process died")
    summary = Summary("failed", 1, 0, 1, lambda: iter([row]))
    with pytest.raises(OperationFailed, match="the worker process died") as caught:
        Apply().complete_operation(argument, None, summary, bench.context("crashed"))
    assert caught.value.report is None
