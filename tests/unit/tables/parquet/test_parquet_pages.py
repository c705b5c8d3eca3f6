"""Pages whose headers do not match the footer, and footers that crash their reader."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.tables.parquet import footer_probe, page_headers
from distop.tables.reading.file_facts import Unreadable
from tests.support import footers
from tests.support.damaged import KINDS, ROWS, sound

if TYPE_CHECKING:
    from pathlib import Path

DAMAGED = {
    "huge-page": "its header states 2147483632 bytes",
    "framing": "it is compressed with LZ4 without Hadoop's framing, which Spark expects",
    "corrupt-pages": "there is no page header at byte",
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_page_is_named(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    KINDS[kind](path)
    with pytest.raises(Unreadable, match="is damaged") as found:
        page_headers.check(str(path), {"id", "name"})
    assert str(found.value).startswith(f"the file {path} cannot be read: a page of the column ")
    assert DAMAGED[kind] in str(found.value)


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(b"\x19\xf1" + b"\xff" * 8 + b"\x7f", id="a list without an end"),
        pytest.param(b"\x19" * 2_000, id="lists within lists"),
    ],
)
def test_a_malformed_header_is_reported_as_damaged(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"name": ["long " * n for n in range(500)]}), path, use_dictionary=False)
    with path.open("r+b") as file:
        file.seek(pq.read_metadata(path).row_group(0).column(0).data_page_offset)
        file.write(header)
    with pytest.raises(Unreadable, match="is damaged"):
        page_headers.check(str(path), {"name"})


def test_columns_are_checked_regardless_of_case(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    KINDS["corrupt-pages"](path)
    with pytest.raises(Unreadable, match="is damaged"):
        page_headers.check(str(path), {"NAME"})


def test_pages_of_other_columns_are_not_checked(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    KINDS["corrupt-pages"](path)
    page_headers.check(str(path), {"id"})


@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "zstd", "lz4", "brotli"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_valid_pages_of_all_kinds_pass(codec: str, version: str, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table(
        {
            "id": range(ROWS),
            "name": [None if n % 3 == 0 else "long " * (n % 7_000) for n in range(ROWS)],
            "nested": [{"inner": [n, None]} for n in range(ROWS)],
            "none": pa.nulls(ROWS, pa.int32()),
        }
    )
    options = {"data_page_version": version, "data_page_size": 1_000, "write_page_index": True}
    pq.write_table(table, path, compression=codec, row_group_size=ROWS // 3, **options)
    page_headers.check(str(path), set(table.column_names))


def test_a_footer_that_crashes_its_reader_is_named(tmp_path: Path) -> None:
    """pyarrow calls std::terminate for an unknown type. The other files are read."""
    files = []
    for name in ("a", "b", "c", "d"):
        path = tmp_path / f"{name}.parquet"
        sound(path)
        if name in "bd":
            footers.of_unknown_type(path)
        files.append((str(path), path.stat().st_size, path.stat().st_mtime_ns))
    found = footer_probe.crashing_footers(files, frozenset({"id"}))
    assert list(found) == [files[1][0], files[3][0]]
    for path, why in found.items():
        assert str(why).startswith(f"the file {path} is not a readable Parquet file: its footer is damaged")


def test_a_probe_can_be_stopped(tmp_path: Path) -> None:
    sound(tmp_path / "a.parquet")

    class Stopped(Exception):
        pass

    def stop() -> None:
        raise Stopped

    with pytest.raises(Stopped):
        footer_probe.crashing_footers([(str(tmp_path / "a.parquet"), 0, 0)] * 200_000, frozenset({"id"}), stop)
