"""The planner for Apache Iceberg tables: reads the current snapshot from the metadata without a JVM.

A table is given by its folder, whose newest metadata file is found like by Iceberg's own file-system tables; or by its
name in a catalog, which has its metadata file. The plan has that file, which fixes snapshot and schema, independent of
later commits.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from distop.errors import DistopError, InvalidArgument, TableUnavailable
from distop.protocol.plan import MAX_PARTITIONS, PartitionPlan, Planned
from distop.runtime.lru_cache import LruCache
from distop.storage.confinement import TableFiles, check_folder, check_form, check_metadata, own_folder, table_of
from distop.storage.files import gone, identity, local_path
from distop.storage.location import Location, root_of
from distop.tables.formats import Format
from distop.tables.iceberg import iceberg_catalogs
from distop.tables.iceberg.avro import Damaged
from distop.tables.iceberg.iceberg_changes import entries, field_of
from distop.tables.iceberg.manifest_list import manifests_of
from distop.tables.iceberg.metadata_file import identity_on_disk, read_file
from distop.tables.iceberg.row_deletes import VECTOR_FIELDS, check_vector
from distop.tables.parquet.parquet_format import EMPTY, HIVE_NULL, escaped, in_groups, natural
from distop.tables.table_options import check_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from distop.protocol.plan import Pinned
    from distop.protocol.records import TableRecord
    from distop.tables.formats import Changes, Spark
    from distop.tables.iceberg.avro import ManifestIO
    from distop.tables.iceberg.metadata_file import MetadataFile
    from distop.tables.reader import Reader
    from distop.tables.table_options import Options

NO_SNAPSHOT = "no snapshot"
"""The version of a table without any snapshot."""

_FOLDER = "metadata"
_HINT = "version-hint.text"
_HINT_BYTES = 64
"""Maximum bytes of the version hint, a number."""
_NUMBERED = re.compile(r"v(0|[1-9][0-9]{0,8})(\.gz)?\.metadata\.json")
_FORMERLY = re.compile(r"v[0-9]+\.metadata\.json\.gz")
"""Names of early Iceberg releases, which Iceberg also finds."""
_HINTED = re.compile(r"([0-9]{1,9})(?:\r\n|\r|\n)?|\s*")
_KEPT_FILES = 20_000
"""Maximum files of a cached plan: some 10 MB."""

_Identity = tuple[str, ...]
_plans: LruCache[tuple[Planned, tuple[_Identity, ...]]] = LruCache(4)
"""Plans, with the manifest list and the manifests that they were read from."""
_checked: LruCache[tuple[_Identity, ...]] = LruCache(64)
"""The manifest list and manifests of metadata files whose files were checked (confinement)."""


def check_table(record: TableRecord) -> TableRecord:
    """Check a record; returns the record to store.

    Raises InvalidArgument, with the name, for an unknown option, a location that cannot be opened, does not exist or
    has no Iceberg table, a folder whose current metadata only a catalog knows, and a catalog that cannot be reached
    from here or does not have the table.
    """
    options = check_options(record.options, "iceberg")
    try:
        read_metadata(_current(record, options, lambda: None))
        folder = _folder(record, options)
        if folder is None:
            return record
        location = Location.of(folder)
    except TableUnavailable as error:
        raise InvalidArgument(str(error)) from error
    return replace(record, location=location.text) if options.catalog is None else record


def plan_table(table: TableRecord, check: Callable[[], None], spark: Spark) -> Planned:
    """Plan the current snapshot, with :func:`plan_metadata` of the current metadata file.

    Raises InvalidArgument if that file cannot be determined, TableUnavailable if the table, its metadata or its
    manifests cannot be read.
    """
    options = check_options(table.options, "iceberg")
    return plan_metadata(_current(table, options, check), table, options, check)


def plan_metadata(source: str, table: TableRecord, options: Options, check: Callable[[], None]) -> Planned:
    """Plan the current snapshot of a metadata file. The version is the snapshot's id.

    There is one partition per value of each partition spec, and groups of files for a spec without partitions. A table
    without files is one partition without files: unlike an empty folder, it certainly has no rows, and the partition's
    job still checks the columns.

    Metadata files and manifests never change unless forged, so plans are cached, as long as manifests on a disk are the
    same files.

    Raises the errors of :func:`plan_table`.
    """
    key = identity_on_disk(source)
    if key is None:
        return _planned(source, table, options, check)[0]
    key = (*key, str(options.group_bytes), str(options.group_files))

    def make() -> tuple[Planned, tuple[_Identity, ...]]:
        return _planned(source, table, options, check)

    planned, manifests = _plans.get(key, make, keep=_is_small)
    if not _are_same(manifests):
        # Do not use the cached plan if a manifest cannot be read or was replaced.
        made = make()
        planned, _ = made
        _plans.put(key, made)
    return replace(planned, partitions=list(planned.partitions))


def _is_small(made: tuple[Planned, tuple[_Identity, ...]]) -> bool:
    return sum(len(partition.files) for partition in made[0].partitions) <= _KEPT_FILES


def _are_same(files: Iterable[_Identity]) -> bool:
    """Whether all files exist and were not replaced."""
    return all(identity(file[0]) == file and file != gone(file[0]) for file in files)


def _planned(
    source: str, table: TableRecord, options: Options, check: Callable[[], None]
) -> tuple[Planned, tuple[_Identity, ...]]:
    """A new plan, with the manifest list and the manifests that it was read from."""
    file = read_file(source)
    metadata, io = file.content, file.manifests()
    snapshot = metadata.current_snapshot()
    version = str(snapshot.snapshot_id) if snapshot is not None else NO_SNAPSHOT
    folders: dict[str, list[tuple[str, int, int]]] = {}
    loose: dict[str, list[tuple[str, int, int]]] = {}
    manifests: list[_Identity] = []
    if snapshot is not None:
        try:
            with io.watched():
                for prefix, name, planned in _data_files(source, metadata, snapshot, io, check, manifests):
                    group = folders.setdefault(prefix + name, []) if name else loose.setdefault(prefix, [])
                    group.append(planned)
        except Damaged as error:
            raise _unread(metadata, snapshot, error) from error
    checked(file, manifests)
    for prefix, files in loose.items():
        for name, group in in_groups(sorted(files, key=lambda f: (natural(f[0]), f[0])), options):
            folders[prefix + name] = group
    if not folders:
        folders[EMPTY] = []
    if len(folders) > MAX_PARTITIONS:
        count = len(folders)
        raise InvalidArgument(f"the table {table.location!r} has {count} partitions: at most a million are supported")
    partitions = []
    for ordinal, name in enumerate(sorted(folders, key=lambda name: (natural(name), name))):
        files = sorted(folders[name], key=lambda f: (natural(f[0]), f[0]))
        partitions.append(PartitionPlan(ordinal, name, sum(f[1] for f in files), tuple(files), source=source))
    return Planned(partitions, version), tuple(manifests)


def check_files(file: MetadataFile, check: Callable[[], None] = lambda: None) -> None:
    """Raises InvalidArgument if the current snapshot has a file that may not belong to the table, TableUnavailable.

    To be called before Spark, which opens any file that the metadata name. Results are cached as long as the manifests
    are the same files.
    """
    _checked_manifests(file, check)


def _checked_manifests(file: MetadataFile, check: Callable[[], None] = lambda: None) -> tuple[_Identity, ...]:
    """The manifest list and the manifests of the current snapshot after :func:`check_files`. Raises its errors."""
    found = _checked.get(file.key(), lambda: _read_all(file, check))
    if not _are_same(found):
        found = _read_all(file, check)
        checked(file, found)
    return found


def checked(file: MetadataFile, manifests: Iterable[_Identity]) -> None:
    """Cache that all files of the current snapshot were checked (confinement).

    ``manifests``: identities of the manifest list and the manifests before they were read.
    """
    _checked.put(file.key(), tuple(manifests))


def check_loaded(file: MetadataFile, snapshot: str, manifest_list: str) -> None:
    """Raises InvalidArgument if Java reads another current snapshot from a metadata file than Python.

    To be called before Java opens the manifest list. Also raises the errors of :func:`check_files`.
    """
    current = file.content.current_snapshot()
    found = (str(current.snapshot_id), _plain(current.manifest_list)) if current is not None else None
    if found != (snapshot, _plain(manifest_list)):
        raise InvalidArgument(
            f"Java and Python read the metadata file {file.source} differently: let the table's writer write it again"
        )
    check_files(file)


def check_manifests(file: MetadataFile, manifests: Sequence[str]) -> None:
    """Raises InvalidArgument if Java has read other ``manifests`` from the manifest list than Python.

    Their decoders can differ on a crafted list. Also raises the errors of :func:`check_files`.
    """
    check_same_manifests(file.source, [str(found[0]) for found in _checked_manifests(file)[1:]], manifests)


def check_same_manifests(source: str, known: Iterable[str], manifests: Iterable[str]) -> None:
    """Raises InvalidArgument unless the paths are the same. ``known``: the manifests that Python has read."""
    if [_plain(path) for path in known] != [_plain(path) for path in manifests]:
        raise InvalidArgument(
            f"Java and Python read the manifest list of {source} differently: let the table's writer write it again"
        )


def check_opened(source: str, data: Iterable[str], deletes: Iterable[tuple[str, int | None, int | None]]) -> None:
    """Raises InvalidArgument for a data or delete file of Java's plan that may not belong to the table.

    Java may read other files than Python from the same manifests. ``deletes``: path, and offset and size of a deletion
    vector.
    """
    files = TableFiles(table_of(source))
    files.check(data)
    deletes = list(deletes)
    files.check((path for path, _, _ in deletes), deletes=True)
    for path, offset, size in deletes:
        if offset is not None or size is not None:
            check_vector(path, offset, size)


def _plain(path: str) -> str:
    return str(local_path(path) or path)


def _read_all(file: MetadataFile, check: Callable[[], None]) -> tuple[_Identity, ...]:
    manifests: list[_Identity] = []
    metadata, io = file.content, file.manifests()
    snapshot = metadata.current_snapshot()
    if snapshot is not None:
        try:
            with io.watched():
                for _ in _data_files(file.source, metadata, snapshot, io, check, manifests):
                    pass
        except Damaged as error:
            raise _unread(metadata, snapshot, error) from error
    return tuple(manifests)


def reader(table: TableRecord, plans: Sequence[PartitionPlan | Pinned]) -> Reader:
    """The reader for plans of one metadata file. Raises InvalidArgument for a plan without a metadata file."""
    from distop.tables.iceberg.iceberg_reader import IcebergReader

    source = plans[0].source if plans else ""
    if not source:
        raise InvalidArgument(f"the plan of {table.name!r} has no metadata file, so it is not a plan of this table")
    return IcebergReader(table, plans, source)


def check_reachable(table: TableRecord, spark: Spark) -> None:
    """Raises TableUnavailable if there is no table at the location: it was dropped, or its disk is missing.

    A table that its catalog no longer has is not unavailable: the job reports what it finds.
    """
    options = check_options(table.options, "iceberg")
    try:
        source = _current(table, options, lambda: None)
    except (InvalidArgument, TableUnavailable) as error:
        if _folder(table, options) is None:
            if isinstance(error, InvalidArgument):
                return
            raise
        raise TableUnavailable(
            f"there is no Iceberg table at {table.location!r}: it was dropped, or its disk is not mounted here"
        ) from error
    if _folder(table, options) is None:
        read_metadata(source)


def place_of(table: TableRecord, check: Callable[[], None], spark: Spark) -> str:
    """The table's folder; for a table of a catalog, from its metadata. Raises the errors of planning."""
    folder = folder_of(table)
    if folder is not None:
        return folder
    with iceberg_catalogs.opened(table, check) as found:
        return own_folder(found.source, str(found.metadata.location))


