"""Idempotency of apply on random tables: repeated jobs, completions and operations have the effect of one run."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import DoubleType, LongType, NestedField, StringType

from distop.behavior import TableRecord
from distop.errors import InvalidArgument
from distop.storage.files import local_path
from distop.testing import MemoryProgress
from distop_behaviors.apply import Apply
from distop_behaviors.apply.apply_loop import MARK
from distop_behaviors.validate import Validate
from tests.acceptance.applying import Staging
from tests.support.context import run_operation
from tests.support.icebergrest import configure, sql_catalog
from tests.support.lake import MAVEN, jar
from tests.support.needs import need
from tests.support.repeated_attempts import run_repeated

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.support.context import Ran

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]

SEEDS = [0, 5, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(30) if seed not in (0, 5))]
"""Each run has one seed that is applied, and one with a violating row."""
KINDS: dict[str, tuple[Any, Any]] = {
    "a": (LongType(), pa.int64()),
    "b": (DoubleType(), pa.float64()),
    "c": (StringType(), pa.string()),
    "d": (LongType(), pa.int64()),
}
BIG = 1 << 40


class CatalogTable:
    """A table in a catalog in SQLite."""

    def __init__(self, home: Path, spark: SparkSession, patch: pytest.MonkeyPatch) -> None:
        self._home, self._spark = home, spark
        self.catalog = sql_catalog(home / "lake", home.name)
        self.catalog.create_namespace("db")
        fields = [NestedField(n, name, kind, required=False) for n, (name, (kind, _)) in enumerate(KINDS.items(), 1)]
        self.catalog.create_table("db.t", Schema(*fields))
        options = configure(patch, home.name, type="sql", uri=f"sqlite:///{home}/lake/catalog.db")
        self.record = TableRecord("t", "iceberg", "db.t", options)
        self._operations = 0

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Append rows with a schema in which all columns are nullable."""
        data = {name: pa.array([row[name] for row in rows], kind) for name, (_, kind) in KINDS.items()}
        self.catalog.load_table("db.t").append(pa.table(data))

    def new_operation(self) -> Any:
        """A function that creates the contexts of a new operation's attempts."""
        self._operations += 1
        name, progress = f"t/apply/{self._operations}", MemoryProgress()

        def context(table: TableRecord, attempt: int = 1) -> Staging:
            ctx = Staging(self._home, table, self._spark)
            ctx.progress = progress
            ctx.operation, ctx.attempt, ctx.fence = name, attempt, attempt
            return ctx

        return context

    def certificate(self, checks: list[dict[str, Any]]) -> dict[str, Any]:
        report = run_operation(Validate(), self.record, {"checks": checks}, self.new_operation()).report
        assert report["certificate"] is not None, report
        return dict(report["certificate"])

    @property
    def metadata(self) -> Any:
        return self.catalog.load_table("db.t").metadata

    def versions(self) -> int:
        """The number of previous metadata files."""
        return len(self.metadata.metadata_log)

    def state(self) -> Any:
        """The schema, the properties without the mark, the rows, and the numbers of files and snapshots."""
        metadata, table = self.metadata, self.catalog.load_table("db.t")
        found = table.scan().to_arrow().to_pylist()
        fields = [(field.name, str(field.field_type), field.required) for field in metadata.schema().fields]
        kept = {name: value for name, value in metadata.properties.items() if name != MARK}
        files = len(list(table.scan().plan_files()))
        return fields, kept, sorted(map(repr, found)), files, len(metadata.snapshots)

    def mark(self) -> Any:
        return json.loads(self.metadata.properties.get(MARK, "null"))

    def unused_data_files(self) -> set[str]:
        """Data files in the warehouse that belong to no snapshot."""
        table = self.catalog.load_table("db.t")
        lying = {str(path) for path in (self._home / "lake" / "warehouse").rglob("*.parquet")}
        rows = table.inspect.all_data_files().column("file_path").to_pylist()
        return lying - {str(local_path(path)) for path in rows}

    def staged(self) -> list[Path]:
        return [path for path in (self._home / "stage").rglob("*") if path.is_file()]


def comparable_report(ran: Ran, world: CatalogTable) -> Any:
    """The parts of a report that do not depend on snapshot ids and file names, or on how many files were validated.

    An attempt validates fewer files if another one has made the change already.
    """
    numbers = {str(snapshot.snapshot_id): n for n, snapshot in enumerate(world.metadata.snapshots)}
    omitted = ("snapshot", "rounds", "files", "rows", "checks")
    report = {name: value for name, value in ran.report.items() if name not in omitted}
    if report["rewritten"]:
        report["rewritten"] = {name: value for name, value in report["rewritten"].items() if name != "bytes"}
    checks = [(c["name"], c["verdict"], c["violations"]) for c in ran.report["checks"]]
    violated = checks if report["verdict"] == "violated" else None
    return report, numbers.get(ran.report["snapshot"]), ran.message, violated


