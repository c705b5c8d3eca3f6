"""Plans ``purge``: writes all files that the table reaches into the plan, which is durable before anything is removed.

Files are in jobs by their kind. The jobs of data, deletes and indexes delete theirs; the completion deletes those of
the others, in the order of the plan: so the roots, through which readers find all others, go last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from distop.behavior import PartitionPlan, Planned
from distop.errors import InvalidArgument, TableUnavailable, UnsafePath
from distop.protocol.texts import plural, shown
from distop.storage.confinement import resolved
from distop.storage.deletion_scope import OWN
from distop.storage.normal_uris import normal
from distop.tables import catalog_entry_of, reachability_of, recorded_place_of
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
from distop_behaviors.purge.file_digest import digest_of, fingerprint
from distop_behaviors.purge.purge_argument import PurgeManifest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from distop.behavior import JobContext, TableRecord
    from distop.storage.object_store import StoredObject
    from distop.tables.catalog_entry import CatalogEntryState
    from distop.tables.reachability import Reachability, TableFile, Unit
    from distop_behaviors.purge.purge_argument import PurgeArgument

    _Run = tuple[str, list[StoredObject]]
    """Files of one kind, in the order of their deletion."""

T = TypeVar("T")

LEAVES = (DATA, DELETES, INDEX)
"""The kinds of files that jobs delete."""
ORDER = (*LEAVES, STATISTICS, MANIFEST, MANIFEST_LIST, CHECKPOINT, LOG, METADATA)
"""The order of the kinds in the plan. After them come the roots, in the order of the format."""
FILES_PER_JOB = 2_000
MANIFEST_JOB = "@manifest"
"""The name of the first job, which deletes nothing, and of the value in its plan with the :class:`PurgeManifest`."""
TIME = "time"
"""The value with the store's time before the listing."""
ENTRY = "entry"
"""The value with the planned state of the table's entry in its catalog."""
LATE_FINGERPRINTS = "young"
"""The value with the fingerprints (``file_digest``) of listed files that stay, and are not older than :data:`TIME`."""
MOST_LATE = 1_000
INDEXES = f"{OWN}/index/"


def plan(argument: PurgeArgument, table: TableRecord, ctx: JobContext) -> Planned:
    """The jobs. Raises InvalidArgument if files must not be deleted, and the errors of planning."""
    found, in_catalog = _pinned(argument, table, ctx)
    try:
        place = TablePlace(recorded_place_of(table), ctx, folders_of_others(table, ctx, with_same=True))
        if normal(found.place) not in normal_places(place.place):
            raise InvalidArgument(
                f"the table {shown(table.name)} is at {shown(found.place)}, but its record has {shown(place.place)}"
            )
        started = place.store.time(OWN)
        listed = {one.key: one for one in place.store.list()}
        reached = _Reached(found, place, listed, ctx)
    except UnsafePath as error:
        raise InvalidArgument(str(error)) from error
    left = [one for one in listed.values() if one.key not in reached.files]
    reached.check_complete(argument, [one for one in left if one.key.partition("/")[0] != OWN])
    late = _late_fingerprints(left, started)
    runs = reached.in_order()
    manifest = _manifest(place.place, found.state, runs, left, reached.missing)
    common = {TIME: repr(started), **({ENTRY: [in_catalog.identity, in_catalog.state]} if in_catalog else {})}
    first = {MANIFEST_JOB: manifest.model_dump_json(), LATE_FINGERPRINTS: late}
    jobs = [PartitionPlan(0, MANIFEST_JOB, values={**first, **common})]
    if not argument.dry_run:
        jobs += _deletion_jobs(place, runs, common)
    return Planned(jobs, found.state, removes_table=not argument.dry_run)


def _pinned(
    argument: PurgeArgument, table: TableRecord, ctx: JobContext
) -> tuple[Reachability, CatalogEntryState | None]:
    """The files that the table reaches, and the table's entry in its catalog in the same state.

    Raises InvalidArgument if files must not be deleted, and the errors of planning.
    """
    entry = catalog_entry_of(table, ctx.check_cancelled)
    found = reachability_of(table, ctx.check_cancelled, lambda: ctx.spark)
    _check_catalog(argument, table, found.place, in_catalog=entry is not None)
    in_catalog = entry.find() if entry is not None else None
    if entry is not None and (in_catalog is None or in_catalog.state != found.state):
        raise TableUnavailable(f"the table {shown(table.name)} was changed in its catalog during the planning")
    if found.protected:
        raise InvalidArgument(f"nothing of the table {shown(table.name)} is deleted: {found.protected}")
    return found, in_catalog


