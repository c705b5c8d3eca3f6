"""Facts of Delta tables' files: from the log as far as they are certain, and from footers where the log has none."""

from __future__ import annotations

import math
import shutil
import struct
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from distop.protocol.records import TableRecord
from distop.tables import plan_table, reader_of
from distop.tables.delta.delta_schema import DeltaField
from distop.tables.delta.file_statistics import of_partition, physical
from distop.tables.reading.file_facts import Chunk, FileFacts, Gone, Leaf, Unreadable
from distop_behaviors.validate import Validate
from tests.support.context import FakeContext, run_operation
from tests.support.delta_logs import DeltaLog, features, field, mapped, statistics, vector

if TYPE_CHECKING:
    from pathlib import Path

VECTOR = vector("^(]<&u-VY!GpVjU9LJQb")
DAY, SECOND = 86_400_000_000, 1_000_000


def leaf(kind: str, spark: str, bits: int = 64, scale: int = 0, **rest: Any) -> DeltaField:
    return DeltaField(Leaf(("x",), kind, spark, bits, scale), ("x",), **rest)


TIME, NTZ = leaf("timestamp", "timestamp", 64, 6), leaf("timestamp", "timestamp_ntz", 64, 6)
DOUBLE, FLOAT = leaf("float", "double"), leaf("float", "float", 32)
DECIMAL = leaf("decimal", "decimal(10,2)", 0, 2)
TEXT = leaf("string", "string", 0)


def facts_of(log: DeltaLog, *wanted: str) -> list[FileFacts]:
    planned = plan_table(log.record)
    files = [file for p in planned.partitions for file in p.files]
    found = reader_of(log.record, planned.partitions).facts(files, frozenset(wanted or ("id",)), lambda: None)
    assert all(isinstance(one, FileFacts) for one in found), found
    return [one for one in found if isinstance(one, FileFacts)]


def chunk_of(log: DeltaLog, name: str = "id") -> Chunk | None:
    [facts] = facts_of(log, name)
    return facts.chunks[(name,)][0] if (name,) in facts.chunks else None


# ----------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("given", "value", "low", "high"),
    [
        (leaf("int", "bigint"), 7, 7, 7),
        (leaf("int", "bigint"), True, None, None),
        (leaf("int", "bigint"), "7", None, None),
        (leaf("bool", "boolean", 1), True, True, True),
        (leaf("date", "date", 32), "1970-01-03", 2, 2),
        (leaf("date", "date", 32), date(1970, 1, 3), 2, 2),
        (leaf("date", "date", 32), "-0044-03-15", None, None),
        (leaf("date", "date", 32), "2020-02-30", None, None),
        (DECIMAL, Decimal("1.25"), 125, 125),
        (DECIMAL, 3, 300, 300),
        (DECIMAL, Decimal("1.255"), None, None),
        (DECIMAL, Decimal("1e999999999"), None, None),
        (DECIMAL, Decimal("NaN"), None, None),
        (leaf("decimal", "decimal(38,0)", 0, 0), Decimal("9" * 15), int("9" * 15), int("9" * 15)),
        (leaf("decimal", "decimal(38,0)", 0, 0), Decimal("-1" + "0" * 15), None, None),
        (TEXT, "abc", b"abc", b"abc"),
        (TEXT, 5, None, None),
        (TEXT, "\ud800", None, None),
        (DOUBLE, Decimal("0.1"), 0.1, 0.1),
        (DOUBLE, "NaN", None, None),
        (DOUBLE, "-Infinity", -math.inf, -math.inf),
        (DOUBLE, Decimal("1e999"), None, None),
        (leaf("binary", "binary", 0), "abc", None, None),
        (leaf("other", "variant", 0), "abc", None, None),
    ],
)
def test_a_bound_is_read_by_its_type(given: DeltaField, value: Any, low: Any, high: Any) -> None:
    assert physical(given, value, highest=False) == low
    assert physical(given, value, highest=True) == high


