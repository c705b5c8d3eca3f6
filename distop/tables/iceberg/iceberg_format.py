"""The planner for Apache Iceberg tables: their current snapshot, read from the metadata without a JVM.

A table is named by its folder, and its newest metadata file is found as Iceberg's own file-system tables find it; or by
what it is called in a catalog, which says what its metadata file is. The plan keeps that file: it says which rows the
snapshot has, under which schema, whatever is committed later.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from distop.errors import DistopError, InvalidArgument, TableUnavailable
from distop.protocol.plan import MAX_PARTITIONS, PartitionPlan, Planned
from distop.runtime.lru_cache import Kept
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
"""The version of a table into which nothing was written yet."""

_FOLDER = "metadata"
_HINT = "version-hint.text"
_HINT_BYTES = 64
"""Of the hint at most: it is a number."""
_NUMBERED = re.compile(r"v(0|[1-9][0-9]{0,8})(\.gz)?\.metadata\.json")
_FORMERLY = re.compile(r"v[0-9]+\.metadata\.json\.gz")
"""What Iceberg finds besides: names of early releases."""
_HINTED = re.compile(r"([0-9]{1,9})(?:\r\n|\r|\n)?|\s*")
_KEPT_FILES = 20_000
"""Of a plan at most that is kept: some 10 MB."""

_Identity = tuple[str, ...]
_plans: Kept[tuple[Planned, tuple[_Identity, ...]]] = Kept(4)
"""With the manifests that they were read from, and the list of these."""
_checked: Kept[tuple[_Identity, ...]] = Kept(64)
"""Of the metadata files whose files may belong to their tables, the same."""


def check_table(record: TableRecord) -> TableRecord:
    """The record as it is to be stored.

    Raises InvalidArgument, naming it, for an unknown option, a location that cannot be opened or does not exist, one
    that holds no Iceberg table, and one whose catalog alone knows its current metadata; for a catalog that cannot be
    reached from here, or does not have the table.
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
    """The data files of the current snapshot: :func:`plan_metadata` of the current metadata file.

    Raises InvalidArgument where that is not to be told, TableUnavailable where the table, its metadata or its manifests
    are not there.
    """
    options = check_options(table.options, "iceberg")
    return plan_metadata(_current(table, options, check), table, options, check)


def plan_metadata(source: str, table: TableRecord, options: Options, check: Callable[[], None]) -> Planned:
    """The data files of the snapshot that is current in a metadata file, one partition for each value of each partition
    spec; in groups where a spec has no partitions. The version is the snapshot's id.

    A table without files is one partition without files: that it has no rows is certain, unlike an empty folder, and
    the partition's job still tells whether it has the columns.

    A metadata file is never changed, nor is what it names, unless somebody forges it: whoever plans on it again has
    what was read then, as long as manifests on a disk are the same files.

    Raises as :func:`plan_table` does.
    """
    key = identity_on_disk(source)
    if key is None:
        return _planned(source, table, options, check)[0]
    key = (*key, str(options.group_bytes), str(options.group_files))

    def make() -> tuple[Planned, tuple[_Identity, ...]]:
        return _planned(source, table, options, check)

    planned, manifests = _plans.get(key, make, keep=_is_small)
    if not _are_same(manifests):
        # What cannot be read is not to be planned by what is kept of it, nor what is another file by now.
        made = make()
        planned, _ = made
        _plans.put(key, made)
    return replace(planned, partitions=list(planned.partitions))


def _is_small(made: tuple[Planned, tuple[_Identity, ...]]) -> bool:
    return sum(len(partition.files) for partition in made[0].partitions) <= _KEPT_FILES


def _are_same(files: Iterable[_Identity]) -> bool:
    """They are there, and were not exchanged."""
    return all(identity(file[0]) == file and file != gone(file[0]) for file in files)


def _planned(
    source: str, table: TableRecord, options: Options, check: Callable[[], None]
) -> tuple[Planned, tuple[_Identity, ...]]:
    """With what it was read from, besides the metadata file."""
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
        raise InvalidArgument(f"the table {table.location!r} has {len(folders)} partitions, over a million")
    partitions = []
    for ordinal, name in enumerate(sorted(folders, key=lambda name: (natural(name), name))):
        files = sorted(folders[name], key=lambda f: (natural(f[0]), f[0]))
        partitions.append(PartitionPlan(ordinal, name, sum(f[1] for f in files), tuple(files), source=source))
    return Planned(partitions, version), tuple(manifests)


