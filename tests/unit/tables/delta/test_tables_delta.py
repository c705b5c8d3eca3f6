"""The planner for Delta tables: versions, partitions, checkpoints, and refusals of what a log may not have."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from distop.errors import InvalidArgument, TableUnavailable
from distop.protocol.records import TableRecord
from distop.storage.location import Location
from distop.tables import changes_of, check_reachable, check_table, plan_table, reader_of, record_at
from distop.tables.delta import checkpoints
from distop.tables.delta.delta_log import current_snapshot, snapshot_of
from distop.tables.delta.table_features import KNOWN
from distop.tables.delta.table_paths import source_of, vector_path
from distop.tables.reading.file_facts import FileFacts, Gone
from tests.support.delta_logs import COLUMN_ID, DeltaLog, features, field, mapped, metadata, remove, statistics, vector

UUID_TEXT = "^(]<&u-VY!GpVjU9LJQb"


def record(path: Path, **options: Any) -> TableRecord:
    return TableRecord("t", "delta", str(path), options)


def rows(*keys: str | None) -> pa.Table:
    return pa.table({"id": list(range(len(keys))), "k": pa.array(keys, pa.string())})


def planned_paths(path: Path) -> set[str]:
    return {file[0] for p in plan_table(record(path)).partitions for file in p.files}


def active(path: Path) -> set[str]:
    """The active files according to another implementation."""
    return {uri.removeprefix("file://") for uri in DeltaTable(path).file_uris()}


def refused(log: DeltaLog, match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        plan_table(log.record)


# ----------------------------------------------------------------- planning


def test_an_unpartitioned_table_is_planned_in_groups(tmp_path: Path) -> None:
    for _ in range(5):
        write_deltalake(tmp_path, rows("a", "b"), mode="append")
    planned = plan_table(record(tmp_path, group_files=2))
    assert [(p.name, len(p.files)) for p in planned.partitions] == [
        ("files-000000", 2),
        ("files-000001", 2),
        ("files-000002", 1),
    ]
    assert {p.source for p in planned.partitions} == {f"{tmp_path}/_delta_log/{4:020}.json"}
    assert {mtime for p in planned.partitions for _, _, mtime in p.files} == {0}
    assert planned_paths(tmp_path) == active(tmp_path)
    for path, size, _ in (file for p in planned.partitions for file in p.files):
        assert Path(path).stat().st_size == size


def test_each_partition_value_is_a_partition_and_null_is_a_separate_one(tmp_path: Path) -> None:
    table = rows("b", "a/b", None, "10", "9", "ü é", "50%")
    write_deltalake(tmp_path, table, partition_by=["k"])
    names = [p.name for p in plan_table(record(tmp_path)).partitions]
    assert set(names) == {
        *("k=9", "k=10", "k=__HIVE_DEFAULT_PARTITION__", "k=a%2Fb", "k=b", "k=ü é", "k=50%25"),
    }
    assert names.index("k=9") < names.index("k=10")
    for path in planned_paths(tmp_path):
        assert pq.read_metadata(path).num_rows == 1


def test_only_active_files_are_planned_and_later_commits_are_not_seen(tmp_path: Path) -> None:
    write_deltalake(tmp_path, rows("a"))
    write_deltalake(tmp_path, rows("b"), mode="append")
    planned = plan_table(record(tmp_path))
    write_deltalake(tmp_path, rows("c"), mode="overwrite")
    assert len(planned_paths(tmp_path)) == 1
    reader = reader_of(record(tmp_path), planned.partitions)
    files = [file for p in planned.partitions for file in p.files]
    assert [facts.rows for facts in reader.facts(files, frozenset(), lambda: None)] == [1, 1]


def test_a_table_without_files_is_one_empty_partition(tmp_path: Path) -> None:
    DeltaTable.create(tmp_path, pa.schema([("id", pa.int64())]))
    [partition] = plan_table(record(tmp_path)).partitions
    assert (partition.name, partition.files) == ("empty", ())
    reader = reader_of(record(tmp_path), [partition])
    [facts] = reader.facts([], frozenset(), lambda: None)
    assert (facts.rows, dict(facts.columns)) == (0, {"id": "bigint"})


def test_the_version_differs_for_another_table_in_the_same_folder(tmp_path: Path) -> None:
    write_deltalake(tmp_path, rows("a"))
    first = plan_table(record(tmp_path))
    shutil.rmtree(tmp_path)
    write_deltalake(tmp_path, rows("b"))
    second = plan_table(record(tmp_path))
    assert first.version.startswith("0-")
    assert second.version.startswith("0-")
    assert first.version != second.version
    reader = reader_of(record(tmp_path), first.partitions)
    [facts] = reader.facts(first.partitions[0].files, frozenset(), lambda: None)
    assert "is not in version 0" in str(facts)


def test_a_delta_table_is_registered_and_recognized(tmp_path: Path) -> None:
    write_deltalake(tmp_path, rows("a"))
    assert check_table(record(tmp_path)) == record(tmp_path)
    assert record_at(str(tmp_path)).format == "delta"
    assert changes_of(record(tmp_path)).delta
    with pytest.raises(InvalidArgument, match="'catalog' is not known for delta"):
        check_table(record(tmp_path, catalog="c"))


def test_a_folder_without_a_log_is_no_delta_table(tmp_path: Path) -> None:
    pq.write_table(rows("a"), tmp_path / "a.parquet")
    with pytest.raises(InvalidArgument, match="has no Delta table: it has no _delta_log with commits"):
        check_table(record(tmp_path))
    with pytest.raises(TableUnavailable, match="it was dropped, or its disk is not mounted"):
        check_reachable(record(tmp_path))
    with pytest.raises(InvalidArgument, match="does not exist"):
        check_table(record(tmp_path / "missing"))


# ----------------------------------------------------------------- checkpoints


def test_a_checkpoint_replaces_earlier_commits(tmp_path: Path) -> None:
    for n in range(4):
        write_deltalake(tmp_path, rows(str(n)), mode="append", partition_by=["k"])
    DeltaTable(tmp_path).delete("k = '1'")
    DeltaTable(tmp_path).create_checkpoint()
    before = plan_table(record(tmp_path))
    for n in range(4):
        (tmp_path / "_delta_log" / f"{n:020}.json").unlink()
    write_deltalake(tmp_path, rows("x"), mode="append", partition_by=["k"])
    assert planned_paths(tmp_path) == active(tmp_path)
    assert [p.name for p in plan_table(record(tmp_path)).partitions] == ["k=0", "k=2", "k=3", "k=x"]
    # The planned version is still complete.
    assert set(snapshot_of(before.partitions[0].source).files) < planned_paths(tmp_path)


def test_a_checkpoint_is_used_without_its_commit(tmp_path: Path) -> None:
    write_deltalake(tmp_path, rows("a"))
    DeltaTable(tmp_path).create_checkpoint()
    (tmp_path / "_delta_log" / f"{0:020}.json").unlink()
    snapshot = current_snapshot(Location.of(str(tmp_path)))
    assert (snapshot.version, snapshot.id) == (0, f"0-{snapshot.table_id}")
    assert len(snapshot.files) == 1


def test_a_version_that_the_log_no_longer_has_is_gone(tmp_path: Path) -> None:
    write_deltalake(tmp_path, rows("a"))
    old = plan_table(record(tmp_path))
    write_deltalake(tmp_path, rows("b"), mode="append")
    DeltaTable(tmp_path).create_checkpoint()
    (tmp_path / "_delta_log" / f"{0:020}.json").unlink()
    with pytest.raises(Gone, match="no longer has version 0"):
        snapshot_of(old.partitions[0].source)


def test_a_missing_commit_in_the_middle_is_an_error(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create()
    for name in ("a", "b", "c"):
        log.commit(log.add(f"{name}.parquet"))
    (log.folder / f"{2:020}.json").unlink()
    refused(log, "lacks version 2")


@pytest.mark.parametrize("seed", range(4))
def test_a_version_is_the_same_after_any_version_that_was_read_before(seed: int, tmp_path: Path) -> None:
    """Only commits since that version are read."""
    chance = random.Random(seed)
    log = DeltaLog(tmp_path / "t").create(features("deletionVectors"))
    active: dict[str, dict[str, Any]] = {}
    for n in range(12):
        actions = []
        for name in chance.sample(sorted(active), min(len(active), chance.randrange(3))):
            former = active.pop(name)
            actions.append(remove(name, **former))
            if chance.random() < 0.6:
                new = vector(UUID_TEXT, offset=chance.choice([None, 0, 1, 50]))
                active[name] = {"deletionVector": new}
                actions.append(log.add(name, **active[name]))
        for m in range(chance.randrange(3)):
            name = f"{n}%20{m}.parquet" if chance.random() < 0.3 else f"{n}-{m}.parquet"
            active[name] = {}
            actions.append(log.add(name))
        if chance.random() < 0.2:
            actions.append({"metaData": metadata(field("id", "long"), field(f"c{n}", "long"))})
        log.commit(*actions)

    def read(name: str, *versions: int) -> list[str]:
        """The versions, of a copy that this process has not read before."""
        root = shutil.copytree(log.root, tmp_path / name)
        found = [snapshot_of(source_of(str(root), version)) for version in versions]
        parts = [(sorted(one.files.items()), one.metadata, one.schema.text, one.features) for one in found]
        return [repr(part).replace(str(root), "") for part in parts]

    alone = [read(f"alone-{version}", version)[0] for version in range(log.next)]
    assert all(f"/{name.replace('%20', ' ')}'" in alone[-1] for name in active)
    for n in range(3):
        versions = sorted(chance.sample(range(log.next), 5))
        assert read(f"after-{n}", *versions) == [alone[version] for version in versions]


def test_a_new_table_in_the_folder_does_not_begin_with_a_version_of_the_old_one(tmp_path: Path) -> None:
    for key in ("a", "b"):
        write_deltalake(tmp_path, rows(key), mode="append")
    assert len(planned_paths(tmp_path)) == 2
    shutil.rmtree(tmp_path)
    for key in ("c", "d", "e"):
        write_deltalake(tmp_path, rows(key), mode="append")
    assert planned_paths(tmp_path) == active(tmp_path)


def test_a_folder_that_became_a_link_is_refused_for_files_of_a_former_version(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create()
    log.commit(log.add("f/a.parquet"))
    assert planned_paths(log.root) == {f"{log.root}/f/a.parquet"}
    (log.root / "f").rename(tmp_path / "elsewhere")
    (log.root / "f").symlink_to(tmp_path / "elsewhere")
    log.commit(log.add("b.parquet"))
    refused(log, "lies outside of its table")


def test_parts_of_a_checkpoint_count_only_together() -> None:
    def name(part: int) -> str:
        return f"{7:020}.checkpoint.{part:010}.{3:010}.parquet"

    older = f"{5:020}.checkpoint.parquet"
    assert checkpoints.newest([name(1), name(3), older], 9) == checkpoints.Checkpoint(5, (older,))
    whole = checkpoints.newest([name(3), name(1), name(2), older], 9)
    assert whole == checkpoints.Checkpoint(7, (name(1), name(2), name(3)))
    assert checkpoints.newest([name(1), name(2), name(3)], 6) is None
    classic, v2 = f"{7:020}.checkpoint.parquet", f"{7:020}.checkpoint.{'0' * 8}-0000-0000-0000-{'0' * 12}.json"
    assert checkpoints.newest([classic, v2], 9) == checkpoints.Checkpoint(7, (v2,))


def test_a_v2_checkpoint_has_its_files_in_sidecars(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create(features("v2Checkpoint"))
    log.commit(log.add("a.parquet"))
    sidecars = log.folder / "_sidecars"
    sidecars.mkdir()
    add = pa.array([log.add("b.parquet")["add"] | {"partitionValues": []}], checkpoint_type())
    pq.write_table(pa.table({"add": add}), sidecars / "s.parquet")
    uuid = f"{1:020}.checkpoint.01234567-0123-0123-0123-012345678901.json"
    manifest = [
        {"checkpointMetadata": {"version": 1}},
        {"protocol": features("v2Checkpoint")},
        {"metaData": metadata()},
        {"sidecar": {"path": "s.parquet", "sizeInBytes": 1, "modificationTime": 0}},
    ]
    (log.folder / uuid).write_text("\n".join(map(json.dumps, manifest)))
    assert set(planned_paths(log.root)) == {f"{log.root}/b.parquet"}
    manifest[3] = {"sidecar": {"path": "../../other/s.parquet"}}
    log.commit()
    newer = uuid.replace(f"{1:020}", f"{2:020}")
    (log.folder / newer).write_text("\n".join(map(json.dumps, manifest)))
    refused(log, r"only the name of a file in _delta_log/_sidecars is supported")


def checkpoint_type() -> pa.DataType:
    return pa.struct(
        [
            ("path", pa.string()),
            ("partitionValues", pa.map_(pa.string(), pa.string())),
            ("size", pa.int64()),
            ("modificationTime", pa.int64()),
            ("stats", pa.string()),
        ]
    )


@pytest.mark.parametrize("damage", ["cut", "text", "empty"])
def test_a_damaged_checkpoint_leaves_the_planning_to_another_attempt(damage: str, tmp_path: Path) -> None:
    write_deltalake(tmp_path, rows("a"))
    DeltaTable(tmp_path).create_checkpoint()
    path = tmp_path / "_delta_log" / f"{0:020}.checkpoint.parquet"
    data = path.read_bytes()
    path.write_bytes({"cut": data[: len(data) // 2], "text": b"no parquet", "empty": b""}[damage])
    with pytest.raises(TableUnavailable, match=rf"cannot read the checkpoint {path} of a Delta table"):
        plan_table(record(tmp_path))


def with_checkpoint(log: DeltaLog, add: pa.Array) -> None:
    """Write a checkpoint of version 0, with these files."""
    plain = metadata()
    own = {"id": plain["id"], "schemaString": plain["schemaString"]}
    columns = {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}, "metaData": own}
    first = pa.table({name: pa.array([value, *[None] * len(add)]) for name, value in columns.items()})
    data = first.append_column("add", pa.concat_arrays([pa.nulls(1, add.type), add]))
    pq.write_table(data, log.folder / f"{0:020}.checkpoint.parquet", compression="zstd")


def test_a_checkpoint_that_expands_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that many rows share is in the file once."""
    monkeypatch.setattr(checkpoints, "DECODED_BYTES", 1 << 24)
    log = DeltaLog(tmp_path / "t").create()
    text = pa.array(["x" * 100_000]).dictionary_encode().take(pa.array([0] * 2_000))
    paths = pa.array([f"{n}.parquet" for n in range(2_000)])
    with_checkpoint(log, pa.StructArray.from_arrays([paths, text.cast(pa.string())], ["path", "stats"]))
    assert (log.folder / f"{0:020}.checkpoint.parquet").stat().st_size < 100_000
    refused(log, "bytes of data, but at most 16777216 are supported")


