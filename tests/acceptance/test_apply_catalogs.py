"""apply on Iceberg tables of a catalog: a commit requires the validated metadata, and its mark identifies it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyiceberg.types import LongType

from distop.behavior import JobCancelled, PartitionPlan, TableRecord, TableUnavailable
from distop.errors import InvalidArgument, UnsafePath
from distop.tables.iceberg.catalog_publisher import first_missing
from distop.tables.iceberg.iceberg_catalogs import CatalogTable
from distop_behaviors.apply import Apply
from distop_behaviors.apply.apply_loop import MARK, ROUNDS, Applying
from distop_behaviors.apply.catalog_commit import CatalogTarget
from distop_behaviors.validate import Validate
from tests.acceptance.applying import At, after_the_change, before_the_change, crashes
from tests.acceptance.sparklake import DELETING
from tests.support.catalog_bench import NAME, NOT_NULL, NULLS, REQUIRED, ROWS, SCHEMA, CatalogBench, catalog_bench
from tests.support.context import FakeContext, Ran, run_operation, store_certificate
from tests.support.icebergrest import configure
from tests.support.lake import MAVEN, Folder, jar
from tests.support.needs import need

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.rotating

POSITIVE = {"range": {"column": "id", "min": 0}, "name": "positive"}
MOMENTS = (before_the_change(CatalogTarget), after_the_change(CatalogTarget))
SWAPS = (MOMENTS[0][-1], MOMENTS[1][0])
CATALOG_MOMENTS = [*SWAPS, (Applying, "load", 2, "after"), (Applying, "load", 3, "before")]
"""Moments with calls of the catalog. Each run tests the others in tests/acceptance/test_apply.py."""


@pytest.fixture(params=["rest", "sql"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CatalogBench]:
    """A bench without Spark, for checks that manifests decide."""
    with catalog_bench(request.param, tmp_path) as found:
        yield found


@pytest.mark.spark
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        *(
            pytest.param("rest", m, marks=[pytest.mark.slow] * (m not in CATALOG_MOMENTS))
            for m in MOMENTS[0] + MOMENTS[1]
        ),
        *(("sql", m) for m in SWAPS),
    ],
)
def test_a_null_of_a_concurrent_writer_in_a_catalog_is_found_at_any_moment(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, moment: Any
) -> None:
    need(jar(), MAVEN)
    with catalog_bench(kind, tmp_path, spark) as bench:
        certificate, before = bench.certificate(), bench.versions()
        at = At(*moment, bench.append_null)
        monkeypatch.setattr(*moment[:2], at.wrapped)
        ran = bench.apply(certificate)
        assert at.happened
        assert (ran.report["verdict"], ran.report["checks"][0]["violations"]) == ("violated", 1), ran.message
        assert [s["values"] for s in ran.report["checks"][0]["samples"]] == [{"c": None}]
        late = moment in MOMENTS[1]
        assert (ran.report["reverted"], ran.message.startswith("the change was reverted")) == (late, late)
        assert (bench.required, bench.mark) == (False, None)
        assert bench.versions() == before + (3 if late else 1)
        # The table has its previous schema again, with the same id.
        assert bench.loaded.metadata.current_schema_id == certificate["schema_id"]


@pytest.mark.spark
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["rest", "sql"])
def test_a_certificate_is_applied_while_a_writer_appends(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    need(jar(), MAVEN)
    with catalog_bench(kind, tmp_path, spark) as bench:
        certificate = bench.certificate(NOT_NULL, POSITIVE, {"not_null": "s.a"})
        bench.loaded.append(ROWS)
        at = At(CatalogTarget, "swap", 1, "before", lambda: bench.loaded.append(ROWS))
        monkeypatch.setattr(CatalogTarget, "swap", at.wrapped)
        ran = bench.apply(certificate)
        report = ran.report
        assert (report["verdict"], report["rounds"], report["rows"]) == ("applied", 2, 4), ran.message
        assert {c["check"]: c["before"] for c in report["changes"]} == {
            "c_not_null": "other", "s.a_not_null": "other", "positive": "other",
        }  # fmt: skip
        schema = bench.loaded.schema()
        assert [schema.find_field(name).required for name in ("id", "c", "s", "s.a")] == [False, True, False, True]
        assert schema.find_field("c").doc == "what it is called"
        assert json.loads(bench.loaded.properties["distop.constraint.positive"])["sql"] == "`id` >= 0"
        with pytest.raises(ValueError, match="Mismatch in fields"):
            bench.loaded.append(NULLS)
        since = bench.validate(NOT_NULL, since=certificate)
        assert (since.report["verdict"], since.report["rows"]) == ("valid", 4)
        again = bench.apply(certificate)
        assert (again.report["verdict"], {c["before"] for c in again.report["changes"]}) == ("applied", {"same"})


def test_a_crash_at_any_step_changes_the_table_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash() -> None:
        raise ConnectionError("the process dies")

    for number, (method, when) in enumerate(crashes(CatalogTarget)):
        with catalog_bench(("rest", "sql")[number % 2], tmp_path / str(number)) as bench:
            certificate, before, ctx = bench.certificate(NOT_NULL, POSITIVE), bench.versions(), bench.context()
            with monkeypatch.context() as patch:
                patch.setattr(*method, At(*method, 1, when, crash).wrapped)
                with pytest.raises(ConnectionError):
                    bench.apply(certificate, ctx)
            ran = bench.apply(certificate, ctx)
            assert (ran.report["verdict"], bench.required) == ("applied", True)
            assert bench.versions() == before + 1, f"changed once, with a crash {when} {method[1]}"
            assert [c["before"] for c in ran.report["changes"]] == ["other", "other"]
            assert bench.mark["operation"] == ctx.operation


def test_after_a_lost_answer_to_a_commit_the_table_is_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with catalog_bench("rest", tmp_path) as bench:
        certificate, before = bench.certificate(), bench.versions()

        def lose(value: bool) -> Callable[[], None]:
            return lambda: setattr(bench.server, "lose_answers", value)

        with monkeypatch.context() as patch:
            patch.setattr(CatalogTarget, "swap", At(CatalogTarget, "swap", 1, "before", lose(True)).wrapped)
            patch.setattr(Applying, "commit", At(Applying, "commit", 1, "after", lose(False)).wrapped)
            ran = bench.apply(certificate)
        assert (ran.report["verdict"], ran.report["rounds"], bench.versions()) == ("applied", 1, before + 1)
        # The commit was refused, but apply cannot know that, and retries.
        certificate = bench.certificate({"not_null": "id"})

        def status(value: int) -> Callable[[], None]:
            return lambda: setattr(bench.server, "status", value)

        with monkeypatch.context() as patch:
            patch.setattr(CatalogTable, "commit", At(CatalogTable, "commit", 1, "before", status(503)).wrapped)
            patch.setattr(Applying, "commit", At(Applying, "commit", 1, "after", status(0)).wrapped)
            ran = bench.apply(certificate)
        assert (ran.report["verdict"], ran.report["rounds"], bench.versions()) == ("applied", 2, before + 2)


def test_the_catalog_refuses_the_swap_after_another_commit(
    bench: CatalogBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metadata changes after the swap has compared it and before the commit."""

    def add_column() -> None:
        with bench.loaded.update_schema() as updating:
            updating.add_column("more", LongType())

    certificate = bench.certificate()
    monkeypatch.setattr(CatalogTable, "commit", At(CatalogTable, "commit", 1, "before", add_column).wrapped)
    ran = bench.apply(certificate)
    assert (ran.report["verdict"], ran.report["rounds"]) == ("applied", 2)
    assert [f.name for f in bench.loaded.schema().fields] == ["id", "c", "s", "more"]


