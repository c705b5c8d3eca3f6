"""The columns of a Delta table according to its metadata: Spark's types, names in the files, and ids.

With column mapping, a column's name in the files and its id never change, whereas the table's name may.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.frozen import frozen
from distop.protocol.texts import shown
from distop.tables.delta.table_features import COLUMN_MAPPING
from distop.tables.reading.file_facts import Leaf, decimal_of, folded
from distop.tables.table_version import Field

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from distop.tables.reading.file_facts import Path, SparkType

_MODE = "delta.columnMapping.mode"
_ID = "delta.columnMapping.id"
_PHYSICAL = "delta.columnMapping.physicalName"
_PARQUET_ID = "parquet.field.id"
"""Spark's metadata of a column with its id in Parquet files."""
_NULLS = {"array": "containsNull", "map": "valueContainsNull"}
TYPE_CHANGES = "delta.typeChanges"
"""The metadata of a column with its former types."""
_DEFAULT = "EXISTS_DEFAULT"
"""Spark's metadata of a column with the value that files without the column have."""
_CHAR = "__CHAR_VARCHAR_TYPE_STRING"
"""Spark's metadata of a column of the type ``char`` or ``varchar``."""
_ID_BITS = 53
"""Bits of the ids that are made of names: certificates are JSON."""

_PLAIN = {
    "boolean": ("boolean", "bool", 1, 0),
    "byte": ("tinyint", "int", 32, 0),
    "short": ("smallint", "int", 32, 0),
    "integer": ("int", "int", 32, 0),
    "long": ("bigint", "int", 64, 0),
    "float": ("float", "float", 32, 0),
    "double": ("double", "float", 64, 0),
    "date": ("date", "date", 32, 0),
    "timestamp": ("timestamp", "timestamp", 64, 6),
    "timestamp_ntz": ("timestamp_ntz", "timestamp", 64, 6),
    "string": ("string", "string", 0, 0),
    "binary": ("binary", "binary", 0, 0),
    "variant": ("variant", "other", 0, 0),
}
"""Delta's type: Spark's type, and kind, bits and scale of a leaf."""


@frozen
class DeltaField:
    """A column of single values outside of lists.

    ``physical``: its path in files and statistics; ``id``: by column mapping; ``defaulted``: files without the column
    may have a value instead of NULL; ``widened``: some files may have a narrower type.
    """

    leaf: Leaf
    physical: Path
    id: int | None = None
    defaulted: bool = False
    widened: bool = False


