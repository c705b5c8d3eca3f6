"""Iceberg's manifests and footers as statistics, on tables that pyiceberg writes. No Spark."""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import (
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
    TimeType,
    UUIDType,
)

from distop.protocol.records import TableRecord
from distop.tables import plan_table
from distop.tables.iceberg import footer_fallback, manifest_facts
from distop.tables.iceberg.iceberg_fields import columns_of, fields_of, physical, spark_type
from distop.tables.iceberg.iceberg_rows import split_size
from distop.tables.iceberg.row_deletes import EQUALITY, POSITIONS, DeleteFile, Deletes, partition_of
from distop.tables.reading.file_facts import Chunk, FileFacts, Gone, Unreadable
from distop.tables.staged_files import FOLDER
from distop_behaviors.validate import Validate
from distop_behaviors.validate.statistics import PASS, UNKNOWN, StatisticsDecision, decide
from distop_behaviors.validate.validate_argument import Check
from tests.support.context import FakeContext, run_operation
from tests.support.evolving_tables import evolve
from tests.support.lake import Folder
from tests.support.slow_cases import mostly_slow

if TYPE_CHECKING:
    from pathlib import Path

    from pyiceberg.table import Table

    from tests.support.context import Ran

SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=False),
    NestedField(2, "c", StringType(), required=False),
    NestedField(3, "x", DoubleType(), required=False),
)
BY_C = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "c"))


def record(path: Path) -> TableRecord:
    return TableRecord("t", "iceberg", str(path))


def alone(path: Path, *checks: dict[str, Any], partitions: Any = None) -> Ran:
    """Validate by statistics alone, in a context without Spark."""
    argument = {"checks": list(checks), "statistics": "only"}
    return run_operation(
        Validate(), record(path), argument, lambda table: FakeContext(path, table), partitions=partitions
    )


def verdicts(ran: Ran) -> list[tuple[str, int, bool]]:
    return [(c["verdict"], c["violations"], c["exact"]) for c in ran.report["checks"]]


def facts(table: Table, *columns: str) -> list[FileFacts]:
    (plan,) = plan_table(record(table.catalog.root)).partitions  # type: ignore[attr-defined]
    snapshot = manifest_facts.snapshot_of(table.metadata_location, frozenset(columns))
    return [snapshot.of(file) for file in plan.files]


@pytest.mark.parametrize("seed", mostly_slow(range(30), 10))
def test_statistics_alone_give_no_wrong_verdict(seed: int, tmp_path: Path) -> None:
    made = evolve(seed, tmp_path, version=1 if seed % 5 == 0 else 2)
    ran = alone(tmp_path, *({**case.check, "name": f"c{n}"} for n, case in enumerate(made.cases)))
    assert ran.report["rows"] == len(made.rows)
    for case, entry in zip(made.cases, ran.report["checks"], strict=True):
        actual, count = sum(map(case.violates, made.rows)), entry["violations"]
        assert entry["error"] is None
        if entry["verdict"] == "valid":
            assert actual == 0, (seed, case.check)
        elif entry["verdict"] == "violated":
            assert 0 < count <= actual, (seed, case.check)
            assert count == actual or not entry["exact"], (seed, case.check)
        # The footers have the null counts that manifests omit.
        assert entry["verdict"] != "unknown" or case.check.get("not_null", "s.").startswith("s."), (seed, case.check)


def test_columns_are_found_by_their_ids(tmp_path: Path) -> None:
    table = Folder(tmp_path).new(SCHEMA)
    table.append(pa.table({"id": [1, 2], "c": ["a", None], "x": [1.0, 2.0]}))
    with table.update_schema() as update:
        update.rename_column("c", "d")
    with table.update_schema() as update:
        update.add_column("c", StringType())
        update.move_first("x")
    table.append(pa.table({"x": [3.0], "id": [3], "d": ["b"], "c": ["q"]}))
    assert verdicts(alone(tmp_path, {"not_null": "c"}, {"not_null": "d"}, {"range": {"column": "x", "min": 1}})) == [
        ("violated", 2, True),
        ("violated", 1, True),
        ("valid", 0, True),
    ]
    old, _ = sorted(facts(table, "c", "d"), key=lambda f: -f.rows)
    # There are no facts of a column that the file does not have; its footer shows that.
    assert ("c",) not in old.chunks
    assert old.chunks["d",] == (Chunk(2, 1, b"a", b"a", tight=False),)