def test_a_forged_mark_in_a_catalog_does_not_replace_a_validation(bench: CatalogBench) -> None:
    certificate, ctx = bench.certificate(), bench.context()
    bench.loaded.append(ROWS)
    with bench.loaded.update_schema(allow_incompatible_changes=True) as updating:
        updating.update_column("c", required=True)
    planted = {
        "operation": ctx.operation,
        "certificate": certificate["digest"],
        "snapshot": bench.loaded.metadata.current_snapshot_id,
        "required": [2],
        "properties": {},
    }
    with bench.loaded.transaction() as changing:
        changing.set_properties({MARK: json.dumps(planted)})
    report = bench.apply(certificate, ctx).report
    assert (report["verdict"], report["rounds"], report["rows"]) == ("applied", 1, 2)
    assert bench.mark != planted


def test_a_forged_mark_reverts_nothing(bench: CatalogBench) -> None:
    certificate, ctx = bench.certificate(), bench.context()
    argument = Apply.Arg.model_validate({"certificate": store_certificate(certificate), "settle_seconds": 0})
    mine = {"operation": ctx.operation, "certificate": certificate["digest"]}
    planted = {**mine, "required": [], "properties": {"x": "y"}}
    with bench.loaded.transaction() as changing:
        changing.set_properties({MARK: json.dumps(planted)})
    (job,) = Apply().partitions(bench.record, argument, ctx).partitions
    Apply().cancel_job_and_cleanup(argument, job, ctx)
    assert (bench.mark, "x" in bench.loaded.properties) == (planted, False)


