"""The list of the files that a generation covers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.storage.files import TooLarge

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

    from distop_behaviors.index.generation import Generation
    from distop_behaviors.index.index_folder import Folder

LIST_BYTES = 1 << 30
"""Maximum bytes of a list of files, decompressed."""


def list_schema() -> pa.Schema:
    """The schema of a list of files, without the summaries of a skip index."""
    import pyarrow as pa

    kinds = {"file": pa.int32(), "path": pa.string(), "size": pa.int64(), "mtime_ns": pa.int64()}
    kinds |= {"rows": pa.int64(), "null_keys": pa.int64()}
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in kinds.items()])


def unchanged(old: pa.Table, here: Mapping[str, tuple[int, int | str]], again: set[str]) -> Any:
    """A mask of the covered files that are unchanged and were not indexed again."""
    import pyarrow as pa

    columns = (old.column(name).to_pylist() for name in ("path", "size", "mtime_ns"))
    return pa.array([here.get(p) == (s, m) and p not in again for p, s, m in zip(*columns, strict=True)], pa.bool_())


def covered_files(folder: Folder, generation: Generation | None) -> dict[str, tuple[int, int | str]]:
    """The files that a generation covers, with size and modification time."""
    if generation is None or generation.files is None:
        return {}
    found = file_list(folder, generation, ["path", "size", "mtime_ns"])
    return {p: (s, m) for p, s, m in zip(*(column.to_pylist() for column in found.columns), strict=True)}


def file_list(folder: Folder, generation: Generation, columns: list[str] | None = None) -> pa.Table:
    """The list of files of a generation.

    Raises OSError, UnsafePath if it is no regular file, Arrow's errors if it is damaged, and TooLarge.
    """
    import pyarrow.parquet as pq

    assert generation.files is not None
    key = folder.key_of(generation.files.name)
    with folder.store.open(key) as opened:
        found = pq.ParquetFile(opened.file, page_checksum_verification=True)
        groups = (found.metadata.row_group(n) for n in range(found.num_row_groups))
        if max(opened.stored.size, sum(group.total_byte_size for group in groups)) > LIST_BYTES:
            where = folder.store.location_of(key)
            raise TooLarge(f"the list of files {where} is larger than the maximum of {LIST_BYTES} bytes")
        return found.read(columns)