def row(rng: random.Random, nulls: set[str], *, big: bool) -> dict[str, Any]:
    made: dict[str, Any] = {
        "a": rng.randint(-100, 100),
        "b": rng.choice([0.0, -0.0, 1.5, -2.25]),
        "c": rng.choice(["x", "é", "longer"]),
        "d": BIG if big else rng.randint(0, 9),
    }
    return {name: None if name in nulls and rng.random() < 0.3 else value for name, value in made.items()}


def some_valid_checks(rng: random.Random, nulls: set[str]) -> list[dict[str, Any]]:
    """A random sample of checks that hold for every row and are decided from statistics."""
    held: list[dict[str, Any]] = [{"not_null": name} for name in KINDS if name not in nulls]
    held += [{"range": {"column": "a", "min": -100, "max": 100}}, {"range": {"column": "d", "max": BIG}, "name": "d"}]
    return rng.sample(held, rng.randint(1, len(held)))


def violating_row(rng: random.Random, checks: list[dict[str, Any]]) -> dict[str, Any]:
    """A row that violates one of the checks."""
    made, check = row(rng, set(), big=False), rng.choice(checks)
    if "not_null" in check:
        return {**made, check["not_null"]: None}
    column = (check.get("range") or check["fits"])["column"]
    return {**made, column: BIG + 1 if column == "d" else 101}


def assert_idempotent(
    seed: int, home: Path, spark: SparkSession, patch: pytest.MonkeyPatch, *, narrowed: bool = False
) -> None:
    """Apply a certificate to two equal tables, once without failures and once with each step repeated, and compare.

    ``narrowed``: the certificate narrows a column.
    """
    rng = random.Random(seed)
    one, two = (CatalogTable(home / name, spark, patch) for name in ("once", "twice"))
    nulls = {name for name in KINDS if rng.random() < 0.5 and name != "a"}
    checks = some_valid_checks(rng, nulls)
    if narrowed:
        checks = [check for check in checks if check.get("name") != "d"]
        checks.append({"fits": {"column": "d", "type": "int"}})
    files = [[row(rng, nulls, big=False) for _ in range(rng.randint(1, 9))] for _ in range(rng.randint(1, 4))]
    late = [row(rng, nulls, big=False)] if rng.random() < 0.5 else []
    wrong = [violating_row(rng, checks)] if rng.random() < 0.3 else []
    certificates = []
    for world in (one, two):
        for some in files:
            world.append(some)
        certificates.append(world.certificate(checks))
        if late or wrong:
            world.append([*late, *wrong])
    before, versions = one.state(), two.versions()
    argument = {"certificate": certificates[0], "settle_seconds": 0}
    once = run_operation(Apply(), one.record, argument, one.new_operation())
    argument = {"certificate": certificates[1], "settle_seconds": 0}
    contexts = two.new_operation()
    operation = contexts(two.record).operation
    repeated = run_repeated(Apply(), two.record, argument, contexts, rng)
    assert once.report["verdict"] == ("violated" if wrong else "applied")
    for ended in repeated.ended:
        assert comparable_report(ended, two) == comparable_report(once, one)
    assert two.state() == one.state()
    assert two.versions() == versions + (not wrong), "changed exactly once"
    if wrong:
        assert (one.state(), two.mark()) == (before, None)
    else:
        assert two.mark()["operation"] == operation
    for world in (one, two):
        assert (world.unused_data_files(), world.staged()) == (set(), [])
    state = two.state()
    if narrowed and not wrong:
        # The certificate is for the previous column.
        with pytest.raises(
            InvalidArgument, match="the column 'd' was dropped and another column was created with its name since"
        ):
            run_operation(Apply(), two.record, argument, two.new_operation())
    else:
        # Another operation with the same certificate changes only the mark.
        again = run_operation(Apply(), two.record, argument, two.new_operation())
        assert again.report["verdict"] == once.report["verdict"]
        assert {change["before"] for change in again.report["changes"]} <= {"same"}
        assert two.versions() == versions + 2 * (not wrong)
    assert two.state() == state
    assert (two.unused_data_files(), two.staged()) == (set(), [])


@pytest.mark.parametrize("seed", SEEDS)
def test_repeated_steps_apply_a_certificate_to_a_random_table_once(
    seed: int, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(jar(), MAVEN)
    print(f"the table of seed {seed}")
    assert_idempotent(seed, tmp_path, spark, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_repeated_steps_narrow_a_random_table_once(
    seed: int, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(jar(), MAVEN)
    print(f"the table of seed {seed}")
    assert_idempotent(seed, tmp_path, spark, monkeypatch, narrowed=True)
