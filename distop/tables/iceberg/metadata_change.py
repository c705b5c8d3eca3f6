"""Computes the next metadata file of an Iceberg table after a change of nullability and properties, without a JVM.

The text of the file is edited, so fields that are not known here stay as they are, in any version of the format.
"""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.texts import shown
from distop.storage.confinement import own_folder
from distop.tables.iceberg.java_tables import uri
from distop.tables.iceberg.metadata_file import metadata_version

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distop.tables.iceberg.metadata_file import MetadataFile

CODEC = "write.metadata.compression-codec"
_SUFFIXES = {"none": ".metadata.json", "gzip": ".gz.metadata.json"}
_ELSEWHERE = "write.metadata.path"


def changed_metadata(
    file: MetadataFile, required: Mapping[int, bool], properties: Mapping[str, str | None], now: float
) -> str:
    """The text of the next metadata file: with these fields required or optional, and these properties.

    ``required``: by field ids; fields in lists and maps never change. ``properties``: to set or (None) to remove.
    ``now``: the time in seconds. The whole metadata log is kept, with the current file in it.
    """

    def change(metadata: dict[str, Any]) -> None:
        schemas, current = _schemas(metadata)
        base = next(schema for schema in schemas if schema.get("schema-id", 0) == current)
        schema = _changed(base, required)
        known = next((one for one in schemas if _same(one, schema)), None)
        if known is None:
            known = {**schema, "schema-id": max(one.get("schema-id", 0) for one in schemas) + 1}
            schemas.append(known)
        changed = {**metadata.get("properties", {}), **properties}
        metadata |= {
            "schemas": schemas,
            "current-schema-id": known.get("schema-id", 0),
            "properties": {name: value for name, value in changed.items() if value is not None},
        }
        if "schema" in metadata:  # format version 1
            metadata["schema"] = known

    return next_metadata(file, change, now)


def next_metadata(file: MetadataFile, change: Callable[[dict[str, Any]], None], now: float) -> str:
    """The text of the next metadata file after a change of the JSON. ``now``: the time in seconds.

    The whole metadata log is kept, with the current file in it.
    """
    metadata = json.loads(file.text)
    former = {"timestamp-ms": metadata["last-updated-ms"], "metadata-file": _named(file)}
    change(metadata)
    metadata |= {
        # Iceberg refuses metadata that are older than the entries of their logs.
        "last-updated-ms": max(int(now * 1000), metadata["last-updated-ms"]),
        "metadata-log": [*(metadata.get("metadata-log") or ()), former],
    }
    return json.dumps(metadata, ensure_ascii=False, separators=(",", ":"))


def next_file(source: str, text: str) -> tuple[str, bytes]:
    """The name and the bytes of the metadata file after ``source`` in a table's folder.

    Raises InvalidArgument for properties with which Iceberg refuses or cannot write metadata in the table's folder.
    """
    properties = json.loads(text).get("properties") or {}
    if _ELSEWHERE in properties:
        raise InvalidArgument(
            f"the table has the property {_ELSEWHERE}, but the metadata of a table by folder are always in its folder: "
            "remove it from the table first"
        )
    codec = str(properties.get(CODEC, "none"))
    suffix = _SUFFIXES.get(codec.lower())
    if suffix is None:
        raise InvalidArgument(
            f"the table has the property {CODEC} with the unknown value {shown(codec)}: set it to none or gzip"
        )
    data = text.encode()
    return f"v{metadata_version(source) + 1}{suffix}", gzip.compress(data, mtime=0) if codec.lower() == "gzip" else data


def _named(file: MetadataFile) -> str:
    """A metadata file by the table's own spelling of its location, which readers of its log can open."""
    try:
        folder = own_folder(file.source, str(file.content.location))
    except InvalidArgument:
        return uri(file.source)
    return str(file.content.location).rstrip("/") + file.source.removeprefix(folder)


def _schemas(metadata: Mapping[str, Any]) -> tuple[list[Any], int]:
    """The schemas, and the id of the current one. Format version 1 may have only the current one."""
    if metadata.get("schemas"):
        return list(metadata["schemas"]), int(metadata["current-schema-id"])
    return [metadata["schema"]], int(metadata["schema"].get("schema-id", 0))


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two schemas differ at most in their ids."""
    return {**one, "schema-id": 0} == {**other, "schema-id": 0}


def _changed(struct: Mapping[str, Any], required: Mapping[int, bool]) -> dict[str, Any]:
    """A struct, or a schema, with these fields required or optional."""
    fields = []
    for field in struct["fields"]:
        kind = field["type"]
        inner = _changed(kind, required) if isinstance(kind, dict) and kind.get("type") == "struct" else kind
        fields.append({**field, "type": inner, "required": required.get(field["id"], field["required"])})
    return {**struct, "fields": fields}
