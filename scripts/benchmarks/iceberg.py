"""``validate`` on an Iceberg table (see ``benchmarks.table_formats``)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.table_formats import MONTH, TableFormat

ONE_MANIFEST = {"commit.manifest-merge.enabled": "true", "commit.manifest.min-count-to-merge": "2"}
"""Settings for one manifest, as in a table that is maintained."""


def _jars() -> Sequence[Path] | str:
    from tests.support.lake import MAVEN, jar

    found = jar()
    return MAVEN if found is None else [found]


def _write(target: Path, months: Iterator[pa.Table]) -> None:
    created: Any = None
    for month in months:
        created = created or create(target, month.schema, MONTH, **ONE_MANIFEST)
        created.append(month)


def _next_version(location: Path) -> None:
    """Write the same metadata as a new version: caches of a snapshot use the name of its metadata file as their key."""
    metadata = location / "metadata"
    hint = metadata / "version-hint.text"
    version = int(hint.read_text())
    shutil.copy(metadata / f"v{version}.metadata.json", metadata / f"v{version + 1}.metadata.json")
    hint.write_text(str(version + 1))


def create(location: Path, columns: pa.Schema, by: str, **properties: str) -> Any:
    """Create a table in a folder that is partitioned by the values of the column ``by``."""
    from pyiceberg.partitioning import PartitionField, PartitionSpec
    from pyiceberg.schema import Schema
    from pyiceberg.transforms import IdentityTransform
    from pyiceberg.types import DateType, DecimalType, IntegerType, LongType, NestedField, StringType

    from tests.support.lake import Folder

    plain = {pa.int64(): LongType(), pa.int32(): IntegerType(), pa.date32(): DateType(), pa.string(): StringType()}
    fields = []
    for n, column in enumerate(columns, 1):
        kind: Any = plain.get(column.type)
        if kind is None:
            kind = DecimalType(column.type.precision, column.type.scale)
        fields.append(NestedField(n, column.name, kind, required=False))
    source = columns.get_field_index(by) + 1
    spec = PartitionSpec(PartitionField(source, 1000, IdentityTransform(), by))
    return Folder(location).new(Schema(*fields), spec, **properties)


FORMAT = TableFormat("iceberg", "manifests", _jars, _write, _next_version)