def test_statistics_that_a_metrics_mode_omits_are_read_from_footers(tmp_path: Path) -> None:
    modes = {"id": "none", "c": "counts", "x": "none"}
    table = Folder(tmp_path).new(SCHEMA, **{f"write.metadata.metrics.column.{c}": mode for c, mode in modes.items()})
    table.append(pa.table({"id": [1, 2, None], "c": ["a", "b", "c"], "x": [1.0, 2.0, 3.0]}))
    (known,) = facts(table, "id", "c", "x")
    assert dict(known.chunks) == {("c",): (Chunk(3, 0, tight=False),)}
    checks: list[dict[str, Any]] = [{"not_null": "id"}, {"range": {"column": "c", "min": "a"}}]
    assert verdicts(alone(tmp_path, *checks)) == [("violated", 1, True), ("valid", 0, True)]


def test_bounds_of_texts_are_trusted_for_a_single_row_group_only(tmp_path: Path) -> None:
    # Parquet has no bounds of texts over 4 KiB, and pyiceberg uses those of the other row groups for the file.
    table = Folder(tmp_path).new(SCHEMA, **{"write.parquet.row-group-limit": "1"})
    table.append(pa.table({"id": [1, 2], "c": ["a", "z" * 5_000], "x": [1.0, 2.0]}))
    (known,) = facts(table, "c", "id")
    assert known.chunks["c",] == (Chunk(2, 0, tight=False),)
    assert known.chunks["id",] == (Chunk(2, 0, 1, 2, tight=False),)
    ran = alone(tmp_path, {"range": {"column": "c", "max": "b"}}, {"range": {"column": "id", "max": 1}})
    assert verdicts(ran) == [("unknown", 0, False), ("violated", 1, True)]


def test_a_truncated_bound_proves_no_violation(tmp_path: Path) -> None:
    table = Folder(tmp_path).new(SCHEMA, **{"write.metadata.metrics.column.c": "truncate(2)"})
    table.append(pa.table({"id": [1], "c": ["abc"], "x": [1.0]}))
    (known,) = facts(table, "c")
    assert known.chunks["c",] == (Chunk(1, 0, b"ab", b"ac", tight=False),)

    def say(**bounds: str) -> StatisticsDecision:
        return decide(Check.model_validate({"range": {"column": "c", **bounds}}), known)

    assert say(min="ab", max="ac") == PASS
    assert say(min="abc") == UNKNOWN
    assert say(max="aa") == StatisticsDecision("violated", 1)


def chunk(**of: Any) -> FileFacts:
    schema = Schema(NestedField(1, "x", of.pop("type", DoubleType()), required=False))
    leaves = {path: field.leaf for path, field in fields_of(schema, frozenset({"x"})).items()}
    return FileFacts("f", 5, columns_of(schema), leaves, {("x",): (Chunk(5, **of, tight=False),)})


