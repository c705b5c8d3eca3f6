"""The arguments, results and reports of ``remove-orphans`` and ``restore`` (a contract)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from distop.behavior import WorkDone
from distop.schemas.durations import Duration

DEFAULT_AGE = 3 * 86400.0
SHORTEST_AGE = 3600.0
SHOWN = 20
"""Maximum number of files that a result or a report lists."""


class OrphansArgument(BaseModel):
    """What to remove of a table's folder."""

    model_config = ConfigDict(extra="forbid")

    older_than: Duration = Field(
        DEFAULT_AGE, description="Keep files that have been changed since, by the store's clock: 3d, 36h, or seconds."
    )
    allow_recent: bool = Field(False, description="Accept `older_than` below 1h: a running writer may lose its files.")
    prefix_mismatch: Literal["error", "keep"] = Field(
        "error",
        description="What to do if the metadata name files with another scheme or bucket than the table's folder. "
        "keep: keep every file with the name of such a file.",
    )
    quarantine: bool = Field(False, description="Move the files below `_distop/quarantine` instead of deleting them.")
    discard_quarantine: Duration | None = Field(
        None, description="Also delete files that were moved below `_distop/quarantine` longer ago than this."
    )
    dry_run: bool = Field(False, description="Only report what would be removed.")
    max_per_second: float | None = Field(None, gt=0, description="The highest rate, in files per second of each job.")

    @model_validator(mode="after")
    def _not_too_young(self) -> OrphansArgument:
        if self.older_than < SHORTEST_AGE and not self.allow_recent:
            raise ValueError(
                "older_than must be at least 1h, because files of a running writer are in no metadata yet: set "
                "allow_recent if nothing writes to the table"
            )
        return self


class FileCount(BaseModel):
    """A number of files, and their bytes."""

    files: int = 0
    bytes: int = 0

    def add(self, size: int) -> None:
        """Count one more file."""
        self.files += 1
        self.bytes += size

    def add_all(self, other: FileCount) -> None:
        """Count the files of another count."""
        self.files += other.files
        self.bytes += other.bytes


class FailedFile(BaseModel):
    """A file that could not be removed, moved or restored, with the reason."""

    file: str
    why: str


class FailedFiles(BaseModel):
    """The files that could not be removed, moved or restored: their number, and the first of them."""

    failed_files: int = 0
    failed: list[FailedFile] = Field(default_factory=list)

    def fail(self, file: str, why: str) -> None:
        """Count one more such file."""
        self.failed_files += 1
        if len(self.failed) < SHOWN:
            self.failed.append(FailedFile(file=file, why=why))

    def add_failed(self, other: FailedFiles) -> None:
        """Add those of another result."""
        self.failed_files += other.failed_files
        self.failed = [*self.failed, *other.failed][:SHOWN]


class OrphansResult(FailedFiles):
    """The result of one job.

    ``work``: what was done, and stays. ``discarded``: removed files of the quarantine; ``missing``: files that were
    gone; ``changed``: files that were replaced since they were listed, or changed too recently; ``reached``: files that
    the metadata name now. ``seconds``: of all attempts of the job.
    """

    removed: FileCount = FileCount()
    discarded: FileCount = FileCount()
    missing: int = 0
    changed: int = 0
    reached: int = 0
    seconds: float = 0.0
    work: WorkDone = WorkDone()


class OrphanListing(BaseModel):
    """What the listing of a table's folder has shown.

    ``quarantined``: files of the quarantine to be removed; ``kept``: the number of kept files, by the reason.
    ``elsewhere``: the number of the table's files outside of its folder. ``sample``: the first orphans.
    """

    listed: FileCount = FileCount()
    orphans: FileCount = FileCount()
    quarantined: FileCount = FileCount()
    kept: dict[str, int] = Field(default_factory=dict)
    elsewhere: int = 0
    sample: list[str] = Field(default_factory=list)


class OrphansReport(OrphansResult, OrphanListing):
    """The report of ``remove-orphans``.

    ``quarantine``: where the removed files are now, "" if they were deleted. ``seconds``: the sum of the jobs'.
    """

    place: str = ""
    dry_run: bool = False
    quarantine: str = ""


class RestoreArgument(BaseModel):
    """The quarantine to restore."""

    model_config = ConfigDict(extra="forbid")

    operation: str = Field(description="The `remove-orphans` that has moved the files: table/remove-orphans/instance.")
    dry_run: bool = Field(False, description="Only report what would be restored.")


class RestoreReport(FailedFiles):
    """The report of ``restore``.

    ``existing``: files whose place is taken by another file, so that they stay in the quarantine. ``seconds``: of the
    last attempt of the job.
    """

    restored: FileCount = FileCount()
    existing: int = 0
    missing: int = 0
    dry_run: bool = False
    seconds: float = 0.0
    work: WorkDone = WorkDone()
