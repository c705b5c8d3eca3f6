"""The columns of an Iceberg table according to its metadata: their types in Spark, and their fields by id.

Iceberg identifies a field only by its id: names and order are the table's, and may differ from those in a file.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.frozen import frozen
from distop.tables.reading.file_facts import Leaf, decimal_of, folded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distop.tables.reading.file_facts import Path, SparkType

_LOCAL = re.compile("(?:file:)?/+(?=[^/])")


@frozen
class IcebergField:
    """A column of single values outside of lists.

    ``type``: Iceberg's; ``defaulted``: in files without the field or its struct, it may have a default instead of NULL.
    """

    id: int
    leaf: Leaf
    type: Any
    defaulted: bool = False


def columns_of(schema: Any) -> dict[str, SparkType]:
    """The top-level columns with Spark's types."""
    return {field.name: spark_type(field.field_type) for field in schema.fields}


def fields_of(schema: Any, wanted: frozenset[str]) -> dict[Path, IcebergField]:
    """The fields below the ``wanted`` top-level columns (``file_facts.folded``), by their paths."""
    chosen = [field for field in schema.fields if folded(field.name) in wanted]
    return {field.leaf.path: field for field in _walk(chosen, (), defaulted=False)}


def _walk(fields: Any, path: Path, *, defaulted: bool) -> Iterator[IcebergField]:
    from pyiceberg import types

    for field in fields:
        here, given = (*path, field.name), defaulted or field.initial_default is not None
        kind = field.field_type
        if isinstance(kind, types.StructType):
            yield from _walk(kind.fields, here, defaulted=given)
        elif not isinstance(kind, types.ListType | types.MapType):
            yield IcebergField(field.field_id, _leaf(here, kind), kind, given)


_KINDS = {
    "boolean": ("bool", 1, 0),
    "int": ("int", 32, 0),
    "long": ("int", 64, 0),
    "float": ("float", 32, 0),
    "double": ("float", 64, 0),
    "date": ("date", 32, 0),
    "timestamp": ("timestamp", 64, 6),
    "timestamptz": ("timestamp", 64, 6),
    "string": ("string", 0, 0),
    "binary": ("binary", 0, 0),
}


def _leaf(path: Path, kind: Any) -> Leaf:
    """The leaf of a field; optional even if the table requires it, since older files may have NULLs."""
    from pyiceberg import types

    spark = spark_type(kind)
    name = spark if isinstance(spark, str) else ""
    if isinstance(kind, types.DecimalType) and name:
        return Leaf(path, "decimal", name, 0, kind.scale)
    found, bits, scale = _KINDS.get(str(kind), ("other", 0, 0))
    return Leaf(path, found, name, bits, scale)


def physical(field: IcebergField, raw: bytes | None) -> Any:
    """A bound in a manifest as a comparable value; None if there is none, or it is invalid."""
    from pyiceberg.conversions import from_bytes

    kind = field.leaf.kind
    if raw is None or kind == "other":
        return None
    if kind in ("string", "binary"):
        return bytes(raw)
    if kind == "decimal":
        return int.from_bytes(raw, "big", signed=True)
    try:
        return from_bytes(field.type, raw)
    except (struct.error, TypeError, ValueError):
        return None


def constant(field: IcebergField, value: Any) -> Any:
    """A partition's value from pyiceberg as a comparable value; None if it has no order."""
    from pyiceberg.utils.decimal import decimal_to_unscaled

    kind = field.leaf.kind
    if kind == "other":
        return None
    if kind == "decimal":
        return decimal_to_unscaled(value)
    return value.encode() if isinstance(value, str) else value


_PLAIN = {
    "boolean": "boolean",
    "int": "int",
    "long": "bigint",
    "float": "float",
    "double": "double",
    "date": "date",
    "timestamp": "timestamp_ntz",
    "timestamptz": "timestamp",
    "string": "string",
    "uuid": "string",
    "binary": "binary",
    "unknown": "void",
}


def spark_type(kind: Any) -> SparkType:
    """The Spark type in which Iceberg's reader returns values of an Iceberg type."""
    from pyiceberg import types

    if isinstance(kind, types.StructType):
        return ("struct", tuple((field.name, spark_type(field.field_type)) for field in kind.fields))
    if isinstance(kind, types.ListType):
        return ("array", spark_type(kind.element_type))
    if isinstance(kind, types.MapType):
        return ("map", spark_type(kind.key_type), spark_type(kind.value_type))
    if isinstance(kind, types.DecimalType):
        spark = f"decimal({kind.precision},{kind.scale})"
        try:
            decimal_of(spark)
        except InvalidArgument:
            return ("unreadable", f"Spark has no type {kind}")
        return spark
    if isinstance(kind, types.FixedType):
        return "binary"
    text = str(kind)
    return _PLAIN.get(text) or ("unreadable", f"Iceberg does not read the type {text} in Spark")


def local_path(location: str) -> str | None:
    """The local path of a file on a disk, which Iceberg names with or without a scheme; None for other files."""
    found = _LOCAL.match(location)
    return None if found is None else "/" + location[found.end() :]
