"""Deletion vectors that manifests name: invalid ones are neither given to Spark nor quoted."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.avro.file import AvroOutputFile
from pyiceberg.manifest import DATA_FILE_TYPE, DataFile, DataFileContent, FileFormat
from pyiceberg.typedef import Record

from distop.errors import InvalidArgument
from distop.tables.iceberg.row_deletes import VECTOR_BYTES, check_vector
from tests.support.row_deltas import DeleteManifest
from tests.unit.storage.test_confinement import readings, with_entry


def vector(bitmaps: bytes) -> bytes:
    body = b"\xd1\xd3\x39\x64" + bitmaps
    return len(body).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")


EMPTY = vector(bytes(8))
FAR = vector((1).to_bytes(8, "little") + b"\xff\xff\xff\x7f" + bytes(8))


class VectorManifest(DeleteManifest):
    """With the columns of version 3 of the format."""

    def new_writer(self) -> Any:
        schema = self._with_partition(3)
        return AvroOutputFile(
            output_file=self._output_file,
            file_schema=schema,
            record_schema=schema,
            schema_name="manifest_entry",
            metadata=self._meta,
        )


def with_vector(folder: Path, offset: int | None, size: int | None) -> str:
    """A table whose newest snapshot has a deletion vector in ``data/dv.puffin``: its metadata file."""
    file = DataFile.from_args(
        _table_format_version=3,
        content=DataFileContent.POSITION_DELETES,
        file_path=f"{folder}/data/dv.puffin",
        file_format=FileFormat.PUFFIN,
        partition=Record(),
        record_count=1,
        file_size_in_bytes=1000,
    )
    for name, value in (("content_offset", offset), ("content_size_in_bytes", size)):
        file[[field.name for field in DATA_FILE_TYPE[3].fields].index(name)] = value
    return with_entry(folder, file, VectorManifest)


@pytest.mark.parametrize(
    ("content", "offset", "size", "words"),
    [
        (b"root:x:0:0:secret", 4, 4, "bytes"),
        (b"root:x:0:0:secret" * 9, 4, 24, "not a Puffin file"),
        (b"PFA1root:x:0:0:secret" * 9, 4, 24, "magic number"),
        (b"PFA1" + EMPTY, 4, 2_147_483_000, "bytes"),
        (b"PFA1" + EMPTY, 4, VECTOR_BYTES, "exceeds the end"),
        (b"PFA1" + EMPTY, 1 << 62, len(EMPTY), "exceeds the end"),
        (b"PFA1" + EMPTY, -1, len(EMPTY), "offset is missing"),
        (b"PFA1" + EMPTY, None, None, "offset is missing"),
        (b"PFA1" + FAR, 4, len(FAR), "four billion"),
    ],
)
def test_hole_3_an_invalid_deletion_vector_is_neither_read_by_spark_nor_quoted(
    tmp_path: Path, content: bytes, offset: int | None, size: int | None, words: str
) -> None:
    source = with_vector(tmp_path / "t", offset, size)
    (tmp_path / "t" / "data" / "dv.puffin").write_bytes(content)
    for ask in readings(tmp_path / "t", source):
        with pytest.raises(InvalidArgument, match=words) as refused:
            ask()
        assert "secret" not in str(refused.value)


def test_a_valid_deletion_vector_is_accepted(tmp_path: Path) -> None:
    source = with_vector(tmp_path / "t", 4, len(EMPTY))
    (tmp_path / "t" / "data" / "dv.puffin").write_bytes(b"PFA1" + EMPTY + b"PFA1")
    for ask in readings(tmp_path / "t", source):
        ask()


def test_a_deletion_vector_in_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p")
    with pytest.raises(InvalidArgument, match="pipe"):
        check_vector(str(tmp_path / "p"), 4, 20)
    check_vector("s3://b/t/dv", 4, 20)
    with pytest.raises(InvalidArgument, match="bytes"):
        check_vector("s3://b/t/dv", 4, 1 << 30)
