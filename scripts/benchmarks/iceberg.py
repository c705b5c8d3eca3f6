"""``validate`` on an Iceberg table beside one hand-written Spark SQL statement, as ``benchmarks.validate`` has it.

TPC-H lineitem again, with one partition for each month, a file in each.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks import validate
from benchmarks.common import CACHE, Result, say
from benchmarks.validate import SIMPLE, TEN, Case, Subject

MONTH = "ship_month"

CASES = (
    Case("decided from manifests", SIMPLE, "auto", 0.1),
    Case("full scan", SIMPLE, "never", 1.15),
    Case("ten checks, full scan", TEN, "never", 1.15),
)


def run(scale: float = 1, runs: int = 7, lives: int = 3) -> Result:
    """As ``benchmarks.validate.run``. Raises RuntimeError where Iceberg's jar cannot be had."""
    from tests.support.lake import MAVEN, jar

    found = jar()
    if found is None:
        raise RuntimeError(MAVEN)
    options = ("--spark-conf", f"spark.jars={found}")
    result = Result("iceberg", {"scale": scale, "runs": runs, "lives": lives})
    return validate.measure(result, Subject("iceberg", table(scale), _next_version, options), CASES)


def _next_version(location: Path) -> None:
    """Metadata that say the same under another name: whoever remembers a snapshot does so by the name."""
    metadata = location / "metadata"
    hint = metadata / "version-hint.text"
    version = int(hint.read_text())
    shutil.copy(metadata / f"v{version}.metadata.json", metadata / f"v{version + 1}.metadata.json")
    hint.write_text(str(version + 1))


def table(scale: float) -> Path:
    """The table, made once for each scale, where it stays: Iceberg's metadata have whole paths. A file that is written
    last tells that it is whole.
    """
    import pyarrow.parquet as pq

    source, target = validate.table(scale), CACHE / f"iceberg-lineitem-{scale:g}"
    whole = target / "whole"
    if not whole.exists():
        say(f"iceberg: making lineitem at scale {scale:g} in 84 monthly partitions")
        shutil.rmtree(target, ignore_errors=True)
        made: Any = None
        for folder in sorted(source.glob("*=*")):  # beside what operations keep below the table
            (path,) = folder.glob("*.parquet")
            month = pq.read_table(path, partitioning=None)
            month = month.append_column(MONTH, pa.array([folder.name.partition("=")[2]] * len(month)))
            made = made or _new(target, month.schema)
            made.append(month)
        whole.touch()
    return target


def _new(location: Path, columns: pa.Schema) -> Any:
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
    # One manifest, as a table has that is looked after.
    merged = {"commit.manifest-merge.enabled": "true", "commit.manifest.min-count-to-merge": "2"}
    return Folder(location).new(Schema(*fields), spec, **merged)
