"""The argument, result and report of ``expire-partitions`` (a contract)."""

from __future__ import annotations

import re
from zoneinfo import ZoneInfo

from pydantic import BaseModel, ConfigDict, Field, field_validator

from distop.behavior import WorkDone
from distop.schemas.durations import Duration
from distop_behaviors.orphans.orphan_argument import FailedFiles, FileCount

_YEAR = re.compile(r"%[YyGxcs]")
"""The parts of a format that name a year."""


class ExpirePartitionsArgument(BaseModel):
    """Which partitions to remove."""

    model_config = ConfigDict(extra="forbid")

    column: str = Field(min_length=1, description="The partition column, or the partition field, with the time.")
    older_than: Duration = Field(description="Remove partitions whose period ended longer ago: 90d, 36h, or seconds.")
    zone: str = Field("UTC", description="The time zone of values that have none, such as Europe/Berlin.")
    format: str | None = Field(
        None, description="The form of texts and numbers, such as %Y%m%d (strptime). Default: ISO, such as 2013-01-31."
    )
    hold: list[str] = Field(
        default_factory=list, max_length=10_000, description="Values, or names of partitions, to keep."
    )
    max_fraction: float = Field(
        0.5, gt=0, le=1, description="Refuse if more than this part of the partitions, or of their bytes, would go."
    )
    dry_run: bool = Field(False, description="Only report what would be removed.")

    @field_validator("format")
    @classmethod
    def _has_a_year(cls, pattern: str | None) -> str | None:
        if pattern is not None and not _YEAR.search(pattern.replace("%%", "")):
            raise ValueError(f"format must have a year, such as %Y: with {pattern!r}, every partition would be old")
        return pattern

    @field_validator("zone")
    @classmethod
    def _known_zone(cls, zone: str) -> str:
        try:
            ZoneInfo(zone)
        except (OSError, ValueError, KeyError):
            raise ValueError(f"zone must be a time zone such as UTC or Europe/Berlin, not {zone!r}") from None
        return zone


class ExpirePartitionsResult(FailedFiles):
    """The result of a job, which deletes the files of a partition of a folder; other formats have one commit.

    ``deleted``: planned files that are gone, also those that an earlier attempt has deleted; ``changed``: files that
    were replaced since they were listed, and stay.
    """

    deleted: FileCount = FileCount()
    changed: int = 0
    work: WorkDone = WorkDone()


class ExpirePartitionsReport(FailedFiles):
    """What was removed; with ``dry_run``, what would be.

    ``cutoff``: partitions whose period ended before it are removed. ``partitions``: the number before; ``removed``:
    partitions of which this operation removed files, the first in ``sample``; ``held``: old partitions that are held;
    ``unmatched_hold``: entries of ``hold`` that name no partition, the first of them; ``unknown``: partitions whose
    value names no time, which stay; ``unpartitioned``: files without such a partition, which stay. ``files``: removed
    from the table by this operation; they are deleted only if ``deletes``, in a folder of files. ``left``: planned
    files that others had removed before; ``changed``: files that were replaced meanwhile, and stay. ``version``: of the
    table. ``seconds``: of the completion. ``work``: what was done, and stays.
    """

    dry_run: bool = False
    cutoff: str = ""
    partitions: int = 0
    removed: int = 0
    sample: list[str] = Field(default_factory=list)
    held: int = 0
    unknown: int = 0
    unmatched_hold: list[str] = Field(default_factory=list)
    unpartitioned: int = 0
    files: FileCount = FileCount()
    left: int = 0
    version: str = ""
    deletes: bool = False
    changed: int = 0
    seconds: float = 0.0
    work: WorkDone = WorkDone()