def folders_of(table: TableRecord, check: Callable[[], None], spark: Spark, *, elsewhere: bool) -> tuple[str, ...]:
    """The table's folder, or that of the catalog's metadata file."""
    folder = folder_of(table)
    if folder is not None:
        return (root_of(folder),)
    with iceberg_catalogs.opened(table, check) as found:
        return (table_of(found.source),)


def folder_of(table: TableRecord) -> str | None:
    """The table's folder; None if only its catalog knows it. Raises InvalidArgument for an invalid record."""
    return _folder(table, check_options(table.options, "iceberg"))


def _folder(table: TableRecord, options: Options) -> str | None:
    if options.catalog is None:
        return table.location
    name = iceberg_catalogs.identifier(table)
    warehouse = options.catalog.warehouse()
    if warehouse is None:
        return None
    folder = "/".join((warehouse, *name))
    check_folder(folder, options.folder)
    return folder


def _current(table: TableRecord, options: Options, check: Callable[[], None]) -> str:
    """The current metadata file. Raises InvalidArgument and TableUnavailable."""
    folder = _folder(table, options)
    if folder is not None:
        return metadata_file(Location.of(folder))
    with iceberg_catalogs.opened(table, check) as found:
        return found.source


def metadata_file(location: Location) -> str:
    """The table's current metadata file: the last of consecutive versions, starting at the version hint.

    So do Iceberg's file-system tables, because the hint may be outdated. Raises InvalidArgument if there is none, or
    only a catalog knows it; TableUnavailable if the folder cannot be listed.
    """
    names = location.names_in(_FOLDER)
    matches = [found for name in names if (found := _NUMBERED.fullmatch(name))]
    # If a version has two files, Iceberg uses the uncompressed one.
    matches.sort(key=lambda found: found[2] is None)
    numbered = {int(found[1]): found[0] for found in matches}
    if former := next(filter(_FORMERLY.fullmatch, names), None):
        raise InvalidArgument(
            f"the table at {location.text!r} has a metadata file {former!r} named by an early Iceberg release, which "
            "is not supported: rename it to end in .gz.metadata.json"
        )
    if not numbered:
        if any(name.endswith(".metadata.json") for name in names):
            raise InvalidArgument(
                f"the table at {location.text!r} belongs to a catalog, and only that knows its current metadata: "
                "register it with --option catalog=…, and its name in the catalog as its location"
            )
        raise InvalidArgument(f"the location {location.text!r} has no Iceberg table: it has no metadata file")
    hint = _HINTED.fullmatch(location.text_in(f"{_FOLDER}/{_HINT}", _HINT_BYTES) if _HINT in names else "")
    if hint is None:
        # Iceberg uses its first line, or lists the folder: Spark might read another file than was checked here.
        raise InvalidArgument(
            f"the file {_HINT} of the table at {location.text!r} has no version number: write the number of the "
            "current metadata file into it, or remove it"
        )
    version = int(hint[1]) if hint[1] else max(numbered)
    if version not in numbered:
        raise InvalidArgument(
            f"the metadata of the table at {location.text!r} is incomplete: it has no file for the version in {_HINT}"
        )
    while version + 1 in numbered:
        version += 1
    source = f"{location.text.rstrip('/')}/{_FOLDER}/{numbered[version]}"
    check_metadata(source)
    return source


