"""The facts in a Parquet footer: columns with Spark's types, row counts and statistics, after a check of the footer."""

from __future__ import annotations

import json
import re
from collections import Counter
from operator import gt
from typing import TYPE_CHECKING, Any

from distop.protocol.frozen import frozen
from distop.tables.reading.file_facts import Chunk, FileFacts, Leaf, Unreadable, folded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa

    from distop.tables.reading.parquet_tail import Footer

_FIELD_ID = b"PARQUET:field_id"
"""pyarrow's key for a field's id in its metadata."""

_SIGNED_ORDER = re.compile(r"parquet-cpp-arrow|parquet-rs|parquet-mr version 1\.1[0-9]")
"""Writers whose bounds of decimals in byte arrays are ordered as numbers; older ones compared bytes as unsigned."""

_SIGNED = {8: "tinyint", 16: "smallint", 32: "int", 64: "bigint"}
_UNSIGNED = {8: "smallint", 16: "int", 32: "bigint", 64: "decimal(20,0)"}
_DIGITS = {"milliseconds": 3, "microseconds": 6}


def columns_of(schema: Any) -> Mapping[str, Any]:
    """The top-level columns of a file's Parquet schema, with Spark's types. Raises Unreadable."""
    return Schemas(frozenset()).of("", schema).columns


@frozen
class _Schema:
    """A Parquet schema (``parsed_from``, pyarrow's) with the columns and leaves that are read from its files.

    ``places``: the indexes of ``leaves`` in the schema; ``ids``: paths by field id. ``every_leaf``: the path of each
    leaf in Parquet's spelling, and whether it is inside a list.
    """

    parsed_from: Any
    columns: dict[str, Any]
    leaves: dict[tuple[str, ...], Leaf]
    places: dict[tuple[str, ...], int]
    ids: dict[int, tuple[str, ...]]
    every_leaf: Sequence[tuple[str, bool]]


class Schemas:
    """Parses Parquet schemas; keeps the last one, since the files of a table usually have the same.

    ``wanted``: the top-level columns (``file_facts.folded``) whose statistics are needed, or ids of fields.
    """

    def __init__(self, wanted: frozenset[str | int]) -> None:
        self.wanted = wanted
        self._last: _Schema | None = None

    def of(self, path: str, schema: Any) -> _Schema:
        """The schema of the file at ``path``. Raises Unreadable."""
        last = self._last
        if last is not None and last.parsed_from.equals(schema):
            return last
        columns: dict[str, Any] = {}
        leaves: dict[tuple[str, ...], Leaf] = {}
        places: dict[tuple[str, ...], int] = {}
        arrow = schema.to_arrow_schema()
        ids = dict(_ids(arrow, ()))
        index = 0
        for field in arrow:
            where: list[tuple[tuple[str, ...], int]] = []
            columns[field.name], index = _spark_type(field.type, schema, index, (field.name,), where)
            named = folded(field.name) in self.wanted
            for leaf_path, leaf_index in where:
                if named or ids.get(leaf_path) in self.wanted:
                    leaves[leaf_path] = _leaf(schema.column(leaf_index), leaf_path)
                    places[leaf_path] = leaf_index
        if index != len(schema):
            raise Unreadable(f"the file {path} has a schema that distop does not understand")
        every_leaf = [(leaf.path, leaf.max_repetition_level > 0) for leaf in map(schema.column, range(index))]
        spelled = Counter(leaf for leaf, _ in every_leaf)
        for leaf_path, leaf_index in [*places.items()]:
            # ``a.b`` may be a name or a path, and the chunks of the two cannot be distinguished.
            if spelled[every_leaf[leaf_index][0]] > 1:
                del leaves[leaf_path], places[leaf_path]
        self._last = _Schema(schema, columns, leaves, places, {i: p for p, i in ids.items()}, every_leaf)
        return self._last


