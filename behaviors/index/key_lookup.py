"""``lookup``: finds the rows with given keys, in files that an index finds and in files that it does not cover."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument, NotFound, TableUnavailable, UnsafePath
from distop.protocol.frozen import frozen
from distop.tables.reading import arrow_types
from distop.tables.reading.arrow_rows import Blocks
from distop.tables.reading.arrow_types import SparkOnly
from distop.tables.reading.file_facts import Unreadable, ddl, match, may_match, problem, quote, widened
from distop_behaviors.index import file_summaries, postings, row_lookup
from distop_behaviors.index import lookup_keys as keys_of
from distop_behaviors.index.covered_files import file_list, stamps_of
from distop_behaviors.index.index_folder import Folder
from distop_behaviors.index.key_values import Unindexable, arrow_type, canonical, key_numbers, numbers
from distop_behaviors.index.table_files import current_table, ids_now, record_of
from distop_behaviors.validate.scan import FileGroup, relation

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from distop.behavior import TableRecord
    from distop.tables import Spark
    from distop.tables.reading.file_facts import PlannedFile, SparkType
    from distop_behaviors.index.generation import Generation
    from distop_behaviors.index.key_values import Whole
    from distop_behaviors.index.lookup_keys import Key
    from distop_behaviors.index.postings import Places
    from distop_behaviors.index.table_files import CurrentTable

log = logging.getLogger("distop.index")


@frozen
class CandidateFiles:
    """The files that a lookup must read.

    ``named``: files that may have a key, according to the index. ``uncovered``: files that the index does not cover.
    ``columns``: the columns of the keys, with their types. ``schema``: the schema of the rows. ``places``: for each
    named file, the blocks of rows that may have a key; None if unknown, or if there are too many.
    """

    table: CurrentTable
    named: Sequence[PlannedFile]
    uncovered: Sequence[PlannedFile]
    keys: Sequence[Key]
    columns: Mapping[str, str]
    schema: Mapping[str, SparkType]
    places: Sequence[Whole] | None = None

    @property
    def files(self) -> list[PlannedFile]:
        """All files to read."""
        return [*self.named, *self.uncovered]


def lookup(
    spark: SparkSession,
    table: TableRecord | str,
    index: str,
    keys: Iterable[Any],
    *,
    local_bytes: int = row_lookup.LOCAL_BYTES,
) -> DataFrame:
    """The rows of a table that have one of the keys.

    The result is always the same as of a filter on the whole table, also if the table has changed since the index was
    built.

    ``table``: a record (from ``client.tables()``) or a location. ``keys``: values of the indexed column; for several
    columns, sequences in the order of the columns, or mappings by column. For a ``skip`` index, mappings may have only
    some of its columns, the same ones in all keys. None finds NULL, and NaN finds NaN. ``local_bytes``: if the index
    finds all rows and at most this many bytes must be decoded, this process reads them, and the frame has them in
    memory; 0: never.

    Raises NotFound if there is no such index, InvalidArgument for keys that do not have the column's type,
    TableUnavailable if the table cannot be reached, and Spark's errors if files cannot be read.
    """
    found = find(table, index, keys, lambda: spark)
    if not found.files or not found.keys:
        return _no_rows(spark, found)
    try:
        here = _read_here(found, local_bytes)
    except SparkOnly as e:
        log.debug("Reading the files with Spark: %s", e)
    else:
        return _frame_of(spark, found, here) if here.num_rows else _no_rows(spark, found)
    now = found.table
    group = FileGroup(tuple(found.files), found.schema, now.reader, (), now.paths)
    try:
        rows = relation(spark, group, keep=False)
    except Unreadable as e:
        raise TableUnavailable(str(e)) from e
    return keys_of.matching(rows, spark, found.keys, found.columns)


def _no_rows(spark: SparkSession, found: CandidateFiles) -> DataFrame:
    schema = {**found.schema, **found.table.paths}
    # Not a frame of an empty list, for which Spark would run a job with tasks.
    return spark.sql(f"SELECT {', '.join(f'CAST(NULL AS {ddl(t)}) AS {quote(n)}' for n, t in schema.items())} LIMIT 0")


def _read_here(found: CandidateFiles, most: int) -> pa.Table:
    """The rows, read without Spark. Raises SparkOnly if Spark must read them."""
    if most <= 0 or found.uncovered or found.places is None:
        raise SparkOnly("the index does not have the positions of all rows")
    blocks = [Blocks(file, own, postings.BLOCK) for file, own in zip(found.named, found.places, strict=True)]
    return row_lookup.rows_with_keys(found.table.reader.rows_at(blocks, found.schema, most), found.keys, found.columns)


def _frame_of(spark: SparkSession, found: CandidateFiles, rows: pa.Table) -> DataFrame:
    """A frame of these rows, with the same types as a scan."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructField, StructType

    kinds = {**found.schema, **dict.fromkeys(found.table.paths, "string")}
    schema = StructType([StructField(name, arrow_types.spark_type(kind)) for name, kind in kinds.items()])
    frame = spark.createDataFrame(rows, schema)
    typed = {name: F.col(quote(name)).cast(kind) for name, kind in found.table.paths.items() if kind != "string"}
    return frame.withColumns(typed) if typed else frame


