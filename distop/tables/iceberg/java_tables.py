"""Tables in the JVM, made of metadata that Python has read and checked."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from distop.storage.confinement import check_loadable
from distop.storage.storage_urls import check_paths
from distop.tables.iceberg.snapshot_checks import check_loaded, check_manifests, check_same_manifests
from distop.tables.iceberg.table_properties import for_reading
from distop.tables.reading.file_facts import Unreadable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distop.tables.iceberg.metadata_file import MetadataFile

ROW_LINEAGE = 3
"""The first version of the table format in which rows have ids."""
_UNSUPPORTED = ("time", "timestamp_ns", "timestamptz_ns")
"""Iceberg's types that its Spark integration lacks."""


def uri(location: str) -> str:
    """A planned path as a URI for Hadoop. Raises InvalidArgument if it is not allowed in data."""
    check_paths((location,))
    check_loadable(location)
    return f"file://{location}" if location.startswith("/") else location


def table_of(session: Any, file: MetadataFile) -> Any:
    """The table in the JVM with this metadata: Java parses the text that Python has read, and opens no file for it.

    Raises InvalidArgument if its path is not allowed in data, and Java's errors.
    """
    iceberg: Any = session._jvm.org.apache.iceberg
    location = uri(file.source)
    io = iceberg.hadoop.HadoopFileIO(session._jsparkSession.sessionState().newHadoopConf())
    metadata = iceberg.TableMetadataParser.fromJson(location, file.text)
    return iceberg.BaseTable(iceberg.StaticTableOperations(metadata, io), location)


def table_cache(session: Any) -> Any:
    """Iceberg's SparkTableCache, in which Spark finds tables by name.

    It has two methods ``get``. py4j examines the first one that the JVM lists, in varying order, and if that is not the
    static one, finds none. So the method is called without py4j's examination.
    """
    from py4j.java_gateway import JavaMember
    from py4j.protocol import STATIC_PREFIX

    cls = session._jvm.org.apache.iceberg.spark.SparkTableCache
    return JavaMember("get", None, f"{STATIC_PREFIX}{cls._fqn}", cls._gateway_client)()


def check_manifests_of(file: MetadataFile, snapshot: Any, io: Any) -> None:
    """Check the files of Java's current snapshot before Java opens them.

    :func:`check_loaded` checks the manifest list, then :func:`check_manifests` the manifests.
    """
    check_loaded(file, str(snapshot.snapshotId()), str(snapshot.manifestListLocation()))
    check_manifests(file, _manifests(snapshot, io))


def check_same(source: str, manifests: Sequence[str], snapshot: Any, io: Any) -> None:
    """Raises InvalidArgument if Java reads other manifests from a snapshot's list than Python."""
    check_same_manifests(source, manifests, _manifests(snapshot, io))


def _manifests(snapshot: Any, io: Any) -> list[str]:
    return [str(manifest.path()) for manifest in snapshot.allManifests(io)]


def check_columns(schema: Any) -> None:
    """Raises Unreadable if a schema, as JSON, has a column whose type Spark lacks: it cannot read all columns then."""
    for name, kind in _leaves(schema, ""):
        if kind in _UNSUPPORTED:
            raise Unreadable(
                f"the table's column {name!r} has the type {kind}, which Spark lacks: it cannot read all columns"
            )


def check_not_needed(schema: Any, needed: Iterable[int]) -> None:
    """Raises Unreadable if Spark must read a column whose type it lacks to find the rows of a table.

    ``schema``: as JSON; ``needed``: the ids of columns of partitions and of equality deletes.
    """
    ids = frozenset(needed)
    for field in schema["fields"]:
        for name, kind in _leaves(field["type"], field["name"]):
            if kind in _UNSUPPORTED and (field["id"] in ids or not ids.isdisjoint(_ids(field["type"]))):
                raise Unreadable(
                    f"the table's column {name!r} has the type {kind}, which Spark lacks, and partitions or deletes of "
                    "the table need it: only checks that statistics decide are possible, on any column"
                )


def _ids(kind: Any) -> Iterable[int]:
    """The ids of the fields in a type."""
    if isinstance(kind, dict):
        for field in kind.get("fields", ()):
            yield field["id"]
            yield from _ids(field["type"])
        for part in ("element", "key", "value"):
            if part in kind:
                yield kind[f"{part}-id"]
                yield from _ids(kind[part])


def supported(schema: Any) -> Any:
    """A schema, as JSON, without the columns that have, or contain, a type that Spark lacks."""
    fields = [
        field for field in schema["fields"] if not any(kind in _UNSUPPORTED for _, kind in _leaves(field["type"], ""))
    ]
    return {**schema, "fields": fields}


def _leaves(kind: Any, name: str) -> Iterable[tuple[str, Any]]:
    """All columns and nested fields of a type, by dotted names, with their types."""
    if not isinstance(kind, dict):
        yield name, kind
        return
    inner = [(field["name"], field["type"]) for field in kind.get("fields", ())]
    inner += [(part, kind[part]) for part in ("element", "key", "value") if part in kind]
    for part, type_ in inner:
        yield from _leaves(type_, f"{name}.{part}" if name else part)


def readable(iceberg: Any, table: Any, location: str, *, lineage: bool) -> Any:
    """The table as Spark should read it: all columns optional, and without row ids except with ``lineage``.

    A writer that started before a column became required may still write NULLs. Spark would trust the schema, and find
    no NULL even if the files have some. With row ids among the columns, which a rewrite of version 3 needs, Spark does
    not find its other metadata columns; so the reader gets format version 2 (deletes are in the scan tasks, not in the
    metadata). Of the properties it only gets those of ``table_properties``. Columns whose types Spark lacks are left
    out, and so are sort orders, which may name them; with ``lineage`` the table must have none (:func:`check_columns`).
    """
    metadata = table.operations().current()
    parser = iceberg.TableMetadataParser
    written = json.loads(parser.toJson(metadata))
    schemas = [optional(schema) for schema in written["schemas"]]
    sorting: dict[str, Any] = {}
    if not lineage and (known := [supported(schema) for schema in schemas]) != schemas:
        schemas = known
        sorting = {"sort-orders": [{"order-id": 0, "fields": []}], "default-sort-order-id": 0}
    version = metadata.formatVersion() if lineage else min(metadata.formatVersion(), ROW_LINEAGE - 1)
    properties = written.get("properties", {})
    changed = {"format-version": version, "schemas": schemas, "properties": for_reading(properties)}
    if not sorting and changed == {
        "format-version": metadata.formatVersion(),
        "schemas": written["schemas"],
        "properties": properties,
    }:
        return table
    edited = {name: value for name, value in written.items() if name != "schema"} | changed | sorting
    return iceberg.BaseTable(
        iceberg.StaticTableOperations(parser.fromJson(location, json.dumps(edited)), table.io()), location
    )


def optional(kind: Any) -> Any:
    """An Iceberg type or schema, as JSON, with everything optional except keys of maps."""
    if not isinstance(kind, dict):
        return kind
    edited = {name: optional(value) for name, value in kind.items() if name != "identifier-field-ids"}
    if "fields" in kind:
        edited["fields"] = [{**field, "required": False, "type": optional(field["type"])} for field in kind["fields"]]
    return edited | {name: False for name in ("element-required", "value-required") if name in kind}
