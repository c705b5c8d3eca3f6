"""The argument, result and report of ``expire-snapshots`` (a contract)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from distop.behavior import WorkDone
from distop.schemas.durations import Duration
from distop_behaviors.orphans.orphan_argument import FailedFiles, FileCount

SHORTEST_AGE = 3600.0
SHOWN = 20
"""Maximum number of versions and files that a report lists."""


class ExpireSnapshotsArgument(BaseModel):
    """Which versions to remove."""

    model_config = ConfigDict(extra="forbid")

    older_than: Duration | None = Field(
        None,
        description="Remove versions that are older: 5d, 36h, or seconds. Default: the limit of the table.",
    )
    allow_recent: bool = Field(
        False, description="Accept `older_than` or a limit of the table below 1h: running readers may lose their files."
    )
    retain_last: int | None = Field(
        None, ge=1, description="Keep so many newest snapshots of each branch. Default: the table's own number, else 1."
    )
    refs: Literal["remove_old", "keep"] = Field(
        "remove_old",
        description="remove_old: also remove branches and tags that are older than their own limit. keep: "
        "keep all of them.",
    )
    dry_run: bool = Field(False, description="Only report what would be removed.")
    max_per_second: float | None = Field(None, gt=0, description="The highest rate of deletions, in files per second.")

    @model_validator(mode="after")
    def _not_too_young(self) -> ExpireSnapshotsArgument:
        if self.older_than is not None and self.older_than < SHORTEST_AGE and not self.allow_recent:
            raise ValueError(
                "older_than must be at least 1h, because running readers use recent versions: set allow_recent if "
                "nothing reads the table"
            )
        return self


class ListedFiles(BaseModel):
    """The list of files in a job's stage: its bytes, and their digest."""

    bytes: int = Field(ge=0)
    digest: str = Field(pattern=r"^[0-9a-f]{32}$")


class ExpireSnapshotsResult(BaseModel):
    """The result of one job. ``expired`` and ``kept``: lists in the stage; ``files``: the number in the first one."""

    model_config = ConfigDict(extra="forbid")

    units: int = 0
    files: int = 0
    expired: ListedFiles | None = None
    kept: ListedFiles | None = None


class DeletionCounts(FailedFiles):
    """What became of files that were to be deleted.

    ``deleted``: by the kind of file. ``missing``: files that were gone; ``recent``: files that are younger than the
    removed versions, by the store's clock, and stay; ``changed``: files that were replaced at that moment, and stay;
    ``elsewhere``: files outside of the table's folder, which stay; ``reached``: files that the table needs again.
    """

    deleted: dict[str, FileCount] = Field(default_factory=dict)
    missing: int = 0
    recent: int = 0
    changed: int = 0
    elsewhere: int = 0
    reached: int = 0

    def count(self, kind: str, size: int) -> None:
        """Count one more deleted file."""
        self.deleted.setdefault(kind, FileCount()).add(size)


class ExpireSnapshotsReport(DeletionCounts):
    """What was removed; with ``dry_run``, what would be.

    ``versions_before`` and ``versions_after``: the number of versions. ``removed``: the number of removed versions, the
    first in ``sample``; ``reused``: chosen versions that a branch or tag needs again, which stay; ``refs``: removed
    branches and tags. A table may count versions but remove none, if only its files expire.
    ``seconds``: of the completion: of the commit and the deletions. ``work``: what was done, and stays.
    """

    dry_run: bool = False
    place: str = ""
    versions_before: int = 0
    versions_after: int = 0
    removed: int = 0
    sample: list[str] = Field(default_factory=list)
    reused: int = 0
    refs: list[str] = Field(default_factory=list)
    seconds: float = 0.0
    work: WorkDone = WorkDone()