def test_a_commit_of_a_catalog_deletes_no_file_that_the_metadata_names(tmp_path: Path) -> None:
    victims = [tmp_path / f"victim{n}" for n in range(3)]
    for victim in victims:
        victim.write_text("of another user")
    with catalog_bench("sql", tmp_path) as bench:
        file = Path(bench.loaded.metadata_location.removeprefix("file://"))
        found = json.loads(file.read_text())
        found["properties"] |= DELETING
        found["metadata-log"] = [{"timestamp-ms": 1000 + n, "metadata-file": str(v)} for n, v in enumerate(victims)]
        file.write_text(json.dumps(found))
        assert bench.apply(bench.certificate()).report["verdict"] == "applied"
        assert [victim.exists() for victim in victims] == [True] * 3
        assert bench.loaded.properties.items() >= DELETING.items()


@pytest.mark.parametrize("moment", ["planned", "swapping"])
def test_hole_3_pyiceberg_writes_no_metadata_where_others_may_write(
    bench: CatalogBench, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """A REST server writes the metadata itself, with its own permissions."""
    certificate = bench.certificate()
    folder = Path(bench.loaded.metadata_location.removeprefix("file://")).parent
    if moment == "planned":
        folder.chmod(0o777)
    else:
        at = At(CatalogTarget, "swap", 1, "before", lambda: folder.chmod(0o777))
        monkeypatch.setattr(CatalogTarget, "swap", at.wrapped)
    before = bench.versions()
    if bench.kind == "rest":
        assert bench.apply(certificate).report["verdict"] == "applied"
        return
    with pytest.raises(UnsafePath, match=f"the table is not changed, because .* {folder}, which is writable"):
        bench.apply(certificate)
    assert (bench.versions(), bench.required) == (before, False)


@pytest.mark.spark
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("owner", "method"), [(Apply, "partitions"), (CatalogTarget, "rewrite")])
def test_hole_3_iceberg_writes_no_manifests_where_others_may_write(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, owner: Any, method: str
) -> None:
    need(jar(), MAVEN)
    with catalog_bench("rest", tmp_path, spark) as bench:
        certificate = bench.certificate({"fits": {"column": "id", "type": "int"}})
        folder = Path(bench.loaded.metadata_location.removeprefix("file://")).parent
        before = set(folder.rglob("*"))
        monkeypatch.setattr(owner, method, At(owner, method, 1, "before", lambda: folder.chmod(0o777)).wrapped)
        try:
            message = bench.apply(certificate).message
        except UnsafePath as error:
            message = str(error)
        assert re.search(f"the table is not changed, because .* {folder}, which is writable", message)
        assert set(folder.rglob("*")) == before


