"""The argument, result and report of ``purge`` (a contract)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from distop.behavior import WorkDone
from distop.schemas.durations import Duration
from distop_behaviors.orphans.orphan_argument import FailedFiles, FileCount

LONGEST_GRACE = 86_400.0


class PurgeArgument(BaseModel):
    """How a table is purged."""

    model_config = ConfigDict(extra="forbid")

    grace: Annotated[Duration, Field(le=LONGEST_GRACE)] = Field(
        0.0, description="Delete the first file only so long after the listing in the planning: at most 1d."
    )
    catalog: Literal["drop"] | None = Field(
        None, description="drop: also remove the table's entry from its catalog. Required for a table of a catalog."
    )
    incomplete: Literal["error", "accept"] = Field(
        "error",
        description="What to do if files of the metadata are missing, and others in the folder may belong to them. "
        "accept: delete what the other metadata reach, and leave those files.",
    )
    dry_run: bool = Field(False, description="Only report what would be deleted.")
    max_per_second: float | None = Field(None, gt=0, description="The highest rate, in files per second of each job.")


class PurgeResult(FailedFiles):
    """The result of one job.

    ``deleted``: planned files that are gone, also those that an earlier attempt has deleted. ``digest``: of these
    (:mod:`distop_behaviors.purge.file_digest`). ``changed``: files that were replaced since they were listed, and stay.
    """

    deleted: FileCount = FileCount()
    digest: str = ""
    changed: int = 0
    work: WorkDone = WorkDone()


class PurgeManifest(BaseModel):
    """What planning has found.

    ``state``: the metadata file, or the commit, that was current. ``planned``: the files to delete, by their kind;
    ``digest``: of these; ``missing``: the number of files that the metadata name and the folder does not have;
    ``left``: files in the folder that the table does not reach.
    """

    place: str = ""
    state: str = ""
    planned: dict[str, FileCount] = Field(default_factory=dict)
    digest: str = ""
    missing: int = 0
    left: FileCount = FileCount()


class PurgeReport(PurgeManifest, FailedFiles):
    """The receipt.

    ``catalog``: whether the table's entry in its catalog is ``dropped`` or ``kept``; "" without one. ``deleted``: files
    that are gone, by their kind; ``deleted_digest``: of these, equal to ``digest`` if all planned files are gone.
    ``certificates``: deleted lists of certified files. ``added``: files that were written into the folder since
    planning, and stay. ``complete``: nothing of the table is left. ``work``: what was done, and stays.
    """

    dry_run: bool = False
    complete: bool = False
    catalog: Literal["", "dropped", "kept"] = ""
    deleted: dict[str, FileCount] = Field(default_factory=dict)
    deleted_digest: str = ""
    certificates: int = 0
    changed: int = 0
    added: int = 0
    seconds: float = 0.0
    work: WorkDone = WorkDone()
