"""Data files written anew with narrowed columns, by Iceberg's own writer, into a table of their own.

That table (in the stage of an attempt, or of a completion) is one snapshot with the files: a manifest that Iceberg
wrote, with their statistics under the new field ids. The files themselves lie where they are to stay, in a folder of
this attempt below the table's data, so that nothing is moved when they are published: its path there is that of the
stage in the shared directory, below ``distop-staged`` and the folder of the namespace.
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
from distop.runtime.java import active
from distop.storage import deletion
from distop.storage.confinement import copied
from distop.storage.deletion import Place
from distop.storage.files import open_regular
from distop.storage.location import Location
from distop.storage.places import STAGE
from distop.storage.storage_urls import check_paths
from distop.tables.iceberg import iceberg_rows, manifest_facts
from distop.tables.iceberg.iceberg_fields import local_path
from distop.tables.iceberg.iceberg_format import check_opened, metadata_file, read_metadata
from distop.tables.iceberg.metadata_file import read_file
from distop.tables.iceberg.staged_metadata import check_staged
from distop.tables.iceberg.written_folders import DATA, check_folder
from distop.tables.reading import row_counts
from distop.tables.reading.file_facts import quote
from distop.tables.spark import spark_catalog
from distop_behaviors.apply.apply_report import Staged
from distop_behaviors.apply.type_narrowing import new_schema, scratch
from distop_behaviors.reading.check_session import session_of
from distop_behaviors.validate.validate_report import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from distop.behavior import JobContext
    from distop.runtime.logs import Log
    from distop.tables.iceberg.metadata_file import MetadataFile
    from distop.tables.reading.file_facts import PlannedFile
    from distop_behaviors.apply.constraints import Narrowed

_TABLE = "table"
"""The folder of the table in a stage."""
_NAMED = 10
"""Further files that one error names."""
_CONTENTS = f"{_TABLE}/contents.json"
"""In a stage: which files were written anew, and how. An outcome, which says it too, is data: who writes one could have
files replaced by nothing.
"""
_CONTENTS_BYTES = 1 << 20
_CATALOG = "spark.sql.catalog.default_iceberg"


@frozen
class Stage:
    """Where an attempt, or a completion, writes: what names its files (``place``, in the shared directory), and the
    files themselves (``data``, below the table).
    """

    place: Place
    data: Place

    @classmethod
    def of(cls, place: Place, shared: Place, space: str, table: str) -> Stage:
        """That of a place in the stages of a shared directory. ``table``: its folder. Raises UnsafePath for any other
        place.
        """
        inner = place.path.removeprefix(f"{shared.path}/" if shared.path else "").removeprefix(f"{STAGE}/")
        if place.anchor != shared.anchor or place != shared.below(f"{STAGE}/{inner}"):
            raise UnsafePath(f"{place.location} is no stage of {shared.location}")
        return cls(place, Place(table, f"{DATA}/{space}/{inner}" if space else f"{DATA}/{inner}"))

    @property
    def table(self) -> str:
        """The table that has the files."""
        return f"{self.place.location}/{_TABLE}"

    def check_own(self) -> None:
        """Raises UnsafePath where others may have put something into ``place``, or it is not there, and OSError: its
        name follows from an outcome, and so does not tell who has made it.
        """
        deletion.check_own(self.place)

    def metadata(self, check: Callable[[], None] = lambda: None) -> tuple[MetadataFile, list[str]]:
        """Its current metadata file, and the manifests that this names. Raises UnsafePath where others may have made
        it, or it is a link, InvalidArgument where there is none, and what
        :func:`~distop.tables.iceberg.staged_metadata.check_staged` raises.
        """
        self.check_own()
        found = Path(metadata_file(Location.of(self.table)))
        file = read_file(str(deletion.regular_file(self.place, f"{_TABLE}/metadata/{found.name}")))
        return file, check_staged(file, self.data.location, check)

    def check_file(self, path: str) -> None:
        """Raises UnsafePath for a data file that does not lie in this stage, or is a link, and OSError."""
        local, folder = local_path(path) or path, f"{self.data.location}/"
        if not local.startswith(folder):
            raise UnsafePath(f"{path} is named by {self.table}, and does not lie in {folder}: nothing was changed")
        deletion.regular_file(self.data, local.removeprefix(folder))

    def begun(self) -> bool:
        """Something may have been written into ``data``."""
        try:
            deletion.regular_file(self.place, f"{_TABLE}/metadata/v1.metadata.json")
        except (OSError, UnsafePath):
            return False
        return True


class RowsLost(Exception):
    """Rows of a file were not written anew; the text names the file."""


def raw_metadata(session: Any, source: str) -> dict[str, Any]:
    """A metadata file as Iceberg itself understands it. ``source``: as a plan names it."""
    metadata = iceberg_rows.table_of(session, read_file(source)).operations().current()
    told: dict[str, Any] = json.loads(session._jvm.org.apache.iceberg.TableMetadataParser.toJson(metadata))
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
    into: Stage,
    certificate: str,
) -> Staged:
    """The rows of these files that no delete removes, written anew. ``ids``: of the columns, by the former ones.
    ``certificate``: the digest of the one that is applied. ``into``: its place is made before, its folder of data is
    made here. Nothing is left of it where that fails. Raises InvalidArgument where a file may not belong to the table,
    RowsLost, what Spark raises, FileExistsError where that folder is there before, and UnsafePath, also where others
    may change a folder that holds it.
    """
    if not files:
        return Staged()
    # The plan that has them may have been kept.
    check_opened(source, (path for path, _, _ in files), ())
    session = session_of(ctx.spark)
    iceberg_rows.check_installed(session._jvm)
    raw = raw_metadata(session, source)
    schema = new_schema(schema_of(raw), narrowed, ids)
    location, data = into.table, into.data.location
    for place in (into.place, into.data):
        deletion.check_unlinked(place)
    # What names the files is there before the first of them: so whoever sweeps finds them.
    metadata = json.dumps(scratch(raw, schema, f"file://{location}", f"file://{data}")).encode()
    deletion.write(into.place, f"{_TABLE}/metadata/v1.metadata.json", metadata)
    deletion.write(into.place, f"{_TABLE}/metadata/version-hint.text", b"1")
    ctx.status(f"writing {len(files)} files anew")
    try:
        # Whoever reads the table reads its data files.
        deletion.make_new(into.data, 0o755)
        check_folder(into.data)
        if int(raw["format-version"]) >= iceberg_rows.ROW_LINEAGE:
            _write_with_lineage(session, source, files, schema, narrowed, location)
        else:
            _write(session, source, files, schema, narrowed, location)
        staged = _staged_in(location)
        _check_complete(ctx, session, source, files, staged.rows)
        told = _contents((path for path, _, _ in files), int(raw["current-schema-id"]), int(raw["last-column-id"]), ids)
        told |= {"snapshot": manifest_facts.snapshot_of(source, frozenset()).id, "staged": staged.model_dump()}
        told["made_for"] = made_for(certificate, narrowed)
        deletion.write(into.place, _CONTENTS, json.dumps(told).encode())
    except BaseException:
        discard(into, frozenset(), ctx.log)
        raise
    return staged


def _contents(files: Iterable[str], schema: int, last_column: int, ids: Mapping[int, int]) -> dict[str, Any]:
    digest = hashlib.blake2b("\0".join(sorted(files)).encode("utf-8", "surrogateescape"), digest_size=16)
    columns = {str(old): new for old, new in ids.items()}
    return {"files": digest.hexdigest(), "schema": schema, "last_column": last_column, "ids": columns}


def made_for(certificate: str, narrowed: Iterable[Narrowed]) -> dict[str, Any]:
    """What decides what a stage has of its files: the digest of a certificate, and the columns with their new types."""
    return {"certificate": certificate, "narrowed": {str(n.id): [n.name, n.type, n.spark] for n in narrowed}}


def written_in(
    stage: Stage, files: Iterable[str], schema: int, last_column: int, ids: Mapping[int, int], wanted_for: Any
) -> tuple[Staged, str] | None:
    """What a stage has of these files under these ids, and the snapshot that they were read from; None where it was
    made of anything else, or others may have made it. Raises InvalidArgument where it was made for something else than
    ``wanted_for`` (:func:`made_for`).
    """
    wanted = _contents(files, schema, last_column, ids)
    try:
        stage.check_own()
        told = json.loads(deletion.read_regular(stage.place, _CONTENTS, _CONTENTS_BYTES))
        if told["made_for"] == wanted_for:
            if not wanted.items() <= told.items():
                return None
            return Staged.model_validate(told["staged"]), str(told["snapshot"])
    except (OSError, UnsafePath, ValueError, LookupError, TypeError, AttributeError):
        return None
    raise InvalidArgument(
        f"{stage.place.location} was written for another certificate or other types than the operation's argument now "
        "asks for: the argument was changed meanwhile, and nothing was changed; start the operation again"
    )


def _staged_in(location: str) -> Staged:
    snapshot = read_metadata(metadata_file(Location.of(location)))[0].current_snapshot()
    summary = dict(snapshot.summary.additional_properties) if snapshot is not None and snapshot.summary else {}
    return Staged(
        files=int(summary.get("added-data-files", 0)),
        rows=int(summary.get("added-records", 0)),
        bytes=int(summary.get("added-files-size", 0)),
    )


def _check_complete(ctx: JobContext, session: Any, source: str, files: Sequence[PlannedFile], written: int) -> None:
    """Raises RowsLost unless all rows of the files were written, but for deleted ones.

    The reader silently skips rows of a file whose footer states wrong positions; the rewrite would remove them from the
    table. The manifests count the rows of each file. If the total differs, or if they do not count the deleted rows, a
    separate query counts each file.
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
            more = f"; {counted(len(others), 'other file')} {have} the same fault: {names}"
        raise RowsLost(
            f"the table cannot be written anew: {wrong[first]}{more}; restore such files, or remove them from the table"
        )
    rows = sum(found.kept.values())
    if written != rows:
        raise RowsLost(
            f"the table cannot be written anew: {written} rows were written, but Spark finds {rows} in the files, "
            f"{files[0][0]} among them"
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
    """Rows keep their ids, and the numbers of the commits that changed them last. Iceberg writes these in its own
    rewrites alone: they are handed a table by its name, and give the files for somebody else to commit.
    """
    from pyspark.sql import functions as F

    jvm = session._jvm
    conf = session._jsparkSession.sessionState().newHadoopConf()
    table = jvm.org.apache.iceberg.hadoop.HadoopTables(conf).load(f"file://{location}")
    name, cache = f"distop-written-{uuid.uuid4().hex}", iceberg_rows.table_cache(session)
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
    """A metadata file that has the table of another one under a former schema, as those see it who began before."""
    raw = raw_metadata(session_of(ctx.spark), source)
    told = {n: v for n, v in raw.items() if n not in ("schema", "partition-spec")}
    name = f"view-{uuid.uuid4().hex}.metadata.json"
    path = f"{place.location}/{name}"
    deletion.write(place, name, json.dumps(told | {"current-schema-id": schema_id}).encode())
    copied(source, path)
    return path


def has_fields(path: str, ids: Iterable[int]) -> bool:
    """A data file was written with these columns. Raises TableUnavailable where it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    check_paths((path,))
    try:
        local = local_path(path)
        with open_regular(local) if local is not None else nullcontext(path) as file:
            schema = pq.read_schema(file)
    except (OSError, pa.ArrowInvalid) as error:
        raise TableUnavailable(f"the file {path}, which came meanwhile, cannot be read: {error}") from error
    found = {int((field.metadata or {}).get(b"PARQUET:field_id", -1)) for field in schema}
    return found.issuperset(ids)


# ---------------------------------------------------------------------- sweeping


def discard(stage: Stage, live: frozenset[str], log: Log) -> None:
    """Remove a stage, and its data files. ``live``: folders with files that are part of the table (:func:`live_files`);
    data with one of them stay, and so do data that no stage names any more: they may have been published since, and
    be those of a former snapshot. What cannot be removed is logged; the stage then stays, too, and is found again.
    """
    data = os.path.realpath(stage.data.location)
    if stage.begun() and not any(folder == data or folder.startswith(f"{data}/") for folder in live):
        try:
            job = stage.data.parent
            deletion.delete(job, stage.data.name)
            deletion.delete(job.parent, job.name, only_empty=True)
            deletion.delete(job.parent.parent, job.parent.name, only_empty=True)
        except (OSError, UnsafePath) as error:
            log.warning("Could not remove %s: %s", stage.data.location, error)
            return
    deletion.delete_or_log(stage.place.parent, stage.place.name, log)


def stages_below(place: Place) -> Iterator[Place]:
    """The stages of an operation, by its folder: those of attempts at its jobs, and of its completions. Raises
    UnsafePath and OSError.
    """
    for name in deletion.names(place):
        for attempt in deletion.names(place.below(name)):
            yield place.below(f"{name}/{attempt}")


def live_files(paths: Iterable[str]) -> frozenset[str]:
    """The folders of the table's files, without links, as :func:`discard` compares them."""
    return frozenset(os.path.realpath(folder) for folder in {os.path.dirname(local_path(p) or p) for p in paths})  # noqa: PTH120
