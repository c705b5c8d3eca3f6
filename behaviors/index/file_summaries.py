"""Summaries: a row for each file, with what values its columns have. Files that have none of the keys are skipped.

Bloom filters in blocks of 256 bits, as Parquet defines them: what is in them is found, and little else is.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, BinaryIO

from distop_behaviors.index.index_folder import write_parquet
from distop_behaviors.index.key_values import Unindexable, arrow_type, canonical, numbers, spread
from distop_behaviors.index.lookup_keys import as_family

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    from distop_behaviors.index.key_columns import Piece, Source
    from distop_behaviors.index.key_values import Numbers
    from distop_behaviors.index.lookup_keys import Key


GROUP_ROWS = 1 << 12
"""Files in a row group."""
_BOUND_BYTES = 256
"""Longer texts are cut as a lower bound, and are no upper bound."""
_DISTINCT_BYTES = 1 << 16
"""Of all the values of a column in a file: more are not kept."""


class Column:
    """What is known of one column of one file, piece by piece."""

    def __init__(self, family: str | None, distinct: int, filtered: bool) -> None:
        self._family = family
        self._limit = distinct
        self._filtered = filtered
        self._values: Any = None
        """Those met so far, each once; None where there were too many."""
        self._numbers: list[Any] = []
        self._many = False
        self._low: Any = None
        self._high: Any = None
        self.nulls = 0

    def add(self, rows: int, array: Any) -> None:
        """Further rows; ``array``: None where the file does not have the column."""
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
        """As it stands in the index."""
        import numpy as np

        low, high = self._low, self._high
        values = None if self._many else [] if self._values is None else self._values.to_pylist()
        if self._family in ("text", "binary"):
            high = None if high is None or len(high) > _BOUND_BYTES else high
            low = None if low is None else low[: _cut(low) if self._family == "text" else _BOUND_BYTES]
        if self._family == "text":
            low, high, values = _texts(low, high, values)
        filtered = None
        if values is None and self._filtered:
            filtered = made(spread(np.unique(np.concatenate(self._numbers))))
        return {
            f"{name}.nulls": self.nulls,
            f"{name}.min": low,
            f"{name}.max": high,
            f"{name}.values": values,
            f"{name}.bloom": filtered,
        }


def _texts(low: bytes | None, high: bytes | None, values: list[bytes] | None) -> tuple[Any, Any, Any]:
    """As texts. What is no UTF-8, which nothing keeps from being in a file, bounds nothing, and its file is told by its
    filter alone.
    """
    try:
        return (
            None if low is None else low.decode(),
            None if high is None else high.decode(),
            None if values is None else [value.decode() for value in values],
        )
    except UnicodeDecodeError:
        return None, None, None


def _cut(text: bytes) -> int:
    """How much of a text is kept as its lower bound: whole characters."""
    end = _BOUND_BYTES
    while 0 < end < len(text) and text[end] & 0xC0 == 0x80:
        end -= 1
    return end


class Summaries:
    """Collects the rows of files that follow each other."""

    def __init__(self, columns: Sequence[str], distinct: int, filtered: bool) -> None:
        self._columns = columns
        self._distinct = distinct
        self._filtered = filtered
        self._found: list[dict[str, Any]] = []
        self._families: list[str | None] = [None] * len(columns)

    @property
    def rows(self) -> int:
        """The files that were collected and are not forgotten."""
        return len(self._found)

    def add(self, number: int, source: Source, pieces: Iterable[Piece]) -> None:
        """One of a file; nothing where its pieces cannot be read to their end."""
        parts = [Column(family, self._distinct, self._filtered) for family in source.families]
        for piece in pieces:
            for part, array in zip(parts, piece.arrays, strict=True):
                part.add(piece.rows, array)
        row: dict[str, Any] = {"file": number}
        for name, part in zip(self._columns, parts, strict=True):
            row |= part.row(name)
        self._found.append(row)
        self._families = [mine or its for mine, its in zip(self._families, source.families, strict=True)]

    def table(self) -> pa.Table:
        """What was collected; it is then forgotten."""
        import pyarrow as pa

        found, self._found = self._found, []
        return pa.Table.from_pylist(found, schema_of(self._columns, self._families))


def schema_of(columns: Sequence[str], families: Sequence[str | None]) -> pa.Schema:
    """The file's number, then of each column nulls, bounds, values and filter."""
    import pyarrow as pa

    fields = [pa.field("file", pa.int32(), nullable=False)]
    for name, family in zip(columns, families, strict=True):
        # A column that no file has yet has no values, of whatever type.
        kind = arrow_type(family) if family is not None else pa.int64()
        fields += [pa.field(f"{name}.nulls", pa.int64()), pa.field(f"{name}.min", kind), pa.field(f"{name}.max", kind)]
        fields += [pa.field(f"{name}.values", pa.list_(kind)), pa.field(f"{name}.bloom", pa.binary())]
    return pa.schema(fields)


def fitted(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Summaries with the types of all: where they differ the column was in none of the files so far."""
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
    """As a Parquet file. Raises OSError."""
    write_parquet(table, file, GROUP_ROWS)


def find(table: pa.Table, keys: Sequence[Key], columns: Sequence[str], families: Mapping[str, str | None]) -> Any:
    """Which rows of the index may have one of the keys, as an array of booleans. ``columns``: those of the keys."""
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
    """By nulls and bounds, for all files at once."""
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
    """A bound that is not known excludes nothing."""
    import pyarrow.compute as pc

    values: npt.NDArray[np.bool_] = pc.fill_null(found, True).to_numpy()
    return values.copy()


def _has(table: pa.Table, name: str, value: Any, family: str | None, n: int) -> bool:
    """By values and filter, for one file that bounds do not exclude."""
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
    return not filtered.is_valid or may_hold(filtered.as_py(), int(spread(wanted)[0]))


BITS = 12
"""For each value: about one in 300 that are not there is taken to be."""
MAX_BYTES = 1 << 20
"""Of one filter: beyond some 700,000 values it errs more often."""

_SALT = (0x47B6137B, 0x44974D91, 0x8824AD5B, 0xA2B7289D, 0x705495C7, 0x2DF1424B, 0x9EFC4947, 0x5C6BFB31)


def made(values: Numbers) -> bytes:
    """The filter of some values, which are hashes: of numbers that are not, ``key_values.spread`` makes such."""
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
    """Whether the value may be in the filter; False is certain. ``value``: 64 bits, with a sign."""
    hashed = value & 0xFFFFFFFFFFFFFFFF
    blocks = len(data) // 32
    start = ((hashed >> 32) * blocks >> 32) * 32
    low = hashed & 0xFFFFFFFF
    for n, salt in enumerate(_SALT):
        word = int.from_bytes(data[start + 4 * n : start + 4 * n + 4], "little")
        if not word >> ((low * salt & 0xFFFFFFFF) >> 27) & 1:
            return False
    return True
