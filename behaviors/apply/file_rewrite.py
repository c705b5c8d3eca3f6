"""Rewrites data files with narrowed columns, by Iceberg's writer, into a staging table.

The metadata of the staging table is in the stage of an attempt or a completion. Its one snapshot has a manifest by
Iceberg, with the statistics of the new files under the new field ids. The data files are at their final place, in a
folder of this attempt below the table's data, so that publishing moves nothing. The path of that folder is the path of
the stage in the shared directory, below ``distop-staged`` and the folder of the namespace.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument, TableUnavailable, UnsafePath
from distop.protocol.frozen import frozen
from distop.protocol.texts import plural
from distop.runtime.java import active
from distop.storage import deletion
from distop.storage.confinement import note_copy
from distop.storage.deletion import Place
from distop.storage.files import open_regular
from distop.storage.location import Location
from distop.storage.places import STAGE
from distop.storage.storage_urls import check_paths
from distop.tables.iceberg import iceberg_jar, iceberg_rows, java_tables, manifest_facts
from distop.tables.iceberg.iceberg_fields import local_path
from distop.tables.iceberg.metadata_file import current_metadata_file, read_metadata
from distop.tables.iceberg.snapshot_checks import check_opened
from distop.tables.iceberg.metadata_file import read_file
from distop.tables.iceberg.staged_metadata import check_staged
from distop.tables.iceberg.written_folders import DATA, check_folder
from distop.tables.reading import row_counts
from distop.tables.reading.file_facts import quote
from distop.tables.spark import spark_catalog
from distop_behaviors.apply.apply_report import Staged
from distop_behaviors.apply.type_narrowing import new_schema, staging_metadata
from distop_behaviors.reading.check_session import session_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from distop.behavior import JobContext
    from distop.runtime.logs import Log
    from distop.tables.iceberg.metadata_file import MetadataFile
    from distop.tables.reading.file_facts import PlannedFile
    from distop_behaviors.apply.constraints import Narrowed

_TABLE = "table"
"""The folder of the staging table in a stage."""
_NAMED = 10
"""Maximum number of further files in an error."""
_CONTENTS = f"{_TABLE}/contents.json"
"""A file in a stage: the source files of the rewrite, and its parameters. Outcomes hold them too, but a forged outcome
could replace files by nothing.
"""
_CONTENTS_BYTES = 1 << 20
_CATALOG = "spark.sql.catalog.default_iceberg"


@frozen
class Stage:
    """The two folders of an attempt or a completion.

    ``place``: the staging table's metadata, in the shared directory. ``data``: the data files, below the real table.
    """

    place: Place
    data: Place

    @classmethod
    def of(cls, place: Place, shared: Place, space: str, table: str) -> Stage:
        """The stage at a place in the shared directory. ``table``: the table's folder.

        Raises UnsafePath if the place is not below the folder of stages.
        """
        inner = place.path.removeprefix(f"{shared.path}/" if shared.path else "").removeprefix(f"{STAGE}/")
        if place.anchor != shared.anchor or place != shared.below(f"{STAGE}/{inner}"):
            raise UnsafePath(f"{place.location} is not a stage in {shared.location}")
        return cls(place, Place(table, f"{DATA}/{space}/{inner}" if space else f"{DATA}/{inner}"))

    @property
    def table(self) -> str:
        """The location of the staging table."""
        return f"{self.place.location}/{_TABLE}"

    def check_own(self) -> None:
        """Raises UnsafePath if other users may have written into ``place`` or if it is missing, and OSError.

        The name of a stage comes from an outcome, so it does not prove who has created it.
        """
        deletion.check_own(self.place)

    def metadata(self, check: Callable[[], None] = lambda: None) -> tuple[MetadataFile, list[str]]:
        """The current metadata file of the staging table, and its manifests.

        Raises UnsafePath if other users may have written it or if it is a link, InvalidArgument if there is none, and
        what :func:`~distop.tables.iceberg.staged_metadata.check_staged` raises.
        """
        self.check_own()
        found = Path(current_metadata_file(Location.of(self.table)))
        file = read_file(str(deletion.regular_file(self.place, f"{_TABLE}/metadata/{found.name}")))
        return file, check_staged(file, self.data.location, check)

    def check_file(self, path: str) -> None:
        """Raises UnsafePath for a data file that is outside this stage or a link, and OSError."""
        local, folder = local_path(path) or path, f"{self.data.location}/"
        if not local.startswith(folder):
            raise UnsafePath(f"{self.table} names {path}, which is not in {folder}: nothing was changed")
        deletion.regular_file(self.data, local.removeprefix(folder))

    def begun(self) -> bool:
        """Whether files may have been written into ``data``."""
        try:
            deletion.regular_file(self.place, f"{_TABLE}/metadata/v1.metadata.json")
        except (OSError, UnsafePath):
            return False
        return True


class RowsLost(Exception):
    """Rows of a file are missing in the rewritten files. The text names the file."""


def raw_metadata(session: Any, source: str) -> dict[str, Any]:
    """A metadata file, as parsed and written by Iceberg. ``source``: its path, as a plan names it."""
    metadata = java_tables.table_of(session, read_file(source)).operations().current()
    raw: dict[str, Any] = json.loads(session._jvm.org.apache.iceberg.TableMetadataParser.toJson(metadata))
    return raw


def schema_of(metadata: Mapping[str, Any], schema_id: int | None = None) -> dict[str, Any]:
    """The current schema of raw metadata, or the schema with this id."""
    wanted = metadata["current-schema-id"] if schema_id is None else schema_id
    return next(schema for schema in metadata["schemas"] if schema["schema-id"] == wanted)


def stage(
    ctx: JobContext,
    source: str,
    files: Sequence[PlannedFile],
    narrowed: Sequence[Narrowed],
    ids: Mapping[int, int],
    into: Stage,
    certificate: str,
) -> Staged:
    """Rewrite the rows of these files that are not deleted.

    If it fails, it removes everything it has written.

    ``ids``: new field ids by old ones. ``into``: the stage; its ``place`` must exist, and ``data`` is created here.
    ``certificate``: the digest of the applied certificate. Raises InvalidArgument for a file that may not belong to the
    table, RowsLost, what Spark raises, FileExistsError if ``data`` already exists, and UnsafePath, also if other users
    may change a folder above it.
    """
    if not files:
        return Staged()
    # A cached plan may have opened other files: check these.
    check_opened(source, (path for path, _, _ in files), ())
    session = session_of(ctx.spark)
    iceberg_jar.check_installed(session._jvm)
    raw = raw_metadata(session, source)
    schema = new_schema(schema_of(raw), narrowed, ids)
    location, data = into.table, into.data.location
    for place in (into.place, into.data):
        deletion.check_unlinked(place)
    # The metadata is written before the first data file, so that a cleanup finds the data files.
    metadata = json.dumps(staging_metadata(raw, schema, f"file://{location}", f"file://{data}")).encode()
    deletion.write(into.place, f"{_TABLE}/metadata/v1.metadata.json", metadata)
    deletion.write(into.place, f"{_TABLE}/metadata/version-hint.text", b"1")
    ctx.status(f"rewriting {plural(len(files), 'file')}")
    try:
        # All readers of the table must be able to read its data files.
        deletion.make_new(into.data, 0o755)
        check_folder(into.data)
        if int(raw["format-version"]) >= java_tables.ROW_LINEAGE:
            _write_with_lineage(session, source, files, schema, narrowed, location)
        else:
            _write(session, source, files, schema, narrowed, location)
        staged = _staged_in(location)
        _check_complete(ctx, session, source, files, staged.rows)
        paths = (path for path, _, _ in files)
        contents = _contents(paths, int(raw["current-schema-id"]), int(raw["last-column-id"]), ids)
        contents |= {"snapshot": manifest_facts.snapshot_of(source, frozenset()).id, "staged": staged.model_dump()}
        contents["made_for"] = purpose_of(certificate, narrowed)
        deletion.write(into.place, _CONTENTS, json.dumps(contents).encode())
    except BaseException:
        discard(into, frozenset(), ctx.log)
        raise
    return staged


def _contents(files: Iterable[str], schema: int, last_column: int, ids: Mapping[int, int]) -> dict[str, Any]:
    digest = hashlib.blake2b("\0".join(sorted(files)).encode("utf-8", "surrogateescape"), digest_size=16)
    columns = {str(old): new for old, new in ids.items()}
    return {"files": digest.hexdigest(), "schema": schema, "last_column": last_column, "ids": columns}


def purpose_of(certificate: str, narrowed: Iterable[Narrowed]) -> dict[str, Any]:
    """The purpose of a stage: the digest of the certificate, and the columns with their new types."""
    return {"certificate": certificate, "narrowed": {str(n.id): [n.name, n.type, n.spark] for n in narrowed}}


def staged_data(
    stage: Stage, files: Iterable[str], schema: int, last_column: int, ids: Mapping[int, int], wanted_for: Any
) -> tuple[Staged, str] | None:
    """The staged data of a stage with these source files, and the snapshot they were read from.

    None if the stage has other source files or ids, or if other users may have written it. Raises InvalidArgument if it
    was written for another purpose than ``wanted_for`` (:func:`purpose_of`).
    """
    wanted = _contents(files, schema, last_column, ids)
    try:
        stage.check_own()
        contents = json.loads(deletion.read_regular(stage.place, _CONTENTS, _CONTENTS_BYTES))
        if contents["made_for"] == wanted_for:
            if not wanted.items() <= contents.items():
                return None
            return Staged.model_validate(contents["staged"]), str(contents["snapshot"])
    except (OSError, UnsafePath, ValueError, LookupError, TypeError, AttributeError):
        return None
    raise InvalidArgument(
        f"{stage.place.location} was written for another certificate or other types than the operation's argument "
        "names: the argument was changed after planning, so nothing was changed; start a new operation"
    )


def _staged_in(location: str) -> Staged:
    snapshot = read_metadata(current_metadata_file(Location.of(location)))[0].current_snapshot()
    summary = dict(snapshot.summary.additional_properties) if snapshot is not None and snapshot.summary else {}
    return Staged(
        files=int(summary.get("added-data-files", 0)),
        rows=int(summary.get("added-records", 0)),
        bytes=int(summary.get("added-files-size", 0)),
    )


def _check_complete(ctx: JobContext, session: Any, source: str, files: Sequence[PlannedFile], written: int) -> None:
    """Raises RowsLost unless all rows of the files were written, except deleted ones.

    The reader silently skips rows of a file whose footer has wrong positions, and the rewrite would remove them from
    the table. The manifests have the row count of each file. If the total differs, or if the manifests do not count the
    deleted rows, a separate query counts each file.
    """
    known = manifest_facts.snapshot_of(source, frozenset(), ctx.check_cancelled).files
    facts = [known[path] for path, _, _ in files]
    if written == row_counts.expected_rows(facts):
        return
    ctx.check_cancelled()
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


def _write(
    session: Any,
    source: str,
    files: Sequence[PlannedFile],
    schema: Mapping[str, Any],
    narrowed: Sequence[Narrowed],
    location: str,
) -> None:
    # A table by path needs no catalog, but Iceberg's default catalog would load Hive's libraries.
    session.conf.set(_CATALOG, "org.apache.iceberg.spark.SparkCatalog")
    session.conf.set(f"{_CATALOG}.type", "hadoop")
    session.conf.set(f"{_CATALOG}.warehouse", location)
    session.conf.set(f"{_CATALOG}.cache-enabled", "false")
    with active(session):
        spark_catalog.check_catalog(session, _CATALOG.rpartition(".")[2])
    rows = iceberg_rows.read(session, source, files).select(*_columns(schema, narrowed))
    with active(session):
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
    """Rewrite rows with their row ids and last commit numbers (row lineage).

    Iceberg writes these only in its own rewrites: such a rewrite gets a table by name, and returns the new files for
    the caller to commit.
    """
    from pyspark.sql import functions as F

    jvm = session._jvm
    conf = session._jsparkSession.sessionState().newHadoopConf()
    table = jvm.org.apache.iceberg.hadoop.HadoopTables(conf).load(f"file://{location}")
    name, cache = f"distop-written-{uuid.uuid4().hex}", java_tables.table_cache(session)
    written = jvm.org.apache.iceberg.spark.FileRewriteCoordinator.get()
    columns = [*_columns(schema, narrowed), *map(F.col, iceberg_rows.LINEAGE)]
    rows = iceberg_rows.read(session, source, files, lineage=True).select(*columns)
    cache.add(name, table)
    try:
        with active(session):
            rows.write.format("iceberg").mode("append").option("check-nullability", "false").save(name)
        appending = table.newFastAppend()
        for file in written.fetchNewFiles(table, name):
            appending.appendFile(file)
        appending.commit()
    finally:
        cache.remove(name)
        written.clearRewrite(table, name)


def view(ctx: JobContext, source: str, schema_id: int, place: Place) -> str:
    """Write a metadata file with the table of ``source`` under an earlier schema, as late writers see it."""
    raw = raw_metadata(session_of(ctx.spark), source)
    metadata = {n: v for n, v in raw.items() if n not in ("schema", "partition-spec")}
    name = f"view-{uuid.uuid4().hex}.metadata.json"
    path = f"{place.location}/{name}"
    deletion.write(place, name, json.dumps(metadata | {"current-schema-id": schema_id}).encode())
    note_copy(source, path)
    return path


def has_fields(path: str, ids: Iterable[int]) -> bool:
    """Whether a data file was written with these columns. Raises TableUnavailable if it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    check_paths((path,))
    try:
        local = local_path(path)
        with open_regular(local) if local is not None else nullcontext(path) as file:
            schema = pq.read_schema(file)
    except (OSError, pa.ArrowInvalid) as error:
        raise TableUnavailable(f"cannot read the new file {path}: {error}") from error
    found = {int((field.metadata or {}).get(b"PARQUET:field_id", -1)) for field in schema}
    return found.issuperset(ids)