def find(table: TableRecord | str, index: str, keys: Iterable[Any], spark: Spark | None = None) -> CandidateFiles:
    """The files that :func:`lookup` must read. Raises its errors. Needs Spark only for a table of Spark's catalog."""
    now = current_table(record_of(table), spark=spark)
    folder = Folder(now.root, index)
    given = list(keys)
    tried = None
    while True:
        generation = folder.current()
        if generation is None:
            raise NotFound(f"the table at {now.root!r} has no index {index!r}")
        if generation.number == tried:
            return _Lookup(now, folder, generation, None).ask(given)
        if generation.ids != ids_now(now, generation.columns):
            log.warning(
                "Reading all files: the indexed columns changed since the index %s was built; refresh it", index
            )
            return _Lookup(now, folder, generation, None).ask(given)
        try:
            return _Lookup(now, folder, generation, file_list(folder, generation)).ask(given)
        except (OSError, ValueError, UnsafePath) as e:
            # It was superseded and removed meanwhile; or it is damaged, then the same generation is found again.
            log.warning("Cannot read generation %d of the index %s; retrying: %s", generation.number, index, e)
            tried = generation.number


class _Lookup:
    """A lookup in one generation of an index. ``files``: its covered files; None if unknown."""

    def __init__(self, table: CurrentTable, folder: Folder, generation: Generation, files: pa.Table | None) -> None:
        self._table = table
        self._folder = folder
        self._generation = generation
        self._files = files
        self._live: dict[int, PlannedFile] = {}
        """Covered files that are unchanged since they were indexed, by their numbers."""
        if files is not None:
            columns = [files.column(name).to_pylist() for name in ("file", "path", "size")]
            for number, path, size, stamp in zip(*columns, stamps_of(files), strict=True):
                file = table.files.get(path)
                if file is not None and (file[1], file[2]) == (size, stamp):
                    self._live[number] = file

    def ask(self, given: Sequence[Any]) -> CandidateFiles:
        """The files to read. Raises OSError and Arrow's errors if a file of the index is missing or damaged."""
        known = {file[0] for file in self._live.values()}
        uncovered = [file for file in self._table.files.values() if file[0] not in known]
        schema = self._schema(uncovered)
        columns = self._columns(given, schema)
        kinds = {name: str(schema[mine]) for name, mine in columns.items()}
        keys = keys_of.read(given, kinds)
        named: Sequence[int] = []
        places: Places | None = None
        if keys and self._files is not None:
            chosen: set[int] | None
            if self._generation.kind == "posting":
                chosen, places = _by_postings(self._folder, self._generation, self._files, keys)
            else:
                chosen = _by_summaries(self._generation, self._files, keys, list(columns))
            named = [number for number in self._live if chosen is None or number in chosen]
        return CandidateFiles(
            self._table,
            [self._live[number] for number in named],
            uncovered,
            keys,
            {columns[n]: k for n, k in kinds.items()},
            schema,
            _of_files(named, places) if places is not None else None,
        )

    def _schema(self, uncovered: Sequence[PlannedFile]) -> dict[str, SparkType]:
        """The schema of the whole table, so that it does not depend on which files are read."""
        found = self._table.columns()
        if found is None:
            facts = self._table.reader.facts(uncovered, frozenset(), lambda: None)
            schemas = [f.columns.items() for f in facts if not isinstance(f, Unreadable)]
            found = widened([self._generation.schema, *schemas])
        return {
            name: kind
            for name, kind in found.items()
            if problem(kind) is None and not may_match(name, self._table.paths)
        }

    def _columns(self, given: Sequence[Any], schema: Mapping[str, SparkType]) -> dict[str, str]:
        """The columns of the keys: the names in the index, with the names in the table."""
        names: Sequence[str] = self._generation.columns
        if self._generation.kind == "skip" and given and isinstance(given[0], dict):
            names = [name for name in names if name in given[0]] or names
        found: dict[str, str] = {}
        for name in names:
            mine = match(name, schema)
            if mine is None or not isinstance(schema[mine], str):
                raise InvalidArgument(
                    f"the table no longer has a column {name!r} of single values: drop the index and build it again"
                )
            found[name] = mine
        return found