def read_metadata(source: str) -> tuple[Any, ManifestIO]:
    """The metadata, and the reader of its manifests. Raises the errors of ``metadata_file.read_file``."""
    file = read_file(source)
    return file.content, file.manifests()


def _data_files(
    source: str, metadata: Any, snapshot: Any, io: ManifestIO, check: Callable[[], None], read_from: list[_Identity]
) -> Iterator[tuple[str, str, tuple[str, int, int]]]:
    """All live data files: (prefix of the partition's name, that name or "" without partitions, file).

    A file's time is 0: Iceberg never changes a file, so its path is its identity. ``read_from`` gets the identities of
    the manifest list and the manifests before they are read. Raises TableUnavailable, and InvalidArgument if a data or
    delete file may not belong to the table (confinement).
    """
    from pyiceberg.manifest import FileFormat, ManifestContent

    def read(by: Callable[[], Any]) -> Any:
        try:
            return by()
        except DistopError:
            raise
        except Exception as error:  # for a damaged file the reader raises any error, even SystemError
            raise _unread(metadata, snapshot, error) from error

    namings: dict[int, _Naming] = {}
    specs = metadata.specs()
    files = files_of(source, metadata)
    read_from.append(identity(snapshot.manifest_list))
    for manifest in read(partial(manifests_of, snapshot, io)):
        check()
        files.check((manifest.manifest_path,))
        read_from.append(identity(manifest.manifest_path))
        # Delete files, too, since Spark opens them.
        deletes = manifest.content != ManifestContent.DATA
        spec_id = manifest.partition_spec_id
        if spec_id not in namings:
            namings[spec_id] = _Naming(specs[spec_id], metadata)
        naming = namings[spec_id]
        one_more = partial(next, entries([manifest], io, check), None)
        while (found := read(one_more)) is not None:
            entry = found[1]
            file = entry.data_file
            files.check((file.file_path,), deletes=deletes)
            if deletes:
                if file.file_format == FileFormat.PUFFIN:
                    check_vector(file.file_path, *(field_of(entry, name) for name in VECTOR_FIELDS))
                continue
            yield naming.prefix, naming.name(file.partition), (file.file_path, file.file_size_in_bytes, 0)


