"""What becomes of an Iceberg table whose columns get other types: the schema, and what may not depend on them.

Iceberg narrows no column: a file would be read by a type that it was not written with. So the column becomes another
one, of the same name and place, with a field id of its own; and all files are written anew, with it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.tables.iceberg.iceberg_fields import local_path, spark_type
from distop.tables.iceberg.iceberg_rows import optional
from distop.tables.iceberg.table_properties import for_writing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distop_behaviors.apply.constraints import Narrowed
    from distop_behaviors.validate.certificate import Certificate

DATA_PATH = "write.data.path"
_FORMAT = "write.format.default"
_LAST_VERSION = 3
"""Of the table format: what a later one has besides is not known here."""
_KEPT = frozenset(
    {
        *("table-uuid", "last-updated-ms", "next-row-id", "partition-specs", "default-spec-id", "last-partition-id"),
        *("sort-orders", "default-sort-order-id"),
    }
)
"""Of a table's metadata: what its writers go by, beside the schema and properties."""


def needed(narrowed: Iterable[Narrowed], certificate: Certificate) -> list[Narrowed]:
    """Those that have another type by now, each column once, in the order of their field ids."""
    found = {n.id: n for n in narrowed if certificate.columns[n.name].type != n.type}
    return [found[field_id] for field_id in sorted(found)]


def check_narrowable(metadata: Any, narrowed: Sequence[Narrowed]) -> None:
    """Raises InvalidArgument where something else than rows hangs on a column, or the table cannot be rewritten."""
    if metadata.format_version > _LAST_VERSION:
        raise InvalidArgument(
            f"a column is narrowed by rewriting the table, which is available up to the format version {_LAST_VERSION} "
            f"of Iceberg, and this one is of {metadata.format_version}"
        )
    if local_path(metadata.location) is None:
        raise InvalidArgument(
            f"a column is narrowed by rewriting the table, which is available on a local path (or a file system that "
            f"all nodes have mounted), and this one lies at {metadata.location}"
        )
    if (kind := metadata.properties.get(_FORMAT, "parquet").lower()) != "parquet":
        raise InvalidArgument(f"a column is narrowed by rewriting the table in Parquet, and its format is {kind}")
    branches = [
        name for name, ref in metadata.refs.items() if name != "main" and str(ref.snapshot_ref_type) == "branch"
    ]
    if branches:
        raise InvalidArgument(
            f"the branch {branches[0]!r} of the table would keep the former columns under the new schema: drop it first"
        )
    schema = metadata.schema()
    tops = {field.field_id: field for field in schema.fields}
    for field in schema.fields:
        if isinstance(kind_of := spark_type(field.field_type), tuple) and kind_of[0] == "unreadable":
            raise InvalidArgument(f"the table cannot be rewritten by Spark: {field.name!r}: {kind_of[1]}")
    for one in narrowed:
        if one.id not in tops:
            raise InvalidArgument(
                f"{one.check}: {one.name!r} is inside another column, and columns are narrowed at the top level alone"
            )
        if one.id in schema.identifier_field_ids:
            raise InvalidArgument(f"{one.check}: {one.name!r} is an identifier field of the table: unset it first")
        field = tops[one.id]
        if field.initial_default is not None or field.write_default is not None:
            raise InvalidArgument(f"{one.check}: {one.name!r} has a default, which is a value of its former type")
        _check_unused(metadata, one)


def _check_unused(metadata: Any, one: Narrowed) -> None:
    from pyiceberg.transforms import VoidTransform

    for spec in metadata.partition_specs:
        if any(f.source_id == one.id and not isinstance(f.transform, VoidTransform) for f in spec.fields):
            former = "" if spec.spec_id == metadata.default_spec_id else ", or were by a former spec"
            raise InvalidArgument(f"{one.check}: the table's partitions are made of {one.name!r}{former}")
    if any(f.source_id == one.id for f in metadata.sort_order().fields):
        raise InvalidArgument(f"{one.check}: the table's sort order is made of {one.name!r}: change that first")


def check_no_equality_deletes(deletes: Iterable[Sequence[int]], narrowed: Sequence[Narrowed]) -> None:
    """``deletes``: of each equality delete file the field ids that it compares. Raises InvalidArgument where one of
    them is narrowed: who writes such deletes would go on by the former column.
    """
    for ids in deletes:
        for one in narrowed:
            if one.id in ids:
                raise InvalidArgument(
                    f"{one.check}: equality deletes that still apply compare {one.name!r}: have them rewritten first"
                )


def new_ids(metadata: Any, narrowed: Sequence[Narrowed]) -> dict[int, int]:
    """By the field ids of the columns, those of what replaces them."""
    return {one.id: metadata.last_column_id + n for n, one in enumerate(narrowed, 1)}


def new_schema(
    schema: Mapping[str, Any], narrowed: Sequence[Narrowed], ids: Mapping[int, int], required: Iterable[int] = ()
) -> dict[str, Any]:
    """A schema, as JSON, with the columns replaced; ``required``: field ids, by the former schema, of what is to be."""
    types = {one.id: one.type for one in narrowed}
    must = frozenset(required)
    fields = []
    for field in schema["fields"]:
        changed = _required(field, must)
        if field["id"] in ids:
            changed = {**changed, "id": ids[field["id"]], "type": types[field["id"]]}
        fields.append(changed)
    return {**schema, "fields": fields}


def _required(field: Mapping[str, Any], must: frozenset[int]) -> dict[str, Any]:
    kind = field["type"]
    if isinstance(kind, dict) and kind.get("type") == "struct":
        kind = {**kind, "fields": [_required(inner, must) for inner in kind["fields"]]}
    return {**field, "type": kind, "required": field["required"] or field["id"] in must}


def mapped(mapping: str | None, ids: Mapping[int, int]) -> str | None:
    """The name mapping of a table, by which files without field ids are read, with the new ids at its top level."""
    if mapping is None:
        return None
    told = [{**one, "field-id": ids.get(one.get("field-id"), one.get("field-id"))} for one in json.loads(mapping)]
    return json.dumps(told)


def scratch(metadata: Mapping[str, Any], schema: Mapping[str, Any], location: str, data: str) -> dict[str, Any]:
    """The metadata of a table without snapshots that writes files as the real one does, into the folder ``data``.

    It has this schema, and the specs, sort order and listed properties (``table_properties``) of the real one. Its
    columns are optional: a NULL in a required column stays a NULL.
    """
    told = {name: value for name, value in metadata.items() if name in _KEPT}
    highest = max(metadata["last-column-id"], *(field["id"] for field in schema["fields"]))
    properties = for_writing(metadata.get("properties", {}))
    return told | {
        "format-version": max(int(metadata["format-version"]), 2),
        "location": location,
        "schemas": [{**optional(schema), "schema-id": 0}],
        "current-schema-id": 0,
        "last-column-id": highest,
        "last-sequence-number": 0,
        "properties": properties | {DATA_PATH: data},
        **{name: [] for name in ("snapshots", "snapshot-log", "metadata-log", "statistics", "partition-statistics")},
    }