# ---------------------------------------------------------------------- sweeping


def discard(stage: Stage, live: frozenset[str], log: Log) -> None:
    """Remove a stage and its data files.

    Logs what cannot be removed; the stage then stays, too, for a retry.

    ``live``: folders with files of the table (:func:`live_files`). A data folder that holds one of them stays. Data
    without a stage also stays: it may be published, and belong to an older snapshot.
    """
    data = os.path.realpath(stage.data.location)
    if stage.begun() and not any(folder == data or folder.startswith(f"{data}/") for folder in live):
        try:
            job = stage.data.parent
            deletion.delete(job, stage.data.name)
            deletion.delete(job.parent, job.name, only_empty=True)
            deletion.delete(job.parent.parent, job.parent.name, only_empty=True)
        except (OSError, UnsafePath) as error:
            log.warning("Could not remove staged data files; retried later: %s: %s", stage.data.location, error)
            return
    deletion.delete_or_log(stage.place.parent, stage.place.name, log)


def stages_below(place: Place) -> Iterator[Place]:
    """The stages of an operation in its folder.

    Of its jobs' attempts and of its completions.

    Raises UnsafePath and OSError.
    """
    for name in deletion.names(place):
        for attempt in deletion.names(place.below(name)):
            yield place.below(f"{name}/{attempt}")


def live_files(paths: Iterable[str]) -> frozenset[str]:
    """The folders of these files, with links resolved, as :func:`discard` compares them."""
    return frozenset(os.path.realpath(folder) for folder in {os.path.dirname(local_path(p) or p) for p in paths})  # noqa: PTH120