def _ids(fields: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    """Paths and Iceberg ids of the fields outside of lists, including structs."""
    import pyarrow.types as t

    for field in fields:
        found = (field.metadata or {}).get(_FIELD_ID)
        if found is not None:
            yield (*path, field.name), int(found)
        if t.is_struct(field.type):
            yield from _ids([field.type.field(i) for i in range(field.type.num_fields)], (*path, field.name))


def facts_of(path: str, footer: Footer, schemas: Schemas) -> FileFacts:
    """The facts in a file's footer. Raises Unreadable if the footer contradicts itself in the places of its data.

    If only row counts or statistics contradict each other, the facts have columns and rows, and the contradiction.
    """
    metadata = footer.metadata
    schema = schemas.of(path, metadata.schema)
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    why = _contradiction(groups, schema, footer.size)
    if why:
        raise Unreadable(f"the file {path} cannot be read: its footer contradicts itself: {why}")
    rows = sum(group.num_rows for group in groups)
    if rows != metadata.num_rows:
        why = f"it counts {metadata.num_rows} rows, but its row groups have {rows}"
    elif named := [leaf.path for leaf in schema.leaves.values() if _bounds_of_nulls(groups, schema.places[leaf.path])]:
        why = f"{'.'.join(named[0])!r} has only NULLs in a row group, but also a minimum and a maximum"
    if why:
        kinds = schema.columns, schema.leaves
        missing = max(metadata.num_rows - rows, 0)
        return FileFacts(path, rows, *kinds, ids=schema.ids, contradiction=why, missing=missing)
    signed_order = bool(_SIGNED_ORDER.match(metadata.created_by or ""))
    chunks = {
        leaf.path: tuple(_chunk(g, schema.places[leaf.path], leaf, signed_order) for g in groups if g.num_rows)
        for leaf in schema.leaves.values()
    }
    return FileFacts(path, rows, schema.columns, schema.leaves, chunks, ids=schema.ids)


def _contradiction(groups: Sequence[Any], schema: _Schema, size: int) -> str:
    """The contradiction between a file's row groups, its schema and its ``size`` in bytes; "" if there is none.

    Number of values and byte ranges are checked for all columns, since readers find a row group by the ranges of all
    its columns; paths and NULLs only for columns whose statistics are used, because that takes as long as all the rest.
    """
    begins: list[int] = []
    ends: list[int] = []
    for group in groups:
        rows, count = group.num_rows, group.num_columns
        if rows < 0:
            return f"a row group has {rows} rows"
        if count != len(schema.every_leaf):
            return f"a row group has {count} column chunks, but the schema has {len(schema.every_leaf)} columns"
        for n, (path, repeated) in enumerate(schema.every_leaf):
            column = group.column(n)
            values = column.num_values
            if values != rows and not (repeated and values > rows > 0):
                return f"{path!r} has {values} values in a row group of {rows} rows"
            if not rows:
                continue
            begin, dictionary = column.data_page_offset, column.dictionary_page_offset
            if dictionary and 0 < dictionary < begin:
                begin = dictionary
            end = begin + column.total_compressed_size
            if begin < 0 or end <= begin:
                return f"the pages of {path!r} have {end - begin} bytes from byte {begin} on"
            if end > size:
                return f"the pages of {path!r} end beyond the file's {size} bytes"
            begins.append(begin)
            ends.append(end)
        for leaf_path, n in schema.places.items():
            why = _column_contradiction(group.column(n), rows, schema.every_leaf[n][0], schema.leaves[leaf_path])
            if why:
                return why
    begins.sort()
    ends.sort()
    # Without an overlap, each chunk ends before the next one starts.
    return "two column chunks share pages" if any(map(gt, ends, begins[1:])) else ""


def _column_contradiction(column: Any, rows: int, path: str, leaf: Leaf) -> str:
    """The contradiction in a leaf column whose statistics are used; ``path``: its path in Parquet's spelling."""
    if column.path_in_schema != path:
        return f"a row group has a column chunk of {column.path_in_schema!r} in the place of {path!r}"
    statistics = column.statistics
    nulls = statistics.null_count if statistics is not None and statistics.has_null_count else 0
    if not 0 <= nulls <= rows:
        return f"{path!r} has {nulls} NULLs in a row group of {rows} rows"
    if nulls and not leaf.optional:
        return f"{path!r} is a required column, but has {nulls} NULLs in a row group"
    return ""


def _bounds_of_nulls(groups: Sequence[Any], index: int) -> bool:
    """Whether a row group has only NULLs in a column, but also a minimum and a maximum."""
    found = ((group.num_rows, group.column(index).statistics) for group in groups if group.num_rows)
    return any(s is not None and s.has_null_count and s.null_count == rows and s.has_min_max for rows, s in found)


def _chunk(group: Any, index: int, leaf: Leaf, signed_order: bool) -> Chunk:
    """The statistics of a leaf column outside of lists in one row group.

    ``signed_order``: whether the file's writer orders decimals in byte arrays as numbers.
    """
    statistics = group.column(index).statistics
    if statistics is None:
        return Chunk(group.num_rows, None)
    nulls = statistics.null_count if statistics.has_null_count else None
    bounded = statistics.has_min_max and leaf.kind != "other"
    if bounded and leaf.kind == "decimal" and statistics.physical_type not in ("INT32", "INT64"):
        bounded = signed_order and statistics.physical_type == "FIXED_LEN_BYTE_ARRAY"
    if not bounded:
        return Chunk(group.num_rows, nulls)
    return Chunk(group.num_rows, nulls, _number(statistics.min_raw, leaf), _number(statistics.max_raw, leaf))


def _number(raw: Any, leaf: Leaf) -> Any:
    """A physical value as a comparable one: unsigned integers as such, decimals unscaled."""
    if leaf.kind == "decimal" and isinstance(raw, bytes):
        return int.from_bytes(raw, "big", signed=True)
    if leaf.kind == "uint" and isinstance(raw, int) and raw < 0:
        return raw + (1 << (64 if leaf.bits == 64 else 32))
    return raw


def _spark_type(
    kind: pa.DataType, schema: Any, index: int, path: tuple[str, ...], where: list[tuple[tuple[str, ...], int]]
) -> tuple[Any, int]:
    """Spark's type, and the index of the next leaf; ``where`` gets paths and indexes of the leaves outside of lists."""
    import pyarrow.types as t

    if isinstance(kind, _extension()):
        extension: Any = kind
        kind = extension.storage_type
    if t.is_struct(kind):
        fields = []
        for i in range(kind.num_fields):
            child = kind.field(i)
            inner, index = _spark_type(child.type, schema, index, (*path, child.name), where)
            fields.append((child.name, inner))
        return ("struct", tuple(fields)), index
    if t.is_map(kind):
        key, index = _spark_type(kind.key_type, schema, index, path, [])
        item, index = _spark_type(kind.item_type, schema, index, path, [])
        return ("map", key, item), index
    if t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind):
        inner, index = _spark_type(kind.value_type, schema, index, path, [])
        return ("array", inner), index
    column = schema.column(index)
    if column.max_repetition_level == 0:
        where.append((path, index))
    return _primitive(column)[1], index + 1


