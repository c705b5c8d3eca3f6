"""The planner for Iceberg tables: pinned files, names of partitions, and refusals."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import new_table_metadata
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER
from pyiceberg.transforms import BucketTransform, DayTransform, IdentityTransform, VoidTransform
from pyiceberg.typedef import Record
from pyiceberg.types import DateType, LongType, NestedField, StringType, TimestampType

from distop.errors import InvalidArgument, TableUnavailable
from distop.protocol.plan import PartitionPlan
from distop.protocol.records import TableRecord
from distop.storage.location import Location
from distop.tables import check_reachable, check_table, plan_table
from distop.tables.iceberg import snapshot_plan
from distop.tables.iceberg.metadata_file import current_metadata_file
from distop.tables.iceberg.snapshot_files import PartitionNames
from distop.tables.iceberg.snapshot_plan import NO_SNAPSHOT
from distop.tables.parquet.parquet_format import EMPTY
from tests.support.lake import Folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SCHEMA = Schema(NestedField(1, "id", LongType(), required=False), NestedField(2, "k", StringType(), required=False))
BY_K = PartitionSpec(PartitionField(source_id=2, field_id=1000, transform=IdentityTransform(), name="k"))


def record(path: Path, **options: Any) -> TableRecord:
    return TableRecord("t", "iceberg", str(path), options)


def rows(*keys: str | None) -> pa.Table:
    return pa.table({"id": list(range(len(keys))), "k": pa.array(keys, pa.string())})


def names(path: Path) -> list[str]:
    return [p.name for p in plan_table(record(path)).partitions]


def test_an_unpartitioned_table_is_planned_in_groups(tmp_path: Path) -> None:
    table = Folder(tmp_path).new(SCHEMA)
    for _ in range(5):
        table.append(rows("a", "b"))
    planned = plan_table(record(tmp_path, group_files=2))
    assert [(p.partition, p.name, len(p.files)) for p in planned.partitions] == [
        (0, "files-000000", 2),
        (1, "files-000001", 2),
        (2, "files-000002", 1),
    ]
    assert planned.version == str(table.metadata.current_snapshot_id)
    assert {p.source for p in planned.partitions} == {table.metadata_location}
    first = planned.partitions[0]
    assert first.bytes == sum(size for _, size, _ in first.files) > 0
    assert {mtime for _, _, mtime in first.files} == {0}
    assert len({path for p in planned.partitions for path, _, _ in p.files}) == 5
    assert PartitionPlan.from_json(json.loads(json.dumps(first.to_json()))) == first


def test_each_partition_value_is_a_partition_and_null_is_a_separate_one(tmp_path: Path) -> None:
    table = Folder(tmp_path).new(SCHEMA, BY_K)
    table.append(rows("b", "a/b", None, "null", "10", "9", "__HIVE_DEFAULT_PARTITION__", "ü é"))
    table.append(rows("b"))
    assert names(tmp_path) == [
        "k=9",
        "k=10",
        "k=%5F_HIVE_DEFAULT_PARTITION__",
        "k=__HIVE_DEFAULT_PARTITION__",
        "k=a%2Fb",
        "k=b",
        "k=null",
        "k=ü é",
    ]
    files = {p.name: len(p.files) for p in plan_table(record(tmp_path)).partitions}
    assert files["k=b"] == 2


def test_a_hundred_thousand_partitions_are_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entries are generated, because writing such manifests takes longer than planning them."""
    table = Folder(tmp_path).new(SCHEMA, BY_K)
    table.append(rows("a"))
    entries = [("", f"k={n % 100_000}", (f"/data/{n}", 1, 0)) for n in range(200_000)]
    monkeypatch.setattr(snapshot_plan, "data_files", lambda *_: iter(entries))
    planned = plan_table(record(tmp_path)).partitions
    assert [p.name for p in planned[9:12]] == ["k=9", "k=10", "k=11"]
    assert planned[99_999].files == (("/data/99999", 1, 0), ("/data/199999", 1, 0))
    assert len(planned) == 100_000


def test_partitions_of_a_later_spec_have_separate_names(tmp_path: Path) -> None:
    table = Folder(tmp_path).new(SCHEMA, BY_K)
    table.append(rows("a"))
    with table.update_spec() as update:
        update.remove_field("k")
    table.append(rows("a", "b"))
    with table.update_spec() as update:
        update.add_identity("k")
    table.append(rows("a"))
    # pyiceberg finds the first spec again, as Iceberg does: the partition is the same one.
    assert names(tmp_path) == ["k=a", "spec-1/files-000000"]
    assert sum(len(p.files) for p in plan_table(record(tmp_path)).partitions) == 3


def test_a_partition_of_a_column_that_was_dropped_keeps_its_name(tmp_path: Path) -> None:
    table = Folder(tmp_path).new(SCHEMA, BY_K)
    table.append(rows("a"))
    with table.update_spec() as update:
        update.remove_field("k")
    with table.update_schema() as schema:
        schema.delete_column("k")
    assert names(tmp_path) == ["k=a"]