def _late_fingerprints(left: Sequence[StoredObject], started: float) -> list[int]:
    """The fingerprints of files that stay, and that are not older than the listing.

    Raises InvalidArgument if there are too many.
    """
    late = [fingerprint(one) for one in left if one.modified >= started]
    if len(late) > MOST_LATE:
        raise InvalidArgument(
            f"{plural(len(late), 'file')} that the table does not reach were written into its folder during the "
            "planning, so nothing is deleted: stop its writers"
        )
    return late


def _manifest(
    place: str, state: str, runs: Sequence[_Run], left: Sequence[StoredObject], missing: int
) -> PurgeManifest:
    """What planning has found."""
    manifest = PurgeManifest(place=place, state=state, missing=missing)
    for one in left:
        manifest.left.add(one.size)
    for kind, some in runs:
        for one in some:
            manifest.planned.setdefault(kind, FileCount()).add(one.size)
    manifest.digest = digest_of((one.key, one.size) for _, some in runs for one in some)
    return manifest


def _deletion_jobs(place: TablePlace, runs: Sequence[_Run], values: Mapping[str, Any]) -> list[PartitionPlan]:
    """The jobs after the first one, in the order of deletion. ``values``: of each."""
    jobs: list[PartitionPlan] = []
    for kind, some in runs:
        for at in range(0, len(some), FILES_PER_JOB):
            page = some[at : at + FILES_PER_JOB]
            entries = tuple((place.path_of(one.key), one.size, one.stamp) for one in page)
            size, number = sum(one.size for one in page), len(jobs) + 1
            jobs.append(PartitionPlan(number, f"{kind}-{number:06d}", size, entries, values=values))
    return jobs


def kind_of(partition: PartitionPlan) -> str:
    """The kind of the files of a job."""
    return partition.name.rpartition("-")[0]


def _check_catalog(argument: PurgeArgument, table: TableRecord, place: str, *, in_catalog: bool) -> None:
    """Raises InvalidArgument if the table's entry in its catalog is not to be removed, or could not be."""
    if not in_catalog:
        if argument.catalog is not None:
            raise InvalidArgument(
                f"the table {shown(table.name)} is registered by its folder, so there is no entry of a catalog to "
                "drop: omit 'catalog'"
            )
        return
    if argument.catalog is None:
        raise InvalidArgument(
            f"the table {shown(table.name)} is in a catalog, where its entry would lead to nothing: use "
            "'catalog': 'drop' to remove the entry, too"
        )
    if not recorded_place_of(table):
        raise InvalidArgument(
            f"only its catalog knows the folder of the table {shown(table.name)}, and the purge goes on after it is "
            f"dropped there: register the table again with the option folder={place}"
        )


