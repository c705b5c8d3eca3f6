"""apply with a narrower column type on an Iceberg table by folder in an object store: it is rewritten there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pyiceberg.io.pyarrow import _dataframe_to_data_files

from distop.behavior import OutcomeRow, PartitionPlan, Summary
from distop.storage.deletion import Place
from distop.storage.opened_stores import open_store
from distop_behaviors.apply import Apply
from distop_behaviors.apply.hadoop_commit import HadoopTarget
from distop_behaviors.apply.rewrite_publication import Narrowing
from tests.acceptance.applying import At
from tests.storage.iceberg_tables import properties_for
from tests.support.context import store_certificate, sweep_stages
from tests.support.folder_bench import FolderBench, rows
from tests.support.lake import MAVEN, jar
from tests.support.needs import need

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from distop.storage.object_store import ObjectStore
    from tests.storage.servers import Served
    from tests.support.context import FakeContext, Ran

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

FITS = {"fits": {"column": "id", "type": "int"}}
STAGED = "data/distop-staged"
BIG = 1 << 40
"""A value that does not fit an int."""


class NarrowingBench(FolderBench):
    """A table in an object store, with its shared directory in the same bucket."""

    def __init__(self, place: ObjectStore, work: Path, properties: dict[str, str], spark: SparkSession) -> None:
        super().__init__(open_store(f"{place.location}/db/t"), work, properties, spark)
        self.shared = Place(place.location, "shared/c0ffee")

    def context(self) -> FakeContext:
        ctx = super().context()
        ctx.shared = self.shared
        ctx.shared_dir = self.shared.location
        return ctx

    @property
    def kind(self) -> str:
        return str(self.file.content.schema().find_field("id").field_type)

    @property
    def ids(self) -> list[Any]:
        return sorted(self.table.scan().to_arrow()["id"].to_pylist())

    def append_blindly(self, value: int) -> None:
        """Append a row as a writer that has planned before the change, with the first schema of the table."""
        table = self.table
        [file] = _dataframe_to_data_files(
            table.metadata.model_copy(update={"current_schema_id": 0}), rows("late", first=value), table.io
        )
        with table.transaction() as changing, changing.update_snapshot().fast_append() as appending:
            appending.append_data_file(file)

    def live(self) -> set[str]:
        """The keys of the table's data files."""
        paths = self.table.inspect.files()["file_path"].to_pylist()
        return {path.removeprefix(f"{self.store.location}/") for path in paths}

    def staged(self) -> set[str]:
        """The keys of all data files that narrowing has written."""
        return {one.key for one in self.store.list(STAGED)}

    def sweep(self) -> None:
        """Remove stages as executors do after the end of operations."""
        sweep_stages(Apply(), self.context())

    def assert_no_leftovers(self) -> None:
        """Assert that executors leave no stages, and no files of attempts except those of the table's versions."""
        self.sweep()
        paths = self.table.inspect.all_data_files()["file_path"].to_pylist()
        named = {path.removeprefix(f"{self.store.location}/") for path in paths}
        assert self.staged() == {key for key in named if key.startswith(STAGED)}
        assert [one.key for one in open_store(self.shared.location).list()] == []


@pytest.fixture
def bench(s3_server: Served, s3_store: ObjectStore, tmp_path: Path, spark: SparkSession) -> NarrowingBench:
    need(jar(), MAVEN)
    return NarrowingBench(s3_store, tmp_path, properties_for(s3_server.port), spark)


class Interrupted:
    """An operation whose jobs and completion a test calls, as executors do around crashes."""

    def __init__(self, bench: NarrowingBench, certificate: dict[str, Any]) -> None:
        self.ctx = bench.context()
        self.argument = Apply.Arg.model_validate({"certificate": store_certificate(certificate), "settle_seconds": 0})
        self.planned = Apply().partitions(bench.record, self.argument, self.ctx)
        self._bench = bench

    def job(self) -> OutcomeRow:
        self.ctx.partition = plan = self.plan
        result = Apply().start_or_resume_job(self.argument, plan, self.ctx).model_dump(mode="json")
        return OutcomeRow(plan.partition, plan.name, True, result, "", self.ctx.stage_place)

    def clean_up(self) -> None:
        self.ctx.partition = self.plan
        Apply().cancel_job_and_cleanup(self.argument, self.plan, self.ctx)

    @property
    def plan(self) -> PartitionPlan:
        (plan,) = self.planned.partitions
        return plan

    def complete(self, *outcomes: OutcomeRow, verdict: Any = "success") -> Any:
        self.ctx.partition = None
        summary = Summary(
            *(verdict, 1, len(outcomes), 0, lambda: iter(outcomes)),
            version=self.planned.version,
            whole=True,
            plan=lambda: iter(self.planned.partitions),
        )
        return Apply().complete_operation(self.argument, self._bench.record, summary, self.ctx)


def narrowed(ran: Ran) -> tuple[str, int]:
    return ran.report["verdict"], ran.report["rewritten"]["rows"]


