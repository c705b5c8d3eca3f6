"""A staging table: an empty table like the real one, into which Spark writes new data files at their final place.

Its one snapshot has a manifest by Iceberg, with the statistics of the new files. A commit of the real table takes the
files from there.
"""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

from distop.protocol.texts import plural
from distop.runtime.java import active
from distop.storage.files import for_arrow, local_path
from distop.tables.iceberg import iceberg_rows, java_tables, manifest_facts
from distop.tables.iceberg.metadata_file import read_file
from distop.tables.iceberg.table_properties import for_writing
from distop.tables.reading import row_counts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyspark.sql import DataFrame

    from distop.storage.deletion import Place
    from distop.tables.reading.file_facts import PlannedFile

DATA_PATH = "write.data.path"
_NAMED = 10
"""Maximum number of further files in an error."""
_KEPT = frozenset(
    {
        *("table-uuid", "last-updated-ms", "next-row-id", "partition-specs", "default-spec-id", "last-partition-id"),
        *("sort-orders", "default-sort-order-id"),
    }
)
"""The fields of a table's metadata that determine how files are written, besides the schema and properties."""


class RowsLost(Exception):
    """Rows of a file are missing in the rewritten files. The text names the file."""


def raw_metadata(session: Any, source: str) -> dict[str, Any]:
    """The metadata in a file, as parsed and written by Iceberg. ``source``: its path, like in a plan."""
    metadata = java_tables.table_of(session, read_file(source)).operations().current()
    raw: dict[str, Any] = json.loads(session._jvm.org.apache.iceberg.TableMetadataParser.toJson(metadata))
    return raw


def schema_of(metadata: Mapping[str, Any], schema_id: int | None = None) -> dict[str, Any]:
    """The current schema of raw metadata, or the schema with this id."""
    wanted = metadata["current-schema-id"] if schema_id is None else schema_id
    return next(schema for schema in metadata["schemas"] if schema["schema-id"] == wanted)


def data_url(table: str, data: Place) -> str:
    """The URL of staged data with the scheme of the table's location: readers may know ``s3a:`` alone."""
    url = java_tables.uri(data.location)
    scheme = "file" if local_path(table) is not None else table.partition("://")[0]
    return f"{scheme}://{url.partition('://')[2]}"


def check_complete(
    check: Callable[[], None], session: Any, source: str, files: Sequence[PlannedFile], written: int
) -> None:
    """Raises RowsLost unless all rows of the files were written, except deleted ones.

    The reader silently skips rows of a file whose footer has wrong positions, and the rewrite would remove them from
    the table. The manifests have the row count of each file. If the total differs, or if the manifests do not count the
    deleted rows, a separate query counts each file.
    """
    known = manifest_facts.snapshot_of(source, frozenset(), check).files
    facts = [known[path] for path, _, _ in files]
    if written == row_counts.expected_rows(facts):
        return
    check()
    found = iceberg_rows.count_rows(session, source, files)
    wrong = row_counts.misread_files(row_counts.with_deletes(facts, found.deleted), found.kept, row_counts.MANIFEST)
    if wrong:
        first, *others = wrong
        more = ""
        if others:
            have = "has" if len(others) == 1 else "have"
            names = ", ".join(others[:_NAMED])
            rest = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
            more = f"; {plural(len(others), 'other file')} {have} the same problem: {names}{rest}"
        raise RowsLost(
            f"cannot rewrite the table: {wrong[first]}{more}; restore these files, or remove them from the table"
        )
    rows = sum(found.kept.values())
    if written != rows:
        raise RowsLost(
            f"cannot rewrite the table: {plural(written, 'row')} were written, but Spark finds {rows} in "
            f"{plural(len(files), 'file')}, such as {files[0][0]}"
        )


