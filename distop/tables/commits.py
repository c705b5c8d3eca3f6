"""Commits of tables: how a commit can end, and the replacement of data files by files with the same rows.

A replacement survives any crash: its files are staged below the table's data, a durable record describes them, and the
commit names the operation and its groups. So an unknown outcome is settled by reading the table, never by trying again.
Files that other writers have removed or whose rows they have deleted are never replaced: the commit compares.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import field
from enum import Enum
from threading import Event
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from distop.protocol.frozen import frozen
from distop.runtime.backoff import Backoff

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from distop.protocol.plan import PartitionPlan, Planned
    from distop.protocol.records import TableRecord
    from distop.tables.reading.file_facts import PlannedFile
    from distop.tables.staged_files import StagedFiles


T = TypeVar("T")

ATTEMPTS = 40
"""Maximum number of attempts at one commit, if other writers always commit first."""
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 2.0
"""Seconds before the second attempt, and between later ones at most: about a minute for all attempts."""


class Conflict(Exception):
    """A commit failed because the table has changed since it was loaded."""


class StagedFileLost(Exception):
    """A new file of a group is missing or was changed, so nothing was committed. ``group``: its number in the plan."""

    def __init__(self, group: int, text: str) -> None:
        super().__init__(text)
        self.group = group


class CommitUnknown(Exception):
    """It is unknown whether a commit succeeded: load the table again to find out."""


@frozen
class Head:
    """The loaded state of a table.

    ``source``: its metadata file's path, like in a plan. ``base``: the publisher's own value for the compare-and-swap.
    """

    source: str
    properties: Mapping[str, str]
    base: Any


class CommitContext(Protocol):
    """What a publisher needs of a job or a completion (``distop.behavior.JobContext``)."""

    operation: str

    @property
    def log(self) -> logging.Logger | logging.LoggerAdapter[Any]: ...

    @property
    def spark(self) -> Any: ...

    def check_cancelled(self) -> None: ...

    def check_reachable(self) -> None: ...


def commit_with_retries(attempt: Callable[[], T], context: CommitContext) -> T:
    """The result of a commit, which is attempted again after a conflict or an unknown outcome.

    ``attempt`` loads the current state of the table. If that shows the commit, or that nothing is left to commit, it
    returns the result. Otherwise it commits once, compared with that state. So an unknown outcome is settled by the
    next attempt's reading, and no commit is repeated blindly. Writers that failed together pause differently.
    Raises the last Conflict or CommitUnknown after :data:`ATTEMPTS`, and other errors of ``attempt`` at once.
    """
    backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
    for left in reversed(range(ATTEMPTS)):
        context.check_cancelled()
        try:
            return attempt()
        except (Conflict, CommitUnknown) as error:
            if not left:
                raise
            context.log.info("Could not commit to the table; loading it again: %s", error)
            Event().wait(backoff.pause())
    raise AssertionError("unreachable")


@frozen
class Candidate:
    """A data file of a plan, as the planner of a compaction sees it.

    ``partition``: the name of its partition, "" in a table without partitions. ``deletes``: the number of delete files
    or deletion vectors that apply to it. ``deleted``: the number of its rows that they delete, if that is known.
    ``values``: of the columns that partition it, as texts; None: NULL.
    """

    file: PlannedFile
    partition: str
    deletes: int = 0
    deleted: int = 0
    values: Mapping[str, str | None] = field(default_factory=dict)


@frozen
class Layout:
    """How rows are written into new files.

    ``outputs``: the number of files to aim at. ``sort_by``: columns, ascending, within the group. ``codec``: of
    Parquet; None: the table's codec (Iceberg), else the codec of the first file of the group.
    """

    outputs: int
    target_bytes: int
    sort_by: tuple[str, ...] = ()
    codec: str | None = None


@frozen
class Replacement:
    """The staged replacement of a group's files by new ones, as a stage keeps it.

    ``group``: the number of the job.
    """

    group: int
    files: int
    bytes: int
    rows: int
    deleted_rows: int
    added_files: int
    added_bytes: int
    sizes: tuple[int, ...]
    detail: Mapping[str, Any]
    """What the format needs to commit it, as JSON; ``added``: the new files."""
    stage: StagedFiles
    """The stage in which it was found. The new files must be below its folder of data."""

    @property
    def digest(self) -> str:
        """A short digest of the new files, which tells the attempts at a group apart."""
        text = json.dumps(self.detail["added"], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def record(self) -> str:
        """The durable record of this replacement, as JSON."""
        return json.dumps(self.to_json(), sort_keys=True)

    @property
    def record_digest(self) -> str:
        """The digest of the record, for the outcome of the job."""
        return hashlib.blake2b(self.record.encode(), digest_size=16).hexdigest()

    def to_json(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in _NUMBERS}
        return {**found, "sizes": list(self.sizes), "detail": dict(self.detail)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], stage: StagedFiles) -> Replacement:
        """Raises KeyError, TypeError and ValueError for other JSON."""
        numbers = {name: int(data[name]) for name in _NUMBERS}
        sizes = tuple(int(size) for size in data["sizes"])
        return cls(**numbers, sizes=sizes, detail=dict(data["detail"]), stage=stage)


_NUMBERS = ("group", "files", "bytes", "rows", "deleted_rows", "added_files", "added_bytes")


class GroupStatus(Enum):
    """The status of a replacement, or of a planned group, in a state of the table."""

    PENDING = "pending"
    """The table still has all files that it replaces, with the deletes that were applied."""
    COMMITTED = "committed"
    REPLACED = "replaced"
    """A commit of this operation has replaced the group by the files of another attempt."""
    REMOVED = "removed"
    """Another writer has removed a file that it replaces."""
    DELETED = "deleted"
    """Another writer has deleted rows of a file that it replaces."""
    EVOLVED = "evolved"
    """Another writer has changed the table's schema."""
    SWAP_REVERTED = "swap reverted"
    """The swap of files was reverted, because an old file had changed or a new one could not be moved."""
    ROLLED_BACK = "rolled back"
    """Somebody has set the table back to a state before the commit that replaced the group."""
    WITHDRAWN = "withdrawn"
    """The operation has ended, and its new files are not offered any more."""
    LOST = "lost"
    """A new file is missing or was changed before the commit."""
    DIVERGED = "diverged"
    """The table's current state does not follow from the one that was read, or that is unknown."""