@pytest.mark.parametrize(
    ("bounds", "known", "expected"),
    [
        ({"max": 9}, {"nulls": 0, "low": 1.0, "high": 2.0, "nans": 0}, PASS),
        ({"max": 9}, {"nulls": 0, "low": 1.0, "high": 2.0, "nans": 2}, StatisticsDecision("violated", 2)),
        ({"max": 9}, {"nulls": 0, "low": 1.0, "high": 2.0}, UNKNOWN),
        ({"min": 0}, {"nulls": 0, "low": 1.0, "high": 2.0, "nans": 2}, PASS),
        # NaN is above every bound: it violates a maximum, and no minimum.
        ({"min": 3}, {"nulls": 1, "low": 1.0, "high": 2.0, "nans": 2}, StatisticsDecision("violated", 2)),
        ({"min": 3, "max": 9}, {"nulls": 1, "low": 1.0, "high": 2.0, "nans": 2}, StatisticsDecision("violated", 4)),
        ({"min": 3}, {"nulls": 1, "low": 1.0, "high": 2.0}, UNKNOWN),
        ({"max": 0}, {"nulls": 1, "low": 1.0, "high": 2.0}, StatisticsDecision("violated", 4)),
        # Writers may widen bounds, so a bound outside of the range proves nothing about a row.
        ({"max": 1.5}, {"nulls": 0, "low": 1.0, "high": 2.0, "nans": 0}, UNKNOWN),
        ({"max": 9}, {"nulls": 0, "low": math.nan, "high": math.nan, "nans": 0}, UNKNOWN),
        ({"max": 9}, {"nulls": 5}, PASS),
    ],
)
def test_ranges_are_decided_by_bounds_of_manifests(bounds: Any, known: Any, expected: StatisticsDecision) -> None:
    assert decide(Check.model_validate({"range": {"column": "x", **bounds}}), chunk(**known)) == expected


def test_sets_are_decided_by_loose_bounds_only_if_these_are_equal_or_exclude_all_values() -> None:
    check = Check.model_validate({"in_set": {"column": "x", "values": [3]}})
    for low, high, expected in ((3, 3, PASS), (4, 9, StatisticsDecision("violated", 5)), (3, 9, UNKNOWN)):
        assert decide(check, chunk(type=IntegerType(), nulls=0, low=low, high=high)) == expected


def test_rows_that_may_be_deleted_prove_only_a_pass() -> None:
    leaves, columns = chunk(nulls=0).leaves, {"x": "double"}
    for nulls, deleted, expected in (
        (0, None, PASS),
        (2, None, UNKNOWN),
        (2, 1, UNKNOWN),
        (2, 5, PASS),
        (2, 0, StatisticsDecision("violated", 2)),
    ):
        file = FileFacts("f", 5, columns, leaves, {("x",): (Chunk(5, nulls, tight=False),)}, deleted)
        assert decide(Check(not_null="x"), file) == expected
        assert file.live_rows == (None if deleted is None else 5 - deleted)


def delete(content: int, partition: Any = (0, ()), sequence: int | None = 5, **of: Any) -> Deletes:
    found = Deletes()
    found.add(DeleteFile(content, partition, sequence, **of))
    return found


def test_deletes_apply_to_files_by_sequence_number_partition_and_path() -> None:
    here, there = partition_of(0, ["a", math.nan]), partition_of(0, ["b", math.nan])
    again = partition_of(0, ["a", math.nan])
    assert Deletes().of("f", here, 1) == 0
    # By sequence number: equality deletes do not apply to files of the same one.
    assert [delete(POSITIONS, here).of("f", again, n) for n in (4, 5, 6, None)] == [None, None, 0, None]
    assert [delete(EQUALITY, here).of("f", again, n) for n in (4, 5, 6, None)] == [None, 0, 0, None]
    assert delete(EQUALITY, here, None).of("f", here, 9) is None
    # By partition, unless it is an equality delete of a spec without partitions.
    assert delete(POSITIONS, here).of("f", there, 1) == 0
    assert delete(EQUALITY, here).of("f", there, 1) == 0
    assert delete(EQUALITY, (1, ("a",))).of("f", here, 1) == 0
    assert delete(EQUALITY, (1, ()), everywhere=True).of("f", here, 1) is None
    # By the paths that it names.
    assert delete(POSITIONS, here, target="g").of("f", here, 1) == 0
    assert delete(POSITIONS, there, target="f").of("f", here, 1) is None
    assert [delete(POSITIONS, here, low=b"f", high=b"h").of(f, here, 1) for f in "efhi"] == [0, None, None, 0]