class DeltaSchema:
    """The schema in a table's metadata. ``mode``: of column mapping, ``none``, ``name`` or ``id``."""

    def __init__(self, metadata: Mapping[str, Any], features: frozenset[str], location: str) -> None:
        """Raises InvalidArgument if it is invalid."""
        configuration = metadata.get("configuration") or {}
        self.mode = str(configuration.get(_MODE, "none")) if isinstance(configuration, Mapping) else "none"
        self._location = location
        self.text = str(metadata.get("schemaString"))
        if self.mode not in ("none", "name", "id") or (self.mode != "none" and COLUMN_MAPPING not in features):
            raise self._invalid(f"has the column mapping {shown(self.mode)}, which its protocol does not allow")
        try:
            parsed = json.loads(self.text)
            self._fields: list[Mapping[str, Any]] = list(parsed["fields"])
            self.columns: Mapping[str, SparkType] = {str(f["name"]): _type_of(f) for f in self._fields}
            self.physical = {str(f["name"]): self._physical(f) for f in self._fields}
            self._ids = {str(f["name"]): dict(self._walk_ids([f], "")) for f in self._fields}
            for _ in self._walk(self._fields, (), (), defaulted=False):
                pass  # a nested field may lack its name in files
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise self._invalid(f"cannot be read: {type(error).__name__}") from error
        if len({folded(name) for name in self.columns}) < len(self._fields):
            raise self._invalid("has a column name twice")
        named = metadata.get("partitionColumns") or []
        if not isinstance(named, list) or not set(map(str, named)) <= set(self.columns):
            raise self._invalid("lacks a partition column")
        self.partition_columns: Sequence[str] = [str(name) for name in named]

    def _invalid(self, why: str) -> InvalidArgument:
        return InvalidArgument(f"the schema of the Delta table {self._location!r} {why}")

    def _physical(self, field: Mapping[str, Any]) -> str:
        if self.mode == "none":
            return str(field["name"])
        return str(field["metadata"][_PHYSICAL])

    def _id(self, field: Mapping[str, Any]) -> int | None:
        return None if self.mode == "none" else int(field["metadata"][_ID])

    def mapped_id(self, column: str) -> int | None:
        """The id of a column by column mapping; None without that."""
        return self._id(self._field(column))

    def defaulted(self, column: str) -> bool:
        """Whether files without the column may have a value instead of NULL."""
        return _DEFAULT in (self._field(column).get("metadata") or {})

    def spark_only(self, column: str) -> str:
        """Why only Spark reads a column's values correctly; "" if others can.

        That holds for texts with a length, and for nested fields with other names in files.
        """
        field = self._field(column)
        own = field.get("metadata") or {}
        if _CHAR in own:
            return f"the column {column!r} has texts with a length"
        nested = isinstance(field["type"], Mapping)
        if nested and (self.mode == "id" or (self.mode == "name" and not _same_names(field["type"]))):
            return f"the column {column!r} has nested fields with other names in files"
        return ""

    def stored_field(self, column: str) -> dict[str, Any]:
        """A column with the names and ids of its files, for Spark's writer, as JSON. For column mapping only."""
        return self._stored(self._field(column))

    def _stored(self, field: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "name": self._physical(field),
            "type": self._stored_type(field["type"]),
            "nullable": True,
            "metadata": {_PARQUET_ID: self._id(field)},
        }

    def _stored_type(self, kind: Any) -> Any:
        if not isinstance(kind, Mapping):
            return kind
        if kind["type"] == "struct":
            return {"type": "struct", "fields": [self._stored(field) for field in kind["fields"]]}
        found = {
            name: self._stored_type(kind[name]) for name in ("elementType", "keyType", "valueType") if name in kind
        }
        return {"type": kind["type"], **found, _NULLS[kind["type"]]: True}

    def required(self, column: str) -> bool:
        """Whether a top-level column may have no NULL."""
        return self._field(column).get("nullable") is False

    def _field(self, column: str) -> Mapping[str, Any]:
        return next(field for field in self._fields if field["name"] == column)

    def fields(self, wanted: frozenset[str]) -> dict[Path, DeltaField]:
        """The fields below the ``wanted`` top-level columns (``file_facts.folded``), by their paths."""
        chosen = [field for field in self._fields if folded(str(field["name"])) in wanted]
        return {field.leaf.path: field for field in self._walk(chosen, (), (), defaulted=False)}

    def _walk(
        self, fields: Sequence[Mapping[str, Any]], path: Path, physical: Path, *, defaulted: bool
    ) -> Iterator[DeltaField]:
        for field in fields:
            here, there = (*path, str(field["name"])), (*physical, self._physical(field))
            own = field.get("metadata") or {}
            given = defaulted or _DEFAULT in own
            kind = field["type"]
            if isinstance(kind, Mapping):
                if kind["type"] == "struct":
                    yield from self._walk(kind["fields"], here, there, defaulted=given)
                continue
            yield DeltaField(_leaf(here, field), there, self._id(field), given, TYPE_CHANGES in own)

    # ------------------------------------------------------------------ ids

    def ids(self, tops: Collection[str]) -> dict[str, Field]:
        """These top-level columns with all nested fields, by dotted names."""
        found: dict[str, Field] = {}
        for top in self._ids:
            if top in tops:
                found |= self._ids[top]
        return found

    def name_of(self, field_id: int) -> str | None:
        """The dotted name of a field; None if it does not exist."""
        return next((name for name, field in self.ids(self._ids).items() if field.id == field_id), None)

    def _walk_ids(self, fields: Sequence[Mapping[str, Any]], parent: str) -> Iterator[tuple[str, Field]]:
        for field in fields:
            name = f"{parent}{field['name']}"
            yield from self._with_nested(name, field["type"], self._id(field))

    def _with_nested(self, name: str, kind: Any, own: int | None) -> Iterator[tuple[str, Field]]:
        number = _hashed(name) if own is None else own
        if not isinstance(kind, Mapping):
            yield name, Field(number, str(kind))
            return
        yield name, Field(number, str(kind["type"]))
        if kind["type"] == "struct":
            yield from self._walk_ids(kind["fields"], f"{name}.")
            return
        parts = {"array": {"element": "elementType"}, "map": {"key": "keyType", "value": "valueType"}}
        for part, key in parts[str(kind["type"])].items():
            # Elements of lists have no ids: theirs are made of the list's.
            inner = None if own is None else _hashed(f"{own}.{part}")
            yield from self._with_nested(f"{name}.{part}", kind[key], inner)


