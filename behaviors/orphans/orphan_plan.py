"""Plans ``remove-orphans``: lists the table's folder, and writes the orphans into the plan, which is durable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.behavior import PartitionPlan, Planned
from distop.storage.deletion_scope import OWN
from distop_behaviors.orphans.orphan_decision import decide, drop_needed
from distop_behaviors.orphans.other_tables import folders_of_others
from distop_behaviors.orphans.table_folder import TableFolder

if TYPE_CHECKING:
    from distop.behavior import JobContext, TableRecord
    from distop.storage.object_store import StoredObject
    from distop_behaviors.orphans.orphan_argument import OrphansArgument

FILES_PER_JOB = 20_000
LISTING = "listing"
"""The name of the first job, which removes nothing, and of the value in its plan with the :class:`OrphanListing`."""
PLACE = "place"
ORPHANS, QUARANTINED = "orphans", "quarantined"
"""The start of the names of the other jobs."""


def plan(argument: OrphansArgument, table: TableRecord, ctx: JobContext) -> Planned:
    """The jobs, each with some orphans.

    Raises InvalidArgument if the orphans cannot be told from needed files, and the errors of planning.
    """
    folder = TableFolder(table, ctx, folders_of_others(table, ctx))
    # The listing comes after the metadata: files that are named later are young, or seen by the second look.
    needed = folder.needed(keep_unknown=argument.prefix_mismatch == "keep")
    before = folder.store.time(OWN) - argument.older_than
    roots = [needed.key_of(one.path) for one in folder.reachability.roots()]
    own_folders = {key.rpartition("/")[0] for key in roots if key}
    own_folders |= {"/".join(one.split("/")[:n]) for one in own_folders for n in range(1, one.count("/") + 1)}
    found = decide(
        folder.store.list(),
        needed,
        folder.scope,
        before=before,
        source=needed.key_of(folder.reachability.state),
        own_folders=own_folders,
        check=ctx.check_cancelled,
    )
    for state in folder.reachability.other_states([folder.path_of(key) for key in found.unknown]):
        folder.add_existing(needed, state)
    drop_needed(found, needed)
    found.listing.elsewhere = needed.elsewhere
    old = _quarantined(argument, folder, before + argument.older_than)
    for one in old:
        found.listing.quarantined.add(one.size)
    values = {LISTING: found.listing.model_dump(mode="json"), PLACE: folder.place}
    jobs = [PartitionPlan(0, LISTING, values=values)]
    for name, files in ((ORPHANS, found.files), (QUARANTINED, old)):
        for at in range(0, 0 if argument.dry_run else len(files), FILES_PER_JOB):
            some = files[at : at + FILES_PER_JOB]
            listed = tuple((folder.path_of(one.key), one.size, one.stamp) for one in some)
            jobs.append(PartitionPlan(len(jobs), f"{name}-{len(jobs):06d}", sum(one.size for one in some), listed))
    return Planned(jobs, folder.reachability.state)


def _quarantined(argument: OrphansArgument, folder: TableFolder, now: float) -> list[StoredObject]:
    """The files of the quarantine that are to be deleted."""
    if argument.discard_quarantine is None:
        return []
    before = now - argument.discard_quarantine
    return [one for one in folder.store.list(folder.quarantine) if one.modified < before]
