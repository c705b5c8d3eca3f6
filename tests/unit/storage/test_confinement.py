"""Files named by metadata or links: only those that may belong to the table are opened."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg import manifest as written
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestEntry
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.schema import Schema
from pyiceberg.typedef import Record
from pyiceberg.types import LongType, NestedField

from distop.errors import InvalidArgument, TableUnavailable
from distop.protocol.plan import PartitionPlan, Pinned
from distop.protocol.records import TableRecord
from distop.storage import confinement
from distop.storage.files import local_path
from distop.storage.location import Location
from distop.tables import check_table, plan_table
from distop.tables.iceberg import (
    iceberg_rows,
    manifest_facts,
    metadata_file,
    snapshot_checks,
    snapshot_files,
    snapshot_plan,
)
from distop.tables.iceberg.iceberg_changes import new_files
from distop.tables.iceberg.java_tables import uri
from distop.tables.iceberg.metadata_file import current_metadata_file, read_file, read_metadata
from distop.tables.iceberg.snapshot_checks import check_files, check_loaded
from distop.worker.child_side.shared_files import with_files
from distop_behaviors.apply.hadoop_commit import HadoopTarget
from distop_behaviors.apply.schema_target import SchemaChange
from tests.support.lake import Folder
from tests.support.row_deltas import DeleteManifest

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMA = Schema(NestedField(1, "id", LongType(), required=False))
ROWS = pa.table({"id": [1, 2, 3]})
CONTENT = {"data": DataFileContent.DATA, "deletes": DataFileContent.POSITION_DELETES}


@pytest.fixture(autouse=True)
def unconfined() -> Iterator[None]:
    """Each test starts and ends as an executor that serves all tables."""
    confinement.confine(False)
    yield
    confinement.confine(False)


def forged(folder: Path, path: str, content: str = "data") -> str:
    """A table of one file, whose newest snapshot lists ``path`` too: its metadata file."""
    file = DataFile.from_args(
        _table_format_version=2,
        content=CONTENT[content],
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=1,
        file_size_in_bytes=1000,
        **dict.fromkeys(("column_sizes", "value_counts", "null_value_counts", "nan_value_counts")),
    )
    return with_entry(folder, file, DeleteManifest if content == "deletes" else written.ManifestWriterV2)


def with_entry(folder: Path, file: DataFile, writing: type[written.ManifestWriterV2]) -> str:
    """A table of one file, whose newest snapshot has a further manifest, of this ``file``: its metadata file."""
    made = Folder(folder).new(SCHEMA)
    made.append(ROWS)
    snapshot = made.metadata.current_snapshot()
    assert snapshot is not None
    listed = snapshot.manifests(made.io)
    place = made.io.new_output(f"{folder}/metadata/forged.avro")
    with writing(UNPARTITIONED_PARTITION_SPEC, SCHEMA, place, snapshot.snapshot_id, "null") as writer:
        writer.add_entry(
            ManifestEntry.from_args(
                status=written.ManifestEntryStatus.ADDED, snapshot_id=snapshot.snapshot_id, data_file=file
            )
        )
    out = made.io.new_output(snapshot.manifest_list + ".new")
    with written.write_manifest_list(2, out, snapshot.snapshot_id, None, 1, "null") as of:
        of.add_manifests([*listed, writer.to_manifest_file()])
    os.replace(snapshot.manifest_list + ".new", snapshot.manifest_list)  # noqa: PTH105
    return current_metadata_file(Location.of(str(folder)))


def forget() -> None:
    """Empty the caches, as in another executor."""
    for kept in (snapshot_plan._plans, snapshot_checks._checked, manifest_facts._snapshots):
        kept.clear()


def readings(folder: Path, source: str) -> list[Any]:
    """All functions that read the manifests, or let Spark read them."""
    return [
        lambda: plan_table(TableRecord("t", "iceberg", str(folder))),
        lambda: manifest_facts.snapshot_of(source, frozenset()),
        lambda: check_files(read_file(source)),
    ]


@pytest.mark.parametrize("content", CONTENT)
@pytest.mark.parametrize("url", ["http://127.0.0.1:9/latest", "s3a://bucket:80/x", "http:/127.0.0.1/x"])
def test_a_manifest_cannot_choose_a_host(tmp_path: Path, content: str, url: str) -> None:
    source = forged(tmp_path / "t", url, content)
    for ask in readings(tmp_path / "t", source):
        with pytest.raises(InvalidArgument, match="the path of a file"):
            ask()


def test_a_delete_file_outside_of_its_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("PAR1")
    source = forged(tmp_path / "t", str(tmp_path / "secret"), "deletes")
    for ask in readings(tmp_path / "t", source):
        with pytest.raises(InvalidArgument, match=r"the file '.*/secret' lies outside of its table '.*/t'"):
            ask()


def test_a_delete_file_that_is_a_link_out_of_its_table_or_a_pipe_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t" / "data" / "deletes.parquet"
    source = forged(tmp_path / "t", f"file://{path}", "deletes")
    (tmp_path / "secret").write_text("PAR1")
    path.symlink_to(tmp_path / "secret")
    for ask in readings(tmp_path / "t", source):
        with pytest.raises(InvalidArgument, match="lies outside of its table"):
            ask()
    path.unlink()
    os.mkfifo(path)
    for ask in readings(tmp_path / "t", source):
        with pytest.raises(InvalidArgument, match=r"deletes.parquet is not a regular file: it is a pipe"):
            ask()


def test_spark_is_not_asked_for_a_table_that_names_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = forged(tmp_path / "t", "http://127.0.0.1:9/latest", "deletes")
    monkeypatch.setattr(iceberg_rows, "check_installed", lambda jvm: None)
    with pytest.raises(InvalidArgument, match="has the scheme 'http'"):
        iceberg_rows._load(SimpleNamespace(_jvm=None), source, lineage=False)  # type: ignore[arg-type]


def test_a_delete_file_in_the_folder_of_its_table_is_accepted(tmp_path: Path) -> None:
    source = forged(tmp_path / "t", str(tmp_path / "t" / "data" / "deletes.parquet"), "deletes")
    for ask in readings(tmp_path / "t", source):
        ask()


def test_a_registered_copy_of_metadata_belongs_to_the_same_table(tmp_path: Path) -> None:
    source = forged(tmp_path / "t", str(tmp_path / "t" / "data" / "deletes.parquet"), "deletes")
    copy = tmp_path / "stage" / "view.metadata.json"
    copy.parent.mkdir()
    copy.write_bytes(Path(source).read_bytes())
    with pytest.raises(InvalidArgument, match="lies outside of its table"):
        check_files(read_file(str(copy)))
    confinement.note_copy(source, str(copy))
    check_files(read_file(str(copy)))


def test_a_link_out_of_a_parquet_table_is_refused(tmp_path: Path) -> None:
    table, other = tmp_path / "t" / "p=1", tmp_path / "other"
    for folder in (table, other):
        folder.mkdir(parents=True)
        pq.write_table(ROWS, folder / "a.parquet")
    (table / "b.parquet").symlink_to(other / "a.parquet")
    record = TableRecord("t", "parquet", str(tmp_path / "t"))
    for ask in (check_table, plan_table):
        with pytest.raises(InvalidArgument, match=r"the file '.*/t/p=1/b.parquet' lies outside of its table '.*/t'"):
            ask(record)
    (table / "b.parquet").unlink()
    (tmp_path / "t" / "p=2").symlink_to(other)
    with pytest.raises(InvalidArgument, match=r"the file '.*/t/p=2' lies outside of its table '.*/t'"):
        plan_table(record)


def test_a_link_within_a_table_or_to_a_listed_folder_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, other = tmp_path / "t", tmp_path / "other"
    for folder in (table, other):
        folder.mkdir()
        pq.write_table(ROWS, folder / "a.parquet")
    (table / "b.parquet").symlink_to(table / "a.parquet")
    (table / "c.parquet").symlink_to(other / "a.parquet")
    monkeypatch.setenv(confinement.LOCATIONS, f"/nowhere, {other}")
    (tmp_path / "link").symlink_to(table)
    for location in (table, tmp_path / "link"):
        planned = plan_table(TableRecord("t", "parquet", str(location)))
        assert [Path(f[0]).name for f in planned.partitions[0].files] == ["a.parquet", "b.parquet", "c.parquet"]


def test_an_executor_of_some_tables_reads_no_file_outside_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "pay.parquet"
    pq.write_table(ROWS, other)
    source = forged(tmp_path / "t", str(other))
    for ask in readings(tmp_path / "t", source):
        ask()  # add_files names files elsewhere
    forget()
    confinement.confine(True)
    for ask in readings(tmp_path / "t", source):
        with pytest.raises(InvalidArgument, match=r"pay.parquet' lies outside of its table '.*/t': move it there"):
            ask()
    monkeypatch.setenv(confinement.LOCATIONS, str(other.parent))
    for ask in readings(tmp_path / "t", source):
        ask()


def test_a_checked_folder_does_not_make_other_urls_valid() -> None:
    files = confinement.TableFiles("s3://bucket/t")
    files.check(("s3://bucket", "s3://bucket/t/a", "s3://bucket/t/b"))
    for path in ("s3://bucket:80", "s3://bucket/t/c?endpoint_override=x", "s3://bucket/t/c#x", "http://a/t"):
        with pytest.raises(InvalidArgument, match="the path of a file"):
            files.check((path,))


def test_urls_of_a_table_are_compared_by_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    confinement.confine(True)
    monkeypatch.setenv(confinement.LOCATIONS, "gs://old/t/")
    files = confinement.TableFiles(confinement.table_of("s3://bucket/t/metadata/v1.metadata.json"))
    files.check(("s3://bucket/t/data/a", "s3a://bucket/t/data/a", "gs://old/t/b"))
    for path in ("s3://bucket/t2/a", "s3://other/t/a", "gs://old/u", "/etc/passwd"):
        with pytest.raises(InvalidArgument, match="lies outside of its table 's3://bucket/t'"):
            files.check((path,))


def test_a_planned_file_that_became_a_link_is_not_read(tmp_path: Path) -> None:
    for folder in ("t", "other"):
        (tmp_path / folder).mkdir()
        pq.write_table(ROWS, tmp_path / folder / "a.parquet")
    record = TableRecord("t", "parquet", str(tmp_path / "t"))
    (planned,) = plan_table(record).partitions
    assert with_files(planned, None, "t/noop/1", record) is planned
    (tmp_path / "t" / "a.parquet").unlink()
    (tmp_path / "t" / "a.parquet").symlink_to(tmp_path / "other" / "a.parquet")
    beside = PartitionPlan(0, "p", beside=(Pinned(record, "v", files=planned.files),))
    for partition, of in ((planned, record), (beside, None)):
        with pytest.raises(InvalidArgument, match=r"a.parquet' lies outside of its table '.*/t'"):
            with_files(partition, None, "t/noop/1", of)


def test_a_forged_plan_with_a_file_outside_of_its_table_is_refused(tmp_path: Path) -> None:
    """Even if the executor serves all tables: a plan of Parquet files has only files below the folder."""
    t, other = str(tmp_path / "t"), str(tmp_path / "other")
    parquet, iceberg = TableRecord("t", "parquet", t), TableRecord("t", "iceberg", t)
    remote = TableRecord("t", "parquet", "s3://bucket/t")
    theirs = (f"{other}/a.parquet", 1, 1)

    def refused(partition: PartitionPlan, of: TableRecord, words: str = "lies outside of its table") -> None:
        for wanted, record in ((partition, of), (PartitionPlan(0, "p", beside=(_pinned(of, partition),)), None)):
            with pytest.raises(InvalidArgument, match=words):
                with_files(wanted, None, "t/noop/1", record)

    refused(PartitionPlan(0, "p", files=(theirs,)), parquet)
    refused(PartitionPlan(0, "p", files=((f"{t}/../other/a.parquet", 1, 1),)), parquet, "path of a file")
    refused(PartitionPlan(0, "p", files=((f"{t}2/a.parquet", 1, 1),)), parquet)
    refused(PartitionPlan(0, "p", files=(("s3://bucket/u/a.parquet", 1, 1),)), remote)
    refused(PartitionPlan(0, "p", files=(theirs,)), remote)
    refused(PartitionPlan(0, "p", files=(theirs,), source=f"{other}/metadata/v1.metadata.json"), parquet)
    refused(PartitionPlan(0, "p", files=(theirs,), source=f"{other}/metadata/v1.metadata.json"), iceberg)
    refused(PartitionPlan(0, "p", source=f"{t}/metadata/v1.metadata.json"), parquet, "has a metadata file for table t")
    for partition, of in (
        (PartitionPlan(0, "p", files=((f"{t}/p=1/a.parquet", 1, 1),)), parquet),
        (PartitionPlan(0, "p", files=((t, 1, 1),)), parquet),  # a location that is a file
        (PartitionPlan(0, "p", files=(("/a b/c.parquet", 1, 1),)), TableRecord("t", "parquet", "file:///a%20b")),
        (PartitionPlan(0, "p", files=(("s3://bucket/t/a.parquet", 1, 1),)), remote),
        (PartitionPlan(0, "p", source=f"{t}/metadata/v1.metadata.json"), iceberg),
    ):
        assert with_files(partition, None, "t/noop/1", of) is partition


def _pinned(record: TableRecord, partition: PartitionPlan) -> Pinned:
    return Pinned(record, "v", partition.files, source=partition.source)


@pytest.mark.parametrize("kind", ["iceberg", "parquet"])
def test_the_files_of_a_plan_belong_to_its_table_for_each_spelling_of_the_location(tmp_path: Path, kind: str) -> None:
    folder, link = tmp_path / "a b", tmp_path / "link"
    if kind == "iceberg":
        Folder(folder).new(SCHEMA).append(ROWS)
    else:
        (folder / "data").mkdir(parents=True)
        pq.write_table(ROWS, folder / "data" / "a.parquet")
    link.symlink_to(folder)
    for location in (str(folder), f"{folder}/", str(link), f"file://{tmp_path}/a%20b"):
        if kind == "iceberg" and "%" in location:
            continue  # pyiceberg does not accept such a path
        where = location if kind == "iceberg" else f"{location.rstrip('/')}/data"
        record = TableRecord("t", kind, where)
        (planned,) = plan_table(record).partitions
        assert planned.files
        assert with_files(planned, None, "t/noop/1", record) is planned


ODD = ("{t}/data/l/../../../other/a", "{t}/./data/a", "{t}//data/a", "{t}/data/", "{t}/data/..", "/a\0b")
ODDER = ("file://host{t}/a", "file:a", "data/a", "{t}/%2e%2e/a", "{t}/x%2F..%2Fa", "s3://b/t/../a", "s3://b//a")


@pytest.mark.parametrize("path", ODD + ODDER)
def test_hole_2_a_path_that_two_readers_read_differently_is_refused(tmp_path: Path, path: str) -> None:
    """Python follows links first; Hadoop removes ``..`` from the text first."""
    t = tmp_path / "t"
    (t / "deep" / "er").mkdir(parents=True)
    (t / "data").mkdir()
    (t / "data" / "l").symlink_to(t / "deep" / "er")
    for some in (False, True):
        confinement.confine(some)
        for deletes in (False, True):
            with pytest.raises(InvalidArgument, match="path of a file"):
                confinement.TableFiles(str(t)).check((path.format(t=t),), deletes=deletes)
    fine = (f"{t}/s=a%2Fb%20..c/x", f"file:{t}/..a/.b/c..", f"file://{t}/a", f"file:{t}/d")
    confinement.TableFiles(str(t)).check(fine)


@pytest.mark.parametrize("content", CONTENT)
def test_hole_2_a_path_with_two_dots_in_a_manifest_is_refused(tmp_path: Path, content: str) -> None:
    source = forged(tmp_path / "t", f"{tmp_path}/t/data/../data/a.parquet", content)
    for ask in readings(tmp_path / "t", source):
        with pytest.raises(InvalidArgument, match="path of a file"):
            ask()


@pytest.mark.parametrize("what", ["metadata-log", "statistics", "partition-statistics", "snapshots"])
def test_hole_2_a_path_with_two_dots_in_metadata_is_refused(tmp_path: Path, what: str) -> None:
    source = forged(tmp_path / "t", f"{tmp_path}/t/data/a.parquet")
    data = json.loads(Path(source).read_text())
    odd = f"{tmp_path}/t/../x"
    statistics = {"snapshot-id": 1, "statistics-path": odd, "file-size-in-bytes": 1}
    more = {
        "metadata-log": {"timestamp-ms": 1, "metadata-file": odd},
        "statistics": {**statistics, "file-footer-size-in-bytes": 1, "blob-metadata": []},
        "partition-statistics": statistics,
        "snapshots": {**data["snapshots"][0], "snapshot-id": 7, "manifest-list": odd},
    }
    data[what] = [*data.get(what, ()), more[what]]
    Path(source).write_text(json.dumps(data))
    for ask in readings(tmp_path / "t", source):
        with pytest.raises(InvalidArgument, match="path of a file"):
            ask()


def test_hole_2_a_scheme_counts_only_at_the_beginning(tmp_path: Path) -> None:
    """A path with ``://`` further on is local, for Hadoop too."""
    (tmp_path / "secret").write_text("PAR1")
    (tmp_path / "t" / "data" / "x:").mkdir(parents=True)
    files = confinement.TableFiles(str(tmp_path / "t"))
    for path in (f"{tmp_path}/t/data/x://../../../secret", f"{tmp_path}/secret", f"a{tmp_path}/t/x://b", "x+y:/t/a"):
        with pytest.raises(InvalidArgument, match=r"path of a file|outside"):
            files.check((path,), deletes=True)
    files.check((f"{tmp_path}/t/data/x:/a",), deletes=True)
    assert local_path("/t/x://a") == Path("/t/x:/a")
    assert local_path("s3://b/a") is None


