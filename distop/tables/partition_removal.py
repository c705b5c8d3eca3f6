"""Removal of whole partitions by value: the interface :class:`PartitionRemoval`.

The partitions of one state are listed with their values, which are never taken from the times of files. A commit, or
for a folder of files their deletion, then removes exactly the planned files, so rows that are added meanwhile stay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from distop.protocol.frozen import frozen

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from distop.protocol.plan import PartitionPlan

VALUE, HOUR, DAY, MONTH, YEAR = "value", "hour", "day", "month", "year"
"""What a partition's value stands for: itself, or the number of hours, days, months or years since 1970."""


@frozen
class ValuedPartition:
    """A partition with its value in one column.

    ``value``: None for NULL; a text, a whole number, a ``date`` or a ``datetime``. ``unit``: what it stands for;
    ``utc``: whether units are counted in UTC, whatever the zone of the rule. ``text``: the value as people write it.
    """

    plan: PartitionPlan
    value: Any
    unit: str = VALUE
    utc: bool = False
    text: str = ""


@frozen
class RemovedFiles:
    """What a removal has done.

    ``paths``: the planned files that the commit of this operation has removed; without any, there is no such commit.
    Other planned files were gone before. ``version``: of the table after the commit, else the current one.
    """

    paths: frozenset[str]
    version: str


class PartitionRemoval(ABC):
    """One state of a table whose partitions can be removed."""

    state: str
    """As in ``Reachability``."""
    deletes_files: bool = False
    """Whether the format has no commits: a partition is removed by deleting its planned files, and :meth:`remove` is
    not called.
    """
    unpartitioned: int = 0
    """After :meth:`partitions`: the number of files that are not partitioned by the column."""

    @abstractmethod
    def partitions(self, column: str) -> Iterator[ValuedPartition]:
        """The partitions with their values. Raises InvalidArgument for a column that does not partition the table."""

    @abstractmethod
    def remove(self, paths: Collection[str], planned: PartitionPlan) -> RemovedFiles:
        """Remove these files from the current state in one commit, without deleting them.

        ``planned``: a planned partition, which knows the planned state of the table. If a commit of this operation
        after that state has removed files, nothing is committed, and that commit is returned, also if somebody has set
        the table back since. So an unknown outcome is settled by reading. Files that the table no longer has are left
        out. Raises Conflict if others always committed first, and the errors of a publisher.
        """