def test_partitions_by_transforms_have_readable_names() -> None:
    schema = Schema(
        NestedField(1, "at", TimestampType(), required=False),
        NestedField(2, "id", LongType(), required=False),
        NestedField(3, "day", DateType(), required=False),
    )
    spec = PartitionSpec(
        PartitionField(source_id=1, field_id=1000, transform=DayTransform(), name="at_day"),
        PartitionField(source_id=2, field_id=1001, transform=BucketTransform(4), name="id bucket"),
        PartitionField(source_id=2, field_id=1002, transform=VoidTransform(), name="gone"),
        PartitionField(source_id=3, field_id=1003, transform=IdentityTransform(), name="day"),
        spec_id=3,
    )

    metadata = new_table_metadata(schema, spec, UNSORTED_SORT_ORDER, "/nowhere")
    naming = PartitionNames(spec, metadata)
    assert naming.prefix == "spec-3/"
    assert naming.name(Record(15706, 3, None, 0)) == "at_day=2013-01-01/id bucket=3/day=1970-01-01"


def test_a_commit_after_the_plan_is_another_version(tmp_path: Path) -> None:
    table = Folder(tmp_path).new(SCHEMA)
    table.append(rows("a"))
    before = plan_table(record(tmp_path))
    table.append(rows("b"))
    after = plan_table(record(tmp_path))
    assert before.version != after.version
    assert [len(p.files) for p in before.partitions] == [1]
    assert [len(p.files) for p in after.partitions] == [2]


def test_a_repeated_plan_of_the_same_metadata_reads_no_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Folder(tmp_path).new(SCHEMA, BY_K)
    table.append(rows("a", "b"))
    read: list[str] = []
    files = snapshot_plan.data_files

    def counted(*given: Any) -> Any:
        read.append("manifests")
        return files(*given)

    monkeypatch.setattr(snapshot_plan, "data_files", counted)
    first, again = plan_table(record(tmp_path)), plan_table(record(tmp_path))
    assert (len(read), again) == (1, first)
    assert again.partitions is not first.partitions, "a change of one list does not affect the other"
    plan_table(record(tmp_path, group_files=2))
    assert len(read) == 2, "other options, another plan"
    table.append(rows("c"))
    assert names(tmp_path) == ["k=a", "k=b", "k=c"]
    assert len(read) == 3
    shutil.rmtree(tmp_path / "metadata")
    Folder(tmp_path).new(SCHEMA, BY_K).append(rows("z"))
    assert names(tmp_path) == ["k=z"], "another table with the same names of metadata files"
    assert len(read) == 4
    (manifest,) = (tmp_path / "metadata").glob("*-m0.avro")
    manifest.unlink()
    with pytest.raises(TableUnavailable, match="cannot (be )?read"):
        plan_table(record(tmp_path))


def test_files_that_a_later_snapshot_removed_are_not_planned(tmp_path: Path) -> None:
    table = Folder(tmp_path).new(SCHEMA, BY_K)
    table.append(rows("a", "b"))
    table.delete("k = 'a'")
    assert names(tmp_path) == ["k=b"]


def test_a_table_without_rows_is_one_partition_without_files(tmp_path: Path) -> None:
    table = Folder(tmp_path).new(SCHEMA, BY_K)
    planned = plan_table(record(tmp_path))
    assert planned.version == NO_SNAPSHOT
    assert [(p.name, p.files, p.source) for p in planned.partitions] == [(EMPTY, (), table.metadata_location)]
    table.append(rows("a"))
    table.delete("k = 'a'")
    planned = plan_table(record(tmp_path))
    assert planned.version == str(table.metadata.current_snapshot_id)
    assert [(p.name, p.files) for p in planned.partitions] == [(EMPTY, ())]


def test_the_newest_metadata_is_used_if_the_hint_is_outdated_or_missing(tmp_path: Path) -> None:
    table = Folder(tmp_path).new(SCHEMA)
    table.append(rows("a"))
    hint = tmp_path / "metadata" / "version-hint.text"
    for text in ("1", "2\n"):
        hint.write_text(text)
        assert plan_table(record(tmp_path)).version == str(table.metadata.current_snapshot_id)
    hint.unlink()
    assert plan_table(record(tmp_path)).version == str(table.metadata.current_snapshot_id)


@pytest.mark.parametrize("hint", ["7\nx", "7 ", " 7", "x", "-1", "٧"])
def test_hole_2_a_hint_that_spark_reads_differently_is_refused(tmp_path: Path, hint: str) -> None:
    """Iceberg reads the first line: Spark read a file that was not checked, and quoted it in an error."""
    table = Folder(tmp_path).new(SCHEMA)
    table.append(rows("a"))
    (tmp_path / "metadata" / "version-hint.text").write_text(hint)
    with pytest.raises(InvalidArgument, match="has no version number"):
        plan_table(record(tmp_path))


