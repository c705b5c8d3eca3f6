"""``validate`` on an Iceberg table, relative to one hand-written Spark SQL statement (see ``benchmarks.validate``).

TPC-H lineitem with one partition per month and one file per partition.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks import validate
from benchmarks.common import CACHE, Result, report_progress
from benchmarks.validate import SIMPLE, TEN, Case, Subject

MONTH = "ship_month"

CASES = (
    Case("decided from manifests", SIMPLE, "auto", 0.1),
    Case("full scan", SIMPLE, "never", 1.15),
    Case("ten checks, full scan", TEN, "never", 1.15),
)


def run(scale: float = 1, runs: int = 7, lives: int = 3) -> Result:
    """Like ``benchmarks.validate.run``. Raises RuntimeError if Iceberg's jar is not available."""
    from tests.support.lake import MAVEN, jar

    iceberg_jar = jar()
    if iceberg_jar is None:
        raise RuntimeError(MAVEN)
    options = ("--spark-conf", f"spark.jars={iceberg_jar}")
    result = Result("iceberg", {"scale": scale, "runs": runs, "lives": lives})
    return validate.measure(result, Subject("iceberg", table(scale), _next_version, options), CASES)


def _next_version(location: Path) -> None:
    """Write the same metadata as a new version: caches of a snapshot use the name of its metadata file as their key."""
    metadata = location / "metadata"
    hint = metadata / "version-hint.text"
    version = int(hint.read_text())
    shutil.copy(metadata / f"v{version}.metadata.json", metadata / f"v{version + 1}.metadata.json")
    hint.write_text(str(version + 1))


def table(scale: float) -> Path:
    """The table, generated once per scale.

    It is written in its final location because Iceberg's metadata contains absolute paths. A marker file, written last,
    shows that the table is complete.
    """
    import pyarrow.parquet as pq

    source, target = validate.table(scale), CACHE / f"iceberg-lineitem-{scale:g}"
    complete = target / "whole"
    if not complete.exists():
        report_progress(f"iceberg: generating lineitem at scale {scale:g} in 84 monthly partitions")
        shutil.rmtree(target, ignore_errors=True)
        created: Any = None
        for folder in sorted(source.glob("*=*")):  # excludes the folder with operations' own files
            (path,) = folder.glob("*.parquet")
            month = pq.read_table(path, partitioning=None)
            month = month.append_column(MONTH, pa.array([folder.name.partition("=")[2]] * len(month)))
            created = created or _create(target, month.schema)
            created.append(month)
        complete.touch()
    return target


def _create(location: Path, columns: pa.Schema) -> Any:
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
    spec = PartitionSpec(PartitionField(len(fields), 1000, IdentityTransform(), MONTH))
    # One manifest, as in a table that is maintained.
    merged = {"commit.manifest-merge.enabled": "true", "commit.manifest.min-count-to-merge": "2"}
    return Folder(location).new(Schema(*fields), spec, **merged)
