"""Narrows columns of an Iceberg table: the new schema, and checks that nothing else depends on the columns.

Iceberg cannot narrow a column, because its files were written with the old type. So a new column with a new field id
takes the name and the position of the old one, and all files are rewritten.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.storage.files import local_path
from distop.storage.storage_options import bucket_of, in_object_store
from distop.tables.iceberg.iceberg_fields import spark_type

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distop_behaviors.apply.constraints import Narrowed
    from distop_behaviors.validate.certificate import Certificate

_FORMAT = "write.format.default"
_LAST_VERSION = 3
"""The last known format version. Later ones may have features that a rewrite would lose."""


def columns_to_narrow(narrowed: Iterable[Narrowed], certificate: Certificate) -> list[Narrowed]:
    """The columns whose type must change, each once, in the order of their field ids."""
    found = {n.id: n for n in narrowed if certificate.columns[n.name].type != n.type}
    return [found[field_id] for field_id in sorted(found)]


def check_narrowable(metadata: Any, narrowed: Sequence[Narrowed]) -> None:
    """Raises InvalidArgument if the table cannot be rewritten, or if partitions or others depend on a column."""
    if metadata.format_version > _LAST_VERSION:
        raise InvalidArgument(
            f"cannot narrow a column: this rewrites the table, which works up to the Iceberg format version "
            f"{_LAST_VERSION}, but the table has version {metadata.format_version}"
        )
    check_rewritable(metadata.location)
    if (kind := metadata.properties.get(_FORMAT, "parquet").lower()) != "parquet":
        raise InvalidArgument(
            f"cannot narrow a column: this rewrites the table in Parquet, but the table's file format is {kind}"
        )
    branches = [
        name for name, ref in metadata.refs.items() if name != "main" and str(ref.snapshot_ref_type) == "branch"
    ]
    if branches:
        raise InvalidArgument(
            f"cannot narrow a column: the branch {branches[0]!r} of the table would keep the old columns: drop it first"
        )
    schema = metadata.schema()
    tops = {field.field_id: field for field in schema.fields}
    for field in schema.fields:
        if isinstance(kind_of := spark_type(field.field_type), tuple) and kind_of[0] == "unreadable":
            raise InvalidArgument(f"Spark cannot rewrite the table: column {field.name!r}: {kind_of[1]}")
    for one in narrowed:
        if one.id not in tops:
            raise InvalidArgument(
                f"{one.check}: {one.name!r} is inside another column, but only top-level columns can be narrowed"
            )
        if one.id in schema.identifier_field_ids:
            raise InvalidArgument(f"{one.check}: {one.name!r} is an identifier field of the table: unset it first")
        field = tops[one.id]
        if field.initial_default is not None or field.write_default is not None:
            raise InvalidArgument(f"{one.check}: {one.name!r} has a default value, which has the old type: remove it")
        _check_unused(metadata, one)


def check_rewritable(location: str) -> None:
    """Raises InvalidArgument if a table's location is neither on a disk nor in S3."""
    if local_path(location) is None and not (in_object_store(location) and bucket_of(location).family == "s3"):
        raise InvalidArgument(
            f"cannot narrow a column: this rewrites the table, which works in S3 and on local paths (or file systems "
            f"that all nodes have mounted), but the table is at {location}"
        )


def _check_unused(metadata: Any, one: Narrowed) -> None:
    from pyiceberg.transforms import VoidTransform

    for spec in metadata.partition_specs:
        if any(f.source_id == one.id and not isinstance(f.transform, VoidTransform) for f in spec.fields):
            which = "" if spec.spec_id == metadata.default_spec_id else " by an earlier partition spec"
            raise InvalidArgument(f"{one.check}: the table is partitioned by {one.name!r}{which}")
    if any(f.source_id == one.id for f in metadata.sort_order().fields):
        raise InvalidArgument(f"{one.check}: the table's sort order uses {one.name!r}: change the sort order first")


def check_no_equality_deletes(deletes: Iterable[Sequence[int]], narrowed: Sequence[Narrowed]) -> None:
    """Raises InvalidArgument if an equality delete compares a narrowed column: its writer uses the old column.

    ``deletes``: for each equality delete file, the field ids that it compares.
    """
    for ids in deletes:
        for one in narrowed:
            if one.id in ids:
                raise InvalidArgument(
                    f"{one.check}: equality deletes that still apply compare {one.name!r}: rewrite the data files to "
                    "remove these deletes first"
                )


def new_ids(metadata: Any, narrowed: Sequence[Narrowed]) -> dict[int, int]:
    """The field ids of the new columns, by the field ids of the old ones."""
    return {one.id: metadata.last_column_id + n for n, one in enumerate(narrowed, 1)}


def new_schema(
    schema: Mapping[str, Any], narrowed: Sequence[Narrowed], ids: Mapping[int, int], required: Iterable[int] = ()
) -> dict[str, Any]:
    """A schema, as JSON, with the new columns. ``required``: field ids of the old schema that become required."""
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


def new_name_mapping(mapping: str | None, ids: Mapping[int, int]) -> str | None:
    """The table's name mapping (for files without field ids) with the new ids at its top level."""
    if mapping is None:
        return None
    fields = [{**one, "field-id": ids.get(one.get("field-id"), one.get("field-id"))} for one in json.loads(mapping)]
    return json.dumps(fields)
