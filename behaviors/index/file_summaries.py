"""Summaries of a skip index: one row per file, with the values or bounds of its columns, and Bloom filters.

The Bloom filters are Parquet's split-block filters, with blocks of 256 bits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, BinaryIO

from distop_behaviors.index.index_folder import write_parquet
from distop_behaviors.index.key_values import Unindexable, arrow_type, canonical, hash_numbers, numbers
from distop_behaviors.index.lookup_keys import as_family

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    from distop_behaviors.index.key_columns import Piece, SourceFile
    from distop_behaviors.index.key_values import Numbers
    from distop_behaviors.index.lookup_keys import Key


GROUP_ROWS = 1 << 12
"""Files in a row group."""
_BOUND_BYTES = 256
"""Maximum bytes of a text as a bound: a longer lower bound is truncated, a longer upper bound is left out."""
_DISTINCT_BYTES = 1 << 16
"""Maximum bytes of the stored values of a column in a file. With more, no values are stored."""


class ColumnSummarizer:
    """Collects the summary of one column of one file."""

    def __init__(self, family: str | None, distinct: int, filtered: bool) -> None:
        self._family = family
        self._limit = distinct
        self._filtered = filtered
        self._values: Any = None
        """The unique values so far; None if there are too many."""
        self._numbers: list[Any] = []
        self._many = False
        self._low: Any = None
        self._high: Any = None
        self.nulls = 0

    def add(self, rows: int, array: Any) -> None:
        """Add rows. ``array``: None if the file does not have the column."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if array is None or self._family is None:
            self.nulls += rows
            return
        self.nulls += array.null_count
        array = array.drop_null()
        if not len(array):
            return
        once = pc.unique(array)
        if self._filtered:
            self._numbers.append(numbers(once, self._family))
        bounded = once.filter(pc.invert(pc.is_nan(once))) if self._family == "float" else once
        if len(bounded):
            ends = pc.min_max(bounded).as_py()
            self._low = ends["min"] if self._low is None else min(self._low, ends["min"])
            self._high = ends["max"] if self._high is None else max(self._high, ends["max"])
        if not self._many:
            self._values = once if self._values is None else pc.unique(pa.concat_arrays([self._values, once]))
            if len(self._values) > self._limit or self._values.nbytes > _DISTINCT_BYTES:
                self._values, self._many = None, True

    def row(self, name: str) -> dict[str, Any]:
        """The summary as columns of a row of the index."""
        import numpy as np

        low, high = self._low, self._high
        values = None if self._many else [] if self._values is None else self._values.to_pylist()
        if self._family in ("text", "binary"):
            high = None if high is None or len(high) > _BOUND_BYTES else high
            low = None if low is None else low[: _text_bound_end(low) if self._family == "text" else _BOUND_BYTES]
        if self._family == "text":
            low, high, values = _texts(low, high, values)
        filtered = None
        if values is None and self._filtered:
            filtered = build_filter(hash_numbers(np.unique(np.concatenate(self._numbers))))
        return {
            f"{name}.nulls": self.nulls,
            f"{name}.min": low,
            f"{name}.max": high,
            f"{name}.values": values,
            f"{name}.bloom": filtered,
        }


def _texts(low: bytes | None, high: bytes | None, values: list[bytes] | None) -> tuple[Any, Any, Any]:
    """The bytes decoded as texts; all None if one is not UTF-8: then only the Bloom filter can exclude the file."""
    try:
        return (
            None if low is None else low.decode(),
            None if high is None else high.decode(),
            None if values is None else [value.decode() for value in values],
        )
    except UnicodeDecodeError:
        return None, None, None


def _text_bound_end(text: bytes) -> int:
    """The length to which a text is truncated as a lower bound, at the end of a character."""
    end = _BOUND_BYTES
    while 0 < end < len(text) and text[end] & 0xC0 == 0x80:
        end -= 1
    return end


class Summaries:
    """Collects the summaries of several files."""

    def __init__(self, columns: Sequence[str], distinct: int, filtered: bool) -> None:
        self._columns = columns
        self._distinct = distinct
        self._filtered = filtered
        self._found: list[dict[str, Any]] = []
        self._families: list[str | None] = [None] * len(columns)

    @property
    def rows(self) -> int:
        """The number of collected files that :meth:`table` has not returned yet."""
        return len(self._found)

    def add(self, number: int, source: SourceFile, pieces: Iterable[Piece]) -> None:
        """Add the summary of a file. Adds nothing if a piece cannot be read."""
        parts = [ColumnSummarizer(family, self._distinct, self._filtered) for family in source.families]
        for piece in pieces:
            for part, array in zip(parts, piece.arrays, strict=True):
                part.add(piece.rows, array)
        row: dict[str, Any] = {"file": number}
        for name, part in zip(self._columns, parts, strict=True):
            row |= part.row(name)
        self._found.append(row)
        self._families = [mine or its for mine, its in zip(self._families, source.families, strict=True)]

    def table(self) -> pa.Table:
        """The collected summaries. They are then removed from memory."""
        import pyarrow as pa

        found, self._found = self._found, []
        return pa.Table.from_pylist(found, schema_of(self._columns, self._families))


