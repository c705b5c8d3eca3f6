"""Damaged manifests of Iceberg tables, with which pyiceberg's reader may never end."""

from __future__ import annotations

import bz2
import json
import re
import threading
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from pyiceberg.avro.file import AvroFile
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from distop.errors import InvalidArgument, TableUnavailable
from distop.protocol.records import TableRecord
from distop.tables import plan_table
from distop.tables.iceberg import avro, avro_records
from distop.tables.iceberg.avro import Damaged, ManifestIO, check
from distop.tables.iceberg.manifest_facts import snapshot_of
from distop.tables.reading.file_facts import Unreadable
from tests.support.lake import Folder

SCHEMA = Schema(NestedField(1, "id", LongType(), required=False))
MARK = bytes(range(16))


def number(value: int) -> bytes:
    """A number in the encoding of Avro."""
    left = (value << 1) ^ (value >> 63)
    found = b""
    while left > 0x7F:
        found += bytes([left & 0x7F | 0x80])
        left >>= 7
    return found + bytes([left])


def text(value: bytes) -> bytes:
    return number(len(value)) + value


def file_of(*blocks: tuple[int, bytes], schema: str = '"long"') -> bytes:
    header = [(b"avro.schema", schema.encode()), (b"avro.codec", b"null")]
    meta = number(len(header)) + b"".join(text(name) + text(value) for name, value in header) + number(0)
    return b"Obj\x01" + meta + MARK + b"".join(number(n) + text(block) + MARK for n, block in blocks)


def table_of(tmp_path: Path) -> tuple[Any, Path]:
    """A table, and the file with the list of its manifests."""
    table = Folder(tmp_path / "t").new(SCHEMA)
    table.append(pa.table({"id": [1]}))
    path = table.metadata.current_snapshot().manifest_list
    return table, tmp_path / "t" / "metadata" / path.rsplit("/", 1)[1]


def looping(whole: Path, table: Any) -> bytes:
    """A list of manifests whose summaries of partitions have one more field, a text of negative length.

    A reader that skips the text returns to the summaries.
    """
    with AvroFile[Any](table.io.new_input(str(whole))) as reader:
        schema = json.loads(reader.header.meta["avro.schema"])
    record = b""
    for field in schema["fields"]:
        if field["name"] != "partitions":
            record += number(0)  # zero, an empty text, or none
            continue
        (summaries,) = [kind for kind in field["type"] if kind != "null"]
        columns = summaries["items"]["fields"]
        record += number(1) + number(1) + bytes(len(columns)) + number(-len(columns) - 2)
        columns.append({"name": "more", "type": "string", "field-id": 99_999})
    return file_of((1, record), schema=json.dumps(schema))


def test_valid_files_pass(tmp_path: Path) -> None:
    table, path = table_of(tmp_path)
    check(path.read_bytes(), "x")
    for manifest in table.metadata.current_snapshot().manifests(table.io):
        check(Path(manifest.manifest_path.removeprefix("file://")).read_bytes(), "x")
    check(file_of(), "x")
    check(file_of((2, b"\2\4"), (0, b""), (1, b"\6")), "x")


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"Obj\x02" + file_of()[4:],
        b"Obj\x01",
        b"Obj\x01" + b"\xff" * 40,  # a number without an end
        b"Obj\x01" + number(1) + number(-5) + b"abcdef",
        b"Obj\x01" + number(1 << 40) + file_of()[5:],
        file_of()[:-1],
        file_of((1, b"\2"))[:-1],
        file_of((1, b"\2")) + b"\0",
        file_of((-1, b"\2")),
        file_of() + number(1) + number(-3) + MARK,
        file_of() + number(1) + number(1 << 40) + MARK,
        file_of() + number(1) + text(b"\2") + MARK[::-1],
    ],
)
def test_the_error_names_the_damaged_file(wrong: bytes) -> None:
    with pytest.raises(Damaged, match=r"^the file /a/b\.avro is damaged: "):
        check(wrong, "/a/b.avro")


def test_a_header_in_blocks_with_sizes_is_valid() -> None:
    entry = text(b"avro.schema") + text(b'"long"')
    check(b"Obj\x01" + number(-1) + number(len(entry)) + entry + number(0) + MARK, "x")


def test_a_looping_list_of_manifests_is_reported(tmp_path: Path) -> None:
    table, path = table_of(tmp_path)
    path.write_bytes(looping(path, table))
    check(path.read_bytes(), "x")
    reason = rf"the file \S*{re.escape(path.name)} is damaged: an entry does not end in its block"
    with pytest.raises(TableUnavailable, match=rf"cannot read the snapshot .*: {reason}"):
        plan_table(TableRecord("t", "iceberg", str(tmp_path / "t")))
    with pytest.raises(Unreadable, match=rf"the metadata of .* cannot be read: {reason}"):
        snapshot_of(table.metadata_location, frozenset())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an exception raised in a finalizer
