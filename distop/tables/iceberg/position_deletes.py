"""Writes files of position deletes again for moved data files, whose paths they name."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.texts import shown
from distop.storage.files import for_arrow
from distop.storage.store_errors import unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

PATH_ID = 2_147_483_546
"""The field id of the column with the paths of data files."""
_ID = b"PARQUET:field_id"
_BYTES = 1 << 30
"""Maximum bytes of a file: it is written in memory."""


def moved(path: str, new: Callable[[str], str | None]) -> bytes:
    """A file of position deletes with other paths of data files. ``new``: of a path; None: it stays.

    Raises InvalidArgument if it is not a file of position deletes, TableUnavailable if it cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    out = io.BytesIO()
    try:
        with for_arrow(path, follow=False) as opened:
            file = pq.ParquetFile(opened)
            schema = file.schema_arrow
            at = next((n for n, field in enumerate(schema) if _id_of(field) == PATH_ID), None)
            if at is None or file.metadata.serialized_size > _BYTES:
                raise InvalidArgument(f"the file {shown(path)} has no column with the paths of data files")
            with pq.ParquetWriter(out, schema, compression="zstd") as writer:
                for group in range(file.num_row_groups):
                    rows = file.read_row_group(group)
                    coded = rows.column(at).combine_chunks().dictionary_encode()
                    paths = [new(str(one)) or one for one in coded.dictionary.to_pylist()]
                    column = pa.DictionaryArray.from_arrays(coded.indices, pa.array(paths, schema.field(at).type))
                    writer.write_table(rows.set_column(at, schema.field(at), column.cast(schema.field(at).type)))
                    if out.tell() > _BYTES:
                        raise InvalidArgument(f"the file {shown(path)} is too large for a file of position deletes")
    except (OSError, pa.ArrowException) as error:
        raise unavailable(f"cannot read the position deletes in {path}: {error}", error) from error
    return out.getvalue()


def moved_bounds(bounds: list[dict[str, Any]], new: Callable[[str], str | None]) -> list[dict[str, Any]]:
    """The bounds of the columns of a file, in a manifest, for moved data files.

    Bounds may be cut, so one that is no path of a file of the table is left out.
    """
    found = []
    for one in bounds:
        if one["key"] != PATH_ID:
            found.append(one)
        elif (path := new(one["value"].decode("utf-8", "replace"))) is not None:
            found.append({**one, "value": path.encode()})
    return found


def _id_of(field: Any) -> int | None:
    found = (field.metadata or {}).get(_ID)
    return int(found) if found is not None else None
