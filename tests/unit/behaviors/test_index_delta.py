"""Indexes of Delta tables: files by the log, columns by their identity, and no Spark to build or find."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from distop.behavior import TableRecord
from distop.errors import InvalidArgument
from distop_behaviors.index.key_lookup import find
from tests.support.delta_logs import ID, DeltaLog, features, field, mapped, remove
from tests.support.index_runs import Indexes

KINDS = pytest.mark.parametrize("kind", ["posting", "skip"])


def indexes_of(table: Path, tmp_path: Path) -> Indexes:
    made = Indexes(table, tmp_path / "shared")
    made.record = TableRecord("t", "delta", str(table))
    return made


def found(indexes: Indexes, *keys: Any) -> tuple[int, int]:
    """The numbers of indexed and of other files that a lookup reads."""
    files = find(indexes.record, "i", keys)
    return len(files.named), len(files.uncovered)


def rows(start: int, *texts: str | None) -> pa.Table:
    return pa.table({"id": list(range(start, start + len(texts))), "k": pa.array(texts, pa.string())})


@KINDS
def test_an_index_follows_the_versions_of_the_log(kind: str, tmp_path: Path) -> None:
    table = tmp_path / "t"
    write_deltalake(table, rows(0, "a", "b"))
    write_deltalake(table, rows(10, "c", None), mode="append")
    indexes = indexes_of(table, tmp_path)
    report = indexes.build(kind=kind, columns=["k"])
    assert (report.generation, report.files, report.rows, report.not_indexed_files) == (1, 2, 4, 0)
    assert report.table_version.startswith("1-")
    assert (found(indexes, "a"), found(indexes, None), found(indexes, "zz")) == ((1, 0), (1, 0), (0, 0))
    DeltaTable(table).delete("id = 0")  # writes the remaining row of the file into a new one
    assert (found(indexes, "a"), found(indexes, "c")) == ((0, 1), (1, 1))
    report = indexes.build(kind=kind, columns=["k"])
    assert (report.generation, report.indexed, report.removed) == (2, 1, 1)
    assert (found(indexes, "a"), found(indexes, "b")) == ((0, 0), (1, 0))
    DeltaTable(table).restore(0)
    assert (found(indexes, "a"), found(indexes, "c")) == ((0, 1), (0, 1))
    assert indexes.drop()
    assert not list((table / "_distop").rglob("*.parquet"))


@KINDS
def test_a_new_table_in_the_folder_is_indexed_anew(kind: str, tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create()
    log.commit(log.add("a.parquet"))
    indexes = indexes_of(log.root, tmp_path)
    indexes.build(kind=kind, columns=["id"])
    assert found(indexes, 2) == (1, 0)
    shutil.rmtree(log.folder)
    again = DeltaLog(log.root).create(id="another-table")
    again.commit({"commitInfo": {"txnId": "another"}}, again.add("a.parquet", pa.table({"id": [7, 8, 9]})))
    assert found(indexes, 7) == (0, 1), "the file of another table with the same name and size"
    report = indexes.build(kind=kind, columns=["id"])
    assert (report.indexed, found(indexes, 7), found(indexes, 2)) == (1, (1, 0), (0, 0))


@KINDS
def test_a_mapped_column_is_found_by_its_identity(kind: str, tmp_path: Path) -> None:
    mapping = {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "2"}
    log = DeltaLog(tmp_path / "t").create(
        features("columnMapping"), fields=[mapped("k", "long", 1, "col-a"), mapped("b", "long", 2, "col-b")],
        configuration=mapping,
    )  # fmt: skip
    log.commit(log.add("a.parquet", pa.table({"col-a": [1, 2], "col-b": [7, 8]}), stats='{"numRecords": 2}'))
    indexes = indexes_of(log.root, tmp_path)
    indexes.build(kind=kind, columns=["k"])
    assert (found(indexes, 1), found(indexes, 7)) == ((1, 0), (0, 0))
    swapped = [mapped("was", "long", 1, "col-a"), mapped("k", "long", 2, "col-b")]
    one = DeltaLog(tmp_path / "one").create(features("columnMapping"), fields=swapped, configuration=mapping)
    text = (one.folder / f"{0:020}.json").read_text()
    (log.folder / f"{log.next:020}.json").write_text(text)
    assert (found(indexes, 1), found(indexes, 7)) == ((0, 1), (0, 1)), "another column has the name now"
    indexes.build(kind=kind, columns=["k"])
    assert (found(indexes, 1), found(indexes, 7)) == ((0, 0), (1, 0))


@KINDS
def test_a_column_that_a_file_lacks_is_null_without_a_default(kind: str, tmp_path: Path) -> None:
    more = [ID, field("k", "string"), field("d", "string", EXISTS_DEFAULT="'x'")]
    log = DeltaLog(tmp_path / "t").create(fields=more)
    log.commit(log.add("a.parquet"))
    log.commit(log.add("b.parquet", pa.table({"id": [4], "k": ["v"], "d": ["w"]}), stats='{"numRecords": 1}'))
    indexes = indexes_of(log.root, tmp_path)
    report = indexes.build(kind=kind, columns=["k"])
    assert (report.files, found(indexes, None), found(indexes, "v")) == (2, (1, 0), (1, 0))
    other = indexes.build("d", kind=kind, columns=["d"])
    assert (other.files, [one.file for one in other.not_indexed]) == (1, ["a.parquet"])
    assert "does not have the column 'd'" in other.not_indexed[0].why


@KINDS
def test_a_file_with_a_type_that_only_spark_converts_is_not_indexed(kind: str, tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create(features("typeWidening"), fields=[field("id", "double")])
    log.commit(log.add("a.parquet", pa.table({"id": pa.array([1, 2], pa.int32())}), stats='{"numRecords": 2}'))
    log.commit(log.add("b.parquet", pa.table({"id": pa.array([1, 2], pa.float32())}), stats='{"numRecords": 2}'))
    indexes = indexes_of(log.root, tmp_path)
    report = indexes.build(kind=kind, columns=["id"])
    assert (report.files, [one.file for one in report.not_indexed]) == (1, ["a.parquet"])
    assert "the column 'id' has the type int in it" in report.not_indexed[0].why
    assert found(indexes, 2.0) == (1, 1)


def test_columns_that_cannot_be_indexed_are_refused(tmp_path: Path) -> None:
    fields = [ID, field("p", "string"), field("s", {"type": "array", "elementType": "long", "containsNull": True})]
    fields.append(field("c", "string", __CHAR_VARCHAR_TYPE_STRING="char(5)"))
    log = DeltaLog(tmp_path / "t").create(fields=fields, partitions=("p",))
    log.commit(log.add("p=1/a.parquet", partitionValues={"p": "1"}))
    indexes = indexes_of(log.root, tmp_path)
    for column, why in {
        "p": "'p' cannot be indexed: it is a partition column, which needs no index",
        "s": "only columns of single values can be indexed",
        "c": "texts with a length",
        "x": "has no column 'x'",
    }.items():
        with pytest.raises(InvalidArgument, match=why):
            indexes.plan(columns=[column])


def test_a_removed_file_is_not_found_and_a_file_that_became_a_link_is_not_indexed(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create()
    log.commit(log.add("a.parquet"), log.add("b.parquet"))
    indexes = indexes_of(log.root, tmp_path)
    indexes.build(columns=["id"])
    assert found(indexes, 1) == (2, 0)
    log.commit(remove("a.parquet"))
    assert found(indexes, 1) == (1, 0)
    log.commit(log.add("c.parquet"))
    operation = indexes.plan(columns=["id"])
    (tmp_path / "other.parquet").write_bytes((log.root / "c.parquet").read_bytes())
    (log.root / "c.parquet").unlink()
    (log.root / "c.parquet").symlink_to(tmp_path / "other.parquet")
    with pytest.raises(InvalidArgument, match="outside of its table"):
        operation.complete()
