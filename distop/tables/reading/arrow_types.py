"""Columns and types that Arrow reads exactly like Spark. For all others, :class:`SparkOnly` is raised."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Any

from distop.protocol.frozen import frozen
from distop.tables.reading import footer_facts
from distop.tables.reading.file_facts import Ambiguous, decimal_of, match

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pyarrow as pa
    from pyspark.sql.types import DataType

    from distop.tables.reading.file_facts import SparkType

_WHOLE = ("tinyint", "smallint", "int", "bigint")
_PLAIN_LOGICAL = frozenset({"NONE", "STRING", "INT", "DECIMAL", "DATE", "TIMESTAMP", "JSON"})
"""Logical types of leaves that Arrow reads like Spark."""
FIRST_DAY = date(1582, 10, 15)
"""Earlier dates may have been written in the Julian calendar; Spark may then read them as other dates."""
FIRST_TIME = datetime(1900, 1, 1)  # noqa: DTZ001 -- in UTC, or without a zone
"""Earlier times: as for FIRST_DAY."""
EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 -- in UTC, or without a zone
_ELEMENT = "\0"
"""Placeholder in a path for the elements of a list, which writers call ``element`` or ``item``."""


def micros_since_epoch(moment: datetime) -> int:
    """Microseconds since 1970 of a time without a zone, or of a UTC time with the zone removed."""
    return (moment - EPOCH) // timedelta(microseconds=1)


class SparkOnly(Exception):
    """Only Spark can read this for certain; the text has the reason."""


@frozen
class Reading:
    """The file's names of the table's columns.

    ``names``: the file's name by the table's name, None for a column that the file lacks; ``chosen``: the columns to
    request from Arrow, None for all.
    """

    names: Mapping[str, str | None]
    chosen: tuple[str, ...] | None


def by_name(found: Any, schema: Mapping[str, SparkType]) -> Reading:
    """The reading of a file with this Parquet schema, if columns are found by name, like in Spark. Raises SparkOnly."""
    columns, arrow = footer_facts.columns_of(found), found.to_arrow_schema()
    check_leaves(found, arrow)
    names: dict[str, str | None] = {}
    for name, kind in schema.items():
        try:
            mine = match(name, columns)
        except Ambiguous as e:
            raise SparkOnly(str(e)) from None
        if mine is not None and not widens(columns[mine], kind):
            raise SparkOnly(f"the column {name!r} has another type in some file")
        names[name] = mine
    return Reading(names, chosen_of(names, arrow))


def chosen_of(names: Mapping[str, str | None], arrow: Any) -> tuple[str, ...] | None:
    """The columns to request from Arrow, None for all.

    Raises SparkOnly if names are ambiguous: for a name with a dot, Arrow also returns fields of a struct.
    """
    chosen = tuple(dict.fromkeys(name for name in names.values() if name is not None))
    if len(set(arrow.names)) < len(arrow.names):
        raise SparkOnly("a file has several columns with the same name")
    if len(chosen) == len(arrow.names):
        return None
    if any("." in name for name in arrow.names):
        raise SparkOnly("a file has columns with a dot in their names")
    return chosen


def widens(narrow: SparkType, wide: SparkType) -> bool:
    """Whether Arrow and Spark convert values of the type ``narrow`` to the same values of ``wide``."""
    if narrow == wide:
        return True
    if not (isinstance(narrow, str) and isinstance(wide, str)):
        return False
    if narrow in _WHOLE and wide in _WHOLE:
        return _WHOLE.index(narrow) <= _WHOLE.index(wide)
    if (narrow, wide) == ("float", "double"):
        return True
    if narrow.startswith("decimal") and wide.startswith("decimal"):
        (p1, s1), (p2, s2) = decimal_of(narrow), decimal_of(wide)
        return p2 - p1 >= s2 - s1 >= 0
    return False


def check_leaves(found: Any, arrow: Any) -> None:
    """Raises SparkOnly for 96-bit timestamps, logical types that Spark may not know, and old layouts of lists and maps.

    Before Parquet specified the layout of lists and maps, writers had several, which readers guess.
    """
    paths = [path for column in arrow for path in _leaf_paths(column.type, column.name)]
    if len(paths) != len(found):
        raise SparkOnly("distop does not understand the schema of a file")
    for n, path in enumerate(paths):
        column = found.column(n)
        if column.physical_type == "INT96" or column.logical_type.type not in _PLAIN_LOGICAL:
            raise SparkOnly(f"the type of the column {column.path!r} is not supported")
        if column.path not in {path.replace(_ELEMENT, name) for name in ("element", "item")}:
            raise SparkOnly(f"the layout of the column {column.path!r} is not supported")


def _leaf_paths(kind: pa.DataType, path: str) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.types as t

    if isinstance(kind, pa.BaseExtensionType):
        raise SparkOnly(f"the type of the column {path!r} is not supported")
    if t.is_struct(kind):
        for n in range(kind.num_fields):
            yield from _leaf_paths(kind.field(n).type, f"{path}.{kind.field(n).name}")
    elif t.is_map(kind):
        yield from _leaf_paths(kind.key_type, f"{path}.key_value.key")
        yield from _leaf_paths(kind.item_type, f"{path}.key_value.value")
    elif t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind):
        yield from _leaf_paths(kind.value_type, f"{path}.list.{_ELEMENT}")
    else:
        yield path


_ARROW = {
    "boolean": "bool",
    "tinyint": "int8",
    "smallint": "int16",
    "int": "int32",
    "bigint": "int64",
    "float": "float32",
    "double": "float64",
    "date": "date32",
    "string": "string",
    "binary": "binary",
}


def arrow_type(kind: SparkType) -> pa.DataType:
    """Arrow's type for values of a Spark type. Raises SparkOnly for an unsupported type."""
    import pyarrow as pa

    if isinstance(kind, tuple):
        if kind[0] == "struct" and kind[1]:
            return pa.struct([pa.field(name, arrow_type(inner)) for name, inner in kind[1]])
        if kind[0] == "array":
            return pa.list_(arrow_type(kind[1]))
        if kind[0] == "map":
            return pa.map_(arrow_type(kind[1]), arrow_type(kind[2]))
    elif kind in _ARROW:
        found: pa.DataType = getattr(pa, _ARROW[kind] if kind != "boolean" else "bool_")()
        return found
    elif kind.startswith("decimal"):
        return pa.decimal128(*decimal_of(kind))
    elif kind in ("timestamp", "timestamp_ntz"):
        return pa.timestamp("us", "UTC" if kind == "timestamp" else None)
    raise SparkOnly(f"the type {kind} is not supported")


def spark_type(kind: SparkType) -> DataType:
    """PySpark's object for a type that :func:`arrow_type` supports."""
    from pyspark.sql import types as T

    if isinstance(kind, tuple):
        if kind[0] == "struct":
            return T.StructType([T.StructField(name, spark_type(inner)) for name, inner in kind[1]])
        if kind[0] == "array":
            return T.ArrayType(spark_type(kind[1]))
        return T.MapType(spark_type(kind[1]), spark_type(kind[2]))
    if kind.startswith("decimal"):
        return T.DecimalType(*decimal_of(kind))
    names = {
        "tinyint": "Byte",
        "smallint": "Short",
        "int": "Integer",
        "bigint": "Long",
        "timestamp_ntz": "TimestampNTZ",
    }
    found: DataType = getattr(T, names.get(kind, kind.capitalize()) + "Type")()
    return found