def test_apply_fails_if_other_writers_always_commit_first(bench: CatalogBench, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, original = bench.certificate(), CatalogTarget.swap

    def swap(self: CatalogTarget, head: Any, change: Any) -> None:
        with bench.loaded.transaction() as changing:
            changing.set_properties({"n": str(bench.versions())})
        original(self, head, change)

    monkeypatch.setattr(CatalogTarget, "swap", swap)
    ran = bench.apply(certificate)
    assert (ran.report["verdict"], ran.report["rounds"], bench.required) == ("unknown", ROUNDS, False)
    assert f"other writers committed first in {ROUNDS} attempts, so nothing was changed" in ran.message


def test_a_cancel_reverts_an_unconfirmed_change(bench: CatalogBench, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = bench.certificate(NOT_NULL, POSITIVE)
    before = dict(bench.loaded.properties)
    argument = Apply.Arg.model_validate({"certificate": store_certificate(certificate), "settle_seconds": 60})
    ctx = bench.context()
    (job,) = Apply().partitions(bench.record, argument, ctx).partitions
    at = At(Applying, "settle", 1, "before", lambda: setattr(ctx, "stopped", True))
    monkeypatch.setattr(Applying, "settle", at.wrapped)
    with pytest.raises(JobCancelled):
        Apply().start_or_resume_job(argument, job, ctx)
    assert bench.required
    # The context reports a cancel until its end, which does not stop the revert.
    for _ in range(2):
        Apply().cancel_job_and_cleanup(argument, job, ctx)
        assert (bench.required, bench.mark, dict(bench.loaded.properties)) == (False, None, before)


@pytest.mark.spark
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["rest", pytest.param("sql", marks=pytest.mark.slow)])
def test_a_column_is_narrowed_through_a_catalog(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    need(jar(), MAVEN)
    fits = {"fits": {"column": "id", "type": "int"}}
    with catalog_bench(kind, tmp_path, spark) as bench:

        def state() -> tuple[str, list[int]]:
            table = bench.loaded
            return str(table.schema().find_field("id").field_type), sorted(table.scan().to_arrow()["id"].to_pylist())

        def leftover_files() -> set[str]:
            """Manifests and data files that neither the table nor a snapshot uses."""
            table = bench.loaded
            known = {str(path) for path in table.inspect.all_files()["file_path"].to_pylist()}
            for snapshot in table.metadata.snapshots:
                known |= {snapshot.manifest_list, *(m.manifest_path for m in snapshot.manifests(table.io))}
            folder = Path(str(table.location()).removeprefix("file://"))
            known |= {entry.metadata_file for entry in table.metadata.metadata_log} | {table.metadata_location}
            found = {str(path) for path in folder.rglob("*") if path.is_file() and path.suffix != ".crc"}
            return {Path(path).name for path in found} - {Path(path).name for path in known}

        # A writer commits first.
        certificate, before = bench.certificate(fits, POSITIVE), bench.loaded.metadata
        at = At(CatalogTarget, "rewrite", 1, "before", lambda: bench.loaded.append(ROWS))
        with monkeypatch.context() as patch:
            patch.setattr(CatalogTarget, "rewrite", at.wrapped)
            ran = bench.apply(certificate)
        assert (ran.report["verdict"], ran.report["rounds"]) == ("applied", 2), ran.message
        assert state() == ("int", [1, 1, 2, 2])
        after = bench.loaded.metadata
        assert after.schema().find_field("id").field_id > before.schema().find_field("id").field_id
        assert str(after.current_snapshot().summary.operation.value) == "replace"
        assert [f.name for f in after.schema().fields] == ["id", "c", "s"]
        old_rows = bench.loaded.scan(snapshot_id=before.current_snapshot_id).to_arrow()
        assert (str(old_rows.schema.field("id").type), old_rows.num_rows) == ("int64", 2)
        assert leftover_files() == set()
    # A writer with an old plan adds a NULL: the change is reverted, and the row is kept. Then the answer to a commit is
    # lost.
    with catalog_bench(kind, tmp_path / "second", spark) as bench:
        before = bench.loaded.metadata
        certificate = bench.certificate(fits, NOT_NULL)
        at = At(CatalogTarget, "rewrite", 1, "after", bench.append_null)
        with monkeypatch.context() as patch:
            patch.setattr(CatalogTarget, "rewrite", at.wrapped)
            ran = bench.apply(certificate)
        assert (ran.report["verdict"], ran.report["reverted"]) == ("violated", True), ran.message
        assert state() == ("long", [1, 2, 100])
        assert (bench.loaded.schema(), bench.mark) == (before.schema(), None)
        if kind == "rest":
            with monkeypatch.context() as patch:
                original = CatalogTarget.rewrite

                def lose_answer(self: CatalogTarget, *args: Any) -> None:
                    bench.server.lose_answers = True
                    try:
                        original(self, *args)
                    finally:
                        bench.server.lose_answers = False

                patch.setattr(CatalogTarget, "rewrite", lose_answer)
                ran = bench.apply(bench.certificate(fits))
            assert (ran.report["verdict"], state()) == ("applied", ("int", [1, 2, 100])), ran.message


def test_apply_after_other_changes_of_the_table(bench: CatalogBench) -> None:
    certificate = bench.certificate()
    if bench.kind == "rest":
        bench.server.status = 503
        with pytest.raises(TableUnavailable, match="cannot be reached"):
            bench.apply(certificate)
        bench.server.status = 0
    bench.server.tables.drop_table(NAME)
    with pytest.raises(InvalidArgument, match=f"has no table '{NAME}': it was dropped"):
        bench.apply(certificate)
    bench.server.tables.create_table(NAME, SCHEMA).append(ROWS)
    with pytest.raises(InvalidArgument, match="the table 't' was replaced by another table since"):
        bench.apply(certificate)


RENAMES = [
    *(pytest.param("rest", m, marks=pytest.mark.slow) for m in (MOMENTS[0][0], MOMENTS[0][2], MOMENTS[0][-1])),
    *((kind, (CatalogTable, "commit", 1, "before")) for kind in ("rest", "sql")),
    ("sql", MOMENTS[1][-2]),
]
"""Moments of a rename: before the load, the judgement, the swap and the commit, and before the confirmation."""


@pytest.mark.parametrize(("kind", "moment"), RENAMES)
def test_a_table_renamed_during_apply_is_an_error_and_can_be_applied_by_its_new_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, moment: Any
) -> None:
    """A new table with its name is not changed, nor is the table under its new name. Once it has its old name again,
    the operation applies the certificate.
    """
    with catalog_bench(kind, tmp_path) as bench:
        tables, certificate, ctx = bench.server.tables, bench.certificate(), bench.context()
        before = bench.versions()
        at = At(*moment, lambda: tables.rename_table(NAME, "sales.other"))
        with monkeypatch.context() as patch:
            patch.setattr(*moment[:2], at.wrapped)
            with pytest.raises(InvalidArgument, match=f"has no table '{NAME}': it was dropped, renamed"):
                bench.apply(certificate, ctx)
        assert at.happened
        renamed = tables.load_table("sales.other").metadata
        assert len(renamed.metadata_log) == before + (moment in MOMENTS[1])
        other = tables.create_table(NAME, SCHEMA).metadata
        with pytest.raises(InvalidArgument, match="the table 't' was replaced by another table since"):
            bench.apply(certificate, ctx)
        argument = Apply.Arg.model_validate({"certificate": store_certificate(certificate)})
        Apply().cancel_job_and_cleanup(argument, PartitionPlan(0, "table"), ctx)
        assert (bench.loaded.metadata, tables.load_table("sales.other").metadata) == (other, renamed)
        tables.drop_table(NAME)
        tables.rename_table("sales.other", NAME)
        ran = bench.apply(certificate, ctx)
        assert (ran.report["verdict"], bench.required, bench.versions()) == ("applied", True, before + 1)
        assert bench.mark["operation"] == ctx.operation


def expire_old_snapshots(bench: CatalogBench) -> None:
    """Expire all snapshots but the current one, and delete files that only those had."""
    table = bench.loaded
    current = table.current_snapshot()
    files: dict[bool, set[str]] = {True: set(), False: set()}
    for snapshot in table.snapshots():
        mine = files[snapshot == current]
        mine.add(snapshot.manifest_list)
        for manifest in snapshot.manifests(table.io):
            mine.add(manifest.manifest_path)
            mine.update(entry.data_file.file_path for entry in manifest.fetch_manifest_entry(table.io))
    table.maintenance.expire_snapshots().by_ids([s.snapshot_id for s in table.snapshots() if s != current]).commit()
    for path in files[False] - files[True]:
        Path(path.removeprefix("file://")).unlink()


def apply_with_expiry(
    bench: CatalogBench, monkeypatch: pytest.MonkeyPatch, write: Callable[[], None], writes: Any, moment: Any
) -> Ran:
    """Apply a certificate, with a write and an expiry at these moments (``EXPIRIES``)."""
    certificate = bench.certificate()
    if writes is None:
        write()
    else:
        monkeypatch.setattr(*writes[:2], At(*writes, write).wrapped)
    at = At(*moment, lambda: expire_old_snapshots(bench))
    monkeypatch.setattr(*moment[:2], at.wrapped)
    ran = bench.apply(certificate)
    assert at.happened
    return ran


AFTER_THE_SWAP = (CatalogTarget, "swap", 1, "after")
EXPIRIES = [
    ("rest", None, (Applying, "load", 1, "after")),
    pytest.param("sql", None, (CatalogTarget, "swap", 1, "before"), marks=pytest.mark.slow),
    pytest.param("rest", None, (CatalogTable, "commit", 1, "before"), marks=pytest.mark.slow),
    pytest.param("rest", AFTER_THE_SWAP, (Applying, "load", 3, "before"), marks=pytest.mark.slow),
    ("sql", AFTER_THE_SWAP, (Applying, "judge", 2, "before")),
]
"""The moment of the write (None: before apply) and the moment of the expiry.

A write before apply expires after the load, before the swap, or in the swap. A write after the change expires before
or after the metadata is loaded again.
"""


@pytest.mark.parametrize(("kind", "writes", "moment"), EXPIRIES)
def test_all_files_are_validated_if_the_certified_snapshot_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, writes: Any, moment: Any
) -> None:
    with catalog_bench(kind, tmp_path) as bench:
        ran = apply_with_expiry(bench, monkeypatch, lambda: bench.loaded.overwrite(REQUIRED), writes, moment)
        assert (ran.report["verdict"], ran.report["rows"], bench.required) == ("applied", 2, True), ran.message
        assert bench.loaded.scan().to_arrow()["id"].to_pylist() == [1, 2]


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("kind", "writes", "moment"), [EXPIRIES[0], EXPIRIES[-1]])
def test_a_null_is_found_even_if_the_certified_snapshot_expires(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, writes: Any, moment: Any
) -> None:
    need(jar(), MAVEN)
    with catalog_bench(kind, tmp_path, spark) as bench:

        def write() -> None:
            bench.loaded.overwrite(REQUIRED)
            bench.append_null()

        ran = apply_with_expiry(bench, monkeypatch, write, writes, moment)
        assert (ran.report["verdict"], ran.report["checks"][0]["violations"]) == ("violated", 1), ran.message
        assert (ran.report["rows"], ran.report["reverted"]) == (3, writes is not None)
        assert (bench.required, bench.mark) == (False, None)


