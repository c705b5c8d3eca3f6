"""A table format outside distop, in one module: folders of CSV files with a header.

The facts of a file are its columns only; all else needs a scan. A record must not span lines.
"""

from __future__ import annotations

import csv
import hashlib
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from distop.errors import InvalidArgument
from distop.protocol.plan import PartitionPlan, Planned
from distop.storage.location import Location
from distop.tables.formats import Format
from distop.tables.reader import Reader
from distop.tables.reading.file_facts import FileFacts, Unreadable, ddl, quote
from distop.tables.reading.spark_paths import pattern_of, plain_path

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyspark.sql import Column, DataFrame, SparkSession

    from distop.protocol.plan import Pinned
    from distop.protocol.records import TableRecord
    from distop.tables.formats import Spark
    from distop.tables.reading.file_facts import PlannedFile, SparkType

TYPES = "types"
"""The table option with the Spark types of columns; the default is string."""
_FILE, _POSITION = "__csv_file", "__csv_position"


class CsvReader(Reader):
    """Reads files as text and splits them with Spark functions, which keeps the position of each row."""

    def facts(
        self, files: Sequence[PlannedFile], wanted: frozenset[str], check: Callable[[], None], *, again: bool = False
    ) -> list[FileFacts | Unreadable]:
        found: list[FileFacts | Unreadable] = []
        for file in files:
            check()
            found.append(self.changed([file], check).get(file[0]) or FileFacts(file[0], None, self._header(file[0])))
        return found

    def rows(
        self,
        session: SparkSession,
        files: Sequence[PlannedFile],
        columns: Mapping[str, SparkType] | None = None,
        partition_columns: Mapping[str, str] | None = None,
        *,
        staged: str = "",
    ) -> DataFrame:
        from pyspark.sql import functions as F

        header = self._header(files[0][0])
        if other := next((path for path, _, _ in files if list(self._header(path)) != list(header)), None):
            raise Unreadable(f"the file {other} has other columns than {files[0][0]}")
        schema = ", ".join(f"{quote(name)} {ddl(kind)}" for name, kind in header.items())
        texts = session.read.format("binaryFile").load([pattern_of(path) for path, _, _ in files])
        lines = texts.select(F.col("path"), F.posexplode(F.split(F.col("content").cast("string"), "\n")))
        row = F.from_csv(F.col("col"), schema, {"mode": "FAILFAST", "nullValue": ""})
        wanted = header if columns is None else columns
        return (
            lines.where((F.col("pos") > 0) & (F.col("col") != ""))
            .select(F.col("path").alias(_FILE), (F.col("pos") - 1).alias(_POSITION), row.alias("row"))
            .select(_FILE, _POSITION, *(F.col("row")[name].alias(name) for name in wanted))
        )

    def file_column(self, frame: DataFrame) -> Column:
        return frame[_FILE]

    def position_column(self, frame: DataFrame) -> Column:
        return frame[_POSITION]

    def planned_path(self, name: str) -> str:
        return plain_path(name)

    def changed(self, files: Sequence[PlannedFile], check: Callable[[], None]) -> dict[str, Unreadable]:
        found: dict[str, Unreadable] = {}
        for path, size, stamp in files:
            check()
            try:
                now = Path(path).stat()
            except FileNotFoundError:
                found[path] = Unreadable(f"the file {path} is gone since the operation was planned")
                continue
            if (now.st_size, now.st_mtime_ns) != (size, stamp):
                found[path] = Unreadable(f"the file {path} has changed since the operation was planned")
        return found

    def _header(self, path: str) -> dict[str, SparkType]:
        types = self.table.options.get(TYPES, {})
        with Path(path).open(newline="") as file:
            return {name: types.get(name, "string") for name in next(csv.reader(file), [])}


class CsvFormat(Format):
    """Each file is a partition with the name of the file."""

    def check_table(self, record: TableRecord) -> TableRecord:
        if record.options.keys() - {TYPES}:
            raise InvalidArgument(f"a CSV table has the option {TYPES!r} alone")
        location = Location.of(record.location)
        if not list(islice(location.walk(), 1)):
            raise InvalidArgument(f"the location {record.location!r} holds no files")
        return replace(record, location=location.text)

    def plan_table(self, table: TableRecord, check: Callable[[], None], spark: Spark) -> Planned:
        entries = sorted(Location.of(table.location).walk(), key=lambda entry: entry.path)
        digest, plans = hashlib.blake2b(digest_size=16), []
        for n, entry in enumerate(entries):
            check()
            digest.update(f"{entry[1:]}\n".encode())
            file = (entry.path, entry.size, entry.stamp)
            plans.append(PartitionPlan(n, Path(entry.path).stem, entry.size, (file,)))
        return Planned(plans, f"files-{digest.hexdigest()}")

    def reader(self, table: TableRecord, plans: Sequence[PartitionPlan | Pinned]) -> Reader:
        return CsvReader(table, plans)


FORMAT = CsvFormat()
