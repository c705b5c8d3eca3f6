"""Plans ``export``: the files of a version, in one job for each folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.behavior import PartitionPlan, Planned, TableRecord, is_wide
from distop.errors import InvalidArgument, UnsafePath
from distop.protocol.texts import plural, shown
from distop.storage.export_targets import checked
from distop.storage.files import local_path
from distop.storage.normal_uris import NormalUri, normal
from distop.storage.object_store import LARGEST
from distop.tables import pinned_files_of, table_copy_of
from distop_behaviors.export import export_manifest
from distop_behaviors.export.export_manifest import ROOT_MANIFEST, RootManifest
from distop_behaviors.export.export_target import ExportTarget
from distop_behaviors.orphans.other_tables import folders_of_others, normal_places

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distop.behavior import JobContext
    from distop.tables.reading.file_facts import PlannedFile
    from distop_behaviors.export.export_argument import ExportArgument

TOP = "."
"""The name of the job of the table's own folder."""
INNER = "inner"
"""The value of a job's plan that says whether other folders are inside of its own."""
PLACE, SUCCESS, VERSION, SOURCE = "place", "success", "version", "source"
"""The values of a job's plan with the table's folder, the names of markers, the version, and ``TableCopy.origin``."""
_SEPARATOR = "/"


def plan(argument: ExportArgument, table: TableRecord, ctx: JobContext) -> Planned:
    """One job for each folder with files, and for each folder that only earlier exports have written.

    Raises InvalidArgument for a target that is not allowed, and for files that cannot be exported, and the errors of
    planning.
    """
    version, source = argument.version or "", ""
    pinned = None
    if argument.register_as is not None:
        copy = table_copy_of(table, ctx.check_cancelled, lambda: ctx.spark, version=version)
        if copy is not None:
            pinned, source = copy.pinned, copy.origin
    if pinned is None:
        pinned = pinned_files_of(table, ctx.check_cancelled, lambda: ctx.spark, version=version)
    here = _registered_here(argument, table, ctx)
    target = ExportTarget(argument.to, table, ctx, [pinned.place, *folders_of_others(table, ctx, but=here)])
    if pinned.needs:
        raise InvalidArgument(
            f"the table {table.name!r} is not exported, because its data files alone would be read as other rows: "
            f"{pinned.needs}; with 'register' they are exported with their metadata"
        )
    found = _folders(pinned.files, normal_places(pinned.place), target, argument)
    owner = target.read_owner()
    _check_former(argument, target)
    chosen = {folder: files for folder, files in found.items() if _is_chosen(folder, argument.prefixes)}
    for prefix in argument.prefixes or ():
        if not any(_is_chosen(folder, [prefix]) for folder in found):
            raise InvalidArgument(f"the version of the table {table.name!r} has no files in the folder {shown(prefix)}")
    gone = [one for one in (owner.folders if owner else ()) if one not in found and _is_chosen(one, argument.prefixes)]
    names = [argument.success]
    if not argument.dry_run:
        names = target.record_owner(argument.success, chosen).success
    every = {*found, *(owner.folders if owner else ())}
    jobs: list[PartitionPlan] = []
    for folder in [*sorted(chosen), *sorted(gone)]:
        files = tuple(sorted(chosen.get(folder, ())))
        inner = any(other != folder and _inside(other, folder) for other in every)
        values = {INNER: inner, PLACE: pinned.place, SUCCESS: names, VERSION: pinned.version, SOURCE: source}
        jobs.append(PartitionPlan(len(jobs), _job_name(folder), sum(f[1] for f in files), files, values=values))
    if not jobs:  # a version without files
        values = {INNER: False, PLACE: pinned.place, SUCCESS: names, VERSION: pinned.version, SOURCE: source}
        jobs.append(PartitionPlan(0, TOP, values=values))
    return Planned(jobs, pinned.version)


def _registered_here(argument: ExportArgument, table: TableRecord, ctx: JobContext) -> str:
    """The name of the table that an earlier export has registered at the target; "" for none.

    Raises InvalidArgument if the name is taken by another table.
    """
    if argument.register_as is None:
        return ""
    record = registered_record(argument, table)
    for other in ctx.registered_tables():
        if other.name == record.name:
            if other == record:
                return record.name
            raise InvalidArgument(
                f"the table {shown(record.name)} is registered as {other.format} at {other.location}: register the "
                "export under another name"
            )
    return ""


def registered_record(argument: ExportArgument, table: TableRecord) -> TableRecord:
    """The record of the table at the target."""
    assert argument.register_as is not None
    return TableRecord(argument.register_as.name, table.format, checked(argument.to))


def folder_of(job: PartitionPlan) -> str:
    """The folder of a job, relative to the table's; "" for the table's own."""
    return "" if job.name == TOP else job.name


def key_of(path: str, places: Sequence[NormalUri]) -> str:
    """The path of a file below the table's folder; "" if it is elsewhere."""
    found = normal(path)
    return next((found.below(place) for place in places if place.has(found)), "")


def _folders(
    files: Sequence[PlannedFile], places: Sequence[NormalUri], target: ExportTarget, argument: ExportArgument
) -> Mapping[str, Sequence[PlannedFile]]:
    """The files by their folders. Raises InvalidArgument for a file that cannot be exported."""
    remote = local_path(target.place.location) is None
    found: dict[str, list[PlannedFile]] = {}
    for file in files:
        path, size, _ = file
        try:
            key = key_of(path, places)
            if not key:
                raise InvalidArgument(
                    f"the file {shown(path)} is outside of the table's folder {places[0]}: such tables are not exported"
                )
            target.check_key(key, argument.success)
        except UnsafePath as error:
            raise InvalidArgument(f"the table is not exported: {error}") from error
        if remote and size > LARGEST:
            raise InvalidArgument(
                f"the file {shown(path)} has {plural(size, 'byte')}: at most {LARGEST} are exported to an object store"
            )
        found.setdefault(key.rpartition(_SEPARATOR)[0], []).append(file)
    for folder in found:
        if is_wide(folder) or folder == TOP:
            raise InvalidArgument(f"the folder {shown(folder)} has a name that cannot be exported")
    return found


def _check_former(argument: ExportArgument, target: ExportTarget) -> None:
    """Raises InvalidArgument if ``diff_from`` is not the version of the last complete export."""
    if argument.diff_from is None:
        return
    former = export_manifest.read(target.store, ROOT_MANIFEST, RootManifest)
    if former is None:
        raise InvalidArgument(
            f"{shown(argument.to)} has no complete export that 'diff_from' could continue: leave it out, and files "
            "that are there are examined and reused"
        )
    if former.version != argument.diff_from or former.partial:
        whole = "of some folders of" if former.partial else "of"
        raise InvalidArgument(
            f"the last export to {shown(argument.to)} is {whole} version {shown(former.version)}, not "
            f"{shown(argument.diff_from)}: leave 'diff_from' out, or name that version"
        )


def _is_chosen(folder: str, prefixes: Sequence[str] | None) -> bool:
    return prefixes is None or any(_inside(folder, one.strip(_SEPARATOR)) for one in prefixes)


def _inside(folder: str, other: str) -> bool:
    """Whether a folder is another one, or inside of it."""
    return not other or folder == other or folder.startswith(f"{other}/")


def _job_name(folder: str) -> str:
    return folder or TOP