def _same_names(kind: Any) -> bool:
    """Whether all fields nested in a type of a mapped schema have their own names in files, too."""
    if not isinstance(kind, Mapping):
        return True
    if kind["type"] == "struct":
        return all(f["name"] == f["metadata"][_PHYSICAL] and _same_names(f["type"]) for f in kind["fields"])
    parts = ("elementType",) if kind["type"] == "array" else ("keyType", "valueType")
    return all(_same_names(kind[part]) for part in parts)


def _hashed(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    # Ids of column mapping are small numbers.
    return (int.from_bytes(digest, "big") >> (64 - _ID_BITS)) | 1 << 32


def schema_number(text: str) -> int:
    """A number for a schema, which has none in Delta."""
    return _hashed(text)


def _leaf(path: Path, field: Mapping[str, Any]) -> Leaf:
    """The leaf of a field; optional also if the schema requires it, since older files may have NULLs."""
    kind, spark = field["type"], _type_of(field)
    if not isinstance(spark, str):
        return Leaf(path, "other", "", 0, 0)
    if str((field.get("metadata") or {}).get(_CHAR, "")).startswith("char("):
        # Spark pads a text that another writer has left shorter, so bounds are not its values.
        return Leaf(path, "other", spark, 0, 0)
    if spark.startswith("decimal"):
        return Leaf(path, "decimal", spark, 0, decimal_of(spark)[1])
    _, found, bits, scale = _PLAIN[kind]
    return Leaf(path, found, spark, bits, scale)


def delta_type(spark: str) -> str:
    """Delta's name of a plain type of Spark."""
    return next((name for name, found in _PLAIN.items() if found[0] == spark), spark)


def _is_collated(field: Mapping[str, Any]) -> bool:
    """Whether a field has texts with a collation, which the schema's type does not show. Raises TypeError."""
    return any("collation" in key.lower() for key in field.get("metadata") or {})


def _type_of(field: Mapping[str, Any]) -> SparkType:
    """The Spark type of a field. Raises the errors of :func:`spark_type`, also for a name that is no valid text."""
    if not isinstance(field["name"], str):
        raise TypeError(f"invalid name {shown(field['name'])}")
    field["name"].encode()
    if _is_collated(field):
        # Spark would compare its texts by the collation, but bounds are ordered by bytes.
        return ("unreadable", "texts with a collation are not supported")
    return spark_type(field["type"])


def spark_type(kind: Any) -> SparkType:
    """The Spark type of a type in a schema. Raises ValueError, KeyError and TypeError for an invalid one."""
    if isinstance(kind, Mapping):
        if kind["type"] == "struct":
            return ("struct", tuple((str(f["name"]), _type_of(f)) for f in kind["fields"]))
        if kind["type"] == "array":
            return ("array", spark_type(kind["elementType"]))
        if kind["type"] == "map":
            return ("map", spark_type(kind["keyType"]), spark_type(kind["valueType"]))
        raise ValueError(f"unknown type {shown(kind['type'])}")
    if not isinstance(kind, str):
        raise TypeError(f"unknown type {shown(kind)}")
    if kind in _PLAIN:
        return _PLAIN[kind][0]
    if kind.startswith("decimal"):
        try:
            precision, scale = decimal_of(kind)
        except InvalidArgument as error:
            return ("unreadable", str(error))
        return f"decimal({precision},{scale})"
    return ("unreadable", f"Delta's type {shown(kind)} is not supported")