def test_a_deletion_vector_gives_the_number_of_deleted_rows_unless_other_deletes_apply() -> None:
    found = delete(POSITIONS, vector=True, target="f", rows=3)
    assert (found.of("f", (0, ()), 1), found.of("g", (0, ()), 1)) == (3, 0)
    found.add(DeleteFile(EQUALITY, (0, ()), 4))
    assert (found.of("f", (0, ()), 3), found.of("f", (0, ()), 4)) == (None, 3)


def test_delete_files_that_apply_are_counted_and_taken_once() -> None:
    here, there = partition_of(0, ["a"]), partition_of(0, ["b"])
    found = Deletes()
    for n, one in enumerate(
        (
            DeleteFile(EQUALITY, here, 4),
            DeleteFile(EQUALITY, there, 4),
            DeleteFile(EQUALITY, (1, ()), 3, everywhere=True),
            DeleteFile(POSITIONS, here, 4, target="f"),
            DeleteFile(POSITIONS, here, 4, low=b"f", high=b"h"),
            DeleteFile(POSITIONS, here, 2),
        )
    ):
        found.add(replace(one, rows=1 << n))
    assert [found.count("f", here, n) for n in (None, 1, 2, 3, 4, 5)] == [5, 5, 5, 3, 2, 0]
    assert [found.count("g", where, 3) for where in (here, there)] == [2, 1]

    # Files of compact have the sequence number of the snapshot that was read.
    assert [found.count(f"/t/data/{FOLDER}/f", here, n) for n in (1, 2, 3, 4)] == [3, 2, 1, 0]

    def taken(path: str, partition: Any, sequence: int) -> int:
        return sum(one.rows for one in found.take(path, partition, sequence))

    assert taken("f", here, 4) == 8 + 16
    assert taken("f", here, 3) == 1
    assert taken("g", there, 1) == 2 + 4
    assert [taken("g", here, n) for n in (3, 1, 1)] == [0, 32, 0]


def test_values_of_a_partition_are_those_of_its_rows(tmp_path: Path) -> None:
    table = Folder(tmp_path).new(SCHEMA, BY_C, **{"write.metadata.metrics.default": "none"})
    table.append(pa.table({"id": [1, 2, 3], "c": ["a", "b", None], "x": [1.0, 2.0, 3.0]}))
    ran = alone(
        tmp_path, {"not_null": "c"}, {"range": {"column": "c", "max": "a"}}, {"length": {"column": "c", "max": 9}}
    )
    assert verdicts(ran) == [("violated", 1, True), ("violated", 1, True), ("unknown", 0, False)]
    assert [c["verdict"] for c in ran.by_name["c=__HIVE_DEFAULT_PARTITION__"].result["checks"]] == [
        "violated",
        "valid",
        "valid",
    ]


def test_bounds_that_were_written_before_a_column_was_widened_are_decoded() -> None:
    schema = Schema(
        NestedField(1, "n", LongType(), required=False),
        NestedField(2, "d", DoubleType(), required=False),
        NestedField(3, "m", DecimalType(38, 2), required=False),
        NestedField(4, "u", UUIDType(), required=False),
        NestedField(5, "at", TimestampType(), required=False),
        NestedField(6, "t", TimeType(), required=False),
    )
    of = {path[0]: field for path, field in fields_of(schema, frozenset("ndmut") | {"at"}).items()}
    assert physical(of["n"], (-7).to_bytes(4, "little", signed=True)) == -7
    assert physical(of["d"], b"\0\0\xc0\x3f") == 1.5
    assert physical(of["m"], (-250).to_bytes(2, "big", signed=True)) == -250
    # Days of a column that became a timestamp, and types without an order here.
    assert physical(of["at"], b"\1\0\0\0") is None
    assert physical(of["u"], bytes(16)) is None
    assert physical(of["t"], bytes(8)) is None
    assert physical(of["n"], None) is None
    assert of["t"].leaf.type == ""