def files_of(source: str, metadata: Any) -> TableFiles:
    """The files that may belong to a table. Raises InvalidArgument if its metadata name other files."""
    for one in metadata.snapshots:
        check_form(one.manifest_list)
    for one in metadata.metadata_log:
        check_form(one.metadata_file)
    for one in (*metadata.statistics, *metadata.partition_statistics):
        check_form(one.statistics_path)
    files = TableFiles(table_of(source))
    if (snapshot := metadata.current_snapshot()) is not None:
        files.check((snapshot.manifest_list,))
    return files


def _unread(metadata: Any, snapshot: Any, error: Exception) -> TableUnavailable:
    return TableUnavailable(f"cannot read the snapshot {snapshot.snapshot_id} of {metadata.location!r}: {error}")


class _Naming:
    """The partition names of one spec: ``day=2013-01-31/bucket=3``.

    Names of all specs but the first have the prefix ``spec-N/``: the same text may have another meaning in each spec,
    and a name is a partition's permanent identity.
    """

    def __init__(self, spec: Any, metadata: Any) -> None:
        from pyiceberg.transforms import VoidTransform

        self.prefix = f"spec-{spec.spec_id}/" if spec.spec_id else ""
        # In format version 1, a removed field of a spec has a void transform: leave it out.
        self._fields = [
            (n, escaped(field.name), field.transform, _result_type(field, metadata))
            for n, field in enumerate(spec.fields)
            if not isinstance(field.transform, VoidTransform)
        ]

    def name(self, values: Any) -> str:
        parts = []
        for n, name, transform, kind in self._fields:
            value = values[n]
            if value is None:
                parts.append(f"{name}={HIVE_NULL}")
                continue
            text = escaped(str(value) if kind is None else transform.to_human_string(kind, value))
            # A value equal to the text for NULL must get another name.
            parts.append(f"{name}=%5F{text[1:]}" if text == HIVE_NULL else f"{name}={text}")
        return "/".join(parts)


