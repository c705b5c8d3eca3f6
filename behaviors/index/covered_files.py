"""The list of the files that a generation covers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from distop.storage.files import TooLarge

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pyarrow as pa

    from distop_behaviors.index.generation import Generation
    from distop_behaviors.index.index_folder import Folder

LIST_BYTES = 1 << 30
"""Maximum bytes of a list of files, decompressed."""


def list_schema() -> pa.Schema:
    """The schema of a list of files, without the summaries of a skip index. ``stamp``: JSON, an integer or a string."""
    import pyarrow as pa

    kinds = {"file": pa.int32(), "path": pa.string(), "size": pa.int64(), "stamp": pa.string()}
    kinds |= {"rows": pa.int64(), "null_keys": pa.int64()}
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in kinds.items()])


def unchanged(old: pa.Table, here: Mapping[str, tuple[int, int | str]], again: set[str]) -> Any:
    """A mask of the covered files that are unchanged and were not indexed again."""
    import pyarrow as pa

    same = (here.get(path) == found and path not in again for path, found in _with_stamps(old))
    return pa.array(list(same), pa.bool_())


def covered_files(folder: Folder, generation: Generation | None) -> dict[str, tuple[int, int | str]]:
    """The files that a generation covers, with size and stamp."""
    if generation is None or generation.files is None:
        return {}
    return dict(_with_stamps(file_list(folder, generation, ["path", "size", "stamp"])))


def _with_stamps(files: pa.Table) -> Iterator[tuple[str, tuple[int, int | str]]]:
    paths, sizes = files.column("path").to_pylist(), files.column("size").to_pylist()
    return zip(paths, zip(sizes, stamps_of(files), strict=True), strict=True)


def stamps_of(files: pa.Table) -> list[int | str]:
    """The stamps in a list of files."""
    return [json.loads(text) for text in files.column("stamp").to_pylist()]


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
