"""Data files written anew with narrowed columns, by Iceberg's own writer, into a table of their own.

That table (in the stage of an attempt, or of a completion) is one snapshot with the files: a manifest that Iceberg
wrote, with their statistics under the new field ids. The files themselves lie where they are to stay, in a folder of
this attempt below the table's data, so that nothing is moved when they are published.
"""

from __future__ import annotations

import json
import shutil
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop.errors import TableUnavailable
from distop.files import write
from distop.storage_urls import check_paths
from distop.tables.iceberg import metadata_file, read_metadata
from distop.tables.location import Location
from distop_behaviors.apply.narrowing import DATA_PATH, new_schema, scratch
from distop_behaviors.apply.producing import uri
from distop_behaviors.apply.report import Staged
from distop_behaviors.reading import iceberg
from distop_behaviors.reading.facts import quote
from distop_behaviors.reading.fields import local_path
from distop_behaviors.reading.session import session_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from distop.behavior import JobContext
    from distop_behaviors.apply.constraints import Narrowed
    from distop_behaviors.reading.footers import PlannedFile

_TABLE = "table"
"""The folder of the table in a stage."""
_FOLDER = "distop-"
"""How the folder of an attempt's data files begins."""
_CATALOG = "spark.sql.catalog.default_iceberg"


def raw_metadata(session: Any, source: str) -> dict[str, Any]:
    """A metadata file as Iceberg itself understands it. ``source``: as a plan names it."""
    jvm: Any = session._jvm
    conf = session._jsparkSession.sessionState().newHadoopConf()
    table = jvm.org.apache.iceberg.hadoop.HadoopTables(conf).load(uri(source))
    told: dict[str, Any] = json.loads(jvm.org.apache.iceberg.TableMetadataParser.toJson(table.operations().current()))
    return told


def schema_of(metadata: Mapping[str, Any], schema_id: int | None = None) -> dict[str, Any]:
    """The current schema of raw metadata, or that of an id."""
    wanted = metadata["current-schema-id"] if schema_id is None else schema_id
    return next(schema for schema in metadata["schemas"] if schema["schema-id"] == wanted)


def stage(
    ctx: JobContext,
    source: str,
    files: Sequence[PlannedFile],
    narrowed: Sequence[Narrowed],
    ids: Mapping[int, int],
    folder: str,
) -> Staged:
    """The rows of these files that no delete removes, written anew. ``ids``: of the columns, by the former ones.
    ``folder``: for what names them; made here. Nothing is left of it where that fails. Raises what Spark raises.
    """
    if not files:
        return Staged()
    session = session_of(ctx.spark)
    iceberg.check_installed(session._jvm)
    raw = raw_metadata(session, source)
    schema = new_schema(schema_of(raw), narrowed, ids)
    location, data = f"{folder}/{_TABLE}", f"{raw['location'].rstrip('/')}/data/{_FOLDER}{uuid.uuid4().hex}"
    # What names the files is there before the first of them: so whoever sweeps finds them.
    write(
        f"{location}/metadata/v1.metadata.json", json.dumps(scratch(raw, schema, f"file://{location}", data)).encode()
    )
    write(f"{location}/metadata/version-hint.text", b"1")
    ctx.status(f"writing {len(files)} files anew")
    try:
        if int(raw["format-version"]) >= iceberg.ROW_LINEAGE:
            _write_with_lineage(session, source, files, schema, narrowed, location)
        else:
            _write(session, source, files, schema, narrowed, location)
        metadata = read_metadata(metadata_file(Location.of(location)))[0]
    except BaseException:
        discard(folder, frozenset())
        raise
    snapshot = metadata.current_snapshot()
    summary = dict(snapshot.summary.additional_properties) if snapshot is not None and snapshot.summary else {}
    return Staged(
        metadata=metadata_file(Location.of(location)),
        data=data,
        files=int(summary.get("added-data-files", 0)),
        rows=int(summary.get("added-records", 0)),
        bytes=int(summary.get("added-files-size", 0)),
    )