IDS = b"PARQUET:field_id"


def written(path: Path, ids: dict[str, int], **columns: Any) -> FileFacts:
    """Write a file; return the facts of a manifest without metrics."""
    arrays = {name: pa.array(values) for name, values in columns.items()}
    metadata = {name: {IDS: str(ids[name])} if name in ids else None for name in arrays}
    schema = pa.schema([pa.field(n, a.type, metadata=metadata[n]) for n, a in arrays.items()])
    pq.write_table(pa.table(arrays, schema=schema), path)
    return FileFacts(f"file://{path}", len(next(iter(columns.values()))))


def test_a_column_whose_id_a_footer_does_not_have_is_null_unless_it_has_a_default(tmp_path: Path) -> None:
    schema = Schema(
        NestedField(1, "a", LongType(), required=False),
        NestedField(2, "b", LongType(), required=False),
        NestedField(3, "given", LongType(), required=False, initial_default=7, write_default=7),
        NestedField(4, "s", StructType(NestedField(5, "leaf", LongType())), required=False),
        NestedField(6, "k", StringType(), required=False),
    )
    wanted = fields_of(schema, frozenset({"a", "b", "given", "s", "k"}))
    one = written(tmp_path / "1.parquet", {"b": 1, "x": 9}, b=[1, None], a=[5, 6], x=[1, 1])
    # An import: Iceberg takes the column of its partition from the manifest.
    imported = FileFacts(one.path, 2, chunks={("k",): (Chunk(2, 0, b"v", b"v"),)})
    other = written(tmp_path / "2.parquet", {}, a=[1, 2], b=[3, 4])
    gone = FileFacts(str(tmp_path / "3.parquet"), 2)
    more = FileFacts(one.path, 3)
    found = footer_fallback.with_footers([imported], wanted)[one.path].precise
    assert found is not None
    assert found.chunks["a",] == (Chunk(2, 1, 1, 1),)
    assert found.chunks["b",] == (Chunk(2, 2),)
    assert found.chunks["k",] == (Chunk(2, 0, b"v", b"v"),)
    assert ("given",) not in found.chunks
    assert ("s", "leaf") not in found.chunks
    # Columns without ids, a missing file, and a file with another number of rows.
    assert footer_fallback.with_footers([other, gone, more], wanted) == {}


def test_values_in_a_footer_of_another_type_are_not_trusted(tmp_path: Path) -> None:
    schema = Schema(NestedField(1, "a", LongType(), required=False), NestedField(2, "t", TimestampType()))
    wanted = fields_of(schema, frozenset({"a", "t"}))
    at = pa.array([0, 1], pa.timestamp("us", "UTC"))
    file = written(tmp_path / "1.parquet", {"a": 1, "t": 2}, a=["x", "y"], t=at)
    found = footer_fallback.with_footers([file], wanted)[file.path].precise
    assert found is not None
    assert [found.leaves[path].kind for path in (("a",), ("t",))] == ["other", "other"]
    assert found.chunks["a",][0].nulls == 0


def test_a_snapshot_is_read_once_for_all_partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Folder(tmp_path).new(SCHEMA, BY_C)
    table.append(pa.table({"id": list(range(50)), "c": [str(n) for n in range(50)], "x": [1.0] * 50}))
    read: list[str] = []
    original = manifest_facts.read_anew

    def counting(source: str) -> Any:
        read.append(source)
        return original(source)

    monkeypatch.setattr(manifest_facts, "read_anew", counting)
    for _ in range(2):
        assert verdicts(alone(tmp_path, {"not_null": "id"})) == [("valid", 0, True)]
    assert read == [table.metadata_location]