def _extension() -> type:
    import pyarrow as pa

    return pa.BaseExtensionType  # type: ignore[no-any-return]


def _leaf(column: Any, path: tuple[str, ...]) -> Leaf:
    kind, spark, bits, scale = _primitive(column)
    return Leaf(path, kind, spark if isinstance(spark, str) else "", bits, scale, column.max_definition_level > 0)


def _primitive(column: Any) -> tuple[str, Any, int, int]:
    """Kind, Spark type, bits and scale of a leaf, by Spark's rules for Parquet."""
    logical = json.loads(column.logical_type.to_json())
    name, physical = logical["Type"], column.physical_type
    if name == "Int":
        bits, signed = logical["bitWidth"], logical["isSigned"]
        return ("int", _SIGNED[bits], bits, 0) if signed else ("uint", _UNSIGNED[bits], bits, 0)
    if name == "Decimal":
        precision, scale = logical["precision"], logical["scale"]
        if precision > 38:
            return "other", ("unreadable", f"Spark has no decimal of {precision} digits"), 0, 0
        return "decimal", f"decimal({precision},{scale})", 0, scale
    if name == "Date":
        return "date", "date", 32, 0
    if name in ("Timestamp", "Time"):
        unit = logical["timeUnit"]
        if name == "Time" or unit not in _DIGITS:
            what = f"{name.lower()}s in {unit}"
            return "other", ("unreadable", f"Spark does not read {what}"), 64, 0
        return "timestamp", "timestamp" if logical["isAdjustedToUTC"] else "timestamp_ntz", 64, _DIGITS[unit]
    if name in ("String", "Enum", "JSON"):
        return "string", "string", 0, 0
    if name == "Float16":
        return "other", ("unreadable", "Spark does not read 16-bit floats"), 16, 0
    plain = {
        "BOOLEAN": ("bool", "boolean", 1, 0),
        "INT32": ("int", "int", 32, 0),
        "INT64": ("int", "bigint", 64, 0),
        "FLOAT": ("float", "float", 32, 0),
        "DOUBLE": ("float", "double", 64, 0),
        # Spark reads the old 96-bit timestamps; their bounds have no defined order.
        "INT96": ("other", "timestamp", 96, 0),
    }
    return plain.get(physical, ("binary", "binary", 0, 0))