@pytest.mark.parametrize("linked", ["folder", "file"])
def test_hole_2_metadata_of_another_table_are_not_read_through_a_link(tmp_path: Path, linked: str) -> None:
    for name in ("t", "other"):
        source = forged(tmp_path / name, f"{tmp_path}/{name}/data/a.parquet")
    own = tmp_path / "t" / "metadata"
    if linked == "folder":
        own.rename(tmp_path / "t" / "was")
        own.symlink_to(tmp_path / "other" / "metadata")
    else:
        (own / Path(source).name).unlink()
        (own / Path(source).name).symlink_to(source)
    ours = f"{own}/{Path(source).name}"
    with pytest.raises(InvalidArgument, match="symbolic link"):
        current_metadata_file(Location.of(str(tmp_path / "t")))
    for ask in readings(tmp_path / "t", ours):
        with pytest.raises(InvalidArgument, match="symbolic link"):
            ask()


def test_hole_2_nothing_is_committed_through_a_link(tmp_path: Path) -> None:
    source = forged(tmp_path / "t", f"{tmp_path}/t/data/a.parquet")
    context: Any = None
    target = HadoopTarget(TableRecord("t", "iceberg", str(tmp_path / "t")), context)
    head = target.load()
    assert head.source == source
    before = {path.name for path in (tmp_path / "t" / "metadata").iterdir()}
    (tmp_path / "t" / "metadata").rename(tmp_path / "other")
    (tmp_path / "t" / "metadata").symlink_to(tmp_path / "other")
    with pytest.raises(InvalidArgument, match="symbolic link"):
        target.swap(head, SchemaChange(required=(1,)))
    assert {path.name for path in (tmp_path / "other").iterdir()} == before


