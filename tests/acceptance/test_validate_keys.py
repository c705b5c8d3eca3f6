"""unique and references: the results of queries equal those of plain Python on every row."""

from __future__ import annotations

import math
import random
from collections import Counter
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import SparkContext

from distop.behavior import JobCancelled, TableRecord
from distop.errors import InvalidArgument
from distop.tables import plan_table
from distop_behaviors.validate import Validate, key_queries
from tests.acceptance.sparklake import Lake
from tests.support.context import FakeContext, Ran, run_operation
from tests.support.lake import MAVEN, jar
from tests.support.needs import need
from tests.support.repeated_attempts import clear_caches

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240), pytest.mark.rotating]

TYPES: dict[str, pa.DataType] = {
    "i": pa.int64(),
    "small": pa.int32(),
    "f": pa.float64(),
    "dec": pa.decimal128(9, 2),
    "text": pa.string(),
    "raw": pa.binary(),
    "at": pa.timestamp("us", "UTC"),
    "flag": pa.bool_(),
    "id": pa.int64(),
    "none": pa.string(),
    "pair": pa.struct([("x", pa.int32()), ("y", pa.float32())]),
}
KEYS = [
    *(["i"], ["f"], ["dec"], ["text"], ["raw"], ["at"], ["flag"], ["id"], ["none"], ["pair"], ["pair.y"], ["p"]),
    *(["id", "none"], ["i", "text"], ["f", "dec"], ["p", "i"], ["p", "id"], ["pair", "small"]),
]
Row = dict[str, Any]
Rows = dict[str, dict[str, list[Row]]]
"""By partition, then by file."""


def _value(rng: random.Random, column: str) -> Any:
    if column in ("i", "small"):
        return rng.randint(-20, 20)
    if column == "f":
        return rng.choice([0.0, -0.0, math.nan, 1.5, math.inf, rng.uniform(-5, 5)])
    if column == "dec":
        return Decimal(rng.randint(-30, 30)).scaleb(-2)
    if column == "text":
        return rng.choice(["", "a", "A", "é", "e\u0301", "😀", f"seventeen-same-bytes-{rng.randint(0, 30)}"])
    if column == "raw":
        return bytes([rng.randint(0, 3), rng.randint(0, 3)])
    if column == "at":
        return datetime(2013, 1, 1, tzinfo=UTC) + timedelta(microseconds=rng.randint(0, 60))
    if column == "flag":
        return rng.random() < 0.5
    assert column == "pair"
    return {"x": rng.randint(0, 3), "y": rng.choice([0.0, -0.0, math.nan, 2.5, None])}


def generate(seed: int, folder: Path) -> Rows:
    """Four files in two partitions; ``id`` is unique, ``none`` NULL, one file has no column ``i`` and one no rows."""
    rng = random.Random(seed)
    ids = rng.sample(range(1_000), 200)
    made: Rows = {}
    for n in range(4):
        name = f"p={n // 2}"
        count = 0 if n == 3 else rng.randint(10, 40)
        rows = [
            {
                c: ids.pop() if c == "id" else None if c == "none" or rng.random() < 0.1 else _value(rng, c)
                for c in TYPES
            }
            for _ in range(count)
        ]
        columns = {c: kind for c, kind in TYPES.items() if n != 1 or c != "i"}
        path = folder / name / f"{n}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        data = {c: pa.array([row[c] for row in rows], kind) for c, kind in columns.items()}
        pq.write_table(pa.table(data), path, row_group_size=16)
        if n == 1:
            rows = [{**row, "i": None} for row in rows]
        made.setdefault(name, {})[str(path)] = [{**row, "p": name[2:]} for row in rows]
    return made


def canonical(value: Any) -> Any:
    """A value that is equal for all values that Spark groups together."""
    if isinstance(value, dict):
        return tuple(canonical(v) for v in value.values())
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value + 0.0
    return value


def key_of(row: Row, key: Sequence[str]) -> tuple[Any, ...] | None:
    """The key of a row; None if a part of it is NULL."""
    found = []
    for column in key:
        first, _, inner = column.partition(".")
        value = row[first]
        if inner and value is not None:
            value = value[inner]
        if value is None:
            return None
        found.append(canonical(value))
    return tuple(found)