def test_a_column_of_a_table_on_s3_is_narrowed_while_a_writer_appends(
    bench: NarrowingBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, before = bench.certificate(FITS, {"not_null": "c"}), bench.file.content
    at = At(HadoopTarget, "rewrite", 1, "before", lambda: bench.table.append(rows("z", first=3)))
    monkeypatch.setattr(HadoopTarget, "rewrite", at.wrapped)
    ran = bench.apply(bench.context(), certificate)
    assert (narrowed(ran), ran.report["rounds"]) == (("applied", 3), 2), ran.message
    assert (bench.kind, bench.required("c"), bench.ids) == ("int", True, [1, 2, 3])
    field = bench.file.content.schema().find_field("id")
    assert field.field_id > before.schema().find_field("id").field_id
    assert all(key.startswith(STAGED) for key in bench.live())
    bench.assert_no_leftovers()
    with pytest.raises(ValueError, match="Mismatch in fields"):
        bench.table.append(rows("y", first=BIG))


@pytest.mark.rotating
def test_a_crash_between_staging_and_publication_writes_no_file_again(
    bench: NarrowingBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash() -> None:
        raise ConnectionError("the process dies")

    operation = Interrupted(bench, bench.certificate(FITS))
    outcome, before = operation.job(), bench.version
    written = bench.staged()
    assert written
    for method in ("before", "after"):
        with monkeypatch.context() as patch:
            patch.setattr(HadoopTarget, "rewrite", At(HadoopTarget, "rewrite", 1, method, crash).wrapped)
            with pytest.raises(ConnectionError):
                operation.complete(outcome)
        assert bench.staged() == written
    report = operation.complete(outcome)
    assert (report.verdict, bench.kind, bench.ids, bench.version) == ("applied", "int", [1, 2], before + 1)
    assert bench.live() == written
    bench.assert_no_leftovers()


@pytest.mark.rotating
def test_data_of_dead_attempts_are_removed(bench: NarrowingBench) -> None:
    operation = Interrupted(bench, bench.certificate(FITS))
    operation.job()
    assert bench.staged()
    for _ in range(2):
        operation.clean_up()
        bench.assert_no_leftovers()
    outcome = operation.job()
    operation.ctx.fence += 1
    operation.job()  # an attempt whose outcome was refused
    assert operation.complete(outcome, verdict="cancelled") is None
    bench.sweep()
    assert (bench.staged(), bench.kind) == (set(), "long")
    bench.assert_no_leftovers()
    assert bench.apply(bench.context(), bench.certificate(FITS)).report["verdict"] == "applied"
    live = bench.live()
    operation.clean_up()
    assert bench.live() == live == bench.staged()
    assert bench.ids == [1, 2]


@pytest.mark.rotating
def test_a_late_file_on_s3_is_rewritten_or_reverts_the_change(
    bench: NarrowingBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = bench.certificate(FITS)
    with monkeypatch.context() as patch:
        patch.setattr(
            HadoopTarget, "rewrite", At(HadoopTarget, "rewrite", 1, "after", lambda: bench.append_blindly(BIG)).wrapped
        )
        ran = bench.apply(bench.context(), certificate)
    assert (ran.report["verdict"], ran.report["reverted"], bench.kind) == ("violated", True, "long"), ran.message
    assert bench.ids == [1, 2, BIG]
    bench.assert_no_leftovers()
    table = bench.table
    table.delete(f"id = {BIG}")
    certificate = bench.certificate(FITS)
    monkeypatch.setattr(
        HadoopTarget, "rewrite", At(HadoopTarget, "rewrite", 1, "after", lambda: bench.append_blindly(7)).wrapped
    )
    ran = bench.apply(bench.context(), certificate)
    assert (ran.report["verdict"], ran.report["rewritten"]["late"], bench.kind) == ("applied", 1, "int"), ran.message
    assert bench.ids == [1, 2, 7]
    bench.assert_no_leftovers()


@pytest.mark.rotating
@pytest.mark.parametrize("shared", ["disk", "s3"])
def test_the_shared_directory_may_be_in_another_place_than_the_table(
    bench: NarrowingBench, tmp_path: Path, shared: str
) -> None:
    if shared == "disk":
        bench.shared = Place(str(tmp_path / "shared"), "c0ffee")
    else:
        bench.shared = Place(bench.store.location, "_distop/c0ffee")
    ran = bench.apply(bench.context(), bench.certificate(FITS))
    assert (narrowed(ran), bench.kind, bench.ids) == (("applied", 2), "int", [1, 2]), ran.message
    bench.assert_no_leftovers()


@pytest.mark.rotating
def test_a_failed_rewrite_leaves_nothing_on_s3(bench: NarrowingBench, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = bench.certificate(FITS)
    at = At(Narrowing, "publish", 1, "before", lambda: bench.table.append(rows("z", first=BIG)))
    monkeypatch.setattr(Narrowing, "publish", at.wrapped)
    ran = bench.apply(bench.context(), certificate)
    assert (ran.report["verdict"], bench.kind) == ("violated", "long")
    assert (bench.staged(), bench.ids) == (set(), [1, 2, BIG])
    bench.assert_no_leftovers()
