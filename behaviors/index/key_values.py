"""The types that can be indexed, and the 64-bit numbers that represent values in an index.

Equal values have equal numbers, whatever their width: an int and a bigint, a float and a double. Different values may
share a number, because texts and keys of several columns are hashed. So an index names candidates, and a lookup
compares the keys of the rows that it reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.tables.reading.arrow_types import EPOCH, FIRST_DAY, FIRST_TIME, micros_since_epoch
from distop.tables.reading.file_facts import ddl, decimal_of, problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    from distop.tables.reading.file_facts import SparkType

    Numbers = npt.NDArray[np.int64]
    Whole = npt.NDArray[np.int32]


_FAMILIES = {
    "boolean": "bool",
    "tinyint": "int",
    "smallint": "int",
    "int": "int",
    "bigint": "int",
    "float": "float",
    "double": "float",
    "date": "date",
    "timestamp": "timestamp",
    "timestamp_ntz": "timestamp_ntz",
    "string": "text",
    "binary": "binary",
}
_SEED, _MULTIPLIER_1, _MULTIPLIER_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The constants of the finalizer of splitmix64."""


class Unindexable(Exception):
    """A column, or a file's values in it, cannot be indexed; the text has the reason."""


def family_of(kind: SparkType) -> str:
    """The family of a type, whose values are comparable. Raises Unindexable.

    ``int`` for all whole numbers, ``decimal(2)`` for all decimals with two places, ``text``, and so on.
    """
    if isinstance(kind, str):
        if kind.startswith("decimal"):
            return f"decimal({decimal_of(kind)[1]})"
        if kind in _FAMILIES:
            return _FAMILIES[kind]
    why = problem(kind)
    raise Unindexable(why or f"only columns of single values can be indexed, not {ddl(kind)}")


def arrow_type(family: str) -> pa.DataType:
    """The Arrow type of a family's statistics and keys."""
    import pyarrow as pa

    if family.startswith("decimal"):
        return pa.decimal128(38, decimal_of(f"decimal(38,{family[8:-1]})")[1])
    return {
        "bool": pa.bool_(),
        "int": pa.int64(),
        "float": pa.float64(),
        "date": pa.date32(),
        "timestamp": pa.timestamp("us", "UTC"),
        "timestamp_ntz": pa.timestamp("us"),
        "text": pa.string(),
        "binary": pa.binary(),
    }[family]


def canonical(values: Any, family: str) -> Any:
    """An array from a file, converted to the family's type. Raises Unindexable, and Arrow's errors.

    Unsigned 64-bit numbers become signed ones with the same bits; as ``decimal(0)`` they are unchanged.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as t

    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if t.is_dictionary(values.type):
        values = values.dictionary_decode()
    if family in ("text", "binary"):
        # Spark compares texts by bytes, so the bytes are hashed; they need not be UTF-8.
        return values.cast(pa.large_binary())
    if t.is_timestamp(values.type):
        values = values.cast(pa.timestamp("us", values.type.tz))
        _not_before(values.cast(pa.int64()), micros_since_epoch(FIRST_TIME), "times before 1900")
    elif family == "date":
        _not_before(values.cast(pa.int32()), (FIRST_DAY - EPOCH.date()).days, "days before 15 October 1582")
    elif family == "float" and values.type != pa.float64():
        values = pc.cast(values, pa.float64())
    return values.cast(arrow_type(family))


def _not_before(values: Any, first: int, what: str) -> None:
    import pyarrow.compute as pc

    low = pc.min(values).as_py()
    if low is not None and low < first:
        raise Unindexable(f"it has {what}, which Spark may read in another calendar")


def numbers(values: Any, family: str) -> Numbers:
    """The numbers of an array from :func:`canonical` without nulls."""
    import numpy as np
    import pyarrow as pa

    if family in ("text", "binary"):
        return _hashed(values)
    if family == "float":
        # -0.0 equals 0.0, and all NaNs are equal.
        plain: npt.NDArray[np.float64] = values.to_numpy(zero_copy_only=False) + 0.0
        plain[np.isnan(plain)] = np.nan
        return plain.view(np.int64)
    if family.startswith("decimal"):
        # The lower half: values with more than 64 bits may share a number.
        halves = np.frombuffer(values.buffers()[1], np.int64) if len(values) else np.zeros(0, np.int64)
        return halves[2 * values.offset : 2 * (values.offset + len(values)) : 2].copy()
    if family == "date":
        values = values.cast(pa.int32())
    found: Numbers = values.cast(pa.int64()).to_numpy(zero_copy_only=False)
    return found


def hash_numbers(values: Numbers) -> Numbers:
    """The numbers hashed, for a Bloom filter, which uses only some bits of each number."""
    import numpy as np

    return _mix(values.view(np.uint64)).view(np.int64)


def key_numbers(parts: Sequence[Numbers], families: Sequence[str | None]) -> Numbers:
    """The keys of rows in postings, from the numbers of their columns.

    For a single column of numbers or times: its numbers. Otherwise a 32-bit hash, because sorted 64-bit hashes take
    four times the space. In a billion rows, one of four keys that do not exist then shares its hash with a row, and a
    file is read in vain.
    """
    import numpy as np

    if len(parts) == 1 and families[0] not in ("text", "binary"):
        return parts[0]
    mixed = np.zeros(len(parts[0]), np.uint64)
    for part in parts:
        mixed = _mix(mixed ^ _mix(part.view(np.uint64)))
    return mixed.view(np.int64) >> 32


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    import numpy as np

    values = values + np.uint64(_SEED)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MULTIPLIER_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MULTIPLIER_2)
    return values ^ (values >> np.uint64(31))


def _hashed(values: Any) -> Numbers:
    """A hash of each value's bytes, computed for all values at once, eight bytes at a time."""
    import numpy as np

    count = len(values)
    if count == 0:
        return np.zeros(0, np.int64)
    _, ends, data = values.buffers()
    offsets = np.frombuffer(ends, np.int64)[values.offset : values.offset + count + 1]
    starts, lengths = offsets[:-1] - offsets[0], np.diff(offsets)
    used = np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]] if data is not None else np.zeros(0, np.uint8)
    padded = np.concatenate([used, np.zeros(8, np.uint8)])
    words = np.ndarray((len(padded) - 7,), "<u8", padded.data, strides=(1,))
    found = _mix(lengths.astype(np.uint64))
    left, place = np.flatnonzero(lengths > 0), 0
    while len(left):
        rest = lengths[left] - place
        word = words[starts[left] + place]
        short = rest < 8
        word[short] &= (np.uint64(1) << (rest[short].astype(np.uint64) * np.uint64(8))) - np.uint64(1)
        found[left] = _mix(found[left] ^ word)
        left, place = left[rest > 8], place + 8
    return found.view(np.int64)
