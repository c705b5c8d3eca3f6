"""The argument, the results and the report of ``compact`` (a contract)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from distop.behavior import WorkDone
from distop_behaviors.transferred_bytes import TransferredBytes

MIB = 1 << 20
TARGET = 512 * MIB
SHOWN = 20
"""Maximum number of groups in a report that are listed with reasons."""


class CompactArgument(BaseModel):
    """Which files are rewritten, and how the new ones look."""

    model_config = ConfigDict(extra="forbid")

    target_bytes: Annotated[int, Field(ge=1, le=1 << 40, description="The size of a new file to aim at.")] = TARGET
    min_ratio: Annotated[
        float, Field(ge=0, lt=1, description="Files below this share of the target are rewritten.")
    ] = 0.75
    max_ratio: Annotated[
        float, Field(gt=1, le=100, description="Files above this multiple of the target are rewritten.")
    ] = 1.8
    min_input_files: Annotated[
        int, Field(ge=1, le=1_000_000, description="A group of fewer files is rewritten only for another reason.")
    ] = 5
    deletes_at_least: Annotated[
        int | None,
        Field(ge=1, description="Files with this many delete files or deletion vectors are rewritten. null: none."),
    ] = None
    sort_by: Annotated[
        list[str], Field(max_length=32, description="Columns by which the rows of each group are sorted, ascending.")
    ] = []
    codec: Annotated[
        Literal["snappy", "zstd", "gzip", "lz4", "none"] | None,
        Field(
            description="The compression of new files. null: the codec that the table names, else the codec of the "
            "first file of the group."
        ),
    ] = None
    commit_every: Annotated[
        int | None,
        Field(
            ge=1, le=10_000, description="Groups in one commit, while others still run. null: one commit at the end."
        ),
    ] = 10
    max_group_bytes: Annotated[
        int | None, Field(ge=1, description="The size of a group, which is one job. null: eight times the target.")
    ] = None
    where: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=2_000,
            description="A condition on partition columns, such as day >= '2026-01-01': only partitions for which it "
            "holds are compacted.",
        ),
    ] = None
    swap: Annotated[
        Literal["hive"] | None,
        Field(
            description="hive: replace files of a Parquet folder in several steps. Meanwhile readers find rows twice."
        ),
    ] = None
    dry_run: Annotated[bool, Field(description="Report what would be rewritten, and change nothing.")] = False

    @model_validator(mode="after")
    def _group_holds_a_file(self) -> CompactArgument:
        if self.max_group_bytes is not None and self.max_group_bytes < self.target_bytes:
            raise ValueError("max_group_bytes must be at least target_bytes: a group is written into whole files")
        return self

    @property
    def group_bytes(self) -> int:
        """The maximum bytes of a group."""
        return self.max_group_bytes or 8 * self.target_bytes


class Sizes(BaseModel):
    """How many files have which size, as shares of the target."""

    model_config = ConfigDict(extra="forbid")

    below_10_percent: int = 0
    below_75_percent: int = 0
    around_target: int = 0
    above_180_percent: int = 0


class Amount(BaseModel):
    """An amount of data files. ``rows``: None if it is unknown."""

    model_config = ConfigDict(extra="forbid")

    files: int = 0
    bytes: int = 0
    rows: int | None = None
    sizes: Sizes = Field(default_factory=Sizes)


class GroupResult(TransferredBytes):
    """The result of a job. ``version``: of the commit with the new files, "" if they are not committed yet.

    ``deleted_rows``: rows that deletes had removed, and that the new files no longer have. ``record``: the digest of
    the durable record of the new files. ``work``: the rewritten files, and those of the commits of this job.

    No commit compares ``record``, because an outcome cannot fix what is committed: a group is committed before its job
    ends, and of two attempts either may be. The decision of a stage does (``StagedFiles``): it is created once, after
    the record, which is then never written again. The commit has digests of the files, and looks for each before.
    """

    state: Literal["staged", "committed", "conflicted", "planned", "nothing"]
    reason: str = ""
    version: str = ""
    before: Amount = Field(default_factory=Amount)
    after: Amount = Field(default_factory=Amount)
    deleted_rows: int = 0
    record: str = ""
    reused: bool = False
    seconds: float = 0.0
    groups: int = 0
    work: WorkDone = WorkDone()


class LeftOut(BaseModel):
    """A group that is not committed, with the reason."""

    group: str
    reason: str


class Groups(BaseModel):
    """The number of groups by their ends. ``unfinished``: not committed when the operation was cancelled."""

    planned: int = 0
    committed: int = 0
    conflicted: int = 0
    failed: int = 0
    unfinished: int = 0
    redone: int = 0


class CompactReport(TransferredBytes):
    """The report. ``before`` and ``after``: the files of the committed groups; of a dry run, those of all groups.

    ``versions``: the commits, oldest first, at most 20. ``left_bytes``: staged files that are not committed and could
    not be removed safely; the table's clean-up of unreferenced files removes them.
    """

    verdict: Literal["compacted", "nothing to do", "partial", "cancelled", "failed", "planned"]
    groups: Groups
    commits: int = 0
    versions: list[str] = Field(default_factory=list)
    before: Amount = Field(default_factory=Amount)
    after: Amount = Field(default_factory=Amount)
    deleted_rows: int = 0
    left_bytes: int = 0
    left_out: list[LeftOut] = Field(default_factory=list)
    seconds: float = 0.0
    work: WorkDone = WorkDone()


def sizes_of(sizes: list[int], target: int) -> Sizes:
    """The histogram of these sizes."""
    found = Sizes()
    for size in sizes:
        if size < 0.1 * target:
            found.below_10_percent += 1
        elif size < 0.75 * target:
            found.below_75_percent += 1
        elif size <= 1.8 * target:
            found.around_target += 1
        else:
            found.above_180_percent += 1
    return found


def added(one: Amount, other: Amount) -> Amount:
    """The sum of two amounts."""
    sizes = {name: getattr(one.sizes, name) + getattr(other.sizes, name) for name in Sizes.model_fields}
    rows = one.rows + other.rows if one.rows is not None and other.rows is not None else None
    return Amount(files=one.files + other.files, bytes=one.bytes + other.bytes, rows=rows, sizes=Sizes(**sizes))