class _Reached:
    """The listed files that the table reaches, by key, with their kinds.

    Raises InvalidArgument if one may not be deleted, or if another table is in the folder, and the errors of planning.
    """

    def __init__(
        self, found: Reachability, place: TablePlace, listed: dict[str, StoredObject], ctx: JobContext
    ) -> None:
        self.files: dict[str, str] = {}
        self.missing = 0
        self._listed = listed
        self._place = place
        self._ctx = ctx
        self._names = NeededFiles(normal_places(place.place), resolved, keep_unknown=True)
        self._absent: set[str] = set()
        self._incomplete: TableUnavailable | None = None
        for unit in self._units(found):
            ctx.check_cancelled()
            self._add(self._existing(found.files(unit, removed=True)))
        self._add(found.named())
        roots = list(found.roots())
        self._add(found.history())
        self._add(roots)
        self._roots = list(dict.fromkeys(self._names.key_of(one.path) for one in roots))
        self._check_others(found)
        kept = [f"{self._names.key_of(folder)}/" for folder in found.kept_folders]
        for key in listed:
            if any(key.startswith(folder) for folder in kept):
                place.scope.check(key)
                self.files.setdefault(key, LOG)
            elif key.startswith(INDEXES):
                place.scope.check(key.removeprefix(f"{OWN}/"))
                self.files[key] = INDEX
        for key in [key for key in self.files if _checksum(key) in listed]:
            self.files.setdefault(_checksum(key), self.files[key])

    def in_order(self) -> list[_Run]:
        """The files in the order of deletion, in runs of one kind. The last root is alone."""
        by_kind: dict[str, list[StoredObject]] = {kind: [] for kind in ORDER}
        roots = [key for key in self._roots if key in self.files]
        last = set(roots)
        for key, kind in self.files.items():
            if key not in last:
                by_kind[kind].append(self._listed[key])
        # Neighbours are together: a store then lists them, instead of looking at each.
        runs = [(kind, sorted(some, key=lambda one: one.key)) for kind, some in by_kind.items() if some]
        for n, key in enumerate(roots):
            kind = self.files[key]
            if n < len(roots) - 1 and runs and runs[-1][0] == kind:
                runs[-1][1].append(self._listed[key])
            else:
                runs.append((kind, [self._listed[key]]))
        return runs

    def check_complete(self, argument: PurgeArgument, left: list[StoredObject]) -> None:
        """Raises InvalidArgument if a missing part of the metadata may have named files that would stay.

        After a purge that has begun to delete metadata, there are no such files: leaves go first.
        """
        if self._incomplete is None or not left or argument.incomplete == "accept":
            return
        raise InvalidArgument(
            f"the metadata of the table are incomplete: {self._incomplete}. The missing part may name files in the "
            f"folder that would stay, as one of {len(left)}: {shown(self._place.path_of(left[0].key))}. Repair the "
            "metadata, or use 'incomplete': 'accept' to leave these files"
        )

    def _units(self, found: Reachability) -> Iterator[Unit]:
        seen: set[str] = set()
        for unit in self._existing(found.units()):
            seen.add(unit.name)
            yield unit
        # A missing file has ended the list of units, but not those of other versions.
        for version in found.versions() if self._incomplete is not None else ():
            for unit in self._existing(found.units({version.id})):
                if unit.name not in seen:
                    seen.add(unit.name)
                    yield unit

    def _add(self, some: Iterable[TableFile]) -> None:
        for one in some:
            key = self._names.key_of(one.path)
            if not key:
                raise InvalidArgument(
                    f"the table has the file {shown(one.path)}, which is outside of its folder {self._place.place}: "
                    "only tables whose files are all in their own folder are purged"
                )
            self._place.scope.check(key)
            if key in self._listed:
                self.files.setdefault(key, one.kind)
            elif not one.optional and key not in self._absent:
                self._absent.add(key)
                self.missing += 1

    def _existing(self, some: Iterator[T]) -> Iterator[T]:
        try:
            yield from some
        except TableUnavailable as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            self._incomplete = self._incomplete or error

    def _check_others(self, found: Reachability) -> None:
        """Raises InvalidArgument if another table is inside the folder, or another catalog may go on with this one."""
        own_folders = _folders_around(self._roots)
        unknown = []
        for n, key in enumerate(self._listed):
            if n % 1000 == 0:
                self._ctx.check_cancelled()
            if key.partition("/")[0] == OWN:
                continue
            other = shown_by(key)
            if other is not None and other[2] not in own_folders:
                raise InvalidArgument(
                    f"{other[0]} in {shown(other[1] or '.')} is inside the table's folder, so nothing is deleted there"
                )
            if other is not None and key not in self.files:
                unknown.append(self._place.path_of(key))
        if next(found.other_states(unknown), None) is not None:
            raise InvalidArgument(
                "the folder has a metadata file that the table does not know and that is not older than its history: "
                "another catalog may go on with the table. If not, remove it with remove-orphans"
            )


def _folders_around(keys: Iterable[str]) -> set[str]:
    """The folders of these keys, and those around them."""
    found = {key.rpartition("/")[0] for key in keys if key}
    return found | {"/".join(one.split("/")[:n]) for one in found for n in range(1, one.count("/") + 1)}


def _checksum(key: str) -> str:
    """The key to which Hadoop's local file system writes the checksum of a file."""
    folder, slash, name = key.rpartition("/")
    return f"{folder}{slash}.{name}.crc"