def counts(rows: Rows, key: Sequence[str], where: Any = lambda row: True) -> Counter[tuple[Any, ...]]:
    found = (key_of(row, key) for files in rows.values() for some in files.values() for row in some if where(row))
    return Counter(k for k in found if k is not None)


def count_repeated_keys(found: Counter[tuple[Any, ...]]) -> int:
    return sum(n - 1 for n in found.values())


SEED = 1


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[TableRecord, Rows]:
    folder = tmp_path_factory.mktemp("keys")
    return TableRecord("t", "parquet", str(folder)), generate(SEED, folder)


@pytest.fixture
def run(context: Callable[[TableRecord], FakeContext]) -> Callable[..., Ran]:
    """Run validate on a table; ``tables`` are those that it may refer to."""

    def run(
        table: TableRecord, *checks: dict[str, Any], tables: Sequence[TableRecord] = (), names: Any = None, **arg: Any
    ) -> Ran:
        def make(record: TableRecord) -> FakeContext:
            ctx = context(record)
            ctx.tables = {other.name: other for other in tables}
            return ctx

        return run_operation(Validate(), table, {"checks": list(checks), **arg}, make, names=names)

    return run


def found(ran: Ran) -> list[tuple[str, int]]:
    return [(check["verdict"], check["violations"]) for check in ran.report["checks"]]


def test_equal_keys_are_counted_as_in_plain_python(made: tuple[TableRecord, Rows], run: Callable[..., Ran]) -> None:
    table, rows = made
    for mode, keys in (("auto", KEYS), ("never", KEYS[-3:])):
        ran = run(table, *({"unique": key} for key in keys), statistics=mode, sample=6)
        assert [o.name for o in ran.outcomes] == ["@table"], "there are no jobs for partitions"
        assert ran.report["rows"] == sum(len(some) for files in rows.values() for some in files.values())
        for key, check in zip(keys, ran.report["checks"], strict=True):
            expected = counts(rows, key)
            assert check["error"] is None
            assert (check["violations"], check["exact"]) == (count_repeated_keys(expected), True), (key, mode)
            assert check["verdict"] == ("violated" if check["violations"] else "valid")
            assert bool(check["samples"]) == bool(check["violations"])
            assert check["scope"] == "table"
            assert sum(check["evidence"].values()) == 4
            shown = []
            for sample in check["samples"]:
                row = rows[sample["partition"]][sample["file"]][sample["row_index"]]
                shown.append(key_of(row, key))
                assert expected[key_of(row, key)] > 1, (key, sample)
                assert list(sample["values"]) == key
            assert all(n > 1 for n in Counter(shown).values()), "samples with one key are shown together"
            if mode == "never":
                assert check["evidence"]["files_statistics"] == 0


def test_where_selects_the_compared_rows(made: tuple[TableRecord, Rows], run: Callable[..., Ran]) -> None:
    table, rows = made

    def where(row: Row) -> bool:
        return row["small"] is not None and row["small"] > 0 and row["p"] == "0"

    ran = run(table, {"unique": "dec"}, {"unique": ["p", "f"]}, {"unique": "i"}, where="small > 0 AND p = '0'")
    for key, check in zip((["dec"], ["p", "f"], ["i"]), ran.report["checks"], strict=True):
        assert (check["error"], check["violations"]) == (None, count_repeated_keys(counts(rows, key, where)))
    unknown_column = run(table, {"unique": "dec"}, {"not_null": "id"}, where="smal > 0")
    assert {c["error"] for c in unknown_column.report["checks"]} == {
        "where: none of the table's files has the column 'smal'"
    }
    unparsable = run(table, {"unique": "dec"}, where="small >")
    assert "where: cannot parse the expression" in unparsable.message


