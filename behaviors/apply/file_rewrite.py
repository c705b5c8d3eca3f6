"""Rewrites data files with narrowed columns, by Iceberg's writer, into a staging table.

The staging table's one snapshot has a manifest by Iceberg, with the statistics of the new files under the new field
ids. Its files are those of :mod:`distop_behaviors.apply.staged_files`.
"""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

from distop.protocol.texts import plural
from distop.runtime.java import active
from distop.storage import deletion
from distop.storage.confinement import normal_form, note_copy
from distop.storage.files import for_arrow
from distop.storage.location import Location
from distop.storage.opened_stores import store_of
from distop.storage.places import make_table_data
from distop.storage.storage_urls import check_paths
from distop.storage.store_errors import unavailable
from distop.tables.iceberg import iceberg_jar, iceberg_rows, java_tables, manifest_facts, staging_table
from distop.tables.iceberg.iceberg_changes import entries
from distop.tables.iceberg.manifest_list import manifests_of
from distop.tables.iceberg.metadata_file import current_metadata_file, read_metadata
from distop.tables.iceberg.snapshot_checks import check_opened
from distop.tables.iceberg.staging_table import (
    check_complete,
    data_url,
    raw_metadata,
    schema_of,
    staging_metadata,
)
from distop.tables.iceberg.written_folders import check_folder
from distop.tables.reading.file_facts import quote
from distop.tables.spark import spark_catalog
from distop_behaviors.apply.apply_report import Staged
from distop_behaviors.apply.staged_files import CONTENTS, TABLE, clear, contents_of, discard, purpose_of
from distop_behaviors.apply.type_narrowing import new_schema
from distop_behaviors.reading.check_session import session_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from distop.behavior import JobContext
    from distop.storage.deletion import Place
    from distop.tables.reading.file_facts import PlannedFile
    from distop_behaviors.apply.constraints import Narrowed
    from distop_behaviors.apply.staged_files import StageFolders


_CATALOG = "spark.sql.catalog.default_iceberg"


def stage(
    ctx: JobContext,
    source: str,
    files: Sequence[PlannedFile],
    narrowed: Sequence[Narrowed],
    ids: Mapping[int, int],
    into: StageFolders,
    certificate: str,
) -> Staged:
    """Rewrite the rows of these files that are not deleted. If it fails, it removes everything it has written.

    Returns the amount of data, without the commit of its manifest. ``ids``: new field ids by old ones. ``into``: the
    stage; its ``place`` must exist, and ``data`` is created here. ``certificate``: the digest of the applied
    certificate. Raises InvalidArgument for a file that may not belong to the table, RowsLost, Spark's errors,
    FileExistsError if ``data`` already exists, and UnsafePath, also if other users may change a folder above it.
    """
    if not files:
        return Staged()
    # The files may be of a cached plan whose files were not checked.
    check_opened(source, (path for path, _, _ in files), ())
    session = session_of(ctx.spark)
    iceberg_jar.check_installed(session._jvm)
    raw = raw_metadata(session, source)
    schema = new_schema(schema_of(raw), narrowed, ids)
    if into.begun():
        clear(into)  # an earlier run of this attempt was interrupted; Iceberg would add to its files
    _write_metadata(into, raw, schema)
    ctx.status(f"rewriting {plural(len(files), 'file')}")
    try:
        make_table_data(into.place, into.data)
        check_folder(into.data)
        if int(raw["format-version"]) >= java_tables.ROW_LINEAGE:
            _write_with_lineage(session, source, files, schema, narrowed, into.table)
        else:
            _write(session, source, files, schema, narrowed, into.table)
        staged = _staged_in(into.table)
        check_complete(ctx.check_cancelled, session, source, files, staged.rows)
        paths = (path for path, _, _ in files)
        contents = contents_of(paths, int(raw["current-schema-id"]), int(raw["last-column-id"]), ids)
        contents |= {"snapshot": manifest_facts.snapshot_of(source, frozenset()).id, "staged": staged.model_dump()}
        contents["made_for"] = purpose_of(certificate, narrowed)
        store_of(into.place).put(CONTENTS, json.dumps(contents).encode())
    except BaseException:
        discard(into, frozenset(), ctx.log)
        raise
    return staged