def test_a_list_of_manifests_whose_reader_does_not_end_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file is known with which it does not end, so the test makes it loop for any."""

    def never_ends(records: Any) -> Any:
        while True:
            pass

    monkeypatch.setattr(avro, "STALL_TIMEOUT", 0.2)
    monkeypatch.setattr(avro_records._Records, "__next__", never_ends)
    table, path = table_of(tmp_path)
    reason = rf"the file \S*{re.escape(path.name)} is damaged: its reader made no progress within 0\.2 s"
    with pytest.raises(TableUnavailable, match=rf"cannot read the snapshot .*: {reason}"):
        plan_table(TableRecord("t", "iceberg", str(tmp_path / "t")))
    with pytest.raises(Unreadable, match=rf"the metadata of .* cannot be read: {reason}"):
        snapshot_of(table.metadata_location, frozenset())


class _SlowFinalizer:
    """Loses an exception that is raised in it, as any finalizer does."""

    def __del__(self) -> None:
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_reader_is_stopped_even_if_a_finalizer_lost_the_first_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(avro, "STALL_TIMEOUT", 0.05)
    with pytest.raises(Damaged), ManifestIO(None).watched():
        _SlowFinalizer()
        while True:
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_code_after_an_abandoned_reader_gets_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(avro, "STALL_TIMEOUT", 0.05)
    manifests = ManifestIO(None)
    for _ in range(3):
        with pytest.raises(Damaged), manifests.watched():
            while True:
                pass
    assert sum(range(100_000)) == 4_999_950_000


def test_a_reader_that_ends_while_it_is_stopped_gets_no_later_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch once survived the block, and then stopped the thread's next work."""
    monkeypatch.setattr(avro, "STALL_TIMEOUT", 0.0004)
    before = set(threading.enumerate())
    for _ in range(1_000):
        with suppress(Damaged), ManifestIO(None).watched():
            until = time.monotonic() + 0.0004
            while time.monotonic() < until:
                pass
    for thread in set(threading.enumerate()) - before:
        if thread.name == avro.WATCHER:
            thread.join(10)
            assert not thread.is_alive()


def coded(codec: str, block: bytes, records: int = 1) -> bytes:
    whole = file_of((records, block))
    return whole.replace(text(b"avro.codec") + text(b"null"), text(b"avro.codec") + text(codec.encode()))


def packed(codec: str, size: int) -> bytes:
    """This many zeros, compressed."""
    if codec == "zstandard":
        return zstandard.ZstdCompressor().compress(bytes(size))
    if codec == "snappy":  # its length comes first
        return bytes([size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14 & 0x7F]) + b"\0\0\0\0"
    if codec == "bzip2":
        return bz2.compress(bytes(size // 2)) + bz2.compress(bytes(size - size // 2))
    return zlib.compress(bytes(size), 9, -15) if codec == "deflate" else bytes(size)


@pytest.mark.parametrize("codec", ["null", "deflate", "snappy", "zstandard", "bzip2"])
def test_hole_3_the_decompressed_size_of_a_manifest_is_bounded(monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    monkeypatch.setattr(avro, "METADATA_BYTES", 100_000)
    monkeypatch.setattr(avro, "RECORDS", 10)
    check(coded(codec, packed(codec, 100_000)), "x")
    with pytest.raises(InvalidArgument, match=r"the file /a/b.avro has more than 100000 decompressed bytes"):
        check(coded(codec, packed(codec, 100_001)), "/a/b.avro")
    half = number(1) + text(packed(codec, 60_000)) + MARK
    with pytest.raises(InvalidArgument, match=r"decompressed"):
        check(coded(codec, packed(codec, 60_000)) + half, "/a/b.avro")
    with pytest.raises(InvalidArgument, match=r"bytes or 10 records"):
        check(coded(codec, packed(codec, 60_000), records=11), "/a/b.avro")


def test_hole_3_a_manifest_that_is_too_large_is_refused_without_another_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, _ = table_of(tmp_path)
    (manifest,) = table.metadata.current_snapshot().manifests(table.io)
    Path(manifest.manifest_path.removeprefix("file://")).write_bytes(coded("deflate", packed("deflate", 100_000)))
    monkeypatch.setattr(avro, "METADATA_BYTES", 99_999)
    for ask in (
        lambda: plan_table(TableRecord("t", "iceberg", str(tmp_path / "t"))),
        lambda: snapshot_of(table.metadata_location, frozenset()),
    ):
        with pytest.raises(InvalidArgument, match="decompressed"):
            ask()