def check_files(file: MetadataFile, check: Callable[[], None] = lambda: None) -> None:
    """Raises InvalidArgument where the current snapshot of a metadata file names a file that may not belong to the
    table, and TableUnavailable: before Spark, which opens whatever it names. What this process has checked, it does
    not check again, as long as the manifests are the same files.
    """
    _checked_manifests(file, check)


def _checked_manifests(file: MetadataFile, check: Callable[[], None] = lambda: None) -> tuple[_Identity, ...]:
    """The list of manifests and the manifests of the current snapshot, whose files may belong to the table. Raises as
    :func:`check_files`.
    """
    found = _checked.get(file.key(), lambda: _read_all(file, check))
    if not _are_same(found):
        found = _read_all(file, check)
        checked(file, found)
    return found


def checked(file: MetadataFile, manifests: Iterable[_Identity]) -> None:
    """Note that all files of the current snapshot of a metadata file have been checked (confinement). ``manifests``:
    what they were read from, as it was before.
    """
    _checked.put(file.key(), tuple(manifests))


def check_loaded(file: MetadataFile, snapshot: str, manifest_list: str) -> None:
    """Raises InvalidArgument where Java takes another snapshot for the current one of the same text than Python does,
    and what :func:`check_files` raises: before Java opens the list of manifests.
    """
    current = file.content.current_snapshot()
    found = (str(current.snapshot_id), _plain(current.manifest_list)) if current is not None else None
    if found != (snapshot, _plain(manifest_list)):
        raise InvalidArgument(
            f"the metadata file {file.source} is not read by Java as by Python: have the table's writer write it anew"
        )
    check_files(file)


def check_manifests(file: MetadataFile, manifests: Sequence[str]) -> None:
    """Raises InvalidArgument where Java has read other ``manifests`` from the current snapshot's list than Python has:
    their decoders differ on a list that was made for it. And what :func:`check_files` raises.
    """
    check_same_manifests(file.source, [str(found[0]) for found in _checked_manifests(file)[1:]], manifests)


def check_same_manifests(source: str, known: Iterable[str], manifests: Iterable[str]) -> None:
    """Raises InvalidArgument where these are not the same paths. ``known``: those that Python has read."""
    if [_plain(path) for path in known] != [_plain(path) for path in manifests]:
        raise InvalidArgument(
            f"the list of manifests of {source} is not read by Java as by Python: have the table's writer write it anew"
        )


def check_opened(source: str, data: Iterable[str], deletes: Iterable[tuple[str, int | None, int | None]]) -> None:
    """Raises InvalidArgument where Java would open a data file or a delete file that may not belong to the table,
    whatever Python has read in the same manifests. ``deletes``: the path, and where a deletion vector lies in it.
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
    """The reader of what was planned on one metadata file. Raises InvalidArgument for a plan that names none."""
    from distop.tables.iceberg.iceberg_reader import IcebergReader

    source = plans[0].source if plans else ""
    if not source:
        raise InvalidArgument(f"the plan of {table.name!r} names no metadata of it: the plan is none of this table")
    return IcebergReader(table, plans, source)


def check_reachable(table: TableRecord, spark: Spark) -> None:
    """Raises TableUnavailable where there is no table at the location: it was dropped, or its disk is missing. That a
    catalog has the table no more is no such thing: it is known, and what its files are is for the job to tell.
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
            f"there is no Iceberg table at {table.location!r} any more: it was dropped, or its disk is not mounted here"
        ) from error
    if _folder(table, options) is None:
        read_metadata(source)


def place_of(table: TableRecord, check: Callable[[], None], spark: Spark) -> str:
    """Its folder, which of a table of a catalog the metadata tell. Raises as planning does."""
    folder = folder_of(table)
    if folder is not None:
        return folder
    with iceberg_catalogs.opened(table, check) as found:
        return own_folder(found.source, str(found.metadata.location))


def folders_of(table: TableRecord, check: Callable[[], None], spark: Spark, *, elsewhere: bool) -> tuple[str, ...]:
    """Its folder, or that of the metadata file which its catalog names."""
    folder = folder_of(table)
    if folder is not None:
        return (root_of(folder),)
    with iceberg_catalogs.opened(table, check) as found:
        return (table_of(found.source),)


