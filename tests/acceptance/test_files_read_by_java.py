"""Files of an Iceberg table that Java opens are checked, even if Python reads other content in the same files."""

from __future__ import annotations

import json
import os
import socket
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyiceberg.manifest import read_manifest_list
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from distop.errors import InvalidArgument
from distop.protocol.records import TableRecord
from distop.storage import confinement
from distop.tables import plan_table
from distop.tables.iceberg import iceberg_rows
from distop.tables.iceberg.metadata_file import read_file, read_metadata
from distop.tables.iceberg.new_metadata import Production, without_catalog
from distop.tables.iceberg.snapshot_checks import check_files
from tests.support.lake import Folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from distop.tables.iceberg.metadata_file import MetadataFile

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]


_MAGIC = b"Obj\x01"
_MARK = bytes(16)
_ABSENT, _PRESENT = b"\x00", b"\x02"
_BOTH = b"\x80\x80\x80\x80\x10"


def _number(value: int) -> bytes:
    """A length in Avro's encoding."""
    left, found = value << 1, b""
    while left > 0x7F:
        found += bytes([left & 0x7F | 0x80])
        left >>= 7
    return found + bytes([left])


def _text(value: bytes) -> bytes:
    return _number(len(value)) + value


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, len(_MAGIC)

    def number(self) -> int:
        found = shift = 0
        while True:
            byte = self._data[self._at]
            self._at += 1
            found |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return (found >> 1) ^ -(found & 1)

    def take(self, size: int) -> bytes:
        self._at += size
        return self._data[self._at - size : self._at]


def _parts(path: Path) -> tuple[dict[bytes, bytes], bytes]:
    """The header of a file with one record, and that record."""
    reader = _Reader(path.read_bytes())
    header: dict[bytes, bytes] = {}
    while count := reader.number():
        for _ in range(count):
            name = reader.take(reader.number())
            header[name] = reader.take(reader.number())
    reader.take(len(_MARK))
    assert reader.number() == 1
    record = reader.take(reader.number())
    return header, zlib.decompress(record, -15) if header[b"avro.codec"] == b"deflate" else record


def _padded(schema: dict[str, Any]) -> dict[str, Any]:
    def maybe(name: str, number: int) -> dict[str, Any]:
        return {"name": name, "type": ["null", "bytes"], "default": None, "field-id": number}

    length = {"name": "pad_b", "type": "long", "field-id": 9998}
    return {**schema, "fields": [maybe("pad_a", 9997), length, *schema["fields"], maybe("pad_c", 9999)]}


def exchange_for_java(path: Path, other: Path) -> None:
    """Let Java read the record of the ``other`` file where Python reads that of ``path``.

    Each file has one record, and both have the same schema.
    """
    header, python = _parts(path)
    java = _parts(other)[1]
    of_python = _number(0) + python + _ABSENT
    of_java = java + _PRESENT + _number(len(of_python))
    # Python: pad_a is all of Java's. Java: pad_a is absent, pad_b is that length, and pad_c all of Python's.
    record = _BOTH + _text(of_java) + of_python
    header |= {b"avro.codec": b"null", b"avro.schema": json.dumps(_padded(json.loads(header[b"avro.schema"]))).encode()}
    meta = _number(len(header)) + b"".join(_text(name) + _text(value) for name, value in header.items()) + _number(0)
    path.write_bytes(_MAGIC + meta + _MARK + _number(1) + _text(record) + _MARK)


SCHEMA = Schema(NestedField(1, "id", LongType(), required=False))


@pytest.fixture
def tables(tmp_path: Path) -> tuple[Folder, Folder]:
    """Two tables with one commit each: the caller's, and another user's."""
    mine, other = Folder(tmp_path / "mine"), Folder(tmp_path / "other")
    for folder, number in ((mine, 1), (other, 42)):
        folder.new(SCHEMA).append(pa.table({"id": [number]}))
    return mine, other


def on_disk(path: str) -> Path:
    return Path(path.removeprefix("file://"))


def metadata_of(folder: Folder) -> tuple[Path, Path]:
    """The manifest list of a table, and its manifest."""
    metadata = read_metadata(str(folder.root / "metadata" / f"v{folder.version}.metadata.json"))[0]
    listed = on_disk(metadata.current_snapshot().manifest_list)
    (manifest,) = read_manifest_list(folder.io.new_input(str(listed)))
    return listed, on_disk(manifest.manifest_path)