def test_keys_with_colliding_hashes_are_distinguished(
    made: tuple[TableRecord, Rows], run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.sql import functions as F

    table, rows = made
    # All keys have one of two hashes.
    monkeypatch.setattr(key_queries, "key_hash", lambda columns: F.pmod(F.xxhash64(*columns), F.lit(2)))
    # Split the table into parts, as for large tables.
    monkeypatch.setattr(key_queries, "PART_BYTES", 4_000)
    monkeypatch.setattr(key_queries, "BROADCAST_BYTES", 0)
    ran = run(table, *({"unique": key} for key in (["id"], ["i", "text"], ["dec"])), sample=100)
    again = run(table, {"references": {"column": "small", "table": "t", "to": "i"}}, tables=[table], sample=1)
    there = counts(rows, ["i"])
    alone = sum(n for key, n in counts(rows, ["small"]).items() if key not in there)
    assert alone == again.report["checks"][0]["violations"]
    for key, check in zip((["id"], ["i", "text"], ["dec"]), ran.report["checks"], strict=True):
        expected = counts(rows, key)
        assert check["violations"] == count_repeated_keys(expected)
        for sample in check["samples"]:
            row = rows[sample["partition"]][sample["file"]][sample["row_index"]]
            assert expected[key_of(row, key)] > 1


@pytest.mark.slow
def test_values_missing_in_the_referenced_table_are_counted_as_in_plain_python(
    made: tuple[TableRecord, Rows], run: Callable[..., Ran], tmp_path: Path
) -> None:
    table, rows = made
    rng = random.Random(7)
    values: dict[str, list[Any]] = {
        c: [None if rng.random() < 0.2 else _value(rng, c) for _ in range(25)] for c in ("i", "f", "dec", "text", "at")
    }
    data = {c: pa.array(v, pa.decimal128(12, 4) if c == "dec" else TYPES[c]) for c, v in values.items()}
    (tmp_path / "other" / "q=5").mkdir(parents=True)
    pq.write_table(pa.table(data), tmp_path / "other" / "q=5" / "a.parquet")
    other = TableRecord("the.other", "parquet", str(tmp_path / "other"), {"partition_types": {"q": "int"}})
    pairs = [*(([c], [c]) for c in data), (["small"], ["i"]), (["i", "text"], ["i", "text"]), (["small"], ["dec"])]
    pairs += [(["small"], ["q"]), (["none"], ["text"])]
    checks = [{"references": {"columns": own, "table": "the.other", "to": to}} for own, to in pairs]
    theirs = {"p": {"f": [{**{c: values[c][n] for c in values}, "q": 5} for n in range(25)]}}
    for mode, where, some in (("auto", None, pairs), ("never", "flag", pairs[-4:])):
        ran = run(table, *checks[-len(some) :], tables=[other], statistics=mode, sample=4, where=where)
        for (own, to), check in zip(some, ran.report["checks"], strict=True):
            mine = counts(rows, own, (lambda row: row["flag"]) if where else (lambda row: True))
            known = counts(theirs, to)
            expected = sum(n for key, n in mine.items() if key not in known)
            assert (check["error"], check["violations"], check["exact"]) == (None, expected, True), (own, to)
            assert len(check["samples"]) == min(expected, 4)
            for sample in check["samples"]:
                row = rows[sample["partition"]][sample["file"]][sample["row_index"]]
                assert key_of(row, own) not in known
            assert check["against"] == {"table": "the.other", "version": plan_table(other).version}
    # A table can refer to itself.
    again = run(table, {"references": {"column": "i", "table": "t", "to": "i"}}, tables=[table])
    assert found(again) == [("valid", 0)]


def small_table(folder: Path, *partitions: Sequence[Any], name: str = "t", column: str = "k") -> TableRecord:
    for n, values in enumerate(partitions):
        (folder / f"p={n}").mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({column: pa.array(values, pa.int32())}), folder / f"p={n}" / "a.parquet")
    return TableRecord(name, "parquet", str(folder))


def test_only_rows_of_named_partitions_are_compared(tmp_path: Path, run: Callable[..., Ran]) -> None:
    table = small_table(tmp_path / "t", [1, 2, 3], [3, 4], [5, 5])
    checks: list[dict[str, Any]] = [{"unique": "k"}, {"not_null": "k"}]
    whole = run(table, *checks)
    assert [o.name for o in whole.outcomes] == ["p=0", "p=1", "p=2", "@table"]
    assert found(whole) == [("violated", 2), ("valid", 0)]
    assert whole.report["rows"] == 7
    for names, jobs, violations in (
        (["p=0", "p=1"], ["p=0", "p=1", "@chosen"], 1),
        (["p=1"], ["p=1", "@chosen"], 0),
        (["p=0", "p=1", "p=2"], ["p=0", "p=1", "p=2", "@table"], 2),
    ):
        ran = run(table, *checks, names=names)
        assert [o.name for o in ran.outcomes] == jobs
        assert found(ran) == [("violated" if violations else "valid", violations), ("valid", 0)]
        assert ran.report["checks"][0]["scope"] == jobs[-1][1:]
    # As in a rerun of the failed job over all partitions, without the other checks.
    rerun = run(table, *checks, names=["@table"])
    assert [(c["name"], c["violations"]) for c in rerun.report["checks"]] == [("k_unique", 2)]
    assert rerun.report["rows"] == 7
    with pytest.raises(InvalidArgument, match="covers the partitions that its start named"):
        run(table, *checks, names=["@chosen"])
    with pytest.raises(InvalidArgument, match="no partition '@table'"):
        run(table, checks[1], names=["@table"])