def schema_of(columns: Sequence[str], families: Sequence[str | None]) -> pa.Schema:
    """The schema of summaries: the file's number, then nulls, bounds, values and filter of each column."""
    import pyarrow as pa

    fields = [pa.field("file", pa.int32(), nullable=False)]
    for name, family in zip(columns, families, strict=True):
        # A column that no file has yet has no values, of whatever type.
        kind = arrow_type(family) if family is not None else pa.int64()
        fields += [pa.field(f"{name}.nulls", pa.int64()), pa.field(f"{name}.min", kind), pa.field(f"{name}.max", kind)]
        fields += [pa.field(f"{name}.values", pa.list_(kind)), pa.field(f"{name}.bloom", pa.binary())]
    return pa.schema(fields)


def fitted(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Summaries converted to ``schema``. Types differ only for a column that none of these files has."""
    import pyarrow as pa

    columns = []
    for field in schema:
        column = table.column(field.name)
        if column.type != field.type:
            empty: Any = [] if field.name.endswith(".values") else None
            column = pa.array([empty] * table.num_rows, field.type)
        columns.append(column)
    return pa.table(columns, schema)


def write(table: pa.Table, file: BinaryIO) -> None:
    """Write summaries as a Parquet file. Raises OSError."""
    write_parquet(table, file, GROUP_ROWS)


def find(table: pa.Table, keys: Sequence[Key], columns: Sequence[str], families: Mapping[str, str | None]) -> Any:
    """A mask of the files that may have one of the keys. ``columns``: the columns of the keys."""
    import numpy as np

    found = np.zeros(table.num_rows, bool)
    for key in keys:
        wanted = ~found
        for name, value in zip(columns, key, strict=True):
            wanted &= _may_have(table, name, value, families[name])
        for n in np.flatnonzero(wanted):
            found[n] = all(
                _has(table, name, value, families[name], int(n)) for name, value in zip(columns, key, strict=True)
            )
    return found


def _may_have(table: pa.Table, name: str, value: Any, family: str | None) -> npt.NDArray[np.bool_]:
    """A mask of the files that may have a value, by NULL counts and bounds."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    if value is None:
        return _bools(pc.greater(table.column(f"{name}.nulls"), 0))
    if family is None:
        return np.zeros(table.num_rows, bool)
    try:
        wanted = as_family(value, family)
    except Unindexable:
        return np.ones(table.num_rows, bool)
    if wanted is None:
        return np.zeros(table.num_rows, bool)
    if isinstance(wanted, float) and math.isnan(wanted):
        return np.ones(table.num_rows, bool)
    scalar = pa.scalar(wanted, arrow_type(family))
    low = _bools(pc.less_equal(table.column(f"{name}.min"), scalar))
    high = _bools(pc.greater_equal(table.column(f"{name}.max"), scalar))
    return low & high


def _bools(found: Any) -> npt.NDArray[np.bool_]:
    """The mask as booleans. An unknown bound (NULL) excludes nothing."""
    import pyarrow.compute as pc

    values: npt.NDArray[np.bool_] = pc.fill_null(found, True).to_numpy()
    return values.copy()


def _has(table: pa.Table, name: str, value: Any, family: str | None, n: int) -> bool:
    """Whether one file may have a value, by its stored values or its Bloom filter."""
    import pyarrow as pa

    if value is None or family is None:
        return True
    try:
        wanted = numbers(canonical(pa.array([as_family(value, family)], arrow_type(family)), family), family)
    except Unindexable:
        return True
    values = table.column(f"{name}.values")[n]
    if values.is_valid:
        return bool((numbers(canonical(values.values, family), family) == wanted[0]).any())
    filtered = table.column(f"{name}.bloom")[n]
    return not filtered.is_valid or may_hold(filtered.as_py(), int(hash_numbers(wanted)[0]))


BITS = 12
"""Bits for each value: about one false positive in 300."""
MAX_BYTES = 1 << 20
"""Maximum size of a filter. Beyond some 700,000 values, false positives become more frequent."""

_SALT = (0x47B6137B, 0x44974D91, 0x8824AD5B, 0xA2B7289D, 0x705495C7, 0x2DF1424B, 0x9EFC4947, 0x5C6BFB31)


def build_filter(values: Numbers) -> bytes:
    """The filter of these values, which must be hashes (``key_values.hash_numbers`` hashes plain numbers)."""
    import numpy as np

    blocks = max(1, min(len(values) * BITS // 256 + 1, MAX_BYTES // 32))
    words = np.zeros(blocks * 8, np.uint32)
    hashed = values.view(np.uint64)
    block = ((hashed >> np.uint64(32)) * np.uint64(blocks)) >> np.uint64(32)
    low = (hashed & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    for n, salt in enumerate(_SALT):
        bit = np.uint32(1) << ((low * np.uint32(salt)) >> np.uint32(27))
        np.bitwise_or.at(words, block.astype(np.int64) * 8 + n, bit)
    return words.astype("<u4").tobytes()


def may_hold(data: bytes, value: int) -> bool:
    """Whether the value may be in the filter; False is certain. ``value``: a signed 64-bit hash."""
    hashed = value & 0xFFFFFFFFFFFFFFFF
    blocks = len(data) // 32
    start = ((hashed >> 32) * blocks >> 32) * 32
    low = hashed & 0xFFFFFFFF
    for n, salt in enumerate(_SALT):
        word = int.from_bytes(data[start + 4 * n : start + 4 * n + 4], "little")
        if not word >> ((low * salt & 0xFFFFFFFF) >> 27) & 1:
            return False
    return True
