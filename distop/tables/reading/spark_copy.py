"""Arranges rows that Spark writes into files of a stage, and computes an order-free checksum of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.protocol.frozen import frozen
from distop.runtime.java import active
from distop.tables.reading.file_facts import quote

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import Column, DataFrame, SparkSession

    from distop.tables.reading.file_facts import SparkType

_UNHASHABLE = ("map", "variant")
_SETTINGS = {
    # What is written must not depend on the settings of the executor.
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.caseSensitive": "false",
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.parquet.binaryAsString": "false",
    "spark.sql.parquet.fieldId.write.enabled": "true",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    # Times in 96 bits would have no statistics.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "1000000",
}

_PIECE = 128 << 20
_PIECES = 4
LARGEST = 1.6
"""The size of a new file of Delta, as a multiple of the target, at which its writer begins another one."""

_made: list[tuple[Any, SparkSession]] = []
"""The session for copies in the current context."""


@frozen
class Checksum:
    """The number of rows, and the sum of their hashes, which does not depend on their order."""

    rows: int
    hashes: str


def session_of(spark: SparkSession) -> SparkSession:
    """The session for copies in the context of ``spark``, created once for each context."""
    context = spark.sparkContext
    for of, kept in _made:
        if of is context:
            return kept
    session = spark.newSession()
    for name, value in _SETTINGS.items():
        session.conf.set(name, value)
    _made[:] = [(context, session)]
    return session


def piece_bytes(size: int, outputs: int) -> int:
    """The size of the pieces in which Spark should read files of ``size`` bytes in all, for this many outputs.

    Each output is written from about four pieces. With Spark's usual pieces, up to 128 MB, outputs that are smaller
    could not be written, since rows of a piece go into one file.
    """
    return max(1, min(_PIECE, size // (_PIECES * max(outputs, 1))))


def read_in_pieces(session: SparkSession, size: int, outputs: int) -> None:
    """Let the next queries read Parquet files in pieces (:func:`piece_bytes`).

    To be called before each query of a session for copies. If another group does so meanwhile, only sizes of new files
    change.
    """
    session.conf.set("spark.sql.files.maxPartitionBytes", str(piece_bytes(size, outputs)))
    session.conf.set("spark.sql.files.openCostInBytes", "0")


def arranged(frame: DataFrame, outputs: int, sort_by: Sequence[str]) -> DataFrame:
    """The rows in as many parts as files are to be written, each sorted."""
    from pyspark.sql import functions as F

    columns = [F.col(quote(name)) for name in sort_by]
    if columns and outputs > 1:
        return frame.repartitionByRange(outputs, *columns).sortWithinPartitions(*columns)
    frame = frame.coalesce(outputs)
    return frame.sortWithinPartitions(*columns) if columns else frame


def observed(frame: DataFrame, kinds: Mapping[str, SparkType]) -> tuple[DataFrame, Any]:
    """The frame, and the observation of its checksum while it is written (:func:`seen`)."""
    from pyspark.sql import Observation

    observation = Observation()
    return frame.observe(observation, *_aggregates(kinds)), observation


def seen(observation: Any) -> Checksum:
    """The checksum that was observed."""
    found = observation.get
    return Checksum(int(found["rows"]), str(found["hashes"]))


def checksum(frame: DataFrame, kinds: Mapping[str, SparkType]) -> Checksum:
    """The checksum of all rows, by a query."""
    with active(frame.sparkSession):
        row = frame.agg(*_aggregates(kinds)).collect()[0]
    return Checksum(int(row["rows"]), str(row["hashes"]))


def _aggregates(kinds: Mapping[str, SparkType]) -> list[Column]:
    from pyspark.sql import functions as F

    parts = [_hashable(name, kind) for name, kind in kinds.items()]
    row = F.xxhash64(*parts) if parts else F.lit(0)
    return [F.count(F.lit(1)).alias("rows"), F.sum(row.cast("decimal(38,0)")).alias("hashes")]


def _hashable(name: str, kind: SparkType) -> Column:
    from pyspark.sql import functions as F

    column = F.col(quote(name))
    return F.to_json(F.struct(column)) if _has(kind, _UNHASHABLE) else column


def _has(kind: SparkType, names: Sequence[str]) -> bool:
    if isinstance(kind, str):
        return kind in names
    if kind[0] == "struct":
        return any(_has(inner, names) for _, inner in kind[1])
    return kind[0] in names or any(_has(inner, names) for inner in kind[1:] if isinstance(inner, str | tuple))