def _write_metadata(into: StageFolders, raw: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    """Write the metadata of the staging table, which is empty."""
    for place in (into.place, into.data):
        deletion.check_unlinked(place)
    metadata = staging_metadata(raw, schema, java_tables.uri(into.table), data_url(str(raw["location"]), into.data))
    store = store_of(into.place)
    store.put(f"{TABLE}/metadata/v1.metadata.json", json.dumps(metadata).encode())
    store.put(f"{TABLE}/metadata/version-hint.text", b"1")


def _staged_in(location: str) -> Staged:
    snapshot = read_metadata(current_metadata_file(Location.of(location)))[0].current_snapshot()
    summary = dict(snapshot.summary.additional_properties) if snapshot is not None and snapshot.summary else {}
    return Staged(
        files=int(summary.get("added-data-files", 0)),
        rows=int(summary.get("added-records", 0)),
        bytes=int(summary.get("added-files-size", 0)),
    )


def files_in(into: StageFolders, check: Callable[[], None]) -> tuple[list[str], dict[str, int]]:
    """The files of a stage, below its place; and those in the table, below its folder there, with their rows."""
    rows = dict[str, int]()
    metadata, io = read_metadata(current_metadata_file(Location.of(into.table)))
    start = f"{normal_form(into.data.location)}/"
    if (snapshot := metadata.current_snapshot()) is not None:
        for _, entry in entries(manifests_of(snapshot, io), io, check):
            rows[normal_form(entry.data_file.file_path).removeprefix(start)] = int(entry.data_file.record_count)
    names = [one.key for one in store_of(into.place).list(TABLE)]
    return names, rows


def _write(
    session: Any,
    source: str,
    files: Sequence[PlannedFile],
    schema: Mapping[str, Any],
    narrowed: Sequence[Narrowed],
    location: str,
) -> None:
    # A table by path needs no catalog; but Iceberg's default catalog would load Hive's libraries.
    session.conf.set(_CATALOG, "org.apache.iceberg.spark.SparkCatalog")
    session.conf.set(f"{_CATALOG}.type", "hadoop")
    session.conf.set(f"{_CATALOG}.warehouse", location)
    session.conf.set(f"{_CATALOG}.cache-enabled", "false")
    with active(session):
        spark_catalog.check_catalog(session, _CATALOG.rpartition(".")[2])
    rows = iceberg_rows.read(session, source, files).select(*_columns(schema, narrowed))
    with active(session):
        rows.write.format("iceberg").mode("append").option("check-nullability", "false").save(java_tables.uri(location))


def _columns(schema: Mapping[str, Any], narrowed: Sequence[Narrowed]) -> list[Any]:
    from pyspark.sql import functions as F

    casts = {one.name: one.spark for one in narrowed}
    columns = []
    for field in schema["fields"]:
        column, name = F.col(quote(field["name"])), field["name"]
        columns.append(column.cast(casts[name]).alias(name) if name in casts else column)
    return columns


def _write_with_lineage(
    session: Any,
    source: str,
    files: Sequence[PlannedFile],
    schema: Mapping[str, Any],
    narrowed: Sequence[Narrowed],
    location: str,
) -> None:
    """Rewrite rows with their row ids and last commit numbers (row lineage)."""
    from pyspark.sql import functions as F

    columns = [*_columns(schema, narrowed), *map(F.col, iceberg_rows.LINEAGE)]
    rows = iceberg_rows.read(session, source, files, lineage=True).select(*columns)
    staging_table.write_as_rewrite(session, rows, location)


def view(ctx: JobContext, source: str, schema_id: int, place: Place) -> str:
    """Write a metadata file of the table of ``source`` with an earlier schema, which late writers use."""
    raw = raw_metadata(session_of(ctx.spark), source)
    metadata = {n: v for n, v in raw.items() if n not in ("schema", "partition-spec")}
    name = f"view-{uuid.uuid4().hex}.metadata.json"
    path = f"{place.location}/{name}"
    store_of(place).put_new(name, json.dumps(metadata | {"current-schema-id": schema_id}).encode())
    note_copy(source, path)
    return path


def has_fields(path: str, ids: Iterable[int]) -> bool:
    """Whether a data file was written with these columns. Raises TableUnavailable if it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    check_paths((path,))
    try:
        with for_arrow(path) as file:
            schema = pq.read_schema(file)
    except (OSError, pa.ArrowInvalid) as error:
        raise unavailable(f"cannot read the new file {path}: {error}", error) from error
    found = {int((field.metadata or {}).get(b"PARQUET:field_id", -1)) for field in schema}
    return found.issuperset(ids)
