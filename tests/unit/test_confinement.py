"""Files that metadata or links name: only those that may belong to the table are opened."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyiceberg import manifest as written
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestContent, ManifestEntry
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.schema import Schema
from pyiceberg.typedef import Record
from pyiceberg.types import LongType, NestedField

from distop.core.model import TableRecord
from distop.errors import InvalidArgument
from distop.tables import check_table, confinement, plan_table
from distop.tables.iceberg import check_files, metadata_file
from distop.tables.location import Location
from distop_behaviors.reading import manifests
from tests.support.lake import Folder

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMA = Schema(NestedField(1, "id", LongType(), required=False))
ROWS = pa.table({"id": [1, 2, 3]})
CONTENT = {"data": DataFileContent.DATA, "deletes": DataFileContent.POSITION_DELETES}


@pytest.fixture(autouse=True)
def whole() -> Iterator[None]:
    """Each test begins, and ends, as an executor that serves all tables."""
    confinement.confine(False)
    yield
    confinement.confine(False)


class DeleteManifest(written.ManifestWriterV2):
    """The writer of a manifest of delete files, which pyiceberg has not."""

    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


def forged(folder: Path, path: str, content: str = "data") -> str:
    """A table of one file, whose newest snapshot lists ``path`` too: its metadata file."""
    made = Folder(folder).new(SCHEMA)
    made.append(ROWS)
    snapshot = made.metadata.current_snapshot()
    assert snapshot is not None
    listed = snapshot.manifests(made.io)
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
    kind = DeleteManifest if content == "deletes" else written.ManifestWriterV2
    place = f"{folder}/metadata/forged.avro"
    with kind(UNPARTITIONED_PARTITION_SPEC, SCHEMA, made.io.new_output(place), snapshot.snapshot_id, "null") as writer:
        entry = ManifestEntry.from_args(
            status=written.ManifestEntryStatus.ADDED, snapshot_id=snapshot.snapshot_id, data_file=file
        )
        writer.add_entry(entry)
    out = made.io.new_output(snapshot.manifest_list + ".new")
    with written.write_manifest_list(2, out, snapshot.snapshot_id, None, 1, "null") as of:
        of.add_manifests([*listed, writer.to_manifest_file()])
    os.replace(snapshot.manifest_list + ".new", snapshot.manifest_list)  # noqa: PTH105
    return metadata_file(Location.of(str(folder)))


def asked(folder: Path, source: str) -> list[Any]:
    """Whoever reads the manifests, or has Spark read them."""
    return [
        lambda: plan_table(TableRecord("t", "iceberg", str(folder))),
        lambda: manifests.snapshot_of(source, frozenset()),
        lambda: check_files(source),
    ]


@pytest.mark.parametrize("content", CONTENT)
@pytest.mark.parametrize("url", ["http://127.0.0.1:9/latest", "s3a://bucket:80/x", "http:/127.0.0.1/x"])
def test_a_manifest_cannot_choose_a_host(tmp_path: Path, content: str, url: str) -> None:
    source = forged(tmp_path / "t", url, content)
    for ask in asked(tmp_path / "t", source):
        with pytest.raises(InvalidArgument, match="the path of a file"):
            ask()


def test_a_delete_file_lies_in_the_folder_of_its_table(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("PAR1")
    source = forged(tmp_path / "t", str(tmp_path / "secret"), "deletes")
    for ask in asked(tmp_path / "t", source):
        with pytest.raises(InvalidArgument, match=r"the file '.*/secret' lies outside of its table '.*/t'"):
            ask()


def test_a_delete_file_is_no_link_out_of_its_table_and_no_pipe(tmp_path: Path) -> None:
    path = tmp_path / "t" / "data" / "deletes.parquet"
    source = forged(tmp_path / "t", f"file://{path}", "deletes")
    (tmp_path / "secret").write_text("PAR1")
    path.symlink_to(tmp_path / "secret")
    for ask in asked(tmp_path / "t", source):
        with pytest.raises(InvalidArgument, match="lies outside of its table"):
            ask()
    path.unlink()
    os.mkfifo(path)
    for ask in asked(tmp_path / "t", source):
        with pytest.raises(InvalidArgument, match=r"deletes.parquet is not a regular file: it is a pipe"):
            ask()


def test_metadata_tell_of_a_delete_file_that_is_their_own(tmp_path: Path) -> None:
    source = forged(tmp_path / "t", str(tmp_path / "t" / "data" / "deletes.parquet"), "deletes")
    for ask in asked(tmp_path / "t", source):
        ask()


def test_a_copy_of_metadata_elsewhere_is_of_the_same_table(tmp_path: Path) -> None:
    source = forged(tmp_path / "t", str(tmp_path / "t" / "data" / "deletes.parquet"), "deletes")
    copy = tmp_path / "stage" / "view.metadata.json"
    copy.parent.mkdir()
    copy.write_bytes(Path(source).read_bytes())
    with pytest.raises(InvalidArgument, match="lies outside of its table"):
        check_files(str(copy))
    confinement.copied(source, str(copy))
    check_files(str(copy))
