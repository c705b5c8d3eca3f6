"""Parquet files that are damaged, encrypted, or unreadable for Spark, by kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe

from tests.support import footers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROWS = 2_000


class _Kms(pe.KmsClient):
    """A key management service that does not encrypt the keys."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:
        return key_bytes.hex().encode()

    def unwrap_key(self, wrapped_key: bytes, master_key_identifier: str) -> bytes:
        return bytes.fromhex(wrapped_key.decode())


def sound(path: Path, **options: Any) -> None:
    """An undamaged file. ``id``: 0, 1, 2…; ``name``: text, NULL in every tenth row. Two row groups."""
    names = [None if n % 10 == 0 else f"name {n}" for n in range(ROWS)]
    pq.write_table(pa.table({"id": range(ROWS), "name": names}), path, row_group_size=ROWS // 2, **options)


def encrypted(path: Path, *, plaintext_footer: bool) -> None:
    """A file with its footer key and another key for the column ``id``."""
    table = pa.table({"id": range(ROWS), "name": [f"name {n}" for n in range(ROWS)]})
    factory = pe.CryptoFactory(_Kms)
    configuration = pe.EncryptionConfiguration(
        footer_key="footer", column_keys={"column": ["id"]}, plaintext_footer=plaintext_footer
    )
    properties = factory.file_encryption_properties(pe.KmsConnectionConfig(), configuration)
    with pq.ParquetWriter(path, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)


def _changed(change: Callable[[Path], None], **options: Any) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        sound(path, **options)
        change(path)

    return make


def _corrupt_pages(path: Path) -> None:
    data = bytearray(path.read_bytes())
    begin = pq.read_metadata(path).row_group(1).column(1).data_page_offset
    data[begin : begin + 200] = bytes(reversed(data[begin : begin + 200]))
    path.write_bytes(data)


def _huge_page(path: Path) -> None:
    pq.write_table(pa.table({"id": range(ROWS)}), path, use_dictionary=False, compression="snappy")
    footers.with_huge_page(path, (1 << 31) - 16)


def with_lists(path: Path, **options: Any) -> None:
    """``id``: 0, 1, 2…; ``tags``: lists of one number, NULL in the second half. One uncompressed row group."""
    tags = [[n] if n < ROWS // 2 else None for n in range(ROWS)]
    pages = {"use_dictionary": False, "compression": "none", "data_page_size": 1, "write_batch_size": ROWS // 2}
    options = pages | options
    pq.write_table(pa.table({"id": range(ROWS), "tags": pa.array(tags, pa.list_(pa.int64()))}), path, **options)


def _fewer_values_than_rows(path: Path) -> None:
    with_lists(path)
    footers.with_values_of(path, "tags", ROWS // 2)


def _more_rows_than_lists(path: Path) -> None:
    """Each list has two numbers, so that the number of values equals the number of rows in the footer."""
    rows = ROWS // 2
    tags = pa.array([[n, n] for n in range(rows)], pa.list_(pa.int64()))
    pq.write_table(pa.table({"id": range(rows), "tags": tags}), path)
    footers.with_group_rows(path, 0, ROWS)


CONTRADICTIONS: dict[str, Callable[[Path], None]] = {
    "fewer-values-than-rows-in-lists": _fewer_values_than_rows,
    "more-rows-than-lists": _more_rows_than_lists,
    "chunks-in-another-order": _changed(lambda path: footers.with_chunks(path, 1, [1, 0])),
    "one-chunk-twice": _changed(lambda path: footers.with_chunks(path, 1, [0, 0])),
    "a-chunk-missing": _changed(lambda path: footers.with_chunks(path, 1, [0])),
    "values-without-rows": _changed(lambda path: footers.with_group_rows(path, 1, 0)),
    "fewer-rows-than-values": _changed(lambda path: footers.with_group_rows(path, 0, 7)),
    "rows-below-zero": _changed(lambda path: footers.with_group_rows(path, 1, -7)),
    "nulls-in-a-required-column": _changed(lambda path: footers.with_required(path, "name")),
    "shared-pages": _changed(lambda path: footers.with_shared_pages(path, statistics=False)),
    "shared-pages-and-statistics": _changed(lambda path: footers.with_shared_pages(path, statistics=True)),
    "pages-behind-the-end": _changed(footers.misplaced),
    "pages-of-no-bytes": _changed(lambda path: footers.misplaced(path, size=0)),
    "pages-below-zero": _changed(lambda path: footers.misplaced(path, size=-(1 << 24))),
    "values": _changed(lambda path: footers.with_values(path, 7)),
    "nulls": _changed(lambda path: footers.with_nulls(path, 3 * ROWS)),
}
"""Functions that write a file whose row groups contradict the schema, each other or themselves, by kind."""

KINDS: dict[str, Callable[[Path], None]] = {
    "sound": sound,
    "encrypted": lambda path: encrypted(path, plaintext_footer=False),
    "encrypted-columns": lambda path: encrypted(path, plaintext_footer=True),
    "counts-no-rows": _changed(lambda path: footers.with_rows(path, 0)),
    "counts-too-many-rows": _changed(lambda path: footers.with_rows(path, 3 * ROWS)),
    "rows-left-out": _changed(footers.left_out),
    "corrupt-pages": _changed(_corrupt_pages, compression="none"),
    "huge-page": _huge_page,
    "framing": _changed(lambda path: footers.with_codec(path, footers.HADOOP_LZ4), compression="lz4"),
    "codec": _changed(lambda path: None, compression="brotli"),
    "encoding": _changed(lambda path: None, use_dictionary=False, column_encoding={"id": "BYTE_STREAM_SPLIT"}),
    "cut": _changed(lambda path: path.write_bytes(path.read_bytes()[:-20])),  # type: ignore[arg-type,return-value]
    "no:colon": sound,
    **CONTRADICTIONS,
}
"""Functions that write a file of each kind to a path."""
