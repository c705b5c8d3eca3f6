"""Files in the folder of a table, or named by its catalog, are read up to a limit only."""

from __future__ import annotations

import gzip
import io
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from distop.errors import InvalidArgument, TableUnavailable, UnsafePath
from distop.protocol.records import TableRecord
from distop.storage import files
from distop.storage.files import TooLarge, read, read_whole
from distop.storage.location import Location
from distop.tables import check_table, plan_table
from distop.tables.iceberg import bounded_io, guarded_catalogs, iceberg_catalogs, manifest_facts, metadata_file
from distop.tables.reading import parquet_tail
from distop.tables.reading.file_facts import Unreadable
from distop_behaviors.index.index_folder import Folder as IndexFolder
from tests.support.icebergrest import configure, sql_catalog
from tests.support.lake import Folder

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA = Schema(NestedField(1, "id", LongType(), required=False))
ROWS = pa.table({"id": [1, 2, 3]})


class Endless(io.RawIOBase):
    """A file without an end, such as a link to /dev/zero."""

    def __init__(self) -> None:
        self.given = 0

    def read(self, size: int = -1) -> bytes:
        assert size >= 0, "a read without a limit"
        self.given += size
        return bytes(size)


@pytest.fixture
def table(tmp_path: Path) -> Any:
    made = Folder(tmp_path / "t").new(SCHEMA)
    made.append(ROWS)
    return made


def record(tmp_path: Path) -> TableRecord:
    return TableRecord("t", "iceberg", str(tmp_path / "t"))


def current(tmp_path: Path) -> str:
    return metadata_file.current_metadata_file(Location.of(str(tmp_path / "t")))


def lower(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    for module in (bounded_io, parquet_tail):
        monkeypatch.setattr(module, "METADATA_BYTES", limit)


def test_no_more_is_read_than_the_limit_and_one_byte() -> None:
    assert read_whole(io.BytesIO(b"123"), 3, "f") == b"123"
    endless = Endless()
    with pytest.raises(TooLarge, match=r"the file f has more than 20000000 bytes, the limit for such a"):
        read_whole(endless, 20_000_000, "f")
    assert endless.given == 20_000_001


def test_a_file_that_is_read_whole_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(10))
    with pytest.raises(TooLarge, match="/f has more than 9 bytes"):
        read(str(tmp_path / "f"), 9)


def test_a_version_hint_of_iceberg_is_bounded(tmp_path: Path, table: Any) -> None:
    hint = tmp_path / "t" / "metadata" / "version-hint.text"
    hint.write_text("2")
    check_table(record(tmp_path))
    hint.write_text("2".rjust(65))
    with pytest.raises(InvalidArgument, match="version-hint.text' of .* has more than 64 bytes"):
        check_table(record(tmp_path))
    with pytest.raises(InvalidArgument, match="version-hint.text' of .* has more than 64 bytes"):
        plan_table(record(tmp_path))


@pytest.mark.parametrize("compressed", [False, True])
def test_metadata_of_iceberg_is_bounded(
    tmp_path: Path, table: Any, monkeypatch: pytest.MonkeyPatch, compressed: bool
) -> None:
    folder = tmp_path / "t" / "metadata"
    if compressed:  # a small file of a large text
        newest = folder / "v2.metadata.json"
        (folder / "v2.gz.metadata.json").write_bytes(gzip.compress(newest.read_bytes() + b" " * 1_000_000))
        newest.unlink()
    lower(monkeypatch, 100_000 if compressed else 100)
    with pytest.raises(InvalidArgument, match=r"v2\.(gz\.)?metadata\.json .* has more than 100(000)? bytes"):
        check_table(record(tmp_path))
    with pytest.raises(Unreadable, match="has more than 100(000)? bytes"):
        manifest_facts.snapshot_of(current(tmp_path), frozenset())


def test_hole_9_parsed_metadata_have_a_separate_limit(
    tmp_path: Path, table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_io, "PARSED_BYTES", 100)
    with pytest.raises(InvalidArgument, match=r"v2\.metadata\.json .* has more than 100 bytes"):
        check_table(record(tmp_path))


def test_manifests_of_iceberg_are_bounded(tmp_path: Path, table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata_file.read_metadata(current(tmp_path))  # larger than its manifests, and cached now
    lower(monkeypatch, 100)
    with pytest.raises(TableUnavailable, match=r"cannot read the .*: the file .*\.avro has more than 100 bytes"):
        plan_table(record(tmp_path))


def test_metadata_that_a_catalog_names_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sql_catalog(tmp_path / "lake") as catalog:
        catalog.create_namespace("sales")
        catalog.create_table("sales.orders", SCHEMA)
        configure(monkeypatch, type="sql", uri=f"sqlite:///{tmp_path}/lake/catalog.db")
        of = TableRecord("t", "iceberg", "sales.orders", {"catalog": "prod"})
        with iceberg_catalogs.opened(of) as found:
            assert found.metadata.schema() == SCHEMA
        lower(monkeypatch, 100)
        with pytest.raises(TableUnavailable, match="has more than 100 bytes"), iceberg_catalogs.opened(of):
            pass


def test_a_file_io_of_a_catalog_can_write_but_not_delete(tmp_path: Path) -> None:
    made = guarded_catalogs.made("x", {"type": "sql", "uri": f"sqlite:///{tmp_path}/c.db"})
    try:
        opened = made._load_file_io({}, str(tmp_path))
        assert isinstance(opened, bounded_io.BoundedIO)
        assert isinstance(opened._of(f"{tmp_path}/f"), PyArrowFileIO)
        with opened.new_output(f"{tmp_path}/f").create() as file:
            file.write(b"1")
        written = opened.new_input(f"{tmp_path}/f")
        assert (written.exists(), len(written), written.open().read()) == (True, 1, b"1")
        for one in (f"{tmp_path}/f", written, opened.new_output(f"{tmp_path}/f")):
            with pytest.raises(UnsafePath, match=r"/f was not removed: distop does not remove files that"):
                opened.delete(one)
        assert written.exists()
    finally:
        made.close()


def test_a_footer_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "f.parquet"
    with path.open("wb") as file:
        file.truncate(files.METADATA_BYTES + 100)  # sparse: takes no space on the disk
        file.seek(0, 2)
        file.write(files.METADATA_BYTES.to_bytes(4, "little") + b"PAR1")
    with pytest.raises(Unreadable, match="its footer has 268435456 bytes, and at most 268435448 are read"):
        parquet_tail.read(str(path))


def test_an_index_file_is_bounded(tmp_path: Path) -> None:
    generations = tmp_path / "_distop" / "index" / "i" / "generations"
    generations.mkdir(parents=True)
    with (generations / "000001.json").open("wb") as file:
        file.truncate(files.METADATA_BYTES + 1)
    with pytest.raises(InvalidArgument, match="cannot read the index file .*: .* has more than 268435456 bytes"):
        IndexFolder(str(tmp_path), "i").current()
