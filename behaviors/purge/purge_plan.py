"""Plans ``purge``: writes all files that the table reaches into the plan, which is durable before anything is removed.

Files are in jobs by their kind. The jobs of data, deletes and indexes delete theirs; the completion deletes those of
the others, in the order of the plan: so the roots, through which readers find all others, go last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from distop.behavior import PartitionPlan, Planned
from distop.errors import InvalidArgument, TableUnavailable, UnsafePath
from distop.protocol.texts import shown
from distop.storage.confinement import resolved
from distop.storage.deletion_scope import OWN
from distop.storage.files import local_path
from distop.tables import reachability_of
from distop.tables.reachability import (
    CHECKPOINT,
    DATA,
    DELETES,
    INDEX,
    LOG,
    MANIFEST,
    MANIFEST_LIST,
    METADATA,
    STATISTICS,
)
from distop.tables.reading.table_folders import shown_by
from distop_behaviors.orphans.needed_files import NeededFiles
from distop_behaviors.orphans.orphan_argument import FileCount
from distop_behaviors.orphans.other_tables import folders_of_others, normal_places
from distop_behaviors.orphans.table_folder import TablePlace
from distop_behaviors.purge.file_digest import digest_of
from distop_behaviors.purge.purge_argument import PurgeManifest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from distop.behavior import JobContext, TableRecord
    from distop.storage.object_store import StoredObject
    from distop.tables.reachability import Reachability, TableFile
    from distop_behaviors.purge.purge_argument import PurgeArgument

T = TypeVar("T")

LEAVES = (DATA, DELETES, INDEX)
"""The kinds of files that jobs delete."""
ORDER = (*LEAVES, STATISTICS, MANIFEST, MANIFEST_LIST, CHECKPOINT, LOG, METADATA)
"""The order of the kinds in the plan. The table's current metadata file, or its last commit, is the last file."""
FILES_PER_JOB = 10_000
MANIFEST_JOB = "@manifest"
"""The name of the first job, which deletes nothing, and of the value in its plan with the :class:`PurgeManifest`."""
TIME = "time"
"""The value with the store's time before the listing."""
INDEXES = f"{OWN}/index/"


def plan(argument: PurgeArgument, table: TableRecord, ctx: JobContext) -> Planned:
    """The jobs. Raises InvalidArgument if files must not be deleted, and the errors of planning."""
    if not table.folder:
        raise InvalidArgument(
            f"the table {shown(table.name)} is in a catalog, from which distop drops no tables: drop it there, or "
            "register its folder as a table of its own"
        )
    if local_path(table.folder) is None:
        raise InvalidArgument(
            f"the table {shown(table.name)} is in an object store, where purge is not finished: it works on disks"
        )
    found = reachability_of(table, ctx.check_cancelled, lambda: ctx.spark)
    if found.protected:
        raise InvalidArgument(f"nothing of the table {shown(table.name)} is deleted: {found.protected}")
    try:
        place = TablePlace(found.place, ctx, folders_of_others(table, ctx, with_same=True))
        started = place.store.time(OWN)
        listed = {one.key: one for one in place.store.list()}
        files = _reached(argument, found, place, listed, ctx)
    except UnsafePath as error:
        raise InvalidArgument(str(error)) from error
    manifest = PurgeManifest(place=place.place)
    by_kind: dict[str, list[StoredObject]] = {kind: [] for kind in ORDER}
    for key, kind in files.items():
        if key not in listed:
            manifest.missing += 1
            continue
        by_kind[kind].append(listed[key])
        manifest.planned.setdefault(kind, FileCount()).add(listed[key].size)
    manifest.digest = digest_of((one.key, one.size) for some in by_kind.values() for one in some)
    for key, one in listed.items():
        if key not in files:
            manifest.left.add(one.size)
    first = PartitionPlan(0, MANIFEST_JOB, values={MANIFEST_JOB: manifest.model_dump_json(), TIME: repr(started)})
    jobs = [first]
    for kind, some in by_kind.items():
        for at in range(0, 0 if argument.dry_run else len(some), FILES_PER_JOB):
            page = some[at : at + FILES_PER_JOB]
            entries = tuple((place.path_of(one.key), one.size, one.stamp) for one in page)
            jobs.append(PartitionPlan(len(jobs), f"{kind}-{len(jobs):06d}", sum(one.size for one in page), entries))
    return Planned(jobs, found.state, removes_table=not argument.dry_run)