@frozen
class Marks:
    """What a commit says about its origin, for people and for those that look for it.

    ``fence``: the name of the attempt that has committed, with the fencing token of its claim, or ``completion``. It is
    never compared: the compare-and-swap of the table fences the commit.
    """

    operation: str
    fence: str

    def texts(self, replacements: Sequence[Replacement]) -> dict[str, str]:
        """The marks of a commit of these replacements."""
        groups = ",".join(str(one.group) for one in replacements)
        files = ",".join(one.digest for one in replacements)
        return {OPERATION: self.operation, BATCH: groups, FILES: files, FENCE: self.fence}

    @staticmethod
    def groups_in(texts: Mapping[str, Any], operation: str) -> dict[int, str]:
        """The groups that a commit with these texts has replaced, each with the digest of its new files.

        Empty for a commit of another operation.
        """
        if texts.get(OPERATION) != operation:
            return {}
        groups, files = (str(texts.get(name) or "").split(",") for name in (BATCH, FILES))
        pairs = zip(groups, files, strict=False)
        return {int(group): digest for group, digest in pairs if group.isascii() and group.isdigit()}


OPERATION, BATCH, FILES, FENCE = "distop.operation", "distop.batch", "distop.files", "distop.fence"
"""The names of the marks: the operation, the numbers of its groups, digests of their new files, and the fence."""
COMPLETION = "completion"
"""The fence in commits of a completion."""


class FileReplacer(ABC):
    """Replaces data files of a table by files with the same rows, in commits that other writers can interrupt."""

    withdrawable = False
    """Whether offered files may be removed at any time: then a process that still commits them changes nothing."""

    def recover(self, *, change: bool) -> None:  # noqa: B027 -- most formats have nothing to do
        """Before planning: finish what an interrupted operation has left in the table.

        ``change``: False only looks, and raises InvalidArgument if there is something.
        """

    @abstractmethod
    def check(self, planned: Planned, layout: Layout) -> None:
        """Raises InvalidArgument if the files of the planned table cannot be replaced, and UnsafePath."""

    @abstractmethod
    def partition_columns(self, planned: Planned) -> Mapping[str, str]:
        """The columns that partition the table, with their types in Spark, as :attr:`Candidate.values` have them.

        Raises InvalidArgument and TableUnavailable.
        """

    @abstractmethod
    def candidates(self, planned: Planned) -> Iterator[Candidate]:
        """The data files of a plan, in its order. Raises InvalidArgument and TableUnavailable."""

    @abstractmethod
    def rewrite(self, plan: PartitionPlan, layout: Layout, stage: StagedFiles) -> Replacement:
        """Write the rows of the planned files that are not deleted into new files below the table's data.

        Raises RowsDiffer if the new files do not have exactly these rows, Gone if a file no longer exists, Unreadable,
        TableUnavailable, and Spark's errors.
        """

    @abstractmethod
    def load(self) -> Head:
        """The current state of the table, not cached. Raises InvalidArgument and TableUnavailable."""

    @abstractmethod
    def statuses(self, head: Head, replacements: Sequence[Replacement]) -> Sequence[GroupStatus]:
        """The status of each replacement in a state of the table. Raises InvalidArgument and TableUnavailable."""

    @abstractmethod
    def group_statuses(self, head: Head, plans: Sequence[PartitionPlan]) -> Sequence[GroupStatus]:
        """The same for groups of a plan, whether they are staged or not."""

    @abstractmethod
    def may_have(self, head: Head, replacements: Sequence[Replacement]) -> Sequence[bool]:
        """Whether some version of the table may have the new files of each replacement, whatever its status is.

        It may, unless all commits since the replaced files were read are known, and none of them has added the files.
        """

    @abstractmethod
    def committed_versions(self, head: Head, plan: PartitionPlan) -> Mapping[int, str]:
        """The groups that commits of this operation since a plan have replaced, each with the version of its commit.

        Without those whose commits somebody has rolled back.
        """

    @abstractmethod
    def replan_remaining(self, head: Head, plan: PartitionPlan) -> PartitionPlan | None:
        """The files of a planned group that the table still has, as planned now; None if there is nothing to replace.

        A group of fewer than two files without deleted rows is not worth another rewrite.
        """

    @abstractmethod
    def commit(self, head: Head, replacements: Sequence[Replacement], marks: Marks) -> str:
        """Replace the files of pending replacements in one commit, if the table is still ``head``; returns its version.

        Raises Conflict, CommitUnknown, StagedFileLost, TableUnavailable, UnsafePath, and InvalidArgument.
        """


class RowsDiffer(Exception):
    """New files do not have exactly the rows of the files that they replace."""


class ReplacementContext(CommitContext, Protocol):
    """What a replacer needs of a job or a completion."""

    table: TableRecord | None
    work_dir: Path
    space: str

    def status(self, text: str) -> None: ...

    def work_done(self, *, files: int = 0, bytes: int = 0) -> None: ...  # noqa: A002 -- as JobContext has it