def folder_of(table: TableRecord) -> str | None:
    """Where the table's folder is; None where its catalog alone knows that. Raises InvalidArgument for a record that
    names no table.
    """
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
    """The table's current metadata file: the newest in a row from the version hint on, as Iceberg's file-system tables
    have it, whose hint may be behind.

    Raises InvalidArgument where there is none, or a catalog alone knows which it is; TableUnavailable where the folder
    cannot be listed.
    """
    names = location.names_in(_FOLDER)
    matches = [found for name in names if (found := _NUMBERED.fullmatch(name))]
    # Of one version Iceberg takes the file that is not compressed.
    matches.sort(key=lambda found: found[2] is None)
    numbered = {int(found[1]): found[0] for found in matches}
    if former := next(filter(_FORMERLY.fullmatch, names), None):
        raise InvalidArgument(
            f"the metadata of the table at {location.text!r} have a file {former!r}, as early releases of Iceberg name "
            "it, which is not read here: rename it to end in .gz.metadata.json"
        )
    if not numbered:
        if any(name.endswith(".metadata.json") for name in names):
            raise InvalidArgument(
                f"the table at {location.text!r} belongs to a catalog, which alone knows its current metadata: "
                "register it with --option catalog=…, and as its location what it is called there"
            )
        raise InvalidArgument(f"the location {location.text!r} holds no Iceberg table: there is no metadata in it")
    hint = _HINTED.fullmatch(location.text_in(f"{_FOLDER}/{_HINT}", _HINT_BYTES) if _HINT in names else "")
    if hint is None:
        # Iceberg takes its first line, or lists the folder: Spark might read another file than is checked here.
        raise InvalidArgument(
            f"the file {_HINT} of the table at {location.text!r} holds no version: write the number of the current "
            "metadata file into it, or remove it"
        )
    version = int(hint[1]) if hint[1] else max(numbered)
    if version not in numbered:
        raise InvalidArgument(
            f"the metadata of the table at {location.text!r} is incomplete: the version that {_HINT} names is missing"
        )
    while version + 1 in numbered:
        version += 1
    source = f"{location.text.rstrip('/')}/{_FOLDER}/{numbered[version]}"
    check_metadata(source)
    return source


def read_metadata(source: str) -> tuple[Any, ManifestIO]:
    """The metadata, and what its manifests are read by. Raises as
    :func:`~distop.tables.iceberg.metadata_file.read_file`.
    """
    file = read_file(source)
    return file.content, file.manifests()


def _data_files(
    source: str, metadata: Any, snapshot: Any, io: ManifestIO, check: Callable[[], None], read_from: list[_Identity]
) -> Iterator[tuple[str, str, tuple[str, int, int]]]:
    """Each live data file: what stands before its partition's name, that name ("": its spec has no partitions), and the
    file. Its time is 0: Iceberg never changes a file, and a path is the file's identity. ``read_from`` gets the
    manifests and their list, as they were before. Raises TableUnavailable, and InvalidArgument where one of these
    files, or a delete file, may not belong to the table (confinement).
    """
    from pyiceberg.manifest import FileFormat, ManifestContent

    def read(by: Callable[[], Any]) -> Any:
        try:
            return by()
        except DistopError:
            raise
        except Exception as error:  # of a damaged file the reader says anything, SystemError among it
            raise _unread(metadata, snapshot, error) from error

    namings: dict[int, _Naming] = {}
    specs = metadata.specs()
    files = files_of(source, metadata)
    read_from.append(identity(snapshot.manifest_list))
    for manifest in read(partial(manifests_of, snapshot, io)):
        check()
        files.check((manifest.manifest_path,))
        read_from.append(identity(manifest.manifest_path))
        # Spark opens the delete files.
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
    """What a table's manifests may name. Raises InvalidArgument where its metadata already name what they may not."""
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
    return TableUnavailable(f"the snapshot {snapshot.snapshot_id} of {metadata.location!r} cannot be read: {error}")


class _Naming:
    """How the partitions of one spec are called: ``day=2013-01-31/bucket=3``. Those of every spec but the first begin
    with ``spec-N/``: the same text may mean something else in each, and a name is a partition's identity for good.
    """

    def __init__(self, spec: Any, metadata: Any) -> None:
        from pyiceberg.transforms import VoidTransform

        self.prefix = f"spec-{spec.spec_id}/" if spec.spec_id else ""
        # A field that was removed in the first form of specs is void: it says nothing.
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
            # The text that stands for NULL is not to be taken for it.
            parts.append(f"{name}=%5F{text[1:]}" if text == HIVE_NULL else f"{name}={text}")
        return "/".join(parts)


def _result_type(field: Any, metadata: Any) -> Any:
    """The type of a partition field's values, by whichever schema still has its column; None where none has."""
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
