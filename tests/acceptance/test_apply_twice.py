"""Twice is once, of apply: jobs that are tried again after their report was lost, completions that are run again, and
whole operations, on random tables.
"""

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
"""In every run one that is applied, and one with a row in the way."""
KINDS: dict[str, tuple[Any, Any]] = {
    "a": (LongType(), pa.int64()),
    "b": (DoubleType(), pa.float64()),
    "c": (StringType(), pa.string()),
    "d": (LongType(), pa.int64()),
}
BIG = 1 << 40


class World:
    """A table of a catalog in SQLite."""

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
        """As a writer whose schema has the columns of the table, and nothing to say of NULLs."""
        data = {name: pa.array([row[name] for row in rows], kind) for name, (_, kind) in KINDS.items()}
        self.catalog.load_table("db.t").append(pa.table(data))

    def operation(self) -> Any:
        """Makes the contexts of its attempts."""
        self._operations += 1
        name, progress = f"t/apply/{self._operations}", MemoryProgress()

        def context(table: TableRecord, attempt: int = 1) -> Staging:
            ctx = Staging(self._home, table, self._spark)
            ctx.progress = progress
            ctx.operation, ctx.attempt, ctx.fence = name, attempt, attempt
            return ctx

        return context

    def certificate(self, checks: list[dict[str, Any]]) -> dict[str, Any]:
        report = run_operation(Validate(), self.record, {"checks": checks}, self.operation()).report
        assert report["certificate"] is not None, report
        return dict(report["certificate"])

    @property
    def metadata(self) -> Any:
        return self.catalog.load_table("db.t").metadata

    def versions(self) -> int:
        """How many metadata files there have been."""
        return len(self.metadata.metadata_log)

    def state(self) -> Any:
        """The schema, what is promised beside it, and the rows; how many files and snapshots these are in."""
        metadata, table = self.metadata, self.catalog.load_table("db.t")
        found = table.scan().to_arrow().to_pylist()
        fields = [(field.name, str(field.field_type), field.required) for field in metadata.schema().fields]
        kept = {name: value for name, value in metadata.properties.items() if name != MARK}
        files = len(list(table.scan().plan_files()))
        return fields, kept, sorted(map(repr, found)), files, len(metadata.snapshots)

    def mark(self) -> Any:
        return json.loads(self.metadata.properties.get(MARK, "null"))

    def data_files(self) -> set[str]:
        """What lies below its data, and is no part of any snapshot."""
        table = self.catalog.load_table("db.t")
        lying = {str(path) for path in (self._home / "lake" / "warehouse").rglob("*.parquet")}
        rows = table.inspect.all_data_files().column("file_path").to_pylist()
        return lying - {path.removeprefix("file://") for path in rows}

    def staged(self) -> list[Path]:
        return [path for path in (self._home / "stage").rglob("*") if path.is_file()]


def told(ran: Ran, world: World) -> Any:
    """The report, with snapshots by their place in the table's history, and files by none; but for what was looked at
    here, which is less where another attempt has made the change already.
    """
    numbers = {str(snapshot.snapshot_id): n for n, snapshot in enumerate(world.metadata.snapshots)}
    apart = ("snapshot", "rounds", "files", "rows", "checks")
    report = {name: value for name, value in ran.report.items() if name not in apart}
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


def promises(rng: random.Random, nulls: set[str]) -> list[dict[str, Any]]:
    """Some of the checks that hold for every row; statistics tell."""
    held: list[dict[str, Any]] = [{"not_null": name} for name in KINDS if name not in nulls]
    held += [{"range": {"column": "a", "min": -100, "max": 100}}, {"range": {"column": "d", "max": BIG}, "name": "d"}]
    return rng.sample(held, rng.randint(1, len(held)))


def in_the_way(rng: random.Random, checks: list[dict[str, Any]]) -> dict[str, Any]:
    """A row that violates one of them."""
    made, check = row(rng, set(), big=False), rng.choice(checks)
    if "not_null" in check:
        return {**made, check["not_null"]: None}
    column = (check.get("range") or check["fits"])["column"]
    return {**made, column: BIG + 1 if column == "d" else 101}


def twice_is_once(
    seed: int, home: Path, spark: SparkSession, patch: pytest.MonkeyPatch, *, narrowed: bool = False
) -> None:
    """Two tables with the same rows: to the one a certificate is applied as to a table whose executors never fail; to
    the other by jobs that are tried twice, and completions that are run twice, one after the other. ``narrowed``: a
    column becomes narrower.
    """
    rng = random.Random(seed)
    one, two = (World(home / name, spark, patch) for name in ("once", "twice"))
    nulls = {name for name in KINDS if rng.random() < 0.5 and name != "a"}
    checks = promises(rng, nulls)
    if narrowed:
        checks = [check for check in checks if check.get("name") != "d"]
        checks.append({"fits": {"column": "d", "type": "int"}})
    files = [[row(rng, nulls, big=False) for _ in range(rng.randint(1, 9))] for _ in range(rng.randint(1, 4))]
    late = [row(rng, nulls, big=False)] if rng.random() < 0.5 else []
    wrong = [in_the_way(rng, checks)] if rng.random() < 0.3 else []
    certificates = []
    for world in (one, two):
        for some in files:
            world.append(some)
        certificates.append(world.certificate(checks))
        if late or wrong:
            world.append([*late, *wrong])
    before, versions = one.state(), two.versions()
    argument = {"certificate": certificates[0], "settle_seconds": 0}
    once = run_operation(Apply(), one.record, argument, one.operation())
    argument = {"certificate": certificates[1], "settle_seconds": 0}
    contexts = two.operation()
    operation = contexts(two.record).operation
    repeated = run_repeated(Apply(), two.record, argument, contexts, rng)
    assert once.report["verdict"] == ("violated" if wrong else "applied")
    for ended in repeated.ended:
        assert told(ended, two) == told(once, one)
    assert two.state() == one.state()
    assert two.versions() == versions + (not wrong), "not changed once"
    if wrong:
        assert (one.state(), two.mark()) == (before, None)
    else:
        assert two.mark()["operation"] == operation
    for world in (one, two):
        assert (world.data_files(), world.staged()) == (set(), [])
    state = two.state()
    if narrowed and not wrong:
        # What was certified was the former column.
        with pytest.raises(
            InvalidArgument, match="the column 'd' was dropped and another column was created with its name since"
        ):
            run_operation(Apply(), two.record, argument, two.operation())
    else:
        # Once more, as another operation: it is so already, and nothing but the mark says otherwise.
        again = run_operation(Apply(), two.record, argument, two.operation())
        assert again.report["verdict"] == once.report["verdict"]
        assert {change["before"] for change in again.report["changes"]} <= {"same"}
        assert two.versions() == versions + 2 * (not wrong)
    assert two.state() == state
    assert (two.data_files(), two.staged()) == (set(), [])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_table_survives_repeated_steps(
    seed: int, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(jar(), MAVEN)
    print(f"the table of seed {seed}")
    twice_is_once(seed, tmp_path, spark, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_narrowing_survives_repeated_steps(
    seed: int, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(jar(), MAVEN)
    print(f"the table of seed {seed}")
    twice_is_once(seed, tmp_path, spark, monkeypatch, narrowed=True)