def staging_metadata(
    metadata: Mapping[str, Any], schema: Mapping[str, Any], location: str, data: str
) -> dict[str, Any]:
    """The metadata of an empty staging table, whose writers write files like the real table's into ``data``.

    It has this schema, and the specs, sort order and allowed properties (``table_properties``) of the real table. Its
    columns are optional, so that a NULL in a required column stays a NULL.
    """
    kept = {name: value for name, value in metadata.items() if name in _KEPT}
    highest = max(metadata["last-column-id"], *(field["id"] for field in schema["fields"]))
    properties = for_writing(metadata.get("properties", {}))
    return kept | {
        "format-version": max(int(metadata["format-version"]), 2),
        "location": location,
        "schemas": [{**java_tables.optional(schema), "schema-id": 0}],
        "current-schema-id": 0,
        "last-column-id": highest,
        "last-sequence-number": 0,
        "properties": properties | {DATA_PATH: data},
        **{name: [] for name in ("snapshots", "snapshot-log", "metadata-log", "statistics", "partition-statistics")},
    }


def write_as_rewrite(session: Any, rows: DataFrame, location: str, options: Mapping[str, str] | None = None) -> None:
    """Write rows into the staging table at a location as in Iceberg's own rewrites. Raises Spark's errors.

    Such a rewrite gets a table by name, and returns the new files for the caller to commit. Only it writes row ids and
    last commit numbers (row lineage). The rows must have been read by ``iceberg_rows``, which sets the catalog.
    """
    jvm = session._jvm
    table = _load(session, location)
    name, cache = f"distop-written-{uuid.uuid4().hex}", java_tables.table_cache(session)
    written = jvm.org.apache.iceberg.spark.FileRewriteCoordinator.get()
    cache.add(name, table)
    try:
        with active(session):
            writing = rows.write.format("iceberg").mode("append").option("check-nullability", "false")
            writing.options(**(options or {})).save(name)
        appending = table.newFastAppend()
        for file in written.fetchNewFiles(table, name):
            appending.appendFile(file)
        appending.commit()
    finally:
        cache.remove(name)
        written.clearRewrite(table, name)


def append_written(session: Any, location: str, data: Place, names: Sequence[str], partition: Any) -> None:
    """Append Parquet files of one partition to the staging table, with the statistics of their footers.

    ``partition``: as Iceberg has it in the JVM. Raises Java's errors, and OSError.
    """
    import pyarrow.parquet as pq

    iceberg = session._jvm.org.apache.iceberg
    table = _load(session, location)
    metrics, spec, root = iceberg.MetricsConfig.forTable(table), table.spec(), str(table.properties()[DATA_PATH])
    appending = table.newFastAppend()
    for name in names:
        with for_arrow(f"{data.location}/{name}") as file:
            offsets = _group_offsets(pq.read_metadata(file))
        file = table.io().newInputFile(f"{root}/{name}")
        builder = iceberg.DataFiles.builder(spec).withInputFile(file).withFormat("parquet").withPartition(partition)
        builder = builder.withMetrics(iceberg.parquet.ParquetUtil.fileMetrics(file, metrics))
        appending.appendFile(builder.withSplitOffsets(_longs(session, offsets)).build())
    appending.commit()


def _load(session: Any, location: str) -> Any:
    conf = session._jsparkSession.sessionState().newHadoopConf()
    return session._jvm.org.apache.iceberg.hadoop.HadoopTables(conf).load(java_tables.uri(location))


def _group_offsets(footer: Any) -> list[int]:
    """Where the row groups of a file begin."""
    found = []
    for number in range(footer.num_row_groups):
        column = footer.row_group(number).column(0)
        found.append(int(column.dictionary_page_offset or column.data_page_offset))
    return found


def _longs(session: Any, numbers: Sequence[int]) -> Any:
    """A Java list of longs: py4j would make integers of small numbers."""
    found = session.sparkContext._gateway.new_array(session._jvm.long, len(numbers))
    for at, number in enumerate(numbers):
        found[at] = number
    return session._jvm.org.apache.iceberg.relocated.com.google.common.primitives.Longs.asList(found)