@pytest.mark.parametrize("name", ["v02.metadata.json", "v2.gz.metadata.json", "v3.metadata.json.gz"])
def test_hole_2_only_metadata_files_with_names_that_spark_uses_are_read(tmp_path: Path, name: str) -> None:
    table = Folder(tmp_path).new(SCHEMA)
    table.append(rows("a"))
    (tmp_path / "metadata" / name).write_text("not read")
    if name.endswith(".json.gz"):
        with pytest.raises(InvalidArgument, match="named by an early Iceberg release"):
            current_metadata_file(Location.of(str(tmp_path)))
    else:
        assert current_metadata_file(Location.of(str(tmp_path))).endswith("/v2.metadata.json")


def test_planning_can_be_stopped(tmp_path: Path) -> None:
    table = Folder(tmp_path).new(SCHEMA)
    table.append(rows("a"))

    def stop() -> None:
        raise KeyError("stop")

    with pytest.raises(KeyError):
        plan_table(record(tmp_path), stop)


def test_options_are_checked_and_a_relative_location_becomes_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Folder(tmp_path / "t").new(SCHEMA)
    monkeypatch.chdir(tmp_path)
    assert check_table(TableRecord("t", "iceberg", "t", {"group_files": 3})).location == str(tmp_path / "t")
    with pytest.raises(InvalidArgument, match="'partition_types' is not known for iceberg"):
        check_table(record(tmp_path / "t", partition_types={"k": "int"}))
    with pytest.raises(InvalidArgument, match="'group_files' must be a whole number"):
        check_table(record(tmp_path / "t", group_files=0))


def test_a_location_without_a_table_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="does not exist"):
        check_table(record(tmp_path / "gone"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(InvalidArgument, match="has no Iceberg table"):
        check_table(record(tmp_path / "folder"))
    Folder(tmp_path / "t").new(SCHEMA)
    metadata = tmp_path / "t" / "metadata"
    (metadata / "v1.metadata.json").write_text('{"format-version": 2}')
    with pytest.raises(InvalidArgument, match=r"v1\.metadata\.json is not valid Iceberg metadata"):
        check_table(record(tmp_path / "t"))
    (metadata / "v1.metadata.json").write_text("{")
    with pytest.raises(InvalidArgument, match=r"v1\.metadata\.json is not valid Iceberg metadata"):
        check_table(record(tmp_path / "t"))
    (metadata / "version-hint.text").write_text("7")
    with pytest.raises(InvalidArgument, match="it has no file for the version in version-hint.text"):
        check_table(record(tmp_path / "t"))


def test_a_folder_of_a_table_that_belongs_to_a_catalog_is_refused(tmp_path: Path) -> None:
    Folder(tmp_path).new(SCHEMA)
    metadata = tmp_path / "metadata"
    (metadata / "version-hint.text").unlink()
    (metadata / "v1.metadata.json").rename(metadata / "00000-0b1c.metadata.json")
    with pytest.raises(InvalidArgument, match="belongs to a catalog"):
        check_table(record(tmp_path))


def test_a_dropped_table_is_unavailable(tmp_path: Path) -> None:
    table = Folder(tmp_path / "t").new(SCHEMA)
    table.append(rows("a"))
    check_reachable(record(tmp_path / "t"))
    manifests = [m.manifest_path for m in table.metadata.current_snapshot().manifests(table.io)]
    for manifest in manifests:
        (tmp_path / "t" / "metadata" / manifest.rsplit("/", 1)[1]).unlink()
    with pytest.raises(TableUnavailable, match="cannot (be )?read"):
        plan_table(record(tmp_path / "t"))
    shutil.rmtree(tmp_path / "t" / "metadata")
    with pytest.raises(TableUnavailable, match="no Iceberg table at .*: it was dropped"):
        check_reachable(record(tmp_path / "t"))
    shutil.rmtree(tmp_path / "t")
    with pytest.raises(TableUnavailable):
        plan_table(record(tmp_path / "t"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[: len(b) // 2],
        lambda b: b[:-9] + b"\xff" * 9,
        lambda b: b"",
        lambda b: b[::-1],
        lambda b: b[:4] + b[4:][::-1],
        lambda b: b[:-20],
        lambda b: b + b"\0",
    ],
)
@pytest.mark.parametrize("what", ["list", "manifest"])
def test_a_damaged_manifest_is_reported(tmp_path: Path, what: str, damage: Callable[[bytes], bytes]) -> None:
    table = Folder(tmp_path / "t").new(SCHEMA)
    table.append(rows("a"))
    snapshot = table.metadata.current_snapshot()
    path = snapshot.manifest_list if what == "list" else snapshot.manifests(table.io)[0].manifest_path
    file = tmp_path / "t" / "metadata" / path.rsplit("/", 1)[1]
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(TableUnavailable, match="cannot read the snapshot "):
        plan_table(record(tmp_path / "t"))


def test_a_parquet_table_is_planned_without_iceberg_s_library(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    code = (
        "import sys\n"
        "from distop.protocol.records import TableRecord\n"
        "from distop.tables import check_table, plan_table\n"
        f"plan_table(check_table(TableRecord('t', 'parquet', {str(tmp_path)!r})))\n"
        "import distop_behaviors.validate.batch\n"
        "assert 'pyiceberg' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