@pytest.mark.parametrize("changed", ["list", "manifest"])
def test_hole_2_replaced_manifests_are_checked_again(tmp_path: Path, changed: str) -> None:
    """The metadata file is unchanged, so the files that it names counted as checked."""
    fine = forged(tmp_path / "t", f"{tmp_path}/t/data/a.parquet", "deletes")
    check_files(read_file(fine))
    planned = plan_table(TableRecord("t", "iceberg", str(tmp_path / "t")))
    evil = forged(tmp_path / "u", "http://127.0.0.1:9/latest", "deletes")
    lists = [read_metadata(source)[0].current_snapshot().manifest_list for source in (fine, evil)]
    if changed == "list":
        os.replace(lists[1], lists[0])  # noqa: PTH105
    else:
        os.replace(tmp_path / "u/metadata/forged.avro", tmp_path / "t/metadata/forged.avro")  # noqa: PTH105
    table = TableRecord("t", "iceberg", str(tmp_path / "t"))
    for ask in (lambda: check_files(read_file(fine)), lambda: plan_table(table)):
        with pytest.raises(InvalidArgument, match="has the scheme 'http'"):
            ask()
    assert planned.partitions


@pytest.mark.parametrize("by", ["planning", "a check", "statistics"])
def test_hole_2_metadata_replaced_during_the_read_lead_java_to_no_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    source = forged(tmp_path / "t", f"{tmp_path}/t/data/a.parquet")
    data = json.loads(Path(source).read_text())
    (snapshot,) = data["snapshots"]
    host = "hdfs://evil.example:8020/x"
    evil = tmp_path / "evil"
    evil.write_text(json.dumps(data | {"snapshots": [snapshot | {"manifest-list": host}]}))
    manifests_of = snapshot_files.manifests_of

    def exchanged(*given: Any) -> Any:
        if evil.exists():
            evil.rename(source)
        return manifests_of(*given)

    for module in (snapshot_files, manifest_facts):
        monkeypatch.setattr(module, "manifests_of", exchanged)
    if by == "planning":
        plan_table(TableRecord("t", "iceberg", str(tmp_path / "t")))
    elif by == "a check":
        check_files(read_file(source))
    else:
        manifest_facts.snapshot_of(source, frozenset())
    assert not evil.exists()
    with pytest.raises(InvalidArgument, match="names the host"):
        check_loaded(read_file(source), str(snapshot["snapshot-id"]), host)