def test_hole_5_a_manifest_list_that_java_reads_differently_is_refused(
    spark: SparkSession, tables: tuple[Folder, Folder]
) -> None:
    """Java once opened other manifests, on any host."""
    mine, other = tables
    (planned,) = plan_table(TableRecord("t", "iceberg", str(mine.root))).partitions
    exchange_for_java(metadata_of(mine)[0], metadata_of(other)[0])
    (again,) = plan_table(TableRecord("t", "iceberg", str(mine.root))).partitions
    assert again.files == planned.files, "Python reads the original record"
    with pytest.raises(InvalidArgument, match="Java and Python read the "):
        iceberg_rows.read(spark, planned.source, planned.files)
    session: Any = spark
    conf = session._jsparkSession.sessionState().newHadoopConf()
    table = session._jvm.org.apache.iceberg.hadoop.HadoopTables(conf).load(str(mine.root))
    with pytest.raises(InvalidArgument, match="Java and Python read the "):
        Production(spark, table, "t/apply/1")


@pytest.mark.parametrize("when", ["after an earlier check", "after the check"])
def test_hole_5_metadata_rewritten_in_place_makes_java_call_no_host(
    spark: SparkSession, tables: tuple[Folder, Folder], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The file's owner can reset its modification time, so that it once counted as the checked file."""
    mine, _ = tables
    (planned,) = plan_table(TableRecord("t", "iceberg", str(mine.root))).partitions
    check_files(read_file(planned.source))
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.0)

        def rewrite() -> None:
            path = Path(planned.source)
            before, text = path.stat(), path.read_text()
            listed = json.loads(text)["snapshots"][-1]["manifest-list"]
            host = f"hdfs://127.0.0.1:{server.getsockname()[1]}/"
            with path.open("r+") as file:
                file.write(text.replace(listed, host.ljust(len(listed), "x")))
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

        if when == "after the check":
            monkeypatch.setattr(iceberg_rows, "check_files", lambda file: (check_files(file), rewrite()))
            assert iceberg_rows.read(spark, planned.source, planned.files).count() == 1
        else:
            rewrite()
            with pytest.raises(InvalidArgument):
                iceberg_rows.read(spark, planned.source, planned.files)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_hole_2_java_loads_the_checked_metadata(
    spark: SparkSession, tables: tuple[Folder, Folder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer could once exchange the file after the check, and Java loaded it by path and quoted its content."""
    mine, _ = tables
    (planned,) = plan_table(TableRecord("t", "iceberg", str(mine.root))).partitions

    def read_and_exchange(source: str) -> MetadataFile:
        file = read_file(source)
        Path(source).write_text("12345")
        return file

    monkeypatch.setattr(iceberg_rows, "read_file", read_and_exchange)
    assert [row.id for row in iceberg_rows.read(spark, planned.source, planned.files).collect()] == [1]


@pytest.fixture
def confined() -> Iterator[None]:
    """This process is restricted to some tables."""
    confinement.confine(True)
    yield
    confinement.confine(False)


@pytest.mark.usefixtures("confined")
def test_an_executor_of_some_tables_can_change_a_table_of_a_catalog(
    spark: SparkSession, tables: tuple[Folder, Folder]
) -> None:
    """A change starts from a copy of the metadata in another folder, for which manifests were once refused."""
    mine, _ = tables
    source = str(mine.root / "metadata" / f"v{mine.version}.metadata.json")
    with without_catalog(spark, source) as table:
        made = Production(spark, table, "t/apply/1")
        assert [str(file.location()) for file in made._data_files()]


@pytest.mark.usefixtures("confined")
def test_hole_2_java_opens_no_file_of_another_table(spark: SparkSession, tables: tuple[Folder, Folder]) -> None:
    """Rows of other tables once appeared in samples."""
    mine, other = tables
    exchange_for_java(metadata_of(mine)[1], metadata_of(other)[1])
    (planned,) = plan_table(TableRecord("t", "iceberg", str(mine.root))).partitions
    with pytest.raises(InvalidArgument, match=r"other/data/.*' lies outside of its table '.*/mine'"):
        iceberg_rows.read(spark, planned.source, planned.files)
