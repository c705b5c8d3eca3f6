"""What columns an index can be of, and the whole number of 64 bits that stands for a value in it.

Equal values have equal numbers, whatever width they were written in: an int and a bigint, a float and the double that
it is read as. Unequal ones may share one (texts and several columns are hashed): an index names files to look into,
and the condition is applied to what is read there.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from distop.tables.reading.arrow_types import FIRST_DAY, FIRST_TIME
from distop.tables.reading.file_facts import ddl, decimal_of, problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    from distop.tables.reading.file_facts import SparkType

    Numbers = npt.NDArray[np.int64]
    Whole = npt.NDArray[np.int32]

_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001

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
"""Of the finalizer of splitmix64."""


class Unindexable(Exception):
    """A column, or a file's values in it, cannot be indexed; the text says why."""


def family_of(kind: SparkType) -> str:
    """What stands for columns whose values compare: ``int`` for all whole numbers, ``decimal(2)`` for all decimals of
    two places, ``text``, …. Raises Unindexable.
    """
    if isinstance(kind, str):
        if kind.startswith("decimal"):
            return f"decimal({decimal_of(kind)[1]})"
        if kind in _FAMILIES:
            return _FAMILIES[kind]
    why = problem(kind)
    raise Unindexable(why or f"an index is of columns of single values, not of {ddl(kind)}")


def arrow_type(family: str) -> pa.DataType:
    """The type in which statistics and keys of a family are kept."""
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
    """An array as read from a file, as one of the family's type. Whole numbers of 64 bits without a sign become those
    with one that have the same bits; as ``decimal(0)`` they stay. Raises Unindexable, and what Arrow raises.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as t

    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if t.is_dictionary(values.type):
        values = values.dictionary_decode()
    if family in ("text", "binary"):
        # Spark compares bytes, and so are they hashed: whether they are UTF-8 is not asked.
        return values.cast(pa.large_binary())
    if t.is_timestamp(values.type):
        values = values.cast(pa.timestamp("us", values.type.tz))
        _not_before(values.cast(pa.int64()), (FIRST_TIME - _EPOCH) // timedelta(microseconds=1), "times before 1900")
    elif family == "date":
        _not_before(values.cast(pa.int32()), (FIRST_DAY - _EPOCH.date()).days, "days before 15 October 1582")
    elif family == "float" and values.type != pa.float64():
        values = pc.cast(values, pa.float64())
    return values.cast(arrow_type(family))


def _not_before(values: Any, first: int, what: str) -> None:
    import pyarrow.compute as pc

    low = pc.min(values).as_py()
    if low is not None and low < first:
        raise Unindexable(f"it has {what}, which Spark may read by another calendar")


def numbers(values: Any, family: str) -> Numbers:
    """The numbers of an array that :func:`canonical` gave and that has no nulls."""
    import numpy as np
    import pyarrow as pa

    if family in ("text", "binary"):
        return _hashed(values)
    if family == "float":
        # Zero and the negative zero are equal, and so are all that are not a number.
        plain: npt.NDArray[np.float64] = values.to_numpy(zero_copy_only=False) + 0.0
        plain[np.isnan(plain)] = np.nan
        return plain.view(np.int64)
    if family.startswith("decimal"):
        # The lower half: where a value has more than 64 bits, several share one.
        halves = np.frombuffer(values.buffers()[1], np.int64) if len(values) else np.zeros(0, np.int64)
        return halves[2 * values.offset : 2 * (values.offset + len(values)) : 2].copy()
    if family == "date":
        values = values.cast(pa.int32())
    found: Numbers = values.cast(pa.int64()).to_numpy(zero_copy_only=False)
    return found


def spread(values: Numbers) -> Numbers:
    """The same numbers, all bits of each depending on all: what a filter that looks at some bits is to be given."""
    import numpy as np

    return _mix(values.view(np.uint64)).view(np.int64)


def together(parts: Sequence[Numbers], families: Sequence[str | None]) -> Numbers:
    """What stands for rows in postings, by the numbers of their columns: of a single column of numbers or times these
    themselves; else a hash, of 32 bits, since sorted ones of 64 take four times the space. Of a billion rows, one key
    in four that is nowhere then shares its hash with some row, and a file is read for nothing.
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
    """A hash of each value's bytes, eight at a time for all values at once."""
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