def test_hole_2_metadata_overwritten_on_an_object_store_are_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the name identifies a file there."""
    for module in (snapshot_files, snapshot_checks, metadata_file, manifest_facts):
        monkeypatch.setattr(module, "identity", lambda location: (location,))
    source = forged(tmp_path / "t", f"{tmp_path}/t/data/a.parquet")
    plan_table(TableRecord("t", "iceberg", str(tmp_path / "t")))
    data = json.loads(Path(source).read_text())
    (snapshot,) = data["snapshots"]
    host = "hdfs://evil.example:8020/x"
    Path(source).write_text(json.dumps(data | {"snapshots": [snapshot | {"manifest-list": host}]}))
    with pytest.raises(InvalidArgument, match="names the host"):
        check_files(read_file(source))


def test_hole_2_spark_reads_the_snapshot_that_was_checked(tmp_path: Path) -> None:
    source = forged(tmp_path / "t", f"{tmp_path}/t/data/a.parquet")
    snapshot = read_metadata(source)[0].current_snapshot()
    place, file = snapshot.manifest_list.removeprefix("file://"), read_file(source)
    check_loaded(file, str(snapshot.snapshot_id), f"file:{place}")
    for id_, listed in ((str(snapshot.snapshot_id), f"{place}2"), ("7", place)):
        with pytest.raises(InvalidArgument, match="Java and Python read the "):
            check_loaded(file, id_, listed)
    Path(place).write_bytes(Path(place).read_bytes() + b"\0")
    with pytest.raises(TableUnavailable, match="cannot (be )?read"):
        check_loaded(file, str(snapshot.snapshot_id), place)


def test_hole_2_a_former_snapshot_with_manifests_of_another_table_is_refused(tmp_path: Path) -> None:
    source, other = (forged(tmp_path / name, f"{tmp_path}/{name}/data/a.parquet") for name in ("t", "other"))
    listed = read_metadata(other)[0].current_snapshot().manifest_list
    data = json.loads(Path(source).read_text())
    data["snapshots"].append({**data["snapshots"][0], "snapshot-id": 7, "manifest-list": listed})
    Path(source).write_text(json.dumps(data))
    confinement.confine(True)
    metadata, io = read_metadata(source)
    with pytest.raises(InvalidArgument, match="lies outside of its table"):
        new_files(metadata, io, "7")


def test_hole_5_a_metadata_path_that_iceberg_reads_differently_is_refused(tmp_path: Path) -> None:
    """With a ``#`` in its path, Spark loaded a file that was not checked, and manifests of any host."""
    fine = forged(tmp_path / "t", f"{tmp_path}/t/data/a.parquet")
    odd = f"{fine}#all_data_files"
    Path(odd.removeprefix("file://")).write_bytes(Path(fine.removeprefix("file://")).read_bytes())
    for ask in (lambda odd: check_files(read_file(odd)), read_metadata, uri):
        with pytest.raises(InvalidArgument, match="has a '#', which Iceberg reads as another path"):
            ask(odd)
    assert uri(fine)


def test_hole_9_the_length_of_each_path_is_bounded() -> None:
    files = confinement.TableFiles("s3://b/t")
    files.check(["s3://b/t/data/a.parquet"])
    with pytest.raises(InvalidArgument, match="has over 4096 characters"):
        files.check(["s3://b/t/data/" + "x" * 5_000])