def kind_of(partition: PartitionPlan) -> str:
    """The kind of the files of a job."""
    return partition.name.rpartition("-")[0]


def _reached(
    argument: PurgeArgument, found: Reachability, place: TablePlace, listed: dict[str, StoredObject], ctx: JobContext
) -> dict[str, str]:
    """The keys of all files to delete with their kinds, in the order of deletion. Raises InvalidArgument and others."""
    names = NeededFiles(normal_places(place.place), resolved, keep_unknown=True)
    files: dict[str, str] = {}

    def add(some: Iterable[TableFile]) -> None:
        for one in some:
            key = names.key_of(one.path)
            if not key:
                raise InvalidArgument(
                    f"the table has the file {shown(one.path)}, which is outside of its folder {place.place}: only "
                    "tables whose files are all in their own folder are purged"
                )
            place.scope.check(key)
            files.setdefault(key, one.kind)

    def existing(some: Iterator[T]) -> Iterator[T]:
        try:
            yield from some
        except TableUnavailable as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            if argument.incomplete == "error":
                raise InvalidArgument(
                    f"the metadata of the table are incomplete: {error}. After an interrupted purge use "
                    "'incomplete': 'accept'"
                ) from error

    for unit in existing(found.units()):
        ctx.check_cancelled()
        add(existing(found.files(unit, removed=True)))
    add(found.named())
    roots = list(found.roots())
    add(found.history())
    add(roots)
    own_folders = _folders_around(names.key_of(one.path) for one in roots)
    kept = [f"{names.key_of(folder)}/" for folder in found.kept_folders]
    unknown = _check_others(listed, files, own_folders, ctx)
    if next(found.other_states([place.path_of(key) for key in unknown]), None) is not None:
        raise InvalidArgument(
            "the folder has a metadata file that the table does not know and that is not older than its history: "
            "another catalog may go on with the table. If not, remove it with remove-orphans"
        )
    for key in listed:
        if any(key.startswith(folder) for folder in kept):
            files.setdefault(key, LOG)
        elif key.startswith(INDEXES):
            files[key] = INDEX
    for key in [key for key in files if _checksum(key) in listed]:
        files.setdefault(_checksum(key), files[key])
    return files


def _check_others(
    listed: dict[str, StoredObject], files: dict[str, str], own_folders: set[str], ctx: JobContext
) -> list[str]:
    """The keys of metadata files that the table does not know. Raises InvalidArgument if another table is inside."""
    unknown = []
    for n, key in enumerate(listed):
        if n % 1000 == 0:
            ctx.check_cancelled()
        if key.partition("/")[0] == OWN:
            continue
        other = shown_by(key)
        if other is not None and other[2] not in own_folders:
            raise InvalidArgument(
                f"{other[0]} in {shown(other[1] or '.')} is inside the table's folder, so nothing is deleted there"
            )
        if other is not None and key not in files:
            unknown.append(key)
    return unknown


def _folders_around(keys: Iterable[str]) -> set[str]:
    """The folders of these keys, and those around them."""
    found = {key.rpartition("/")[0] for key in keys if key}
    return found | {"/".join(one.split("/")[:n]) for one in found for n in range(1, one.count("/") + 1)}


def _checksum(key: str) -> str:
    """The key to which Hadoop's local file system writes the checksum of a file."""
    folder, slash, name = key.rpartition("/")
    return f"{folder}{slash}.{name}.crc"