def _write(
    session: Any,
    source: str,
    files: Sequence[PlannedFile],
    schema: Mapping[str, Any],
    narrowed: Sequence[Narrowed],
    location: str,
) -> None:
    # Iceberg's own default asks Hive's libraries, although a table by path needs no catalog.
    session.conf.set(_CATALOG, "org.apache.iceberg.spark.SparkCatalog")
    session.conf.set(f"{_CATALOG}.type", "hadoop")
    session.conf.set(f"{_CATALOG}.warehouse", location)
    session.conf.set(f"{_CATALOG}.cache-enabled", "false")
    rows = iceberg.read(session, source, files).select(*_columns(schema, narrowed))
    with _active(session):
        rows.write.format("iceberg").mode("append").option("check-nullability", "false").save(f"file://{location}")


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
    """Rows keep their ids, and the numbers of the commits that changed them last. Iceberg writes these in its own
    rewrites alone: they are handed a table by its name, and give the files for somebody else to commit.
    """
    from pyspark.sql import functions as F

    jvm = session._jvm
    conf = session._jsparkSession.sessionState().newHadoopConf()
    table = jvm.org.apache.iceberg.hadoop.HadoopTables(conf).load(f"file://{location}")
    name, cache = f"distop-written-{uuid.uuid4().hex}", iceberg.table_cache(session)
    written = jvm.org.apache.iceberg.spark.FileRewriteCoordinator.get()
    columns = [*_columns(schema, narrowed), *map(F.col, iceberg.LINEAGE)]
    rows = iceberg.read(session, source, files, lineage=True).select(*columns)
    cache.add(name, table)
    try:
        with _active(session):
            rows.write.format("iceberg").mode("append").option("check-nullability", "false").save(name)
        appending = table.newFastAppend()
        for file in written.fetchNewFiles(table, name):
            appending.appendFile(file)
        appending.commit()
    finally:
        cache.remove(name)
        written.clearRewrite(table, name)


@contextmanager
def _active(session: Any) -> Iterator[None]:
    """Iceberg and Spark look for a writer's catalog in the session that is active in the thread, whichever has made the
    rows; a job is a thread of its own.
    """
    from pyspark.sql import SparkSession

    sessions = SparkSession._get_j_spark_session_class(session._jvm)
    former = sessions.getActiveSession()
    sessions.setActiveSession(session._jsparkSession)
    try:
        yield
    finally:
        if former.isDefined():
            sessions.setActiveSession(former.get())
        else:
            sessions.clearActiveSession()


def view(ctx: JobContext, source: str, schema_id: int, folder: str) -> str:
    """A metadata file that has the table of another one under a former schema, as those see it who began before."""
    raw = raw_metadata(session_of(ctx.spark), source)
    told = {n: v for n, v in raw.items() if n not in ("schema", "partition-spec")}
    path = f"{folder}/view-{uuid.uuid4().hex}.metadata.json"
    write(path, json.dumps(told | {"current-schema-id": schema_id}).encode())
    return path


def has_fields(path: str, ids: Iterable[int]) -> bool:
    """A data file was written with these columns. Raises TableUnavailable where it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    check_paths((path,))
    try:
        schema = pq.read_schema(local_path(path) or path)
    except (OSError, pa.ArrowInvalid) as error:
        raise TableUnavailable(f"the file {path}, which came meanwhile, cannot be read: {error}") from error
    found = {int((field.metadata or {}).get(b"PARQUET:field_id", -1)) for field in schema}
    return found.issuperset(ids)


# ---------------------------------------------------------------------- sweeping


def discard(folder: str, live: frozenset[str]) -> None:
    """Remove a stage, and the data files that it names. ``live``: files that are part of the table; a folder with one
    of them stays.
    """
    data = data_of(folder)
    if data is not None and not any(path.startswith(f"{data}/") for path in live):
        shutil.rmtree(data, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def sweep(folder: str, live: frozenset[str]) -> None:
    """Discard all stages below a folder, and it."""
    for one in list(_stages(Path(folder))):
        discard(str(one), live)
    shutil.rmtree(folder, ignore_errors=True)


def _stages(folder: Path) -> Iterator[Path]:
    for path in folder.rglob(f"{_TABLE}/metadata/v1.metadata.json"):
        yield path.parents[2]


def data_of(folder: str) -> str | None:
    """Where the data files of a stage lie; None where there are none yet."""
    try:
        told = json.loads((Path(folder) / _TABLE / "metadata" / "v1.metadata.json").read_text())
        data = local_path(told["properties"][DATA_PATH])
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return data if data is not None and Path(data).name.startswith(_FOLDER) else None


def live_files(paths: Iterable[str]) -> frozenset[str]:
    """Paths of the table's files as :func:`discard` compares them."""
    return frozenset(local_path(path) or path for path in paths)