@pytest.mark.parametrize("day", [3_660_000, -800_000], ids=["year 11990", "year -220"])
def test_a_checkpoint_with_a_date_that_python_lacks_is_read(day: int, tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create()
    added = log.add("a.parquet")["add"]
    bounds = pa.struct([("v", pa.date32())])
    parsed = pa.struct([("numRecords", pa.int64()), ("minValues", bounds)])
    kept = [one for one in checkpoint_type() if one.name != "stats"]
    rows = pa.array(
        [{name: added[name] for name in ("path", "size", "modificationTime")} | {"partitionValues": []}],
        pa.struct(kept),
    )
    days = pa.array([day], pa.int32()).cast(pa.date32())
    statistics = pa.StructArray.from_arrays(
        [pa.array([3]), pa.StructArray.from_arrays([days], fields=list(bounds))], fields=list(parsed)
    )
    arrays = [rows.field(one.name) for one in kept]
    with_checkpoint(
        log, pa.StructArray.from_arrays([*arrays, statistics], fields=[*kept, pa.field("stats_parsed", parsed)])
    )
    planned = plan_table(log.record).partitions
    assert [file[0] for p in planned for file in p.files] == [f"{log.root}/a.parquet"]
    [facts] = reader_of(log.record, planned).facts(planned[0].files, frozenset(), lambda: None)
    assert facts.rows == 3


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"partitions": ({},)}, "lacks a partition column"),
        ({"id": "x" * 300}, "has an invalid table id"),
        ({"id": 7}, "has an invalid table id"),
        ({"fields": (field(7, "long"),)}, "cannot be read: TypeError"),  # type: ignore[arg-type]
        ({"fields": (field("\ud800", "long"),)}, "cannot be read: UnicodeEncodeError"),
        (
            {
                "protocol": features("columnMapping"),
                "fields": (mapped("s", {"type": "struct", "fields": [field("x", "date", **{COLUMN_ID: 2})]}, 1, "c"),),
                "configuration": {"delta.columnMapping.mode": "name"},
            },
            "cannot be read: KeyError",
        ),
    ],
    ids=["partition column", "long id", "number", "number as name", "half a character", "no name in files"],
)
def test_invalid_metadata_are_an_error(given: dict[str, Any], match: str, tmp_path: Path) -> None:
    """The id is part of a plan's version if the commit of a checkpoint is gone."""
    refused(DeltaLog(tmp_path / "t").create(**given), match)