def _by_postings(
    folder: Folder, generation: Generation, files: pa.Table, keys: Sequence[Key]
) -> tuple[set[int] | None, Places | None]:
    """The numbers of the files that may have a key (None: all), and the file and block of each row that may.

    The second is None if it is unknown for some rows, or if there are too many.
    """
    import numpy as np

    found: set[int] = set()
    without = [key for key in keys if None not in key]
    if len(without) < len(keys):
        nulls = zip(files.column("file").to_pylist(), files.column("null_keys").to_pylist(), strict=True)
        found = {number for number, count in nulls if count}
    try:
        wanted = _numbers(without, generation.families)
    except Unindexable:
        return None, None
    parts: list[Places] | None = [] if not found else None
    for run in generation.runs:
        first, after = np.searchsorted(wanted, run.low, "left"), np.searchsorted(wanted, run.high, "right")
        if first < after:
            hits = postings.find(folder.store, folder.key_of(run.name), wanted[first:after], row_lookup.LOCAL_ROWS)
            found.update(hits.files.tolist())
            parts = [*parts, hits.places] if parts is not None and hits.places is not None else None
    if parts is None:
        return found, None
    places = postings.concatenated(parts)
    return found, places if len(places[0]) <= row_lookup.LOCAL_ROWS else None


def _of_files(named: Sequence[int], places: Places) -> list[Whole]:
    """The blocks of each of these files, sorted and without duplicates."""
    import numpy as np

    files, blocks = places
    order = np.argsort(files, kind="stable")
    files, blocks = files[order], blocks[order]
    starts, ends = (np.searchsorted(files, np.array(named, np.int32), side) for side in ("left", "right"))
    return [np.unique(blocks[s:e]) for s, e in zip(starts, ends, strict=True)]


def _by_summaries(generation: Generation, files: pa.Table, keys: Sequence[Key], columns: Sequence[str]) -> set[int]:
    """The numbers of the files that may have a key."""
    families = dict(zip(generation.columns, generation.families, strict=True))
    may = file_summaries.find(files, keys, columns, families)
    return set(files.column("file").filter(may).to_pylist())


def _numbers(keys: Sequence[Key], families: Sequence[str | None]) -> Any:
    """The numbers of the keys that columns of these families can hold, sorted and unique. Raises Unindexable."""
    import numpy as np
    import pyarrow as pa

    if None in families:
        return np.zeros(0, np.int64)
    rows = [tuple(keys_of.as_family(v, f or "") for v, f in zip(key, families, strict=True)) for key in keys]
    rows = [row for row in rows if None not in row]
    if not rows:
        return np.zeros(0, np.int64)
    parts = []
    for family, column in zip(families, zip(*rows, strict=True), strict=True):
        array = canonical(pa.array(column, arrow_type(family or "")), family or "")
        parts.append(numbers(array, family or ""))
    return np.unique(key_numbers(parts, families))