def test_key_checks_are_decided_by_statistics_if_possible(tmp_path: Path) -> None:
    table = small_table(tmp_path / "t", [1], [None, None], [])
    other = small_table(tmp_path / "other", [2], name="o")

    def without_spark(record: TableRecord) -> FakeContext:
        ctx = FakeContext(tmp_path, record)
        ctx.tables = {"o": other}
        return ctx

    for mode in ("auto", "only"):
        ran = run_operation(Validate(), table, {"checks": [{"unique": "k"}], "statistics": mode}, without_spark)
        assert found(ran) == [("valid", 0)], "one row has a key"
        assert ran.report["checks"][0]["evidence"] == {"files_statistics": 3, "files_scanned": 0}
    checks = [{"references": {"column": "k", "table": "o", "to": "k"}}, {"unique": ["p", "k"]}]
    ran = run_operation(Validate(), table, {"checks": checks, "statistics": "only"}, without_spark)
    assert found(ran) == [("unknown", 0), ("valid", 0)]
    assert not ran.report["checks"][0]["exact"]


@pytest.mark.parametrize(
    "check",
    [
        {"unique": "k"},
        {"references": {"column": "k", "table": "o", "to": "k"}},
        {"not_null": "k"},
        {"check": "k < 3"},
        {"fits": {"column": "k", "type": "tinyint"}},
    ],
    ids=lambda check: str(next(iter(check))),
)
def test_each_kind_of_check_starts_spark_if_needed(
    check: dict[str, Any], tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check is in the first job of an executor's child. The session of the tests is hidden until the check requests
    it, and PySpark cannot create columns without it.
    """
    clear_caches()  # columns that another test has created
    table, other = small_table(tmp_path / "t", [1, 1], [2, None, 300]), small_table(tmp_path / "o", [1, 2], name="o")
    running_context = SparkContext._active_spark_context

    class StartingContext(FakeContext):
        @property
        def spark(self) -> SparkSession:
            SparkContext._active_spark_context = running_context
            return spark

    def context(table: TableRecord) -> FakeContext:
        return _context_with(lambda record: StartingContext(tmp_path, record), table, other)

    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    ran = run_operation(Validate(), table, {"checks": [check], "statistics": "auto"}, context)
    assert [(c["verdict"], c["violations"]) for c in ran.report["checks"]] == [("violated", 1)]


def test_undecidable_key_checks_have_the_reason(
    tmp_path: Path, run: Callable[..., Ran], context: Callable[[TableRecord], FakeContext]
) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    kinds = {"m": pa.map_(pa.string(), pa.int32()), "day": pa.date32(), "x": pa.float64(), "k": pa.int64()}
    data = {"m": [[("a", 1)], None], "day": [1, 2], "x": [1.5, 2.0], "k": [1, 1]}
    pq.write_table(pa.table({c: pa.array(v, kinds[c]) for c, v in data.items()}), folder / "a.parquet")
    table = TableRecord("t", "parquet", str(folder))
    other = small_table(tmp_path / "other", [1, 1], name="o")
    checks: list[dict[str, Any]] = [{"unique": "m"}, {"unique": ["k", "nowhere"]}]
    checks += [{"references": {"column": c, "table": "o", "to": "k"}} for c in ("day", "x", "k")]
    checks += [{"references": {"column": "k", "table": "o", "to": "nothing"}}]
    ran = run(table, *checks, tables=[other])
    errors = [check["error"] for check in ran.report["checks"]]
    assert errors[:2] == [
        "unique applies to columns whose values can be compared, but 'm' is map<string,int>",
        "none of the table's files has the column 'nowhere'",
    ]
    assert errors[2] == "the columns cannot be compared: 'day' is date and 'k' is int"
    assert errors[3:5] == [None, None]
    assert found(ran)[3:5] == [("violated", 2), ("valid", 0)]
    assert errors[5] == "none of the files of the table 'o' has the column 'nothing'"
    with pytest.raises(InvalidArgument, match="there is no table 'o'"):
        run(table, checks[-1])
    capped = run(table, {"unique": "k"}, max_violations=1)
    assert (found(capped), capped.report["checks"][0]["exact"]) == ([("violated", 1)], False)

    plans = Validate().jobs(
        {"checks": checks[4:5]}, plan_table(table).partitions, None, _context_with(context, table, other)
    )
    victim = tmp_path / "other" / "p=0" / "a.parquet"
    pq.write_table(pa.table({"k": pa.array([1, 2, 3, 4], pa.int32())}), victim)
    ran = run_operation(Validate(), table, {"checks": checks[4:5]}, context, partitions=plans)
    assert ran.report["checks"][0]["error"] == (
        f"the table 'o': the file {victim} has changed since the operation was planned"
    )
    good = (folder / "a.parquet").read_bytes()
    (folder / "a.parquet").write_bytes(good[:-40] + bytes(40))
    assert "is not a readable Parquet file" in run(table, {"unique": "k"}).report["checks"][0]["error"]


def _context_with(
    context: Callable[[TableRecord], FakeContext], table: TableRecord, *others: TableRecord
) -> FakeContext:
    ctx = context(table)
    ctx.tables = {other.name: other for other in others}
    return ctx


def test_a_cancelled_key_job_gives_no_verdict(
    tmp_path: Path, context: Callable[[TableRecord], FakeContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = small_table(tmp_path / "t", [1, 2], [2, 3])
    ctx = context(table)
    plans = Validate().jobs({"checks": [{"unique": "k"}]}, plan_table(table).partitions, None, ctx)
    real = key_queries.count_duplicates

    def interrupted(*given: Any) -> Any:
        ctx.stopped = True  # between the two queries
        return real(*given)

    monkeypatch.setattr(key_queries, "count_duplicates", interrupted)
    with pytest.raises(JobCancelled):
        list(Validate().run_batch({"checks": [{"unique": "k"}]}, plans, ctx))


@pytest.fixture(scope="module")
def lake(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    need(jar(), MAVEN)
    made = Lake(spark, tmp_path_factory.mktemp("lake"))
    made.create("t", "id bigint, k int, c string", "partitioned by (k)", 2)
    made.fill("t")
    made.create("codes", "code string", "", 2)
    made.sql("insert into {codes} select c from {t} where c is not null and id < 50")
    return made


def test_deleted_iceberg_rows_do_not_count_in_key_checks(lake: Lake, run: Callable[..., Ran]) -> None:
    checks: list[dict[str, Any]] = [{"unique": "id"}, {"unique": ["k", "c"]}, {"unique": "k"}]
    checks += [{"references": {"column": "c", "table": "codes", "to": "code"}}]
    table, other = lake.record("t"), lake.record("codes")
    clean = run(table, *checks, tables=[other], sample=4)
    assert found(clean) == [("valid", 0), ("valid", 0), ("violated", 97), ("violated", 40)]
    assert clean.report["rows"] == 100
    pinned = plan_table(other).version
    assert clean.report["checks"][3]["against"] == {"table": "codes", "version": pinned}
    for sample in clean.report["checks"][2]["samples"]:
        row = pq.read_table(sample["file"], partitioning=None).slice(sample["row_index"], 1).to_pylist()[0]
        assert sample["values"] == {"k": row["k"]}

    lake.sql("insert into {t} select id, k + 1, c from {t} where id in (7, 8)")
    twice = run(table, *checks[:2], where="id <> 8")
    assert found(twice) == [("violated", 1), ("valid", 0)]
    places = [sample["file"] for sample in run(table, checks[0]).report["checks"][0]["samples"]]
    assert len(set(places)) == 4, "each of the two keys is in two files"
    lake.delete("t", "id in (7, 8) and k = id % 3 + 1")
    assert lake.delete_files("t") > 0
    assert found(run(table, *checks[:2])) == [("valid", 0), ("valid", 0)]
    some = run(table, checks[0], checks[2], names=["k=0"])
    assert found(some) == [("valid", 0), ("violated", 33)]
    assert {check["scope"] for check in some.report["checks"]} == {"chosen"}