def test_a_table_of_a_hadoop_catalog_is_changed_in_its_folder(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(jar(), MAVEN)
    Folder(tmp_path / "lake" / "sales" / "orders").new(SCHEMA).append(ROWS)
    options = configure(monkeypatch, type="hadoop", warehouse=str(tmp_path / "lake"))
    table = TableRecord("t", "iceberg", NAME, options)
    ctx = FakeContext(tmp_path, table, spark)
    certificate = run_operation(Validate(), table, {"checks": [NOT_NULL]}, lambda _: ctx).report["certificate"]
    ran = run_operation(Apply(), table, {"certificate": certificate, "settle_seconds": 0}, lambda _: ctx)
    assert ran.report["verdict"] == "applied"
    assert (tmp_path / "lake" / "sales" / "orders" / "metadata" / "v3.metadata.json").exists()


def test_metadata_with_fields_unknown_to_pyiceberg_is_not_changed(tmp_path: Path) -> None:
    assert first_missing({"a": [{"b": 1}, {"c": None}]}, {"a": [{"b": 2, "d": 3}, {}]}) is None
    assert first_missing({"a": [{"b": 1}, {"c": {"e": 0}}]}, {"a": [{"b": 2}, {"c": {}}]}) == "a.c.e"
    assert first_missing({"a": [1, 2]}, {"a": [1]}) == "a"
    with catalog_bench("sql", tmp_path) as bench:
        certificate = bench.certificate()
        source = Path(bench.loaded.metadata_location.removeprefix("file://"))
        with open(source) as file:
            metadata = json.load(file)
        metadata["snapshots"][0]["of-tomorrow"] = 7
        with open(source, "w") as file:
            json.dump(metadata, file)
        with pytest.raises(InvalidArgument, match="a field .snapshots.of-tomorrow. that pyiceberg does not know"):
            bench.apply(certificate)
        del metadata["snapshots"][0]["of-tomorrow"]
        with open(source, "w") as file:
            json.dump({**metadata, "format-version": 3, "next-row-id": 2}, file)
        with pytest.raises(InvalidArgument, match="Iceberg format version 3, but pyiceberg writes metadata only up to"):
            bench.apply(certificate)
        assert not bench.required