def _result_type(field: Any, metadata: Any) -> Any:
    """The type of a partition field's values, from any schema that still has its column; else None."""
    for schema in [metadata.schema(), *reversed(metadata.schemas)]:
        try:
            return field.transform.result_type(schema.find_type(field.source_id))
        except ValueError:
            continue
    return None


class IcebergFormat(Format):
    """Iceberg tables, by their folder or by their name in a catalog."""

    def check_table(self, record: TableRecord) -> TableRecord:
        return check_table(record)

    def plan_table(self, table: TableRecord, check: Callable[[], None], spark: Spark) -> Planned:
        return plan_table(table, check, spark)

    def reader(self, table: TableRecord, plans: Sequence[PartitionPlan | Pinned]) -> Reader:
        return reader(table, plans)

    def check_reachable(self, table: TableRecord, spark: Spark) -> None:
        check_reachable(table, spark)

    def place_of(self, table: TableRecord, check: Callable[[], None], spark: Spark) -> str:
        return place_of(table, check, spark)

    def folders_of(
        self, table: TableRecord, check: Callable[[], None], spark: Spark, *, elsewhere: bool
    ) -> tuple[str, ...]:
        return folders_of(table, check, spark, elsewhere=elsewhere)

    def of_catalog(self, table: TableRecord) -> bool:
        return folder_of(table) is None

    def asks_server(self, record: TableRecord) -> bool:
        return "catalog" in record.options

    def has_source(self, table: TableRecord) -> bool:
        return True

    def lies_at(self, location: Location) -> bool:
        return any(name.endswith(".metadata.json") for name in location.names_in(_FOLDER))

    def changes(self, table: TableRecord) -> Changes:
        from distop.tables.formats import Changes

        return Changes(check_options(table.options, "iceberg").catalog)


FORMAT = IcebergFormat()