def test_a_table_that_was_created_again_is_not_confused_with_the_former(tmp_path: Path) -> None:
    """Its metadata files have the same names again."""
    for value, found in ((None, ("violated", 1, True)), ("x", ("valid", 0, True))):
        shutil.rmtree(tmp_path / "t", ignore_errors=True)
        Folder(tmp_path / "t").new(SCHEMA).append(
            pa.table({"id": [1], "c": pa.array([value], pa.string()), "x": [1.0]})
        )
        assert verdicts(alone(tmp_path / "t", {"not_null": "c"})) == [found]


def test_missing_and_damaged_manifests_are_reported(tmp_path: Path) -> None:
    table = Folder(tmp_path).new(SCHEMA)
    table.append(pa.table({"id": [1], "c": ["a"], "x": [1.0]}))
    source, snapshot = table.metadata_location, table.current_snapshot()
    assert snapshot is not None
    (plan,) = plan_table(record(tmp_path)).partitions
    with pytest.raises(Unreadable, match=r"is not in the snapshot"):
        manifest_facts.snapshot_of(source, frozenset()).of(("/nowhere.parquet", 1, 0))
    manifest = snapshot.manifests(table.io)[0].manifest_path
    for break_it, error, text in (
        (lambda p: p.write_bytes(b"Obj\1 nothing"), Unreadable, r"the metadata of .* cannot be read: "),
        (lambda p: p.unlink(), Gone, r"can no longer be read .* it was expired, or the table was dropped"),
    ):
        break_it(type(tmp_path)(manifest))
        with pytest.raises(error, match=text):
            manifest_facts.snapshot_of(source, frozenset({"id"}))
        assert alone(tmp_path, {"not_null": "id"}, partitions=[plan]).report["verdict"] == "error"


@pytest.mark.parametrize("how", ["cut", "emptied", "written over"])
def test_a_data_file_of_another_size_than_in_its_manifest_is_an_error(tmp_path: Path, how: str) -> None:
    table = Folder(tmp_path).new(SCHEMA, BY_C)
    table.append(pa.table({"id": [1, 2], "c": ["a", "b"], "x": [1.0, 2.0]}))
    planned = plan_table(record(tmp_path)).partitions
    assert verdicts(alone(tmp_path, {"not_null": "id"}, partitions=planned)) == [("valid", 0, True)]
    ((path, size, _),) = planned[0].files
    if how == "written over":
        pq.write_table(pa.table({"id": [None, None, 3]}), path)
    else:
        os.truncate(path, size - 1 if how == "cut" else 0)
    for checks in ([{"not_null": "id"}], [{"unique": "c"}]):
        plans = Validate().jobs({"checks": checks}, planned, None, FakeContext(tmp_path, record(tmp_path)))
        ran = alone(tmp_path, *checks, partitions=plans)
        assert ran.report["verdict"] == "error"
        error = f"the file {path} does not have the {size} bytes that its manifest says: it was truncated"
        assert error in ran.report["checks"][0]["error"]
    assert [o.result["verdict"] for o in alone(tmp_path, {"not_null": "id"}, partitions=planned).outcomes] == [
        "error",
        "valid",
    ]


def test_a_scan_is_split_for_all_cores_within_size_limits() -> None:
    mb = 1 << 20
    assert split_size([2 * mb] * 84, 2) == 42 * mb
    assert split_size([500 * mb] * 84, 2) == 128 * mb
    assert split_size([100], 64) == 16 * mb
    assert split_size([], 2) == 16 * mb


@pytest.mark.parametrize(("precision", "scale"), [(38, 999_999_999), (9, 10)])
def test_hole_9_a_decimal_type_that_spark_does_not_have_is_unreadable(precision: int, scale: int) -> None:
    """A bound of such a column was computed with a power of ten of that scale."""
    schema = Schema(NestedField(1, "d", DecimalType(precision, scale)), NestedField(2, "e", DecimalType(38, 38)))
    found = {field.name: spark_type(field.field_type) for field in schema.fields}
    assert found == {"d": ("unreadable", f"Spark has no type decimal({precision}, {scale})"), "e": "decimal(38,38)"}