def test_the_bound_of_a_float_is_the_nearest_float() -> None:
    nearest = struct.unpack("f", struct.pack("f", 0.1))[0]
    assert physical(FLOAT, Decimal("0.1"), highest=True) == nearest
    # Older files of a column that was a float have its text, but its value is the float's.
    widened = leaf("float", "double", widened=True)
    assert physical(widened, Decimal("0.1"), highest=False) == 0.1
    assert physical(widened, Decimal("0.1"), highest=True) == nearest > 0.1


@pytest.mark.parametrize(
    ("given", "value", "micros"),
    [
        (TIME, "1970-01-02T00:00:01.500Z", DAY + SECOND * 3 // 2),
        (TIME, "1970-01-02T05:30:00.000+05:30", DAY),
        (TIME, "1969-12-31T19:00:00.000-05:00", None),
        (TIME, datetime(1970, 1, 2, tzinfo=UTC), DAY),
        (NTZ, "1970-01-02T00:00:00.000", DAY),
        (NTZ, "1970-01-02", DAY),
        (NTZ, datetime(1970, 1, 2), DAY),  # noqa: DTZ001
    ],
)
def test_a_maximum_time_may_have_lost_its_microseconds(given: DeltaField, value: Any, micros: int | None) -> None:
    slack = 59_999_999 if isinstance(value, str) and value.endswith(("+05:30", "-05:00")) else 0
    start = micros if micros is not None else 0
    assert physical(given, value, highest=False) == start - slack
    assert physical(given, value, highest=True) == start + 999 + slack


@pytest.mark.parametrize(
    ("given", "value"),
    [(TIME, "1970-01-02T00:00:00.000"), (NTZ, "1970-01-02T00:00:00.000Z"), (TIME, "+12020-01-01T00:00:00Z")],
)
def test_a_time_whose_meaning_is_uncertain_is_no_bound(given: DeltaField, value: str) -> None:
    assert physical(given, value, highest=True) is None


def test_the_offset_of_a_recent_time_is_exact() -> None:
    found = physical(TIME, "2020-01-01T05:45:00.000+05:45", highest=False)
    assert found == datetime(2020, 1, 1, tzinfo=UTC).timestamp() * SECOND
    # An offset with seconds, before time zones had whole minutes.
    low = physical(TIME, "1900-01-01T05:41:16.000+05:41:16", highest=False)
    assert low == datetime(1900, 1, 1, tzinfo=UTC).timestamp() * SECOND - 59_999_999


def test_a_maximum_text_that_was_cut_inside_of_a_character_is_no_bound() -> None:
    assert physical(TEXT, "abc?\U0010ffff", highest=True) is None
    assert physical(TEXT, "abc\x7f", highest=True) == b"abc\x7f"
    assert physical(TEXT, "why?", highest=True) == b"why?"


def test_a_maximum_text_of_an_old_release_may_be_too_small() -> None:
    """Such a release puts the character after the first 32 ones: also if the next one is a four-byte character."""
    assert physical(TEXT, "a" * 32 + "\ufffd", highest=True) is None
    assert physical(TEXT, "a" * 32 + "\ufffd", highest=False) == ("a" * 32 + "\ufffd").encode()


@pytest.mark.parametrize(
    ("given", "text", "value"),
    [
        (leaf("int", "int", 32), "-7", -7),
        (leaf("int", "tinyint", 32), "128", None),
        (leaf("int", "int", 32), "7.0", None),
        (TEXT, "a/b", b"a/b"),
        (TEXT, "", None),
        (leaf("date", "date", 32), "1970-01-02", 1),
        (leaf("date", "date", 32), "1970-02-30", None),
        (leaf("bool", "boolean", 1), "true", True),
        (DECIMAL, "1.5", 150),
        (DECIMAL, "123456789012", None),
        (TIME, "1970-01-01 00:00:00", None),
        (DOUBLE, "1.5", None),
    ],
)
def test_a_partition_value_is_the_value_of_all_rows(given: DeltaField, text: str, value: Any) -> None:
    found = of_partition(given, text, 9)
    assert found == (None if value is None else Chunk(9, 0, value, value, nans=0))
    assert of_partition(given, None, 9) == Chunk(9, 9)


# ----------------------------------------------------------------- what is certain


BOUNDS = {"minValues": {"id": 1}, "maxValues": {"id": 3}}


@pytest.mark.parametrize("tight", [True, None])
def test_bounds_of_a_file_without_deleted_rows_are_values(tight: bool | None, tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create()
    given = {} if tight is None else {"tightBounds": tight}
    log.commit(log.add("a.parquet", stats=statistics(3, nullCount={"id": 1}, **BOUNDS, **given)))
    assert chunk_of(log) == Chunk(3, 1, 1, 3, tight=True)


@pytest.mark.parametrize(("nulls", "known"), [(0, 0), (1, None), (3, 3), (4, None), (-1, None)])
@pytest.mark.parametrize("tight", [False, None])
def test_after_rows_were_deleted_only_none_and_all_are_known(
    nulls: int, known: int | None, tight: bool | None, tmp_path: Path
) -> None:
    log = DeltaLog(tmp_path / "t").create(features("deletionVectors"))
    given = {} if tight is None else {"tightBounds": tight}
    stats = statistics(3, nullCount={"id": nulls}, **BOUNDS, **given)
    log.commit(log.add("a.parquet", stats=stats, deletionVector=VECTOR))
    assert chunk_of(log) == Chunk(3, known, 1, 3, tight=False)
    [facts] = facts_of(log)
    assert (facts.rows, facts.deleted, facts.live_rows) == (3, 1, 2)


def test_bounds_that_may_be_wider_are_no_values(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create(fields=[field("id", "long"), field("s", "string"), field("f", "double")])
    values = {"id": 1, "s": "a", "f": 1.5}
    stats = statistics(3, minValues=values, maxValues=values, nullCount={"id": 2}, tightBounds=False)
    log.commit(log.add("a.parquet", stats=stats))
    assert chunk_of(log) == Chunk(3, None, 1, 1, tight=False)
    log.commit(log.add("a.parquet", stats=statistics(3, minValues=values, maxValues=values)))
    assert chunk_of(log, "id") == Chunk(3, None, 1, 1, tight=True)
    assert chunk_of(log, "s") == Chunk(3, None, b"a", b"a", tight=False)
    assert chunk_of(log, "f") == Chunk(3, None, 1.5, 1.5, tight=False)


def test_a_log_that_deletes_more_rows_than_a_file_has_is_an_error(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create(features("deletionVectors"))
    log.commit(log.add("a.parquet", deletionVector=VECTOR | {"cardinality": 4}))
    planned = plan_table(log.record)
    reader = reader_of(log.record, planned.partitions)
    [found] = reader.facts(planned.partitions[0].files, frozenset(), lambda: None)
    assert isinstance(found, Unreadable)
    assert "deletes 4 rows of the file" in str(found)


@pytest.mark.parametrize("stats", ["{", "[]", "7", '{"numRecords": -1}', '{"numRecords": "3"}', "[" * 100_000, None])
def test_without_valid_statistics_the_footer_has_the_facts(stats: str | None, tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create()
    log.commit(log.add("a.parquet", stats=stats))
    [facts] = facts_of(log)
    assert (facts.rows, facts.deleted) == (3, 0)
    assert facts.chunks[("id",)] == (Chunk(3, 0, 1, 3),)


def test_a_file_without_statistics_has_its_partition_and_its_deleted_rows(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create(
        features("deletionVectors"), fields=[field("id", "long"), field("k", "integer")], partitions=("k",)
    )
    log.commit(log.add("a.parquet", stats=None, partitionValues={"k": "5"}, deletionVector=VECTOR))
    [facts] = facts_of(log, "id", "k")
    assert (facts.rows, facts.deleted) == (3, 1)
    assert facts.chunks[("k",)] == (Chunk(3, 0, 5, 5, nans=0),)
    assert facts.chunks[("id",)][0].low == 1


# ----------------------------------------------------------------- names


@pytest.mark.parametrize("mode", ["name", "id"])
def test_columns_are_found_by_their_names_in_files_or_their_ids(mode: str, tmp_path: Path) -> None:
    inner = {"type": "struct", "fields": [mapped("deep", "integer", 3, "c3")]}
    log = DeltaLog(tmp_path / "t").create(
        features("columnMapping"),
        fields=[mapped("id", "long", 1, "c1"), mapped("s", inner, 2, "c2"), mapped("new", "long", 4, "c4")],
        configuration={"delta.columnMapping.mode": mode},
    )
    in_file = {"name": ("c1", "c2", "c3"), "id": ("any", "other", "names")}[mode]

    def numbered(name: str, kind: pa.DataType, number: int) -> pa.Field:
        return pa.field(name, kind, metadata={"PARQUET:field_id": str(number)})

    struct_type = pa.struct([numbered(in_file[2], pa.int32(), 3)])
    schema = pa.schema([numbered(in_file[0], pa.int64(), 1), numbered(in_file[1], struct_type, 2)])
    data = pa.table([[5, 6, None], [{in_file[2]: 1}, None, {in_file[2]: 2}]], schema=schema)
    bounds = {"c1": 5, "c2": {"c3": 1}}
    log.commit(log.add("a.parquet", data, stats=statistics(3, minValues=bounds, nullCount={"c1": 1, "c2": {"c3": 1}})))
    planned = plan_table(log.record)
    reader = reader_of(log.record, planned.partitions)
    wanted = frozenset({"id", "s", "new"})
    [facts] = reader.facts(planned.partitions[0].files, wanted, lambda: None)
    assert isinstance(facts, FileFacts)
    assert dict(facts.chunks) == {("id",): (Chunk(3, 1, 5),), ("s", "deep"): (Chunk(3, 1, 1),)}
    [found] = reader.precise_facts([facts], wanted, lambda: None).values()
    assert found.precise is not None
    assert found.precise.chunks[("id",)] == (Chunk(3, 1, 5, 6),)
    assert found.precise.chunks[("s", "deep")] == (Chunk(3, 1, 1, 2),)
    # The file is older than the column.
    assert found.precise.chunks[("new",)] == (Chunk(3, 3),)


def test_a_file_without_ids_says_nothing_about_a_table_mapped_by_id(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create(
        features("columnMapping"),
        fields=[mapped("id", "long", 1, "c1")],
        configuration={"delta.columnMapping.mode": "id"},
    )
    log.commit(log.add("a.parquet", pa.table({"c1": [1, 2, 3]})))
    planned = plan_table(log.record)
    reader = reader_of(log.record, planned.partitions)
    found = reader.facts(planned.partitions[0].files, frozenset({"id"}), lambda: None)
    assert reader.precise_facts([f for f in found if isinstance(f, FileFacts)], frozenset({"id"}), lambda: None) == {}


def test_a_column_with_a_default_is_not_null_in_older_files(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create(fields=[field("id", "long"), field("d", "long", EXISTS_DEFAULT="7")])
    log.commit(log.add("a.parquet"))
    planned = plan_table(log.record)
    reader = reader_of(log.record, planned.partitions)
    found = reader.facts(planned.partitions[0].files, frozenset({"d"}), lambda: None)
    facts = [f for f in found if isinstance(f, FileFacts)]
    [precise] = reader.precise_facts(facts, frozenset({"d"}), lambda: None).values()
    assert precise.precise is not None
    assert ("d",) not in precise.precise.chunks


# ----------------------------------------------------------------- files


def test_a_removed_or_changed_file_is_not_judged_by_its_statistics(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create()
    log.commit(log.add("a.parquet"), log.add("b.parquet"))
    planned = plan_table(log.record)
    (log.root / "a.parquet").unlink()
    (log.root / "b.parquet").write_bytes(b"short")
    reader = reader_of(log.record, planned.partitions)
    files = planned.partitions[0].files
    first, second = reader.facts(files, frozenset(), lambda: None)
    assert isinstance(first, Gone)
    assert "the table was vacuumed, or dropped" in str(first)
    assert isinstance(second, Unreadable)
    assert "was truncated or overwritten" in str(second)
    assert list(reader.not_present(None, files, lambda: None)) == [path for path, _, _ in files]  # type: ignore[arg-type]


def test_the_log_of_another_writer_gives_the_same_facts_as_its_footers(tmp_path: Path) -> None:
    data = pa.table(
        {
            "i": pa.array([3, None, 1, 2], pa.int32()),
            "f": pa.array([1.5, math.nan, None, -2.0]),
            "s": ["b", "a", None, "x" * 100],
            "d": pa.array([date(2020, 1, 1), None, date(1999, 1, 1), None]),
            "t": pa.array([datetime(2020, 1, 1, 1, 2, 3, 456_789, tzinfo=UTC)] * 4, pa.timestamp("us", "UTC")),
            "n": pa.array([Decimal("1.25"), Decimal("-3.50"), None, None], pa.decimal128(9, 2)),
            "b": [True, None, False, True],
        }
    )
    write_deltalake(tmp_path, data)
    record = TableRecord("t", "delta", str(tmp_path))
    planned = plan_table(record)
    [file] = planned.partitions[0].files
    reader = reader_of(record, planned.partitions)
    [facts] = reader.facts([file], frozenset(data.column_names), lambda: None)
    assert isinstance(facts, FileFacts)
    footer = pq.read_metadata(file[0]).row_group(0)
    assert facts.rows == 4
    for n, name in enumerate(data.column_names):
        [chunk] = facts.chunks.get((name,), (Chunk(4, None),))
        own = footer.column(n).statistics
        assert chunk.nulls in (None, data[name].null_count)
        if chunk.low is not None and name in ("i", "f", "b"):
            assert chunk.low <= own.min
        if chunk.high is not None and name in ("i", "f", "b"):
            assert chunk.high >= own.max
    assert facts.chunks[("i",)] == (Chunk(4, 1, 1, 3),)
    assert facts.chunks[("n",)][0].low == -350


@pytest.mark.parametrize(
    ("kind", "value", "allowed"),
    [
        (pa.decimal128(20, 0), "42660387334225015373", "10000000000000000000"),
        (pa.decimal128(18, 2), "9007199254740995.37", "9007199254740995.36"),
        (pa.decimal128(38, 9), "27393049783263564224.935201670", "27393049783263564224.935201669"),
    ],
    ids=str,
)
def test_a_writer_that_rounds_the_bounds_of_decimals_makes_no_check_valid(
    kind: pa.DataType, value: str, allowed: str, tmp_path: Path
) -> None:
    """delta-rs writes them as 64-bit floats, and whole ones as 64-bit integers. So a maximum may be too small."""
    write_deltalake(tmp_path / "t", pa.table({"n": pa.array([Decimal(value)], kind)}))
    record = TableRecord("t", "delta", str(tmp_path / "t"))
    checks = [{"range": {"column": "n", "max": allowed}}, {"range": {"column": "n", "max": value}}]
    found = [verdict for verdict, _, _ in verdicts(record, tmp_path / "work", *checks, statistics="only")]
    # By the footer, or by a scan if the footer has no bounds.
    assert found == (["violated", "valid"] if kind.precision == 18 else ["unknown", "unknown"])


def test_a_text_of_a_fixed_length_has_no_bounds(tmp_path: Path) -> None:
    """Spark pads ``ab`` of another writer with spaces, and then it is after ``ab``."""
    column = field("c", "string", __CHAR_VARCHAR_TYPE_STRING="char(5)")
    log = DeltaLog(tmp_path / "t").create(fields=[field("id", "long"), column])
    bounds = {"nullCount": {"c": 0}, "minValues": {"c": "ab"}, "maxValues": {"c": "ab"}}
    log.commit(log.add("a.parquet", pa.table({"c": ["ab"] * 3}), stats=statistics(3, **bounds)))
    checks = [{"range": {"column": "c", "max": "ab"}}, {"not_null": "c"}]
    found = [verdict for verdict, _, _ in verdicts(log.record, tmp_path / "work", *checks, statistics="only")]
    assert found == ["unknown", "valid"]


# ----------------------------------------------------------------- validate


def verdicts(record: TableRecord, work: Path, *checks: dict[str, Any], **arg: Any) -> list[tuple[str, int, bool]]:
    work.mkdir(exist_ok=True)
    argument = {"checks": list(checks), **arg}
    ran = run_operation(Validate(), record, argument, lambda table: FakeContext(work, table))
    return [(c["verdict"], c["violations"], c["exact"]) for c in ran.report["checks"]]


def test_validate_decides_from_the_log_without_spark(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "t", pa.table({"id": [1, 2, 3], "c": ["a", None, None], "k": [1, 1, 2]}))
    write_deltalake(tmp_path / "t", pa.table({"id": [4], "c": ["b"], "k": [3]}), mode="append")
    record = TableRecord("t", "delta", str(tmp_path / "t"))
    checks = [{"not_null": "id"}, {"not_null": "c"}, {"range": {"column": "id", "min": 1, "max": 9}}]
    found = verdicts(record, tmp_path / "work", *checks, statistics="only")
    assert found == [("valid", 0, True), ("violated", 2, True), ("valid", 0, True)]


def test_a_certificate_of_a_version_covers_its_files(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "t", pa.table({"id": [1, 2, 3]}))
    record = TableRecord("t", "delta", str(tmp_path / "t"))
    (tmp_path / "work").mkdir()

    def run(**arg: Any) -> Any:
        argument = {"checks": [{"not_null": "id"}], **arg}
        return run_operation(Validate(), record, argument, lambda table: FakeContext(tmp_path / "work", table)).report

    first = run()
    certificate = first["certificate"]
    assert certificate["version"].startswith("0-")
    assert certificate["metadata"].endswith(f"_delta_log/{0:020}.json")
    assert certificate["columns"]["id"]["type"] == "long"
    write_deltalake(tmp_path / "t", pa.table({"id": [4, 5]}), mode="append")
    second = run(since=certificate)
    assert (second["rows"], second["certificate"]["rows"]) == (2, 5)
    third = run(since=second["certificate"])
    assert (third["rows"], third["certificate"]["rows"]) == (0, 5)


def test_a_table_that_replaces_the_planned_one_gets_no_certificate(tmp_path: Path) -> None:
    """Both have version 0. The planned one has no files, so no job misses any."""
    place = tmp_path / "t"
    DeltaTable.create(place, pa.schema([("id", pa.int64())]))

    class Replaced(Validate):
        def partitions(self, table: TableRecord, arg: Any, ctx: Any) -> Any:
            planned = super().partitions(table, arg, ctx)
            shutil.rmtree(place)
            write_deltalake(place, pa.table({"id": pa.array([None, 1], pa.int64())}))
            return planned

    (tmp_path / "work").mkdir()
    record = TableRecord("t", "delta", str(place))
    ran = run_operation(
        Replaced(), record, {"checks": [{"not_null": "id"}]}, lambda table: FakeContext(tmp_path / "work", table)
    )
    assert ran.report["certificate"] is None
    assert "another table has replaced the one whose version 0-" in ran.report["uncertified"]


def test_rows_that_another_writer_deleted_are_not_counted(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "t", pa.table({"id": [1, 2, 3], "c": ["a", None, "b"]}))
    DeltaTable(tmp_path / "t").delete("c is null")
    record = TableRecord("t", "delta", str(tmp_path / "t"))
    assert verdicts(record, tmp_path / "work", {"not_null": "c"}) == [("valid", 0, True)]