def test_a_partition_value_with_half_a_character_is_an_error(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create(fields=[field("k", "string")], partitions=("k",))
    log.commit(log.add("a.parquet", partitionValues={"k": "a\ud800"}))
    refused(log, "has an invalid entry for the file")


def test_a_schema_with_an_endless_number_is_an_error(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create(
        features("columnMapping"),
        fields=[mapped("id", "long", 1, "c")],
        configuration={"delta.columnMapping.mode": "id"},
    )
    path = log.folder / f"{0:020}.json"
    path.write_text(path.read_text().replace('columnMapping.id\\": 1', 'columnMapping.id\\": 1e400'))
    refused(log, "cannot be read: OverflowError")


@pytest.mark.parametrize("line", ["{", "[]", "7", '{"add": 5}', '{"add": {"path": 5}}', "\udcff"])
def test_a_damaged_commit_is_an_error(line: str, tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create()
    (log.folder / f"{1:020}.json").write_bytes(line.encode(errors="surrogateescape"))
    refused(log, f"{log.folder}/0+1.json of a Delta table's log is damaged|invalid|has the file path")


def test_a_log_without_metadata_is_an_error(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t")
    log.commit(log.add("a.parquet"))
    refused(log, "has no protocol, or no metadata")


# ----------------------------------------------------------------- features


@pytest.mark.parametrize(
    "protocol",
    [features("deletionVectors", "newThing"), features("catalogManaged"), features("variantShredding")],
    ids=lambda protocol: protocol["readerFeatures"][-1],
)
def test_an_unknown_reader_feature_is_refused_by_name(protocol: dict[str, Any], tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create(protocol)
    # The file cannot be understood without the feature, so the feature is named first.
    log.commit(log.add("a.parquet", path="/etc/passwd"))
    name = protocol["readerFeatures"][-1]
    with pytest.raises(InvalidArgument, match=f"uses the reader feature '{name}', which distop does not support"):
        check_table(log.record)
    refused(log, f"'{name}'")


def test_a_feature_that_was_removed_does_not_matter(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create(features("newThing"))
    log.commit({"protocol": features()}, log.add("a.parquet"))
    assert planned_paths(log.root) == {f"{log.root}/a.parquet"}


@pytest.mark.parametrize("version", [4, 0, "1", None, True])
def test_an_unknown_reader_version_is_refused(version: Any, tmp_path: Path) -> None:
    refused(DeltaLog(tmp_path / "t").create({"minReaderVersion": version}), "but versions 1 to 3 are supported")


def test_known_features_are_accepted(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create(features(*sorted(KNOWN)))
    log.commit(log.add("a.parquet"))
    assert len(planned_paths(log.root)) == 1


def test_column_mapping_without_its_feature_is_refused(tmp_path: Path) -> None:
    given = {"configuration": {"delta.columnMapping.mode": "name"}, "fields": [mapped("id", "long", 1, "c1")]}
    refused(DeltaLog(tmp_path / "t").create(**given), "column mapping 'name', which its protocol does not allow")


def test_other_data_files_than_parquet_are_refused(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create(format={"provider": "orc"})
    refused(log, "files of the format 'orc': only parquet is supported")


# ----------------------------------------------------------------- paths


@pytest.mark.parametrize(
    ("path", "match"),
    [
        ("/etc/passwd", "only relative paths are supported"),
        ("file:///etc/passwd", "only relative paths are supported"),
        ("s3://bucket/a.parquet", "only relative paths are supported"),
        ("../other/a.parquet", "is refused, because its readers may resolve it differently"),
        ("%2e%2e/other/a.parquet", "is refused"),
        ("k=1//a.parquet", "is refused"),
        ("", "has the file path ''"),
        ("a%00.parquet", "is refused"),
        ("a%ff.parquet", "is not UTF-8"),
        ("a\ud800.parquet", "is not UTF-8"),
    ],
)
def test_a_path_that_leaves_the_table_is_refused(path: str, match: str, tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create()
    log.commit({"add": log.add("a.parquet")["add"] | {"path": path}})
    refused(log, match)


def test_the_path_of_a_removed_file_does_not_matter(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create()
    log.commit({"add": log.add("a.parquet")["add"] | {"path": "s3://bucket/a.parquet"}}, log.add("b.parquet"))
    log.commit(remove("s3://bucket/a.parquet"))
    assert planned_paths(log.root) == {f"{log.root}/b.parquet"}


def test_a_link_out_of_the_table_is_refused(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create()
    other = tmp_path / "other"
    other.mkdir()
    pq.write_table(rows("a"), other / "a.parquet")
    (log.root / "k").symlink_to(other)
    log.commit({"add": log.add("b.parquet")["add"] | {"path": "k/a.parquet"}})
    refused(log, "lies outside of its table")


def test_a_link_in_the_log_is_refused(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create()
    log.commit(log.add("a.parquet"))
    commit = log.folder / f"{1:020}.json"
    commit.rename(tmp_path / "elsewhere.json")
    commit.symlink_to(tmp_path / "elsewhere.json")
    refused(log, "lies outside of its table")
    commit.unlink()
    (log.folder / "hidden").write_bytes((tmp_path / "elsewhere.json").read_bytes())
    commit.symlink_to(log.folder / "hidden")
    refused(log, "symbolic link, which is not followed")


def test_a_log_behind_a_link_is_refused(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create()
    log.folder.rename(tmp_path / "log")
    log.folder.symlink_to(tmp_path / "log")
    refused(log, "link")


def test_a_file_with_two_deletion_vectors_is_refused(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create(features("deletionVectors"))
    log.commit(log.add("a.parquet", deletionVector=vector(UUID_TEXT)))
    log.commit(log.add("a.parquet"))
    refused(log, "has the file .* twice")


def test_a_plan_of_another_table_is_refused(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "a", rows("a"))
    write_deltalake(tmp_path / "b", rows("a"))
    planned = plan_table(record(tmp_path / "a"))
    with pytest.raises(InvalidArgument, match="names the commit file of another table"):
        reader_of(record(tmp_path / "b"), planned.partitions)


# ----------------------------------------------------------------- deletion vectors


def test_the_path_of_a_deletion_vector_is_made_of_its_uuid() -> None:
    """The example of Delta's specification."""
    found = vector_path("/t", "ab^-aqEH.-t@S}K{vb[*k^")
    assert found == "/t/ab/deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin"


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"storageType": "p", "pathOrInlineDv": "file:///etc/passwd"}, "a deletion vector with an absolute path"),
        ({"storageType": "x"}, "the storage type 'x'"),
        ({"pathOrInlineDv": "short"}, "the invalid deletion vector 'short'"),
        ({"pathOrInlineDv": "%" * 20}, "the invalid deletion vector"),
        ({"pathOrInlineDv": "../" + UUID_TEXT}, "is refused"),
        ({"sizeInBytes": 1 << 40}, "the invalid deletion vector"),
        ({"cardinality": -1}, "the invalid deletion vector"),
        ({"offset": "1"}, "the invalid deletion vector"),
    ],
)
def test_an_invalid_deletion_vector_is_refused(given: dict[str, Any], match: str, tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create(features("deletionVectors"))
    log.commit(log.add("a.parquet", deletionVector=vector(UUID_TEXT) | given))
    refused(log, match)


def test_the_file_of_a_deletion_vector_is_checked(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create(features("deletionVectors"))
    log.commit(log.add("a.parquet", deletionVector=vector(UUID_TEXT)))
    snapshot = current_snapshot(Location.of(str(log.root)))
    found = snapshot.files[f"{log.root}/a.parquet"].vector
    assert found is not None
    with pytest.raises(Gone, match="the deletion vectors .* are gone"):
        found.check()
    path = log.root / found.path.rpartition("/")[2]
    path.write_bytes(b"\x01" + (34).to_bytes(4, "big") + bytes(34 + 4))
    found.check()
    path.write_bytes(b"\x01" + (34).to_bytes(4, "big") + bytes(34))
    with pytest.raises(InvalidArgument, match="exceeds the end of the file"):
        found.check()
    path.write_bytes(b"\x01" + (35).to_bytes(4, "big") + bytes(99))
    with pytest.raises(InvalidArgument, match="its size differs from the log"):
        found.check()


# ----------------------------------------------------------------- names and ids


def test_partition_names_are_the_tables_and_an_empty_value_is_null(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create(
        features("columnMapping"),
        fields=[mapped("id", "long", 1, "c1"), mapped("day", "date", 2, "c2"), mapped("region", "string", 3, "c3")],
        partitions=("day", "region"),
        configuration={"delta.columnMapping.mode": "name"},
    )
    log.commit(
        log.add("a.parquet", partitionValues={"c2": "2020-01-01", "c3": "eu"}),
        log.add("b.parquet", partitionValues={"c2": None, "c3": ""}),
        log.add("c.parquet", partitionValues={"c2": None, "c3": "__HIVE_DEFAULT_PARTITION__"}),
    )
    null = "__HIVE_DEFAULT_PARTITION__"
    names = {p.name for p in plan_table(log.record).partitions}
    assert names == {"day=2020-01-01/region=eu", f"day={null}/region={null}", f"day={null}/region=%5F{null[1:]}"}


def test_ids_of_column_mapping_show_a_renamed_and_a_replaced_column(tmp_path: Path) -> None:
    inner = {"type": "struct", "fields": [mapped("a", "integer", 3, "c3")]}
    given: dict[str, Any] = {"configuration": {"delta.columnMapping.mode": "name"}}
    log = DeltaLog(tmp_path / "t").create(
        features("columnMapping"), fields=[mapped("id", "long", 1, "c1"), mapped("s", inner, 2, "c2")], **given
    )
    first = reader_of(log.record, plan_table(log.record).partitions)
    assert {name: (f.id, f.type) for name, f in first.version.fields(["id", "s"]).items()} == {
        "id": (1, "long"),
        "s": (2, "struct"),
        "s.a": (3, "integer"),
    }
    log.commit({"metaData": metadata(mapped("number", "long", 1, "c1"), mapped("id", "long", 4, "c4"), **given)})
    second = reader_of(log.record, plan_table(log.record).partitions)
    assert (second.version.name_of(1), second.version.name_of(3)) == ("number", None)
    table = first.version.table_id
    assert first.identities(["id"]) == {"id": f"{table} 1 bigint"}
    assert second.identities(["id", "NUMBER"]) == {"id": f"{table} 4 bigint", "NUMBER": f"{table} 1 bigint"}
    assert second.version.schema_id != first.version.schema_id
    assert second.version.table_id == first.version.table_id


def test_without_column_mapping_ids_are_made_of_names(tmp_path: Path) -> None:
    nested = {"type": "array", "elementType": "string", "containsNull": True}
    log = DeltaLog(tmp_path / "t").create(fields=[field("id", "long"), field("l", nested)])
    reader = reader_of(log.record, plan_table(log.record).partitions)
    found = reader.version.fields(["id", "l"])
    assert list(found) == ["id", "l", "l.element"]
    assert all(reader.version.name_of(one.id) == name for name, one in found.items())
    assert reader.identities(["id"]) == {"id": f"{reader.version.table_id} bigint"}


@pytest.mark.parametrize(
    "kind",
    ["interval", "string collate UTF8_LCASE", "decimal(60,2)", "void", {"type": "array", "elementType": "geometry"}],
    ids=str,
)
def test_a_column_of_an_unknown_type_is_unreadable(kind: Any, tmp_path: Path) -> None:
    if isinstance(kind, dict):
        kind = kind | {"containsNull": True}
    log = DeltaLog(tmp_path / "t").create(fields=[field("id", "long"), field("x", kind)])
    reader = reader_of(log.record, plan_table(log.record).partitions)
    columns = reader.columns()
    assert columns is not None
    assert columns["id"] == "bigint"
    assert "unreadable" in str(columns["x"])


@pytest.mark.parametrize("nested", [False, True])
def test_texts_with_a_collation_are_unreadable_and_have_no_bounds(nested: bool, tmp_path: Path) -> None:
    """The type in the schema is ``string``. By the collation ``B`` is after ``a``, by its bytes before."""
    text = field("x", "string", __COLLATIONS={"x": "spark.UTF8_LCASE"})
    column = field("s", {"type": "struct", "fields": [text]}) if nested else text
    bounds = {"s": {"x": "B"}} if nested else {"x": "B"}
    log = DeltaLog(tmp_path / "t").create(fields=[field("id", "long"), column])
    log.commit(log.add("a.parquet", stats=statistics(3, minValues=bounds, maxValues=bounds)))
    planned = plan_table(log.record).partitions
    reader = reader_of(log.record, planned)
    columns = reader.columns()
    assert columns is not None
    assert "texts with a collation are not supported" in str(columns[column["name"]])
    [facts] = reader.facts(planned[0].files, frozenset({column["name"]}), lambda: None)
    assert isinstance(facts, FileFacts)
    assert [(leaf.kind, leaf.type) for leaf in facts.leaves.values()] == [("other", "")]
    assert not any(chunk.low or chunk.high for chunks in facts.chunks.values() for chunk in chunks)


# ----------------------------------------------------------------- since


def since(path: Path, version: str) -> set[str] | None:
    table = record(path)
    found = reader_of(table, plan_table(table).partitions).version.new_files(version, lambda: None)
    return None if found is None else {file[0].rpartition("/")[2] for file in found}


def test_files_that_were_added_since_a_version_are_new(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create(features("deletionVectors"))
    log.commit(log.add("a.parquet"), log.add("b.parquet"), log.add("c.parquet"))
    first = plan_table(log.record).version
    assert since(log.root, first) == set()
    log.commit(log.add("d.parquet"), remove("b.parquet"))
    # A first deletion vector only deletes rows.
    with_vector = {"deletionVector": vector(UUID_TEXT)}
    log.commit(remove("a.parquet"), log.add("a.parquet", **with_vector))
    assert since(log.root, first) == {"d.parquet"}
    second = plan_table(log.record).version
    # A restored version has the deleted rows again.
    log.commit(remove("a.parquet", **with_vector), log.add("a.parquet"))
    assert since(log.root, first) == {"a.parquet", "d.parquet"}
    assert since(log.root, second) == {"a.parquet"}


def test_a_file_with_deleted_rows_that_a_commit_calls_whole_is_new(tmp_path: Path) -> None:
    """Its new deletion vector may delete other rows, so the certificate lacks some."""
    log = DeltaLog(tmp_path / "t").create(features("deletionVectors"))
    former, new = vector(UUID_TEXT), vector(UUID_TEXT, offset=50)
    log.commit(log.add("a.parquet", deletionVector=former))
    first = plan_table(log.record).version
    log.commit(remove("a.parquet"), log.add("a.parquet", deletionVector=new))
    log.commit(remove("a.parquet", deletionVector=former))
    assert since(log.root, first) == {"a.parquet"}


def test_without_the_commits_since_a_version_any_file_may_be_new(tmp_path: Path) -> None:
    write_deltalake(tmp_path, rows("a"))
    first = plan_table(record(tmp_path)).version
    write_deltalake(tmp_path, rows("b"), mode="append")
    write_deltalake(tmp_path, rows("c"), mode="append")
    assert len(since(tmp_path, first) or ()) == 2
    DeltaTable(tmp_path).create_checkpoint()
    (tmp_path / "_delta_log" / f"{1:020}.json").unlink()
    assert since(tmp_path, first) is None


def test_a_version_of_another_table_proves_nothing(tmp_path: Path) -> None:
    write_deltalake(tmp_path, rows("a"))
    first = plan_table(record(tmp_path)).version
    shutil.rmtree(tmp_path)
    write_deltalake(tmp_path, rows("a"))
    write_deltalake(tmp_path, rows("b"), mode="append")
    assert since(tmp_path, first) is None
    assert since(tmp_path, "7-abc") is None
    assert since(tmp_path, "5577006791947779410") is None


def test_statistics_in_the_log_are_in_a_checkpoint_too(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t").create()
    log.commit(log.add("a.parquet", stats=statistics(3, minValues={"id": 1}, nullCount={"id": 0})))
    plain = current_snapshot(Location.of(str(log.root))).files
    DeltaTable(log.root).create_checkpoint()
    (log.folder / f"{0:020}.json").unlink()
    log.commit()
    assert current_snapshot(Location.of(str(log.root))).files == plain
