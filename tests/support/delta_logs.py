"""Handwritten logs of Delta tables, for what no writer here writes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from distop.protocol.records import TableRecord

if TYPE_CHECKING:
    from pathlib import Path

PLAIN = {"minReaderVersion": 1, "minWriterVersion": 2}
ID = {"name": "id", "type": "long", "nullable": True, "metadata": {}}
COLUMN_ID, COLUMN_NAME = "delta.columnMapping.id", "delta.columnMapping.physicalName"


def features(*names: str) -> dict[str, Any]:
    """A protocol with these reader features."""
    return {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": list(names), "writerFeatures": list(names)}


def field(name: str, kind: Any, **metadata: Any) -> dict[str, Any]:
    """A column of a schema."""
    return {"name": name, "type": kind, "nullable": True, "metadata": metadata}


def mapped(name: str, kind: Any, number: int, physical: str) -> dict[str, Any]:
    """A column of a schema with column mapping."""
    return field(name, kind, **{COLUMN_ID: number, COLUMN_NAME: physical})


def metadata(*fields: dict[str, Any], partitions: tuple[str, ...] = (), **rest: Any) -> dict[str, Any]:
    """The metadata of a table. ``rest``: other keys, such as ``configuration``."""
    return {
        "id": "5a7f9f2c-0000-4000-8000-000000000001",
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": list(fields or (ID,))}),
        "partitionColumns": list(partitions),
        "configuration": {},
        **rest,
    }


def statistics(rows: int, **rest: Any) -> str:
    """The statistics of a file as JSON."""
    return json.dumps({"numRecords": rows, **rest})


def vector(text: str, rows: int = 1, **rest: Any) -> dict[str, Any]:
    """The descriptor of a deletion vector."""
    found = {"storageType": "u", "pathOrInlineDv": text, "offset": 1, "sizeInBytes": 34, "cardinality": rows}
    return {**found, **rest}


class DeltaLog:
    """The log of a table in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "_delta_log"
        self.folder.mkdir(parents=True)
        self.next = 0

    @property
    def record(self) -> TableRecord:
        return TableRecord("t", "delta", str(self.root))

    def create(self, protocol: dict[str, Any] | None = None, **given: Any) -> DeltaLog:
        """Write version 0. ``given``: arguments of :func:`metadata`, and its columns as ``fields``."""
        columns = given.pop("fields", ())
        self.commit({"protocol": protocol or PLAIN}, {"metaData": metadata(*columns, **given)})
        return self

    def commit(self, *actions: dict[str, Any]) -> None:
        """Write the next version."""
        text = "".join(json.dumps(action) + "\n" for action in actions)
        (self.folder / f"{self.next:020}.json").write_text(text)
        self.next += 1

    def file(self, name: str, data: Any = None) -> int:
        """Write a data file; returns its size."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"id": [1, 2, 3]} if data is None else data), path)
        return path.stat().st_size

    def add(self, name: str, data: Any = None, **rest: Any) -> dict[str, Any]:
        """Write a data file; returns its ``add``."""
        found = {
            "path": name,
            "partitionValues": {},
            "size": self.file(name, data),
            "modificationTime": 0,
            "dataChange": True,
            "stats": statistics(3),
        }
        return {"add": {**found, **rest}}


def remove(name: str, **rest: Any) -> dict[str, Any]:
    """The ``remove`` of a file."""
    return {"remove": {"path": name, "deletionTimestamp": 0, "dataChange": True, **rest}}
